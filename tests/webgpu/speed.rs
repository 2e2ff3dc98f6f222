//! Times of single kernels, on a real GPU: `cargo test --release --features webgpu --test webgpu --
//! --ignored --nocapture speed`.

use crate::devices;
use crate::run::open;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{EngineOptions, Outputs, Slot};
use ruvllm::gguf::Gguf;
use ruvllm::gpu::kernels::*;
use ruvllm::gpu::webgpu::{DeviceStage, Memory, Options, WebGpu};
use ruvllm::gpu::{Call, Gpu, GpuError, GpuRunner, Runner};
use ruvllm::kv::{DeviceMemory, PageMemory};
use ruvllm::quant::DType;
use ruvllm::{CancelToken, Engine, KvType, SessionOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Bytes that look random and are no NaN in any format that is measured.
fn bytes(n: u64) -> Vec<u8> {
    let block: Vec<u8> = (0..1u32 << 16)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x3B)
        .collect();
    let mut all = Vec::with_capacity(n as usize);
    while all.len() < n as usize {
        let rest = (n as usize - all.len()).min(block.len());
        all.extend_from_slice(&block[..rest]);
    }
    all
}

fn row_bytes(format: DType, n_in: u32) -> u32 {
    let (values, bytes) = format.block();
    n_in / values as u32 * bytes as u32
}

/// Formats that are measured: those of `RUVLLM_SPEED`, or some.
fn formats() -> Vec<DType> {
    let all = [
        DType::Q4_K,
        DType::Q6_K,
        DType::Q8_0,
        DType::Q4_0,
        DType::F16,
    ];
    let wanted = std::env::var("RUVLLM_SPEED").ok();
    let is_wanted = |f: &DType| {
        let name = f.to_string();
        wanted
            .as_ref()
            .is_none_or(|w| w.split(',').any(|w| w == name))
    };
    all.into_iter().filter(is_wanted).collect()
}

/// Prints what a product takes.
fn measure(stage: &DeviceStage<'_>, dispatch: &Dispatch, what: &str, flops: f64) {
    let buffers: Vec<Vec<u8>> = dispatch.lens.iter().map(|&len| bytes(len)).collect();
    let n = if flops > 1e10 { 20 } else { 100 };
    match stage.seconds(dispatch, &buffers, n) {
        Ok(seconds) => println!(
            "{what}: {:.1} us, {:.0} GB/s, {:.1} TFLOP/s",
            seconds * 1e6,
            dispatch.lens[0] as f64 / seconds / 1e9,
            flops / seconds / 1e12
        ),
        Err(e) => println!("{what}: {e}"),
    }
}

/// The products of a model of 8 billion weights and of one with a billion, and a kernel without
/// work, whose time is what a dispatch costs.
#[test]
#[ignore = "measures"]
fn speed_of_products() {
    for device in devices(Options::default()) {
        println!("{:?}", device.info());
        let stage = DeviceStage::new(&device, 1);
        let nothing = GELU.dispatch(DType::F32, 0, &ElementwiseArgs { n: 256 });
        let seconds = stage.seconds(&nothing, &[bytes(1024)], 1000).unwrap();
        println!("a dispatch: {:.2} us", seconds * 1e6);
        let norm = NormArgs {
            n: 4096,
            n_rows: 1,
            eps: 1e-6,
        };
        let norm = RMS_NORM.dispatch(DType::F32, 0, &norm);
        let buffers: Vec<Vec<u8>> = norm.lens.iter().map(|&len| bytes(len)).collect();
        let seconds = stage.seconds(&norm, &buffers, 1000).unwrap();
        println!("rms_norm of 4096: {:.2} us", seconds * 1e6);
        for format in formats() {
            // The last one does not fit into any cache.
            let shapes = [
                (4096, 1024),
                (4096, 4096),
                (4096, 12288),
                (12288, 4096),
                (2048, 8192),
                (8192, 2048),
                (4096, 131_072),
            ];
            for (n_in, n_out) in shapes {
                let one = [32, 64, 128]
                    .into_iter()
                    .flat_map(|lanes| [(lanes, 4, 1), (lanes, 8, 1)]);
                for (lanes, outs, n_rows) in one.chain([(0, 0, 8), (0, 0, 64)]) {
                    device.force_lanes(lanes);
                    device.force_outs(outs);
                    let args = MatvecArgs {
                        n_in,
                        n_out,
                        n_rows,
                        row_bytes: row_bytes(format, n_in),
                    };
                    let dispatch = MATVEC.dispatch(format, n_rows.min(8), &args);
                    let what = format!(
                        "matvec {format} {n_in} x {n_out}, {n_rows} rows, lanes {lanes}, outs {outs}"
                    );
                    let flops = 2.0 * f64::from(n_in) * f64::from(n_out) * f64::from(n_rows);
                    if n_rows < 64 || n_out < 100_000 {
                        measure(&stage, &dispatch, &what, flops);
                    }
                }
            }
            device.force_lanes(0);
            device.force_outs(0);
            for (n_in, n_out, n_rows) in [(2048, 2048, 512), (2048, 8192, 512), (4096, 4096, 512)] {
                let args = MatmulArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes: row_bytes(format, n_in),
                };
                let dispatch = MATMUL.dispatch(format, 0, &args);
                let flops = 2.0 * f64::from(n_in) * f64::from(n_out) * f64::from(n_rows);
                let what = format!("matmul {format} {n_in} x {n_out}, {n_rows} rows");
                measure(&stage, &dispatch, &what, flops);
            }
        }
    }
}

