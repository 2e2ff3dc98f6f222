//! Decoding allocates nothing, with drafts, side by side and for a device, too: counted with an
//! allocator of our own, on the thread that decodes, as the test runner's own goes on beside it.

#[path = "it/run/mod.rs"]
mod run;
#[path = "it/tiny/mod.rs"]
mod tiny;

use ruvllm::compute::TokenKind;
use ruvllm::decode::Speculation;
use ruvllm::engine::{EngineOptions, Outputs, Slot};
use ruvllm::gguf::Gguf;
use ruvllm::gpu::GpuError;
use ruvllm::gpu::{Batch, BatchOutputs, Runner};
use ruvllm::kv::{DeviceMemory, PageMemory};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
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
    /// Not counted: a list that grows, which becomes ever rarer.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.realloc(ptr, layout, new_size) }
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
            // One thread: a helper that starts is a task in its pool's queue, which is an
            // allocation once per wake-up, not per token.
            let options = SessionOptions {
                n_ctx: Some(64),
                ..Default::default()
            };
            let mut session = run::session_on(&model, 1, &options);
            let mut adapter = Adapter::zeros(&model, 3, 1, |_| true).unwrap();
            adapter
                .terms_mut()
                .for_each(|(_, term)| term.parts_mut().1.fill(0.01));
            session.adapters().attach(Arc::new(adapter), 0.5).unwrap();
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

/// A device that computes nothing: its outputs are zeros.
struct Idle {
    first_layer: usize,
    n_embd: usize,
}

/// Memory of a page, aligned for what is stored in it.
#[derive(Debug)]
struct Memory(Vec<u64>);

impl PageMemory for Memory {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
    fn address(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }
}

impl Runner for Idle {
    fn name(&self) -> String {
        "idle".to_owned()
    }
    fn first_layer(&self) -> usize {
        self.first_layer
    }
    fn copied_bytes(&self) -> u64 {
        0
    }
    fn shares_memory(&self) -> bool {
        true
    }
    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        let memory = Memory(vec![0; bytes.div_ceil(8)]);
        Some(DeviceMemory::Shared(Box::new(memory)))
    }
    fn page_limit(&self) -> u64 {
        u64::MAX
    }
    fn pass(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), GpuError> {
        let n = batch.tokens.len();
        assert_eq!(
            batch.hidden.len(),
            if self.first_layer > 0 {
                n * self.n_embd
            } else {
                0
            }
        );
        assert!(
            batch
                .cos
                .iter()
                .zip(batch.sin)
                .all(|(cos, sin)| (cos * cos + sin * sin - 1.0).abs() < 1e-3)
        );
        let mut row = 0;
        for slot in batch.slots {
            assert_eq!(slot.rows.start, row);
            row = slot.rows.end;
            assert!(
                slot.tables
                    .iter()
                    .all(|table| table.len() == 1 && table[0] != 0)
            );
            assert!(
                batch
                    .places
                    .iter()
                    .all(|place| place.group < slot.tables.len())
            );
        }
        assert_eq!(row, n);
        outputs.logits.fill(0.0);
        Ok(())
    }
}

/// What a device is handed with a pass lies in memory that is kept, also that of several sequences.
#[test]
fn passes_of_a_device_allocate_nothing() {
    for (tiny, first_layer) in Tiny::ALL
        .into_iter()
        .flat_map(|tiny| [(tiny, 0), (tiny, 1)])
    {
        let model = tiny.model(DType::F32);
        let runner = Arc::new(Idle {
            first_layer,
            n_embd: model.hparams().n_embd,
        });
        let options = EngineOptions {
            n_threads: NonZeroUsize::new(1),
            ..Default::default()
        };
        let engine = Engine::with_runner(&model, &options, runner).unwrap();
        let options = SessionOptions {
            n_ctx: Some(64),
            ..Default::default()
        };
        let [mut a, mut b, mut c] = [(); 3].map(|()| engine.sequence(&options).unwrap());
        let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
        let mut pass = || {
            let (one, more) = (
                Slot::new(&mut a, &[1], TokenKind::Generated),
                Slot::new(&mut b, &[2], TokenKind::Generated),
            );
            let prompt = Slot::new(&mut c, &[3, 4, 5], TokenKind::Prompt);
            engine
                .step(&mut [prompt, one, more], &mut outputs, &cancel)
                .unwrap();
        };
        pass();
        let before = COUNT.get();
        (0..16).for_each(|_| pass());
        assert_eq!(
            COUNT.get() - before,
            0,
            "{tiny:?}, first layer {first_layer}"
        );
    }
}

