//! Softmax attention over [`Lanes`], block of keys by block of keys with a running maximum (Milakov
//! & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//!
//! For each block: scores of some query rows, then their weights, then the weighted sum of the
//! block's values. Query rows are taken in register tiles, so that rows that share a KV head share
//! the loads of its keys and values: few rows are limited by memory bandwidth, many by arithmetic.
//!
//! A row's result depends on nothing but the row itself. Blocks and spans lie on a fixed grid of
//! positions; every score is one chain of additions over the head dimension, and every output of a
//! span one over its keys, in the same order whatever the tile's shape. So a prefill equals as many
//! decodes, bit for bit, except for the prompt blocks that `attention_i16.rs` and
//! `amx/attention.rs` compute.

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::kv_blocks::{BLOCK, Blocks, RowPtr, visible, wanted};
use super::lanes::{Lanes, Widen, exp, tanh};
use crate::arch::arrays;
use crate::arch::attention::{AttnParams, AttnPartial, MAX_HEAD_DIM};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Query rows that go through a block while it is in the cache; bounds stack use.
pub(in crate::arch) const ROWS: usize = 32;

/// Room for scores of one row: tiles and vectors run over the end of a block.
pub(in crate::arch) const STRIDE: usize = BLOCK + 16;

/// Query rows of one pass over the keys, and their running softmax.
pub(in crate::arch) struct SoftmaxRows<'a> {
    p: &'a AttnParams,
    q: &'a [f32],
    out: &'a mut [f32],
    ranges: &'a [(u32, u32)],
    /// Rows that [`SoftmaxRows::add_block`] skips, one bit each.
    pub(in crate::arch) skip: u32,
    /// Scores, then weights, of the rows for the keys of the block: `(ROWS, STRIDE)`.
    scores: *mut f32,
    max: [f32; ROWS],
    sum: [f32; ROWS],
}

/// Splits `n` rows in tiles of 4, 2 and 1.
#[inline(always)]
pub(in crate::arch) fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = next;
        next += match n - start {
            0 => return None,
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        Some(start..next)
    })
}

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// Working memory of a task.
struct Room {
    scores: [f32; ROWS * STRIDE],
    out: [f32; ROWS * MAX_HEAD_DIM],
}

/// See [`crate::arch::Arch::attention`]: processes some query rows at a time, over all blocks of
/// keys that any of them sees.
#[inline(always)]
pub(in crate::arch) fn attention<V: Lanes, B: Blocks<V>>(
    z: V,
    to: &mut AttnPartial<'_>,
    q: &[f32],
    mut blocks: B,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: addresses of parts of the room.
    let (scores, out) = unsafe { (&raw mut (*room).scores, &raw mut (*room).out) };
    for (i, (q, ranges)) in q
        .chunks(ROWS * p.head_dim)
        .zip(ranges.chunks(ROWS))
        .enumerate()
    {
        let seen = blocks.seen(ranges);
        if seen.is_empty() {
            continue;
        }
        // SAFETY: there is room for that many rows, and only this pass uses it.
        let mut pass = unsafe { SoftmaxRows::new(p, q, out.cast(), ranges, scores.cast()) };
        for i in seen.clone() {
            let first = blocks.first() + i * BLOCK;
            let (k, v) = blocks.rows(i, seen.end, wanted(ranges, first), p);
            if i == seen.start {
                k.prefetch_first();
                v.prefetch_first();
            }
            // SAFETY: these are the keys and values of the block.
            unsafe { pass.add_block(z, k, v, &(first..first + BLOCK)) };
        }
        pass.merge(z, &mut to.rows(i * ROWS, ROWS, p.head_dim_v));
    }
}

/// See [`crate::arch::Arch::attention_merge`].
#[inline(always)]
pub(in crate::arch) fn attention_merge<V: Lanes>(
    z: V,
    to: &mut AttnPartial<'_>,
    from: &AttnPartial<'_>,
    head_dim_v: usize,
) {
    merge(z, to, from.out, from.max, from.sum, head_dim_v);
}

