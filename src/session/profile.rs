//! Session options for common uses.

use crate::engine::options::SessionOptions;
use crate::kv::{KvTiers, KvType};
use crate::layers::hparams::Hparams;

/// A use with a context and a precision of keys and values that suit it; `docs/guide/memory.md` has
/// the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profile {
    /// 4,096 tokens in half precision.
    Chat,
    /// 16,384 tokens, less precise the farther back they are.
    LongChat,
    /// 32,768 tokens in 8 bits.
    Document,
    /// 16,384 tokens, keys in half precision, values in 8 bits.
    Code,
}

impl Profile {
    /// All of them.
    pub const ALL: [Profile; 4] = [
        Profile::Chat,
        Profile::LongChat,
        Profile::Document,
        Profile::Code,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Chat => "chat",
            Profile::LongChat => "long-chat",
            Profile::Document => "document",
            Profile::Code => "code",
        }
    }

    /// Options of a session with a model of these hyper-parameters. The context is at most as long
    /// as the model was trained for.
    pub fn options(self, h: &Hparams) -> SessionOptions {
        let (n_ctx, k, v, tiers) = match self {
            Profile::Chat => (4096, KvType::F16, KvType::F16, None),
            Profile::LongChat => (16384, KvType::F16, KvType::F16, Some(KvTiers::default())),
            Profile::Document => (32768, KvType::Q8, KvType::Q8, None),
            Profile::Code => (16384, KvType::F16, KvType::Q8, None),
        };
        SessionOptions {
            n_ctx: Some(h.n_ctx_train.min(n_ctx)),
            kv_type: k,
            kv_type_v: Some(v),
            kv_tiers: tiers,
            ..Default::default()
        }
    }
}

impl std::str::FromStr for Profile {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Profile, &'static str> {
        let found = Profile::ALL
            .into_iter()
            .find(|preset| preset.name() == name);
        found.ok_or("expected chat, long-chat, document or code")
    }
}
