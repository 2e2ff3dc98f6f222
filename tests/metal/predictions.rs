//! Bytes and operations of the hot kernels, counted, against the least there can be; and what that would take on an
//! M4 Pro, as a prediction: the longer of the times for memory and for arithmetic.

use crate::emulator::{Build, Counters, Emulator, build_one};
use ruvllm::metal::check::{Checker, Data, Lcg, Stage};
use ruvllm::metal::kernels::*;
use ruvllm::quant::DType;

/// Memory bandwidth of an M4 Pro in bytes per second.
const BANDWIDTH: f64 = 273e9;
/// Lane operations per second: 20 cores of 128 lanes at about 1.58 GHz.
const OPERATIONS: f64 = 20.0 * 128.0 * 1.58e9;

/// A measured call, of a part of the problem that the prediction is for.
struct Measured {
    kernel: String,
    problem: String,
    counters: Counters,
    /// Values that the call yields.
    outputs: f64,
    /// Bytes that it has to read and to write.
    least: f64,
    /// The same of the whole problem.
    all_outputs: f64,
    all_least: f64,
}

impl Measured {
    fn row(&self) -> String {
        let c = &self.counters;
        let bytes = (c.unique_read + c.written) as f64;
        // An 8 × 8 product is 512 fused multiplications.
        let operations = (c.operations + 512 * c.multiplied) as f64;
        let memory = bytes / self.least * self.all_least / BANDWIDTH;
        let arithmetic = operations / self.outputs * self.all_outputs / OPERATIONS;
        format!(
            "| `{}` | {} | {:.1} | {:.2} | {:.2} | {:.0} | {:.0} | {:.0} | {:.0} |",
            self.kernel,
            self.problem,
            self.all_least / self.all_outputs,
            bytes / self.least,
            (c.distinct_read + c.written) as f64 / self.least,
            operations / self.outputs,
            memory * 1e6,
            arithmetic * 1e6,
            memory.max(arithmetic) * 1e6,
        )
    }
}

fn start(source: &str, format: DType) -> Emulator {
    let name = format.to_string().to_lowercase();
    let build = Build { format: Some(&name), counted: true, ..Build::default() };
    let program = build_one(source, build).unwrap_or_else(|e| panic!("{e}"));
    Emulator::start(&program)
}

/// Blocks of zeros: counts do not depend on values.
fn product(format: DType, n_rows: u32) -> Measured {
    let (n_in, n_out) = (4096, 64);
    let row_bytes = format.format().unwrap().bytes_of(1, n_in as usize).unwrap() as u32;
    let w = vec![0u8; (n_out * row_bytes) as usize];
    let x = Lcg(1).values((n_rows * n_in) as usize);
    let data = [Data::Bytes(&w), Data::F32(&x), Data::Out];
    let (gpu, kernel) = if n_rows <= 8 {
        let args = MatvecArgs { n_in, n_out, n_rows, row_bytes };
        let mut gpu = start("matvec.metal", format);
        Checker::new(&mut gpu, &[], false).call(&MATVEC, format, n_rows, &args, &data, &[]).unwrap();
        (gpu, MATVEC.full_name(format, n_rows))
    } else {
        let args = MatmulArgs { n_in, n_out, n_rows, row_bytes };
        let mut gpu = start("matmul.metal", format);
        Checker::new(&mut gpu, &[], false).call(&MATMUL, format, 0, &args, &data, &[]).unwrap();
        (gpu, MATMUL.full_name(format, 0))
    };
    let least = |n_out: u32| f64::from(n_out * row_bytes + 4 * n_rows * n_in + 4 * n_rows * n_out);
    Measured {
        kernel,
        problem: format!("4096 × 4096, {n_rows} rows"),
        counters: gpu.counters,
        outputs: f64::from(n_out * n_rows),
        least: least(n_out),
        all_outputs: 4096.0 * f64::from(n_rows),
        all_least: least(4096),
    }
}

