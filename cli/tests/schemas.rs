//! What the model that ships writes under random JSON Schemas, judged by another implementation of
//! JSON Schema.
#![cfg(feature = "grammar")]

#[path = "../../tests/it/schemas.rs"]
mod schemas;

use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::sample::TokenMask;
use ruvllm::{Model, Sampler, SamplerOptions, SessionOptions, StopReason};
use schemas::{Random, schema};
use serde_json::{Value, json};

const SEED: u64 = 18;
/// Room for more than any of these values takes.
const N_CTX: usize = 4096;

/// The same schema with keywords that a grammar does not enforce.
fn with_more(random: &mut Random, schema: &Value) -> Value {
    let Value::Object(map) = schema else {
        return schema.clone();
    };
    let mut out = map.clone();
    for (key, value) in &mut out {
        match (&key[..], value) {
            ("properties" | "$defs", Value::Object(members)) => {
                members
                    .values_mut()
                    .for_each(|one| *one = with_more(random, one));
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(items)) => {
                items
                    .iter_mut()
                    .for_each(|one| *one = with_more(random, one));
            }
            ("items", value) => *value = with_more(random, value),
            _ => {}
        }
    }
    for (key, value) in [
        ("uniqueItems", json!(true)),
        ("contains", json!({"type": ["string", "integer"]})),
        ("minProperties", json!(1)),
        ("maxProperties", json!(3)),
        ("propertyNames", json!({"maxLength": 8})),
        ("dependentRequired", json!({"x": ["name"]})),
        ("not", json!({"const": "mutable"})),
        ("if", json!({"type": "string"})),
        ("then", json!({"maxLength": 6})),
        ("$comment", json!("nothing")),
        ("pattern", json!("^(?!x)")),
        ("format", json!("int32")),
    ] {
        if random.below(4) == 0 && !out.contains_key(key) {
            out.insert(key.to_owned(), value);
        }
    }
    out.into()
}

/// Every output ends, parses and validates; and a lenient grammar of the same schema with more
/// keywords accepts it if it obeys those, too.
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
    let tokenizer = model.tokenizer().unwrap();
    let trie = TokenTrie::new(tokenizer).unwrap();
    let options = SessionOptions {
        n_ctx: Some(N_CTX),
        ..Default::default()
    };
    let mut session = model.session_with(&options).unwrap();
    let mut random = Random(SEED);
    let (mut n_tokens, mut longest, mut n_loosened) = (0, 0, 0);
    for i in 0..n_schemas {
        let schema = schema(&mut random);
        let grammar = Grammar::json_schema(&trie, &schema.to_string())
            .unwrap_or_else(|e| panic!("{schema}: {e}"));
        // Greedy, as usual, and wild.
        let temperature = [0.0, 0.8, 1.5][i % 3];
        let mut sampler = Sampler::new(SamplerOptions {
            seed: Some(i as u64),
            temperature,
            ..Default::default()
        })
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
        let more = with_more(&mut random, &schema);
        let lenient = Grammar::lenient_json_schema(&trie, &more.to_string())
            .unwrap_or_else(|e| panic!("{more}: {e}"));
        if jsonschema::options()
            .should_validate_formats(true)
            .build(&more)
            .unwrap()
            .is_valid(&value)
        {
            n_loosened += usize::from(!lenient.loosened().is_empty());
            let mut matcher = lenient.matcher();
            let tokens = tokenizer.encode(&text, false, false);
            let n = tokens
                .iter()
                .take_while(|&&token| matcher.accept(token).is_ok());
            assert_eq!(n.count(), tokens.len(), "schema {i}, {more}: {text}");
            assert!(
                matcher.is_accepting().unwrap(),
                "schema {i}, {more}: {text}"
            );
        }
    }
    println!(
        "{n_tokens} tokens, the longest output {longest}; {n_loosened} lenient grammars accept more"
    );
    assert!(n_loosened > n_schemas / 10, "{n_loosened} of {n_schemas}");
}
