//! How the quantisers choose scales: weighted least squares over a handful of candidate grids.
//!
//! For fixed integer codes the best scale (and minimum) of a block is a closed formula, and for a
//! fixed scale the best codes are a rounding. Neither says which codes to start from, so a series
//! of slightly stretched and shrunk grids is tried and the best one kept; the idea, the weights and
//! the range of the series are those of ggml's K-quants. In addition, the scales of a super-block
//! are chosen together: after they are rounded to their few bits, neighbours are tried and the two
//! f16 factors are fitted once more to the resulting codes.

use super::block::{f16_value, to_f16};
use super::iq_grids::IQ4_VALUES;
use super::scalar_fit::{Levels, ScalarFit, code, codes, inverse, nearest_level};

/// Blocks whose values are all smaller become zero: the smallest f16 scale is 6·10⁻⁸.
const TINY: f32 = 1e-15;

/// How often the f16 factors of a super-block are fitted again.
const REFITS: usize = 3;

/// `Σ w·(scale·q + min − x)²` for the best codes.
fn error<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    scale: f32,
    min: f32,
    lo: f32,
    hi: f32,
) -> f32 {
    let inverse = inverse(scale);
    sum::<N>(|i| {
        let e = scale * code(x[i], inverse, min, lo, hi) + min - x[i];
        w[i] * e * e
    })
}

/// `Σ f(i)` for `i` in `0..N`, in interleaved sums, which the compiler can keep in vectors.
#[inline(always)]
fn sum<const N: usize>(f: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0; 8];
    for i in 0..N / 8 {
        for lane in 0..8 {
            sums[lane] += f(8 * i + lane);
        }
    }
    sums.iter().sum()
}

/// The value of largest magnitude.
fn extreme(x: &[f32]) -> f32 {
    x.iter()
        .fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m })
}

/// Scale (of either sign) of the grid `scale · q`, `q` in `−n..n`, for weighted values.
pub(super) fn symmetric<const N: usize>(x: &[f32; N], w: &[f32; N], n: f32) -> f32 {
    // The value of largest magnitude gets the code −n, which has no positive counterpart.
    let extreme = extreme(x);
    if extreme.abs() < TINY {
        return 0.0;
    }
    let (mut best, mut best_gain) = (extreme / -n, f32::NEG_INFINITY);
    for step in -9..=9 {
        let inverse = -(n + 0.1 * step as f32) / extreme;
        let q: [f32; N] = std::array::from_fn(|i| code(x[i], inverse, 0.0, -n, n - 1.0));
        let xq = sum::<N>(|i| w[i] * x[i] * q[i]);
        let qq = sum::<N>(|i| w[i] * q[i] * q[i]);
        // With scale = xq/qq the error is Σ w·x² − xq²/qq.
        if qq > 0.0 && xq * xq > best_gain * qq {
            (best, best_gain) = (xq / qq, xq * xq / qq);
        }
    }
    best
}

/// Scale of the grid `scale · q`, `q` in `−1..=1`, for weighted values.
pub(super) fn ternary<const N: usize>(x: &[f32; N], w: &[f32; N]) -> f32 {
    let largest = extreme(x).abs();
    if largest < TINY {
        return 0.0;
    }
    let (mut best, mut best_gain) = (largest, 0.0);
    for step in 0..24 {
        let q = codes(x, largest / (0.6 + 0.1 * step as f32), 0.0, -1.0, 1.0);
        let xq = sum::<N>(|i| w[i] * x[i] * q[i]);
        let qq = sum::<N>(|i| w[i] * q[i] * q[i]);
        if qq > 0.0 && xq * xq > best_gain * qq {
            (best, best_gain) = (xq / qq, xq * xq / qq);
        }
    }
    best
}

/// Scale (of either sign) of the grid `scale · IQ4_VALUES[q]` for weighted values.
pub(super) fn iq4<const N: usize>(x: &[f32; N], w: &[f32; N]) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < TINY {
        return 0.0;
    }
    let (mut best, mut best_gain) = (0.0, f32::NEG_INFINITY);
    // The table is asymmetric: the extreme value may belong at either end.
    for end in [IQ4_VALUES[0], IQ4_VALUES[15]] {
        for step in -7..=7 {
            let inverse = (end as f32 + step as f32) / extreme;
            let v = iq4_codes(x, inverse).map(|q| IQ4_VALUES[q as usize] as f32);
            let xv = sum::<N>(|i| w[i] * x[i] * v[i]);
            let vv = sum::<N>(|i| w[i] * v[i] * v[i]);
            if vv > 0.0 && xv * xv > best_gain * vv {
                (best, best_gain) = (xv / vv, xv * xv / vv);
            }
        }
    }
    best
}

