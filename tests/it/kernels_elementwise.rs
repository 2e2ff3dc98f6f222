//! Every level's element-wise and attention kernels against 64-bit arithmetic or exact
//! expectations.
//!
//! Error bounds count roundings: each operation adds a relative error of at most `U = 2⁻²⁴`.
//! `k·U` bounds below are first order; `SLACK` covers the products of errors.

use crate::common::{cases, emulated};
use bytemuck::Zeroable;
use half::f16;
use proptest::prelude::*;
use ruvllm::KvType;
use ruvllm::arch::{
    Arch, AttnParams, AttnPartial, BlockP16, BlockQ16, ColumnsMut, KV_BLOCK, KV_SPAN, KvBlock,
    KvElement, KvSpan, KvStored, MAX_HEAD_DIM,
};
use std::fmt::Display;
use std::ops::Range;

/// Unit roundoff of `f32`.
const U: f64 = 1.0 / (1u64 << 24) as f64;
/// `(1 + U)^k ≤ 1 + SLACK·k·U` for every `k` used here.
const SLACK: f64 = 1.01;
/// Half the smallest denormal: the absolute error of a result that underflows.
const TINY: f64 = 1.0 / (1u128 << 75) as f64 / (1u128 << 75) as f64;

/// Roundings one term of an `n`-term sum can meet: no level uses fewer than 16 partial sums, which
/// are then added one after the other.
fn depth(n: usize) -> f64 {
    (n.div_ceil(16) + 17) as f64
}

/// Numbers in `−2..2`, reproducible.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect()
}

/// A copy of `x` that begins `shift` values behind an allocation: kernels may assume no alignment.
fn misaligned<T: Copy + Default>(x: &[T], shift: usize) -> (Vec<T>, std::ops::Range<usize>) {
    let mut copy = vec![T::default(); shift + x.len()];
    copy[shift..].copy_from_slice(x);
    (copy, shift..shift + x.len())
}

