//! Element-wise kernels, norms, rotations and conversions over [`Lanes`].

use super::{COS_SIN_LIMIT, Lanes, cos_sin, times_sigmoid};
use half::f16;

/// Vectors of independent partial sums: enough to hide the latency of an addition (4 cycles, two a
/// cycle), and fewer roundings than one long sum has.
const CHAINS: usize = 8;

/// `Σ term(a, b)` over all vectors of `a` and `b`; lanes behind the end are zero in both.
#[inline(always)]
fn accumulate<V: Lanes>(z: V, a: &[f32], b: &[f32], term: impl Fn(V, V, V) -> V) -> f32 {
    let mut sums = [z; CHAINS];
    let (a_chunks, b_chunks) = (a.chunks_exact(CHAINS * V::N), b.chunks_exact(CHAINS * V::N));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((a, b), sum) in a.chunks_exact(V::N).zip(b.chunks_exact(V::N)).zip(&mut sums) {
            *sum = term(z.load(a), z.load(b), *sum);
        }
    }
    for ((a, b), sum) in a_rest.chunks(V::N).zip(b_rest.chunks(V::N)).zip(&mut sums) {
        *sum = term(z.load(a), z.load(b), *sum);
    }
    let [a, b, c, d, e, f, g, h] = sums;
    (((a + b) + (c + d)) + ((e + f) + (g + h))).sum()
}

/// `y = f(y, x)`.
#[inline(always)]
fn update<V: Lanes>(z: V, y: &mut [f32], x: &[f32], f: impl Fn(V, V) -> V) {
    let mut y_chunks = y.chunks_exact_mut(V::N);
    let x_chunks = x.chunks_exact(V::N);
    let x_rest = x_chunks.remainder();
    for (y, x) in (&mut y_chunks).zip(x_chunks) {
        f(z.load(y), z.load(x)).store(y);
    }
    let y = y_chunks.into_remainder();
    if !y.is_empty() {
        f(z.load(y), z.load(x_rest)).store(y);
    }
}

/// `y = f(x)`, in place.
#[inline(always)]
fn map<V: Lanes>(z: V, y: &mut [f32], f: impl Fn(V) -> V) {
    let mut chunks = y.chunks_exact_mut(V::N);
    for y in &mut chunks {
        f(z.load(y)).store(y);
    }
    let y = chunks.into_remainder();
    if !y.is_empty() {
        f(z.load(y)).store(y);
    }
}

#[inline(always)]
pub(in crate::arch) fn dot<V: Lanes>(z: V, a: &[f32], b: &[f32]) -> f32 {
    accumulate(z, a, b, |a, b, sum| a.mul_add(b, sum))
}

#[inline(always)]
pub(in crate::arch) fn add<V: Lanes>(z: V, y: &mut [f32], x: &[f32]) {
    update(z, y, x, |y, x| y + x);
}

#[inline(always)]
pub(in crate::arch) fn add_scaled<V: Lanes>(z: V, y: &mut [f32], x: &[f32], a: f32) {
    let a = z.splat(a);
    update(z, y, x, |y, x| a.mul_add(x, y));
}

#[inline(always)]
pub(in crate::arch) fn rms_norm<V: Lanes>(z: V, y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let mean_square = dot(z, x, x) / x.len() as f32;
    let scale = z.splat(1.0 / (mean_square + eps).sqrt());
    for ((y, x), w) in y.chunks_mut(V::N).zip(x.chunks(V::N)).zip(w.chunks(V::N)) {
        (z.load(x) * scale * z.load(w)).store(y);
    }
}

#[inline(always)]
pub(in crate::arch) fn layer_norm<V: Lanes>(z: V, y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mean = accumulate(z, x, x, |x, _, sum| x + sum) / n;
    // In two passes: E[x²] − E[x]² would cancel.
    let m = z.splat(mean);
    update(z, y, x, |_, x| x - m);
    let scale = z.splat(1.0 / (dot(z, y, y) / n + eps).sqrt());
    for ((y, w), b) in y.chunks_mut(V::N).zip(w.chunks(V::N)).zip(b.chunks(V::N)) {
        (z.load(y) * scale).mul_add(z.load(w), z.load(b)).store(y);
    }
}

#[inline(always)]
pub(in crate::arch) fn softmax<V: Lanes>(z: V, x: &mut [f32]) {
    let lowest = z.splat(f32::NEG_INFINITY);
    let mut max = lowest;
    let chunks = x.chunks_exact(V::N);
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in chunks {
        max = z.load(x).max(max);
    }
    let max = z.splat(max.max_lane().max(rest));
    map(z, x, |x| super::exp(x - max));
    let sum = z.splat(accumulate(z, x, x, |x, _, sum| x + sum));
    map(z, x, |x| x / sum);
}

