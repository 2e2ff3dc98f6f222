//! Backward pass of softmax attention over [`Lanes`], in blocks, from two numbers that are kept per
//! query: the log-sum-exp of its scores, and `δ = Σ dout·out` (Dao et al., arXiv 2205.14135). No
//! matrix of weights is ever stored.
//!
//! With scores `s = scale·q·k` (capped), weights `p = e^(s − lse)` and `dp = dout·v`, the gradient
//! of the product `q·k` is `w = p·(dp − δ)·s'`; then `dq = Σ w·k`, `dk = Σ w·q`, `dv = Σ p·dout`.
//! One kernel goes over the keys of some queries, the other over the queries of some keys, so that
//! no two tasks add to the same row.

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::attention::{ROWS, STRIDE, columns, dots, last_columns, tiles};
use super::kv_blocks::{BLOCK, RowPtr, visible};
use super::lanes::{Lanes, exp, tanh};
use crate::arch::attention::AttnParams;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Two numbers for each of some rows and the other side's rows of a block.
struct Pairs {
    s: *mut f32,
    dp: *mut f32,
}

type Block = MaybeUninit<[f32; ROWS * STRIDE]>;

/// See [`crate::arch::Arch::attention_queries`].
#[inline(always)]
pub(in crate::arch) fn attention_queries<V: Lanes>(
    z: V,
    dq: &mut [f32],
    lse: &mut [f32],
    q: &[f32],
    dout: &[f32],
    delta: &[f32],
    k: &[f32],
    v: &[f32],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let (mut s, mut dp) = (Block::uninit(), Block::uninit());
    let pairs = Pairs {
        s: s.as_mut_ptr().cast(),
        dp: dp.as_mut_ptr().cast(),
    };
    for first in (0..ranges.len()).step_by(ROWS) {
        let n = (ranges.len() - first).min(ROWS);
        let dq = &mut dq[first * p.head_dim..][..n * p.head_dim];
        dq.fill(0.0);
        let q = rows(&q[first * p.head_dim..][..n * p.head_dim], p.head_dim);
        let dout = rows(
            &dout[first * p.head_dim_v..][..n * p.head_dim_v],
            p.head_dim_v,
        );
        let ranges = &ranges[first..][..n];
        let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
        let all = union(ranges, &(0..usize::MAX)).unwrap_or(0..0);
        for start in (all.start / BLOCK * BLOCK..all.end).step_by(BLOCK) {
            let block = start..all.end.min(start + BLOCK);
            let k = rows(
                &k[block.start * p.head_dim..block.end * p.head_dim],
                p.head_dim,
            );
            let v = rows(
                &v[block.start * p.head_dim_v..block.end * p.head_dim_v],
                p.head_dim_v,
            );
            for tile in tiles(n) {
                let Some(span) = union(&ranges[tile.clone()], &block) else {
                    continue;
                };
                // SAFETY: the tile's rows and the span's exist.
                unsafe { products(z, &pairs, &tile, (q, k), (dout, v), &span) };
                for i in tile.clone() {
                    let own = visible(ranges[i], &block);
                    if !own.is_empty() {
                        let dq = &mut dq[i * p.head_dim..][..p.head_dim];
                        // SAFETY: the row's products over its span were just computed.
                        unsafe {
                            weigh(
                                z,
                                &pairs,
                                i,
                                own.clone(),
                                delta[first + i],
                                p,
                                dq,
                                &mut max[i],
                                &mut sum[i],
                            )
                        };
                    }
                    // SAFETY: inside the row.
                    unsafe { clear_outside(pairs.s, i, &own, &span) };
                }
                let dq = dq[tile.start * p.head_dim..][..tile.len() * p.head_dim].as_mut_ptr();
                // SAFETY: the rows have weights over the span.
                unsafe { accumulate(z, dq, pairs.s.add(tile.start * STRIDE), k, &tile, &span) };
            }
        }
        for i in 0..n {
            let inverse = z.splat(1.0 / sum[i]);
            for dq in dq[i * p.head_dim..][..p.head_dim].chunks_mut(V::N) {
                (z.load(dq) * inverse).store(dq);
            }
            lse[first + i] = max[i] + sum[i].ln();
        }
    }
}

