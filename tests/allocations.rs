//! Decoding allocates nothing, with drafts, too: counted with an allocator of our own, on the thread that decodes, as
//! the test runner's own goes on beside it.

#[path = "it/run/mod.rs"]
mod run;
#[path = "it/tiny/mod.rs"]
mod tiny;

use ruvllm::Sampler;
use ruvllm::exec::{SessionOptions, Speculation};
use ruvllm::gguf::Gguf;
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use tiny::Tiny;

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_allocates_nothing() {
    for tiny in Tiny::ALL {
        for dtype in [DType::F32, DType::Q8_0] {
            let model = tiny.model(dtype);
            // One thread: a helper that starts is a task in its pool's queue, which is an allocation
            // once per wake-up, not per token.
            let options = SessionOptions { n_ctx: Some(64), ..Default::default() };
            let mut session = run::session_on(&model, 1, &options);
            let mut adapter = Adapter::zeros(&model, 3, 1, |_| true).unwrap();
            adapter.terms_mut().for_each(|(_, term)| term.parts_mut().1.fill(0.01));
            session.attach(Arc::new(adapter), 0.5).unwrap();
            session.prefill(&[1, 2, 3, 4]).unwrap();
            session.decode(5).unwrap();
            let before = COUNT.get();
            for token in 0..32 {
                session.decode(token).unwrap();
            }
            assert_eq!(COUNT.get() - before, 0, "{tiny:?} {dtype:?}");

            // A prefill of the size seen before needs no more than three.
            session.rewind(0).unwrap();
            session.prefill(&[1, 2, 3, 4]).unwrap();
            session.rewind(0).unwrap();
            let before = COUNT.get();
            session.prefill(&[1, 2, 3, 4]).unwrap();
            assert!(COUNT.get() - before <= 3, "{tiny:?} {dtype:?}");
        }
    }
}

/// The text of each token is a string of its own. Besides those, passes allocate only when a list grows, which doubles:
/// in 300 tokens fewer than 20 times.
#[test]
fn drafts_allocate_nothing_per_pass() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/models/ruvllm-rust-6m-q8_0.gguf");
    let model = run::open(Gguf::open(path).unwrap()).unwrap();
    let engine = run::engine(&model, 1);
    let prompt = model.tokenizer().unwrap().encode_prompt(&"The value is moved, and the value is dropped. ".repeat(8));
    let options = SessionOptions { n_ctx: Some(1024), ..Default::default() };
    // What is drawn differs, so that drafts are right and wrong.
    let sampler = |seed: u64| Sampler::builder().temperature(0.8).seed(seed).build().unwrap();
    let speculations = [None, Some(Speculation::default()), Some(Speculation::default().fixed_length(4))];
    for speculation in &speculations {
        let session = engine.session_with(&options).unwrap();
        let mut generation = session.into_generation_from(&prompt, sampler(1)).max_tokens(500);
        if let Some(speculation) = speculation {
            generation = generation.speculate(speculation.clone());
        }
        generation.by_ref().take(100).for_each(|piece| drop(piece.unwrap()));
        let (before, n_before) = (COUNT.get(), generation.n_passes());
        generation.by_ref().take(300).for_each(|piece| drop(piece.unwrap()));
        let n_passes = generation.n_passes() - n_before;
        // At most 16 tokens each.
        assert!(n_passes >= 300 / 16, "{n_passes} passes");
        assert!(COUNT.get() - before < 300 + 20, "{} in {n_passes} passes", COUNT.get() - before);
    }
}
