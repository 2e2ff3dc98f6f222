//! Pages of keys and values: a token of one layer behind 4,096 others, by the precision of its
//! pages; and the look-up of a prompt in the prefix cache.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::compute::{EvalCallback, HookPoint};
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::quant::FileType;
use ruvllm::{Engine, SessionOptions};
use ruvllm_benches::{Shape, synthetic};

const DEPTH: usize = 4096;

/// Has the last layer computed for a token without logits.
struct AllRows;

impl EvalCallback for AllRows {
    fn tensor(&mut self, _: HookPoint, _: usize, _: &[f32]) {}
}

fn engine(shape: &str) -> Engine {
    let shape = Shape::from_name(shape).expect("a shape of the list");
    let gguf = synthetic(&shape.with_layers(1), FileType::Q4_K_M).expect("a model");
    let model = Model::from_gguf(gguf).expect("a model that runs");
    Engine::new(&model, &EngineOptions::default()).expect("threads")
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7919 % 32000).collect()
}

fn quantised(c: &mut Criterion) {
    let engine = engine("llama-8b");
    for kv_type in KvType::ALL {
        let options = SessionOptions {
            n_ctx: Some(DEPTH + 1),
            kv_type,
            // As a generated token.
            exact: true,
            ..Default::default()
        };
        let mut session = engine.session_with(&options).expect("a session");
        session.prefill(&tokens(DEPTH)).expect("room for the text");
        let bytes = options.kv_bytes_read(engine.model().hparams(), DEPTH);
        let mut group = c.benchmark_group(format!("a token at {DEPTH} by pages"));
        group.sample_size(20).throughput(Throughput::Bytes(bytes));
        group.bench_function(BenchmarkId::from_parameter(kv_type), |b| {
            b.iter(|| {
                session.rewind(DEPTH).expect("a shorter text");
                // From 1 on: no logits.
                session
                    .hooks()
                    .prefill_probed(&[1], 1, &mut AllRows, |_, _| ())
                    .expect("room for a token");
            });
        });
    }
}

fn prefix(c: &mut Criterion) {
    let engine = engine("llama-1b");
    for n in [64, 512, DEPTH] {
        let tokens = tokens(n + 1);
        let options = SessionOptions {
            n_ctx: Some(DEPTH + 1),
            prefix: CacheMode::On.into(),
            ..Default::default()
        };
        let new = || engine.session_with(&options).expect("a session");
        // What ends is stored.
        new().prefill(&tokens).expect("room for the text");
        let options = SessionOptions {
            prefix: CacheMode::ReadOnly.into(),
            ..options.clone()
        };
        let new = || engine.session_with(&options).expect("a session");
        let find =
            |session: &mut Session| session.cache().reuse(&tokens).expect("a text that fits");
        assert_eq!(find(&mut new()).total(), n, "the whole pages of the text");
        let mut group = c.benchmark_group("prefix look-up");
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(BenchmarkId::from_parameter(n), |b| {
            b.iter_batched_ref(new, find, BatchSize::SmallInput);
        });
    }
}

criterion_group!(benches, quantised, prefix);
criterion_main!(benches);
