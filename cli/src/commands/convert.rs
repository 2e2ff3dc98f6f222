//! `ruvllm convert`: a GGUF file from a folder of Hugging Face.

use crate::convert::{ConvertArgs, convert};
use crate::io::Failure;

const EXAMPLES: &str = "\
Examples:
  ruvllm convert Qwen3-0.6B                       writes Qwen3-0.6B-BF16.gguf beside the folder
  ruvllm convert Qwen3-0.6B -o model.gguf --outtype q8_0
  ruvllm quantize model.gguf small.gguf Q4_K_M    goes on from there";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    convert: ConvertArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    convert(&args.convert)
}