/// Codes whose [`IQ4_VALUES`] come nearest to `x · inverse`.
pub(super) fn iq4_codes<const N: usize>(x: &[f32; N], inverse: f32) -> [u8; N] {
    x.map(|x| {
        let v = 2.0 * x * inverse;
        // The code is the number of midpoints below.
        IQ4_VALUES
            .windows(2)
            .map(|p| (v > (p[0] as i16 + p[1] as i16) as f32) as u8)
            .sum()
    })
}

/// Super-block on the grids `d · sc[s] · IQ4_VALUES[q]`: `d`, and `sc` of eight sub-blocks, in −32..32.
pub(super) type Iq4Super = ScalarFit<256, ([u8; 2], [i8; 8])>;

/// Fits eight sub-blocks of 32.
pub(super) fn iq4_super(x: &[f32; 256], w: &[f32; 256]) -> Iq4Super {
    let (xs, ws) = (x.as_chunks::<32>().0, w.as_chunks::<32>().0);
    let scales: [f32; 8] = std::array::from_fn(|s| iq4(&xs[s], &ws[s]));
    let extreme = extreme(&scales);
    let value = |q: u8| f32::from(IQ4_VALUES[usize::from(q)]);

    let settle = |d: [u8; 2]| {
        let dv = f16_value(d);
        let per_d = inverse(dv);
        let mut total = 0.0;
        let mut fit = Iq4Super::unset((d, [0; 8]), Levels::Table(&IQ4_VALUES));
        for s in 0..8 {
            let near = code(scales[s], per_d, 0.0, -32.0, 31.0);
            let mut best_error = f32::INFINITY;
            for sc in [near, near - 1.0, near + 1.0] {
                let scale = dv * sc;
                let q = iq4_codes(&xs[s], inverse(scale));
                let e = sum::<32>(|i| {
                    let e = scale * value(q[i]) - xs[s][i];
                    ws[s][i] * e * e
                });
                if e < best_error && (-32.0..32.0).contains(&sc) {
                    best_error = e;
                    fit.fields.1[s] = sc as i8;
                    fit.scales[32 * s..32 * s + 32].fill(scale);
                    fit.q[32 * s..32 * s + 32].copy_from_slice(&q);
                }
            }
            total += best_error;
        }
        (fit, total)
    };

    let (mut best, mut best_error) = settle(to_f16(extreme / -32.0));
    for _ in 0..REFITS {
        // Least squares for x ≈ d·a.
        let sc = &best.fields.1;
        let a: [f32; 256] = std::array::from_fn(|i| f32::from(sc[i / 32]) * value(best.q[i]));
        let xa = sum::<256>(|i| w[i] * x[i] * a[i]);
        let aa = sum::<256>(|i| w[i] * a[i] * a[i]);
        let (next, next_error) = settle(to_f16(xa / aa));
        if next_error >= best_error || next_error.is_nan() {
            break;
        }
        (best, best_error) = (next, next_error);
    }
    best
}

/// Scale among `scales` and codes with the least error of the grid `scale · values[q]`.
pub(super) fn in_table<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    values: &[i8; 16],
    scales: impl IntoIterator<Item = f32>,
) -> (f32, [u8; N]) {
    let mut best = (0.0, [0; N], f32::INFINITY);
    for scale in scales {
        let mut total = 0.0;
        let q = std::array::from_fn(|i| {
            let q = nearest_level(values, scale, 0.0, x[i]);
            let error = scale * f32::from(values[usize::from(q)]) - x[i];
            total += w[i] * error * error;
            q
        });
        if total < best.2 {
            best = (scale, q, total);
        }
    }
    (best.0, best.1)
}

