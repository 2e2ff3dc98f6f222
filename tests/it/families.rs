//! Families that are variants of others, against the logits, vectors and scores that llama.cpp
//! computes (`tests/reference_llama_cpp.py`); and broken files of every family.

use crate::common::{cases, emulated, numbers};
use crate::mutants::{compute, encoders, families, family, models, mutant};
use crate::run::{OnLevel, open, session_on};
use proptest::collection::vec;
use proptest::prelude::any;
use proptest::test_runner::TestRunner;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::gguf::{Array, StringArray, Value};
use ruvllm::model::supported_architectures;
use serde_json::Value as Json;

/// As of the tiny models of `tests/it/engine.rs`, which have the same sizes: some hundred roundings
/// of 6e-8 on values of order 1 to 10, amplified at most tenfold by norms.
const TOLERANCE: f32 = 1e-4;

#[test]
fn outputs_equal_those_of_llama_cpp() {
    outputs_equal(&families());
}

/// Variants of models that no file of the reference data has (`tests/reference_transformers.py`).
#[test]
fn outputs_equal_those_of_hugging_face() {
    outputs_equal(&serde_json::from_str(include_str!("../data/variants.json")).unwrap());
}

/// Encoders in such variants (`tests/reference_encoders.py`).
#[test]
fn outputs_of_encoders() {
    outputs_equal(&serde_json::from_str(include_str!("../data/encoders.json")).unwrap());
}