/// The text of each token is a string of its own. Besides those, passes allocate only when a list
/// begins or a table grows: in 300 tokens fewer than 20 times, and in 60 passes of four sequences
/// fewer than 40 times. A page of the pool is two.
#[test]
fn drafts_allocate_nothing_per_pass() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    let model = run::open(Gguf::open(path).unwrap()).unwrap();
    let engine = run::engine(&model, 1);
    let prompt = model
        .tokenizer()
        .unwrap()
        .encode_prompt(&"The value is moved, and the value is dropped. ".repeat(8));
    let options = SessionOptions {
        n_ctx: Some(1024),
        ..Default::default()
    };
    // What is drawn differs, so that drafts are right and wrong.
    let sampler = |seed: u64| {
        Sampler::new(SamplerOptions {
            temperature: 0.8,
            seed: Some(seed),
            ..Default::default()
        })
        .unwrap()
    };
    let speculations = [
        None,
        Some(Speculation::default()),
        Some(Speculation::default().fixed_length(4)),
    ];
    for speculation in &speculations {
        let session = engine.session_with(&options).unwrap();
        let mut generation = session.into_generation(&prompt, sampler(1)).max_tokens(500);
        if let Some(speculation) = speculation {
            generation = generation.speculate(speculation.clone());
        }
        generation
            .by_ref()
            .take(100)
            .for_each(|piece| drop(piece.unwrap()));
        let (before, n_before) = (COUNT.get(), generation.n_passes());
        generation
            .by_ref()
            .take(300)
            .for_each(|piece| drop(piece.unwrap()));
        let n_passes = generation.n_passes() - n_before;
        // At most 16 tokens each.
        assert!(n_passes >= 300 / 16, "{n_passes} passes");
        assert!(
            COUNT.get() - before < 300 + 20,
            "{} in {n_passes} passes",
            COUNT.get() - before
        );
    }
    for speculation in &speculations {
        let options = ScheduleOptions {
            session: options.clone(),
            n_pieces: 4096,
            ..Default::default()
        };
        let mut schedule = Schedule::new(&engine, &options).unwrap();
        let mut streams = Vec::new();
        for seed in 0..4 {
            let mut request = Request::new(prompt.clone(), sampler(seed)).max_tokens(800);
            if let Some(speculation) = speculation {
                request = request.speculate(speculation.clone());
            }
            streams.push(schedule.submit(request).unwrap());
        }
        let mut n_read = || {
            let mut context = Context::from_waker(Waker::noop());
            let mut n = 0;
            for stream in &mut streams {
                while let Poll::Ready(Some(Ok(_))) = stream.poll_next(&mut context) {
                    n += 1;
                }
            }
            n
        };
        (0..30).for_each(|_| assert!(schedule.step()));
        n_read();
        let (before, n_pages) = (COUNT.get(), engine.pool().stats().n_pages);
        (0..60).for_each(|_| assert!(schedule.step()));
        let n_pages = engine.pool().stats().n_pages - n_pages;
        let allocated = COUNT.get() - before - 2 * n_pages;
        let n_tokens = n_read();
        assert!(schedule.n_running() == 4 && n_tokens >= 4 * 60);
        assert!(
            allocated < n_tokens + 40,
            "{allocated} in 60 passes, {n_tokens} tokens"
        );
    }
}
