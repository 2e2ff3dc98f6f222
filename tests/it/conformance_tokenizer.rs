//! Token ids and texts against those of llama.cpp. The data are not part of the repository:
//! `RUVLLM_CONFORMANCE` names their folder; without it the tests say so and pass.

use crate::common::conformance;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ruvllm::TokenizerError;
use ruvllm::gguf::Gguf;
use ruvllm::tokenizer::{TextStream, Tokenizer};
use serde_json::Value;

/// The vocabulary file, unpacked to the temporary folder if there is only an xz of it.
fn vocab_file(folder: &Path, name: &str) -> PathBuf {
    let plain = folder.join(name);
    if plain.exists() {
        return plain;
    }
    let unpacked = std::env::temp_dir().join(format!("ruvllm-{}-{name}", std::process::id()));
    let xz = Command::new("xz").arg("-dc").arg(folder.join(format!("{name}.xz"))).output().expect("the xz program");
    assert!(xz.status.success(), "{name}: {}", String::from_utf8_lossy(&xz.stderr));
    std::fs::write(&unpacked, xz.stdout).unwrap();
    unpacked
}

fn open(path: &Path) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_metadata(Gguf::open(path).unwrap().metadata())
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn hex(value: &str) -> Vec<u8> {
    (0..value.len()).step_by(2).map(|i| u8::from_str_radix(&value[i..i + 2], 16).unwrap()).collect()
}

/// Compares every case of an expectation file; returns how many there were.
fn compare(tokenizer: &Arc<Tokenizer>, expected: &Value) -> usize {
    let cases = expected["cases"].as_array().unwrap();
    let mut failures = Vec::new();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        for (key, add_special, parse_special) in
            [("plain", false, false), ("bos", true, false), ("parse", false, true), ("bos_parse", true, true)]
        {
            let (got, want) = (tokenizer.encode(text, add_special, parse_special), ids(&case[key]));
            if got != want {
                failures.push(format!("{key} {text:?}\n  got  {got:?}\n  want {want:?}"));
            }
        }
        let parsed = ids(&case["parse"]);
        let want = match &case["detok_parse_hex"] {
            Value::String(hexadecimal) => hex(hexadecimal),
            _ => case["detok_parse"].as_str().unwrap().as_bytes().to_vec(),
        };
        let got = tokenizer.decode(&parsed, true).unwrap();
        if got != want {
            let [got, want] = [got, want].map(|b| String::from_utf8_lossy(&b).into_owned());
            failures.push(format!("decode {text:?}\n  got  {got:?}\n  want {want:?}"));
        }

        let mut stream = TextStream::new(tokenizer, true);
        let mut streamed = String::new();
        for &id in &parsed {
            streamed.push_str(stream.push(id).unwrap());
        }
        streamed.push_str(stream.finish());
        let bytes: Vec<u8> = parsed.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).collect();
        assert_eq!(streamed, String::from_utf8_lossy(&bytes), "stream of {text:?}");
    }
    assert!(failures.is_empty(), "{} of {tokenizer:?}:\n{}", failures.len(), failures.join("\n"));
    cases.len()
}

#[test]
fn vocabularies() {
    let Some(root) = conformance() else { return };
    let folder = root.join("tokenizers");
    let manifest = json(&folder.join("manifest.json"));
    let vocabs = manifest["vocabs"].as_object().unwrap();
    assert!(!vocabs.is_empty());
    for (name, entry) in vocabs {
        let file = vocab_file(&folder, &format!("ggml-vocab-{name}.gguf"));
        let tokenizer = open(&file);
        // Only what was unpacked here: the reference data may lie in the temporary folder, too.
        if file != folder.join(format!("ggml-vocab-{name}.gguf")) {
            std::fs::remove_file(&file).unwrap();
        }
        let tokenizer = Arc::new(tokenizer.unwrap());
        let n = compare(&tokenizer, &json(&folder.join(entry["expected"].as_str().unwrap())));
        assert_eq!(n as u64, entry["n_cases"].as_u64().unwrap(), "{name}");

        let read =
            |suffix: &str| std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{suffix}"))).unwrap();
        let (inputs, outputs) = (read("inp"), read("out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        assert_eq!(entry["inp_out"]["n"].as_u64().unwrap() as usize, outputs.len());
        for (input, output) in inputs.iter().zip(&outputs) {
            let want: Vec<u32> = output.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(input, false, false), want, "{name}: {input:?}");
        }
    }
}

#[test]
fn vocabularies_inside_models() {
    let Some(root) = conformance() else { return };
    let manifest = json(&root.join("tokenizers/manifest.json"));
    let tiny = manifest["tiny"].as_object().unwrap();
    assert!(!tiny.is_empty());
    for (name, entry) in tiny {
        let tokenizer = open(&root.join(entry["gguf"].as_str().unwrap())).unwrap();
        let n =
            compare(&Arc::new(tokenizer), &json(&root.join("tokenizers").join(entry["expected"].as_str().unwrap())));
        assert_eq!(n as u64, entry["n_cases"].as_u64().unwrap(), "{name}");
    }
}