#[inline(always)]
pub(in crate::arch) fn rope_angles<V: Lanes>(
    z: V,
    cos: &mut [f32],
    sin: &mut [f32],
    frequencies: &[f32],
    pos: f32,
    factor: f32,
) {
    let (pos, factor, limit) = (z.splat(pos), z.splat(factor), z.splat(COS_SIN_LIMIT));
    for ((cos, sin), f) in cos.chunks_mut(V::N).zip(sin.chunks_mut(V::N)).zip(frequencies.chunks(V::N)) {
        let angles = pos * z.load(f);
        // Positions this far away are rare, and not numbers too: let the library reduce them.
        if angles.abs().if_less(limit, z, limit).max_lane() > 0.0 {
            let mut buffer = [0.0; 16];
            angles.store(&mut buffer);
            for ((cos, sin), angle) in cos.iter_mut().zip(&mut *sin).zip(buffer) {
                (*cos, *sin) = (angle.cos(), angle.sin());
            }
        } else {
            let (c, s) = cos_sin(angles);
            c.store(cos);
            s.store(sin);
        }
        (z.load(cos) * factor).store(cos);
        (z.load(sin) * factor).store(sin);
    }
}

#[inline(always)]
pub(in crate::arch) fn rope_norm<V: Lanes>(z: V, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((x, cos), sin) in x.chunks_mut(2 * V::N).zip(cos.chunks(V::N)).zip(sin.chunks(V::N)) {
        let (first, second) = x.split_at_mut(x.len().min(V::N));
        let [a, b] = V::rotate_pairs([z.load(first), z.load(second)], z.load(cos), z.load(sin));
        a.store(first);
        b.store(second);
    }
}

#[inline(always)]
pub(in crate::arch) fn rope_neox<V: Lanes>(z: V, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    let halves = first.chunks_mut(V::N).zip(second.chunks_mut(V::N));
    for (((first, second), cos), sin) in halves.zip(cos.chunks(V::N)).zip(sin.chunks(V::N)) {
        let (a, b) = (z.load(first), z.load(second));
        let (cos, sin) = (z.load(cos), z.load(sin));
        (a * cos - b * sin).store(first);
        a.mul_add(sin, b * cos).store(second);
    }
}

#[inline(always)]
pub(in crate::arch) fn silu_mul<V: Lanes>(z: V, gate: &mut [f32], up: &[f32]) {
    update(z, gate, up, |g, u| times_sigmoid(g, g) * u);
}

/// `x/2·(1 + tanh t) = x·σ(2t)`, with `t = √(2/π)·(x + 0.044715·x³)`; the right side does not cancel.
#[inline(always)]
fn gelu_tanh<V: Lanes>(x: V) -> V {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_1;
    let cubic = (x * x).mul_add(x.splat(0.044_715 * TWO_SQRT_2_OVER_PI), x.splat(TWO_SQRT_2_OVER_PI));
    times_sigmoid(x, x * cubic)
}

#[inline(always)]
pub(in crate::arch) fn gelu_mul<V: Lanes>(z: V, gate: &mut [f32], up: &[f32]) {
    update(z, gate, up, |g, u| gelu_tanh(g) * u);
}

#[inline(always)]
pub(in crate::arch) fn gelu<V: Lanes>(z: V, x: &mut [f32]) {
    map(z, x, gelu_tanh);
}

#[inline(always)]
pub(in crate::arch) fn f32_to_f16<V: Lanes>(z: V, x: &[f32], y: &mut [f16]) {
    let x_chunks = x.chunks_exact(V::N);
    let x_rest = x_chunks.remainder();
    let mut y_chunks = y.chunks_exact_mut(V::N);
    for (x, y) in x_chunks.zip(&mut y_chunks) {
        // SAFETY: the chunk holds a vector.
        unsafe { z.load(x).write_f16(y.as_mut_ptr()) };
    }
    for (x, y) in x_rest.iter().zip(y_chunks.into_remainder()) {
        *y = f16::from_f32(*x);
    }
}

#[inline(always)]
pub(in crate::arch) fn f16_to_f32<V: Lanes>(z: V, x: &[f16], y: &mut [f32]) {
    let x_chunks = x.chunks_exact(V::N);
    let x_rest = x_chunks.remainder();
    let mut y_chunks = y.chunks_exact_mut(V::N);
    for (x, y) in x_chunks.zip(&mut y_chunks) {
        // SAFETY: the chunk holds a vector.
        unsafe { z.read_f16(x.as_ptr()) }.store(y);
    }
    for (x, y) in x_rest.iter().zip(y_chunks.into_remainder()) {
        *y = x.to_f32();
    }
}
