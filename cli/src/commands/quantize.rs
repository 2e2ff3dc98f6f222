//! `ruvllm quantize`: the same model in a smaller type.

use crate::flags::{OverwriteArg, ThreadsArg};
use crate::io::{Failure, count, note, printable, size};
use crate::quantize::{Rows, file_type, plan, writer};
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::quant::FileType;
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
