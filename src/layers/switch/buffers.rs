//! Buffers of adapters that tokens choose.

use crate::compute::arena::Frame;
use crate::layers::hparams::Hparams;

/// Adapters of the rows of a pass, and room for a term.
#[derive(Default)]
pub(crate) struct SwitchBuffers<'a> {
    /// The adapter of each row; of all rows, and of those that the last layer computes.
    pub(super) chosen: &'a mut [f32],
    pub(super) chosen_last: &'a mut [f32],
    /// What a token feeds the choice with, and room of the recurrence.
    pub(super) feed: &'a mut [f32],
    pub(super) room: &'a mut [f32],
    /// `A·x`, `(m, rank)`, and `B·A·x`.
    pub(super) low: &'a mut [f32],
    pub(super) term: &'a mut [f32],
}

impl<'a> SwitchBuffers<'a> {
    /// For `m` rows.
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> SwitchBuffers<'a> {
        let (m, rank) = h.switch.as_ref().map_or((0, 0), |spec| (m, spec.rank));
        let widest = h.attention().map(|attn| attn.n_q().max(attn.n_v()));
        let n_ff = h.layers.iter().map(|layer| layer.ffn.n_ff());
        let widest = widest.chain(n_ff).fold(h.n_embd, usize::max);
        SwitchBuffers {
            chosen: frame.take(m),
            chosen_last: frame.take(m),
            feed: frame.take(m),
            room: frame.take(m),
            low: frame.take(m * rank),
            term: frame.take(m * widest),
        }
    }
}
