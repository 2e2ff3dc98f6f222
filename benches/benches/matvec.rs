//! Products of weights with 1 to 16 activation rows, against the bandwidth of plain reading in the
//! same run: `cargo bench -p ruvllm-benches --bench matvec -- 'Q4_K/avx512'`.
//!
//! Each line that this prints says how many bytes of weights went through per second, at best,
//! which part that is of reading them, and what `m` rows cost in units of one. `memory` is 256 MiB
//! of weights, `L2` 256 KiB.

use criterion::Criterion;
use ruvllm::arch::{ActForm, Acts, Arch, BlockP16, BlockQ16, ColumnsMut};
use ruvllm::quant::{DType, FORMATS};
use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Values per row.
const N: usize = 2048;
const MEMORY: usize = 256 << 20;
const L2: usize = 256 << 10;
/// Bytes per call, as the engine splits products into tasks.
const TASK: usize = 48 << 10;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(300))
        .without_plots()
        .configure_from_args();
    // Every f16 among these bytes is between 0.04 and 2: no denormal slows a format down.
    let mut state = 1u32;
    let weights: Vec<u8> = (0..MEMORY)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0x2A | (state >> 24) as u8 & 0x15
        })
        .collect();
    let mut best = HashMap::new();
    for format in FORMATS {
        for arch in Arch::available() {
            for (place, bytes, threads) in [
                ("memory", MEMORY, 1),
                ("memory-2-threads", MEMORY, 2),
                ("L2", L2, 1),
            ] {
                let row = N / format.block_elems * format.block_bytes;
                let w = &weights[..bytes / row * row];
                for m in [1, 2, 4, 8, 16] {
                    let name = format!("{}/{}/{place}/m={m}", format.name, arch.name());
                    let (mut read, acts) = (Duration::MAX, Rows::new(arch, m));
                    let x = acts.acts(arch.act_form(format.dtype));
                    let mut product = Duration::MAX;
                    criterion.bench_function(&name, |b| {
                        b.iter_custom(|iterations| {
                            let start = Instant::now();
                            for _ in 0..iterations {
                                product = product
                                    .min(time(|| multiply(arch, format.dtype, w, &x, threads)));
                            }
                            let elapsed = start.elapsed();
                            if m == 1 && bytes == MEMORY {
                                read = read.min(time(|| read_all(w, threads)));
                            }
                            elapsed
                        });
                    });
                    if product == Duration::MAX {
                        continue; // filtered out
                    }
                    let one = *best
                        .entry((format.name, arch.name(), place))
                        .or_insert(product);
                    let rate = |time: Duration| w.len() as f64 / time.as_secs_f64() / 1e9;
                    print!("{name}: {:.1} GB/s", rate(product));
                    if read != Duration::MAX {
                        print!(
                            ", {:.2} of {:.1} GB/s",
                            rate(product) / rate(read),
                            rate(read)
                        );
                    }
                    if m > 1 {
                        print!(
                            ", {:.2} times one row",
                            product.as_secs_f64() / one.as_secs_f64()
                        );
                    }
                    println!();
                }
            }
        }
    }
    criterion.final_summary();
}

fn time(f: impl FnOnce()) -> Duration {
    let start = Instant::now();
    f();
    start.elapsed()
}

/// Calls `f` with equal parts of `w` on as many threads.
fn split(w: &[u8], unit: usize, threads: usize, f: impl Fn(&[u8]) + Sync) {
    let part = (w.len() / unit).div_ceil(threads) * unit;
    std::thread::scope(|scope| {
        let mut parts = w.chunks(part);
        let first = parts.next().unwrap_or_default();
        for part in parts {
            scope.spawn(|| f(part));
        }
        f(first);
    });
}

/// Reads in four places at a time: one alone does not keep the memory busy.
fn read_all(w: &[u8], threads: usize) {
    split(w, 1 << 12, threads, |w| {
        let (lines, _) = w.as_chunks::<64>();
        let (parts, _) = lines.split_at(lines.len() / 4 * 4);
        let quarter = parts.len() / 4;
        let mut sums = [[0u64; 8]; 4];
        for i in 0..quarter {
            for (part, sums) in sums.iter_mut().enumerate() {
                for (sum, x) in sums.iter_mut().zip(parts[part * quarter + i].as_chunks().0) {
                    *sum ^= u64::from_le_bytes(*x);
                }
            }
        }
        black_box(sums);
    });
}

/// Activation rows in the form that a product wants.
struct Rows {
    x: Vec<f32>,
    q16: Vec<BlockQ16>,
    p16: Vec<BlockP16>,
}

impl Rows {
    fn new(arch: Arch, m: usize) -> Rows {
        let x: Vec<f32> = (0..m * N)
            .map(|i| (i * 7919 % 2001) as f32 / 1000.0 - 1.0)
            .collect();
        let mut q16 = vec![bytemuck::Zeroable::zeroed(); m * BlockQ16::per_row(N)];
        let mut p16 = vec![bytemuck::Zeroable::zeroed(); m * BlockP16::per_row(N)];
        // A row of whole blocks.
        arch.quantize_q16(&x, &mut q16);
        arch.quantize_p16(&x, &mut p16);
        Rows { x, q16, p16 }
    }

    fn acts(&self, form: ActForm) -> Acts<'_> {
        match form {
            ActForm::F32 => Acts::F32 { x: &self.x, n: N },
            ActForm::Q16 => Acts::Q16 { x: &self.q16, n: N },
            ActForm::P16 => Acts::P16 { x: &self.p16, n: N },
        }
    }
}

fn multiply(arch: Arch, dtype: DType, w: &[u8], x: &Acts<'_>, threads: usize) {
    let format = dtype.float_format();
    let row = N / format.block_elems * format.block_bytes;
    split(w, row, threads, |w| {
        let task_rows = (TASK / row).next_multiple_of(16);
        let mut y = vec![0.0; x.m() * task_rows];
        for w in w.chunks(task_rows * row) {
            let rows = w.len() / row;
            let y = &mut y[..x.m() * rows];
            arch.matvec(dtype, &mut ColumnsMut::new(y, x.m(), rows), w, x);
            black_box(y);
        }
    });
}
