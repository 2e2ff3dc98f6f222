//! Kernels by number of threads, shared out as in a forward pass: a product of the output head with
//! one token, attention of 32 heads over 1,024 keys, and norms of 512 rows.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use ruvllm::Engine;
use ruvllm::Model;
use ruvllm::arch::AttnParams;
use ruvllm::engine::EngineOptions;
use ruvllm::quant::FileType;
use ruvllm_benches::{Shape, attend, synthetic};
use std::thread::available_parallelism;

const HEAD_DIM: usize = 128;
const N_HEAD: usize = 32;
const N_KV: usize = 1024;
const N_ROWS: usize = 512;

/// Values that no kernel finds easy.
fn noise(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i * 7919 % 255) as f32 / 255.0 - 0.5)
        .collect()
}

fn threads(c: &mut Criterion) {
    let shape = Shape::from_name("llama-8b").expect("a shape of the list");
    let gguf = synthetic(&shape.with_layers(1), FileType::Q4_K_M).expect("a model");
    let model = Model::from_gguf(gguf).expect("a model that runs");
    let (arch, h) = (model.arch(), model.hparams());
    let (n, n_vocab) = (h.n_embd, h.n_vocab);
    let (x, w) = (noise(N_ROWS * n), noise(n));
    let kv: Vec<f16> = noise(N_KV * HEAD_DIM)
        .into_iter()
        .map(f16::from_f32)
        .collect();
    let p = AttnParams {
        head_dim: HEAD_DIM,
        head_dim_v: HEAD_DIM,
        scale: 0.088,
        softcap: 0.0,
        slope: 0.0,
        exact: true,
    };
    let most = available_parallelism().map_or(1, usize::from);
    let numbers = std::iter::successors(Some(1), |n| Some(2 * n));
    for n_threads in numbers.take_while(|&n| n <= most) {
        let options = EngineOptions {
            n_threads: n_threads.try_into().ok(),
            ..Default::default()
        };
        let engine = Engine::new(&model, &options).expect("threads");
        let mut y = vec![0.0; (N_ROWS * n).max(n_vocab)];

        let mut group = c.benchmark_group("head by threads");
        let bytes = model
            .gguf()
            .tensor("output.weight")
            .map_or(0, |t| t.n_bytes);
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(BenchmarkId::from_parameter(n_threads), |b| {
            b.iter(|| {
                let head = engine.output_head();
                head.product(0..n_vocab, &x[..n], &mut y[..n_vocab])
                    .expect("memory");
            });
        });
        group.finish();

        let mut group = c.benchmark_group("attention f16 by threads");
        group.throughput(Throughput::Bytes((N_HEAD * 2 * size_of_val(&*kv)) as u64));
        group.bench_function(BenchmarkId::from_parameter(n_threads), |b| {
            b.iter(|| {
                let out = &mut y[..N_HEAD * HEAD_DIM];
                let head = |i: usize, out: &mut [f32]| {
                    let q = &x[i * HEAD_DIM..][..HEAD_DIM];
                    attend(arch, out, q, &kv, &kv, &[(0, N_KV as u32)], &p);
                };
                engine.for_chunks(out, HEAD_DIM, head).expect("a turn");
            });
        });
        group.finish();

        let mut group = c.benchmark_group("RMSNorm by threads");
        group.throughput(Throughput::Elements(x.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(n_threads), |b| {
            b.iter(|| {
                let norm = |i: usize, y: &mut [f32]| {
                    arch.rms_norm(y, &x[i * n..][..n], &w, 1e-5);
                };
                engine
                    .for_chunks(&mut y[..N_ROWS * n], n, norm)
                    .expect("a turn");
            });
        });
        group.finish();
    }
}

criterion_group!(benches, threads);
criterion_main!(benches);
