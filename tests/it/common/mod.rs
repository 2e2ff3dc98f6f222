//! What several modules share.

use proptest::prelude::ProptestConfig;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Says on standard error that the test which calls this compares nothing, and why. Goes past the
/// test runner, which shows what `eprintln` writes only when a test fails.
pub(crate) fn skipped(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED {}: {why}",
        thread.name().unwrap_or("a test")
    );
}

/// The folder of reference data, or `None`, loudly.
pub(crate) fn conformance() -> Option<PathBuf> {
    let folder = std::env::var_os("RUVLLM_CONFORMANCE");
    if folder.is_none() {
        skipped("RUVLLM_CONFORMANCE does not name the folder of reference data");
    }
    folder.map(PathBuf::from)
}

/// Whether the CPU is emulated (`RUVLLM_EMULATED` is set), tens of times slower than a real one:
/// long tests then take a part of their cases.
pub(crate) fn emulated() -> bool {
    std::env::var_os("RUVLLM_EMULATED").is_some()
}

/// Whether time does not matter (`RUVLLM_LONG` is set, as `.ci/long` does): all cases of tests that
/// otherwise take some.
pub(crate) fn long() -> bool {
    std::env::var_os("RUVLLM_LONG").is_some()
}

/// How many cases: few on an emulated CPU, many when `RUVLLM_LONG` is set.
pub(crate) fn few_or_many<T>(few: T, usual: T, many: T) -> T {
    match emulated() {
        true => few,
        false if long() => many,
        false => usual,
    }
}

/// Random cases of a property: a twentieth of `n` on an emulated CPU, ten times `n` when
/// `RUVLLM_LONG` is set (`.ci/long`). `PROPTEST_RNG_SEED` repeats a run.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let n = if emulated() { n.div_ceil(20) } else { n };
    let n = if long() { 10 * n } else { n };
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(n)
    }
}

pub(crate) fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
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
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

pub(crate) fn numbers<T: TryFrom<u64>>(value: &serde_json::Value) -> Vec<T> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| T::try_from(v.as_u64().unwrap()).ok().unwrap())
        .collect()
}