/// See [`crate::arch::Arch::attention_keys`].
#[inline(always)]
pub(in crate::arch) fn attention_keys<V: Lanes>(
    z: V,
    dk: &mut [f32],
    dv: &mut [f32],
    k: &[f32],
    v: &[f32],
    q: &[f32],
    dout: &[f32],
    lse: &[f32],
    delta: &[f32],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let (mut s, mut dp) = (Block::uninit(), Block::uninit());
    let pairs = Pairs {
        s: s.as_mut_ptr().cast(),
        dp: dp.as_mut_ptr().cast(),
    };
    for first in (0..ranges.len()).step_by(ROWS) {
        let n = (ranges.len() - first).min(ROWS);
        let dk = &mut dk[first * p.head_dim..][..n * p.head_dim];
        let dv = &mut dv[first * p.head_dim_v..][..n * p.head_dim_v];
        dk.fill(0.0);
        dv.fill(0.0);
        let k = rows(&k[first * p.head_dim..][..n * p.head_dim], p.head_dim);
        let v = rows(&v[first * p.head_dim_v..][..n * p.head_dim_v], p.head_dim_v);
        let ranges = &ranges[first..][..n];
        let all = union(ranges, &(0..usize::MAX)).unwrap_or(0..0);
        for start in (all.start / BLOCK * BLOCK..all.end).step_by(BLOCK) {
            let block = start..all.end.min(start + BLOCK);
            let q = rows(
                &q[block.start * p.head_dim..block.end * p.head_dim],
                p.head_dim,
            );
            let dout = rows(
                &dout[block.start * p.head_dim_v..block.end * p.head_dim_v],
                p.head_dim_v,
            );
            let (lse, delta) = (&lse[block.clone()], &delta[block.clone()]);
            for tile in tiles(n) {
                let Some(span) = union(&ranges[tile.clone()], &block) else {
                    continue;
                };
                // SAFETY: the tile's rows and the span's exist.
                unsafe { products(z, &pairs, &tile, (k, q), (v, dout), &span) };
                for i in tile.clone() {
                    let own = visible(ranges[i], &block);
                    if !own.is_empty() {
                        // SAFETY: the row's products over its span were just computed.
                        unsafe { weigh_known(z, &pairs, i, own.clone(), lse, delta, p) };
                    }
                    // SAFETY: inside the row.
                    unsafe { clear_outside(pairs.s, i, &own, &span) };
                    // SAFETY: as above.
                    unsafe { clear_outside(pairs.dp, i, &own, &span) };
                }
                let dv = dv[tile.start * p.head_dim_v..][..tile.len() * p.head_dim_v].as_mut_ptr();
                let dk = dk[tile.start * p.head_dim..][..tile.len() * p.head_dim].as_mut_ptr();
                // SAFETY: the rows have weights over the span.
                unsafe { accumulate(z, dv, pairs.s.add(tile.start * STRIDE), dout, &tile, &span) };
                // SAFETY: as above.
                unsafe { accumulate(z, dk, pairs.dp.add(tile.start * STRIDE), q, &tile, &span) };
            }
        }
    }
}

#[inline(always)]
fn rows(x: &[f32], dim: usize) -> RowPtr<f32> {
    RowPtr::new(x.as_ptr(), dim)
}

/// Union of the parts of `block` that some rows see, relative to its start.
#[inline(always)]
fn union(ranges: &[(u32, u32)], block: &Range<usize>) -> Option<Range<usize>> {
    let mut all: Option<Range<usize>> = None;
    for &range in ranges {
        let own = visible(range, block);
        if !own.is_empty() {
            all = Some(match all {
                Some(all) => all.start.min(own.start)..all.end.max(own.end),
                None => own,
            });
        }
    }
    all
}

/// `s = a·b` and `dp = c·d` of a tile's rows with those of `span`.
///
/// # Safety
/// The rows must exist.
#[inline(always)]
unsafe fn products<V: Lanes>(
    z: V,
    pairs: &Pairs,
    tile: &Range<usize>,
    (a, b): (RowPtr<f32>, RowPtr<f32>),
    (c, d): (RowPtr<f32>, RowPtr<f32>),
    span: &Range<usize>,
) {
    for (out, x, y) in [(pairs.s, a, b), (pairs.dp, c, d)] {
        // SAFETY: the tile's rows, and `ROWS` rows of room for their products.
        unsafe {
            let x = RowPtr::new(x.row(tile.start), x.dim);
            let out = out.add(tile.start * STRIDE);
            match tile.len() {
                4 if V::REGISTERS >= 32 => dots::<V, f32, 4, 4>(z, out, x, y, span.clone(), false),
                4 => dots::<V, f32, 4, 2>(z, out, x, y, span.clone(), false),
                2 => dots::<V, f32, 2, 4>(z, out, x, y, span.clone(), false),
                _ => dots::<V, f32, 1, 8>(z, out, x, y, span.clone(), false),
            }
        }
    }
}

/// The products of row `i` over `span` and, after it, zeros to the end of a vector.
///
/// # Safety
/// They must be initialised.
#[inline(always)]
unsafe fn row<'a, V: Lanes>(z: V, of: *mut f32, i: usize, span: &Range<usize>) -> &'a mut [f32] {
    // SAFETY: a row has room for a vector after its last product.
    unsafe {
        let first = of.add(i * STRIDE + span.start);
        z.write(first.add(span.len()));
        std::slice::from_raw_parts_mut(first, span.len().next_multiple_of(V::N))
    }
}

/// Capped score of a product `x`, and its derivative with respect to `x`.
#[inline(always)]
fn score<V: Lanes>(x: V, p: &AttnParams) -> (V, V) {
    let scale = x.splat(p.scale);
    if p.softcap > 0.0 {
        let cap = x.splat(p.softcap);
        let t = tanh(x * scale / cap);
        (t * cap, scale * (x.splat(1.0) - t * t))
    } else {
        (x * scale, scale)
    }
}

