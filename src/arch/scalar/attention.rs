//! Softmax attention with a running maximum, one key at a time (Milakov & Gimelshein, arXiv
//! 1805.02867): no score is ever stored.

use super::elementwise::{add_scaled, dot};
use crate::arch::attention::{AttnParams, AttnPartial, KV_BLOCK, KvSpan, MAX_HEAD_DIM};
use crate::arch::kv;
use crate::arch::kv::KvStored;

/// A KV element that widens to `f32`.
pub(super) trait Widen: Copy {
    fn widen(row: &[Self], out: &mut [f32]);
}
impl Widen for f32 {
    fn widen(row: &[f32], out: &mut [f32]) {
        out.copy_from_slice(row);
    }
}
impl Widen for half::f16 {
    fn widen(row: &[half::f16], out: &mut [f32]) {
        super::elementwise::f16_to_f32(row, out);
    }
}

pub(super) fn attention<T: Widen>(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, T>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let (d, d_v) = (p.head_dim, p.head_dim_v);
    let key = |i: usize, j: usize, key: &mut [f32]| T::widen(&span.blocks[i].k[j * d..][..d], key);
    let value = |i: usize, j: usize, value: &mut [f32]| {
        T::widen(&span.blocks[i].v[j * d_v..][..d_v], value)
    };
    add_rows(
        to,
        q,
        (span.first, span.blocks.len()),
        ranges,
        p,
        key,
        value,
    );
}

pub(super) fn attention_stored(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let (KvStored { k, v, span }, d, d_v) = (stored, p.head_dim, p.head_dim_v);
    // The block that was widened last.
    let mut tiles = [[0.0; KV_BLOCK * MAX_HEAD_DIM]; 2];
    let mut last = [usize::MAX; 2];
    let ([keys, values], [last_k, last_v]) = (&mut tiles, &mut last);
    let key = |i: usize, j: usize, key: &mut [f32]| {
        if std::mem::replace(last_k, i) != i {
            kv::load(k, span.blocks[i].k, d, &mut keys[..KV_BLOCK * d]);
        }
        key.copy_from_slice(&keys[j * d..][..d]);
    };
    let value = |i: usize, j: usize, value: &mut [f32]| {
        if std::mem::replace(last_v, i) != i {
            kv::load(v, span.blocks[i].v, d_v, &mut values[..KV_BLOCK * d_v]);
        }
        value.copy_from_slice(&values[j * d_v..][..d_v]);
    };
    add_rows(
        to,
        q,
        (span.first, span.blocks.len()),
        ranges,
        p,
        key,
        value,
    );
}

/// Adds `n_blocks` blocks of keys from position `first` on; `key` and `value` read row `j` of block
/// `i`.
fn add_rows(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    (first, n_blocks): (usize, usize),
    ranges: &[(u32, u32)],
    p: &AttnParams,
    mut read_key: impl FnMut(usize, usize, &mut [f32]),
    mut read_value: impl FnMut(usize, usize, &mut [f32]),
) {
    let (d, d_v) = (p.head_dim, p.head_dim_v);
    let mut buffer = [0.0f32; MAX_HEAD_DIM];
    let mut out = [0.0f32; MAX_HEAD_DIM];
    let out = &mut out[..d_v];
    let end = first + n_blocks * KV_BLOCK;
    for (row, (q, range)) in q.chunks_exact(d).zip(ranges).enumerate() {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        out.fill(0.0);
        for position in first.max(range.0 as usize)..end.min(range.1 as usize) {
            let (i, j) = ((position - first) / KV_BLOCK, position % KV_BLOCK);
            let key = &mut buffer[..d];
            read_key(i, j, key);
            let mut score = p.scale * dot(q, key);
            if p.softcap > 0.0 {
                score = p.softcap * (score / p.softcap).tanh();
            }
            score -= p.slope * (range.1 as usize - 1 - position) as f32;
            if score > max {
                let shrink = (max - score).exp();
                sum *= shrink;
                out.iter_mut().for_each(|o| *o *= shrink);
                max = score;
            }
            let weight = (score - max).exp();
            sum += weight;
            let value = &mut buffer[..d_v];
            read_value(i, j, value);
            add_scaled(out, value, weight);
        }
        merge_row(
            &mut to.out[row * d_v..][..d_v],
            &mut to.max[row],
            &mut to.sum[row],
            (out, max, sum),
        );
    }
}

