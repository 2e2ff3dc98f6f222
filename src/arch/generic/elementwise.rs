//! Element-wise kernels, norms, rotations and conversions over [`Lanes`].

use super::lanes::{COS_SIN_LIMIT, Lanes, Widen, cos_sin, exp, times_sigmoid};
use crate::arch::scalar::ERFC;
use crate::arch::view::ColumnsMut;
use half::f16;

/// Vectors of independent partial sums: enough to hide the latency of an addition (4 cycles, two a
/// cycle), and fewer roundings than one long sum has.
const CHAINS: usize = 8;

/// `set!(z, y, |a, b| f)`: `y = f(a, b)` for slices `a`, `b` as long as `y`; `y` may be among them.
///
/// A macro, since closures cannot be forced inline, which all that touches vectors must be.
macro_rules! set {
    ($z:ident, $y:ident, |$($x:ident),*| $f:expr) => {{
        let n = $y.len();
        $(assert_eq!($x.len(), n);)*
        let mut i = 0;
        while i + V::N <= n {
            let result = {
                $(
                    // SAFETY: a vector from `i` on is inside the slice.
                    let $x = unsafe { $z.read($x.as_ptr().add(i)) };
                )*
                $f
            };
            // SAFETY: as above.
            unsafe { result.write($y.as_mut_ptr().add(i)) };
            i += V::N;
        }
        if i < n {
            let result = {
                $(let $x = $z.load(&$x[i..]);)*
                $f
            };
            result.store(&mut $y[i..]);
        }
    }};
}

