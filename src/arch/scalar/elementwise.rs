//! Element-wise kernels, norms, rotations and conversions.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::table::SliceKernels;
use crate::arch::view::ColumnsMut;
use half::f16;

/// Coefficients of the exponent of `1 − erf(x)` for `x ≥ 0`: with `t = 1/(1 + x/2)` it is
/// `t·exp(c₀ + c₁t + … + c₉t⁹ − x²)`, with a relative error below 1.2e-7, except for rounding to
/// `f32` (W. J. Press et al., Numerical Recipes in C, 2nd edition, §6.2).
pub(in crate::arch) const ERFC: [f32; 10] = [
    -1.265_512_2,
    1.000_023_7,
    0.374_091_96,
    0.096_784_18,
    -0.186_288_06,
    0.278_868_07,
    -1.135_204,
    1.488_515_9,
    -0.822_152_23,
    0.170_872_77,
];

/// Independent partial sums: lets the compiler use vectors, and rounds less than one long sum.
const LANES: usize = 16;

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let tail: f32 = a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum();
    for i in 0..a_chunks.len() {
        for l in 0..LANES {
            sums[l] += a_chunks[i][l] * b_chunks[i][l];
        }
    }
    sums.iter().sum::<f32>() + tail
}

pub(super) fn add(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

pub(super) fn add_scaled(y: &mut [f32], x: &[f32], a: f32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

pub(super) fn add_product(y: &mut ColumnsMut<'_>, t: &[f32], b: &[f32], stride: usize) {
    let cols = y.cols();
    for (i, t) in t.chunks(t.len() / y.rows()).enumerate() {
        for (b, t) in b.chunks(stride).zip(t) {
            add_scaled(y.row(i), &b[..cols], *t);
        }
    }
}

pub(super) fn add_product_f16(y: &mut ColumnsMut<'_>, t: &[f32], b: &[f16], stride: usize) {
    for (i, t) in t.chunks(t.len() / y.rows()).enumerate() {
        for (b, t) in b.chunks(stride).zip(t) {
            y.row(i)
                .iter_mut()
                .zip(b)
                .for_each(|(y, b)| *y += t * b.to_f32());
        }
    }
}

pub(super) fn delta_rule(
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    beta: f32,
    rate: &[f32],
    out: &mut [f32],
) {
    let rate = |i: usize| if rate.len() == 1 { rate[0] } else { rate[i] };
    // State times key: the value that the state predicts.
    out.fill(0.0);
    for (i, (row, k)) in state.chunks_exact_mut(v.len()).zip(k).enumerate() {
        row.iter_mut().for_each(|s| *s *= rate(i));
        add_scaled(out, row, *k);
    }
    out.iter_mut()
        .zip(v)
        .for_each(|(said, v)| *said = beta * (v - *said));
    for (row, k) in state.chunks_exact_mut(v.len()).zip(k) {
        add_scaled(row, out, *k);
    }
    out.fill(0.0);
    for (row, q) in state.chunks_exact(v.len()).zip(q) {
        add_scaled(out, row, *q);
    }
}

pub(super) fn ssm_step(
    state: &mut [f32],
    b: &[f32],
    c: &[f32],
    decay: f32,
    dt: f32,
    x: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for (state, (b, c)) in state.chunks_exact_mut(x.len()).zip(b.iter().zip(c)) {
        state
            .iter_mut()
            .zip(x)
            .for_each(|(s, x)| *s = *s * decay + dt * x * b);
        add_scaled(out, state, *c);
    }
}

pub(super) fn ssm_step_by_state(
    state: &mut [f32],
    a: &[f32],
    b: &[f32],
    c: &[f32],
    dt: &[f32],
    x: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for ((state, a), (b, c)) in state
        .chunks_exact_mut(x.len())
        .zip(a.chunks_exact(x.len()))
        .zip(b.iter().zip(c))
    {
        for (i, (s, a)) in state.iter_mut().zip(a).enumerate() {
            *s = *s * (dt[i] * a).exp() + dt[i] * x[i] * b;
        }
        add_scaled(out, state, *c);
    }
}

pub(super) fn rwkv6_step(
    state: &mut [f32],
    r: &[f32],
    k: &[f32],
    v: &[f32],
    w: &[f32],
    first: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for (i, row) in state.chunks_exact_mut(v.len()).enumerate() {
        add_scaled(out, v, r[i] * first[i] * k[i]);
        add_scaled(out, row, r[i]);
        row.iter_mut().for_each(|s| *s *= w[i]);
        add_scaled(row, v, k[i]);
    }
}

pub(super) fn rwkv7_step(
    state: &mut [f32],
    [r, k, w, a, b]: [&[f32]; 5],
    v: &[f32],
    out: &mut [f32],
) {
    for ((row, v), out) in state.chunks_exact_mut(r.len()).zip(v).zip(out) {
        let said = dot(row, a);
        row.iter_mut().zip(w).for_each(|(s, w)| *s *= w);
        add_scaled(row, b, said);
        add_scaled(row, k, *v);
        *out = dot(row, r);
    }
}

pub(super) fn causal_conv(
    past: &mut [f32],
    (taps, stride): (&[f32], usize),
    x: &[f32],
    out: &mut [f32],
) {
    for (x, taps) in past
        .chunks_exact(x.len())
        .chain([x])
        .zip(taps.chunks(stride))
    {
        out.iter_mut()
            .zip(x)
            .zip(taps)
            .for_each(|((out, x), tap)| *out += x * tap);
    }
    if let Some(last) = past.len().checked_sub(x.len()) {
        past.copy_within(x.len().., 0);
        past[last..].copy_from_slice(x);
    }
}

pub(super) fn rms_norm(y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let mean_square = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean_square + eps).sqrt();
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = x * scale * w;
    }
}

