//! Eight sessions of one model take the threads of one: counted in a process of its own, as other
//! tests start theirs.
#![cfg(target_os = "linux")]

#[path = "it/run/mod.rs"]
mod run;
#[path = "it/tiny/mod.rs"]
mod tiny;

use ruvllm::Session;
use ruvllm::quant::DType;
use std::time::{Duration, Instant};
use tiny::{TOKENS, Tiny};

/// Names of this process's threads. A thread bears its maker's name until it runs for the first
/// time.
fn names() -> Vec<String> {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).ok())
        .collect()
}

fn of_engines() -> usize {
    names()
        .iter()
        .filter(|name| name.starts_with("ruvllm-"))
        .count()
}

#[test]
fn sessions_share_threads() {
    let engine = run::engine(&Tiny::Llama.model(DType::F32), 3);
    engine.session().unwrap().prefill(&TOKENS).unwrap();
    let started = Instant::now();
    while of_engines() < 2 && started.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!(of_engines(), 2);
    let all = names().len();
    let mut sessions: Vec<Session> = (0..8).map(|_| engine.session().unwrap()).collect();
    sessions
        .iter_mut()
        .for_each(|session| session.prefill(&TOKENS).unwrap());
    assert_eq!(of_engines(), 2);
    assert!(names().len() <= all, "{:?}", names());
}
