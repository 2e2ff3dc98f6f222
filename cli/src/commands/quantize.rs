//! `ruvllm quantize`: the same model in a smaller type.

use crate::flags::{OverwriteArg, ThreadsArg};
use crate::io::{Failure, count, note, printable, same_file, size};
use crate::quantize::{Choice, Importance, NamedType, Rows, file_type, plan, tensor_type, writer};
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::quant::{DType, FileType};
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M
  ruvllm quantize model-q8_0.gguf small.gguf Q4_0 --allow-requantize
  ruvllm quantize model-f16.gguf model-q8_0.gguf Q8_0 --overwrite
  ruvllm imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf
  ruvllm quantize model-f16.gguf small.gguf IQ2_M --imatrix imatrix.gguf
  ruvllm quantize model-f16.gguf small.gguf Q4_K_M --tensor-type ffn_down=Q6_K

The output appears under its name when it is complete. Start from F16, BF16 or F32 where you can:
quantising twice loses more than once. Types below 4 bits need an importance matrix to be good.";

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
    /// Importance matrix of the model, as `ruvllm imatrix` and llama-imatrix write them
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Use the matrix for tensors alone whose names contain this; repeatable
    #[arg(long, value_name = "PART", requires = "imatrix", action = clap::ArgAction::Append)]
    include_weights: Vec<String>,
    /// Do not use the matrix for tensors whose names contain this; repeatable
    #[arg(long, value_name = "PART", requires = "imatrix", action = clap::ArgAction::Append)]
    exclude_weights: Vec<String>,
    /// One type for all tensors, not a mix
    #[arg(long)]
    pure: bool,
    /// Type of the output matrix
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    output_tensor_type: Option<DType>,
    /// Type of the token embeddings
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    token_embedding_type: Option<DType>,
    /// Type of the tensors whose names the regular expression is found in; repeatable, the first
    /// that matches counts
    #[arg(long, value_name = "REGEX=TYPE", action = clap::ArgAction::Append)]
    tensor_type: Vec<NamedType>,
    /// Leave output.weight as it is
    #[arg(long)]
    leave_output_tensor: bool,
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
    if same_file(&args.input, &args.output) {
        return Err(Failure::Usage(format!(
            "{} is the input itself; write to another file",
            args.output.display()
        )));
    }
    if gguf.tensors().is_empty() {
        return Err(Failure::Work(format!(
            "{}: there are no tensors in it",
            args.input.display()
        )));
    }

    let choice = args.choice()?;
    let plan = plan(&gguf, &choice)?;
    if args.verbose {
        for planned in &plan {
            let t = planned.tensor;
            note(format!(
                "{:<40} {:>8} -> {}{}",
                printable(&t.name),
                t.dtype.to_string(),
                planned.to,
                if planned.importance.is_some() {
                    ", by importance"
                } else {
                    ""
                }
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

impl Args {
    fn choice(&self) -> Result<Choice, Failure> {
        let read = |path| -> Result<Importance, Failure> {
            let mut importance = Importance::read(path)?;
            importance.keep(&self.include_weights, &self.exclude_weights);
            Ok(importance)
        };
        Ok(Choice {
            file_type: self.file_type,
            allow_requantize: self.allow_requantize,
            pure: self.pure,
            output: self.output_tensor_type,
            embedding: self.token_embedding_type,
            leave_output: self.leave_output_tensor,
            named: self.tensor_type.clone(),
            importance: self.imatrix.as_deref().map(read).transpose()?,
        })
    }
}