/// Replaces the products of query `i` by weights, relative to its running maximum, which moves.
///
/// # Safety
/// The products over the span must be initialised.
#[inline(always)]
unsafe fn weigh<V: Lanes>(
    z: V,
    pairs: &Pairs,
    i: usize,
    span: Range<usize>,
    delta: f32,
    p: &AttnParams,
    dq: &mut [f32],
    max: &mut f32,
    sum: &mut f32,
) {
    // SAFETY: the caller's promise.
    let s = unsafe { row(z, pairs.s, i, &span) };
    // SAFETY: the caller's promise.
    let dp = unsafe { row(z, pairs.dp, i, &span) };
    let delta = z.splat(delta);
    let mut top = z.splat(f32::NEG_INFINITY);
    for (s, dp) in s.chunks_exact_mut(V::N).zip(dp.chunks_exact_mut(V::N)) {
        let (x, slope) = score(z.load(s), p);
        x.store(s);
        ((z.load(dp) - delta) * slope).store(dp);
    }
    s[span.len()..].fill(f32::NEG_INFINITY);
    for s in s.chunks_exact(V::N) {
        top = z.load(s).max(top);
    }
    let before = *max;
    *max = before.max(top.max_lane());
    let m = z.splat(*max);
    let mut weights = z;
    for (s, dp) in s.chunks_exact_mut(V::N).zip(dp.chunks_exact(V::N)) {
        let weight = exp(z.load(s) - m);
        weights = weights + weight;
        (weight * z.load(dp)).store(s);
    }
    if *max > before {
        let shrink = exp(z.splat(before - *max));
        for dq in dq.chunks_mut(V::N) {
            (z.load(dq) * shrink).store(dq);
        }
        *sum *= shrink.max_lane();
    }
    *sum += weights.sum();
}

/// Replaces the products of key `i` by weights: `s` by `p`, for its value's gradient, and `dp` by
/// `w`, for its own.
///
/// # Safety
/// The products over the span must be initialised.
#[inline(always)]
unsafe fn weigh_known<V: Lanes>(
    z: V,
    pairs: &Pairs,
    i: usize,
    span: Range<usize>,
    lse: &[f32],
    delta: &[f32],
    p: &AttnParams,
) {
    // SAFETY: the caller's promise.
    let s = unsafe { row(z, pairs.s, i, &span) };
    // SAFETY: the caller's promise.
    let dp = unsafe { row(z, pairs.dp, i, &span) };
    let known = lse[span.clone()].chunks(V::N).zip(delta[span].chunks(V::N));
    for ((s, dp), (lse, delta)) in s
        .chunks_exact_mut(V::N)
        .zip(dp.chunks_exact_mut(V::N))
        .zip(known)
    {
        let (x, slope) = score(z.load(s), p);
        let weight = exp(x - z.load(lse));
        weight.store(s);
        (weight * (z.load(dp) - z.load(delta)) * slope).store(dp);
    }
}

/// Zeros what row `i` does not see of `span`.
///
/// # Safety
/// `of` must have the row.
#[inline(always)]
unsafe fn clear_outside(of: *mut f32, i: usize, own: &Range<usize>, span: &Range<usize>) {
    let end = if own.is_empty() { span.end } else { own.start };
    for j in (span.start..end).chain(own.end.max(end)..span.end) {
        // SAFETY: inside the row.
        unsafe { of.add(i * STRIDE + j).write(0.0) };
    }
}

/// Adds the rows `v` of `span`, by weight, to those of a tile.
///
/// # Safety
/// `out` must have the tile's rows, as wide as `v`'s, and `w` their weights over the span.
#[inline(always)]
unsafe fn accumulate<V: Lanes>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: RowPtr<f32>,
    tile: &Range<usize>,
    span: &Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match tile.len() {
            4 => accumulate_rows::<V, 4>(z, out, w, v, span),
            2 => accumulate_rows::<V, 2>(z, out, w, v, span),
            _ => accumulate_rows::<V, 1>(z, out, w, v, span),
        }
    }
}

/// # Safety
/// As for [`accumulate`], with `R` rows.
#[inline(always)]
unsafe fn accumulate_rows<V: Lanes, const R: usize>(
    z: V,
    out: *mut f32,
    w: *const f32,
    v: RowPtr<f32>,
    span: &Range<usize>,
) {
    let mut column = 0;
    // SAFETY: the columns are inside the rows, by the callees' contract.
    unsafe {
        if R < 4 || V::REGISTERS >= 32 {
            columns::<V, f32, R, 4>(z, out, w, v, span, &mut column, false);
        }
        columns::<V, f32, R, 2>(z, out, w, v, span, &mut column, false);
        columns::<V, f32, R, 1>(z, out, w, v, span, &mut column, false);
        last_columns::<V, f32, R>(z, out, w, v, span, column);
    }
}