pub(super) fn layer_norm(y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n;
    let scale = 1.0 / (variance + eps).sqrt();
    for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
        *y = (x - mean) * scale * w + b;
    }
}

pub(super) fn rms_norm_backward(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
    let n = x.len() as f32;
    let scale = 1.0 / (dot(x, x) / n + eps).sqrt();
    let along: f32 = dy.iter().zip(x).zip(w).map(|((dy, x), w)| dy * w * x).sum();
    let shift = scale * scale * scale * along / n;
    for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(w) {
        *dx += dy * w * scale - x * shift;
    }
}

pub(super) fn layer_norm_backward(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n;
    let scale = 1.0 / (variance + eps).sqrt();
    let mean_dy = dot(dy, w) / n;
    let along: f32 = dy
        .iter()
        .zip(x)
        .zip(w)
        .map(|((dy, x), w)| dy * w * (x - mean))
        .sum();
    let shift = along / n * scale * scale;
    for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(w) {
        *dx += (dy * w - mean_dy - (x - mean) * shift) * scale;
    }
}

pub(super) fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    for x in x {
        *x /= sum;
    }
}

pub(super) fn rope_angles(
    cos: &mut [f32],
    sin: &mut [f32],
    frequencies: &[f32],
    pos: f32,
    factor: f32,
) {
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
        let angle = pos * frequency;
        (*cos, *sin) = (factor * angle.cos(), factor * angle.sin());
    }
}

pub(super) fn rope_norm(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (pair, (c, s)) in x.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
        (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
    }
}

pub(super) fn rope_neox(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for ((a, b), (c, s)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
    }
}

/// `x·σ(t)`, with an exponential that cannot overflow; 0 for `x = t = −∞`.
fn times_sigmoid(x: f32, t: f32) -> f32 {
    let e = (-t.abs()).exp();
    if t < 0.0 {
        x.max(f32::MIN) * e / (1.0 + e)
    } else {
        x / (1.0 + e)
    }
}

/// `x·σ(x)`.
fn silu(x: f32) -> f32 {
    times_sigmoid(x, x)
}

