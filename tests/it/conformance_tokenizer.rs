//! Token ids and texts against those of llama.cpp, WordPiece's against those of Hugging Face. The
//! data are not part of the repository: `RUVLLM_CONFORMANCE` names their folder; without it the
//! tests say so and pass.

use crate::common::conformance;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ruvllm::Tokenizer;
use ruvllm::gguf::Gguf;
use ruvllm::tokenizer::TextStream;
use ruvllm::tokenizer::TokenizerError;
use serde_json::Value;

/// The vocabulary file, unpacked to the temporary folder if there is only an xz of it.
fn vocab_file(folder: &Path, name: &str) -> PathBuf {
    let plain = folder.join(name);
    if plain.exists() {
        return plain;
    }
    let unpacked = std::env::temp_dir().join(format!("ruvllm-{}-{name}", std::process::id()));
    let xz = Command::new("xz")
        .arg("-dc")
        .arg(folder.join(format!("{name}.xz")))
        .output()
        .expect("the xz program");
    assert!(
        xz.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&xz.stderr)
    );
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
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn hex(value: &str) -> Vec<u8> {
    (0..value.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&value[i..i + 2], 16).unwrap())
        .collect()
}

/// Texts whose ids are Hugging Face's, which llama.cpp's WordPiece has not
/// (`tests/reference_wordpiece.py`), with [CLS] and [SEP].
fn wordpiece() -> HashMap<String, Vec<u32>> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (
            line["text"].as_str().unwrap().to_owned(),
            ids(&line["tokens"]),
        )
    };
    include_str!("../data/wordpiece.jsonl")
        .lines()
        .map(line)
        .collect()
}

/// Compares every case of an expectation file, except that the ids of some texts are `others`;
/// returns how many there were.
fn compare(
    tokenizer: &Arc<Tokenizer>,
    expected: &Value,
    others: &HashMap<String, Vec<u32>>,
) -> usize {
    let cases = expected["cases"].as_array().unwrap();
    let mut failures = Vec::new();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        for (key, add_special, parse_special) in [
            ("plain", false, false),
            ("bos", true, false),
            ("parse", false, true),
            ("bos_parse", true, true),
        ] {
            let got = tokenizer.encode(text, add_special, parse_special);
            let want = match others.get(text) {
                Some(ids) if add_special => ids.clone(),
                Some(ids) => ids[1..ids.len() - 1].to_vec(),
                None => ids(&case[key]),
            };
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
        // llama.cpp takes tokens in raw UTF-8 for GPT-2's alphabet here: letters of that become bytes,
        // which are no text any more, others a note.
        let is_garbled = tokenizer.model() == "whitespace"
            && (want.windows(10).any(|text| text == b"[UNK_BYTE_")
                || std::str::from_utf8(&want).is_err());
        if got != want && !is_garbled {
            let [got, want] = [got, want].map(|b| String::from_utf8_lossy(&b).into_owned());
            failures.push(format!("decode {text:?}\n  got  {got:?}\n  want {want:?}"));
        }

        let mut stream = TextStream::new(tokenizer, true);
        let mut streamed = String::new();
        for &id in &parsed {
            streamed.push_str(stream.push(id).unwrap());
        }
        streamed.push_str(stream.finish());
        let bytes: Vec<u8> = parsed
            .iter()
            .flat_map(|&id| tokenizer.token_bytes(id).unwrap())
            .collect();
        assert_eq!(
            streamed,
            String::from_utf8_lossy(&bytes),
            "stream of {text:?}"
        );
    }
    assert!(
        failures.is_empty(),
        "{} of {tokenizer:?}:\n{}",
        failures.len(),
        failures.join("\n")
    );
    cases.len()
}

/// Of the ids that llama.cpp (`llama_tokenize`, as in llama-cpp-python 0.3.36), or for BERT's
/// vocabulary Hugging Face's tokenizers 0.23.3, make of [`mixed_languages`], without special
/// tokens: how many, and FNV-1a of their bytes.
const MIXED: [(&str, usize, u64); 12] = [
    ("bert-bge", 221_696, 0x7CE8_CC0A_B79A_60C9),
    ("deepseek-coder", 857_247, 0xE37F_2FC6_A7E7_CC41),
    ("deepseek-llm", 745_817, 0x2E5F_4E6C_14F8_C307),
    ("falcon", 794_962, 0x8247_6832_138D_C6D0),
    ("gpt-2", 837_366, 0xDFB7_397F_63EB_F00D),
    ("llama-bpe", 611_507, 0x45FF_25A7_D41D_D848),
    ("llama-spm", 793_778, 0xDB77_113D_DA0C_0C8C),
    ("mpt", 724_808, 0x1670_11A1_9E09_6198),
    ("phi-3", 793_778, 0xDB77_113D_DA0C_0C8C),
    ("qwen2", 515_009, 0xDFAD_B899_0B74_3A04),
    ("refact", 696_853, 0x5474_63D7_4440_588A),
    ("starcoder", 696_861, 0x5054_B597_AB43_4E26),
];

