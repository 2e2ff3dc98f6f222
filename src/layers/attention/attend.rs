//! Attention over the keys and values of the cache, slot by slot.

use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK};
use crate::compute::tiles::Tiles;
use crate::layers::attention::buffers::attn_tiles;
use crate::layers::attention::relative::weights::Biases;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::indexer::selection::Selection;
use crate::layers::rows::{Rows, SlotView};
use crate::threads::PoolHandle;
use std::ops::Range;

/// Pieces of one token's keys that one task merges: a few microseconds of work.
const FEW_PIECES: usize = 16;
/// Tiles per thread in a region, at least, if attention may pause.
const LEAST_TILES: usize = 2;
/// Most query heads that can share a key/value head: bounds the rows of a task.
pub(crate) const MAX_GROUP: usize = 1024;

/// Slots whose attention is computed together: adjacent ones with one row each, or one with more.
pub(super) struct Group<'g, 's> {
    pub(super) slots: &'g [SlotView<'s>],
    /// Rows of each.
    pub(super) n_rows: usize,
    /// Rows of all in buffers by head.
    pub(super) m_padded: usize,
}

impl<'g, 's> Group<'g, 's> {
    /// The slot of a task, of which each row has `n_head`, its head and its row, which may be one of
    /// those that pad: by head, then row; or by slot, then head.
    pub(super) fn place(&self, task: usize, n_head: usize) -> (&'g SlotView<'s>, usize, usize) {
        match self.slots {
            [slot] => (slot, task / self.m_padded, task % self.m_padded),
            slots => (&slots[task / n_head], task % n_head, 0),
        }
    }
}

/// The groups of slots that have rows.
pub(super) fn groups<'g, 's>(
    spec: &AttnSpec,
    rows: Rows,
    slots: &'g [SlotView<'s>],
) -> impl Iterator<Item = Group<'g, 's>> {
    let n_rows = move |slot: &SlotView<'_>| rows.of(slot).2;
    slots
        .chunk_by(move |a, b| n_rows(a) == 1 && n_rows(b) == 1)
        .map(move |slots| Group {
            slots,
            n_rows: n_rows(&slots[0]),
            m_padded: match n_rows(&slots[0]) {
                1 => slots.len(),
                n => attn_tiles(spec, n).1,
            },
        })
        .filter(|group| group.n_rows > 0)
}

/// Attention of one layer, slot by slot.
pub(super) struct AttnLayer<'a> {
    pub(super) arch: Arch,
    pub(super) threads: &'a PoolHandle<'a>,
    pub(super) spec: &'a AttnSpec,
    /// Sinks of each query head.
    pub(super) sinks: Option<&'a [f32]>,
    /// Layer whose keys and values are read.
    pub(super) i: usize,
    pub(super) rows: Rows,
    /// If rows see chosen positions.
    pub(super) selection: Option<&'a Selection<'a>>,
    /// If scores have some.
    pub(super) biases: Option<Biases<'a>>,
}

