//! Buffers of attention.

use crate::arch::AttnPartial;
use crate::compute::arena::{Frame, counted};
use crate::layers::attention::latent::LatentBuffers;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::context::Context;
use crate::layers::indexer::IndexBuffers;
use crate::layers::rows::{Rows, SlotSize, SlotView};

/// Query rows that one attention task handles at a time.
const ATTN_ROWS: usize = 128;

/// Buffers of attention; keys and values have `m_kv` rows, the other buffers `m`.
pub(super) struct AttnBuffers<'a> {
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// Queries and outputs by set of query heads, slot by slot: `(n_set, m_padded, n_together,
    /// head_dim)`.
    pub(super) q_by_head: &'a mut [f32],
    pub(super) out_by_head: &'a mut [f32],
    pub(super) attn: &'a mut [f32],
    /// Products of the gate, and the gated output.
    pub(super) gate: &'a mut [f32],
    pub(super) gated: &'a mut [f32],
    /// Queries and gates as they come from their matrix.
    pub(super) q_gate: &'a mut [f32],
    pub(super) latent: LatentBuffers<'a>,
    pub(super) index: IndexBuffers<'a>,
    /// Partial results of slots with one row: an [`AttnPartial`] for each of `(slot, n_set, n_pieces)`.
    pub(super) partials: &'a mut [f32],
}

/// Sizes of [`AttnBuffers`].
#[derive(Clone, Copy)]
struct AttnSizes {
    m_kv: usize,
    m: usize,
    /// The number of rows, padded slot by slot to whole tiles.
    m_padded: usize,
    /// Number of slots with one row, times the pieces of the longest sequence.
    n_partials: usize,
    /// Positions of the longest sequence.
    longest: usize,
}

impl AttnSizes {
    fn of<'k>(
        spec: &AttnSpec,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        rows: Rows,
    ) -> AttnSizes {
        let sizes = || slots.clone().map(|slot| rows.n(&slot)).filter(|&n| n > 0);
        let longest = slots
            .clone()
            .map(|slot| slot.n_past + slot.n_tokens)
            .max()
            .unwrap_or(0);
        let n_pieces = slots
            .clone()
            .map(|slot| slot.layout.max_pieces(longest))
            .max()
            .unwrap_or(0);
        AttnSizes {
            m_kv: slots.clone().map(|slot| slot.n_tokens).sum(),
            m: sizes().sum(),
            m_padded: sizes().map(|n| attn_tiles(spec, n).1).sum(),
            n_partials: sizes().filter(|&n| n == 1).count() * n_pieces,
            longest,
        }
    }
}

impl<'a> AttnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, spec: &AttnSpec, sizes: AttnSizes) -> AttnBuffers<'a> {
        let AttnSizes {
            m_kv,
            m,
            m_padded,
            n_partials,
            longest,
        } = sizes;
        let (n_q, n_attn) = (spec.n_q(), spec.n_out());
        AttnBuffers {
            q: frame.take(m * n_q),
            k: frame.take(m_kv * spec.n_k()),
            v: frame.take(m_kv * spec.n_v()),
            q_by_head: frame.take(m_padded * n_q),
            out_by_head: frame.take(m_padded * n_attn),
            attn: frame.take(m * n_attn),
            gate: frame.take(m * spec.n_gate()),
            gated: frame.take(
                if spec.gate_by_head || spec.gate_softplus || spec.sub_norm {
                    m * spec.n_mixed()
                } else {
                    0
                },
            ),
            q_gate: frame.take(if spec.gate_in_q { 2 * m * n_q } else { 0 }),
            latent: LatentBuffers::take(frame, spec, m_kv, m),
            index: IndexBuffers::take(frame, spec.index.as_ref(), (m_kv, m), longest),
            partials: frame.take(n_partials * AttnPartial::len(spec.n_head, spec.head_dim_v)),
        }
    }

    /// Those of the rows that a layer computes, as the step before left them in `inner`.
    pub(super) fn of(
        cx: &Context<'_, '_>,
        spec: &AttnSpec,
        inner: &'a mut [u8],
    ) -> AttnBuffers<'a> {
        let sizes = AttnSizes::of(spec, cx.slots.iter().map(SlotView::size), cx.rows);
        AttnBuffers::take(&mut Frame::of(inner), spec, sizes)
    }
}

/// Bytes of its buffers for slots of these sizes.
pub(crate) fn bytes<'k>(
    spec: &AttnSpec,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
) -> usize {
    // Where a prompt's last row alone is left, it is taken like the row of a slot with one.
    let of = |rows: Rows| {
        let sizes = AttnSizes::of(spec, slots.clone(), rows);
        counted(|frame| AttnBuffers::take(frame, spec, sizes))
    };
    of(Rows::All).max(of(Rows::Outputs))
}

/// Tokens per attention task, and the padded number of tokens, which is never 0.
pub(crate) fn attn_tiles(spec: &AttnSpec, m: usize) -> (usize, usize) {
    let m = m.max(1);
    let tile = (ATTN_ROWS / spec.n_together()).clamp(1, m);
    (tile, m.next_multiple_of(tile))
}
