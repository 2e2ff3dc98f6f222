//! What a session takes above its model, measured by the system: alone in its process.
#![cfg(target_os = "linux")]

use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::quant::FileType;
use ruvllm_benches::{Shape, synthetic};
use std::fs;
use std::io::Write;

/// Most that a session of default batches may take besides its keys and values.
const ROOM: u64 = 64 << 20;

/// What it may take on top where tiles multiply: an activation of F16 weights is three bf16
/// numbers, 2 bytes more than an `f32`, for 512 rows of the widest input, 5632 values; and each
/// thread has 1 MiB of sums.
fn room_of_tiles() -> u64 {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    if Arch::detect().name() == "amx" {
        512 * 5632 * 2 + (threads << 20)
    } else {
        0
    }
}

/// Says so on standard error, past the test runner.
fn skipped(why: &str) {
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED a_session_takes_its_cache_and_little_more: {why}"
    );
}

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

/// The weights lie in memory of the process's own and were written there, so that whatever comes on
/// top in the most that was ever resident is the session's, a copy of weights included. A layer of
/// the 1B shape has the buffers of all of them.
#[test]
fn a_session_takes_its_cache_and_little_more() {
    if std::env::var_os("RUVLLM_EMULATED").is_some() {
        return skipped("too long for an emulated CPU");
    }
    let shape = Shape::from_name("llama-1b").unwrap().with_layers(1);
    for (name, n_ctx) in [("Q4_K_M", 1024), ("F16", 2048)] {
        let model =
            Model::from_gguf(synthetic(&shape, FileType::from_name(name).unwrap()).unwrap());
        let model = model.unwrap();
        let options = SessionOptions {
            n_ctx: Some(n_ctx),
            ..Default::default()
        };
        let plan = model.memory_plan(&options.clone().into()).unwrap();
        // From here on the system records the peak anew.
        if fs::write("/proc/self/clear_refs", "5").is_err() {
            return skipped("the system does not reset the peak of resident memory");
        }
        let before = status("VmRSS");
        let mut session = model.session_with(&options).unwrap();
        let tokens: Vec<u32> = (0..n_ctx as u32 - 4).map(|i| i * 29 % 32000).collect();
        session.prefill(&tokens).unwrap();
        for token in 0..4 {
            session.decode(token).unwrap();
        }
        let taken = status("VmHWM").saturating_sub(before);
        let planned = plan.total() - plan.weights - plan.vocabulary;
        eprintln!(
            "{name}: {} KiB, of them {} of keys and values; planned {}",
            taken >> 10,
            plan.kv >> 10,
            planned >> 10
        );
        assert!(
            20 * planned.abs_diff(taken) <= planned,
            "{name}: {taken} bytes taken, {planned} planned"
        );
        assert!(
            taken <= plan.kv + ROOM + room_of_tiles(),
            "{name}: {taken} bytes, {} of keys and values",
            plan.kv
        );
    }
}
