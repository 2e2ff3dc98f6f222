//! The design notes' rows for attention, norms, rotations and the KV append, one thread, on the
//! level that `RUVLLM_ARCH` names or the best there is.
//!
//! How the rows are read where the notes leave it open: heads are 128 wide and `f32`. "Attention"
//! and "flash attention" are one query row of one head (here the same kernel, since no score is
//! ever stored); "grouped" is one token of 32 query heads. "RoPE computed" includes the cosines and
//! sines of each token and rotates one head. "KV append" rounds one 128-wide head row of keys and
//! one of values per token to half precision.

use bytemuck::Zeroable;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use ruvllm::arch::{Arch, AttnParams, BlockP16, BlockQ16, KvElement};
use ruvllm_benches::attend;

const HEAD_DIM: usize = 128;

fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect()
}

fn arch() -> Arch {
    std::env::var("RUVLLM_ARCH").map_or_else(
        |_| Arch::detect(),
        |name| Arch::named(&name).expect("a level of this CPU"),
    )
}

/// One token's attention: `n_group` query heads on each of `n_head_kv`.
fn decode<T: KvElement>(
    c: &mut Criterion,
    group: &str,
    n_kv: usize,
    (n_head_kv, n_group): (usize, usize),
    narrow: fn(f32) -> T,
) {
    let arch = arch();
    let p = AttnParams {
        head_dim: HEAD_DIM,
        head_dim_v: HEAD_DIM,
        scale: 0.088,
        softcap: 0.0,
        slope: 0.0,
        exact: true,
    };
    let (n_q, n_head) = (n_group * HEAD_DIM, n_kv * HEAD_DIM);
    let cache: Vec<T> = noise(n_head_kv * n_head).into_iter().map(narrow).collect();
    let (k, v) = (cache.clone(), cache);
    let q = noise(n_head_kv * n_q);
    let mut out = vec![0.0; q.len()];
    let ranges = vec![(0, n_kv as u32); n_group];
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Bytes(2 * size_of_val(&*k) as u64));
    group.bench_function(BenchmarkId::from_parameter(n_kv), |b| {
        b.iter(|| {
            let heads = out.chunks_exact_mut(n_q).zip(q.chunks_exact(n_q));
            for ((out, q), (k, v)) in heads.zip(k.chunks_exact(n_head).zip(v.chunks_exact(n_head)))
            {
                attend(arch, out, q, k, v, &ranges, &p);
            }
        });
    });
}

fn attention(c: &mut Criterion) {
    for n in [128, 256, 512, 1024, 2048, 4096] {
        decode(c, "attention", n, (1, 1), |x| x);
        decode(c, "attention f16", n, (1, 1), f16::from_f32);
    }
    for n in [128, 256, 512] {
        decode(c, "grouped attention ratio 4", n, (8, 4), |x| x);
        decode(c, "grouped attention ratio 8", n, (4, 8), |x| x);
        decode(c, "grouped attention ratio 4 f16", n, (8, 4), f16::from_f32);
        decode(c, "grouped attention ratio 8 f16", n, (4, 8), f16::from_f32);
    }
}

/// A task of a prefill: 64 query rows at the end of a context.
fn prefill(c: &mut Criterion) {
    let arch = arch();
    let (rows, n) = (64, 4096);
    for dim in [64, 128, 256] {
        let p = AttnParams {
            head_dim: dim,
            head_dim_v: dim,
            scale: 0.088,
            softcap: 0.0,
            slope: 0.0,
            exact: false,
        };
        let kv: Vec<f16> = noise(n * dim).into_iter().map(f16::from_f32).collect();
        let q = noise(rows * dim);
        let mut out = vec![0.0; q.len()];
        let ranges: Vec<_> = (n - rows + 1..=n).map(|end| (0, end as u32)).collect();
        let mut group = c.benchmark_group("prefill attention f16");
        group.throughput(Throughput::Elements((4 * rows * n * dim) as u64)); // operations
        group.bench_function(BenchmarkId::from_parameter(dim), |b| {
            b.iter(|| attend(arch, &mut out, &q, &kv, &kv, &ranges, &p));
        });
    }
}

/// Latent attention in its absorbed form: heads of 576, of which the first 512 are the values, and
/// 16 query heads on one key head, for one token and for four of a prompt.
fn latent(c: &mut Criterion) {
    let (arch, n, dim, dim_v) = (arch(), 512, 576, 512);
    let p = AttnParams {
        head_dim: dim,
        head_dim_v: dim_v,
        scale: 0.07,
        softcap: 0.0,
        slope: 0.0,
        exact: false,
    };
    let k: Vec<f16> = noise(n * dim).into_iter().map(f16::from_f32).collect();
    let v: Vec<f16> = noise(n * dim_v).into_iter().map(f16::from_f32).collect();
    for rows in [16, 64] {
        let q = noise(rows * dim);
        let mut out = vec![0.0; rows * dim_v];
        let ranges = vec![(0, n as u32); rows];
        let mut group = c.benchmark_group("latent attention f16");
        group.throughput(Throughput::Elements((2 * rows * n * (dim + dim_v)) as u64)); // operations
        group.bench_function(BenchmarkId::from_parameter(rows), |b| {
            b.iter(|| attend(arch, &mut out, &q, &k, &v, &ranges, &p));
        });
    }
}