/// Adds partial results of a later span; rows whose sum is 0 saw none of its keys.
#[inline(always)]
fn merge<V: Lanes>(
    z: V,
    to: &mut AttnPartial<'_>,
    out: &[f32],
    max: &[f32],
    sum: &[f32],
    dim: usize,
) {
    for first in (0..to.sum.len()).step_by(V::N) {
        let rows = first..to.sum.len().min(first + V::N);
        let (before, now) = (z.load(&to.max[rows.clone()]), z.load(&max[rows.clone()]));
        // A row without keys has two maxima of −∞; their difference would be NaN.
        let top = before.max(now).max(z.splat(f32::MIN));
        let mut factors = [[0.0; MAX_LANES]; 2];
        exp(before - top).store(&mut factors[0][..V::N]);
        exp(now - top).store(&mut factors[1][..V::N]);
        for i in rows {
            let (out, total) = (&out[i * dim..][..dim], &mut to.out[i * dim..][..dim]);
            if sum[i] == 0.0 {
                continue;
            }
            if to.sum[i] == 0.0 {
                total.copy_from_slice(out);
                (to.max[i], to.sum[i]) = (max[i], sum[i]);
                continue;
            }
            let [before, now] = arrays::map(factors, |factors| factors[i - first]);
            let (shrink, add) = (z.splat(before), z.splat(now));
            for (total, out) in total.chunks_mut(V::N).zip(out.chunks(V::N)) {
                z.load(out)
                    .mul_add(add, z.load(total) * shrink)
                    .store(total);
            }
            to.sum[i] = to.sum[i] * before + sum[i] * now;
            to.max[i] = to.max[i].max(max[i]);
        }
    }
}

/// See [`crate::arch::Arch::attention_finish`].
#[inline(always)]
pub(in crate::arch) fn attention_finish<V: Lanes>(
    z: V,
    to: &mut AttnPartial<'_>,
    head_dim_v: usize,
) {
    for (out, sum) in to.out.chunks_exact_mut(head_dim_v).zip(&*to.sum) {
        let sum = z.splat(*sum);
        for out in out.chunks_mut(V::N) {
            (z.load(out) / sum).store(out);
        }
    }
}

