//! Softmax attention over [`Lanes`], block of keys by block of keys with a running maximum (Milakov
//! & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//!
//! For each block: scores of some query rows, then their weights, then the weighted sum of the
//! block's values. Query rows are taken in register tiles, so that rows that share a KV head share
//! its loads: few rows are bound by the stream of keys and values, many by multiplications.
//!
//! A row's result depends on nothing but the row itself. Blocks lie on a fixed grid of positions;
//! every score is one chain of additions over the head dimension and every output one over the keys,
//! in the same order in a tile of any shape. So a prefill equals as many decodes, bit for bit (but for
//! what `amx/attention.rs` takes over).

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::{Lanes, exp, tanh};
use crate::arch::AttnParams;
use half::f16;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Keys of a block: 32 costs up to a tenth, 128 gains for half precision what it loses for `f32`
/// (whose block then leaves the first-level cache); Zen 5.
pub(in crate::arch) const BLOCK: usize = 64;
/// Query rows that go through a block while it is in the cache; bounds what the stack holds.
pub(in crate::arch) const ROWS: usize = 32;
/// Bytes that a prefetch runs ahead of the rows in use: keys and values alternate block by block,
/// which the hardware's prefetcher does not see through. From memory, one query row on half
/// precision runs at 49 GB/s with it, 21 without; in the cache it costs up to a tenth (Zen 5, where
/// `dot` reads 37 GB/s).
const AHEAD: usize = 8192;
/// Room for scores of one row: tiles and vectors run over the end of a block.
pub(in crate::arch) const STRIDE: usize = BLOCK + 16;

/// An element of a key or value row.
pub(in crate::arch) trait Element<V: Lanes>: Copy {
    /// See [`Lanes::read`].
    unsafe fn read(z: V, p: *const Self) -> V;
    /// See [`Lanes::read_first`].
    unsafe fn read_first(z: V, p: *const Self, n: usize) -> V;
}

impl<V: Lanes> Element<V> for f32 {
    #[inline(always)]
    unsafe fn read(z: V, p: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read(p) }
    }
    #[inline(always)]
    unsafe fn read_first(z: V, p: *const f32, n: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_first(p, n) }
    }
}

impl<V: Lanes> Element<V> for f16 {
    #[inline(always)]
    unsafe fn read(z: V, p: *const f16) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_f16(p) }
    }
    #[inline(always)]
    unsafe fn read_first(z: V, p: *const f16, n: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_f16_first(p, n) }
    }
}

/// Rows of queries, keys or values, from some position on.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Rows<T> {
    pub(in crate::arch) first: *const T,
    pub(in crate::arch) dim: usize,
    pub(in crate::arch) n: usize,
}

impl<T> Rows<T> {
    /// # Safety
    /// Row `i` must exist.
    #[inline(always)]
    pub(in crate::arch) unsafe fn row(self, i: usize) -> *const T {
        // SAFETY: the caller's promise.
        unsafe { self.first.add(i * self.dim) }
    }

    /// Prefetches what lies [`AHEAD`] of the `n` rows from row `i` on.
    #[inline(always)]
    fn prefetch<V: Lanes>(self, z: V, i: usize, n: usize) {
        let row = size_of::<T>() * self.dim;
        let from = i * row + AHEAD;
        if from < self.n * row {
            let mut line = 0;
            while line < n * row {
                z.prefetch(self.first.cast::<u8>().wrapping_add(from + line));
                line += 64;
            }
        }
    }
}

/// The query rows of one pass over the keys, and what is known of their softmax so far.
pub(in crate::arch) struct Pass<'a> {
    p: &'a AttnParams,
    q: &'a [f32],
    out: &'a mut [f32],
    ranges: &'a [(u32, u32)],
    /// Scores, then weights, of the rows for the keys of the block: `(ROWS, STRIDE)`.
    scores: *mut f32,
    max: [f32; ROWS],
    sum: [f32; ROWS],
}