#[track_caller]
fn assert_close(arch: Arch, what: impl Display, y: f32, truth: f64, bound: f64) {
    let error = (f64::from(y) - truth).abs();
    assert!(
        error <= bound * SLACK + TINY,
        "{arch:?} {what}: {y:e} is {error:e} off {truth:e}, bound {bound:e}"
    );
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Lengths around every vector and unrolling, and some long ones.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 1usize..200, 1 => 500usize..600, 1 => Just(4096usize), 1 => Just(11008usize)]
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn sums(n in length(), shift in 0usize..4, seed: u64, a in -3f32..3.0) {
        let (x, y) = (noise(n, seed), noise(n, !seed));
        let (x, range) = misaligned(&x, shift);
        let x = &x[range];
        let terms = || x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y));
        let (truth, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
        for arch in Arch::available() {
            assert_close(arch, "dot", arch.dot(x, &y), truth, depth(n) * U * size);

            let mut sum = y.clone();
            arch.add(&mut sum, x);
            for i in 0..n {
                prop_assert_eq!(sum[i], x[i] + y[i]);
            }
            let mut sum = y.clone();
            arch.add_scaled(&mut sum, x, a);
            for i in 0..n {
                let product = f64::from(a) * f64::from(x[i]);
                let truth = f64::from(y[i]) + product;
                // One rounding of the product at most, one of the sum.
                assert_close(arch, "add_scaled", sum[i], truth, U * product.abs() + U * truth.abs() * 1.01);
            }
        }
    }

    #[test]
    fn low_rank_products(
        n in length(), m in 1usize..10, gap in 0usize..40, rank in 1usize..12, shift in 0usize..4, seed: u64,
    ) {
        let (n, stride) = (n.min(700), n.min(700) + gap);
        let (y, t) = (noise(m * stride, seed), noise(m * rank, seed ^ 3));
        // Of the last row only what is used is there.
        let (b, range) = misaligned(&noise((rank - 1) * stride + n, !seed), shift);
        let b = &b[range];
        // Columns `gap/2 .. gap/2 + n` of a wider matrix: the others must stay.
        let first = gap / 2;
        let product = |arch: Arch, columns: Range<usize>| {
            let mut sum = y.clone();
            let mut all = ColumnsMut::new(&mut sum, m, stride);
            let part = &mut all.columns_mut(first + columns.start..first + columns.end);
            arch.add_product(part, &t, &b[columns.start..], stride);
            sum
        };
        for arch in Arch::available() {
            let sum = product(arch, 0..n);
            for (k, (&sum, &y)) in sum.iter().zip(&y).enumerate() {
                let (i, c) = (k / stride, k % stride);
                if !(first..first + n).contains(&c) {
                    prop_assert_eq!(sum, y);
                    continue;
                }
                let products = (0..rank).map(|j| f64::from(t[i * rank + j]) * f64::from(b[j * stride + c - first]));
                let truth = f64::from(y) + products.clone().sum::<f64>();
                let size = f64::from(y).abs() + products.map(f64::abs).sum::<f64>();
                // One rounding of each product, and one of each sum it goes through.
                assert_close(arch, "add_product", sum, truth, (rank + 1) as f64 * U * size);
            }
            // Held in 16 bits, columns give the same bits.
            let half: Vec<f16> = b.iter().map(|&b| f16::from_f32(b)).collect();
            let expanded: Vec<f32> = half.iter().map(|b| b.to_f32()).collect();
            let [mut of_half, mut of_expanded] = [y.clone(), y.clone()];
            let part = |all: &mut Vec<f32>, add: &dyn Fn(&mut ColumnsMut<'_>)| {
                add(&mut ColumnsMut::new(all, m, stride).columns_mut(first..first + n));
            };
            part(&mut of_half, &|y| arch.add_product_f16(y, &t, &half, stride));
            part(&mut of_expanded, &|y| arch.add_product(y, &t, &expanded, stride));
            prop_assert_eq!(of_half, of_expanded);
            // Neither how columns are cut shows, nor what other rows there are.
            let right = product(arch, n / 2..n);
            for i in 0..m {
                let columns = i * stride + first + n / 2..i * stride + first + n;
                prop_assert_eq!(&sum[columns.clone()], &right[columns]);
            }
            let mut alone = y[(m - 1) * stride + first..][..n].to_vec();
            arch.add_product(&mut ColumnsMut::new(&mut alone, 1, n), &t[(m - 1) * rank..], b, stride);
            prop_assert_eq!(&alone[..], &sum[(m - 1) * stride + first..][..n]);
        }
    }

    /// Bounds: each rounding of a product or sum, carried through what follows.
    #[test]
    fn delta_rules(d_k in 1usize..70, d_v in 1usize..150, shift in 0usize..4, by_row: bool, beta in 0f32..1.0, seed: u64) {
        let [q, k, v] = [(d_k, seed), (d_k, !seed), (d_v, seed ^ 3)].map(|(n, seed)| noise(n, seed));
        let rate: Vec<f32> = noise(if by_row { d_k } else { 1 }, seed ^ 5).iter().map(|x| x.abs()).collect();
        let (before, range) = misaligned(&noise(d_k * d_v, seed ^ 7), shift);
        for arch in Arch::available() {
            let (mut state, mut out) = (before.clone(), vec![f32::NAN; d_v]);
            arch.delta_rule(&mut state[range.clone()], &q, &k, &v, beta, &rate, &mut out);
            for c in 0..d_v {
                let kept = |i: usize| f64::from(rate[if by_row { i } else { 0 }]) * f64::from(before[range.clone()][i * d_v + c]);
                let [said, size] = [|x: f64| x, f64::abs].map(|f| (0..d_k).map(|i| f(kept(i) * f64::from(k[i]))).sum::<f64>());
                let (beta, v) = (f64::from(beta), f64::from(v[c]));
                let change = beta * (v - said);
                let off = beta * ((d_k + 3) as f64 * U * size + 2.0 * U * (v.abs() + said.abs()));
                let (mut sum, mut bound) = (0.0, 0.0);
                for i in 0..d_k {
                    let (k, q) = (f64::from(k[i]), f64::from(q[i]));
                    let truth = kept(i) + k * change;
                    let error = k.abs() * off + 3.0 * U * (kept(i).abs() + (k * change).abs());
                    assert_close(arch, "delta_rule", state[range.clone()][i * d_v + c], truth, error);
                    sum += q * truth;
                    bound += q.abs() * (error + (d_k + 1) as f64 * U * truth.abs());
                }
                assert_close(arch, "delta_rule, out", out[c], sum, bound);
            }
        }
    }

    #[test]
    fn ssm_steps(n in 1usize..40, m in 1usize..150, shift in 0usize..4, decay in 0f32..1.0, dt in 0f32..2.0, seed: u64) {
        let [b, c, x] = [(n, seed), (n, !seed), (m, seed ^ 3)].map(|(n, seed)| noise(n, seed));
        let (before, range) = misaligned(&noise(m * n, seed ^ 7), shift);
        for arch in Arch::available() {
            let (mut state, mut out) = (before.clone(), vec![f32::NAN; m]);
            arch.ssm_step(&mut state[range.clone()], &b, &c, decay, dt, &x, &mut out);
            for r in 0..m {
                let (mut sum, mut bound) = (0.0, 0.0);
                for i in 0..n {
                    let kept = f64::from(decay) * f64::from(before[range.clone()][i * m + r]);
                    let added = f64::from(dt) * f64::from(x[r]) * f64::from(b[i]);
                    let error = 3.0 * U * (kept.abs() + added.abs());
                    assert_close(arch, "ssm_step", state[range.clone()][i * m + r], kept + added, error);
                    sum += f64::from(c[i]) * (kept + added);
                    bound += f64::from(c[i]).abs() * (error + (n + 1) as f64 * U * (kept + added).abs());
                }
                assert_close(arch, "ssm_step, out", out[r], sum, bound);
            }
        }
    }

    #[test]
    fn ssm_steps_by_state(n in 1usize..20, m in 1usize..150, shift in 0usize..4, seed: u64) {
        let [b, c, x, dt] = [(n, seed), (n, !seed), (m, seed ^ 3), (m, seed ^ 5)].map(|(n, seed)| noise(n, seed));
        let dt: Vec<f32> = dt.iter().map(|dt| 2.0 * dt.abs()).collect();
        let a: Vec<f32> = noise(m * n, seed ^ 11).iter().map(|a| -4.0 * a.abs()).collect();
        let (before, range) = misaligned(&noise(m * n, seed ^ 7), shift);
        for arch in Arch::available() {
            let (mut state, mut out) = (before.clone(), vec![f32::NAN; m]);
            arch.ssm_step_by_state(&mut state[range.clone()], &a, &b, &c, &dt, &x, &mut out);
            for r in 0..m {
                let (mut sum, mut bound) = (0.0, 0.0);
                for i in 0..n {
                    let exponent = f64::from(dt[r]) * f64::from(a[i * m + r]);
                    let kept = exponent.exp() * f64::from(before[range.clone()][i * m + r]);
                    let added = f64::from(dt[r]) * f64::from(x[r]) * f64::from(b[i]);
                    // The exponent is rounded three times, as log2(e) is, and the power to one place.
                    let error = (5.0 + 3.0 * exponent.abs()) * U * kept.abs() + 3.0 * U * added.abs();
                    assert_close(arch, "ssm_step_by_state", state[range.clone()][i * m + r], kept + added, error);
                    sum += f64::from(c[i]) * (kept + added);
                    bound += f64::from(c[i]).abs() * (error + (n + 1) as f64 * U * (kept + added).abs());
                }
                assert_close(arch, "ssm_step_by_state, out", out[r], sum, bound);
            }
        }
    }

    #[test]
    fn rwkv6_steps(d_k in 1usize..70, d_v in 1usize..70, shift in 0usize..4, seed: u64) {
        let [r, k, w, first] = [seed, !seed, seed ^ 3, seed ^ 5].map(|seed| noise(d_k, seed));
        let (v, (before, range)) = (noise(d_v, seed ^ 7), misaligned(&noise(d_k * d_v, seed ^ 11), shift));
        for arch in Arch::available() {
            let (mut state, mut out) = (before.clone(), vec![f32::NAN; d_v]);
            arch.rwkv6_step(&mut state[range.clone()], &r, &k, &v, &w, &first, &mut out);
            for c in 0..d_v {
                let (mut sum, mut size) = (0.0, 0.0);
                for i in 0..d_k {
                    let [r, k, w, first, v] = [r[i], k[i], w[i], first[i], v[c]].map(f64::from);
                    let s = f64::from(before[range.clone()][i * d_v + c]);
                    let (kept, added) = (w * s, k * v);
                    let error = 2.0 * U * (kept.abs() + added.abs());
                    assert_close(arch, "rwkv6_step", state[range.clone()][i * d_v + c], kept + added, error);
                    sum += r * (s + first * added);
                    size += r.abs() * (s.abs() + (first * added).abs());
                }
                assert_close(arch, "rwkv6_step, out", out[c], sum, (2 * d_k + 4) as f64 * U * size);
            }
        }
    }

    #[test]
    fn rwkv7_steps(n in 1usize..70, m in 1usize..20, shift in 0usize..4, seed: u64) {
        let [r, k, w, a, b] = [seed, !seed, seed ^ 3, seed ^ 5, seed ^ 7].map(|seed| noise(n, seed));
        let (v, (before, range)) = (noise(m, seed ^ 11), misaligned(&noise(m * n, seed ^ 13), shift));
        for arch in Arch::available() {
            let (mut state, mut out) = (before.clone(), vec![f32::NAN; m]);
            arch.rwkv7_step(&mut state[range.clone()], [&r, &k, &w, &a, &b], &v, &mut out);
            for i in 0..m {
                let old = |j: usize| f64::from(before[range.clone()][i * n + j]);
                let [said, size] = [|x: f64| x, f64::abs].map(|f| (0..n).map(|j| f(old(j) * f64::from(a[j]))).sum::<f64>());
                let (mut sum, mut bound) = (0.0, 0.0);
                for j in 0..n {
                    let [r, k, w, b, v] = [r[j], k[j], w[j], b[j], v[i]].map(f64::from);
                    let truth = w * old(j) + said * b + v * k;
                    let sizes = (w * old(j)).abs() + (said * b).abs() + (v * k).abs();
                    let error = 4.0 * U * sizes + b.abs() * (n + 1) as f64 * U * size;
                    assert_close(arch, "rwkv7_step", state[range.clone()][i * n + j], truth, error);
                    sum += r * truth;
                    bound += r.abs() * (error + (n + 1) as f64 * U * truth.abs());
                }
                assert_close(arch, "rwkv7_step, out", out[i], sum, bound);
            }
        }
    }

    #[test]
    fn convolutions(n in 1usize..70, n_past in 0usize..5, gap in 0usize..3, shift in 0usize..4, seed: u64) {
        let (taps, x, bias) = (noise((n + gap) * (n_past + 1), seed), noise(n, !seed), noise(n, seed ^ 3));
        let (before, range) = misaligned(&noise(n_past * n, seed ^ 5), shift);
        for arch in Arch::available() {
            let (mut past, mut out) = (before.clone(), bias.clone());
            arch.causal_conv(&mut past[range.clone()], (&taps, n + gap), &x, &mut out);
            let values = [&before[range.clone()], &x].concat();
            assert_eq!(past[range.clone()], values[n..]);
            for c in 0..n {
                let terms = (0..=n_past).map(|i| f64::from(values[i * n + c]) * f64::from(taps[i * (n + gap) + c]));
                let terms: Vec<f64> = terms.chain([f64::from(bias[c])]).collect();
                let size: f64 = terms.iter().map(|x| x.abs()).sum();
                assert_close(arch, "causal_conv", out[c], terms.iter().sum(), (n_past + 2) as f64 * U * size);
            }
        }
    }

    #[test]
    fn norms(n in length(), shift in 0usize..4, seed: u64, offset in -10f32..10.0, log_eps in -7i32..-2) {
        let x: Vec<f32> = noise(n, seed).iter().map(|x| x + offset).collect();
        let (x, range) = misaligned(&x, shift);
        let x = &x[range];
        let (w, b) = (noise(n, !seed), noise(n, seed ^ 7));
        let eps = 10f32.powi(log_eps);
        let wide = |x: f32| f64::from(x);
        let mean_square = x.iter().map(|&x| wide(x) * wide(x)).sum::<f64>() / n as f64;
        let mean = x.iter().map(|&x| wide(x)).sum::<f64>() / n as f64;
        let mean_size = x.iter().map(|&x| wide(x).abs()).sum::<f64>() / n as f64;
        let variance = x.iter().map(|&x| (wide(x) - mean).powi(2)).sum::<f64>() / n as f64;
        for arch in Arch::available() {
            let mut y = vec![f32::NAN; n];
            arch.rms_norm(&mut y, x, &w, eps);
            for i in 0..n {
                let truth = wide(x[i]) * wide(w[i]) / (mean_square + wide(eps)).sqrt();
                // The root halves the error of the sum (and of its mean and eps); then a root, an
                // inverse and two products.
                assert_close(arch, "rms_norm", y[i], truth, (depth(n) / 2.0 + 5.0) * U * truth.abs());
            }
            arch.layer_norm(&mut y, x, &w, &b, eps);
            // The mean is off by `shift`; so are all differences, besides their own rounding.
            let shift = (depth(n) + 1.0) * U * mean_size;
            let largest = x.iter().map(|&x| (wide(x) - mean).abs()).fold(0.0, f64::max);
            let variance_error = shift * shift + 2.0 * U * largest * largest + (depth(n) + 3.0) * U * variance;
            for i in 0..n {
                let scale = 1.0 / (variance + wide(eps)).sqrt();
                let product = (wide(x[i]) - mean) * scale * wide(w[i]);
                let relative = variance_error * scale * scale / 2.0 + 6.0 * U;
                let bound = relative * product.abs() + shift * scale * wide(w[i]).abs() + U * (product + wide(b[i])).abs();
                // The second-order term of the root, for a variance near zero.
                let bound = bound * (1.0 + variance_error * scale * scale);
                assert_close(arch, "layer_norm", y[i], product + wide(b[i]), bound);
            }
        }
    }

    #[test]
    fn softmaxes(n in length(), shift in 0usize..4, seed: u64, spread in 0f32..60.0) {
        let x: Vec<f32> = noise(n, seed).iter().map(|x| x * spread).collect();
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let e: Vec<f64> = x.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).collect();
        let sum: f64 = e.iter().sum();
        for arch in Arch::available() {
            let (mut y, range) = misaligned(&x, shift);
            let y = &mut y[range];
            arch.softmax(y);
            for i in 0..n {
                // The difference is rounded, which its exponential turns into a relative error;
                // exp is within one place (2U). Of the sum, the mean of the same errors: the mean of
                // the differences is at most ln n.
                let difference = f64::from(max) - f64::from(x[i]);
                let relative = difference + 2.0 + (n as f64).ln() + 2.0 + depth(n) + 1.0;
                // Twice the smallest denormal: exp may have underflowed before the division.
                assert_close(arch, "softmax", y[i], e[i] / sum, relative * U * e[i] / sum + 4.0 * TINY);
            }
        }
    }

    #[test]
    fn angles(n in 1usize..140, shift in 0usize..4, pos in prop_oneof![8 => 0u32..200_000, 1 => 900_000u32..1_200_000, 1 => any::<u32>()], base in 100f32..1e6, factor in 0.5f32..2.0) {
        let frequencies: Vec<f32> = (0..n).map(|i| base.powf(-(i as f32) / n as f32)).collect();
        let (frequencies, range) = misaligned(&frequencies, shift);
        let frequencies = &frequencies[range];
        for arch in Arch::available() {
            let (mut cos, mut sin) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            arch.rope_angles(&mut cos, &mut sin, frequencies, pos as f32, factor);
            for i in 0..n {
                let angle = f64::from(pos as f32 * frequencies[i]);
                let factor = f64::from(factor);
                // Two places below 1, and the factor's rounding.
                assert_close(arch, format_args!("cos {angle}"), cos[i], factor * angle.cos(), 3.0 * U * factor);
                assert_close(arch, format_args!("sin {angle}"), sin[i], factor * angle.sin(), 3.0 * U * factor);
            }
        }
    }

    #[test]
    fn rotations(pairs in 1usize..130, shift in 0usize..4, seed: u64) {
        let x = noise(2 * pairs, seed);
        let angles = noise(pairs, !seed);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        for arch in Arch::available() {
            let (mut adjacent, range) = misaligned(&x, shift);
            let adjacent = &mut adjacent[range];
            arch.rope_norm(adjacent, &cos, &sin);
            let mut halves = x.clone();
            arch.rope_neox(&mut halves, &cos, &sin);
            for i in 0..pairs {
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                let cases = [
                    ("rope_norm", x[2 * i], x[2 * i + 1], adjacent[2 * i], adjacent[2 * i + 1]),
                    ("rope_neox", x[i], x[pairs + i], halves[i], halves[pairs + i]),
                ];
                for (what, a, b, y0, y1) in cases {
                    let (a, b) = (f64::from(a), f64::from(b));
                    // Each product and the sum are rounded once at most.
                    assert_close(arch, what, y0, a * c - b * s, 2.0 * U * ((a * c).abs() + (b * s).abs()));
                    assert_close(arch, what, y1, a * s + b * c, 2.0 * U * ((a * s).abs() + (b * c).abs()));
                }
            }
        }
    }

    #[test]
    fn gates_do_not_depend_on_place(n in length(), shift in 0usize..4, seed: u64) {
        let (x, up) = (noise(n, seed), noise(n, !seed));
        for arch in Arch::available() {
            let all = [
                Arch::silu_mul,
                Arch::gelu_mul,
                Arch::gelu_erf_mul,
                Arch::swiglu_oai,
                Arch::sigmoid_mul,
                |arch: Arch, x: &mut [f32], _: &[f32]| arch.gelu(x),
                |arch: Arch, x: &mut [f32], _: &[f32]| arch.gelu_erf(x),
            ];
            for kernel in all {
                let (mut y, range) = misaligned(&x, shift);
                let y = &mut y[range];
                kernel(arch, y, &up);
                for i in 0..n {
                    let mut alone = [x[i]];
                    kernel(arch, &mut alone, &up[i..=i]);
                    prop_assert!(same(y[i], alone[0]), "{:?}: {} of {}", arch, i, n);
                }
            }
        }
    }

    #[test]
    fn blocks_of_16_bits_are_the_scalar_ones(blocks in 1usize..12, shift in 0usize..4, seed: u64, log in -50i32..38, odd in 0usize..12) {
        let mut x: Vec<f32> = noise(32 * blocks, seed).iter().map(|x| x * 10f32.powi(log)).collect();
        // One block of each kind that could go wrong.
        let special = [0.0, -0.0, 1e-45, -1e-33, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        if let Some(&a) = special.get(odd) {
            x[32 * (odd % blocks) + odd] = a;
            x[32 * (odd % blocks) + 31] = -a;
        }
        let (x, range) = misaligned(&x, shift);
        let x = &x[range];
        let bits = |x: f32| if x.is_nan() { 1 } else { x.to_bits() };
        macro_rules! check {
            ($block:ty, $quantize:ident) => {
                let bits = |arch: Arch| {
                    let mut blocks = vec![<$block>::zeroed(); <$block>::per_row(x.len())];
                    arch.$quantize(x, &mut blocks);
                    let integers = |b: &$block| (0..<$block>::VALUES).map(|i| b.integer(i)).collect::<Vec<_>>();
                    blocks.iter().map(|b| (integers(b), b.d.map(bits), b.s.map(bits))).collect::<Vec<_>>()
                };
                let expected = bits(Arch::scalar());
                for arch in Arch::available() {
                    prop_assert_eq!(&bits(arch), &expected, "{:?} {}", arch, stringify!($block));
                }
            };
        }
        check!(BlockQ16, quantize_q16);
        check!(BlockP16, quantize_p16);
    }

    #[test]
    fn conversions(n in length(), shift in 0usize..4, seed: u64) {
        // Any bits: numbers of all sizes, denormals, infinities, NaN.
        let bits: Vec<f32> = noise(n, seed).iter().map(|x| f32::from_bits(x.to_bits().wrapping_mul(0x9e37_79b9))).collect();
        // And numbers halfway between two halves.
        let ties = noise(n, !seed).into_iter().map(|x| f32::from_bits(x.to_bits() & !0x1fff | 0x1000));
        let x: Vec<f32> = bits.into_iter().zip(ties).enumerate().map(|(i, (a, b))| if i % 2 == 0 { a } else { b }).collect();
        let (x, range) = misaligned(&x, shift);
        let x = &x[range];
        for arch in Arch::available() {
            let mut y = vec![f16::ZERO; n];
            arch.f32_to_f16(x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let truth = f16::from_f32_const(*x);
                prop_assert!(y.to_bits() == truth.to_bits() || y.is_nan() && x.is_nan(), "{:?}: {:e} is {}, not {}", arch, x, y, truth);
            }
        }
    }
}