impl<'a> SoftmaxRows<'a> {
    /// State for at most [`ROWS`] rows, before the first key.
    ///
    /// # Safety
    /// `out` must have room for as many rows of values, `scores` for `(ROWS, STRIDE)`, and `out`
    /// must not be used elsewhere meanwhile.
    #[inline(always)]
    pub(in crate::arch) unsafe fn new(
        p: &'a AttnParams,
        q: &'a [f32],
        out: *mut f32,
        ranges: &'a [(u32, u32)],
        scores: *mut f32,
    ) -> SoftmaxRows<'a> {
        let n = ranges.len() * p.head_dim_v;
        // SAFETY: the caller's promise.
        unsafe { out.write_bytes(0, n) };
        // SAFETY: the caller's promise, and they are zeros now.
        let out = unsafe { std::slice::from_raw_parts_mut(out, n) };
        SoftmaxRows {
            p,
            q,
            out,
            ranges,
            skip: 0,
            scores,
            max: [f32::NEG_INFINITY; ROWS],
            sum: [0.0; ROWS],
        }
    }

    /// Adds what the rows saw to their partial results.
    #[inline(always)]
    pub(in crate::arch) fn merge<V: Lanes>(&self, z: V, to: &mut AttnPartial<'_>) {
        merge(z, to, self.out, &self.max, &self.sum, self.p.head_dim_v);
    }

    /// Mask of the rows that see all of `block` and have their own position, the last one they see,
    /// after it.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn behind(&self, block: &Range<usize>) -> u32 {
        let behind = |r: &(u32, u32)| r.0 as usize <= block.start && block.end < r.1 as usize;
        self.ranges
            .iter()
            .enumerate()
            .fold(0, |rows, (i, r)| rows | u32::from(behind(r)) << i)
    }

    /// The rows, one bit each, that see any of `block`.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn sees(&self, block: &Range<usize>) -> u32 {
        self.ranges.iter().enumerate().fold(0, |rows, (i, &r)| {
            rows | u32::from(!visible(r, block).is_empty()) << i
        })
    }

    /// Part of `block` that row `i` sees.
    #[inline(always)]
    fn visible(&self, i: usize, block: &Range<usize>) -> Range<usize> {
        if self.skip >> i & 1 == 1 {
            0..0
        } else {
            visible(self.ranges[i], block)
        }
    }

    /// Outputs, not yet divided by the sums of weights.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn out_mut(&mut self) -> *mut f32 {
        self.out.as_mut_ptr()
    }

    /// Running maxima of the rows' scores, and sums of their weights relative to those.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn softmax_mut(&mut self) -> (&mut [f32; ROWS], &mut [f32; ROWS]) {
        (&mut self.max, &mut self.sum)
    }

    /// Processes the keys `k` and values `v` of `block` for the rows.
    ///
    /// # Safety
    /// They must be those from the block on.
    #[inline(always)]
    pub(in crate::arch) unsafe fn add_block<V: Lanes, T: Widen<V>>(
        &mut self,
        z: V,
        k: RowPtr<T>,
        v: RowPtr<T>,
        block: &Range<usize>,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.add_scores(z, k, block) };
        // SAFETY: the caller's promise, and the block's weights were just computed.
        unsafe { self.add_values(z, v, block) };
    }

    /// Turns the queries' products with the keys `k` of `block` into weights.
    ///
    /// # Safety
    /// `k` must hold the keys of the block.
    #[inline(always)]
    unsafe fn add_scores<V: Lanes, E: Widen<V>>(
        &mut self,
        z: V,
        k: RowPtr<E>,
        block: &Range<usize>,
    ) {
        for tile in tiles(self.ranges.len()) {
            let spans = tile
                .clone()
                .map(|i| self.visible(i, block))
                .filter(|s| !s.is_empty());
            let Some(span) = spans.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else {
                continue;
            };
            let q = self.q[tile.start * self.p.head_dim..].as_ptr();
            let q = RowPtr::new(q, self.p.head_dim);
            // SAFETY: `scores` has `ROWS` rows.
            let s = unsafe { self.scores.add(tile.start * STRIDE) };
            let ahead = tile.start == 0;
            // SAFETY: the tile's query rows and the keys of the block exist.
            unsafe {
                match tile.len() {
                    4 if V::REGISTERS >= 32 => dots::<V, E, 4, 4>(z, s, q, k, span, ahead),
                    4 => dots::<V, E, 4, 2>(z, s, q, k, span, ahead),
                    2 => dots::<V, E, 2, 4>(z, s, q, k, span, ahead),
                    _ => dots::<V, E, 1, 8>(z, s, q, k, span, ahead),
                }
            }
        }
        for i in 0..self.ranges.len() {
            let span = self.visible(i, block);
            if !span.is_empty() {
                if self.p.slope != 0.0 {
                    // SAFETY: the row's scores over its span have just been written.
                    unsafe { self.lean(i, span.clone(), block.start) };
                }
                // SAFETY: as above.
                unsafe { self.weigh(z, i, span) };
            }
        }
    }

    /// Subtracts the ALiBi bias from the products of row `i` over `span`, which are not scaled yet;
    /// the block begins at position `first`.
    ///
    /// # Safety
    /// The products over the span must be initialised.
    #[inline(always)]
    unsafe fn lean(&mut self, i: usize, span: Range<usize>, first: usize) {
        let (slope, own) = (
            self.p.slope / self.p.scale,
            self.ranges[i].1 as usize - 1 - first,
        );
        for j in span {
            // SAFETY: the product is initialised, and inside the row.
            unsafe { *self.scores.add(i * STRIDE + j) -= slope * (own - j) as f32 };
        }
    }

    /// Replaces the scores of row `i` over `span` by weights, and moves the row's running maximum.
    ///
    /// # Safety
    /// The scores over the span must be initialised.
    #[inline(always)]
    pub(in crate::arch) unsafe fn weigh<V: Lanes>(&mut self, z: V, i: usize, span: Range<usize>) {
        let n = span.len();
        // SAFETY: the span is inside the row.
        let s = unsafe { self.scores.add(i * STRIDE + span.start) };
        // SAFETY: a row has room for a vector after its last key.
        unsafe { z.write(s.add(n)) };
        // SAFETY: `n` scores and the vector after them are initialised, and inside the row.
        let s = unsafe { std::slice::from_raw_parts_mut(s, n.next_multiple_of(V::N)) };
        let (scale, cap) = (z.splat(self.p.scale), z.splat(self.p.softcap));
        for s in s.chunks_exact_mut(V::N) {
            let mut x = z.load(s) * scale;
            if self.p.softcap > 0.0 {
                x = tanh(x / cap) * cap;
            }
            x.store(s);
        }
        s[n..].fill(f32::NEG_INFINITY);
        let mut top = z.splat(f32::NEG_INFINITY);
        for s in s.chunks_exact(V::N) {
            top = z.load(s).max(top);
        }
        let (before, max) = (self.max[i], self.max[i].max(top.max_lane()));
        let mut sum = z;
        let m = z.splat(max);
        for s in s.chunks_exact_mut(V::N) {
            let weight = exp(z.load(s) - m);
            weight.store(s);
            sum = sum + weight;
        }
        if max > before {
            let shrink = exp(z.splat(before - max));
            let dim = self.p.head_dim_v;
            for out in self.out[i * dim..][..dim].chunks_mut(V::N) {
                (z.load(out) * shrink).store(out);
            }
            self.sum[i] *= shrink.max_lane();
            self.max[i] = max;
        }
        self.sum[i] += sum.sum();
    }

    /// Adds the values `v` of `block`, by weight, to the outputs.
    ///
    /// # Safety
    /// `v` must hold the values of the block, and the weights must be those of the block.
    #[inline(always)]
    unsafe fn add_values<V: Lanes, E: Widen<V>>(
        &mut self,
        z: V,
        v: RowPtr<E>,
        block: &Range<usize>,
    ) {
        for tile in tiles(self.ranges.len()) {
            let spans = tile.clone().map(|i| self.visible(i, block));
            let shared = spans.fold(0..BLOCK, |a, b| a.start.max(b.start)..a.end.min(b.end));
            // Keys that only some rows of the tile see must not touch the others: zero times a
            // value that is not finite is not zero.
            let shared = if shared.is_empty() { 0..0 } else { shared };
            for i in tile.clone() {
                let span = self.visible(i, block);
                let end = if shared.is_empty() {
                    span.end
                } else {
                    shared.start
                };
                // SAFETY: the row's weights over its span are initialised.
                unsafe { self.add_weighted::<V, E, 1>(z, i, v, span.start..end) };
            }
            if shared.is_empty() {
                continue;
            }
            // SAFETY: all rows of the tile have weights over the shared span.
            unsafe {
                match tile.len() {
                    4 => self.add_weighted::<V, E, 4>(z, tile.start, v, shared.clone()),
                    2 => self.add_weighted::<V, E, 2>(z, tile.start, v, shared.clone()),
                    _ => self.add_weighted::<V, E, 1>(z, tile.start, v, shared.clone()),
                }
            }
            for i in tile {
                let span = self.visible(i, block);
                // SAFETY: the row's weights over its span are initialised.
                unsafe { self.add_weighted::<V, E, 1>(z, i, v, shared.end..span.end) };
            }
        }
    }

    /// Adds the values of the keys in `span` to `R` rows of outputs from row `i` on.
    ///
    /// # Safety
    /// The rows must have weights over the span, and `v` its values.
    #[inline(always)]
    unsafe fn add_weighted<V: Lanes, E: Widen<V>, const R: usize>(
        &mut self,
        z: V,
        i: usize,
        v: RowPtr<E>,
        span: Range<usize>,
    ) {
        if span.is_empty() {
            return;
        }
        let dim = self.p.head_dim_v;
        let out = self.out[i * dim..][..R * dim].as_mut_ptr();
        // SAFETY: the rows have weights.
        let w = unsafe { self.scores.add(i * STRIDE) };
        let (mut column, ahead) = (0, i == 0);
        // SAFETY: the columns are inside the rows, by the callees' contract.
        unsafe {
            if R == 1 {
                columns::<V, E, R, 8>(z, out, w, v, &span, &mut column, ahead);
            }
            if R < 4 || V::REGISTERS >= 32 {
                columns::<V, E, R, 4>(z, out, w, v, &span, &mut column, ahead);
            }
            columns::<V, E, R, 2>(z, out, w, v, &span, &mut column, ahead);
            columns::<V, E, R, 1>(z, out, w, v, &span, &mut column, ahead);
            last_columns::<V, E, R>(z, out, w, v, &span, column);
        }
    }
}

