//! Bytes and operations of the hot kernels, counted, against the least there can be; and what that
//! would take on an M4 Pro, as a prediction: the longer of the times for memory and for arithmetic.

use crate::emulator::{Build, Counters, Emulator, build_one};
use ruvllm::KvType;
use ruvllm::gpu::check::{Checker, Data, Handle, Lcg, Stage};
use ruvllm::gpu::kernels::*;
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
    let build = Build {
        format: Some(&name),
        counted: true,
        ..Build::default()
    };
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
        let args = MatvecArgs {
            n_in,
            n_out,
            n_rows,
            row_bytes,
        };
        let mut gpu = start("matvec.metal", format);
        Checker::new(&mut gpu, &[], false)
            .call(&MATVEC, format, n_rows, &args, &data, &[])
            .unwrap();
        (gpu, MATVEC.full_name(format, n_rows))
    } else {
        let args = MatmulArgs {
            n_in,
            n_out,
            n_rows,
            row_bytes,
        };
        let mut gpu = start("matmul.metal", format);
        Checker::new(&mut gpu, &[], false)
            .call(&MATMUL, format, 0, &args, &data, &[])
            .unwrap();
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

/// Calls a kernel that yields `outputs` values and has to read and write `least` bytes.
fn called<A: Args>(
    kernel: &Kernel<A>,
    (format, variant): (DType, u32),
    problem: &str,
    args: &A,
    data: &[Data<'_>],
    (outputs, least): (f64, f64),
) -> Measured {
    let mut gpu = start(kernel.source, format);
    Checker::new(&mut gpu, &[], false)
        .call(kernel, format, variant, args, data, &[])
        .unwrap();
    Measured {
        kernel: kernel.full_name(format, variant),
        problem: problem.to_string(),
        counters: gpu.counters,
        outputs,
        least,
        all_outputs: outputs,
        all_least: least,
    }
}

/// The experts of gpt-oss-20b, of which a row chooses 4 of 32: some of their outputs, for the
/// experts of one row, and for prompts as many rows as each of them gets of 64.
fn experts(n_rows: u32) -> Measured {
    let (n_in, n_out, format, n_expert) = (2880, 64, DType::MXFP4, 4);
    let row_bytes = format.format().unwrap().bytes_of(1, n_in as usize).unwrap() as u32;
    let rows = n_rows.div_ceil(8);
    let n_chosen = rows * n_expert;
    let w = vec![0u8; (n_expert * n_out * row_bytes) as usize];
    let x = Lcg(3).values((rows * n_in) as usize);
    let sizes = |n_expert: u32, n_rows: u32, n_out: u32| {
        let outputs = f64::from(4 * n_rows * n_out);
        (
            outputs,
            f64::from(n_expert * n_out) * f64::from(row_bytes)
                + 4.0 * (f64::from(n_rows * n_in) + outputs),
        )
    };
    let part = sizes(n_expert, rows, n_out);
    let problem = format!(
        "{} of 32 experts, 2880 × 2880, {n_rows} rows",
        if n_rows == 1 { 4 } else { 32 }
    );
    let (part, (all_outputs, all_least)) = if n_rows == 1 {
        let args = MatvecExpertsArgs {
            n_in,
            n_out,
            n_chosen,
            n_expert,
            choices_per_row: 4,
            row_bytes,
        };
        let data = [
            Data::Bytes(&w),
            Data::F32(&x),
            Data::U32(&[0, 1, 2, 3]),
            Data::Out,
        ];
        (
            called(&MATVEC_EXPERTS, (format, 0), &problem, &args, &data, part),
            sizes(4, 1, 2880),
        )
    } else {
        let args = MatmulExpertsArgs {
            n_in,
            n_out,
            n_rows: rows,
            n_chosen,
            n_expert,
            choices_per_row: 4,
            row_bytes,
        };
        let list = |expert: u32| (0..n_chosen).map(move |i| (i * n_expert + expert) % n_chosen);
        let (counts, lists) = (
            vec![rows; n_expert as usize],
            (0..n_expert).flat_map(list).collect::<Vec<_>>(),
        );
        let data = [
            Data::Bytes(&w),
            Data::F32(&x),
            Data::U32(&counts),
            Data::U32(&lists),
            Data::Out,
        ];
        (
            called(&MATMUL_EXPERTS, (format, 0), &problem, &args, &data, part),
            sizes(32, n_rows, 2880),
        )
    };
    Measured {
        all_outputs,
        all_least,
        ..part
    }
}

/// An adapter of rank 16: `A` and `B` of a matrix, and both of the four chosen experts of gpt-oss.
fn adapters() -> [Measured; 3] {
    let (n, rank) = (4096, 16);
    let (values, low) = (
        Lcg(4).values((rank * n) as usize),
        Lcg(5).values(rank as usize),
    );
    let x = Lcg(6).values(n as usize);
    let args = LoraArgs {
        n_in: n,
        n_out: n,
        rank,
        n_rows: 1,
        b_stride: n,
        scale: 1.0,
    };
    let [of_low, of_row, of_values] = [&low, &x, &values].map(|x| 4.0 * x.len() as f64);
    let plain = (DType::F32, 0);
    let data = [Data::F32(&values), Data::F32(&x), Data::Out];
    let sizes = (f64::from(rank), of_values + of_row + of_low);
    let a = called(
        &LORA_A,
        plain,
        "rank 16, 4096 inputs, 1 row",
        &args,
        &data,
        sizes,
    );
    let data = [Data::F32(&values), Data::F32(&low), Data::F32(&x)];
    let sizes = (f64::from(n), of_values + of_low + 2.0 * of_row);
    let b = called(
        &LORA_B,
        plain,
        "rank 16, 4096 outputs, 1 row",
        &args,
        &data,
        sizes,
    );

    let (n, n_expert) = (2880, 4);
    let values = Lcg(4).values((2 * n_expert * rank * n) as usize);
    let (x, y) = (
        Lcg(6).values(n as usize),
        Lcg(7).values((n_expert * n) as usize),
    );
    let terms: Vec<u32> = (0..n_expert)
        .flat_map(|e| {
            [
                2 * e * rank * n,
                (2 * e + 1) * rank * n,
                rank,
                1f32.to_bits(),
            ]
        })
        .collect();
    let n_values = values.len() as u32;
    let args = LoraExpertsArgs {
        n_in: n,
        n_out: n,
        n_chosen: 4,
        n_expert,
        choices_per_row: 4,
        n_values,
    };
    let data = [
        Data::F32(&values),
        Data::F32(&x),
        Data::U32(&[0, 1, 2, 3]),
        Data::U32(&terms),
        Data::F32(&y),
    ];
    let least = 4.0 * (values.len() + x.len() + 2 * y.len()) as f64;
    let problem = "rank 16, 4 experts, 2880 × 2880, 1 row";
    let experts = called(
        &LORA_EXPERTS,
        plain,
        problem,
        &args,
        &data,
        (y.len() as f64, least),
    );
    [a, b, experts]
}

/// Element-wise kernels of gpt-oss's experts, 64 rows.
fn of_experts() -> [Measured; 2] {
    let (n, n_chosen, n_expert) = (2880, 256, 32);
    let (x, bias) = (
        Lcg(8).values((n * n_chosen) as usize),
        Lcg(9).values((n * n_expert) as usize),
    );
    let chosen: Vec<u32> = (0..n_chosen).map(|c| c % n_expert).collect();
    let outputs = x.len() as f64;
    let problem = "256 choices of 32 experts, 2880 values";
    let args = AddExpertBiasArgs {
        n,
        n_chosen,
        n_expert,
    };
    let data = [Data::F32(&x), Data::F32(&bias), Data::U32(&chosen)];
    let sizes = (outputs, 8.0 * outputs + 4.0 * bias.len() as f64);
    let biases = called(
        &ADD_EXPERT_BIAS,
        (DType::F32, 0),
        problem,
        &args,
        &data,
        sizes,
    );
    let args = ElementwiseArgs { n: n * n_chosen };
    let data = [Data::F32(&x), Data::F32(&x)];
    let gates = called(
        &SWIGLU_OAI,
        (DType::F32, 0),
        problem,
        &args,
        &data,
        (outputs, 12.0 * outputs),
    );
    [biases, gates]
}

/// A page table of pages of zeros, on this GPU.
fn zero_pages(gpu: &mut Emulator, n_pages: usize, bytes: usize) -> (Handle, Vec<Handle>) {
    let page = vec![0u8; bytes];
    let pages: Vec<_> = (0..n_pages).map(|_| gpu.filled(&page, 4)).collect();
    let table = gpu.empty(8 * n_pages as u64, 8);
    for (i, page) in pages.iter().enumerate() {
        gpu.point(table, 8 * i as u64, *page);
    }
    (table, pages)
}

/// A row, or a tile of 32, at position 511 of a layer of 8 query heads and one key/value head of
/// 128.
fn attention(n_rows: u32, kind: KvType) -> Measured {
    let (n_head, head_dim, n_pages) = (8, 128, 8);
    let decode = n_rows == 1;
    let mut gpu = start(
        if decode {
            "attention_decode.metal"
        } else {
            "attention_prompt.metal"
        },
        DType::F32,
    );
    let bytes = kind.block_bytes(head_dim as usize);
    let (table, pages) = zero_pages(&mut gpu, n_pages, 2 * bytes);
    let args = AttentionArgs {
        n_rows,
        n_head,
        n_head_kv: 1,
        head_dim,
        head_dim_v: head_dim,
        key_offset: 0,
        value_offset: bytes as u32,
        key_bits: kind.bits() as u32,
        value_bits: kind.bits() as u32,
        window: 0,
        n_pages: n_pages as u32,
        n_splits: 1,
        n_tiles: 1,
        scale: 0.1,
        softcap: 0.0,
        ..AttentionArgs::default()
    };
    let q = Lcg(2).values((n_rows * n_head * head_dim) as usize);
    let rows: Vec<u32> = (0..n_rows).flat_map(|i| [512 - n_rows + i, 0]).collect();
    let kernel = if decode {
        let data = [
            Data::F32(&q),
            Data::U32(&rows),
            Data::Made(table),
            Data::Out,
        ];
        Checker::new(&mut gpu, &[], false)
            .call(&ATTENTION_DECODE, DType::F32, 128, &args, &data, &pages)
            .unwrap();
        ATTENTION_DECODE.full_name(DType::F32, 128)
    } else {
        let (tiles, sinks) = ([0, n_rows], [-1e30; 8]);
        let data = [
            Data::F32(&q),
            Data::U32(&rows),
            Data::Made(table),
            Data::U32(&tiles),
            Data::F32(&sinks),
            Data::Out,
        ];
        Checker::new(&mut gpu, &[], false)
            .call(&ATTENTION_PROMPT, DType::F32, 128, &args, &data, &pages)
            .unwrap();
        ATTENTION_PROMPT.full_name(DType::F32, 128)
    };
    let outputs = f64::from(n_rows * n_head * head_dim);
    let least = (2 * n_pages * bytes) as f64 + 8.0 * outputs;
    Measured {
        kernel,
        problem: format!("512 keys in {kind}, 32 heads of 128 on 4, {n_rows} rows"),
        counters: gpu.counters,
        outputs,
        least,
        all_outputs: 4.0 * outputs,
        all_least: 4.0 * least,
    }
}

/// Merging eight splits of 64 heads of 64, with sinks: gpt-oss at 4096 positions.
fn merge() -> Measured {
    let (n_head, head_dim_v, n_splits) = (64, 64, 8);
    let partial = Lcg(10).values((n_head * n_splits * (head_dim_v + 2)) as usize);
    let sinks = vec![0.5; n_head as usize];
    let args = AttentionArgs {
        n_rows: 1,
        n_head,
        head_dim_v,
        n_splits,
        ..AttentionArgs::default()
    };
    let data = [
        Data::F32(&partial),
        Data::U32(&[4095, 0]),
        Data::F32(&sinks),
        Data::Out,
    ];
    let outputs = f64::from(n_head * head_dim_v);
    let least = 4.0 * (partial.len() + sinks.len()) as f64 + 4.0 * outputs;
    called(
        &ATTENTION_MERGE,
        (DType::F32, 0),
        "8 splits, 64 heads of 64, sinks, 1 row",
        &args,
        &data,
        (outputs, least),
    )
}

/// 64 rows of 8 key/value heads of 128, appended; and the keys transformed.
fn append(kind: KvType) -> Measured {
    let (n_rows, n_head_kv, head_dim) = (64, 8, 128);
    let mut gpu = start("pages.metal", DType::F32);
    let bytes = n_head_kv as usize * kind.block_bytes(head_dim as usize);
    let (table, pages) = zero_pages(&mut gpu, 1, 2 * bytes);
    let args = AppendArgs {
        n_rows,
        n_pages: 1,
        n_head_kv,
        head_dim,
        head_dim_v: head_dim,
        key_offset: 0,
        value_offset: bytes as u32,
        key_bits: kind.bits() as u32,
        value_bits: kind.bits() as u32,
    };
    let x = Lcg(11).values((n_rows * n_head_kv * head_dim) as usize);
    let rows: Vec<u32> = (0..n_rows).flat_map(|i| [i, 0]).collect();
    let data = [
        Data::F32(&x),
        Data::F32(&x),
        Data::U32(&rows),
        Data::Made(table),
    ];
    Checker::new(&mut gpu, &[], false)
        .call(&APPEND, DType::F32, 0, &args, &data, &pages)
        .unwrap();
    let outputs = 2.0 * x.len() as f64;
    let least = 4.0 * outputs + 2.0 * bytes as f64;
    Measured {
        kernel: APPEND.full_name(DType::F32, 0),
        problem: format!("64 rows in {kind}, 8 heads of 128"),
        counters: gpu.counters,
        outputs,
        least,
        all_outputs: outputs,
        all_least: least,
    }
}

fn hadamard() -> Measured {
    let (n, n_rows) = (128, 512);
    let x = Lcg(12).values((n * n_rows) as usize);
    let outputs = x.len() as f64;
    let args = HadamardArgs {
        n,
        n_rows,
        log_side: 7,
        factor: 0.088_388_35,
    };
    called(
        &HADAMARD,
        (DType::F32, 0),
        "512 heads of 128",
        &args,
        &[Data::F32(&x)],
        (outputs, 8.0 * outputs),
    )
}

fn all() -> Vec<Measured> {
    let mut all: Vec<Measured> = FORMATS.iter().map(|&format| product(format, 1)).collect();
    all.extend([2, 4, 8].map(|n_rows| product(DType::Q4_K, n_rows)));
    all.extend([DType::F16, DType::Q8_0, DType::Q4_K].map(|format| product(format, 64)));
    all.extend([1, 64].map(experts));
    all.extend(of_experts());
    all.extend(adapters());
    all.extend([1, 32].map(|n_rows| attention(n_rows, KvType::F16)));
    all.extend([KvType::Q8, KvType::Q6, KvType::Q5, KvType::Q4].map(|kind| attention(1, kind)));
    all.extend([KvType::Q8, KvType::Q4].map(|kind| attention(32, kind)));
    all.push(merge());
    all.extend([KvType::F16, KvType::Q8, KvType::Q4].map(append));
    all.push(hadamard());
    all
}

/// Nothing is read twice from memory, and a threadgroup asks its caches for little more.
#[test]
fn bytes_are_near_the_least() {
    let q4 = attention(1, KvType::Q4);
    let products = [
        (product(DType::Q4_K, 1), 1.5),
        (product(DType::Q4_K, 64), 1.5),
    ];
    for (measured, of_caches) in products
        .into_iter()
        .chain([(attention(1, KvType::F16), 1.1), (q4, 1.1)])
    {
        let c = &measured.counters;
        let ratio = |bytes: u64| (bytes + c.written) as f64 / measured.least;
        assert!(
            ratio(c.unique_read) < 1.02,
            "{}: {}",
            measured.kernel,
            ratio(c.unique_read)
        );
        assert!(
            ratio(c.distinct_read) < of_caches,
            "{}: {}",
            measured.kernel,
            ratio(c.distinct_read)
        );
    }
}

/// The table of `docs/lab/metal.md`:
/// `cargo test --features metal --test metal -- --ignored --nocapture table`.
#[test]
#[ignore = "prints a table"]
fn table() {
    for measured in all() {
        println!("{}", measured.row());
    }
}
