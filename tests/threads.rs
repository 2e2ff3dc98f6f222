//! Eight sessions of one model take the threads of one: counted in a process of its own, as other tests start theirs.
#![cfg(target_os = "linux")]

#[path = "it/run/mod.rs"]
mod run;
#[path = "it/tiny/mod.rs"]
mod tiny;

use ruvllm::Session;
use ruvllm::quant::DType;
use tiny::{TOKENS, Tiny};

fn of_engines() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("ruvllm-")).count()
}

#[test]
fn sessions_share_threads() {
    let engine = run::engine(&Tiny::Llama.model(DType::F32), 3);
    engine.session().unwrap().prefill(&TOKENS).unwrap();
    assert_eq!(of_engines(), 2);
    let mut sessions: Vec<Session> = (0..8).map(|_| engine.session().unwrap()).collect();
    sessions.iter_mut().for_each(|session| session.prefill(&TOKENS).unwrap());
    assert_eq!(of_engines(), 2);
}
