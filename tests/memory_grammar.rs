//! What hostile grammars take, measured by the system: alone in its process.
#![cfg(all(target_os = "linux", feature = "grammar"))]

#[path = "it/hostile.rs"]
mod hostile;

use ruvllm::Tokenizer;
use ruvllm::gguf::Gguf;
use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::sample::TokenMask;
use std::fs;

/// Most that a grammar, its refusal and its first mask may take.
const MOST: u64 = 64 << 20;

/// A line of `/proc/self/status` in bytes.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .unwrap();
    line.trim()
        .strip_suffix("kB")
        .unwrap()
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}

#[test]
fn hostile_grammars_take_little_memory() {
    let file = Gguf::open("models/ruvllm-rust-6m-q8_0.gguf").unwrap();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    for (syntax, source) in hostile::grammars() {
        // From here on the system records the peak anew.
        if fs::write("/proc/self/clear_refs", "5").is_err() {
            return eprintln!("skipped: the system does not let us");
        }
        let before = status("VmRSS");
        if let Ok(grammar) = Grammar::new(&trie, syntax, &source) {
            let mut matcher = grammar.matcher();
            let _ = matcher.forced(&|text| tokenizer.encode_inside(text));
            let _ = matcher.mask();
        }
        let taken = status("VmHWM").saturating_sub(before);
        let shown: String = source.chars().take(60).collect();
        assert!(taken <= MOST, "{syntax} {shown}: {} MiB", taken >> 20);
    }
}
