//! Texts that a model's encoder reads for its decoder.

use crate::compute::hook::TokenKind;
use crate::compute::linear::{Ctx, Product, linear};
use crate::compute::probe::NoCallback;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::forward::sizes::with_scratch;
use crate::kv::KvType;
use crate::layers::cross::memory::{LayerMemory, Memory};
use crate::layers::outputs::Outputs;

impl Engine {
    /// What the model's encoder leaves of a text: keys and values of all layers that read them.
    pub(crate) fn memory_of(
        &self,
        tokens: &[u32],
        cancel: &CancelToken,
    ) -> Result<Memory, SessionError> {
        self.cpu_only("an encoder")?;
        let model = self.model();
        let encoder = model.encoder().ok_or(SessionError::NoEncoder)?;
        let n_ctx = encoder.hparams().n_ctx_train;
        if tokens.len() > n_ctx {
            return Err(SessionError::ContextFull {
                n_ctx,
                n_past: 0,
                n_new: tokens.len(),
            });
        }
        let engine = self.for_block(encoder, u64::MAX);
        // Keys and values are temporary, so they can have full precision.
        let mut seq = engine.sequence(&SessionOptions {
            n_ctx: Some(tokens.len().max(1)),
            kv_type: KvType::F32,
            ..SessionOptions::default()
        })?;
        let mut outputs = Outputs::default();
        let slot = Slot::new(&mut seq, tokens, TokenKind::Prompt).outputs_from(0);
        let slots = &mut [slot.keeping_kind()];
        engine.states(slots, &mut outputs, cancel, &mut NoCallback)?;
        let (states, m) = (&outputs.states[..], tokens.len());
        let mut layers = Vec::new();
        self.enter(cancel, |threads, arena| {
            with_scratch(model, threads, arena, m, |scratch| {
                let ctx = Ctx::without_adapters(model.arch(), threads, model.gguf(), m);
                for w in model
                    .weights()
                    .layers
                    .iter()
                    .filter_map(|w| w.cross.as_ref())
                {
                    let room = |n_out: usize| vec![0.0; m * n_out];
                    let (mut k, mut v) = (room(w.k.w.n_out), room(w.v.w.n_out));
                    let products =
                        &mut [Product::of(&w.k, &mut k, m), Product::of(&w.v, &mut v, m)];
                    linear(ctx, scratch, states, m, products);
                    layers.push(LayerMemory { k, v });
                }
            })
        })??;
        Ok(Memory { layers })
    }
}
