//! `ruvllm bench`: everything that measures.

#[cfg(feature = "vision")]
use crate::bench::images;
use crate::bench::{batch, formats, kernels, learning, replay, speed};
use crate::io::Failure;
use clap::Subcommand;

const EXAMPLES: &str = "\
Examples:
  ruvllm bench -m model.gguf              pp512 and tg128, as llama-bench
  ruvllm bench speed --help               all flags of a subcommand

Without a subcommand the flags are those of `speed`.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Measure speed, and what it means for the machine (the default subcommand)
    Speed(Box<speed::Args>),
    /// Measure every kernel against the machine's limits
    Kernels(kernels::Args),
    /// Compare weight formats: size, loss, speed
    Formats(Box<formats::Args>),
    /// Measure what speculative decoding (drafts) gains
    Replay(Box<replay::Args>),
    /// Measure speed with many sequences side by side
    Batch(Box<batch::Args>),
    /// Measure how long an image takes to the first token
    #[cfg(feature = "vision")]
    Images(Box<images::Args>),
    /// Measure how much online learning helps on a text
    Learning(Box<learning::Args>),
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Speed(args) => speed::run(args),
        What::Kernels(args) => kernels::run(args),
        What::Formats(args) => formats::run(args),
        What::Replay(args) => replay::run(args),
        What::Batch(args) => batch::run(args),
        #[cfg(feature = "vision")]
        What::Images(args) => images::run(args),
        What::Learning(args) => learning::run(args),
    }
}