/// Attention of an encoder, whose rows all see the whole text.
fn encoder(c: &mut Criterion) {
    let (arch, n, dim) = (arch(), 128, 64);
    let p = AttnParams {
        head_dim: dim,
        head_dim_v: dim,
        scale: 0.125,
        softcap: 0.0,
        slope: 0.0,
        exact: false,
    };
    let (q, kv) = (noise(n * dim), noise(n * dim));
    let mut out = vec![0.0; q.len()];
    let ranges = vec![(0, n as u32); n];
    let mut group = c.benchmark_group("attention without mask");
    group.throughput(Throughput::Elements((4 * n * n * dim) as u64)); // operations
    group.bench_function(BenchmarkId::from_parameter(n), |b| {
        b.iter(|| attend(arch, &mut out, &q, &kv, &kv, &ranges, &p));
    });
}

fn norms(c: &mut Criterion) {
    let arch = arch();
    for n in [768, 1024, 2048, 4096, 8192] {
        let (x, w, b) = (noise(n), noise(n), noise(n));
        let mut y = vec![0.0; n];
        c.benchmark_group("RMSNorm")
            .bench_function(BenchmarkId::from_parameter(n), |bench| {
                bench.iter(|| arch.rms_norm(&mut y, &x, &w, 1e-5));
            });
        if n <= 4096 {
            c.benchmark_group("LayerNorm").bench_function(
                BenchmarkId::from_parameter(n),
                |bench| {
                    bench.iter(|| arch.layer_norm(&mut y, &x, &w, &b, 1e-5));
                },
            );
        }
    }
}

fn rope(c: &mut Criterion) {
    let arch = arch();
    for dim in [64, 128] {
        let frequencies: Vec<f32> = (0..dim / 2)
            .map(|i| 10000f32.powf(-2.0 * i as f32 / dim as f32))
            .collect();
        for tokens in [1, 8, 32, 128] {
            let mut x = noise(tokens * dim);
            let (mut cos, mut sin) = (vec![0.0; dim / 2], vec![0.0; dim / 2]);
            c.benchmark_group("RoPE computed").bench_function(
                BenchmarkId::new(dim.to_string(), tokens),
                |b| {
                    b.iter(|| {
                        for (pos, x) in x.chunks_exact_mut(dim).enumerate() {
                            arch.rope_angles(&mut cos, &mut sin, &frequencies, pos as f32, 1.0);
                            arch.rope_norm(x, &cos, &sin);
                        }
                    });
                },
            );
        }
    }
    for (dim, tokens) in [(64, 1), (128, 8), (128, 32)] {
        let mut x = noise(tokens * dim);
        let angles = noise(tokens * dim / 2);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        for (name, kernel) in [
            ("norm", Arch::rope_norm as fn(_, &mut [f32], &[f32], &[f32])),
            ("neox", Arch::rope_neox),
        ] {
            c.benchmark_group("RoPE tables").bench_function(
                BenchmarkId::new(format!("{name} {dim}"), tokens),
                |b| {
                    b.iter(|| {
                        let angles = cos.chunks_exact(dim / 2).zip(sin.chunks_exact(dim / 2));
                        for (x, (cos, sin)) in x.chunks_exact_mut(dim).zip(angles) {
                            kernel(arch, x, cos, sin);
                        }
                    });
                },
            );
        }
    }
}

fn kv_append(c: &mut Criterion) {
    let arch = arch();
    for tokens in [256, 512, 1024, 2048] {
        let (k, v) = (noise(tokens * HEAD_DIM), noise(tokens * HEAD_DIM));
        let (mut k_cache, mut v_cache) = (vec![f16::ZERO; k.len()], vec![f16::ZERO; v.len()]);
        c.benchmark_group("KV append")
            .bench_function(BenchmarkId::from_parameter(tokens), |b| {
                b.iter(|| {
                    for (rows, cache) in [(&k, &mut k_cache), (&v, &mut v_cache)] {
                        for (row, place) in rows
                            .chunks_exact(HEAD_DIM)
                            .zip(cache.chunks_exact_mut(HEAD_DIM))
                        {
                            arch.f32_to_f16(row, place);
                        }
                    }
                });
            });
    }
}

