//! `ruvllm rerank`: documents in the order in which they answer a query.

use crate::flags::{ModelArgs, PlacementArgs, ThreadsArg, engine};
use crate::io::{Failure, file_or_pipe, print, read_text};
use ruvllm::Reranker;
use ruvllm::SessionOptions;
use ruvllm::engine::EngineOptions;
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm rerank -m bge-reranker.gguf -p \"What is a panda?\" -f documents.txt
  ruvllm rerank -m qwen3-reranker.gguf -p \"What is a panda?\" --top-n 3 --json < documents.txt

Each line is a document, a blank one too. Each is written with its score and its index among them, best first.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// What the documents should answer
    #[arg(short = 'p', long, value_name = "TEXT", allow_hyphen_values = true)]
    query: String,
    /// File of documents; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Only the best N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top_n: Option<u32>,
    /// A JSON array of index, score and text
    #[arg(long)]
    json: bool,
    /// Maximum number of tokens of a pass; a longer document has a pass of its own
    #[arg(short, long, value_name = "N", default_value_t = 512, env = "LLAMA_ARG_BATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    placement: PlacementArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = read_text(&file_or_pipe(args.file.as_ref(), "-f FILE")?)?;
    let documents: Vec<&str> = text.lines().collect();
    let model = args.model.open(&args.placement)?;
    let engine = engine(
        &model,
        args.threads.number(),
        false,
        &SessionOptions::default(),
        EngineOptions::default(),
    )?;
    let reranker = Reranker::new(&engine)?.n_batch(args.batch_size as usize);
    let scores = reranker.rank(&args.query, &documents)?;
    let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(args.top_n.map_or(usize::MAX, |n| n as usize));
    if args.json {
        let all = ranked
            .iter()
            .map(|&(i, score)| json!({"index": i, "score": score, "text": documents[i]}));
        return print(format!("{:#}\n", json!(all.collect::<Vec<_>>())));
    }
    let mut out = String::new();
    for (i, score) in ranked {
        let _ = writeln!(out, "{score:.6}\t{i}\t{}", documents[i]);
    }
    print(out)
}
