//! Attention of rows whose scores are biased by the distance of positions.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::{AttnParams, AttnPartial};
use crate::compute::tiles::Tiles;
use crate::layers::attention::attend::{AttnLayer, attn_params, groups};
use crate::layers::attention::relative::weights::Biases;
use crate::layers::rows::SlotView;
use std::ops::Range;

impl AttnLayer<'_> {
    /// [`AttnLayer::attend`] with biases. All rows have the arithmetic of generated tokens.
    pub(super) fn attend_biased(
        &self,
        slots: &[SlotView<'_>],
        biases: Biases<'_>,
        mut q_by_head: &[f32],
        mut out_by_head: &mut [f32],
        tiles: &mut Tiles<'_>,
    ) {
        let spec = self.spec;
        for group in groups(spec, self.rows, slots) {
            let (q, out);
            (q, q_by_head) = q_by_head.split_at(group.m_padded * spec.n_q());
            (out, out_by_head) = out_by_head.split_at_mut(group.m_padded * spec.n_out());
            tiles.each(1, 1, |_| {
                self.threads.for_chunks(out, spec.head_dim_v, |task, out| {
                    let (slot, head, j) = group.place(task, spec.n_head);
                    if j < group.n_rows {
                        let q = &q[task * spec.head_dim..][..spec.head_dim];
                        self.biased(slot, biases, (head, j), q, out);
                    }
                });
            });
            if tiles.is_paused() {
                return;
            }
        }
    }

    /// Query head `head` of row `j` of a slot. The keys of a bucket have one bias: it is added by
    /// taking it from the largest score so far.
    fn biased(
        &self,
        slot: &SlotView<'_>,
        biases: Biases<'_>,
        (head, j): (usize, usize),
        q: &[f32],
        out: &mut [f32],
    ) {
        let (mut max, mut sum) = ([0.0], [0.0]);
        let mut total = AttnPartial {
            out,
            max: &mut max,
            sum: &mut sum,
        };
        total.clear();
        let params = AttnParams {
            exact: true,
            ..attn_params(self.spec, head, true)
        };
        let position = slot.pos() + self.rows.of(slot).0 + j;
        let (start, end) = self.range(slot, j);
        let at = (self.i, self.spec.kv_head(head));
        let mut add = |keys: Range<usize>, bucket: usize| {
            let bias = biases.values[bucket * self.spec.n_head + head];
            let range = (keys.start as u32, keys.end as u32);
            total.max[0] -= bias;
            for piece in slot.kv.pieces(self.i, range) {
                slot.kv
                    .attention(self.arch, at, piece, &mut total, q, &[range], &params);
            }
            total.max[0] += bias;
        };
        let keys = start as usize..end as usize;
        biases.spec.runs(position, keys, self.spec.causal, &mut add);
        slot.kv
            .finish_attention(self.arch, self.i, &mut total, &params);
    }
}