/// `sum!(z, sum, |a, b| f)`: applies `sum = f(a, b)` to all vectors of equally long slices, and
/// adds up the lanes; past the end of the slices the values are zero.
macro_rules! sum {
    ($z:ident, $sum:ident, |$first:ident $(, $x:ident)*| $f:expr) => {{
        let n = $first.len();
        $(assert_eq!($x.len(), n);)*
        let mut sums = [$z; CHAINS];
        let mut i = 0;
        while i + CHAINS * V::N <= n {
            for (c, $sum) in sums.iter_mut().enumerate() {
                // SAFETY: all chains' vectors from `i` on are inside the slice.
                let $first = unsafe { $z.read($first.as_ptr().add(i + c * V::N)) };
                $(
                    // SAFETY: as above.
                    let $x = unsafe { $z.read($x.as_ptr().add(i + c * V::N)) };
                )*
                *$sum = $f;
            }
            i += CHAINS * V::N;
        }
        for $sum in &mut sums {
            if i < n {
                let $first = $z.load(&$first[i..]);
                $(let $x = $z.load(&$x[i..]);)*
                *$sum = $f;
                i += V::N;
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        (((a + b) + (c + d)) + ((e + f) + (g + h))).sum()
    }};
}

#[inline(always)]
pub(in crate::arch) fn dot<V: Lanes>(z: V, a: &[f32], b: &[f32]) -> f32 {
    sum!(z, sum, |a, b| a.mul_add(b, *sum))
}

#[inline(always)]
pub(in crate::arch) fn add<V: Lanes>(z: V, y: &mut [f32], x: &[f32]) {
    set!(z, y, |y, x| y + x);
}

#[inline(always)]
pub(in crate::arch) fn add_scaled<V: Lanes>(z: V, y: &mut [f32], x: &[f32], a: f32) {
    let a = z.splat(a);
    set!(z, y, |y, x| a.mul_add(x, y));
}

#[inline(always)]
pub(in crate::arch) fn add_product<V: Lanes>(
    z: V,
    y: &mut ColumnsMut<'_>,
    t: &[f32],
    b: &[f32],
    stride: usize,
) {
    add_product_of(z, y, t, b, stride);
}

#[inline(always)]
pub(in crate::arch) fn add_product_f16<V: Lanes>(
    z: V,
    y: &mut ColumnsMut<'_>,
    t: &[f32],
    b: &[f16],
    stride: usize,
) {
    add_product_of(z, y, t, b, stride);
}

/// Four rows share the loads of `b`, two vectors wide; a single row goes eight vectors wide, for as
/// many independent sums.
#[inline(always)]
fn add_product_of<V: Lanes, E: Widen<V>>(
    z: V,
    y: &mut ColumnsMut<'_>,
    t: &[f32],
    b: &[E],
    stride: usize,
) {
    let rank = t.len() / y.rows();
    let end = stride
        .checked_mul(rank - 1)
        .and_then(|last| last.checked_add(y.cols()));
    assert!(
        t.len() == y.rows() * rank && y.cols() <= stride && end.is_some_and(|end| end <= b.len())
    );
    let mut i = 0;
    while i + 4 <= y.rows() {
        add_product_rows::<V, E, 4, 2>(z, y, i, &t[i * rank..(i + 4) * rank], b, stride);
        i += 4;
    }
    while i < y.rows() {
        add_product_rows::<V, E, 1, CHAINS>(z, y, i, &t[i * rank..(i + 1) * rank], b, stride);
        i += 1;
    }
}

/// Adds the product to `R` rows from row `i` on, `C` vectors of columns at a time; `t` has those
/// rows.
#[inline(always)]
fn add_product_rows<V: Lanes, E: Widen<V>, const R: usize, const C: usize>(
    z: V,
    y: &mut ColumnsMut<'_>,
    i: usize,
    t: &[f32],
    b: &[E],
    stride: usize,
) {
    let (cols, rank) = (y.cols(), t.len() / R);
    let mut col = 0;
    while col < cols {
        // SAFETY: rows `i..i + R` are there, and the caller checked the lengths of all columns.
        let (y, b, y_stride) = unsafe {
            (
                y.as_mut_ptr().add(i * y.stride() + col),
                b.as_ptr().add(col),
                y.stride(),
            )
        };
        let n = cols - col;
        if n >= C * V::N {
            // SAFETY: that many columns are left.
            unsafe {
                add_product_tile::<V, E, R, C, true>(z, y, y_stride, t, rank, b, stride, V::N)
            };
            col += C * V::N;
        } else if n >= V::N {
            // SAFETY: as above.
            unsafe {
                add_product_tile::<V, E, R, 1, true>(z, y, y_stride, t, rank, b, stride, V::N)
            };
            col += V::N;
        } else {
            // SAFETY: as above.
            unsafe { add_product_tile::<V, E, R, 1, false>(z, y, y_stride, t, rank, b, stride, n) };
            col = cols;
        }
    }
}

/// Adds the product to a tile of `R` rows and `C` vectors; unless `WHOLE`, the last vector has `n`
/// lanes.
///
/// # Safety
/// `y` must have these columns in `R` rows, `b` in `rank` rows; `t` has `R·rank` values.
#[inline(always)]
unsafe fn add_product_tile<
    V: Lanes,
    E: Widen<V>,
    const R: usize,
    const C: usize,
    const WHOLE: bool,
>(
    z: V,
    y: *mut f32,
    y_stride: usize,
    t: &[f32],
    rank: usize,
    b: *const E,
    stride: usize,
    n: usize,
) {
    let mut sums = [[z; C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the caller's promise.
            let from = unsafe { y.add(r * y_stride + c * V::N) };
            // SAFETY: as above.
            sums[r][c] = unsafe {
                if WHOLE {
                    z.read(from)
                } else {
                    z.read_first(from, n)
                }
            };
        }
    }
    for j in 0..rank {
        let mut weights = [z; R];
        for r in 0..R {
            weights[r] = z.splat(t[r * rank + j]);
        }
        for c in 0..C {
            // SAFETY: the caller's promise.
            let from = unsafe { b.add(j * stride + c * V::N) };
            // SAFETY: as above.
            let b = unsafe {
                if WHOLE {
                    E::read(z, from)
                } else {
                    E::read_first(z, from, n)
                }
            };
            for r in 0..R {
                sums[r][c] = weights[r].mul_add(b, sums[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the caller's promise.
            let to = unsafe { y.add(r * y_stride + c * V::N) };
            // SAFETY: as above.
            unsafe {
                if WHOLE {
                    sums[r][c].write(to)
                } else {
                    sums[r][c].write_first(to, n)
                }
            };
        }
    }
}

#[inline(always)]
pub(in crate::arch) fn rms_norm<V: Lanes>(z: V, y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let mean_square = dot(z, x, x) / x.len() as f32;
    let scale = z.splat(1.0 / (mean_square + eps).sqrt());
    set!(z, y, |x, w| x * scale * w);
}

#[inline(always)]
pub(in crate::arch) fn layer_norm<V: Lanes>(
    z: V,
    y: &mut [f32],
    x: &[f32],
    w: &[f32],
    b: &[f32],
    eps: f32,
) {
    let n = x.len() as f32;
    let mean = sum!(z, sum, |x| x + *sum) / n;
    let m = z.splat(mean);
    // In two passes: E[x²] − E[x]² would cancel. An incomplete last vector is padded with zeros,
    // which the subtraction would make nonzero, so its values are added separately.
    let (vectors, rest) = x.split_at(x.len() / V::N * V::N);
    let squares = sum!(z, sum, |vectors| (vectors - m).mul_add(vectors - m, *sum));
    let squares = rest
        .iter()
        .fold(squares, |sum, x| sum + (x - mean) * (x - mean));
    let scale = z.splat(1.0 / (squares / n + eps).sqrt());
    set!(z, y, |x, w, b| ((x - m) * scale).mul_add(w, b));
}

#[inline(always)]
pub(in crate::arch) fn rms_norm_backward<V: Lanes>(
    z: V,
    dx: &mut [f32],
    dy: &[f32],
    x: &[f32],
    w: &[f32],
    eps: f32,
) {
    let n = x.len() as f32;
    let scale = 1.0 / (dot(z, x, x) / n + eps).sqrt();
    let along = sum!(z, sum, |dy, x, w| (dy * w).mul_add(x, *sum));
    let (scale, shift) = (z.splat(scale), z.splat(scale * scale * scale * along / n));
    set!(z, dx, |dx, dy, x, w| dx + (dy * w * scale - x * shift));
}

#[inline(always)]
pub(in crate::arch) fn layer_norm_backward<V: Lanes>(
    z: V,
    dx: &mut [f32],
    dy: &[f32],
    x: &[f32],
    w: &[f32],
    eps: f32,
) {
    let n = x.len() as f32;
    let mean = sum!(z, sum, |x| x + *sum) / n;
    let m = z.splat(mean);
    let (vectors, rest) = x.split_at(x.len() / V::N * V::N);
    let squares = sum!(z, sum, |vectors| (vectors - m).mul_add(vectors - m, *sum));
    let squares = rest
        .iter()
        .fold(squares, |sum, x| sum + (x - mean) * (x - mean));
    let scale = 1.0 / (squares / n + eps).sqrt();
    // Past the end of the slices the first factors are zero.
    let total = sum!(z, sum, |dy, w| dy.mul_add(w, *sum));
    let along = sum!(z, sum, |dy, x, w| (dy * w).mul_add(x - m, *sum));
    let (scale, mean_dy) = (z.splat(scale), z.splat(total / n));
    let shift = z.splat(along / n) * scale * scale;
    set!(z, dx, |dx, dy, x, w| dx
        + (dy * w - mean_dy - (x - m) * shift) * scale);
}

#[inline(always)]
pub(in crate::arch) fn softmax<V: Lanes>(z: V, x: &mut [f32]) {
    let mut max = [z.splat(f32::NEG_INFINITY); CHAINS];
    let mut chunks = x.chunks_exact(CHAINS * V::N);
    for x in &mut chunks {
        for (x, max) in x.chunks_exact(V::N).zip(&mut max) {
            *max = z.load(x).max(*max);
        }
    }
    let rest = chunks
        .remainder()
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let max = max
        .into_iter()
        .fold(rest, |rest, max| rest.max(max.max_lane()));
    let max = z.splat(max);
    set!(z, x, |x| exp(x - max));
    let total = sum!(z, sum, |x| x + *sum);
    let total = z.splat(total);
    set!(z, x, |x| x / total);
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
    for ((cos, sin), f) in cos
        .chunks_mut(V::N)
        .zip(sin.chunks_mut(V::N))
        .zip(frequencies.chunks(V::N))
    {
        let angles = pos * z.load(f);
        // Angles this large are rare, as is NaN: the library reduces them.
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
    for ((x, cos), sin) in x
        .chunks_mut(2 * V::N)
        .zip(cos.chunks(V::N))
        .zip(sin.chunks(V::N))
    {
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
    set!(z, gate, |gate, up| times_sigmoid(gate, gate) * up);
}

/// `x/2·(1 + tanh t) = x·σ(2t)`, with `t = √(2/π)·(x + 0.044715·x³)`; the right side does not
/// cancel.
#[inline(always)]
fn gelu_tanh<V: Lanes>(x: V) -> V {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    let cubic = (x * x).mul_add(
        x.splat(0.044_715 * TWO_SQRT_2_OVER_PI),
        x.splat(TWO_SQRT_2_OVER_PI),
    );
    times_sigmoid(x, x * cubic)
}

#[inline(always)]
pub(in crate::arch) fn gelu_mul<V: Lanes>(z: V, gate: &mut [f32], up: &[f32]) {
    set!(z, gate, |gate, up| gelu_tanh(gate) * up);
}

#[inline(always)]
pub(in crate::arch) fn gelu<V: Lanes>(z: V, x: &mut [f32]) {
    set!(z, x, |x| gelu_tanh(x));
}

/// `x/2·(1 + erf(x/√2))`, see [`ERFC`].
#[inline(always)]
fn gelu_by_erf<V: Lanes>(x: V) -> V {
    let (one, half) = (x.splat(1.0), x.splat(0.5));
    // Farther out the tail is 0, also for infinities.
    let near = curved(x, 40.0);
    let z = near.abs() * x.splat(std::f32::consts::FRAC_1_SQRT_2);
    let t = one / z.mul_add(half, one);
    // A loop: in a closure the operations would stay calls, thirty times as slow.
    let mut sum = x.splat(0.0);
    for c in ERFC.iter().rev() {
        sum = sum.mul_add(t, x.splat(*c));
    }
    let tail = half * near * (t * exp(sum - z * z));
    x.if_less(x.splat(0.0), tail, x - tail)
}

#[inline(always)]
pub(in crate::arch) fn gelu_erf_mul<V: Lanes>(z: V, gate: &mut [f32], up: &[f32]) {
    set!(z, gate, |gate, up| gelu_by_erf(gate) * up);
}

#[inline(always)]
pub(in crate::arch) fn gelu_erf<V: Lanes>(z: V, x: &mut [f32]) {
    set!(z, x, |x| gelu_by_erf(x));
}

#[inline(always)]
pub(in crate::arch) fn swiglu_oai<V: Lanes>(z: V, gate: &mut [f32], up: &[f32]) {
    set!(z, gate, |gate, up| {
        let g = gate.splat(7.0).min(gate);
        times_sigmoid(g, g * gate.splat(1.702)) * (curved(up, 7.0) + gate.splat(1.0))
    });
}

#[inline(always)]
pub(in crate::arch) fn sigmoid_mul<V: Lanes>(z: V, gate: &mut [f32], x: &[f32]) {
    set!(z, gate, |gate, x| sigmoid(gate).0 * x);
}

/// `σ(t)` and its derivative.
#[inline(always)]
fn sigmoid<V: Lanes>(t: V) -> (V, V) {
    let one = t.splat(1.0);
    let e = exp(t.splat(0.0) - t.abs());
    let inverse = one / (one + e);
    (
        t.if_less(t.splat(0.0), e, one) * inverse,
        e * inverse * inverse,
    )
}

/// `x` clamped to bounds outside which activations are linear; NaN passes.
#[inline(always)]
fn curved<V: Lanes>(x: V, bound: f32) -> V {
    x.splat(bound).min(x.splat(-bound).max(x))
}

/// `silu(x)` and its derivative `σ(x)·(1 + x·(1 − σ(x)))`.
#[inline(always)]
fn silu_slope<V: Lanes>(x: V) -> (V, V) {
    let (sigmoid, slope) = sigmoid(x);
    (
        times_sigmoid(x, x),
        curved(x, 100.0).mul_add(slope, sigmoid),
    )
}

/// `gelu(x) = x·σ(u)` and its derivative `σ(u) + x·σ'(u)·u'`.
#[inline(always)]
fn gelu_slope<V: Lanes>(x: V) -> (V, V) {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    let y = gelu_tanh(x);
    let x = curved(x, 20.0);
    let square = x * x;
    let cubic = square.mul_add(
        x.splat(0.044_715 * TWO_SQRT_2_OVER_PI),
        x.splat(TWO_SQRT_2_OVER_PI),
    );
    let rise = square.mul_add(
        x.splat(3.0 * 0.044_715 * TWO_SQRT_2_OVER_PI),
        x.splat(TWO_SQRT_2_OVER_PI),
    );
    let (sigmoid, slope) = sigmoid(x * cubic);
    (y, (x * rise).mul_add(slope, sigmoid))
}

#[inline(always)]
pub(in crate::arch) fn silu_mul_backward<V: Lanes>(
    z: V,
    gate: &mut [f32],
    up: &mut [f32],
    dy: &[f32],
) {
    for ((gate, up), dy) in gate
        .chunks_mut(V::N)
        .zip(up.chunks_mut(V::N))
        .zip(dy.chunks(V::N))
    {
        let ((y, slope), dy) = (silu_slope(z.load(gate)), z.load(dy));
        (dy * z.load(up) * slope).store(gate);
        (dy * y).store(up);
    }
}

#[inline(always)]
pub(in crate::arch) fn gelu_mul_backward<V: Lanes>(
    z: V,
    gate: &mut [f32],
    up: &mut [f32],
    dy: &[f32],
) {
    for ((gate, up), dy) in gate
        .chunks_mut(V::N)
        .zip(up.chunks_mut(V::N))
        .zip(dy.chunks(V::N))
    {
        let ((y, slope), dy) = (gelu_slope(z.load(gate)), z.load(dy));
        (dy * z.load(up) * slope).store(gate);
        (dy * y).store(up);
    }
}

#[inline(always)]
pub(in crate::arch) fn gelu_backward<V: Lanes>(z: V, x: &mut [f32], dy: &[f32]) {
    set!(z, x, |x, dy| gelu_slope(x).1 * dy);
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
