//! Softmax attention with a running maximum, one key at a time (Milakov & Gimelshein, arXiv
//! 1805.02867): no score is ever stored.

use super::elementwise::{add_scaled, dot};
use crate::arch::AttnParams;

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

/// Heads are at most this wide (checked when a model is opened).
const MAX_HEAD_DIM: usize = crate::arch::MAX_HEAD_DIM;

pub(super) fn attention<T: Widen>(out: &mut [f32], q: &[f32], k: &[T], v: &[T], ranges: &[(u32, u32)], p: &AttnParams) {
    let mut buffer = [0.0f32; MAX_HEAD_DIM];
    let rows = out.chunks_exact_mut(p.head_dim_v).zip(q.chunks_exact(p.head_dim));
    for ((out, q), &(start, end)) in rows.zip(ranges) {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        out.fill(0.0);
        for j in start as usize..end as usize {
            let key = &mut buffer[..p.head_dim];
            T::widen(&k[j * p.head_dim..][..p.head_dim], key);
            let mut score = p.scale * dot(q, key);
            if p.softcap > 0.0 {
                score = p.softcap * (score / p.softcap).tanh();
            }
            if score > max {
                let shrink = (max - score).exp();
                sum *= shrink;
                out.iter_mut().for_each(|o| *o *= shrink);
                max = score;
            }
            let weight = (score - max).exp();
            sum += weight;
            let value = &mut buffer[..p.head_dim_v];
            T::widen(&v[j * p.head_dim_v..][..p.head_dim_v], value);
            add_scaled(out, value, weight);
        }
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
        let (q, dout, dq) = (&q[i * d..][..d], &dout[i * d_v..][..d_v], &mut dq[i * d..][..d]);
        let keys = || (start as usize..end as usize).map(|j| (&k[j * d..][..d], &v[j * d_v..][..d_v]));
        let max = keys().map(|(k, _)| score(dot(q, k), p).0).fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = keys().map(|(k, _)| (score(dot(q, k), p).0 - max).exp()).sum();
        dq.fill(0.0);
        for (k, v) in keys() {
            let (s, slope) = score(dot(q, k), p);
            add_scaled(dq, k, (s - max).exp() / sum * (dot(dout, v) - delta[i]) * slope);
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
            add_scaled(&mut dk[j * d..][..d], q, weight * (dot(dout, v) - delta[i]) * slope);
        }
    }
}