/// `(scale, min)` of the grid `scale · q + min`, `q` in `0..=n`, for weighted values, with
/// `scale ≥ 0` and `min ≤ min_limit`.
pub(super) fn affine<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    n: f32,
    min_limit: f32,
) -> (f32, f32) {
    let lowest = x
        .iter()
        .copied()
        .fold(f32::INFINITY, f32::min)
        .min(min_limit);
    let highest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if highest - lowest < TINY {
        return (0.0, lowest);
    }
    let (sum_w, sum_x) = (sum::<N>(|i| w[i]), sum::<N>(|i| w[i] * x[i]));
    let mut best = ((highest - lowest) / n, lowest);
    let mut best_error = error(x, w, best.0, best.1, 0.0, n);
    for step in 0..=20 {
        let inverse = (n - 1.0 + 0.1 * step as f32) / (highest - lowest);
        let q: [f32; N] = std::array::from_fn(|i| code(x[i], inverse, lowest, 0.0, n));
        let sum_q = sum::<N>(|i| w[i] * q[i]);
        let sum_qq = sum::<N>(|i| w[i] * q[i] * q[i]);
        let sum_xq = sum::<N>(|i| w[i] * x[i] * q[i]);
        let det = sum_w * sum_qq - sum_q * sum_q;
        if det <= 0.0 {
            continue;
        }
        let mut scale = (sum_w * sum_xq - sum_x * sum_q) / det;
        let mut min = (sum_qq * sum_x - sum_q * sum_xq) / det;
        if min > min_limit {
            (scale, min) = ((sum_xq - min_limit * sum_q) / sum_qq, min_limit);
        }
        let e = error(x, w, scale, min, 0.0, n);
        if e < best_error {
            (best, best_error) = ((scale, min), e);
        }
    }
    best
}

/// Super-block on the grids `d · sc[s] · q`: `d`, and `sc` of sixteen sub-blocks.
pub(super) type SymmetricSuper = ScalarFit<256, ([u8; 2], [i8; 16])>;

/// Fits sixteen sub-blocks of sixteen; `q` in `−n..n`, `sc` in `−sc_n..sc_n`.
pub(super) fn symmetric_super(x: &[f32; 256], w: &[f32; 256], n: i8, sc_n: f32) -> SymmetricSuper {
    let (xs, ws) = (x.as_chunks::<16>().0, w.as_chunks::<16>().0);
    let (lo, hi) = (f32::from(-n), f32::from(n - 1));
    let scales: [f32; 16] = std::array::from_fn(|s| symmetric(&xs[s], &ws[s], f32::from(n)));
    let extreme = extreme(&scales);

    let settle = |d: [u8; 2]| {
        let dv = f16_value(d);
        let inverse = inverse(dv);
        let mut total = 0.0;
        let mut fit = SymmetricSuper::unset((d, [0; 16]), Levels::Integers(-n, n - 1));
        for s in 0..16 {
            let near = code(scales[s], inverse, 0.0, -sc_n, sc_n - 1.0);
            let (mut best, mut best_error) = (near, f32::INFINITY);
            for sc in [near, near - 1.0, near + 1.0] {
                let e = error(&xs[s], &ws[s], dv * sc, 0.0, lo, hi);
                if e < best_error && (-sc_n..sc_n).contains(&sc) {
                    (best, best_error) = (sc, e);
                }
            }
            total += best_error;
            let at = 16 * s..16 * s + 16;
            fit.fields.1[s] = best as i8;
            fit.scales[at.clone()].fill(dv * best);
            let q = codes(&xs[s], dv * best, 0.0, lo, hi);
            fit.q[at].copy_from_slice(&q.map(|q| (q - lo) as u8));
        }
        (fit, total)
    };

    let (mut best, mut best_error) = settle(to_f16(extreme / -sc_n));
    for _ in 0..REFITS {
        // Least squares for x ≈ d·a.
        let sc = &best.fields.1;
        let a: [f32; 256] =
            std::array::from_fn(|i| f32::from(sc[i / 16]) * (f32::from(best.q[i]) + lo));
        let xa = sum::<256>(|i| w[i] * x[i] * a[i]);
        let aa = sum::<256>(|i| w[i] * a[i] * a[i]);
        let (next, next_error) = settle(to_f16(xa / aa));
        // Also stops if `aa` is 0: the error of a NaN scale is NaN.
        if next_error >= best_error || next_error.is_nan() {
            break;
        }
        (best, best_error) = (next, next_error);
    }
    best
}

