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
