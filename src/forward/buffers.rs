//! The buffers of a forward pass, which are its memory plan.

use crate::arch::AttnPartial;
use crate::compute::arena::{Frame, counted};
use crate::compute::linear::Scratch;
use crate::forward::ATTN_ROWS;
use crate::forward::sizes::Sizes;
use crate::layers::altup::Streams;
use crate::layers::latent::LatentBuffers;
use crate::layers::moe::single_rows;
use crate::layers::recurrent;
use crate::layers::rope::RopeTables;
use crate::layers::rows::{Rows, SlotSize};
use crate::model::{AttnSpec, FfnSpec, LayerSpec, Mixer, MoeSpec};

/// The buffers of a pass.
pub(super) struct Buffers<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) normed: &'a mut [f32],
    pub(super) branch: &'a mut [f32],
    /// The output of a recurrent mixer beside attention, of a side path, or of a dense layer
    /// beside a mixture.
    pub(super) beside: &'a mut [f32],
    /// What layers have for tokens, `(m, n_layer·n)`, and the rows of their table; `n` values for
    /// each row of a layer.
    pub(super) per_layer: &'a mut [f32],
    pub(super) per_layer_table: &'a mut [f32],
    pub(super) per_layer_gate: &'a mut [f32],
    /// Of a block for multi-token prediction, normed embeddings and states side by side, `(m,
    /// 2·n_embd)`.
    pub(super) mtp: &'a mut [f32],
    pub(super) streams: Streams<'a>,
    /// See [`Mixing::first_values`].
    pub(super) first_values: &'a mut [f32],
    /// The middle of a layer's side path.
    pub(super) laurel: &'a mut [f32],
    /// Room for [`AttnBuffers`], [`FfnBuffers`], or those of a recurrent mixer.
    pub(super) inner: &'a mut [u8],
    /// See [`RopeTables::angles`].
    pub(super) cos: &'a mut [f32],
    pub(super) sin: &'a mut [f32],
    /// Ends of each slot's rows: among all rows, among those that the last layer computes, and
    /// among those of one expert or those with logits.
    pub(super) ends: &'a [u32],
    pub(super) output_ends: &'a [u32],
    pub(super) expert_ends: &'a mut [u32],
    pub(super) moe: MoeBuffers<'a>,
    pub(super) scratch: Scratch<'a>,
}

/// Buffers of attention; keys and values have `m_kv` rows, the other buffers `m`.
pub(super) struct AttnBuffers<'a> {
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// Queries and outputs by KV head, slot by slot: `(n_head_kv, m_padded, n_group, head_dim)`.
    pub(super) q_by_head: &'a mut [f32],
    pub(super) out_by_head: &'a mut [f32],
    pub(super) attn: &'a mut [f32],
    pub(super) gate: &'a mut [f32],
    /// Queries and gates as they come from their matrix.
    pub(super) q_gate: &'a mut [f32],
    pub(super) latent: LatentBuffers<'a>,
    /// Partial results of slots with one row: an [`AttnPartial`] for each of `(slot, n_head_kv,
    /// n_pieces)`.
    pub(super) partials: &'a mut [f32],
}

/// Sizes of [`AttnBuffers`].
#[derive(Clone, Copy)]
pub(super) struct AttnSizes {
    pub(super) m_kv: usize,
    pub(super) m: usize,
    /// The number of rows, padded slot by slot to whole tiles.
    pub(super) m_padded: usize,
    /// Number of slots with one row, times the pieces of the longest sequence.
    pub(super) n_partials: usize,
}

impl AttnSizes {
    pub(super) fn of<'k>(
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
        }
    }
}

impl<'a> AttnBuffers<'a> {
    pub(super) fn take(
        frame: &mut Frame<'a>,
        spec: &AttnSpec,
        sizes: AttnSizes,
    ) -> AttnBuffers<'a> {
        let (
            n_q,
            n_attn,
            AttnSizes {
                m_kv,
                m,
                m_padded,
                n_partials,
            },
        ) = (spec.n_q(), spec.n_out(), sizes);
        AttnBuffers {
            q: frame.take(m * n_q),
            k: frame.take(m_kv * spec.n_k()),
            v: frame.take(m_kv * spec.n_v()),
            q_by_head: frame.take(m_padded * n_q),
            out_by_head: frame.take(m_padded * n_attn),
            attn: frame.take(m * n_attn),
            gate: frame.take(if spec.gated { m * n_attn } else { 0 }),
            q_gate: frame.take(if spec.gate_in_q { 2 * m * n_q } else { 0 }),
            latent: LatentBuffers::take(frame, spec, m_kv, m),
            partials: frame.take(n_partials * AttnPartial::len(spec.n_head, spec.head_dim_v)),
        }
    }
}

/// Buffers of a feed-forward layer.
pub(super) struct FfnBuffers<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a mut [f32],
}

impl<'a> FfnBuffers<'a> {
    pub(super) fn take(frame: &mut Frame<'a>, m: usize, n_ff: usize) -> FfnBuffers<'a> {
        FfnBuffers {
            gate: frame.take(m * n_ff),
            up: frame.take(m * n_ff),
        }
    }
}

/// Buffers of a mixture of experts.
pub(super) struct MoeBuffers<'a> {
    /// `(m, n_expert)`.
    pub(super) router: &'a mut [f32],
    /// `(m, n_used)`.
    pub(super) chosen: &'a mut [u32],
    pub(super) weights: &'a mut [f32],
    /// Indices in `chosen`, in the order in which their experts are computed.
    pub(super) slots: &'a mut [u32],
    pub(super) x: &'a mut [f32],
    pub(super) y: &'a mut [f32],
    /// What experts read, and the sum of what they write, if those are shorter vectors.
    pub(super) latent: &'a mut [f32],
}