/// Merges in a row's partial result `(out, max, sum)` over the keys of a later span.
fn merge_row(out: &mut [f32], max: &mut f32, sum: &mut f32, later: (&[f32], f32, f32)) {
    if later.2 == 0.0 {
        return; // it saw none of them
    }
    let top = max.max(later.1);
    // A row that saw nothing before has a sum of 0 and the smallest of all maxima.
    let (before, now) = ((*max - top).exp(), (later.1 - top).exp());
    out.iter_mut()
        .zip(later.0)
        .for_each(|(o, l)| *o = before * *o + now * l);
    *sum = before * *sum + now * later.2;
    *max = top;
}

pub(super) fn attention_merge(to: &mut AttnPartial<'_>, from: &AttnPartial<'_>, d_v: usize) {
    for (i, out) in to.out.chunks_exact_mut(d_v).enumerate() {
        let later = (&from.out[i * d_v..][..d_v], from.max[i], from.sum[i]);
        merge_row(out, &mut to.max[i], &mut to.sum[i], later);
    }
}

pub(super) fn attention_finish(to: &mut AttnPartial<'_>, d_v: usize) {
    for (out, sum) in to.out.chunks_exact_mut(d_v).zip(&*to.sum) {
        out.iter_mut().for_each(|o| *o /= sum);
    }
}

/// The score of a product `q·k`, and its derivative.
fn score(x: f32, p: &AttnParams) -> (f32, f32) {
    if p.softcap > 0.0 {
        let t = (p.scale * x / p.softcap).tanh();
        (p.softcap * t, p.scale * (1.0 - t * t))
    } else {
        (p.scale * x, p.scale)
    }
}

/// `dq = Σ w·k` with `w = softmax(s)·(dout·v − δ)·s'`, and `lse = ln Σ eˢ`.
pub(super) fn attention_queries(
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
    let (d, d_v) = (p.head_dim, p.head_dim_v);
    for (i, &(start, end)) in ranges.iter().enumerate() {
        let (q, dout, dq) = (
            &q[i * d..][..d],
            &dout[i * d_v..][..d_v],
            &mut dq[i * d..][..d],
        );
        let keys =
            || (start as usize..end as usize).map(|j| (&k[j * d..][..d], &v[j * d_v..][..d_v]));
        let max = keys()
            .map(|(k, _)| score(dot(q, k), p).0)
            .fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = keys()
            .map(|(k, _)| (score(dot(q, k), p).0 - max).exp())
            .sum();
        dq.fill(0.0);
        for (k, v) in keys() {
            let (s, slope) = score(dot(q, k), p);
            add_scaled(
                dq,
                k,
                (s - max).exp() / sum * (dot(dout, v) - delta[i]) * slope,
            );
        }
        lse[i] = max + sum.ln();
    }
}

/// `dk = Σ w·q` with `w = e^(s − lse)·(dout·v − δ)·s'`, and `dv = Σ e^(s − lse)·dout`.
pub(super) fn attention_keys(
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
    let (d, d_v) = (p.head_dim, p.head_dim_v);
    dk.fill(0.0);
    dv.fill(0.0);
    for (j, &(start, end)) in ranges.iter().enumerate() {
        let (k, v) = (&k[j * d..][..d], &v[j * d_v..][..d_v]);
        for i in start as usize..end as usize {
            let (q, dout) = (&q[i * d..][..d], &dout[i * d_v..][..d_v]);
            let (s, slope) = score(dot(q, k), p);
            let weight = (s - lse[i]).exp();
            add_scaled(&mut dv[j * d_v..][..d_v], dout, weight);
            add_scaled(
                &mut dk[j * d..][..d],
                q,
                weight * (dot(dout, v) - delta[i]) * slope,
            );
        }
    }
}
