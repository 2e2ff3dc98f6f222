//! Attention of rows that see chosen positions.

use crate::arch::{AttnParams, AttnPartial};
use crate::compute::tiles::Tiles;
use crate::layers::attention::attend::{AttnLayer, attn_params, groups};
use crate::layers::indexer::selection::Selection;
use crate::layers::rows::SlotView;

/// Most query heads of a row that a task takes.
const HEADS: usize = 16;

impl AttnLayer<'_> {
    /// [`AttnLayer::attend`] for rows that see the positions of `selection` alone. All rows have the
    /// arithmetic of generated tokens.
    pub(super) fn attend_chosen(
        &self,
        slots: &[SlotView<'_>],
        selection: &Selection<'_>,
        mut q_by_head: &[f32],
        mut out_by_head: &mut [f32],
        tiles: &mut Tiles<'_>,
    ) {
        let spec = self.spec;
        let n_group = spec.n_group();
        let n_q = (1..=HEADS.min(n_group))
            .rev()
            .find(|n| n_group.is_multiple_of(*n))
            .unwrap_or(1);
        let (d, d_v) = (spec.head_dim, spec.head_dim_v);
        let per_row = n_group / n_q;
        for group in groups(spec, self.rows, slots) {
            let (q, out);
            (q, q_by_head) = q_by_head.split_at(group.m_padded * spec.n_q());
            (out, out_by_head) = out_by_head.split_at_mut(group.m_padded * spec.n_out());
            tiles.each(1, 1, |_| {
                self.threads.for_chunks(out, n_q * d_v, |task, out| {
                    let (of_row, part) = (task / per_row, task % per_row);
                    let (slot, head, j) = group.place(of_row, spec.n_head_kv);
                    if j < group.n_rows {
                        let q = &q[task * n_q * d..][..n_q * d];
                        let heads = (head, head * n_group + part * n_q);
                        self.chosen(slot, selection, j, heads, q, out);
                    }
                });
            });
            if tiles.is_paused() {
                return;
            }
        }
    }

    /// Some query heads, the first of which is `first_head`, of KV head `head`, in row `j` of a slot.
    fn chosen(
        &self,
        slot: &SlotView<'_>,
        selection: &Selection<'_>,
        j: usize,
        (head, first_head): (usize, usize),
        q: &[f32],
        out: &mut [f32],
    ) {
        let (first, row, _) = self.rows.of(slot);
        let n_q = q.len() / self.spec.head_dim;
        let (mut max, mut sum) = ([0.0; HEADS], [0.0; HEADS]);
        let mut total = AttnPartial {
            out,
            max: &mut max[..n_q],
            sum: &mut sum[..n_q],
        };
        total.clear();
        if let Some(sinks) = self.sinks {
            total.max.copy_from_slice(&sinks[first_head..][..n_q]);
            total.sum.fill(1.0);
        }
        let params = AttnParams {
            exact: true,
            ..attn_params(self.spec, head, true)
        };
        let at = (self.i, head);
        match selection.of(row + j, head) {
            None => {
                let range = (0, (slot.pos() + first + j + 1) as u32);
                for piece in slot.kv.pieces(self.i, range) {
                    let ranges = &[range; HEADS][..n_q];
                    slot.kv
                        .attention(self.arch, at, piece, &mut total, q, ranges, &params);
                }
            }
            Some(positions) => {
                let positions = positions.iter().copied();
                slot.kv
                    .attention_at(self.arch, at, positions, &mut total, q, &params);
            }
        }
        slot.kv
            .finish_attention(self.arch, self.i, &mut total, &params);
    }
}