impl AttnLayer<'_> {
    /// Attention of all slots, from queries to outputs by head. A tile is a head and some rows of a
    /// slot, or a whole group of slots with one row each.
    pub(super) fn attend(
        &self,
        slots: &[SlotView<'_>],
        mut q_by_head: &[f32],
        mut out_by_head: &mut [f32],
        mut partials: &mut [f32],
        tiles: &mut Tiles<'_>,
    ) {
        if let Some(selection) = self.selection {
            return self.attend_chosen(slots, selection, q_by_head, out_by_head, tiles);
        }
        if let Some(biases) = self.biases {
            return self.attend_biased(slots, biases, q_by_head, out_by_head, tiles);
        }
        let least = self.threads.n_threads() * LEAST_TILES;
        for group in groups(self.spec, self.rows, slots) {
            let (q, out);
            (q, q_by_head) = q_by_head.split_at(group.m_padded * self.spec.n_q());
            (out, out_by_head) = out_by_head.split_at_mut(group.m_padded * self.spec.n_out());
            match group.slots {
                [slot] if group.n_rows > 1 => {
                    tiles.each(self.n_tiles(group.n_rows), least, |tiles| {
                        self.many_rows(slot, q, out, tiles);
                    });
                }
                slots => {
                    let of_group;
                    (of_group, partials) = partials.split_at_mut(self.partials_len(slots));
                    tiles.each(1, 1, |_| self.single_rows(slots, q, out, of_group));
                }
            }
            if tiles.is_paused() {
                return;
            }
        }
    }

    /// Positions that the slot's row `j` of [`AttnLayer::rows`] sees.
    pub(super) fn range(&self, slot: &SlotView<'_>, j: usize) -> (u32, u32) {
        let end = slot.pos() + self.rows.of(slot).0 + j + 1;
        if !self.spec.causal {
            let (half, n) = (
                self.spec.window.map(|size| size / 2),
                slot.pos() + slot.tokens.len(),
            );
            let range = half.map_or((0, n), |half| {
                (
                    (end - 1).saturating_sub(half),
                    n.min(end.saturating_add(half)),
                )
            });
            return (range.0 as u32, range.1 as u32);
        }
        let start = match self.spec.window {
            Some(size) if self.spec.chunked => (end - 1) / size * size,
            Some(size) => end.saturating_sub(size),
            None => 0,
        };
        let windowed = self.spec.window.is_some();
        let seen = slot.spans.seen(end - 1, start..end, windowed);
        (seen.start as u32, seen.end as u32)
    }

    /// Clears rows of the set `head` of query heads, which alternate, except for the sinks: these are
    /// keys before all others with values of 0.
    fn begin(&self, partial: &mut AttnPartial<'_>, head: usize) {
        partial.clear();
        if let Some(sinks) = self.sinks {
            let n_together = self.spec.n_together();
            let sinks = sinks[head * n_together..][..n_together].iter().cycle();
            partial
                .max
                .iter_mut()
                .zip(sinks)
                .for_each(|(max, sink)| *max = *sink);
            partial.sum.fill(1.0);
        }
    }

    /// Pieces of keys that slots with one row each read, at most.
    fn n_pieces(&self, slots: &[SlotView<'_>]) -> usize {
        let n_pieces = |slot: &SlotView<'_>| slot.kv.pieces(self.i, self.range(slot, 0)).count();
        slots.iter().map(n_pieces).max().unwrap_or(0)
    }

    /// Values of their partial results.
    fn partials_len(&self, slots: &[SlotView<'_>]) -> usize {
        let len = AttnPartial::len(self.spec.n_together(), self.spec.head_dim_v);
        slots.len() * self.spec.n_set() * self.n_pieces(slots) * len
    }

    /// Attention of slots with one row each, stored one after the other. A task takes a head of one
    /// slot and a piece of its keys; the bits are those of a task that takes all pieces in
    /// turn, see `arch/attention.rs`.
    fn single_rows(
        &self,
        slots: &[SlotView<'_>],
        q_by_head: &[f32],
        out: &mut [f32],
        partials: &mut [f32],
    ) {
        let AttnLayer {
            arch,
            threads,
            spec,
            i,
            ..
        } = *self;
        let (n_together, d, d_v) = (spec.n_together(), spec.head_dim, spec.head_dim_v);
        let pieces = |s: usize| slots[s].kv.pieces(i, self.range(&slots[s], 0));
        let n_pieces = self.n_pieces(slots);
        let len = AttnPartial::len(n_together, d_v);
        threads.for_chunks(partials, len, |task, values| {
            let (row, piece) = (task / n_pieces, task % n_pieces);
            let (s, head) = (row / spec.n_set(), row % spec.n_set());
            let mut partial = AttnPartial::of(values, n_together);
            if piece == 0 {
                self.begin(&mut partial, head);
            } else {
                partial.clear();
            }
            let is_first = piece == 0;
            if let Some(piece) = pieces(s).nth(piece) {
                let range = self.range(&slots[s], 0);
                // Most groups are small, and filling the largest takes as long as reading some
                // keys.
                let (small, large);
                let ranges: &[_] = if n_together <= 16 {
                    small = [range; 16];
                    &small
                } else {
                    large = [range; MAX_GROUP];
                    &large
                };
                let q = &q_by_head[row * n_together * d..][..n_together * d];
                let kv = &*slots[s].kv;
                let params = attn_params(spec, head, slots[s].is_generated());
                let (at, ranges) = ((i, spec.kv_head(head)), &ranges[..n_together]);
                if is_first {
                    kv.attention(arch, at, piece, &mut partial, q, ranges, &params);
                } else {
                    kv.attention_alone(arch, at, piece, &mut partial, q, ranges, &params);
                }
            }
        });
        let workers = threads.when(slots.len() * n_pieces > FEW_PIECES);
        workers.for_chunk_pairs(
            out,
            n_together * d_v,
            partials,
            n_pieces * len,
            |row, out, partials| {
                let (total, rest) = partials.split_at_mut(len);
                let mut total = AttnPartial::of(total, n_together);
                let params = attn_params(spec, 0, true);
                let (s, head) = (row / spec.n_set(), row % spec.n_set());
                let kv = &slots[s].kv;
                let (at, q) = ((i, spec.kv_head(head)), &q_by_head[row * n_together * d..]);
                let q = &q[..n_together * d];
                for (partial, piece) in rest.chunks_exact_mut(len).zip(pieces(s).skip(1)) {
                    let partial = AttnPartial::of(partial, n_together);
                    kv.merge_attention(arch, at, piece, &mut total, &partial, q, &params);
                }
                kv.finish_attention(arch, i, &mut total, &params);
                out.copy_from_slice(total.out);
            },
        );
    }

    /// Number of tiles of a slot with `m` rows.
    fn n_tiles(&self, m: usize) -> usize {
        let (tile, m_padded) = attn_tiles(self.spec, m);
        self.spec.n_set() * (m_padded / tile)
    }

    /// Attention of a slot with several rows. A task takes one of the tiles through all pieces of
    /// keys.
    fn many_rows(
        &self,
        slot: &SlotView<'_>,
        q_by_head: &[f32],
        out: &mut [f32],
        tiles: Range<usize>,
    ) {
        let spec = self.spec;
        let n_rows = self.rows.of(slot).2;
        let (tile, m_padded) = attn_tiles(spec, n_rows);
        let (per_head, size) = (m_padded / tile, tile * spec.n_together() * spec.head_dim_v);
        let out = &mut out[tiles.start * size..tiles.end * size];
        self.threads.for_chunks(out, size, |task, out| {
            let task = tiles.start + task;
            let (head, token) = (task / per_head, task % per_head * tile);
            let first = (head * m_padded + token) * spec.n_together() * spec.head_dim;
            let tokens = token..n_rows.min(token + tile);
            self.tile(slot, head, tokens, &q_by_head[first..], out);
        });
    }

    /// Attention of the set `head` of query heads for some rows of a slot.
    fn tile(
        &self,
        slot: &SlotView<'_>,
        head: usize,
        tokens: Range<usize>,
        q: &[f32],
        out: &mut [f32],
    ) {
        let AttnLayer { arch, spec, i, .. } = *self;
        let (n_together, d, d_v) = (spec.n_together(), spec.head_dim, spec.head_dim_v);
        let n_rows = tokens.len() * n_together;
        let (mut ranges, mut max, mut sum) =
            ([(0, 0); MAX_GROUP], [0.0; MAX_GROUP], [0.0; MAX_GROUP]);
        for (j, to) in ranges[..n_rows].iter_mut().enumerate() {
            *to = self.range(slot, tokens.start + j / n_together);
        }
        let ranges = &ranges[..n_rows];
        let params = attn_params(spec, head, slot.is_generated());
        let mut next = 0;
        while next < n_rows {
            // If precision depends on age, the rows of a page are processed together.
            let page = |row: usize| (ranges[row].1 as usize - 1) / KV_BLOCK;
            let same =
                (next..n_rows).take_while(|&row| !slot.kv.is_tiered(i) || page(row) == page(next));
            let rows = next..next + same.count();
            next = rows.end;
            let mut total = AttnPartial {
                out: &mut out[rows.start * d_v..rows.end * d_v],
                max: &mut max[rows.clone()],
                sum: &mut sum[rows.clone()],
            };
            self.begin(&mut total, head);
            let q = &q[rows.start * d..rows.end * d];
            let ranges = &ranges[rows];
            if spec.causal || params.slope == 0.0 {
                self.add(slot, head, &mut total, q, ranges, &params);
            } else {
                let own = slot.pos() + self.rows.of(slot).0 + tokens.start;
                self.add_both_sides(
                    slot,
                    head,
                    &mut total,
                    q,
                    (ranges[0].1, own as u32),
                    &params,
                );
            }
            slot.kv.finish_attention(arch, i, &mut total, &params);
        }
    }

    /// Adds what queries of the set `head` of query heads find in the keys of these ranges, piece by piece.
    fn add(
        &self,
        slot: &SlotView<'_>,
        head: usize,
        total: &mut AttnPartial<'_>,
        q: &[f32],
        ranges: &[(u32, u32)],
        params: &AttnParams,
    ) {
        let (i, all) = (self.i, (ranges[0].0, ranges[ranges.len() - 1].1));
        let kv_head = self.spec.kv_head(head);
        for piece in slot.kv.pieces(i, all) {
            slot.kv
                .attention(self.arch, (i, kv_head), piece, total, q, ranges, params);
        }
    }

    /// [`AttnLayer::add`] with ALiBi on both sides of the rows' own positions, the first of which is
    /// `own`, in a text of `n` tokens. Scores of later keys count positions from the end of the
    /// text; to compensate, scores of earlier keys are raised by the same excess.
    fn add_both_sides(
        &self,
        slot: &SlotView<'_>,
        head: usize,
        total: &mut AttnPartial<'_>,
        q: &[f32],
        (n, own): (u32, u32),
        params: &AttnParams,
    ) {
        let mut split = [(0, 0); MAX_GROUP];
        let split = &mut split[..total.max.len()];
        split
            .iter_mut()
            .zip(own..)
            .for_each(|(range, own)| *range = (0, own + 1));
        self.add(slot, head, total, q, split, params);
        let raise = |own: u32| params.slope * (n - 1 - own) as f32;
        total
            .max
            .iter_mut()
            .zip(own..)
            .for_each(|(max, own)| *max += raise(own));
        split
            .iter_mut()
            .zip(own..)
            .for_each(|(range, own)| *range = (own + 1, n));
        let params = AttnParams {
            slope: -params.slope,
            ..*params
        };
        self.add(slot, head, total, q, split, &params);
    }

    /// The output of all slots by row, `(m, n_head·head_dim_v)`; it is written to `to` unless the
    /// output by head is laid out like that.
    pub(super) fn by_row<'o>(
        &self,
        slots: &[SlotView<'_>],
        mut by_head: &'o [f32],
        to: &'o mut [f32],
    ) -> &'o [f32] {
        if slots.iter().all(|slot| self.rows.of(slot).2 <= 1) {
            return by_head;
        }
        let n_out = self.spec.n_out();
        for slot in slots {
            let (_, row, n) = self.rows.of(slot);
            if n > 0 {
                let of_slot;
                (of_slot, by_head) = by_head.split_at(attn_tiles(self.spec, n).1 * n_out);
                self.slot_by_row(of_slot, &mut to[row * n_out..][..n * n_out]);
            }
        }
        to
    }

    /// Copies a slot's output by head, `(n_set, m_padded, n_together, head_dim_v)`, to rows `(m,
    /// n_head·head_dim_v)`.
    fn slot_by_row(&self, by_head: &[f32], to: &mut [f32]) {
        let width = self.spec.n_together() * self.spec.head_dim_v;
        let m_padded = by_head.len() / self.spec.n_out();
        self.threads.for_chunks(to, self.spec.n_out(), |row, to| {
            for (head, to) in to.chunks_exact_mut(width).enumerate() {
                to.copy_from_slice(&by_head[(head * m_padded + row) * width..][..width]);
            }
        });
    }
}

/// Parameters of attention kernels for the set `head` of query heads.
pub(crate) fn attn_params(spec: &AttnSpec, head: usize, exact: bool) -> AttnParams {
    let &AttnSpec {
        head_dim,
        head_dim_v,
        scale,
        softcap,
        ..
    } = spec;
    // With a slope there is one query head in a set, and everything is computed in `f32`.
    let slope = spec.slope(head);
    AttnParams {
        head_dim,
        head_dim_v,
        scale,
        softcap: softcap.unwrap_or(0.0),
        slope,
        exact: exact || slope != 0.0,
    }
}
