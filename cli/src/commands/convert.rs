//! `ruvllm convert`: a GGUF file from a folder of Hugging Face.

use crate::convert::{Conversions, OutFile, OutType, convert, projector};
use crate::flags::{OverwriteArg, ThreadsArg};
use crate::io::Failure;
use ruvllm::quant::FileType;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm convert Qwen3-0.6B                       writes Qwen3-0.6B-BF16.gguf beside the folder
  ruvllm convert Qwen3-0.6B -o model.gguf --outtype q8_0
  ruvllm quantize model.gguf small.gguf Q4_K_M    goes on from there
  ruvllm convert gemma-3-4b-it --mmproj           the part that reads images, mmproj-gemma-3-4b-it-BF16.gguf

Checkpoints of 4 bits as AWQ and GPTQ pack them, and of FP8, are read, too. Those of 4 bits become \
Q4_0 or Q5_0, which have the same values, unless --outtype names a type.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder with config.json, model*.safetensors and the tokenizer's files
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// GGUF file to write; without it, the folder's name and the type
    #[arg(short, long, value_name = "FILE")]
    outfile: Option<PathBuf>,
    /// Type of the matrices; auto is that of the checkpoint, if that has 16 bits, and f16
    /// otherwise
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    outtype: Type,
    /// Write the projector of a model that reads images, for --mmproj, instead of the model
    #[arg(long, conflicts_with = "no_mtp")]
    mmproj: bool,
    /// Leave out blocks for multi-token prediction, which draft (--spec mtp)
    #[arg(long)]
    no_mtp: bool,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Tell the type of each tensor
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    Auto,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let what = Conversions {
        folder: &args.folder,
        outtype: match args.outtype {
            Type::F32 => OutType::One(FileType::F32),
            Type::F16 => OutType::One(FileType::F16),
            Type::Bf16 => OutType::One(FileType::BF16),
            Type::Q8_0 => OutType::One(FileType::Q8_0),
            Type::Auto => OutType::Auto,
        },
        no_mtp: args.no_mtp,
        n_threads: args.threads.number(),
        verbose: args.verbose,
    };
    let to = OutFile {
        path: args.outfile.as_deref(),
        overwrite: args.overwrite.is_given(),
    };
    match args.mmproj {
        true => projector::convert(&what, &to),
        false => convert(&what, &to),
    }
}