#[test]
fn q16_of_zeros_tiny_and_broken_values() {
    for arch in Arch::available() {
        let quantized = |x: [f32; 32]| {
            let mut block = [BlockQ16::zeroed()];
            arch.quantize_q16(&x, &mut block);
            let q: [i16; 32] = std::array::from_fn(|i| block[0].integer(i));
            (q, block[0].d[0], [block[0].s[0], block[0].s[1]])
        };
        for tiny in [0.0, -0.0, 1e-45, 1e-35] {
            assert_eq!(
                quantized([tiny; 32]),
                ([0; 32], 0.0, [0.0; 2]),
                "{arch:?} {tiny:e}"
            );
        }
        let mut x = [1.0; 32];
        x[5] = -4.0;
        let (q, d, s) = quantized(x);
        let (largest, quarter) = (i32::from(BlockQ16::MAX), i32::from(BlockQ16::MAX) / 4 + 1);
        assert_eq!((q[5].into(), q[6].into()), (-largest, quarter), "{arch:?}");
        assert_eq!(d, 4.0 / largest as f32);
        assert_eq!(
            s,
            [
                d * (15 * quarter - largest) as f32,
                d * (16 * quarter) as f32
            ]
        );
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[17] = broken;
            let (_, d, _) = quantized(x);
            assert!(!d.is_finite(), "{arch:?}: {broken} must reach the product");
        }
    }
}

