//! `ruvllm merge-adapters`: one adapter from several.

use crate::flags::{ModelArgs, OverwriteArg, PlacementArgs, ThreadsArg, open_adapter};
use crate::io::{Failure, note, size};
use ruvllm::lora::{MergeMethod, MergeOptions, merge_adapters};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm merge-adapters -m model.gguf a.gguf b.gguf -o both.gguf
  ruvllm merge-adapters -m model.gguf a.gguf b.gguf --method ties --density 0.3 --rank 16 -o both.gguf
  ruvllm merge-adapters -m model.gguf a.gguf b.gguf --method slerp --weights 0.3,0.7 -o between.gguf

Adapters are merged by what they change, never factor by factor; the result is the nearest adapter of the \
rank. `linear` is the weighted mean, `task-arithmetic` the weighted sum, `svd` the sum with the largest rank \
of the adapters.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Adapters of the model, two or more
    #[arg(required = true, num_args = 2.., value_name = "ADAPTER")]
    adapters: Vec<PathBuf>,
    /// How to merge: linear, svd, ties, dare, slerp or task-arithmetic
    #[arg(long, value_name = "METHOD", default_value = "task-arithmetic", value_parser = method)]
    method: MergeMethod,
    /// Weight of each adapter, separated by commas [default: 1 each]
    #[arg(
        long,
        value_name = "W,W,…",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    weights: Vec<f32>,
    /// Rank of the result [default: the sum of the adapters' ranks; svd: their largest]
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..))]
    rank: Option<u32>,
    /// Fraction of the values that ties and dare keep
    #[arg(long, value_name = "PART", default_value_t = MergeOptions::default().density)]
    density: f64,
    /// Seed of dare
    #[arg(long, value_name = "N", default_value_t = MergeOptions::default().seed)]
    seed: u64,
    /// GGUF file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
}

fn method(name: &str) -> Result<MergeMethod, String> {
    let names: Vec<&str> = MergeMethod::ALL.iter().map(|(name, _)| *name).collect();
    let found = MergeMethod::ALL
        .iter()
        .find(|(known, _)| *known == name.replace('_', "-"));
    found
        .map(|(_, method)| *method)
        .ok_or_else(|| format!("no method {name:?}; there are {}", names.join(", ")))
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    args.overwrite.check(&args.output)?;
    let (n, n_weights) = (args.adapters.len(), args.weights.len());
    if n_weights != 0 && n_weights != n {
        return Err(Failure::Usage(format!(
            "--weights has {n_weights} numbers, there are {n} adapters"
        )));
    }
    args.threads.pool().build_global()?;
    let model = args.model.open(&PlacementArgs::default())?;
    let adapters = args
        .adapters
        .iter()
        .map(|path| open_adapter(path, &model))
        .collect::<Result<Vec<_>, _>>()?;
    let weights = args.weights.iter().copied().chain(std::iter::repeat(1.0));
    let weighted: Vec<_> = adapters.iter().zip(weights).collect();
    let rank = args.rank.map(|rank| rank as usize);
    let options = MergeOptions {
        method: args.method,
        rank,
        density: args.density,
        seed: args.seed,
    };
    let merged = merge_adapters(&weighted, &options)?;
    merged.save(&args.output)?;
    let bytes = std::fs::metadata(&args.output)
        .map_err(Failure::file(&args.output))?
        .len();
    note(format!(
        "{}: rank {}, {}",
        args.output.display(),
        merged.max_rank(),
        size(bytes)
    ));
    Ok(())
}
