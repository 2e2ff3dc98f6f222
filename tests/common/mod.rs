//! What several test files share.
#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};

/// The folder of reference data, or `None`, loudly.
pub(crate) fn conformance() -> Option<PathBuf> {
    match std::env::var_os("RUVLLM_CONFORMANCE") {
        Some(path) => Some(path.into()),
        None => {
            eprintln!("SKIPPED: RUVLLM_CONFORMANCE is not set, nothing was compared with other engines");
            None
        }
    }
}

/// Whether the CPU is emulated (`RUVLLM_EMULATED` is set), tens of times slower than a real one: long
/// tests then take a part of their cases.
pub(crate) fn emulated() -> bool {
    std::env::var_os("RUVLLM_EMULATED").is_some()
}

pub(crate) fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    dirs
}

pub(crate) fn read_json(path: &Path) -> serde_json::Value {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Little-endian `f32` values of a file.
pub(crate) fn read_f32(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(crate) fn numbers<T: TryFrom<u64>>(value: &serde_json::Value) -> Vec<T> {
    value.as_array().unwrap().iter().map(|v| T::try_from(v.as_u64().unwrap()).ok().unwrap()).collect()
}
