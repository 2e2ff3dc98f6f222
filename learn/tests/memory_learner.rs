//! What a session takes to learn is what was said it would, counted with an allocator of our own,
//! alone in its process.

#[path = "../../tests/it/run/mod.rs"]
mod run;
#[path = "../../tests/it/tiny/mod.rs"]
mod tiny;

use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::quant::DType;
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use tiny::Tiny;

struct Counting;
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn learning_takes_what_was_estimated() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ruvllm-rust-6m-q8_0.gguf");
    let small = LearnerOptions {
        control_tokens: 200,
        recent_tokens: 100,
        cache_tokens: 1 << 10,
        neighbours: 500,
        ..Default::default()
    };
    for (model, learner) in [
        (
            Model::open(shipped).unwrap(),
            LearnerOptions {
                neighbours: 4000,
                ..Default::default()
            },
        ),
        (
            Model::from_gguf(Tiny::Llama.parts(DType::Q8_0).gguf()).unwrap(),
            small,
        ),
    ] {
        let h = model.hparams();
        let options = SessionOptions {
            n_ctx: Some(64),
            n_batch: 64,
            ..Default::default()
        };
        let text: Vec<u32> = (0..1u32 << 14)
            .map(|i| i.wrapping_mul(2_654_435_761) % h.n_vocab as u32)
            .collect();
        let mut session = run::session_on(&model, 1, &options);
        session.prefill(&text[..64]).unwrap();
        session.clear();
        // Buffers of passes are planned apart.
        let engine = session.engine().clone();
        let (before, buffers) = (NOW.load(Ordering::Relaxed), engine.memory().buffers);
        MOST.store(before, Ordering::Relaxed);
        session
            .set_learner(Learner::new(&model, &learner).unwrap())
            .unwrap();
        session.calibrate(&text).unwrap();
        for piece in text[..4096].chunks(64) {
            session.clear();
            session.observe(piece).unwrap();
        }
        let taken =
            (MOST.load(Ordering::Relaxed) - before) as u64 - (engine.memory().buffers - buffers);
        let plan = model.memory_plan(&options.clone().into()).unwrap();
        let planned = learner.bytes(h, options.n_batch.min(plan.n_ctx));
        println!("{taken}, planned {planned}");
        assert!(
            20 * planned.abs_diff(taken) <= taken,
            "{taken} bytes taken, {planned} planned"
        );
    }
}
