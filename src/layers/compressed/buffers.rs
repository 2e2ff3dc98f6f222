//! Buffers of attention to compressed blocks.

use crate::arch::KV_BLOCK;
use crate::compute::arena::{Frame, counted};
use crate::layers::compressed::blocks::Blocks;
use crate::layers::compressed::spec::CompressedSpec;
use crate::layers::context::Context;
use crate::layers::rows::{Rows, SlotSize, SlotView};

/// Buffers: `m_kv` rows for keys, `m` rows for the rest.
pub(super) struct Buffers<'a> {
    /// Keys, and as computed by their matrix: `(m_kv, head_dim)`.
    pub(super) kv: &'a mut [f32],
    pub(super) raw: &'a mut [f32],
    /// Low-rank queries, `(m, q_rank)`, before and after their norm.
    pub(super) low: &'a mut [f32],
    pub(super) low_normed: &'a mut [f32],
    /// Queries and outputs, `(m, n_head·head_dim)`.
    pub(super) q: &'a mut [f32],
    pub(super) out: &'a mut [f32],
    /// Outputs of a group, and products with them; those of all groups.
    pub(super) grouped: &'a mut [f32],
    pub(super) of_group: &'a mut [f32],
    pub(super) mixed: &'a mut [f32],
    pub(super) blocks: Blocks<'a>,
    pub(super) index: Blocks<'a>,
    pub(super) index_q: &'a mut [f32],
    pub(super) index_weights: &'a mut [f32],
    /// Scores of the entries for a row, and those chosen.
    pub(super) scores: &'a mut [f32],
    pub(super) chosen: &'a mut [u32],
}

impl<'a> Buffers<'a> {
    fn take<'k>(
        frame: &mut Frame<'a>,
        spec: &CompressedSpec,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        rows: Rows,
    ) -> Buffers<'a> {
        let m_kv: usize = slots.clone().map(|slot| slot.n_tokens).sum();
        let m: usize = slots.clone().map(|slot| rows.n(&slot)).sum();
        let longest = slots.map(|slot| slot.n_past + slot.n_tokens).max();
        let (d, n_out) = (spec.head_dim, spec.n_head * spec.head_dim);
        let index = spec.blocks.and_then(|blocks| Some((blocks, blocks.index?)));
        let [index_q, index_weights, scores, chosen] = index.map_or([0; 4], |(blocks, index)| {
            // Rounded up, so that a sequence that grows seldom needs more room.
            let n_pages = longest.unwrap_or(0).div_ceil(KV_BLOCK).next_power_of_two();
            let n_entries = n_pages * KV_BLOCK / blocks.ratio;
            // Where all entries are seen, none are chosen.
            let n_chosen = if n_entries > index.top_k {
                index.top_k
            } else {
                0
            };
            [
                m * index.n_head * index.head_dim,
                m * index.n_head,
                n_entries,
                n_chosen,
            ]
        });
        let of_index = index.map(|(blocks, index)| (blocks, index.head_dim));
        Buffers {
            kv: frame.take(m_kv * d),
            raw: frame.take(m_kv * d),
            low: frame.take(m * spec.q_rank),
            low_normed: frame.take(m * spec.q_rank),
            q: frame.take(m * n_out),
            out: frame.take(m * n_out),
            grouped: frame.take(m * n_out / spec.n_out_group),
            of_group: frame.take(m * spec.out_rank),
            mixed: frame.take(m * spec.out_rank * spec.n_out_group),
            blocks: Blocks::take(frame, spec.blocks.map(|blocks| (blocks, d)), m_kv),
            index: Blocks::take(frame, of_index, m_kv),
            index_q: frame.take(index_q),
            index_weights: frame.take(index_weights),
            scores: frame.take(scores),
            chosen: frame.take(chosen),
        }
    }

    /// Those of the rows that a layer computes.
    pub(super) fn of(
        cx: &Context<'_, '_>,
        spec: &CompressedSpec,
        inner: &'a mut [u8],
    ) -> Buffers<'a> {
        let sizes = cx.slots.iter().map(SlotView::size);
        Buffers::take(&mut Frame::of(inner), spec, sizes, cx.rows)
    }
}

/// Bytes of its buffers for slots of these sizes.
pub(crate) fn bytes<'k>(
    spec: &CompressedSpec,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
) -> usize {
    let of = |rows: Rows| counted(|frame| Buffers::take(frame, spec, slots.clone(), rows));
    of(Rows::All).max(of(Rows::Outputs))
}