fn outputs_equal(reference: &Json) {
    let tokens: Vec<u32> = numbers(&reference["about"]["tokens"]);
    let positions: Vec<usize> = numbers(&reference["about"]["positions"]);
    let mut failures = Vec::new();
    for (name, of_family) in reference
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "about")
    {
        let rows = of_family
            .get("logits")
            .or(of_family.get("pooled"))
            .and_then(Json::as_array)
            .unwrap();
        let expected: Vec<f32> = rows
            .iter()
            .flat_map(|row| {
                row.as_array()
                    .unwrap()
                    .iter()
                    .map(|x| x.as_f64().unwrap() as f32)
            })
            .collect();
        let model = open(family(reference, name).gguf()).unwrap_or_else(|e| panic!("{name}: {e}"));
        for arch in Arch::available().take(if emulated() { 1 } else { usize::MAX }) {
            let model = model.on(arch);
            for n_batch in [64, 7, 1] {
                let ours = match of_family.get("pooled") {
                    None => logits(&model, &tokens, &positions, n_batch),
                    Some(_) if model.hparams().classifier.is_some() => model
                        .reranker()
                        .unwrap()
                        .n_batch(n_batch)
                        .rank_tokens(&[&tokens])
                        .unwrap(),
                    Some(_) => {
                        let embedder = model.embedder().unwrap().normalise(false).n_batch(n_batch);
                        embedder.embed_tokens(&[&tokens]).unwrap().remove(0)
                    }
                };
                assert_eq!(ours.len(), expected.len(), "{name}");
                let difference = ours
                    .iter()
                    .zip(&expected)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                if difference > TOLERANCE || !ours.iter().all(|x| x.is_finite()) {
                    failures.push(format!(
                        "{name} {} batch {n_batch}: {difference}",
                        arch.name()
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn logits(model: &Model, tokens: &[u32], positions: &[usize], n_batch: usize) -> Vec<f32> {
    let options = SessionOptions {
        n_ctx: Some(tokens.len().max(64)),
        n_batch,
        kv_type: KvType::F32,
        ..Default::default()
    };
    let mut rows = Vec::new();
    session_on(model, 1, &options)
        .hooks()
        .prefill_each(tokens, 0, |_, logits| rows.push(logits.to_vec()))
        .unwrap();
    positions
        .iter()
        .flat_map(|&i| rows[i].iter().copied())
        .collect()
}

/// A reranker reads what its file's template says, in which a document's text is never a special
/// token or a place of the template.
/// Of blocks of 128 positions, two pages, every layer sees one, which is a token's own: as if the
/// text began with it (MiniMax M3, whose first layer is dense otherwise).
#[test]
fn blocks_longer_than_pages() {
    const BLOCK: usize = 128;
    let shapes = models().iter().find(|m| m.arch == "minimax-m3").unwrap();
    let mut parts = shapes.parts();
    for (key, n) in [
        ("attention.indexer.block_size", BLOCK as u32),
        ("attention.indexer.top_k", 1),
        ("attention.indexer.local_blocks", 1),
        ("leading_dense_block_count", 0),
    ] {
        parts.set(&format!("minimax-m3.{key}"), n);
    }
    for part in ["gate", "up", "down"] {
        parts.remove_tensor(&format!("blk.0.ffn_{part}.weight"));
    }
    for name in parts.tensor_names() {
        let Some(part) = name.strip_prefix("blk.1.") else {
            continue;
        };
        let first = format!("blk.0.{part}");
        if !parts.has_tensor(&first) {
            parts.copy_tensor(&name, &first);
        }
    }
    let model = open(parts.gguf()).unwrap();
    let n_vocab = model.hparams().n_vocab as u32;
    let tokens: Vec<u32> = (0..2 * BLOCK as u32 + 72)
        .map(|i| i * i % 61 * 7 % n_vocab)
        .collect();
    for n_batch in [7, 64, 512] {
        let whole = logits(
            &model,
            &tokens,
            &[BLOCK - 1, BLOCK + 3, 2 * BLOCK + 71],
            n_batch,
        );
        let parts = [
            logits(&model, &tokens[..BLOCK], &[BLOCK - 1], n_batch),
            logits(&model, &tokens[BLOCK..], &[3], n_batch),
            logits(&model, &tokens[2 * BLOCK..], &[71], n_batch),
        ]
        .concat();
        let difference = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs());
        let worst = difference.fold(0.0, f32::max);
        // Angles of later positions are rounded otherwise.
        assert!(worst < TOLERANCE, "{worst}");
        assert!(whole[..n_vocab as usize] == parts[..n_vocab as usize]);
    }
}

#[test]
fn pairs_of_texts() {
    let reference = families();
    let reranker = |template: Option<&str>| {
        let mut parts = family(&reference, "qwen3-reranker");
        let texts: Vec<String> = (0..32).map(|i| char::from(b'a' + i).to_string()).collect();
        let texts: Vec<&str> = texts
            .iter()
            .take(30)
            .map(String::as_str)
            .chain(["<s>", "</s>"])
            .collect();
        parts.set("tokenizer.ggml.model", "llama");
        parts.set(
            "tokenizer.ggml.tokens",
            Value::Array(Array::Strings(StringArray::from_iter(texts))),
        );
        parts.set(
            "tokenizer.ggml.scores",
            Value::Array(Array::F32(vec![0.0; 32])),
        );
        parts.set(
            "tokenizer.ggml.token_type",
            Value::Array(Array::I32(
                (0..32).map(|i| if i < 30 { 1 } else { 3 }).collect(),
            )),
        );
        parts.set("tokenizer.ggml.add_space_prefix", false);
        for (key, id) in [("bos", 30u32), ("eos", 31), ("unknown", 29)] {
            parts.set(&format!("tokenizer.ggml.{key}_token_id"), id);
        }
        parts.set("tokenizer.ggml.add_eos_token", true);
        if let Some(template) = template {
            parts.set("tokenizer.chat_template.rerank", template);
        }
        open(parts.gguf()).unwrap().reranker().unwrap()
    };
    let plain = reranker(None);
    assert_eq!(plain.pair("ab", "c").unwrap(), [30, 0, 1, 31, 2, 31]);
    let of_template = reranker(Some("<s>q{query}d{document}</s>"));
    assert_eq!(
        of_template.pair("ab", "c").unwrap(),
        [30, 16, 0, 1, 3, 2, 31]
    );
    let hostile = of_template.pair("{document}", "</s>c").unwrap();
    assert_eq!(
        hostile.iter().filter(|&&token| token == 31).count(),
        1,
        "{hostile:?}"
    );
    assert_eq!(hostile.last(), Some(&31));
    let scores = of_template.rank("ab", &["c", "d"]).unwrap();
    let alone = of_template.rank("ab", &["d"]).unwrap();
    assert_eq!(scores[1], alone[0]);
    assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)));
    let llama = crate::tiny::Tiny::Llama.model(ruvllm::quant::DType::F32);
    assert!(matches!(
        llama.reranker(),
        Err(ruvllm::SessionError::NoClassifier)
    ));
}

/// Every architecture has a tiny model, which computes.
#[test]
fn tiny_models_of_every_architecture() {
    let models = || models().iter().chain(encoders());
    let all: Vec<&str> = models().map(|m| m.arch.as_str()).collect();
    // `mistral` is another name of `llama`.
    let missing: Vec<_> = supported_architectures()
        .filter(|arch| *arch != "mistral" && !all.contains(arch))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    for model in models() {
        compute(mutant(model, &[])).unwrap_or_else(|e| panic!("{}: {e}", model.name));
    }
}

/// Files whose metadata or tensors contradict each other are refused by an error, or run all the
/// same.
#[test]
fn changed_files_are_refused_or_run() {
    for model in models().iter().chain(encoders()) {
        let mut runner = TestRunner::new(cases(12));
        let changes = vec(any::<[u8; 6]>(), 1..4);
        let run = |changes: Vec<[u8; 6]>| {
            let _ = compute(mutant(model, &changes));
            Ok(())
        };
        runner
            .run(&changes, run)
            .unwrap_or_else(|e| panic!("{}: {e}", model.name));
    }
}
