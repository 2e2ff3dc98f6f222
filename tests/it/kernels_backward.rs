//! Every level's backward kernels against 64-bit arithmetic: norms, activations, attention.
//!
//! Error bounds count roundings, as in `kernels_elementwise.rs`: `U = 2⁻²⁴` each, to first order.

use crate::common::cases;
use proptest::prelude::*;
use ruvllm::arch::{Arch, AttnBackward, AttnParams};

const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Covers the products of errors.
const SLACK: f64 = 1.02;

/// Roundings one term of an `n`-term sum can meet: no level uses fewer than 16 partial sums, but
/// for some of scalar's sums, which have one.
fn depth(arch: Arch, n: usize) -> f64 {
    if arch.name() == "scalar" {
        (n + 2) as f64
    } else {
        (n.div_ceil(16) + 17) as f64
    }
}

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

#[track_caller]
fn assert_close(arch: Arch, what: &str, y: f32, truth: f64, bound: f64) {
    let error = (f64::from(y) - truth).abs();
    assert!(
        error <= bound * SLACK + 1e-40,
        "{arch:?} {what}: {y:e} is {error:e} off {truth:e}, bound {bound:e}"
    );
}

fn wide(x: f32) -> f64 {
    f64::from(x)
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 1usize..200, 1 => 500usize..600, 1 => Just(4096usize)]
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn norms(n in length(), seed: u64, offset in -5f32..5.0, log_eps in -6i32..-2, shift in 0usize..4) {
        let x: Vec<f32> = noise(n + shift, seed).iter().map(|x| x + offset).collect();
        let x = &x[shift..]; // no alignment
        let (dy, w, old) = (noise(n, !seed), noise(n, seed ^ 7), noise(n, seed ^ 99));
        let eps = 10f32.powi(log_eps);
        let count = n as f64;
        let g: Vec<f64> = dy.iter().zip(&w).map(|(dy, w)| wide(*dy) * wide(*w)).collect();
        for arch in Arch::available() {
            let d = depth(arch, n);
            let mut dx = old.clone();
            arch.rms_norm_backward(&mut dx, &dy, x, &w, eps);
            let s = 1.0 / (x.iter().map(|&x| wide(x) * wide(x)).sum::<f64>() / count + wide(eps)).sqrt();
            let along: f64 = g.iter().zip(x).map(|(g, x)| g * wide(*x)).sum();
            let along_abs: f64 = g.iter().zip(x).map(|(g, x)| (g * wide(*x)).abs()).sum();
            for i in 0..n {
                let (first, second) = (g[i] * s, wide(x[i]) * s * s * s * along / count);
                let truth = wide(old[i]) + first - second;
                // The root halves the error of the sum; s³ has three times that of s.
                let bound = (d / 2.0 + 8.0) * U * first.abs()
                    + U * (wide(x[i]) * s * s * s / count).abs() * ((1.5 * d + 16.0) * along.abs() + (d + 3.0) * along_abs)
                    + U * ((first - second).abs() + truth.abs());
                assert_close(arch, "rms_norm_backward", dx[i], truth, bound);
            }

            let mut dx = old.clone();
            arch.layer_norm_backward(&mut dx, &dy, x, &w, eps);
            let mean = x.iter().map(|&x| wide(x)).sum::<f64>() / count;
            let c: Vec<f64> = x.iter().map(|&x| wide(x) - mean).collect();
            let variance = c.iter().map(|c| c * c).sum::<f64>() / count;
            let s = 1.0 / (variance + wide(eps)).sqrt();
            let mean_size = x.iter().map(|&x| wide(x).abs()).sum::<f64>() / count;
            let largest = c.iter().fold(0.0f64, |m, c| m.max(c.abs()));
            // All differences are off by what the mean is, besides their own rounding.
            let off = (d + 1.0) * U * mean_size + U * largest;
            let variance_error = off * off + 2.0 * U * largest * largest + (d + 3.0) * U * variance;
            let relative = (variance_error * s * s / 2.0 + 5.0 * U) * (1.0 + variance_error * s * s);
            let (total, size): (f64, f64) = (g.iter().sum(), g.iter().map(|g| g.abs()).sum());
            let along: f64 = g.iter().zip(&c).map(|(g, c)| g * c).sum();
            let along_abs: f64 = g.iter().zip(&c).map(|(g, c)| (g * c).abs()).sum();
            let along_error = (d + 3.0) * U * along_abs + off * size;
            for i in 0..n {
                let pull = c[i] * s * s * along / count;
                let inner = g[i] - total / count - pull;
                let truth = wide(old[i]) + s * inner;
                let inner_error = 4.0 * U * (g[i].abs() + pull.abs() + (total / count).abs())
                    + (d + 2.0) * U * size / count
                    + (c[i].abs() + off) * s * s / count * along_error
                    + off * s * s * along.abs() / count
                    + pull.abs() * (2.0 * relative + 5.0 * U);
                let bound = s * inner_error * (1.0 + relative) + relative * (s * inner).abs()
                    + 2.0 * U * ((s * inner).abs() + truth.abs());
                assert_close(arch, "layer_norm_backward", dx[i], truth, bound);
            }
        }
    }

    /// `σ` and its derivative have some roundings each; those of their argument `t` matter by `t·σ'(t)`,
    /// at most a quarter, and for the derivative of GELU by `t·x·u'·σ'(t)`, below 3 everywhere.
    #[test]
    fn activations(n in 1usize..300, seed: u64, spread in 0.1f32..20.0) {
        let gate: Vec<f32> = noise(n, seed).iter().map(|x| x * spread).collect();
        let (up, dy) = (noise(n, !seed), noise(n, seed ^ 5));
        let sigmoid = |t: f64| 1.0 / (1.0 + (-t).exp());
        let silu = |x: f64| (x * sigmoid(x), sigmoid(x) * (1.0 + x * sigmoid(-x)));
        let gelu = |x: f64| {
            let c = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
            let (u, slope) = (c * (x + 0.044715 * x.powi(3)), c * (1.0 + 3.0 * 0.044715 * x * x));
            (x * sigmoid(u), sigmoid(u) + x * slope * sigmoid(u) * sigmoid(-u))
        };
        for arch in Arch::available() {
            let run = |f: fn(Arch, &mut [f32], &mut [f32], &[f32])| {
                let (mut g, mut u) = (gate.clone(), up.clone());
                f(arch, &mut g, &mut u, &dy);
                (g, u)
            };
            let (silu_gate, silu_up) = run(|arch, g, u, dy| arch.silu_mul_backward(g, u, dy));
            let (gelu_gate, gelu_up) = run(|arch, g, u, dy| arch.gelu_mul_backward(g, u, dy));
            let mut ungated = gate.clone();
            arch.gelu_backward(&mut ungated, &dy);
            for i in 0..n {
                let (x, u, dy) = (wide(gate[i]), wide(up[i]), wide(dy[i]));
                for (name, (y, slope), dg, du) in
                    [("silu", silu(x), silu_gate[i], silu_up[i]), ("gelu", gelu(x), gelu_gate[i], gelu_up[i])]
                {
                    assert_close(arch, name, dg, dy * u * slope, 40.0 * U * (dy * u).abs());
                    assert_close(arch, name, du, dy * y, 20.0 * U * dy.abs() * (y.abs() + x.abs().min(1.0)));
                }
                assert_close(arch, "gelu alone", ungated[i], dy * gelu(x).1, 40.0 * U * dy.abs());
            }
        }
    }
}

