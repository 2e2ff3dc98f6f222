//! `ruvllm quantize`: the same model in a smaller type.

use super::input::on_interrupt;
use super::model::MAX_THREADS;
use super::output::{Failure, Progress, count, note, printable, size};
use rayon::prelude::*;
use ruvllm::gguf::{Gguf, TensorInfo, Value, Writer};
use ruvllm::quant::{DType, FileType, ModelShape, dequantize_row, quantize_row};
use ruvllm::{GgufError, QuantError};
use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M
  ruvllm quantize model-q8_0.gguf small.gguf Q4_0 --allow-requantize
  ruvllm quantize model-f16.gguf model-q8_0.gguf Q8_0 --overwrite

The output appears under its name when it is complete. Start from F16, BF16 or F32 where you can:
quantising twice loses more than once.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// GGUF file to read; of a split model any part, and the output is one file
    input: PathBuf,
    /// GGUF file to write
    output: PathBuf,
    /// Type to convert to
    #[arg(value_name = "TYPE", value_parser = file_type)]
    file_type: FileType,
    /// Accept tensors that are quantised already
    #[arg(long)]
    allow_requantize: bool,
    /// Replace the output if it exists
    #[arg(long, alias = "force")]
    overwrite: bool,
    /// Threads, at most 1024; 0 or less is as many as this process may use
    #[arg(short, long, value_name = "N", default_value_t = -1, env = "LLAMA_ARG_THREADS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(..=MAX_THREADS))]
    threads: i32,
    /// Tell the type of each tensor
    #[arg(short, long)]
    verbose: bool,
}