/// `s[r][j] = q[r]·k[j]` for the keys `j` of `span`, `C` at a time; up to `C − 1` scores after the
/// span are overwritten with garbage. If `ahead`, prefetches keys.
///
/// # Safety
/// `q` must have `R` rows as wide as those of `k`, `k` the rows of the span, and `s` `R` rows of
/// `STRIDE` scores.
#[inline(always)]
pub(super) unsafe fn dots<V: Lanes, E: Widen<V>, const R: usize, const C: usize>(
    z: V,
    s: *mut f32,
    q: RowPtr<f32>,
    k: RowPtr<E>,
    span: Range<usize>,
    ahead: bool,
) {
    const {
        assert!(
            C.is_multiple_of(4) || R == 4,
            "scores are summed four at a time"
        )
    };
    let (whole, rest) = (k.dim / V::N * V::N, k.dim % V::N);
    for j in span.clone().step_by(C) {
        if ahead {
            k.prefetch(j, C);
        }
        let mut keys = [k.first; C];
        for (c, key) in keys.iter_mut().enumerate() {
            // SAFETY: the row is inside the span.
            *key = unsafe { k.row((j + c).min(span.end - 1)) };
        }
        let mut acc = [[z; R]; C];
        for i in (0..whole).step_by(V::N) {
            let mut rows = [z; R];
            for r in 0..R {
                // SAFETY: a vector inside the query row.
                rows[r] = unsafe { z.read(q.first.add(r * q.dim + i)) };
            }
            for c in 0..C {
                // SAFETY: a vector inside the key row.
                let key = unsafe { E::read(z, keys[c].add(i)) };
                for r in 0..R {
                    acc[c][r] = rows[r].mul_add(key, acc[c][r]);
                }
            }
        }
        if rest > 0 {
            for c in 0..C {
                // SAFETY: the end of the key row.
                let key = unsafe { E::read_first(z, keys[c].add(whole), rest) };
                for r in 0..R {
                    // SAFETY: the end of the query row.
                    let row = unsafe { z.read_first(q.first.add(r * q.dim + whole), rest) };
                    acc[c][r] = row.mul_add(key, acc[c][r]);
                }
            }
        }
        if R == 4 {
            for c in 0..C {
                let sums = V::sum4([acc[c][0], acc[c][1 % R], acc[c][2 % R], acc[c][3 % R]]);
                for (r, sum) in sums.into_iter().enumerate() {
                    // SAFETY: inside row `r` of the scores.
                    unsafe { s.add(r * STRIDE + j + c).write(sum) };
                }
            }
        } else {
            for c in (0..C).step_by(4) {
                for r in 0..R {
                    let sums = V::sum4([
                        acc[c][r],
                        acc[(c + 1) % C][r],
                        acc[(c + 2) % C][r],
                        acc[(c + 3) % C][r],
                    ]);
                    // SAFETY: inside row `r` of the scores.
                    unsafe {
                        s.add(r * STRIDE + j + c)
                            .cast::<[f32; 4]>()
                            .write_unaligned(sums)
                    };
                }
            }
        }
    }
}

