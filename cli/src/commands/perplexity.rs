//! `ruvllm perplexity`: how well a model predicts a text.

use crate::bench::perplexity::{DEFAULT_CTX, LEAST_CTX, n_chunks, score};
use crate::flags::{ModelArgs, ResidenceArgs, SessionArgs, kv_bytes, no_tokenizer, session};
use crate::io::{
    Failure, Progress, file_or_pipe, milliseconds, note, print, print_json, read_text,
    without_last_newline,
};
use ruvllm::kv::KvType;
use serde_json::json;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm perplexity -m model.gguf -f wiki.test.raw
  ruvllm perplexity -m model.gguf -f wiki.test.raw -c 2048 --chunks 20
  ruvllm perplexity -m model.gguf -f wiki.test.raw --json

Lower is better. Numbers are comparable for the same text, -c and vocabulary only; -c is 512 unless \
given, as in llama.cpp.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    residence: ResidenceArgs,
    /// Text to predict, without its last line end; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Most chunks to compute [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    chunks: Option<i64>,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    session: SessionArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = without_last_newline(read_text(&file_or_pipe(args.file.as_ref(), "-f FILE")?)?);
    let options = args.session.options(Some(DEFAULT_CTX), KvType::default());
    if args.chunks == Some(0) {
        return Err(Failure::Usage(
            "--chunks 0 leaves nothing to compute; -1 is all".into(),
        ));
    }
    if options.n_ctx.is_some_and(|n| (1..LEAST_CTX).contains(&n)) {
        return Err(Failure::Usage(format!(
            "-c: at least {LEAST_CTX} tokens, of which the second half is scored"
        )));
    }
    let model = args.model.open(&args.residence)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let mut session = session(&model, &args.session, &options, options.n_batch)?;

    let mut tokens = tokenizer.encode(&text, true, false);
    let n_ctx = session.n_ctx();
    let limit = args
        .chunks
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let n_chunks = n_chunks(&tokens, n_ctx)?.min(limit);
    if !args.json {
        note(format!("perplexity of {n_chunks} chunks of {n_ctx} tokens"));
    }

    let start = Instant::now();
    let progress = match !args.json && io::stdout().is_terminal() {
        true => Progress::hidden(),
        false => Progress::new("perplexity", (n_chunks * n_ctx) as u64),
    };
    let mut running = Vec::with_capacity(n_chunks);
    let score = score(&mut session, &mut tokens, n_chunks, &progress, |score| {
        running.push(score.perplexity());
        if args.json {
            Ok(())
        } else {
            print(format!("[{}]{:.4},", running.len(), score.perplexity()))
        }
    })?;
    drop(progress);

    let error = score.error();
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "ppl": score.perplexity(),
            "ppl_error": error,
            "nll": score.mean(),
            "n_ctx": n_ctx,
            "n_chunks": n_chunks,
            "n_tokens": tokens.len(),
            "n_scored": score.n,
            "chunks": running,
            "kv_bytes": kv_bytes(&session),
            "ms": milliseconds(start.elapsed()),
        }));
    }
    match error {
        Some(error) => print(format!(
            "\nFinal estimate: PPL = {:.4} +/- {error:.5}\n",
            score.perplexity()
        )),
        None => print(format!(
            "\nFinal estimate: PPL = {:.4}\n",
            score.perplexity()
        )),
    }
}