/// A row, or a tile of 32, at position 511 of a layer of 8 query heads and one key/value head of 128.
fn attention(n_rows: u32) -> Measured {
    let (n_head, head_dim, n_pages) = (8, 128, 8);
    let decode = n_rows == 1;
    let mut gpu = start(if decode { "attention_decode.metal" } else { "attention_prompt.metal" }, DType::F32);
    let page = vec![0u8; 2 * 2 * 64 * head_dim as usize];
    let pages: Vec<_> = (0..n_pages).map(|_| gpu.filled(&page, 2)).collect();
    let table = gpu.empty(8 * n_pages, 8);
    for (i, page) in pages.iter().enumerate() {
        gpu.point(table, 8 * i as u64, *page);
    }
    let args = AttentionArgs {
        n_rows,
        n_head,
        n_head_kv: 1,
        head_dim,
        head_dim_v: head_dim,
        key_offset: 0,
        value_offset: 64 * head_dim,
        window: 0,
        n_pages: n_pages as u32,
        n_splits: 1,
        n_tiles: 1,
        scale: 0.1,
        softcap: 0.0,
    };
    let q = Lcg(2).values((n_rows * n_head * head_dim) as usize);
    let rows: Vec<u32> = (0..n_rows).flat_map(|i| [512 - n_rows + i, 0]).collect();
    let kernel = if decode {
        let data = [Data::F32(&q), Data::U32(&rows), Data::Made(table), Data::Out];
        Checker::new(&mut gpu, &[], false).call(&ATTENTION_DECODE, DType::F32, 128, &args, &data, &pages).unwrap();
        ATTENTION_DECODE.full_name(DType::F32, 128)
    } else {
        let (tiles, sinks) = ([0, n_rows], [-1e30; 8]);
        let data =
            [Data::F32(&q), Data::U32(&rows), Data::Made(table), Data::U32(&tiles), Data::F32(&sinks), Data::Out];
        Checker::new(&mut gpu, &[], false).call(&ATTENTION_PROMPT, DType::F32, 128, &args, &data, &pages).unwrap();
        ATTENTION_PROMPT.full_name(DType::F32, 128)
    };
    let outputs = f64::from(n_rows * n_head * head_dim);
    let least = f64::from(2 * 2 * 512 * head_dim) + 8.0 * outputs;
    Measured {
        kernel,
        problem: format!("512 keys, 32 heads of 128 on 4, {n_rows} rows"),
        counters: gpu.counters,
        outputs,
        least,
        all_outputs: 4.0 * outputs,
        all_least: 4.0 * least,
    }
}

fn all() -> Vec<Measured> {
    let mut all: Vec<Measured> = FORMATS.iter().map(|&format| product(format, 1)).collect();
    all.extend([2, 4, 8].map(|n_rows| product(DType::Q4_K, n_rows)));
    all.extend([DType::F16, DType::Q8_0, DType::Q4_K].map(|format| product(format, 64)));
    all.extend([1, 32].map(attention));
    all
}

/// Nothing is read twice from memory, and a threadgroup asks its caches for little more.
#[test]
fn bytes_are_near_the_least() {
    for (measured, of_caches) in [(product(DType::Q4_K, 1), 1.5), (product(DType::Q4_K, 64), 1.5), (attention(1), 1.1)]
    {
        let c = &measured.counters;
        let ratio = |bytes: u64| (bytes + c.written) as f64 / measured.least;
        assert!(ratio(c.unique_read) < 1.02, "{}: {}", measured.kernel, ratio(c.unique_read));
        assert!(ratio(c.distinct_read) < of_caches, "{}: {}", measured.kernel, ratio(c.distinct_read));
    }
}

/// The table of `docs/metal.md`: `cargo test --features metal --test metal -- --ignored --nocapture table`.
#[test]
#[ignore = "prints a table"]
fn table() {
    for measured in all() {
        println!("{}", measured.row());
    }
}