/// `out[r][i] += Σ_j w[r][j]·v[j][i]` over the keys `j` of `span`, for as many tiles of `C` vectors
/// of columns as fit from `column` on; advances `column` past them. If `ahead`, prefetches values.
///
/// # Safety
/// `out` must have `R` rows as wide as those of `v`, `w` `R` rows of `STRIDE` weights, initialised
/// over the span, and `v` the rows of the span.
#[inline(always)]
pub(super) unsafe fn columns<V: Lanes, E: Widen<V>, const R: usize, const C: usize>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: RowPtr<E>,
    span: &Range<usize>,
    column: &mut usize,
    ahead: bool,
) {
    while *column + C * V::N <= v.dim {
        let mut acc = [[z; C]; R];
        for r in 0..R {
            for c in 0..C {
                // SAFETY: a vector inside row `r`.
                acc[r][c] = unsafe { z.read(out.add(r * v.dim + *column + c * V::N)) };
            }
        }
        let ahead = ahead && *column == 0;
        for j in span.clone() {
            if ahead {
                v.prefetch(j, 1);
            }
            let mut values = [z; C];
            for c in 0..C {
                // SAFETY: a vector inside row `j`.
                values[c] = unsafe { E::read(z, v.row(j).add(*column + c * V::N)) };
            }
            for r in 0..R {
                // SAFETY: the weight of a key of the span.
                let weight = z.splat(unsafe { *w.add(r * STRIDE + j) });
                for c in 0..C {
                    acc[r][c] = values[c].mul_add(weight, acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                // SAFETY: as read above.
                unsafe { acc[r][c].write(out.add(r * v.dim + *column + c * V::N)) };
            }
        }
        *column += C * V::N;
    }
}

/// [`columns`] for the last columns, from `column` on, fewer than a vector holds.
///
/// # Safety
/// As for [`columns`].
#[inline(always)]
pub(super) unsafe fn last_columns<V: Lanes, E: Widen<V>, const R: usize>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: RowPtr<E>,
    span: &Range<usize>,
    column: usize,
) {
    let n = v.dim - column;
    if n == 0 {
        return;
    }
    for r in 0..R {
        // SAFETY: the end of row `r`.
        let out = unsafe { out.add(r * v.dim + column) };
        // SAFETY: as many as the row has.
        let mut acc = unsafe { z.read_first(out, n) };
        for j in span.clone() {
            // SAFETY: the weight of a key of the span.
            let weight = z.splat(unsafe { *w.add(r * STRIDE + j) });
            // SAFETY: the end of row `j`.
            let values = unsafe { E::read_first(z, v.row(j).add(column), n) };
            acc = values.mul_add(weight, acc);
        }
        // SAFETY: as read above.
        unsafe { acc.write_first(out, n) };
    }
}
