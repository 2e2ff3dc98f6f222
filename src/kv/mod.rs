//! Key/value cache: sequences of pages from a pool.
//!
//! A page holds 64 positions of one *cache group*, the layers with the same window and head shape:
//! for each of them keys `(n_head_kv, 64, head_dim)`, then values `(n_head_kv, 64, head_dim_v)`, in
//! the precision of its *tier*. Pages are reference-counted, so that a fork only copies block
//! tables; a sequence that writes to a shared page copies it first.
//!
//! If precision depends on age, a group has a block table for each tier (`Form` in
//! the code). The tier in which page `i` reads page `j` depends on `i - j` alone. A page is
//! converted to its next tier in the first forward pass that reads it there, and the previous tier
//! is dropped when no later query reads it: the values that a query reads never depend on how
//! tokens were split into forward passes.
//!
//! Recurrent layers have a state instead, which every token changes: one page for all of them
//! (`sequence/recurrent.rs`).

mod centres;
mod error;
mod file_cache;
mod folder;
pub mod hash;
mod layout;
mod page;
mod pool;
mod prefix;
mod sequence;

pub(crate) use centres::{KeyCentres, LayerCentre};
pub use error::{KvError, KvPart};
#[cfg(feature = "vision")]
pub(crate) use file_cache::FileCache;
pub(crate) use folder::PrefixFolder;
pub(crate) use hash::{SEED, mix};
pub(crate) use layout::{CellShape, KvLayout, KvUse, LayerShape};
pub(crate) use page::{Counted, Lent, Reserved};
pub use page::{DeviceMemory, PageMemory, SeparateMemory};
pub use pool::{KvPool, PoolStats};
pub use prefix::PrefixStats;
pub(crate) use prefix::{CachedToken, DEFAULT_PREFIX_BUDGET, ImageKey, PrefixKey};
pub use sequence::{CellPlace, PagePlace, StatePage};
pub(crate) use sequence::{KvCheckpoint, KvState, SeqKv};

pub(crate) use crate::arch::KvType;

/// Precision of keys and values.
///
/// Keys and values below 8 bits are stored multiplied by a Hadamard matrix, which spreads outliers
/// in one dimension of a head over all of them; queries and outputs of attention are multiplied by
/// it, too, so that results do not change. Of keys, what those of a layer have in common is left out, and
/// added to their scores: for that a model computes 64 tokens before the first such sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KvPolicy {
    /// Precision of keys.
    pub k: KvType,
    /// Precision of values.
    pub v: KvType,
    /// Lower precision for older tokens, in layers without a window. Both precisions above must be
    /// [`KvType::F16`] then.
    pub tiers: Option<KvTiers>,
}

impl KvPolicy {
    /// The part that GPUs cannot read, if any: they have kernels for f16, q8_0, q6_0, q5_0 and
    /// q4_0.
    pub fn not_on_gpu(&self) -> Option<&'static str> {
        let KvPolicy { k, v, tiers } = *self;
        match [k, v] {
            _ if tiers.is_some() => Some("keys and values whose precision depends on age"),
            [KvType::F32, _] | [_, KvType::F32] => Some("keys and values in f32"),
            [KvType::Bf16, _] | [_, KvType::Bf16] => Some("keys and values in bf16"),
            _ => None,
        }
    }
}

impl From<KvType> for KvPolicy {
    /// The same precision for keys and values of any age.
    fn from(kind: KvType) -> KvPolicy {
        KvPolicy {
            k: kind,
            v: kind,
            tiers: None,
        }
    }
}

impl std::fmt::Display for KvPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let KvPolicy { k, v, tiers } = self;
        write!(f, "{k}")?;
        if v != k {
            write!(f, "/{v}")?;
        }
        tiers.map_or(Ok(()), |KvTiers { recent, middle }| {
            write!(f, ", tiers {recent},{middle}")
        })
    }
}

/// Bytes of keys and values by their precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvBytes([u64; KvType::ALL.len()]);

impl KvBytes {
    /// Bytes in one precision.
    pub fn of(&self, kind: KvType) -> u64 {
        self.0[kind as usize]
    }

    /// All precisions in use with their bytes, the most precise first.
    pub fn iter(&self) -> impl Iterator<Item = (KvType, u64)> + '_ {
        KvType::ALL
            .into_iter()
            .map(|kind| (kind, self.of(kind)))
            .filter(|&(_, bytes)| bytes > 0)
    }

    /// Bytes in any precision.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    fn add(&mut self, kind: KvType, bytes: u64) {
        self.0[kind as usize] += bytes;
    }

    fn take(&mut self, kind: KvType, bytes: u64) {
        self.0[kind as usize] -= bytes;
    }
}

/// Precision tiers by distance from a query: the first page and the `recent` last tokens are
/// [`KvType::F16`], those up to `middle` before the query [`KvType::Q8`], all others
/// [`KvType::Q4`].
///
/// Distances are counted in pages of 64 tokens: all queries of a page read another page in the same
/// precision, which depends only on the distance between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvTiers {
    /// Tokens, rounded up to pages. Default 256.
    pub recent: usize,
    /// Tokens, rounded up to pages; at least `recent`. Default 2048.
    pub middle: usize,
}

impl Default for KvTiers {
    fn default() -> KvTiers {
        KvTiers {
            recent: 256,
            middle: 2048,
        }
    }
}
