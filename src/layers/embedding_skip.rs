//! Embeddings that are added to the residual stream again behind every layer (Talkie).

use crate::compute::arena::Frame;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;

/// The embeddings of the rows of a pass, `(m, n_embd)`, if a layer adds them.
pub(crate) struct EmbeddingSkip<'a>(&'a mut [f32]);

impl<'a> EmbeddingSkip<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> EmbeddingSkip<'a> {
        let has_skip = h.layers.iter().any(|layer| layer.embd_skip);
        EmbeddingSkip(frame.take(if has_skip { m * h.n_embd } else { 0 }))
    }

    /// Keeps the embeddings `x`.
    pub(crate) fn begin(&mut self, x: &[f32]) {
        if !self.0.is_empty() {
            self.0.copy_from_slice(x);
        }
    }

    /// Keeps only the rows that the last layer computes.
    pub(crate) fn gather(&mut self, cx: &Context<'_, '_>) {
        if !self.0.is_empty() {
            cx.gather(self.0, cx.h.n_embd);
        }
    }

    /// `x += factor · embeddings`.
    pub(crate) fn add(&self, cx: &Context<'_, '_>, factor: f32, x: &mut [f32]) {
        let (arch, n) = (cx.arch, cx.h.n_embd);
        cx.threads.when(x.len() > n).for_chunks(x, n, |row, x| {
            arch.add_scaled(x, &self.0[row * n..][..n], factor);
        });
    }
}