fn file_type(name: &str) -> Result<FileType, String> {
    FileType::from_name(name).ok_or_else(|| {
        let names: Vec<String> = FileType::ALL.iter().map(FileType::to_string).collect();
        format!("there is no type {name:?}; there are {}", names.join(", "))
    })
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let start = Instant::now();
    let gguf = Gguf::open(&args.input)?;
    if args.output.exists() && !args.overwrite {
        let exists = GgufError::Exists { path: args.output.clone() };
        return Err(Failure::Work(format!("{exists}: --overwrite asks for it")));
    }
    if gguf.tensors().is_empty() {
        return Err(Failure::Work(format!("{}: there are no tensors in it", args.input.display())));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(usize::try_from(args.threads).unwrap_or(0)).build()?;

    let shape = model_shape(&gguf);
    let mut plan = Vec::new();
    for t in gguf.tensors() {
        let to = target(args, t, &shape)?;
        if args.verbose {
            note(format!("{:<40} {:>8} -> {to}", printable(&t.name), t.dtype.to_string()));
        }
        plan.push((t, to));
    }

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    // Without a handler, Ctrl-C would leave half of a temporary file behind.
    on_interrupt(move || flag.store(true, Ordering::Relaxed))?;

    let total = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
    let job = Job {
        gguf: &gguf,
        pool: &pool,
        interrupted: &interrupted,
        progress: Progress::new("quantising", total),
        done: Cell::new(0),
        failure: RefCell::new(None),
    };
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter().filter(|(key, _)| !key.starts_with("split.")) {
        writer.metadata(key, value.clone());
    }
    writer.metadata("general.quantization_version", 2u32);
    writer.metadata("general.file_type", Value::U32(args.file_type as u32));
    for &(t, to) in &plan {
        let job = &job;
        writer.tensor_with(&t.name, &t.dims, to, move |out| job.convert(t, to, out));
    }
    if args.overwrite {
        writer.overwrite();
    }
    let written = writer.write(&args.output);
    let failure = job.failure.take();
    drop(job);
    match (failure, written) {
        _ if interrupted.load(Ordering::Relaxed) => return Err(Failure::Interrupted),
        (Some(failure), _) => return Err(failure),
        (None, written) => written?,
    }
    let (before, after) =
        (gguf.file_size(), std::fs::metadata(&args.output).map_err(Failure::file(&args.output))?.len());
    note(format!(
        "{}: {} parameters, {} -> {} ({:.2} bits per weight) in {:.1} s",
        args.output.display(),
        count(total),
        size(before),
        size(after),
        after as f64 * 8.0 / total as f64,
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// What the mix of types depends on; where the file does not say, as in a model without heads.
fn model_shape(gguf: &Gguf) -> ModelShape {
    let arch = gguf.metadata().opt_str("general.architecture").ok().flatten().unwrap_or_default();
    let number = |key: &str| {
        let key = format!("{arch}.{key}");
        let metadata = gguf.metadata();
        let single = metadata.opt_u32(&key).ok().flatten();
        // Some families have one value per layer.
        single.or_else(|| metadata.opt_u32s(&key).ok().flatten()?.iter().copied().max()).map(|n| n as usize)
    };
    let n_head = number("attention.head_count").unwrap_or(1);
    ModelShape {
        n_layer: number("block_count").unwrap_or(1),
        n_head,
        n_head_kv: number("attention.head_count_kv").unwrap_or(n_head),
        n_expert: number("expert_count").unwrap_or(0),
        tied_embeddings: gguf.tensor("output.weight").is_none(),
    }
}

/// The type that a tensor gets.
fn target(args: &Args, t: &TensorInfo, shape: &ModelShape) -> Result<DType, Failure> {
    let Some(to) = args.file_type.tensor_type(&t.name, &t.dims, shape) else { return Ok(t.dtype) };
    let Some(from) = t.dtype.format() else { return Ok(t.dtype) };
    if to != t.dtype && from.block_elems > 1 && !args.allow_requantize {
        return Err(Failure::Work(format!(
            "tensor {} is quantised already ({}); start from an F16 or F32 file, or accept the loss with --allow-requantize",
            t.name, t.dtype
        )));
    }
    Ok(to)
}

struct Job<'a> {
    gguf: &'a Gguf,
    pool: &'a rayon::ThreadPool,
    interrupted: &'a AtomicBool,
    progress: Progress,
    /// Elements converted.
    done: Cell<u64>,
    failure: RefCell<Option<Failure>>,
}

/// Elements to convert between two looks at the interrupt flag.
const SLAB: usize = 1 << 22;

impl Job<'_> {
    /// Writes the data of `t` as `to`.
    fn convert(&self, t: &TensorInfo, to: DType, out: &mut dyn Write) -> io::Result<()> {
        let data = self.gguf.data(t);
        let row = t.dims[0] as usize;
        let bytes_of_row = |dtype: DType| row / dtype.block().0 as usize * dtype.block().1 as usize;
        let (from_bytes, to_bytes) = (bytes_of_row(t.dtype), bytes_of_row(to));
        let n_rows = (SLAB / row).max(1);
        let mut converted = vec![0; if to == t.dtype { 0 } else { n_rows * to_bytes }];
        for (slab_no, slab) in data.chunks(n_rows * from_bytes).enumerate() {
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let n = slab.len() / from_bytes;
            if to == t.dtype {
                out.write_all(slab)?;
            } else {
                let converted = &mut converted[..n * to_bytes];
                let outcome = self.pool.install(|| {
                    let rows = slab.par_chunks_exact(from_bytes).zip(converted.par_chunks_exact_mut(to_bytes));
                    rows.enumerate().try_for_each_init(
                        || vec![0.0; row],
                        |values, (i, (from, into))| -> Result<(), (usize, QuantError)> {
                            dequantize_row(t.dtype, from, values)
                                .and_then(|()| quantize_row(to, values, None, into))
                                .map_err(|error| (slab_no * n_rows + i, error))
                        },
                    )
                });
                if let Err((i, error)) = outcome {
                    *self.failure.borrow_mut() = Some(Failure::Work(format!("tensor {}, row {i}: {error}", t.name)));
                    return Err(io::ErrorKind::InvalidData.into());
                }
                out.write_all(converted)?;
            }
            self.done.set(self.done.get() + (n * row) as u64);
            self.progress.set(self.done.get());
        }
        Ok(())
    }
}