#[test]
fn every_half_widens_exactly() {
    let x: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    for arch in Arch::available() {
        for shift in 0..3 {
            let mut y = vec![0.0; x.len() - shift];
            arch.f16_to_f32(&x[shift..], &mut y);
            for (x, y) in x[shift..].iter().zip(&y) {
                assert!(same(*y, x.to_f32_const()), "{arch:?}: {x} became {y}");
            }
            let mut back = vec![f16::ZERO; y.len()];
            arch.f32_to_f16(&y, &mut back);
            for (x, y) in x[shift..].iter().zip(&back) {
                assert!(
                    x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan(),
                    "{arch:?}: {x} came back as {y}"
                );
            }
        }
    }
}

/// The activations against `f64` over every 1021st number (a prime: all kinds of mantissas).
#[test]
fn activations_over_all_floats() {
    let step = if emulated() { 16381 } else { 1021 };
    let x: Vec<f32> = (0..=u32::MAX).step_by(step).map(f32::from_bits).collect();
    let ones = vec![1.0; x.len()];
    let silu = |x: f64| {
        if x < -800.0 {
            0.0
        } else {
            x / (1.0 + (-x).exp())
        }
    };
    // Twice the argument of the tanh: x/2·(1 + tanh t) = x·σ(2t).
    let inner = |x: f64| 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    let gelu = |x: f64| {
        if x < -20.0 {
            0.0
        } else {
            x / (1.0 + (-inner(x)).exp())
        }
    };
    for arch in Arch::available() {
        let (mut s, mut g, mut h) = (x.clone(), x.clone(), x.clone());
        let (mut sigmoid, mut clamped, mut erf) = (x.clone(), x.clone(), x.clone());
        arch.sigmoid_mul(&mut sigmoid, &ones);
        arch.swiglu_oai(&mut clamped, &ones);
        arch.gelu_erf_mul(&mut erf, &ones);
        arch.silu_mul(&mut s, &ones);
        arch.gelu_mul(&mut g, &ones);
        arch.gelu(&mut h);
        for (i, &x) in x.iter().enumerate() {
            assert!(
                same(g[i], h[i]),
                "{arch:?}: gelu({x:e}) is {:e} or {:e}",
                g[i],
                h[i]
            );
            if x.is_nan() {
                let all = [s[i], g[i], sigmoid[i], clamped[i], erf[i]];
                assert!(all.iter().all(|y| y.is_nan()), "{arch:?}: NaN must pass");
                continue;
            }
            let wide = f64::from(x);
            let truth = if x < -800.0 {
                0.0
            } else {
                1.0 / (1.0 + (-wide).exp())
            };
            assert_close(
                arch,
                format_args!("sigmoid({x:e})"),
                sigmoid[i],
                truth,
                5.0 * U * truth.abs() + TINY,
            );
            // The argument is rounded once, and its factor is off by half a place.
            let least = wide.min(7.0);
            let truth = 2.0
                * if x < -480.0 {
                    0.0
                } else {
                    least / (1.0 + (-1.702 * least).exp())
                };
            let bound =
                (7.0 + 2.0 * (1.702 * least).abs().min(104.0)) * U * truth.abs() + 208.0 * TINY;
            assert_close(
                arch,
                format_args!("swiglu_oai({x:e})"),
                clamped[i],
                truth,
                bound,
            );
            // Far from zero it is 0 or x.
            let far = if x < 0.0 { 0.0 } else { wide };
            if x.abs() > 14.5 {
                assert_close(arch, format_args!("gelu_erf({x:e})"), erf[i], far, TINY);
            }
            // exp within one place (2U), or half the smallest denormal times x; sum, product,
            // quotient.
            let truth = silu(wide);
            assert_close(
                arch,
                format_args!("silu({x:e})"),
                s[i],
                truth,
                5.0 * U * truth.abs() + 104.0 * TINY,
            );
            // The argument has six roundings at most, and two constants off by half a place each;
            // exp turns its relative error into |t| times as much.
            let truth = gelu(wide);
            let argument = inner(wide).abs().min(104.0);
            let bound = (5.0 + 8.0 * argument) * U * truth.abs() + 104.0 * TINY;
            assert_close(arch, format_args!("gelu({x:e})"), g[i], truth, bound);
        }
    }
}

