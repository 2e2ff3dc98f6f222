//! Every GGUF file of the conformance data opens: mapped, from its header alone, and from memory.

use crate::common::conformance;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ruvllm::gguf::{Gguf, GgufError, Header};

fn files_ending(folder: &Path, end: &str, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_ending(&path, end, files);
        } else if path.to_str().is_some_and(|path| path.ends_with(end)) {
            files.push(path);
        }
    }
}

fn check(gguf: &Gguf, path: &Path, opened: Duration) {
    let metadata = gguf.metadata();
    metadata.str("general.architecture").unwrap();
    // Projectors of images have no vocabulary, and not all models do.
    let tokens = metadata.opt_strings("tokenizer.ggml.tokens").unwrap();
    let n_tokens = tokens.map_or(0, |tokens| tokens.len());
    if metadata.get("tokenizer.ggml.token_type").is_some() {
        let token_types = metadata.i32s("tokenizer.ggml.token_type").unwrap();
        assert_eq!(n_tokens, token_types.len(), "{path:?}");
    }
    let merges = metadata
        .opt_strings("tokenizer.ggml.merges")
        .unwrap()
        .map_or(0, |merges| merges.len());
    let data: usize = gguf.tensors().iter().map(|t| gguf.data(t).len()).sum();
    assert_eq!(
        data as u64,
        gguf.tensors().iter().map(|t| t.n_bytes).sum::<u64>()
    );
    // Writers pad only between tensors, or after the last one too.
    let end = gguf
        .tensors()
        .iter()
        .map(|t| t.offset + t.n_bytes)
        .max()
        .unwrap_or(0);
    assert!(
        end == 0 || gguf.file_size() - end < gguf.header().alignment,
        "{path:?}"
    );
    let n_tensors = gguf.tensors().len();
    println!("{opened:>9.1?} {n_tensors:4} tensors {n_tokens:6} tokens {merges:6} merges {path:?}");
}

#[test]
fn every_file_opens() {
    let Some(root) = conformance() else { return };
    let mut files = Vec::new();
    files_ending(&root, ".gguf", &mut files);
    assert!(
        files.len() >= 20,
        "only {} GGUF files in {root:?}",
        files.len()
    );
    for path in &files {
        let start = Instant::now();
        let gguf = match Gguf::open(path) {
            // Q1_0 and Q2_0, which this build does not read yet.
            Err(error) if matches!(error.cause(), GgufError::TensorType { found: 41 | 42, .. }) => {
                println!("not read: {error}");
                continue;
            }
            gguf => gguf.unwrap(),
        };
        check(&gguf, path, start.elapsed());

        let header = Header::read(path).unwrap();
        assert_eq!(header.tensors, gguf.tensors());
        assert!(header.metadata.iter().eq(gguf.metadata().iter()));
    }
}

/// The large vocabularies are stored compressed.
#[test]
fn every_compressed_file_opens_from_memory() {
    let Some(root) = conformance() else { return };
    let mut files = Vec::new();
    files_ending(&root, ".gguf.xz", &mut files);
    assert!(!files.is_empty(), "no compressed files in {root:?}");
    for path in &files {
        let unpacked = Command::new("xz")
            .arg("-dc")
            .arg(path)
            .output()
            .expect("the program xz");
        assert!(unpacked.status.success(), "{path:?}");
        let start = Instant::now();
        let gguf = Gguf::from_bytes(unpacked.stdout).unwrap();
        check(&gguf, path, start.elapsed());
    }
}
