//! What the model that ships writes under random JSON Schemas, judged by another implementation of
//! JSON Schema.
#![cfg(feature = "grammar")]

#[path = "../../tests/it/schemas.rs"]
mod schemas;

use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::{Model, Sampler, SessionOptions, StopReason};
use schemas::{Random, schema};
use serde_json::Value;

const SEED: u64 = 18;
/// Room for more than any of these values takes.
const N_CTX: usize = 4096;

/// Every output ends, parses and validates.
#[test]
fn outputs_validate() {
    let n_schemas = if std::env::var_os("RUVLLM_LONG").is_some() {
        1000
    } else {
        100
    };
    println!("{n_schemas} schemas, seed {SEED}");
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let trie = TokenTrie::new(model.tokenizer().unwrap()).unwrap();
    let options = SessionOptions {
        n_ctx: Some(N_CTX),
        ..Default::default()
    };
    let mut session = model.session_with(&options).unwrap();
    let mut random = Random(SEED);
    let (mut n_tokens, mut longest) = (0, 0);
    for i in 0..n_schemas {
        let schema = schema(&mut random);
        let grammar = Grammar::json_schema(&trie, &schema.to_string())
            .unwrap_or_else(|e| panic!("{schema}: {e}"));
        // Greedy, as usual, and wild.
        let temperature = [0.0, 0.8, 1.5][i % 3];
        let mut sampler = Sampler::builder()
            .seed(i as u64)
            .temperature(temperature)
            .build()
            .unwrap();
        sampler.set_mask(Some(Box::new(grammar.matcher())));
        session.clear();
        let mut generation = session.generate("As JSON: ", &mut sampler).unwrap();
        let pieces = generation.by_ref().map(|piece| {
            piece
                .unwrap_or_else(|e| panic!("schema {i}, {schema}: {e}"))
                .text
        });
        let text: String = pieces.collect();
        let finish = generation.finish().unwrap();
        (n_tokens, longest) = (
            n_tokens + finish.n_generated,
            longest.max(finish.n_generated),
        );
        assert_eq!(
            finish.reason,
            StopReason::EndOfGeneration,
            "schema {i}, {schema}: {text}"
        );
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("schema {i}, {schema}: {e}: {text}"));
        let validator = jsonschema::options()
            .should_validate_formats(true)
            .build(&schema)
            .unwrap();
        if let Err(error) = validator.validate(&value) {
            panic!("schema {i}, {schema}: {error}: {text}");
        }
    }
    println!("{n_tokens} tokens, the longest output {longest}");
}
