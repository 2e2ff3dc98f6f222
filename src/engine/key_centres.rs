//! What keys of a model have in common, found by a pass over a text.

use crate::compute::hook::TokenKind;
use crate::compute::probe::{EvalCallback, HookPoint};
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::kv::{KeyCentres, LayerCentre};
use crate::layers::Outputs;
use crate::layers::rope::RopeTables;
use std::sync::Arc;

/// Tokens that are computed. With 512 keys lose hardly less: docs/lab/memory.md.
const N_TOKENS: usize = 64;
/// What they say, as far as it takes: prose, names, numbers and code.
const TEXT: &str = "The river rose two metres on Monday, 14 March, and Anna wrote to the station in \
Leeds: \"Please open both gates before noon.\" Then fn main() { let x = [1, 2, 3]; println!(\"{x:?}\"); } \
was all that the screen said. Why did nobody answer? They had left; the answer came a day later.";
/// Prime, so that numbers of tokens are spread over any vocabulary.
const STEP: u32 = 7919;

/// Keys of layers, `(tokens, n_head_kv, head_dim)`.
struct Keys(Vec<Vec<f32>>);

impl EvalCallback for Keys {
    fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]) {
        if let (HookPoint::K, Some(keys)) = (tap, self.0.get_mut(layer)) {
            keys.extend_from_slice(values);
        }
    }

    fn sees_all_rows(&self) -> bool {
        true
    }
}

impl Engine {
    /// What keys have in common, which is not stored of those of few bits; found once. GPUs store it.
    pub(super) fn centres(&self) -> Option<Arc<KeyCentres>> {
        let known = self.known_centres();
        known
            .get_or_init(|| key_centres(self).map(Arc::new))
            .clone()
    }
}

/// The centres of layers whose scores are products of queries and keys alone. None where none has any,
/// and of models that cannot read a text by itself.
fn key_centres(engine: &Engine) -> Option<KeyCentres> {
    let model = engine.model();
    let h = model.hparams();
    let n = N_TOKENS.min(h.n_ctx_train);
    let text = model
        .tokenizer()
        .map(|tokenizer| tokenizer.encode(TEXT, true, false));
    let mut tokens = text.unwrap_or_default();
    let n_vocab = h.n_vocab.max(1) as u32;
    tokens.extend((tokens.len() as u32..n as u32).map(|i| i.wrapping_mul(STEP) % n_vocab));
    tokens.truncate(n);
    let keys = keys(engine, &tokens).ok()?;
    let ropes = &keys.1;
    let mut found = false;
    // Of layers that share keys, the one that stores them.
    let layers =
        (0..h.layers.len()).filter(|&i| h.layers[i].attention().is_some_and(|a| !a.shares_kv));
    let layers = layers.map(|i| {
        let (spec, keys) = (h.layers[i].attention()?, &keys.0.0[i]);
        let is_plain = spec.softcap.is_none()
            && spec.latent.is_none()
            && spec.index.is_none()
            && spec.relative.is_none()
            && keys.len() == tokens.len() * spec.n_k();
        if !is_plain || keys.iter().any(|k| !k.is_finite()) {
            return None;
        }
        found = true;
        let pairs = spec.rope.map_or(Vec::new(), |id| ropes.turned(id));
        Some(LayerCentre::new(spec.head_dim, spec.n_head_kv, pairs, keys))
    });
    let layers = layers.collect();
    found.then(|| KeyCentres::new(model.arch(), layers))
}

fn keys(engine: &Engine, tokens: &[u32]) -> Result<(Keys, Arc<RopeTables>), SessionError> {
    let options = SessionOptions {
        n_ctx: Some(tokens.len()),
        ..Default::default()
    };
    let mut seq = engine.sequence(&options)?;
    let mut keys = Keys(vec![Vec::new(); engine.model().hparams().layers.len()]);
    let ropes = seq.rope.clone();
    let slot = Slot::new(&mut seq, tokens, TokenKind::Prompt);
    let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
    engine.pass(&mut [slot], &mut outputs, false, &cancel, &mut keys)?;
    Ok((keys, ropes))
}