/// `x/2·(1 + tanh t) = x·σ(2t)` with `t = √(2/π)·(x + 0.044715·x³)`; the right side does not
/// cancel.
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    times_sigmoid(x, 2.0 * SQRT_2_OVER_PI * x * (1.0 + 0.044715 * x * x))
}

pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = silu(*g) * u;
    }
}

pub(super) fn gelu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = gelu_tanh(*g) * u;
    }
}

pub(super) fn gelu(x: &mut [f32]) {
    for x in x {
        *x = gelu_tanh(*x);
    }
}

/// `x/2·(1 + erf(x/√2)) = x/2·erfc(−x/√2)` (arXiv 1606.08415).
fn gelu_by_erf(x: f32) -> f32 {
    // Farther out the tail is 0, also for infinities.
    let near = x.clamp(-40.0, 40.0);
    let z = near.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let sum = ERFC.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let tail = 0.5 * near * t * (sum - z * z).exp();
    if x < 0.0 { tail } else { x - tail }
}

pub(super) fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut()
        .zip(up)
        .for_each(|(gate, up)| *gate = gelu_by_erf(*gate) * up);
}

pub(super) fn gelu_erf(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = gelu_by_erf(*x));
}

pub(super) fn swiglu_oai(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        let g = gate.clamp(f32::NEG_INFINITY, 7.0);
        *gate = times_sigmoid(g, 1.702 * g) * (up.clamp(-7.0, 7.0) + 1.0);
    }
}

pub(super) fn sigmoid_mul(gate: &mut [f32], x: &[f32]) {
    gate.iter_mut()
        .zip(x)
        .for_each(|(gate, x)| *gate = sigmoid(*gate).0 * x);
}

/// `σ(t)` and its derivative.
fn sigmoid(t: f32) -> (f32, f32) {
    let e = (-t.abs()).exp();
    (
        if t < 0.0 { e } else { 1.0 } / (1.0 + e),
        e / ((1.0 + e) * (1.0 + e)),
    )
}

/// Derivative of `silu`: `σ(x)·(1 + x·(1 − σ(x)))`. Outside the bounds `silu` is linear.
fn silu_slope(x: f32) -> f32 {
    let (sigmoid, slope) = sigmoid(x);
    sigmoid + x.clamp(-100.0, 100.0) * slope
}

/// Derivative of `gelu(x) = x·σ(u)`: `σ(u) + x·σ'(u)·u'`. Outside the bounds `gelu` is linear.
fn gelu_slope(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    let x = x.clamp(-20.0, 20.0);
    let (sigmoid, slope) = sigmoid(TWO_SQRT_2_OVER_PI * x * (1.0 + 0.044715 * x * x));
    sigmoid + x * slope * TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
}

pub(super) fn silu_mul_backward(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
    for ((g, u), dy) in gate.iter_mut().zip(up).zip(dy) {
        (*g, *u) = (dy * *u * silu_slope(*g), dy * silu(*g));
    }
}

pub(super) fn gelu_mul_backward(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
    for ((g, u), dy) in gate.iter_mut().zip(up).zip(dy) {
        (*g, *u) = (dy * *u * gelu_slope(*g), dy * gelu_tanh(*g));
    }
}

pub(super) fn gelu_backward(x: &mut [f32], dy: &[f32]) {
    for (x, dy) in x.iter_mut().zip(dy) {
        *x = dy * gelu_slope(*x);
    }
}

pub(super) fn f32_to_f16(x: &[f32], y: &mut [f16]) {
    for (x, y) in x.iter().zip(y) {
        *y = f16::from_f32(*x);
    }
}

pub(super) fn f16_to_f32(x: &[f16], y: &mut [f32]) {
    for (x, y) in x.iter().zip(y) {
        *y = x.to_f32();
    }
}

macro_rules! table {
    ([] $($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? { $($checks:tt)* })*) => {
        pub(super) const TABLE: SliceKernels = SliceKernels { $($name,)* };
    };
}
for_each_slice_kernel!(table []);
