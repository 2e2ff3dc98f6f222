//! The design notes' rows for whole layers: one token through one layer, and through several, of
//! published shapes in 4-bit weights (Q4_K_M), without the head; and prompts through layers of newer
//! families.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::compute::{EvalCallback, HookPoint};
use ruvllm::quant::FileType;
use ruvllm_benches::{Shape, synthetic};

/// Has the last layer computed for a token without logits.
struct AllRows;

impl EvalCallback for AllRows {
    fn tensor(&mut self, _: HookPoint, _: usize, _: &[f32]) {}
}

fn layers(c: &mut Criterion) {
    for (name, shape, numbers) in [
        ("LLaMA2-7B", "llama2-7b", &[1, 4, 8, 16][..]),
        ("LLaMA2-13B", "llama2-13b", &[1, 4]),
        ("LLaMA3-8B", "llama-8b", &[1, 4]),
        ("Mistral-7B", "mistral-7b", &[1, 4]),
    ] {
        for &n_layer in numbers {
            let shape = Shape::from_name(shape)
                .expect("a shape of the list")
                .with_layers(n_layer);
            let gguf = synthetic(&shape, FileType::from_name("Q4_K_M").expect("a known type"))
                .expect("a model");
            let model = Model::from_gguf(gguf).expect("a model that runs");
            let options = SessionOptions {
                n_ctx: Some(512),
                ..Default::default()
            };
            let mut session = model.session_with(&options).expect("a session");
            let mut group = c.benchmark_group(format!("forward {name}"));
            group.sample_size(20);
            group.bench_function(BenchmarkId::new("layers", n_layer), |b| {
                b.iter(|| {
                    if session.position() == session.sequence().n_ctx() {
                        session.clear();
                    }
                    // From 1 on: no logits.
                    session
                        .hooks()
                        .prefill_probed(&[1], 1, &mut AllRows, |_, _| ())
                        .expect("room for a token");
                });
            });
        }
    }
}

/// Prompts of 512 tokens through some layers of a family, on all threads: mixtures with the choice
/// of their experts, windows and sinks, delta rules.
fn families(c: &mut Criterion) {
    for (shape, n_layer) in [("qwen3-30b-a3b", 1), ("gpt-oss-20b", 2), ("qwen3.5-4b", 4)] {
        let shape = Shape::from_name(shape)
            .expect("a shape of the list")
            .with_layers(n_layer);
        let gguf = synthetic(&shape, FileType::from_name("Q4_K_M").expect("a known type"))
            .expect("a model");
        let model = Model::from_gguf(gguf).expect("a model that runs");
        let tokens: Vec<u32> = (0..512).collect();
        let mut session = model
            .session_with(&SessionOptions::default())
            .expect("a session");
        let mut group = c.benchmark_group(format!("prompt {}", shape.name));
        group
            .sample_size(10)
            .throughput(Throughput::Elements(tokens.len() as u64));
        group.bench_function(BenchmarkId::new("layers", n_layer), |b| {
            b.iter(|| {
                session.clear();
                session
                    .hooks()
                    .prefill_probed(&tokens, tokens.len(), &mut AllRows, |_, _| ())
                    .expect("room for the tokens");
            });
        });
    }
}

criterion_group!(benches, layers, families);
criterion_main!(benches);