/// A GPU that measures a pass with results, once told to, instead of running it once.
struct Measuring {
    gpu: WebGpu,
    /// Whether the next such pass is measured.
    next: AtomicBool,
}

/// Kernels whose share of a pass is measured together, as one kernel does their work.
const FAMILIES: &[&[&str]] = &[
    &["embed"],
    &["rms_norm", "rms_norm_add"],
    &["rms_norm_heads", "rope_neox", "rope_norm", "append"],
    &["attention_decode", "attention_merge"],
    &["attention_prompt"],
    &["silu_mul"],
    &["matvec", "matmul"],
];

impl Measuring {
    /// Seconds of a pass of these calls: of up to twenty without results, and of one with them.
    fn seconds(
        &self,
        calls: &[Call<'_, Memory>],
        pages: &[u64],
        reads: &mut [(&Memory, &mut [u8])],
    ) -> Result<[f64; 2], GpuError> {
        let mut read = f64::MAX;
        for _ in 0..3 {
            let start = Instant::now();
            self.gpu.run(calls, pages, reads)?;
            read = read.min(start.elapsed().as_secs_f64());
        }
        let n = (0.06 / read).clamp(2.0, 20.0) as usize;
        let start = Instant::now();
        for _ in 0..n {
            self.gpu.run(calls, pages, &mut [])?;
        }
        let mut last = [0; 4];
        let (buffer, _) = &reads[0];
        self.gpu
            .run(&calls[..1], pages, &mut [(buffer, &mut last)])?;
        Ok([start.elapsed().as_secs_f64() / n as f64, read])
    }
}

impl Gpu for Measuring {
    type Buffer = Memory;
    const LANGUAGE: &'static str = "WebGPU";

    fn name(&self) -> String {
        self.gpu.name()
    }
    fn buffer(&self, bytes: usize) -> Result<Memory, GpuError> {
        self.gpu.buffer(bytes)
    }
    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Memory, bool), GpuError> {
        self.gpu.tensor(gguf, index)
    }
    fn can_embed(&self, bytes: u64) -> bool {
        self.gpu.can_embed(bytes)
    }
    fn shares_memory(&self) -> bool {
        self.gpu.shares_memory()
    }
    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        self.gpu.page(bytes)
    }
    fn page_limit(&self) -> u64 {
        self.gpu.page_limit()
    }
    fn len(&self, buffer: &Memory) -> usize {
        self.gpu.len(buffer)
    }
    fn write(&self, buffer: &mut Memory, bytes: &[u8]) -> Result<(), GpuError> {
        self.gpu.write(buffer, bytes)
    }

    fn run(
        &self,
        calls: &[Call<'_, Memory>],
        pages: &[u64],
        reads: &mut [(&Memory, &mut [u8])],
    ) -> Result<(), GpuError> {
        if reads.is_empty() || !self.next.swap(false, Ordering::Relaxed) {
            return self.gpu.run(calls, pages, reads);
        }
        self.gpu.run(calls, pages, reads)?;
        let device = self.gpu.device();
        let n = device.dispatches();
        let [whole, read] = self.seconds(calls, pages, reads)?;
        println!(
            "  {n} dispatches: {:.0} us, with its result {:.0} us",
            whole * 1e6,
            read * 1e6
        );
        for (lanes, outs) in [(0, 8), (32, 4), (64, 4), (128, 4)] {
            device.force_lanes(lanes);
            device.force_outs(outs);
            let [whole, _] = self.seconds(calls, pages, reads)?;
            println!("  lanes {lanes}, outs {outs}: {:.0} us", whole * 1e6);
        }
        device.force_lanes(0);
        device.force_outs(0);
        for family in FAMILIES {
            let rest = calls
                .iter()
                .filter(|call| !family.contains(&call.dispatch.name));
            let rest: Vec<Call<'_, Memory>> = rest.cloned().collect();
            let n = calls.len() - rest.len();
            if n > 0 {
                let [less, _] = self.seconds(&rest, pages, reads)?;
                println!("  {}: {:.0} us, {n} calls", family[0], (whole - less) * 1e6);
            }
        }
        Ok(())
    }
}