/// Tokens per attention task, and the padded number of tokens, which is never 0.
pub(crate) fn attn_tiles(spec: &AttnSpec, m: usize) -> (usize, usize) {
    let m = m.max(1);
    let tile = (ATTN_ROWS / spec.n_group()).clamp(1, m);
    (tile, m.next_multiple_of(tile))
}

/// Bytes of the buffers of a pass over slots of these sizes.
pub(crate) fn buffer_bytes<'k>(
    sizes: Sizes<'_>,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
) -> u64 {
    let n_outputs = slots.clone().map(|slot| slot.n_outputs).sum();
    counted(|frame| Buffers::take(frame, sizes, slots.clone(), n_outputs)) as u64
}

impl<'a> Buffers<'a> {
    pub(super) fn take<'k>(
        frame: &mut Frame<'a>,
        sizes: Sizes<'_>,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        n_last: usize,
    ) -> Buffers<'a> {
        let h = sizes.h;
        let (m, n_slots): (usize, usize) = (
            slots.clone().map(|slot| slot.n_tokens).sum(),
            slots.clone().count(),
        );
        let most = |size: fn(&MoeSpec) -> usize| h.mixtures().map(size).max().unwrap_or(0);
        let (n_expert, n_used) = (most(|x| x.n_expert), most(|x| x.n_used));
        let n_latent = most(|x| x.latent.unwrap_or(0));
        let n_expert_io = h.n_embd.max(n_latent);
        let (m_moe, m_single) = (if n_expert > 0 { m } else { 0 }, single_rows(h));
        // Where a prompt's last row alone is left, it is taken like the row of a slot with one.
        let attention = h
            .attention()
            .flat_map(|spec| [Rows::All, Rows::Outputs].map(|rows| (spec, rows)));
        let attention = attention.map(|(spec, rows)| {
            counted(|frame| {
                AttnBuffers::take(frame, spec, AttnSizes::of(spec, slots.clone(), rows))
            })
        });
        let recurrent = h.recurrent().map(|spec| recurrent::bytes(spec, m));
        let is_both = |layer: &LayerSpec| {
            matches!(
                (&layer.mixer, &layer.ffn),
                (Mixer::Both(..), _) | (_, FfnSpec::Both(..))
            )
        };
        let has_both = h.layers.iter().any(is_both) || h.streams.is_some();
        let (n_stream, laurel_rank) = h
            .streams
            .map_or((0, 0), |spec| (spec.n_stream, spec.laurel_rank));
        let n_ff = h
            .layers
            .iter()
            .map(|layer| layer.ffn.n_ff())
            .max()
            .unwrap_or(0);
        let ffn = counted(|frame| FfnBuffers::take(frame, m.max(m_single), n_ff));
        let n_angles = RopeTables::n_angles(h, m);
        let mut ends = |rows: Rows| {
            let ends = frame.take::<u32>(n_slots);
            let mut last = 0;
            for (end, slot) in ends.iter_mut().zip(slots.clone()) {
                last += rows.n(&slot) as u32;
                *end = last;
            }
            &*ends
        };
        let [ends, output_ends] = [ends(Rows::All), ends(Rows::Outputs)];
        let rank = slots.clone().map(|slot| slot.rank).max().unwrap_or(0);
        let n_generated: usize = slots
            .clone()
            .take_while(|slot| slot.is_generated)
            .map(|slot| slot.n_tokens)
            .sum();
        // With outputs, all rows of the last layer count as generated.
        let has_outputs = slots.clone().any(|slot| slot.n_outputs > 0);
        let n_rows = (
            if has_outputs {
                n_generated.max(n_last)
            } else {
                n_generated
            },
            m - n_generated,
        );
        Buffers {
            x: frame.take(m * h.n_embd),
            normed: frame.take(m * h.n_embd),
            branch: frame.take(m * h.n_embd),
            beside: frame.take(if has_both { m * h.n_embd } else { 0 }),
            per_layer: frame.take(m * h.n_layer * h.per_layer_embd.unwrap_or(0)),
            per_layer_table: frame.take(m * h.n_layer * h.per_layer_embd.unwrap_or(0)),
            per_layer_gate: frame.take(m * h.per_layer_embd.unwrap_or(0)),
            mtp: frame.take(if h.is_mtp { 2 * m * h.n_embd } else { 0 }),
            streams: Streams {
                all: frame.take(m * n_stream * h.n_embd),
                room: frame.take(if n_stream > 0 { m * h.n_embd } else { 0 }),
                router: frame.take(m * n_stream),
            },
            first_values: frame.take(if h.shares_values() { m * h.n_embd } else { 0 }),
            laurel: frame.take(m * laurel_rank),
            inner: frame.take(attention.chain(recurrent).fold(ffn, usize::max)),
            cos: frame.take(n_angles),
            sin: frame.take(n_angles),
            ends,
            output_ends,
            expert_ends: frame.take(n_slots),
            moe: MoeBuffers {
                router: frame.take(m_moe * n_expert),
                chosen: frame.take(m_moe * n_used),
                weights: frame.take(m_moe * n_used),
                slots: frame.take(m_moe * n_used),
                x: frame.take(m_moe * n_expert_io),
                y: frame.take(m_moe.max(m_single) * n_expert_io),
                latent: frame.take(2 * m_moe * n_latent),
            },
            scratch: Scratch::take(frame, sizes.products(), n_rows, rank),
        }
    }

    /// Keeps only the first `m` rows.
    pub(super) fn keep_rows(&mut self, m: usize, n_embd: usize) {
        for rows in [&mut self.x, &mut self.normed, &mut self.branch] {
            *rows = &mut std::mem::take(rows)[..m * n_embd];
        }
    }
}
