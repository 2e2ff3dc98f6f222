//! The output head between passes, for what is learnt or measured after the last norm.

use crate::compute::linear::{Ctx, Product, linear};
use crate::compute::weight::Weight;
use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::forward::sizes::with_scratch;
use std::ops::Range;

/// The matrix of a model's output head, `(n_vocab, n_embd)`, outside of forward passes: rows by
/// token, and products.
#[derive(Clone, Copy, Debug)]
pub struct OutputHead<'e> {
    engine: &'e Engine,
}

impl Engine {
    /// The output head of the model.
    pub fn output_head(&self) -> OutputHead<'_> {
        OutputHead { engine: self }
    }

    /// Parallel work between two passes: calls `f` with the index and the values of each chunk of
    /// `len` values, on the engine's threads, after the passes and calls that came earlier. The
    /// last chunk may be shorter. `f` must not call the engine, which waits for it.
    ///
    /// # Errors
    /// None so far: the call cannot be cancelled.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn for_chunks(
        &self,
        values: &mut [f32],
        len: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<(), SessionError> {
        self.enter(&CancelToken::default(), |threads, _| {
            threads.for_chunks(values, len, f);
        })
    }
}

impl<'e> OutputHead<'e> {
    fn weight(self) -> &'e Weight {
        &self.engine.model().weights().output.w
    }

    fn bytes(self, token: u32) -> &'e [u8] {
        let w = self.weight();
        let row = w.row_bytes();
        &w.data(self.engine.model().gguf())[token as usize * row..][..row]
    }

    /// Values of a token's row, dequantised into `values`, `(n_embd)`.
    ///
    /// # Panics
    /// If the token is not in the vocabulary, or `values` has another length than a row.
    pub fn row(self, token: u32, values: &mut [f32]) {
        let arch = self.engine.model().arch();
        arch.dequantize(self.weight().dtype, self.bytes(token), values);
    }

    /// Request to load a token's row into the cache.
    ///
    /// # Panics
    /// If the token is not in the vocabulary.
    pub fn prefetch(self, token: u32) {
        self.engine.model().arch().prefetch(self.bytes(token));
    }

    /// Products `y = x·Wᵀ` of the rows of `tokens`, in the arithmetic of generated tokens: `x` is
    /// `(m, n_embd)`, `y` `(m, tokens.len())`. Computed between two passes, as
    /// [`Engine::for_chunks`].
    ///
    /// # Errors
    /// If there is no memory for the buffers.
    ///
    /// # Panics
    /// If a token is not in the vocabulary, or the lengths do not fit together.
    pub fn product(
        self,
        tokens: Range<usize>,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), SessionError> {
        let (engine, model) = (self.engine, self.engine.model());
        assert!(
            tokens.end <= self.weight().n_out,
            "a token outside of the vocabulary"
        );
        let w = self.weight().rows(tokens);
        let m = x.len() / w.n_in;
        engine.enter(&CancelToken::default(), |threads, arena| {
            let ctx = Ctx::without_adapters(model.arch(), threads, model.gguf(), m);
            with_scratch(model, threads, arena, m, |scratch| {
                linear(ctx, scratch, x, m, &mut [Product::of_weight(&w, y, m)]);
            })
        })??;
        Ok(())
    }
}
