//! `ruvllm quantize`: the same model in a smaller type.

use crate::flags::ThreadsArg;
use crate::io::{Failure, OverwriteArg, count, note, printable, size};
use crate::quantize::rows::{Conversion, Rows};
use ruvllm::gguf::{Gguf, TensorInfo, Value, Writer};
use ruvllm::quant::{DType, FileType, ModelShape};
use std::path::PathBuf;
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
pub(crate) struct Args {
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
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Tell the type of each tensor
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn file_type(name: &str) -> Result<FileType, String> {
    FileType::from_name(name).ok_or_else(|| {
        let names: Vec<String> = FileType::ALL.iter().map(FileType::to_string).collect();
        format!("there is no type {name:?}; there are {}", names.join(", "))
    })
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let start = Instant::now();
    let gguf = Gguf::open(&args.input)?;
    args.overwrite.check(&args.output)?;
    if gguf.tensors().is_empty() {
        return Err(Failure::Work(format!(
            "{}: there are no tensors in it",
            args.input.display()
        )));
    }

    let plan = plan(&gguf, args.file_type, args.allow_requantize)?;
    if args.verbose {
        for (t, to) in &plan {
            note(format!(
                "{:<40} {:>8} -> {to}",
                printable(&t.name),
                t.dtype.to_string()
            ));
        }
    }
    let total = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
    let rows = Rows::new("quantising", total, args.threads)?;
    let mut writer = writer(&gguf, &plan, args.file_type, &rows);
    args.overwrite.apply(&mut writer);
    let written = writer.write(&args.output);
    rows.finish(written)?;
    let (before, after) = (
        gguf.file_size(),
        std::fs::metadata(&args.output)
            .map_err(Failure::file(&args.output))?
            .len(),
    );
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

/// The tensors and the types that they get.
pub(crate) fn plan(
    gguf: &Gguf,
    file_type: FileType,
    allow_requantize: bool,
) -> Result<Vec<(&TensorInfo, DType)>, Failure> {
    let shape = model_shape(gguf);
    let to = |t| Ok((t, target(t, file_type, allow_requantize, &shape)?));
    gguf.tensors().iter().map(to).collect()
}

/// The file of that plan, converted while it is written.
pub(crate) fn writer<'a>(
    gguf: &'a Gguf,
    plan: &[(&'a TensorInfo, DType)],
    file_type: FileType,
    rows: &'a Rows,
) -> Writer<'a> {
    let mut writer = Writer::new();
    for (key, value) in gguf
        .metadata()
        .iter()
        .filter(|(key, _)| !key.starts_with("split."))
    {
        writer.metadata(key, value.clone());
    }
    writer.metadata("general.quantization_version", 2u32);
    writer.metadata("general.file_type", Value::U32(file_type as u32));
    for &(t, to) in plan {
        let n = t.dims[0] as usize;
        let (n_rows, data) = ((t.n_elems() / t.dims[0]) as usize, gguf.data(t));
        let row_bytes = data.len() / n_rows;
        let conversion = Conversion {
            n,
            from: t.dtype,
            to,
            change: None,
        };
        writer.tensor_with(&t.name, &t.dims, to, move |out| {
            rows.write(
                &t.name,
                n_rows,
                |i| data[i * row_bytes..(i + 1) * row_bytes].into(),
                conversion,
                out,
            )
        });
    }
    writer
}

/// What the mix of types depends on; where the file does not say, as in a model without heads.
fn model_shape(gguf: &Gguf) -> ModelShape {
    let arch = gguf
        .metadata()
        .opt_str("general.architecture")
        .ok()
        .flatten()
        .unwrap_or_default();
    let number = |key: &str| {
        let key = format!("{arch}.{key}");
        let metadata = gguf.metadata();
        let single = metadata.opt_u32(&key).ok().flatten();
        // Some families have one value per layer.
        single
            .or_else(|| {
                metadata
                    .opt_u32s(&key)
                    .ok()
                    .flatten()?
                    .iter()
                    .copied()
                    .max()
            })
            .map(|n| n as usize)
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
fn target(
    t: &TensorInfo,
    file_type: FileType,
    allow_requantize: bool,
    shape: &ModelShape,
) -> Result<DType, Failure> {
    let Some(to) = file_type.tensor_type(&t.name, &t.dims, shape) else {
        return Ok(t.dtype);
    };
    let Some(from) = t.dtype.format() else {
        return Ok(t.dtype);
    };
    if to != t.dtype && from.block_elems > 1 && !allow_requantize {
        return Err(Failure::Work(format!(
            "tensor {} is quantised already ({}); start from an F16 or F32 file, or accept the loss with --allow-requantize",
            t.name, t.dtype
        )));
    }
    Ok(to)
}