/// Far from zero activations are straight; what is not a number stays so.
#[test]
fn activations_at_the_ends() {
    for arch in Arch::available() {
        for n in [1, 7, 16, 33] {
            for (x, slope) in [
                (1e4f32, 1.0f32),
                (-1e4, 0.0),
                (f32::MAX, 1.0),
                (f32::MIN, 0.0),
            ] {
                let check =
                    |y: f32| assert!((y - 3.0 * slope).abs() < 1e-6, "{arch:?} at {x}: {y}");
                let (mut gate, mut up) = (vec![x; n], vec![1.0; n]);
                arch.silu_mul_backward(&mut gate, &mut up, &vec![3.0; n]);
                gate.iter().for_each(|&y| check(y));
                let (mut gate, mut up) = (vec![x; n], vec![1.0; n]);
                arch.gelu_mul_backward(&mut gate, &mut up, &vec![3.0; n]);
                gate.iter().for_each(|&y| check(y));
                let mut gate = vec![x; n];
                arch.gelu_backward(&mut gate, &vec![3.0; n]);
                gate.iter().for_each(|&y| check(y));
            }
            let mut gate = vec![f32::NAN; n];
            arch.gelu_backward(&mut gate, &vec![3.0; n]);
            assert!(gate.iter().all(|y| y.is_nan()), "{arch:?}");
            let (mut gate, mut up) = (vec![f32::NAN; n], vec![1.0; n]);
            arch.silu_mul_backward(&mut gate, &mut up, &vec![3.0; n]);
            assert!(gate.iter().chain(&up).all(|y| y.is_nan()), "{arch:?}");
        }
    }
}