/// A megabyte of made-up words in 25 scripts and kinds of signs.
fn mixed_languages() -> String {
    const SIGNS: [(u32, u32); 25] = [
        (0x20, 0x7E),
        (0x61, 0x7A),
        (0x61, 0x7A),
        (0x41, 0x5A),
        (0x30, 0x39),
        (0xC0, 0x17F),
        (0x3A3, 0x3C9),
        (0x410, 0x44F),
        (0x561, 0x586),
        (0x5D0, 0x5EA),
        (0x621, 0x64A),
        (0x660, 0x669),
        (0x905, 0x939),
        (0xE01, 0xE30),
        (0x10D0, 0x10FA),
        (0x1200, 0x1248),
        (0x1780, 0x17B3),
        (0x1EA0, 0x1EF9),
        (0x2200, 0x22FF),
        (0x3041, 0x3096),
        (0x30A1, 0x30FA),
        (0x4E00, 0x9FA5),
        (0xAC00, 0xD7A3),
        (0xFF01, 0xFF5E),
        (0x1F600, 0x1F64F),
    ];
    const GAPS: [&str; 16] = [
        " ", " ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", ", ", ". ", "!", "-", "'s ",
        "\u{3000}", "   ",
    ];
    let mut state = 1u64;
    let mut below = |n: u32| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(n)) as u32
    };
    let mut text = String::new();
    while text.len() < 1 << 20 {
        let (first, last) = SIGNS[below(SIGNS.len() as u32) as usize];
        for _ in 0..1 + below(9) {
            text.push(char::from_u32(first + below(last - first + 1)).unwrap());
        }
        if below(8) == 0 {
            text.push('\u{301}');
        }
        text += GAPS[below(GAPS.len() as u32) as usize];
    }
    text
}

#[test]
fn vocabularies() {
    let Some(root) = conformance() else { return };
    let folder = root.join("tokenizers");
    let manifest = json(&folder.join("manifest.json"));
    let vocabs = manifest["vocabs"].as_object().unwrap();
    assert!(!vocabs.is_empty());
    let mixed = mixed_languages();
    for (name, entry) in vocabs {
        let file = vocab_file(&folder, &format!("ggml-vocab-{name}.gguf"));
        let tokenizer = open(&file);
        // Only what was unpacked here: the reference data may lie in the temporary folder, too.
        if file != folder.join(format!("ggml-vocab-{name}.gguf")) {
            std::fs::remove_file(&file).unwrap();
        }
        let tokenizer = Arc::new(tokenizer.unwrap());
        let others = if name == "bert-bge" {
            wordpiece()
        } else {
            HashMap::new()
        };
        let n = compare(
            &tokenizer,
            &json(&folder.join(entry["expected"].as_str().unwrap())),
            &others,
        );
        for (text, want) in others {
            assert_eq!(
                tokenizer.encode(&text, true, true),
                want,
                "{name}: {text:?}"
            );
        }
        assert_eq!(n as u64, entry["n_cases"].as_u64().unwrap(), "{name}");

        let ids = tokenizer.encode(&mixed, false, false);
        let hash = ids
            .iter()
            .flat_map(|id| id.to_le_bytes())
            .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
            });
        let &(_, n_ids, want) = MIXED.iter().find(|(of, ..)| of == name).unwrap();
        assert!(
            (ids.len(), hash) == (n_ids, want),
            "{name}: {} tokens, {hash:#X}",
            ids.len()
        );

        let read = |suffix: &str| {
            std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{suffix}")))
                .unwrap()
        };
        let (inputs, outputs) = (read("inp"), read("out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        assert_eq!(
            entry["inp_out"]["n"].as_u64().unwrap() as usize,
            outputs.len()
        );
        for (input, output) in inputs.iter().zip(&outputs) {
            let want: Vec<u32> = output
                .split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect();
            assert_eq!(
                tokenizer.encode(input, false, false),
                want,
                "{name}: {input:?}"
            );
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
        let expected = json(
            &root
                .join("tokenizers")
                .join(entry["expected"].as_str().unwrap()),
        );
        let n = compare(&Arc::new(tokenizer), &expected, &HashMap::new());
        assert_eq!(n as u64, entry["n_cases"].as_u64().unwrap(), "{name}");
    }
}

#[test]
fn vocabularies_under_new_names() {
    let Some(root) = conformance() else { return };
    let folder = root.join("models3/tokenizers");
    let manifest = json(&folder.join("manifest.json"));
    for entry in manifest["tokenizers"].as_array().unwrap() {
        let file = |key: &str| folder.join(entry[key].as_str().unwrap());
        let tokenizer = open(&file("file")).unwrap();
        let n = compare(
            &Arc::new(tokenizer),
            &json(&file("expected")),
            &HashMap::new(),
        );
        assert_eq!(n as u64, entry["cases"].as_u64().unwrap());
    }
}
