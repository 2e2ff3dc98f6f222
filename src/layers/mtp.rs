//! Inputs of a block for multi-token prediction: `proj·[norm(embedding); norm(state)]`, where the
//! state is the one from which the model predicted the token.

use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowAdapters};
use crate::compute::weight::Linear;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::norm::norm_row;
use crate::layers::norm::weights::Norm;

/// Weights that make the inputs of a block for multi-token prediction: `proj·[norm(embedding);
/// norm(state)]`.
#[derive(Clone, Debug)]
pub(crate) struct MtpInput {
    pub(crate) embd_norm: Norm,
    pub(crate) state_norm: Norm,
    pub(crate) proj: Linear,
}

/// Normed embeddings and states side by side, `(m, 2·n_embd)`.
pub(crate) struct MtpBuffers<'a>(&'a mut [f32]);

impl<'a> MtpBuffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> MtpBuffers<'a> {
        MtpBuffers(frame.take(if h.is_mtp { 2 * m * h.n_embd } else { 0 }))
    }

    /// Replaces the embeddings of tokens in `x` by the inputs.
    pub(crate) fn begin(&mut self, cx: &mut Context<'_, '_>, w: &MtpInput, x: &mut [f32]) {
        let (arch, h, n) = (cx.arch, cx.h, cx.h.n_embd);
        let (m, slots, embeddings) = (x.len() / n, &cx.slots, &*x);
        cx.threads
            .when(m > 1)
            .for_chunks(self.0, 2 * n, |row, both| {
                let (slot, _) = slots.token(row);
                let (embd, state) = both.split_at_mut(n);
                let of_token = &slot.states[(row - slot.row) * n..][..n];
                norm_row(arch, h, &w.embd_norm, &embeddings[row * n..][..n], embd);
                norm_row(arch, h, &w.state_norm, of_token, state);
            });
        let mut on = cx.of_all();
        on.ctx.adapters = RowAdapters::All(&[]);
        on.linear(self.0, m, &mut [Product::of(&w.proj, x, m)]);
    }
}