/// One head in 64 bits: gradients, and bounds on their errors.
struct Truth {
    lse: Vec<f64>,
    dq: Vec<(f64, f64)>,
    dk: Vec<(f64, f64)>,
    dv: Vec<(f64, f64)>,
}

fn attention(
    x: &AttnBackward<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
    depth: impl Fn(usize) -> f64,
) -> Truth {
    let (d, d_v) = (p.head_dim, p.head_dim_v);
    let n_kv = x.k.len() / d;
    let mut t = Truth {
        lse: Vec::new(),
        dq: vec![(0.0, 0.0); x.q.len()],
        dk: vec![(0.0, 0.0); x.k.len()],
        dv: vec![(0.0, 0.0); x.v.len()],
    };
    let terms = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(a, b)| wide(*a) * wide(*b));
        (
            products.clone().sum::<f64>(),
            products.map(f64::abs).sum::<f64>(),
        )
    };
    let (scale, cap) = (wide(p.scale), wide(p.softcap));
    for (i, &(start, end)) in ranges.iter().enumerate() {
        let (q, dout) = (&x.q[i * d..][..d], &x.dout[i * d_v..][..d_v]);
        // Score, its slope, and bounds on the errors of both.
        let scores: Vec<[f64; 4]> = (start as usize..end as usize)
            .map(|j| {
                let (qk, size) = terms(q, &x.k[j * d..][..d]);
                let off =
                    scale.abs() * ((depth(d) + 2.0) * U * size) + 2.0 * U * (scale * qk).abs();
                if cap > 0.0 {
                    let t = (scale * qk / cap).tanh();
                    let t_off = off / cap * (1.0 - t * t) + 4.0 * U;
                    [
                        cap * t,
                        scale * (1.0 - t * t),
                        cap * t_off + U * (cap * t).abs(),
                        scale * (2.0 * t_off + 3.0 * U),
                    ]
                } else {
                    [scale * qk, scale, off, 0.0]
                }
            })
            .collect();
        let max = scores.iter().fold(f64::MIN, |m, s| m.max(s[0]));
        let sum: f64 = scores.iter().map(|s| (s[0] - max).exp()).sum();
        let worst = scores.iter().fold(0.0f64, |m, s| m.max(s[2]));
        t.lse.push(max + sum.ln());
        for (j, s) in (start as usize..end as usize).zip(&scores) {
            let weight = (s[0] - max).exp() / sum;
            let (dp, dp_size) = terms(dout, &x.v[j * d_v..][..d_v]);
            let delta = wide(x.delta[i]);
            // Of the weight: the score's and the sum's error, the logarithm's rounding,
            // differences, exponentials, and as many additions of weights and of
            // weighted rows as there are blocks.
            let relative = 2.0 * worst
                + U * (8.0 * (max.abs() + t.lse[i].abs() + 1.0)
                    + 3.0 * (n_kv + ranges.len()) as f64);
            let g = weight * (dp - delta) * s[1];
            let g_off = g.abs() * (relative + 6.0 * U)
                + weight * s[1].abs() * ((depth(d_v) + 2.0) * U * dp_size + U * (dp - delta).abs())
                + weight * (dp - delta).abs() * s[3];
            for c in 0..d {
                let (q, k) = (wide(q[c]), wide(x.k[j * d + c]));
                let (dq, dk) = (&mut t.dq[i * d + c], &mut t.dk[j * d + c]);
                *dq = (dq.0 + g * k, dq.1 + g_off * k.abs());
                *dk = (dk.0 + g * q, dk.1 + g_off * q.abs());
            }
            for c in 0..d_v {
                let (dout, dv) = (wide(dout[c]), &mut t.dv[j * d_v + c]);
                *dv = (
                    dv.0 + weight * dout,
                    dv.1 + weight * (relative + 6.0 * U) * dout.abs(),
                );
            }
        }
    }
    t
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn attention_of_causal_groups(
        tokens in 1usize..90,
        past in 0usize..70,
        group in 1usize..5,
        d in prop_oneof![Just(8usize), Just(20), Just(37), Just(64), Just(80)],
        d_v in prop_oneof![Just(8usize), Just(23), Just(64)],
        window in prop_oneof![Just(usize::MAX), 1usize..80],
        softcap in prop_oneof![Just(0f32), 1f32..10.0],
        seed: u64,
    ) {
        let (n_q, n_kv) = (tokens * group, past + tokens);
        let p = AttnParams { head_dim: d, head_dim_v: d_v, scale: 0.7 / (d as f32).sqrt(), softcap, slope: 0.0, exact: false };
        let (q, k, v) = (noise(n_q * d, seed), noise(n_kv * d, seed ^ 1), noise(n_kv * d_v, seed ^ 2));
        let (dout, delta) = (noise(n_q * d_v, seed ^ 3), noise(n_q, seed ^ 4));
        let x = AttnBackward { q: &q, dout: &dout, delta: &delta, k: &k, v: &v };
        let seen = |i: usize| {
            let end = past + i / group + 1;
            (end.saturating_sub(window) as u32, end as u32)
        };
        let ranges: Vec<(u32, u32)> = (0..n_q).map(seen).collect();
        let key_ranges: Vec<(u32, u32)> =
            (0..tokens).map(|t| ((t * group) as u32, (tokens.min(t.saturating_add(window)) * group) as u32)).collect();
        for arch in Arch::available() {
            let truth = attention(&x, &ranges, &p, |n| depth(arch, n));
            let (mut dq, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; n_q]);
            arch.attention_queries(&mut dq, &mut lse, x, &ranges, &p);
            for (y, (t, bound)) in dq.iter().zip(&truth.dq) {
                assert_close(arch, "dq", *y, *t, *bound);
            }
            let (mut dk, mut dv) = (vec![f32::NAN; tokens * d], vec![f32::NAN; tokens * d_v]);
            let keys = AttnBackward { k: &k[past * d..], v: &v[past * d_v..], ..x };
            arch.attention_keys(&mut dk, &mut dv, keys, &lse, &key_ranges, &p);
            for (y, (t, bound)) in dk.iter().zip(&truth.dk[past * d..]) {
                assert_close(arch, "dk", *y, *t, *bound);
            }
            for (y, (t, bound)) in dv.iter().zip(&truth.dv[past * d_v..]) {
                assert_close(arch, "dv", *y, *t, *bound);
            }
        }
    }
}