/// The scales of a super-block on the grids `d · sc[s] · q − dmin · m[s]`, with `S` sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct AffineScales<const S: usize> {
    pub(super) d: [u8; 2],
    pub(super) dmin: [u8; 2],
    pub(super) sc: [u8; S],
    pub(super) m: [u8; S],
}

/// Such a super-block.
pub(super) type AffineSuper<const S: usize> = ScalarFit<256, AffineScales<S>>;

/// Fits `S` sub-blocks of `N` values; `q` in `0..=n`, `sc` and `m` in `0..=sc_max`.
pub(super) fn affine_super<const S: usize, const N: usize>(
    x: &[f32; 256],
    w: &[f32; 256],
    n: i8,
    sc_max: f32,
) -> AffineSuper<S> {
    const { assert!(S * N == 256) };
    let (xs, ws) = (x.as_chunks::<N>().0, w.as_chunks::<N>().0);
    let hi = f32::from(n);
    let fits: [(f32, f32); S] = std::array::from_fn(|s| affine(&xs[s], &ws[s], hi, 0.0));
    let max_scale = fits.iter().fold(0.0f32, |m, fit| m.max(fit.0));
    let max_min = fits.iter().fold(0.0f32, |m, fit| m.max(-fit.1));

    let settle = |d: [u8; 2], dmin: [u8; 2]| {
        let (dv, mv) = (f16_value(d), f16_value(dmin));
        let (inverse_d, inverse_m) = (inverse(dv), inverse(mv));
        let mut total = 0.0;
        let fields = AffineScales {
            d,
            dmin,
            sc: [0; S],
            m: [0; S],
        };
        let mut fit = AffineSuper::unset(fields, Levels::Integers(0, n));
        for s in 0..S {
            let near_sc = code(fits[s].0, inverse_d, 0.0, 0.0, sc_max);
            let near_m = code(-fits[s].1, inverse_m, 0.0, 0.0, sc_max);
            let (mut best, mut best_error) = ((near_sc, near_m), f32::INFINITY);
            for sc in [near_sc, near_sc - 1.0, near_sc + 1.0] {
                for m in [near_m, near_m - 1.0, near_m + 1.0] {
                    let e = error(&xs[s], &ws[s], dv * sc, -mv * m, 0.0, hi);
                    let stored = (0.0..=sc_max).contains(&sc) && (0.0..=sc_max).contains(&m);
                    if e < best_error && stored {
                        (best, best_error) = ((sc, m), e);
                    }
                }
            }
            total += best_error;
            let (scale, min) = (dv * best.0, -mv * best.1);
            let at = N * s..N * (s + 1);
            (fit.fields.sc[s], fit.fields.m[s]) = (best.0 as u8, best.1 as u8);
            fit.scales[at.clone()].fill(scale);
            fit.mins[at.clone()].fill(min);
            let q = codes(&xs[s], scale, min, 0.0, hi);
            fit.q[at].copy_from_slice(&q.map(|q| q as u8));
        }
        (fit, total)
    };

    let (mut best, mut best_error) = settle(to_f16(max_scale / sc_max), to_f16(max_min / sc_max));
    for _ in 0..REFITS {
        // Least squares for x ≈ d·a − dmin·b.
        let AffineScales { sc, m, .. } = &best.fields;
        let a: [f32; 256] = std::array::from_fn(|i| f32::from(sc[i / N]) * f32::from(best.q[i]));
        let b: [f32; 256] = std::array::from_fn(|i| f32::from(m[i / N]));
        let aa = sum::<256>(|i| w[i] * a[i] * a[i]);
        let ab = sum::<256>(|i| w[i] * a[i] * b[i]);
        let bb = sum::<256>(|i| w[i] * b[i] * b[i]);
        let xa = sum::<256>(|i| w[i] * x[i] * a[i]);
        let xb = sum::<256>(|i| w[i] * x[i] * b[i]);
        let det = aa * bb - ab * ab;
        let (d, dmin) = ((xa * bb - xb * ab) / det, (xa * ab - xb * aa) / det);
        let (next, next_error) = settle(to_f16(d), to_f16(dmin));
        if next_error >= best_error || next_error.is_nan() {
            break;
        }
        (best, best_error) = (next, next_error);
    }
    best
}