fn step(engine: &Engine, slots: &mut [Slot<'_>]) {
    let mut outputs = Outputs::default();
    engine
        .step(slots, &mut outputs, &CancelToken::default())
        .unwrap_or_else(|e| panic!("{e}"));
}

/// What the parts of a token take in a model of a file, `RUVLLM_SPEED_MODEL`.
#[test]
#[ignore = "measures"]
fn speed_of_passes() {
    let Ok(file) = std::env::var("RUVLLM_SPEED_MODEL") else {
        println!("SKIPPED: RUVLLM_SPEED_MODEL names no file");
        return;
    };
    let model = open(Gguf::open(&file).unwrap()).unwrap();
    for device in devices(Options::default()) {
        if device.info().is_cpu && std::env::var_os("RUVLLM_SPEED_CPU").is_none() {
            continue;
        }
        let gpu = Measuring {
            gpu: WebGpu::new(device),
            next: AtomicBool::new(false),
        };
        let runner = Arc::new(GpuRunner::new(gpu, &model, usize::MAX).unwrap());
        let shared: Arc<dyn Runner> = Arc::clone(&runner) as Arc<dyn Runner>;
        let engine = Engine::with_runner(&model, &EngineOptions::default(), shared).unwrap();
        let options = SessionOptions {
            n_ctx: Some(1024),
            kv_type: KvType::F16,
            ..Default::default()
        };
        for (n_rows, n_prompt) in [(1, 32), (1, 600), (8, 128), (64, 128)] {
            let mut sequences: Vec<_> = (0..n_rows)
                .map(|_| engine.sequence(&options).unwrap())
                .collect();
            let prompt: Vec<u32> = (0..n_prompt).map(|i| i % 1000).collect();
            for sequence in &mut sequences {
                let slot = Slot::new(sequence, &prompt, TokenKind::Prompt);
                step(&engine, &mut [slot]);
            }
            println!("{n_rows} rows behind {n_prompt} tokens:");
            let tokens: Vec<[u32; 1]> = (0..n_rows).map(|i| [i]).collect();
            runner.gpu().next.store(true, Ordering::Relaxed);
            let mut slots: Vec<_> = sequences
                .iter_mut()
                .zip(&tokens)
                .map(|(sequence, token)| Slot::new(sequence, token, TokenKind::Generated))
                .collect();
            step(&engine, &mut slots);
        }
        let mut session = engine.session_with(&options).unwrap();
        session.prefill(&[1, 2, 3]).unwrap();
        for _ in 0..3 {
            let start = Instant::now();
            for _ in 0..40 {
                session.decode(4).unwrap();
            }
            println!(
                "tokens: {:.1} per second",
                40.0 / start.elapsed().as_secs_f64()
            );
        }
        let mut sequence = engine.sequence(&options).unwrap();
        let prompt: Vec<u32> = (0..512).map(|i| i % 1000).collect();
        println!("a prompt of 512:");
        runner.gpu().next.store(true, Ordering::Relaxed);
        let slot = Slot::new(&mut sequence, &prompt, TokenKind::Prompt);
        step(&engine, &mut [slot]);
    }
}

/// A GPU that computes nothing: what is left is the CPU's work for a pass.
struct Nothing;

/// Memory of a page that nobody computes.
#[derive(Debug)]
struct Page(Vec<u8>);

impl PageMemory for Page {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
    fn address(&self) -> u64 {
        64
    }
}

impl Gpu for Nothing {
    type Buffer = usize;
    const LANGUAGE: &'static str = "nothing";

    fn name(&self) -> String {
        String::new()
    }
    fn buffer(&self, bytes: usize) -> Result<usize, GpuError> {
        Ok(bytes)
    }
    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(usize, bool), GpuError> {
        Ok((gguf.tensors()[index].n_bytes as usize, false))
    }
    fn can_embed(&self, _: u64) -> bool {
        true
    }
    fn shares_memory(&self) -> bool {
        true
    }
    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        Some(DeviceMemory::Shared(Box::new(Page(vec![0; bytes]))))
    }
    fn page_limit(&self) -> u64 {
        1 << 40
    }
    fn len(&self, buffer: &usize) -> usize {
        *buffer
    }
    fn write(&self, _: &mut usize, _: &[u8]) -> Result<(), GpuError> {
        Ok(())
    }
    fn run(
        &self,
        _: &[Call<'_, usize>],
        _: &[u64],
        _: &mut [(&usize, &mut [u8])],
    ) -> Result<(), GpuError> {
        Ok(())
    }
}

/// What the CPU does for a token besides what the device's calls take.
#[test]
#[ignore = "measures"]
fn cost_of_planning() {
    let Ok(file) = std::env::var("RUVLLM_SPEED_MODEL") else {
        println!("SKIPPED: RUVLLM_SPEED_MODEL names no file");
        return;
    };
    let model = open(Gguf::open(&file).unwrap()).unwrap();
    let runner = Arc::new(GpuRunner::new(Nothing, &model, usize::MAX).unwrap());
    let engine = Engine::with_runner(&model, &EngineOptions::default(), runner).unwrap();
    let mut session = engine
        .session_with(&SessionOptions {
            n_ctx: Some(1024),
            kv_type: KvType::F16,
            ..Default::default()
        })
        .unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    let start = Instant::now();
    for _ in 0..500 {
        session.decode(4).unwrap();
    }
    println!("{:.0} us per token", start.elapsed().as_secs_f64() * 2e3);
}