/// Rows the notes do not have: what else runs over every activation.
fn activations(c: &mut Criterion) {
    let arch = arch();
    let n = 8192;
    let (up, mut x) = (noise(n), noise(n));
    let mut group = c.benchmark_group("activations");
    group.throughput(Throughput::Elements(n as u64));
    group.bench_function("silu_mul", |b| b.iter(|| arch.silu_mul(&mut x, &up)));
    x.copy_from_slice(&up);
    group.bench_function("gelu_mul", |b| b.iter(|| arch.gelu_mul(&mut x, &up)));
    x.copy_from_slice(&up);
    group.bench_function("gelu_erf_mul", |b| {
        b.iter(|| arch.gelu_erf_mul(&mut x, &up))
    });
    x.copy_from_slice(&up);
    group.bench_function("swiglu_oai", |b| b.iter(|| arch.swiglu_oai(&mut x, &up)));
    x.copy_from_slice(&up);
    group.bench_function("sigmoid_mul", |b| b.iter(|| arch.sigmoid_mul(&mut x, &up)));
    x.copy_from_slice(&up);
    group.bench_function("softmax", |b| b.iter(|| arch.softmax(&mut x)));
    let mut blocks = vec![BlockQ16::zeroed(); BlockQ16::per_row(n)];
    group.bench_function("quantize_q16", |b| {
        b.iter(|| arch.quantize_q16(&up, &mut blocks))
    });
    let mut blocks = vec![BlockP16::zeroed(); BlockP16::per_row(n)];
    group.bench_function("quantize_p16", |b| {
        b.iter(|| arch.quantize_p16(&up, &mut blocks))
    });
}

/// Steps of recurrent layers with heads of 128, whose state is in the cache.
fn recurrences(c: &mut Criterion) {
    let (arch, n) = (arch(), 128);
    let mut group = c.benchmark_group("recurrences");
    group.throughput(Throughput::Bytes(2 * 4 * (n * n) as u64));
    let (q, k, v, mut out) = (noise(n), noise(n), noise(n), vec![0.0; n]);
    // As many columns as a part of a head has.
    let mut state = noise(n * 32);
    group.bench_function("delta_rule, four parts", |b| {
        b.iter(|| {
            for part in 0..n / 32 {
                let (v, out) = (&v[part * 32..][..32], &mut out[part * 32..][..32]);
                arch.delta_rule(&mut state, &q, &k, v, 0.5, &[0.9], out);
            }
        });
    });
    let rates = vec![0.9; n];
    group.bench_function("delta_rule with rates (Kimi), four parts", |b| {
        b.iter(|| {
            for part in 0..n / 32 {
                let (v, out) = (&v[part * 32..][..32], &mut out[part * 32..][..32]);
                arch.delta_rule(&mut state, &q, &k, v, 0.5, &rates, out);
            }
        });
    });
    let mut state = noise(n * n);
    group.bench_function("ssm_step", |b| {
        b.iter(|| arch.ssm_step(&mut state, &q, &k, 0.9, 0.5, &v, &mut out))
    });
    // As many states of a channel as Mamba 1 has, and as many blocks of channels as fill the same
    // state.
    let (n_state, n) = (16, 64);
    let (a, dt, x, mut out) = (noise(n * n_state), noise(n), noise(n), vec![0.0; n]);
    group.bench_function("ssm_step_by_state, 16 blocks", |b| {
        b.iter(|| {
            for state in state.chunks_exact_mut(n * n_state) {
                arch.ssm_step_by_state(state, &a, &q[..n_state], &k[..n_state], &dt, &x, &mut out);
            }
        });
    });
    // Four heads of RWKV, which fill the same state.
    let d = 64;
    let (x, w, mut out) = (noise(d), vec![0.9; d], vec![0.0; d]);
    group.bench_function("rwkv6_step, four heads", |b| {
        b.iter(|| {
            state
                .chunks_exact_mut(d * d)
                .for_each(|state| arch.rwkv6_step(state, &x, &x, &x, &w, &x, &mut out))
        });
    });
    let (x, a) = (vec![0.1; d], vec![0.0; d]);
    group.bench_function("rwkv7_step, four heads", |b| {
        b.iter(|| {
            let key = [&x[..], &x, &w, &a, &x];
            state
                .chunks_exact_mut(d * d)
                .for_each(|state| arch.rwkv7_step(state, key, &x, &mut out));
        });
    });
}

/// A token's convolution over four, 256 channels.
fn convolution(c: &mut Criterion) {
    let (arch, n) = (arch(), 256);
    let (mut past, taps, x, mut out) = (noise(3 * n), noise(4 * n), noise(n), vec![0.0; n]);
    let mut group = c.benchmark_group("short convolution");
    group.throughput(Throughput::Elements(n as u64));
    group.bench_function(BenchmarkId::from_parameter(n), |b| {
        b.iter(|| {
            out.fill(0.0);
            arch.causal_conv(&mut past, (&taps, n), &x, &mut out);
        });
    });
}

criterion_group!(
    benches,
    attention,
    prefill,
    latent,
    encoder,
    norms,
    rope,
    kv_append,
    activations,
    recurrences,
    convolution
);
criterion_main!(benches);