/// `erf`, by its series.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// The largest rounding error is that of the exponent, up to 8 here: 2⁻²⁴ of it.
#[test]
fn gelu_by_the_error_function() {
    for arch in Arch::available() {
        let x: Vec<f32> = (-400..=400).map(|i| i as f32 / 100.0).collect();
        let mut y = x.clone();
        arch.gelu_erf(&mut y);
        for (x, y) in x.iter().zip(y) {
            let truth = 0.5 * f64::from(*x) * (1.0 + erf(f64::from(*x) / std::f64::consts::SQRT_2));
            assert_close(
                arch,
                format_args!("gelu_erf({x})"),
                y,
                truth,
                (2e-6 * truth.abs()).max(1e-12),
            );
        }
        let mut y = [f32::INFINITY, 0.0, -40.0, f32::NEG_INFINITY];
        arch.gelu_erf(&mut y);
        assert_eq!(y, [f32::INFINITY, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn activations_at_the_limits() {
    for arch in Arch::available() {
        let (mut s, mut g) = (
            [
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                0.0,
                f32::MAX,
                f32::MIN,
            ],
            [0.0; 6],
        );
        g.copy_from_slice(&s);
        arch.silu_mul(&mut s, &[1.0; 6]);
        arch.gelu(&mut g);
        for y in [s, g] {
            assert_eq!(y[0], f32::INFINITY, "{arch:?}");
            assert_eq!(y[1], 0.0, "{arch:?}: the limit");
            assert!(y[2].is_nan(), "{arch:?}");
            assert_eq!([y[3], y[4], y[5]], [0.0, f32::MAX, 0.0], "{arch:?}");
        }
    }
}

#[test]
fn softmax_at_the_limits() {
    for arch in Arch::available() {
        let mut empty = [];
        arch.softmax(&mut empty);
        let mut x = [
            f32::NEG_INFINITY,
            3.0,
            f32::NEG_INFINITY,
            3.0,
            -1e30,
            f32::MIN,
        ];
        arch.softmax(&mut x);
        assert_eq!(x, [0.0, 0.5, 0.0, 0.5, 0.0, 0.0], "{arch:?}");
        for n in [3, 40] {
            for broken in [f32::NAN, f32::INFINITY] {
                let mut x = vec![1.0; n];
                x[n / 2] = broken;
                arch.softmax(&mut x);
                assert!(x[n / 2].is_nan(), "{arch:?}: {broken} must not vanish");
            }
            let mut x = vec![f32::NEG_INFINITY; n];
            arch.softmax(&mut x);
            assert!(
                x.iter().all(|x| x.is_nan()),
                "{arch:?}: nothing to choose from"
            );
        }
    }
}

/// Attention over keys and values in pages that lie in memory in any order. The pages before the
/// first that is seen are missing; in the last, the rows behind the keys are what nobody may read.
fn attend<T: KvElement>(
    arch: Arch,
    q: &[f32],
    (k, v): (&[f32], &[f32]),
    ranges: &[(u32, u32)],
    p: &AttnParams,
    narrow: fn(f32) -> T,
    apart: bool,
) -> Vec<f32> {
    let n_pages = (k.len() / p.head_dim).div_ceil(KV_BLOCK);
    // Page `i` lies at place `i·7 mod n`, or is turned around where 7 divides n.
    let place = |i: usize| {
        if n_pages.is_multiple_of(7) {
            n_pages - 1 - i
        } else {
            i * 7 % n_pages
        }
    };
    let paged = |rows: &[f32], dim: usize| {
        let mut memory = vec![narrow(f32::NAN); n_pages * KV_BLOCK * dim];
        for (i, page) in rows.chunks(KV_BLOCK * dim).enumerate() {
            let to = &mut memory[place(i) * KV_BLOCK * dim..];
            to.iter_mut().zip(page).for_each(|(to, x)| *to = narrow(*x));
        }
        memory
    };
    let (k, v) = (paged(k, p.head_dim), paged(v, p.head_dim_v));
    let page = |i: usize| KvBlock {
        k: &k[place(i) * KV_BLOCK * p.head_dim..][..KV_BLOCK * p.head_dim],
        v: &v[place(i) * KV_BLOCK * p.head_dim_v..][..KV_BLOCK * p.head_dim_v],
    };
    let n_q = ranges.len();
    let mut buffers = [0; 2].map(|_| vec![f32::NAN; AttnPartial::len(n_q, p.head_dim_v)]);
    let [mut total, mut part] = buffers
        .each_mut()
        .map(|buffer| AttnPartial::of(buffer, n_q));
    total.clear();
    let start = ranges.iter().map(|r| r.0 as usize).min().unwrap() / KV_BLOCK;
    const N: usize = KV_SPAN / KV_BLOCK;
    for span in start / N..n_pages.div_ceil(N) {
        let first = start.max(span * N);
        let blocks: Vec<_> = (first..n_pages.min((span + 1) * N)).map(page).collect();
        let keys = KvSpan {
            first: first * KV_BLOCK,
            blocks: &blocks,
        };
        if apart {
            part.clear();
            arch.attention(&mut part, q, keys, ranges, p);
            arch.attention_merge(&mut total, &part, p);
        } else {
            arch.attention(&mut total, q, keys, ranges, p);
        }
    }
    arch.attention_finish(&mut total, p);
    total.out.to_vec()
}

/// Operands of an attention call.
#[derive(Clone, Debug)]
struct Case {
    p: AttnParams,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    ranges: Vec<(u32, u32)>,
}

impl Case {
    fn new(
        dims: (usize, usize),
        n_kv: usize,
        ranges: Vec<(u32, u32)>,
        softcap: f32,
        seed: u64,
    ) -> Case {
        let (head_dim, head_dim_v) = dims;
        let p = AttnParams {
            head_dim,
            head_dim_v,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap,
            slope: 0.0,
            exact: false,
        };
        // Numbers of half precision: both kernels see the same.
        let halves = |x: Vec<f32>| x.into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
        Case {
            p,
            q: noise(ranges.len() * head_dim, seed),
            k: halves(noise(n_kv * head_dim, !seed)),
            v: halves(noise(n_kv * head_dim_v, seed ^ 3)),
            ranges,
        }
    }

    /// Rows of a prompt, `n_group` of them per position, with factors of `10^log` on queries, keys
    /// and values.
    fn prompt(
        dims: (usize, usize),
        n_q: usize,
        before: usize,
        n_group: usize,
        (window, softcap): (u32, f32),
        [log_q, log_k, log_v]: [i32; 3],
        seed: u64,
    ) -> Case {
        let n_kv = before + n_q.div_ceil(n_group);
        let ranges: Vec<_> = (0..n_q)
            .map(|i| (before + i / n_group + 1) as u32)
            .map(|end| (end.saturating_sub(window), end))
            .collect();
        let mut case = Case::new(dims, n_kv, ranges, softcap, seed);
        let halves = |x: &mut [f32], log: i32| {
            x.iter_mut()
                .for_each(|x| *x = f16::from_f32(*x * 10f32.powi(log)).to_f32())
        };
        case.q.iter_mut().for_each(|x| *x *= 10f32.powi(log_q));
        halves(&mut case.k, log_k);
        halves(&mut case.v, log_v);
        // A row of zeros of each, and a value far above the others.
        case.q[..dims.0].fill(0.0);
        case.k[3 * dims.0..4 * dims.0].fill(0.0);
        case.v[5 * dims.1..6 * dims.1].fill(0.0);
        case.v[7 * dims.1] = 60000.0;
        case
    }

    /// The rows, span by span in one task as prompts are computed.
    fn rows(&self, arch: Arch, half: bool, rows: std::ops::Range<usize>) -> Vec<f32> {
        self.compute(arch, half, rows, false)
    }

    /// The rows; if `apart`, each span by itself, then merged, as one token is computed.
    fn compute(
        &self,
        arch: Arch,
        half: bool,
        rows: std::ops::Range<usize>,
        apart: bool,
    ) -> Vec<f32> {
        let q = &self.q[rows.start * self.p.head_dim..rows.end * self.p.head_dim];
        let ranges = &self.ranges[rows];
        if half {
            attend(
                arch,
                q,
                (&self.k, &self.v),
                ranges,
                &self.p,
                f16::from_f32,
                apart,
            )
        } else {
            attend(arch, q, (&self.k, &self.v), ranges, &self.p, |x| x, apart)
        }
    }

    /// All rows of these levels against the definition.
    fn check(&self, levels: impl IntoIterator<Item = Arch>, half: bool) {
        let (n_q, dim) = (self.ranges.len(), self.p.head_dim_v);
        let outs: Vec<_> = levels
            .into_iter()
            .map(|arch| (arch, self.loss(arch, half), self.rows(arch, half, 0..n_q)))
            .collect();
        for i in 0..n_q {
            let mut truths: Vec<(Loss, Vec<(f64, f64)>)> = Vec::new();
            for (arch, loss, out) in &outs {
                let known = truths
                    .iter()
                    .position(|(of, _)| of == loss)
                    .unwrap_or_else(|| {
                        truths.push((*loss, self.truth(i, *loss)));
                        truths.len() - 1
                    });
                for (y, (truth, bound)) in out[i * dim..][..dim].iter().zip(&truths[known].1) {
                    assert_close(
                        *arch,
                        format_args!("attention row {i} half {half}"),
                        *y,
                        *truth,
                        *bound,
                    );
                }
            }
        }
    }

    /// The rows over keys and values stored in these precisions, and the case of what is stored.
    fn compute_stored(
        &self,
        arch: Arch,
        [k_type, v_type]: [KvType; 2],
        rows: std::ops::Range<usize>,
    ) -> (Vec<f32>, Case) {
        let p = &self.p;
        let mut case = self.clone();
        let store = |rows: &mut [f32], kind: KvType, dim: usize| -> Vec<Vec<u64>> {
            let pages = rows.chunks_mut(KV_BLOCK * dim);
            pages
                .map(|rows| {
                    let mut page = vec![u64::MAX; kind.block_bytes(dim) / 8];
                    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut page);
                    rows.chunks(dim)
                        .enumerate()
                        .for_each(|(i, row)| assert!(arch.store_kv(kind, bytes, i, row)));
                    arch.load_kv(kind, bytes, dim, rows);
                    page
                })
                .collect()
        };
        let (k, v) = (
            store(&mut case.k, k_type, p.head_dim),
            store(&mut case.v, v_type, p.head_dim_v),
        );
        let pages: Vec<_> = k.iter().zip(&v).collect();
        let (q, ranges) = (
            &self.q[rows.start * p.head_dim..rows.end * p.head_dim],
            &self.ranges[rows],
        );
        let mut buffer = vec![f32::NAN; AttnPartial::len(ranges.len(), p.head_dim_v)];
        let mut total = AttnPartial::of(&mut buffer, ranges.len());
        total.clear();
        for (i, pages) in pages.chunks(KV_SPAN / KV_BLOCK).enumerate() {
            let blocks: Vec<_> = pages
                .iter()
                .map(|(k, v)| KvBlock {
                    k: bytemuck::cast_slice(k),
                    v: bytemuck::cast_slice(v),
                })
                .collect();
            let span = KvSpan {
                first: i * KV_SPAN,
                blocks: &blocks,
            };
            arch.attention_stored(
                &mut total,
                q,
                KvStored {
                    k: k_type,
                    v: v_type,
                    span,
                },
                ranges,
                p,
            );
        }
        arch.attention_finish(&mut total, p);
        (total.out.to_vec(), case)
    }

    /// All rows over stored keys and values against the definition, of what is stored.
    fn check_stored(&self, arch: Arch, kinds: [KvType; 2]) {
        let (n_q, dim) = (self.ranges.len(), self.p.head_dim_v);
        let (out, case) = self.compute_stored(arch, kinds, 0..n_q);
        let fits = |dim: usize| dim.is_multiple_of(16) && dim <= 256;
        let rounds = takes_rows_together(arch, true) && fits(self.p.head_dim) && fits(dim);
        let in_groups = kinds.iter().all(|kind| kind.is_quantized())
            && (self.p.head_dim | dim).is_multiple_of(32);
        let loss = match self.p.exact {
            false if rounds => Loss::Words,
            true if in_groups && rounds => Loss::Codes {
                max_weight: 65535.0,
            },
            true if in_groups && fits(self.p.head_dim) && fits(dim) && arch.name() != "scalar" => {
                Loss::Codes {
                    max_weight: 32767.0,
                }
            }
            _ => Loss::Nothing,
        };
        for i in 0..n_q {
            for (y, (truth, bound)) in out[i * dim..][..dim].iter().zip(case.truth(i, loss)) {
                assert_close(
                    arch,
                    format_args!("attention row {i} of {kinds:?}"),
                    *y,
                    truth,
                    bound,
                );
            }
        }
        // Few rows, and all that are exact, do not depend on each other.
        let n_apart = if n_q < 32 || self.p.exact { n_q } else { 0 };
        for i in (0..n_apart).step_by(1 + n_q / 32) {
            let (alone, _) = self.compute_stored(arch, kinds, i..i + 1);
            assert!(
                alone.iter().zip(&out[i * dim..]).all(|(a, b)| same(*a, *b)),
                "{arch:?} row {i} of {kinds:?}"
            );
        }
    }

    /// What `arch` loses of products besides the roundings of sums of `f32`.
    fn loss(&self, arch: Arch, half: bool) -> Loss {
        let AttnParams {
            head_dim,
            head_dim_v,
            ..
        } = self.p;
        let fits = |dim: usize| dim.is_multiple_of(16) && dim <= 256;
        match arch.name() {
            "amx" if half => Loss::Tiles {
                longest: (self.k.len() / head_dim).max(head_dim),
            },
            "avx512" | "avx512_bf16" if half && fits(head_dim) && fits(head_dim_v) => Loss::Words,
            _ => Loss::Nothing,
        }
    }

    /// Output of row `i` in `f64`, and a bound on the error of each value.
    fn truth(&self, i: usize, loss: Loss) -> Vec<(f64, f64)> {
        let AttnParams {
            head_dim,
            head_dim_v,
            scale,
            softcap,
            slope,
            ..
        } = self.p;
        let (scale, cap) = (f64::from(scale), f64::from(softcap));
        let q = &self.q[i * head_dim..][..head_dim];
        let keys = self.ranges[i].0 as usize..self.ranges[i].1 as usize;
        let lost = loss.of_product();
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let q_norm = norm(q);
        let mut scores = Vec::new();
        // Largest error of a score: of the dot product, of the scale, and of the cap (quotient, two
        // places of tanh, product).
        let mut score_error: f64 = 0.0;
        for j in keys.clone() {
            let terms = q
                .iter()
                .zip(&self.k[j * head_dim..][..head_dim])
                .map(|(q, k)| f64::from(*q) * f64::from(*k));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let score = scale * sum;
            let norms = q_norm * norm(&self.k[j * head_dim..][..head_dim]);
            let mut error = (depth(head_dim) * U + lost) * scale * size + U * score.abs();
            error += loss.of_norms(head_dim) * scale * norms;
            if cap > 0.0 {
                error += (1.0 + 4.0 + 1.0) * U * score.abs();
                scores.push(cap * (score / cap).tanh());
            } else if slope > 0.0 {
                // Taken off before the scale: a quotient, a product, a difference and a product are
                // rounded.
                let lean = f64::from(slope) * (keys.end - 1 - j) as f64;
                error += 4.0 * U * (lean + score.abs());
                scores.push(score - lean);
            } else {
                scores.push(score);
            }
            score_error = score_error.max(error);
        }
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        // A weight: both scores of the difference, its rounding, exp within one place, and a
        // rounding of the running maximum's correction (difference, exp, product) for each key at
        // most, spans included. A sum of weights or weighted values: a rounding for each key,
        // product and addition.
        let n = keys.len() as f64;
        let spread = scores.iter().map(|s| max - s).fold(0.0, f64::max);
        let weight_error = 2.0 * score_error + (2.0 * spread + 2.0) * U + loss.of_weight(spread);
        let relative = 2.0 * (weight_error + 4.0 * n * U + 2.0 * n * U) + U + lost;
        // A weight that underflows is off by one denormal, and by half of one where it is scaled in
        // two steps; so is each product with a value, and each correction of a sum.
        let underflow = |w: f64| {
            if w < 2.0 * f64::from(f32::MIN_POSITIVE) {
                3.0 * TINY
            } else {
                0.0
            }
        };
        (0..head_dim_v)
            .map(|c| {
                let value = |j: usize| f64::from(self.v[j * head_dim_v + c]);
                let terms = || keys.clone().zip(&weights).map(|(j, w)| w / sum * value(j));
                let mut bound = relative * terms().map(f64::abs).sum::<f64>();
                let underflows = keys
                    .clone()
                    .zip(&weights)
                    .map(|(j, w)| underflow(*w) * value(j).abs() + 2.0 * TINY);
                bound += underflows.sum::<f64>() / sum;
                for block in (keys.start / 64 * 64..keys.end).step_by(64) {
                    let seen = block.max(keys.start)..keys.end.min(block + 64);
                    let weights = &weights[seen.start - keys.start..seen.end - keys.start];
                    let group = c / 32 * 32..head_dim_v.min(c / 32 * 32 + 32);
                    let in_group = seen
                        .clone()
                        .flat_map(|j| &self.v[j * head_dim_v..][group.clone()]);
                    let largest = || in_group.fold(0.0, |a: f64, v| a.max(f64::from(*v).abs()));
                    bound += loss.of_block(weights, seen.map(value), largest) / sum;
                }
                (terms().sum(), bound)
            })
            .collect()
    }
}

/// What a level loses besides the roundings of sums of `f32`.
#[derive(Clone, Copy, PartialEq)]
enum Loss {
    Nothing,
    /// Tiles multiply sums of two bf16 numbers: an `f32` loses 2⁻¹⁸ of itself, and four sums of up
    /// to `longest` products are rounded for one. Whatever is below 2⁻¹²⁶, operands and sums,
    /// counts as zero.
    Tiles {
        longest: usize,
    },
    /// Vectors are rounded to integers, after their 2-norm was made `NORM`: each value is off by
    /// half an integer at most, so by `|vector|/(2·NORM)`.
    Words,
    /// A query is rounded to integers up to `MAX_QUERY`, and so are the weights of a block, each
    /// times the scale of 32 values, up to `max_weight`.
    Codes {
        max_weight: f64,
    },
}

/// The largest integer that [`Loss::Codes`] makes of a query's value.
const MAX_QUERY: f64 = 32512.0;

/// The 2-norm of vectors of integers.
const NORM: f64 = 32700.0;

impl Loss {
    /// Of a product of two numbers, relative to it.
    fn of_product(self) -> f64 {
        match self {
            Loss::Tiles { longest } => 2f64.powi(-18) + 4.04 * longest as f64 * U,
            _ => 0.0,
        }
    }

    /// Of a score, relative to the 2-norms of query and key: `|δq·k| + |q·δk|`, with `|δq| ≤
    /// √n·|q|/(2·NORM)`. Sums of integers are exact; conversion and factors are rounded eight
    /// times, which the depth of a sum of `f32` allows for.
    fn of_norms(self, head_dim: usize) -> f64 {
        match self {
            Loss::Words => (head_dim as f64).sqrt() / NORM,
            Loss::Codes { .. } => (head_dim as f64).sqrt() / (2.0 * MAX_QUERY),
            _ => 0.0,
        }
    }

    /// Of a weight, relative to it: the polynomial, the argument's conversion to powers of two (a
    /// product with a rounded constant), and the factor between the block's and the running
    /// maximum (difference, exp, product).
    fn of_weight(self, spread: f64) -> f64 {
        match self {
            Loss::Words | Loss::Codes { .. } => 2f64.powi(-18) + (3.0 * spread + 4.0) * U,
            _ => 0.0,
        }
    }

    /// Of the sum of a block's values by weight.
    ///
    /// Words: values are a vector, `Σ w·|δv| ≤ Σ w·|v|₂/(2·NORM)`. Of weights `Σ w²` is bounded by
    /// `max w·Σ w`, so that `Σ |δw|·|v| ≤ √(max w·Σ w)·Σ |v|/(2·NORM)`.
    ///
    /// Tiles: a weight loses less than 2⁻¹²⁶ in each of its two parts, as a value does, whose parts
    /// are far above that or nothing. An instruction adds two products to a number, each of
    /// which may vanish; four do so for a product.
    ///
    /// Codes: a weight times a scale is off by half an integer, of which the largest product of a
    /// weight and a scale is at most `max_weight`, and a value is at most 128 scales. The
    /// `largest` value of the group is at least 120 scales of `q4_0`, whose codes stand for the
    /// middle of 16; its scale may have been rounded up by 2⁻⁷.
    fn of_block(
        self,
        weights: &[f64],
        values: impl Iterator<Item = f64> + Clone,
        largest: impl FnOnce() -> f64,
    ) -> f64 {
        match self {
            Loss::Nothing => 0.0,
            Loss::Tiles { .. } => {
                values.map(|v| 2.0 * v.abs() + 4.0 * 3.0 / 2.0).sum::<f64>()
                    * f64::from(f32::MIN_POSITIVE)
            }
            Loss::Codes { max_weight } => {
                let max = weights.iter().copied().fold(0.0, f64::max);
                weights.len() as f64 * max * 1.1 * largest() / (2.0 * max_weight)
            }
            Loss::Words => {
                let (sum, max) = (
                    weights.iter().sum::<f64>(),
                    weights.iter().copied().fold(0.0, f64::max),
                );
                let norm = values.clone().map(|v| v * v).sum::<f64>().sqrt();
                (sum * norm + (max * sum).sqrt() * values.map(f64::abs).sum::<f64>()) / (2.0 * NORM)
            }
        }
    }
}

/// Levels where a row's bits depend on whether 32 rows see a block of half-precision keys together.
fn takes_rows_together(arch: Arch, half: bool) -> bool {
    half && matches!(arch.name(), "amx" | "avx512" | "avx512_bf16")
}

fn ranges(n_kv: usize, n_q: usize, seed: u64) -> Vec<(u32, u32)> {
    let draw = noise(3 * n_q, seed);
    let at = |x: f32, n: usize| (((x + 2.0) / 4.0 * n as f32) as usize).min(n - 1);
    (0..n_q)
        .map(|i| {
            let end = 1 + at(draw[3 * i], n_kv);
            // Half of the rows see everything before their end.
            let start = if draw[3 * i + 1] < 0.0 {
                0
            } else {
                at(draw[3 * i + 2], end)
            };
            (start as u32, end as u32)
        })
        .collect()
}

fn head_dim() -> impl Strategy<Value = usize> {
    prop_oneof![4 => prop::sample::select(vec![16usize, 32, 48, 64, 80, 96, 128]), 1 => 1usize..70, 1 => Just(256usize), 1 => Just(MAX_HEAD_DIM)]
}

proptest! {
    #![proptest_config(cases(120))]

    #[test]
    fn attention_is_softmax_attention(
        dims in prop_oneof![3 => head_dim().prop_map(|d| (d, d)), 1 => (head_dim(), head_dim())],
        n_kv in prop_oneof![4 => 1usize..300, 1 => KV_SPAN - 100..KV_SPAN + 100],
        n_q in prop_oneof![3 => 1usize..9, 1 => 9usize..70],
        softcap in prop_oneof![3 => Just(0f32), 1 => Just(5f32)],
        seed: u64,
    ) {
        let case = Case::new(dims, n_kv, ranges(n_kv, n_q, seed), softcap, seed);
        for half in [false, true] {
            case.check(Arch::available(), half);
        }
    }

    #[test]
    fn attention_of_stored_keys_is_softmax_attention(
        dims in prop_oneof![3 => head_dim().prop_map(|d| (d, d)), 1 => (head_dim(), head_dim())],
        kinds in (prop::sample::select(&KvType::ALL[..]), prop::sample::select(&KvType::ALL[..])),
        n_kv in prop_oneof![4 => 1usize..300, 1 => KV_SPAN - 100..KV_SPAN + 100],
        n_q in prop_oneof![3 => 1usize..9, 1 => 9usize..70],
        softcap in prop_oneof![3 => Just(0f32), 1 => Just(5f32)],
        exact: bool,
        seed: u64,
    ) {
        let mut case = Case::new(dims, n_kv, ranges(n_kv, n_q, seed), softcap, seed);
        case.p.exact = exact;
        for arch in Arch::available() {
            case.check_stored(arch, [kinds.0, kinds.1]);
        }
    }

    #[test]
    fn an_attention_row_depends_on_nothing_but_itself(
        dims in prop_oneof![3 => head_dim().prop_map(|d| (d, d)), 1 => (head_dim(), head_dim())],
        n_kv in prop_oneof![4 => 1usize..300, 1 => KV_SPAN - 100..KV_SPAN + 100],
        n_q in prop_oneof![3 => 2usize..9, 2 => 9usize..70],
        seed: u64,
        poison: bool,
    ) {
        let mut case = Case::new(dims, n_kv, ranges(n_kv, n_q, seed), 0.0, seed);
        if poison {
            // Rows that see the last key are lost, the others must not know.
            case.k[(n_kv - 1) * dims.0..].fill(f32::INFINITY);
            case.v[(n_kv - 1) * dims.1..].fill(f32::NAN);
        }
        for arch in Arch::available() {
            for half in [false, true] {
                // See `prompts_of_many_rows`.
                if takes_rows_together(arch, half) && n_q >= 32 {
                    continue;
                }
                let together = case.rows(arch, half, 0..n_q);
                for i in 0..n_q {
                    let alone = case.rows(arch, half, i..i + 1);
                    let row = &together[i * dims.1..][..dims.1];
                    prop_assert!(row.iter().zip(&alone).all(|(a, b)| same(*a, *b)), "{:?}, row {} of {}, half {}", arch, i, n_q, half);
                    let sees_poison = poison && case.ranges[i].1 as usize == n_kv;
                    prop_assert!(sees_poison || alone.iter().all(|x| x.is_finite()), "{:?}: row {}", arch, i);
                }
            }
        }
    }
}

/// A causal prefill of many tokens with grouped heads and a window equals decoding token by token,
/// and a cache that grows behind a row's keys changes nothing.
#[test]
fn prefill_equals_decodes() {
    let (tokens, group, pos, dim) = (75, 4, 131, 64);
    for window in [u32::MAX, 50, 1] {
        let end = |row: usize| (pos + row / group + 1) as u32;
        let ranges = (0..tokens * group)
            .map(|row| (end(row).saturating_sub(window), end(row)))
            .collect();
        let case = Case::new((dim, dim), pos + tokens, ranges, 0.0, 11);
        for half in [false, true] {
            // Tiles, integers and multiply-adds round differently.
            let (together, apart): (Vec<_>, Vec<_>) =
                Arch::available().partition(|arch| takes_rows_together(*arch, half));
            case.check(together, half);
            for arch in apart {
                let prefill = case.rows(arch, half, 0..tokens * group);
                for token in 0..tokens {
                    let rows = token * group..(token + 1) * group;
                    let mut then = case.clone();
                    then.k.truncate(end(rows.start) as usize * dim);
                    then.v.truncate(end(rows.start) as usize * dim);
                    let decode = then.rows(arch, half, rows.clone());
                    assert_eq!(
                        prefill[rows.start * dim..rows.end * dim],
                        decode,
                        "{arch:?}, token {token}"
                    );
                }
            }
        }
    }
}

/// Contexts of several spans: a row's bits are the same whether one task takes the spans in turn or
/// many take one each, alone or among others, and right; windows begin inside pages and spans.
#[test]
fn spans_are_merged_in_one_order() {
    let n_kv = 3 * KV_SPAN + 70;
    let n_rows = if emulated() { 40 } else { 160 };
    for (dims, softcap) in [((64, 64), 0.0), ((48, 80), 5.0), ((5, 3), 0.0)] {
        // The last tokens of the context, a group of heads each, with windows of every kind.
        let ranges: Vec<_> = (0..n_rows)
            .map(|i| (n_kv - 40 + i / 4 + 1) as u32)
            .enumerate()
            .map(|(i, end)| {
                (
                    end.saturating_sub([u32::MAX, 100, 1, 1200, 700][5 * i / n_rows]),
                    end,
                )
            })
            .collect();
        let case = Case::new(dims, n_kv, ranges, softcap, 5);
        for half in [false, true] {
            case.check(Arch::available(), half);
            for arch in Arch::available() {
                let n = if takes_rows_together(arch, half) {
                    31
                } else {
                    n_rows
                };
                let together = case.compute(arch, half, 0..n, false);
                assert_eq!(
                    together,
                    case.compute(arch, half, 0..n, true),
                    "{arch:?} half {half}"
                );
                for row in (0..n).step_by(5) {
                    let alone = case.compute(arch, half, row..row + 1, true);
                    assert_eq!(
                        alone,
                        together[row * dims.1..][..dims.1],
                        "{arch:?} half {half} row {row}"
                    );
                }
                // Those that take rows together are merged in the same way, too.
                let all = |whole| case.compute(arch, half, 0..n_rows, whole);
                assert_eq!(all(false), all(true), "{arch:?}");
            }
        }
    }
}

/// A span of which a row sees nothing leaves the row as it was.
#[test]
fn spans_that_are_not_seen_change_nothing() {
    for arch in Arch::available() {
        let p = AttnParams {
            head_dim: 16,
            head_dim_v: 16,
            scale: 0.25,
            softcap: 0.0,
            slope: 0.0,
            exact: false,
        };
        let (k, v, q) = (
            noise(KV_BLOCK * 16, 1),
            noise(KV_BLOCK * 16, 2),
            noise(2 * 16, 3),
        );
        let blocks = [KvBlock { k: &k[..], v: &v }];
        let span = |first| KvSpan {
            first,
            blocks: &blocks,
        };
        let mut buffer = vec![0.0; AttnPartial::len(2, 16)];
        let mut total = AttnPartial::of(&mut buffer, 2);
        total.clear();
        let ranges = [(0, 10), (KV_SPAN as u32 + 3, KV_SPAN as u32 + 9)];
        arch.attention(&mut total, &q, span(KV_SPAN), &ranges, &p);
        assert!(
            total.sum[0] == 0.0
                && total.max[0] == f32::NEG_INFINITY
                && total.out[..16] == [0.0; 16],
            "{arch:?}"
        );
        let second = (total.out[16..].to_vec(), total.max[1], total.sum[1]);
        arch.attention(&mut total, &q, span(0), &ranges, &p);
        assert_eq!(
            second,
            (total.out[16..].to_vec(), total.max[1], total.sum[1]),
            "{arch:?}"
        );
        assert!(total.sum[0] >= 1.0, "{arch:?}");
        arch.attention_finish(&mut total, &p);
        assert!(total.out.iter().all(|x| x.is_finite()), "{arch:?}");
    }
}

/// Rows of a prompt, some of them with a window, that see whole blocks of keys together.
#[test]
fn prompts_of_many_rows() {
    let shapes = [
        ((64, 64), 0.0, 400),
        ((96, 64), 0.0, 230),
        ((128, 128), 5.0, 150),
        ((80, 80), 0.0, 400),
    ];
    for (dims, softcap, window) in shapes.into_iter().take(if emulated() { 2 } else { 4 }) {
        let (n_kv, n_group) = (330, 4);
        let ranges: Vec<_> = (0..4 * 37)
            .map(|i| 293 + i / n_group + 1)
            .map(|end| (u32::saturating_sub(end, window), end))
            .collect();
        let mut case = Case::new(dims, n_kv, ranges, softcap, 7);
        for half in [false, true] {
            case.check(Arch::available(), half);
            for arch in Arch::available() {
                let together = case.rows(arch, half, 0..148);
                for start in [0, 32, 64, 128] {
                    let some = case.rows(arch, half, start..(start + 32).min(148));
                    assert_eq!(
                        some,
                        &together[start * dims.1..][..some.len()],
                        "{arch:?}: rows from {start}"
                    );
                }
            }
        }
        // Rows that see a key that is lost are lost with it, the others must not know.
        case.k[329 * dims.0..].fill(f32::INFINITY);
        case.v[329 * dims.1..].fill(f32::NAN);
        for arch in Arch::available() {
            let rows = case.rows(arch, true, 0..148);
            assert!(
                rows[..144 * dims.1].iter().all(|x| x.is_finite()),
                "{arch:?}"
            );
            assert!(
                rows[144 * dims.1..].iter().all(|x| !x.is_finite()),
                "{arch:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn alibi_takes_from_scores_what_keys_are_behind(
        dims in (head_dim(), head_dim()),
        n_kv in prop_oneof![4 => 1usize..300, 1 => KV_SPAN - 100..KV_SPAN + 100],
        n_q in prop_oneof![3 => 1usize..9, 1 => 9usize..70],
        slope in prop::sample::select(vec![0.5f32, 0.0625, 0.00390625]),
        seed: u64,
    ) {
        let mut case = Case::new(dims, n_kv, ranges(n_kv, n_q, seed), 0.0, seed);
        (case.p.slope, case.p.exact) = (slope, true);
        for half in [false, true] {
            case.check(Arch::available(), half);
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    /// The same with anything in their numbers, small, large and not finite.
    #[test]
    fn prompts_of_any_shape(
        dims in prop_oneof![3 => head_dim().prop_map(|d| (d, d)), 1 => (head_dim(), head_dim())],
        n_q in prop_oneof![1 => Just(32usize), 3 => 32usize..140],
        before in 64usize..260,
        n_group in 1usize..9,
        window in prop_oneof![2 => Just(u32::MAX), 1 => 70u32..300],
        softcap in prop_oneof![3 => Just(0f32), 1 => Just(5f32)],
        (log_q, log_k, log_v) in (-20i32..3, -3i32..2, -3i32..4),
        (odd, place, in_query) in (0usize..12, 0usize..1000, any::<bool>()),
        seed: u64,
    ) {
        let mut case = Case::prompt(dims, n_q, before, n_group, (window, softcap), [log_q, log_k, log_v], seed);
        case.check(Arch::available(), true);
        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN];
        let Some(&special) = special.get(odd) else { return Ok(()) };
        let key = place % before;
        match (in_query, special.is_finite()) {
            (true, _) | (_, true) => case.q[place % (n_q * dims.0)] = special,
            _ if place % 2 == 0 => case.k[key * dims.0 + place % dims.0] = special,
            _ => case.v[key * dims.1 + place % dims.1] = special,
        }
        for arch in Arch::available() {
            let together = case.rows(arch, true, 0..n_q);
            for i in 0..n_q {
                let alone = case.rows(arch, true, i..i + 1);
                for (a, b) in together[i * dims.1..].iter().zip(&alone) {
                    // In tiles, products with infinity may be NaN, as factors are sums of two numbers of any sign.
                    let as_alone = match arch.name() {
                        "amx" => a.is_nan() || a.is_finite() == b.is_finite(),
                        _ => same(*a, *b) || a.is_finite() && b.is_finite(),
                    };
                    prop_assert!(as_alone, "{:?}: row {} of {}: {} together, {} alone", arch, i, n_q, a, b);
                }
            }
        }
    }
}

/// A row that sees little but the key whose values are zero: what is left of the others are weights
/// below the smallest normal number.
#[test]
fn weights_that_underflow() {
    let case = Case::prompt(
        (52, 52),
        105,
        65,
        7,
        (u32::MAX, 0.0),
        [2, 0, 3],
        2408768242109702944,
    );
    case.check(Arch::available(), true);
}

/// With all scores equal the output is the mean; with one far above it is that key's value.
#[test]
fn attention_of_known_results() {
    for arch in Arch::available() {
        let n = 200;
        let p = AttnParams {
            head_dim: 8,
            head_dim_v: 3,
            scale: 1.0,
            softcap: 0.0,
            slope: 0.0,
            exact: false,
        };
        let v: Vec<f32> = (0..3 * n).map(|i| (i / 3) as f32).collect();
        let attention =
            |q: &[f32], k: &[f32], range| attend(arch, q, (k, &v), &[range], &p, |x| x, false);
        assert_eq!(
            attention(&[0.0; 8], &vec![1.0; 8 * n], (0, n as u32)),
            [99.5; 3],
            "{arch:?}"
        );
        let mut k = vec![0.0; 8 * n];
        k[8 * 77] = 1e4;
        assert_eq!(
            attention(&[1.0; 8], &k, (3, n as u32)),
            [77.0; 3],
            "{arch:?}"
        );
        // The maximum of every block is far above the one before.
        for j in 0..n {
            k[8 * j] = j as f32 * 200.0;
        }
        assert_eq!(
            attention(&[1.0; 8], &k, (0, n as u32)),
            [199.0; 3],
            "{arch:?}"
        );
    }
}

#[test]
#[should_panic(expected = "attention: heads at most")]
fn wider_heads_are_refused() {
    let p = AttnParams {
        head_dim: MAX_HEAD_DIM + 1,
        head_dim_v: 1,
        scale: 1.0,
        softcap: 0.0,
        slope: 0.0,
        exact: false,
    };
    let q = vec![0.0; MAX_HEAD_DIM + 1];
    attend(
        Arch::scalar(),
        &q,
        (&q, &[1.0]),
        &[(0, 1)],
        &p,
        |x| x,
        false,
    );
}

/// Rows so far apart that their distance wraps are refused: they would begin before `b`.
#[test]
fn add_product_of_rows_that_wrap() {
    for arch in Arch::available() {
        for stride in [usize::MAX, usize::MAX / 2 + 1, usize::MAX - 7] {
            for rank in [2, 3] {
                let (b, t) = ([1.0; 8], vec![1.0; rank]);
                let add =
                    || arch.add_product(&mut ColumnsMut::new(&mut [0.0; 8], 1, 8), &t, &b, stride);
                let refused = std::panic::catch_unwind(add).expect_err("a panic");
                let message = refused.downcast_ref::<String>().expect("a message");
                assert!(
                    message.starts_with("add_product"),
                    "{}: {message}",
                    arch.name()
                );
            }
        }
    }
}
