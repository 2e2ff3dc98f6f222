//! Threads of the engine: workers of the host, each with this module on the same memory, which ask for one.

use crate::failure::Failure;
use rayon::{ThreadBuilder, ThreadPoolBuilder};
use std::sync::{Condvar, Mutex, PoisonError};
use wasm_bindgen::prelude::*;

/// Threads that no worker has taken yet.
static WAITING: (Mutex<Vec<ThreadBuilder>>, Condvar) = (Mutex::new(Vec::new()), Condvar::new());

/// Starts `n` threads beside that of the caller, in as many workers that [`help`].
///
/// # Errors
/// `EngineError` if there are some already.
#[wasm_bindgen]
pub fn start_threads(n: usize) -> Result<(), JsValue> {
    let threads = ThreadPoolBuilder::new()
        .num_threads(n)
        .spawn_handler(|thread| {
            let (waiting, has_come) = &WAITING;
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.push(thread);
            has_come.notify_one();
            Ok(())
        });
    Ok(threads.build_global().map_err(Failure::of("EngineError"))?)
}

/// Runs a thread in the worker that calls this, as long as the engine has it.
#[wasm_bindgen]
pub fn help() {
    let (waiting, has_come) = &WAITING;
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let thread = loop {
        match waiting.pop() {
            Some(thread) => break thread,
            None => {
                waiting = has_come
                    .wait(waiting)
                    .unwrap_or_else(PoisonError::into_inner)
            }
        }
    };
    drop(waiting);
    thread.run();
}
