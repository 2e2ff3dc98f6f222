//! Families that are variants of others, against the logits that llama.cpp computes (`tests/reference_llama_cpp.py`).

use crate::common::{emulated, numbers};
use crate::run::{OnLevel, open, session_on};
use crate::tiny::Parts;
use ruvllm::arch::Arch;
use ruvllm::exec::{KvType, SessionOptions};
use ruvllm::gguf::{Array, Value};
use serde_json::Value as Json;

/// As of the tiny models of `tests/it/engine.rs`, which have the same sizes: some hundred roundings of 6e-8 on values of
/// order 1 to 10, amplified at most tenfold by norms.
const TOLERANCE: f32 = 1e-4;

fn reference() -> Json {
    serde_json::from_str(include_str!("../data/families.json")).unwrap()
}

fn value(json: &Json) -> Value {
    match json {
        Json::Bool(x) => (*x).into(),
        Json::String(x) => x.as_str().into(),
        Json::Number(x) if x.is_u64() => (x.as_u64().unwrap() as u32).into(),
        Json::Number(x) => (x.as_f64().unwrap() as f32).into(),
        Json::Array(all) if all[0].is_boolean() => {
            Value::Array(Array::Bool(all.iter().map(|x| x.as_bool().unwrap()).collect()))
        }
        Json::Array(_) => Value::Array(Array::U32(numbers(json))),
        other => panic!("{other}"),
    }
}

fn parts(family: &Json) -> Parts {
    let mut parts = Parts::new();
    parts.set("general.architecture", family["architecture"].as_str().unwrap());
    for (key, of_key) in family["metadata"].as_object().unwrap() {
        parts.set(key, value(of_key));
    }
    for (name, dims) in family["tensors"].as_object().unwrap() {
        parts.hashed(name, &numbers(dims));
    }
    parts
}

#[test]
fn logits_equal_those_of_llama_cpp() {
    let reference = reference();
    let tokens: Vec<u32> = numbers(&reference["about"]["tokens"]);
    let positions: Vec<usize> = numbers(&reference["about"]["positions"]);
    let mut failures = Vec::new();
    for (name, family) in reference.as_object().unwrap().iter().filter(|(name, _)| *name != "about") {
        let rows = family["logits"].as_array().unwrap();
        let expected: Vec<f32> =
            rows.iter().flat_map(|row| row.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32)).collect();
        let model = open(parts(family).gguf()).unwrap_or_else(|e| panic!("{name}: {e}"));
        for arch in Arch::available().take(if emulated() { 1 } else { usize::MAX }) {
            let model = model.on(arch);
            for n_batch in [64, 7, 1] {
                let options = SessionOptions { n_ctx: Some(64), n_batch, kv_type: KvType::F32, ..Default::default() };
                let mut rows = Vec::new();
                let mut session = session_on(&model, 1, &options);
                session.prefill_each(&tokens, 0, |_, logits| rows.push(logits.to_vec())).unwrap();
                let ours = positions.iter().flat_map(|&i| rows[i].iter().copied());
                let difference = ours.zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let is_finite = rows.iter().flatten().all(|x| x.is_finite());
                if difference > TOLERANCE || !is_finite {
                    failures.push(format!("{name} {} batch {n_batch}: {difference}", arch.name()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