/// Part of `block` that a row sees, relative to the block's start.
#[inline(always)]
pub(super) fn visible(range: (u32, u32), block: &Range<usize>) -> Range<usize> {
    let start = (range.0 as usize).clamp(block.start, block.end);
    let end = (range.1 as usize).clamp(start, block.end);
    start - block.start..end - block.start
}

/// Splits `n` rows in tiles of 4, 2 and 1.
#[inline(always)]
pub(super) fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> {
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

/// See [`crate::arch::Arch::attention`]: takes some query rows at a time through all blocks of keys
/// that any of them sees.
#[inline(always)]
pub(in crate::arch) fn attention<V: Lanes, T: Element<V>>(
    z: V,
    out: &mut [f32],
    q: &[f32],
    k: &[T],
    v: &[T],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let mut scores = MaybeUninit::<[f32; ROWS * STRIDE]>::uninit();
    let rows = out.chunks_mut(ROWS * p.head_dim_v).zip(q.chunks(ROWS * p.head_dim)).zip(ranges.chunks(ROWS));
    for ((out, q), ranges) in rows {
        let mut pass = Pass::new(p, q, out, ranges, scores.as_mut_ptr().cast());
        let start = ranges.iter().map(|r| r.0 as usize).min().unwrap_or(0);
        let end = ranges.iter().map(|r| r.1 as usize).max().unwrap_or(0);
        for block in (start / BLOCK * BLOCK..end).step_by(BLOCK) {
            let rest = end - block;
            let k = Rows { first: k[block * p.head_dim..end * p.head_dim].as_ptr(), dim: p.head_dim, n: rest };
            let v = Rows { first: v[block * p.head_dim_v..end * p.head_dim_v].as_ptr(), dim: p.head_dim_v, n: rest };
            let block = block..end.min(block + BLOCK);
            // SAFETY: these are the keys and values from the block on.
            unsafe { pass.add_block(z, k, v, &block) };
        }
        pass.finish(z);
    }
}

impl<'a> Pass<'a> {
    /// At most [`ROWS`] rows that have seen nothing; `scores` is room for `(ROWS, STRIDE)`.
    #[inline(always)]
    pub(in crate::arch) fn new(
        p: &'a AttnParams,
        q: &'a [f32],
        out: &'a mut [f32],
        ranges: &'a [(u32, u32)],
        scores: *mut f32,
    ) -> Pass<'a> {
        out.fill(0.0);
        Pass { p, q, out, ranges, scores, max: [f32::NEG_INFINITY; ROWS], sum: [0.0; ROWS] }
    }

    /// Divides by the sums of weights.
    #[inline(always)]
    pub(in crate::arch) fn finish<V: Lanes>(&mut self, z: V) {
        for (out, sum) in self.out.chunks_exact_mut(self.p.head_dim_v).zip(self.sum) {
            let sum = z.splat(sum);
            for out in out.chunks_mut(V::N) {
                (z.load(out) / sum).store(out);
            }
        }
    }

    /// Whether there are [`ROWS`] rows, and all see all of `block`.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn sees(&self, block: &Range<usize>) -> bool {
        let whole = |r: &(u32, u32)| r.0 as usize <= block.start && block.end <= r.1 as usize;
        self.ranges.len() == ROWS && self.ranges.iter().all(whole)
    }

    /// Where the outputs are, not divided yet.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn out_mut(&mut self) -> *mut f32 {
        self.out.as_mut_ptr()
    }

    /// Running maxima of the rows' scores, and sums of their weights relative to those.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::arch) fn softmax_mut(&mut self) -> (&mut [f32; ROWS], &mut [f32; ROWS]) {
        (&mut self.max, &mut self.sum)
    }

    /// Takes the rows through the keys `k` and values `v` of `block`.
    ///
    /// # Safety
    /// They must be those from the block on.
    #[inline(always)]
    pub(in crate::arch) unsafe fn add_block<V: Lanes, T: Element<V>>(
        &mut self,
        z: V,
        k: Rows<T>,
        v: Rows<T>,
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
    unsafe fn add_scores<V: Lanes, E: Element<V>>(&mut self, z: V, k: Rows<E>, block: &Range<usize>) {
        for tile in tiles(self.ranges.len()) {
            let spans = self.ranges[tile.clone()].iter().map(|&r| visible(r, block)).filter(|s| !s.is_empty());
            let Some(span) = spans.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { continue };
            let q = self.q[tile.start * self.p.head_dim..].as_ptr();
            let q = Rows { first: q, dim: self.p.head_dim, n: tile.len() };
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
            let span = visible(self.ranges[i], block);
            if !span.is_empty() {
                // SAFETY: the row's scores over its span have just been written.
                unsafe { self.weigh(z, i, span) };
            }
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
        // SAFETY: a row has room for a vector behind its last key.
        unsafe { z.write(s.add(n)) };
        // SAFETY: `n` scores and the vector behind them are initialised, and inside the row.
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
    unsafe fn add_values<V: Lanes, E: Element<V>>(&mut self, z: V, v: Rows<E>, block: &Range<usize>) {
        for tile in tiles(self.ranges.len()) {
            let spans = self.ranges[tile.clone()].iter().map(|&r| visible(r, block));
            let shared = spans.fold(0..BLOCK, |a, b| a.start.max(b.start)..a.end.min(b.end));
            // Keys that only some rows of the tile see must not touch the others: zero times a
            // value that is not finite is not zero.
            let shared = if shared.is_empty() { 0..0 } else { shared };
            for i in tile.clone() {
                let span = visible(self.ranges[i], block);
                let end = if shared.is_empty() { span.end } else { shared.start };
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
                let span = visible(self.ranges[i], block);
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
    unsafe fn add_weighted<V: Lanes, E: Element<V>, const R: usize>(
        &mut self,
        z: V,
        i: usize,
        v: Rows<E>,
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

/// `s[r][j] = q[r]·k[j]` for the keys `j` of `span`, `C` at a time; up to `C − 1` scores behind the
/// span get junk. If `ahead`, prefetches keys.
///
/// # Safety
/// `q` must have `R` rows as wide as those of `k`, `k` the rows of the span, and `s` `R` rows of
/// `STRIDE` scores.
#[inline(always)]
pub(super) unsafe fn dots<V: Lanes, E: Element<V>, const R: usize, const C: usize>(
    z: V,
    s: *mut f32,
    q: Rows<f32>,
    k: Rows<E>,
    span: Range<usize>,
    ahead: bool,
) {
    const { assert!(C.is_multiple_of(4) || R == 4, "scores are summed four at a time") };
    let (whole, rest) = (k.dim / V::N * V::N, k.dim % V::N);
    for j in span.clone().step_by(C) {
        if ahead {
            k.prefetch(z, j, C);
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
                    let sums = V::sum4([acc[c][r], acc[(c + 1) % C][r], acc[(c + 2) % C][r], acc[(c + 3) % C][r]]);
                    // SAFETY: inside row `r` of the scores.
                    unsafe { s.add(r * STRIDE + j + c).cast::<[f32; 4]>().write_unaligned(sums) };
                }
            }
        }
    }
}

/// `out[r][i] += Σ_j w[r][j]·v[j][i]` over the keys `j` of `span`, for as many tiles of `C` vectors
/// of columns as there are from `column` on, which moves behind them. If `ahead`, prefetches values.
///
/// # Safety
/// `out` must have `R` rows as wide as those of `v`, `w` `R` rows of `STRIDE` weights, initialised
/// over the span, and `v` the rows of the span.
#[inline(always)]
pub(super) unsafe fn columns<V: Lanes, E: Element<V>, const R: usize, const C: usize>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: Rows<E>,
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
                v.prefetch(z, j, 1);
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

/// The same for the columns from `column` on, less than a vector.
///
/// # Safety
/// As for [`columns`].
#[inline(always)]
pub(super) unsafe fn last_columns<V: Lanes, E: Element<V>, const R: usize>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: Rows<E>,
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
