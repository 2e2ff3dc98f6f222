//! `ruvllm perplexity`: how well a model predicts a text, measured as llama.cpp measures it, so
//! that numbers can be compared.
//!
//! The tokens are cut into chunks of `n_ctx`. In each, only the tokens of the second half are
//! scored, so that all of them have at least half a context before them; the first token of a chunk
//! is replaced by the beginning-of-text token where the model wants one.

use crate::commands::generate::no_tokenizer;
use crate::flags::{ModelArgs, ResidenceArgs, SessionArgs, kv_bytes, session};
use crate::io::{
    Failure, Progress, file_or_pipe, milliseconds, note, print, print_json, read_text,
    without_last_newline,
};
use ruvllm::exec::{KvType, Session};
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

/// Context length of llama.cpp's tool.
pub(crate) const DEFAULT_CTX: usize = 512;
/// The last token of a chunk is only read, so that two are left to score one of them.
pub(crate) const LEAST_CTX: usize = 4;

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

/// How many chunks of `n_ctx` there are.
///
/// # Errors
/// If there are fewer than two: a single one says little.
pub(crate) fn n_chunks(tokens: &[u32], n_ctx: usize) -> Result<usize, Failure> {
    match tokens.len() / n_ctx {
        0 | 1 => Err(Failure::Work(format!(
            "the text has {} tokens; a context of {n_ctx} needs at least two chunks, {} tokens: use a longer text or a smaller -c",
            tokens.len(),
            2 * n_ctx
        ))),
        n => Ok(n),
    }
}

/// Scores the first `n_chunks` chunks, each of as many tokens as `session` holds; `each` hears of
/// the score so far after every chunk.
pub(crate) fn score(
    session: &mut Session,
    tokens: &mut [u32],
    n_chunks: usize,
    progress: &Progress,
    mut each: impl FnMut(&Score) -> Result<(), Failure>,
) -> Result<Score, Failure> {
    let n_ctx = session.n_ctx();
    let first = n_ctx / 2;
    let bos = session
        .model()
        .tokenizer()
        .and_then(|tokenizer| tokenizer.bos().filter(|_| tokenizer.add_bos()));
    let mut score = Score::default();
    for (i, chunk) in tokens.chunks_exact_mut(n_ctx).take(n_chunks).enumerate() {
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        session.clear();
        // What follows the last token is in the next chunk, so its logits are not needed.
        session.prefill_each(&chunk[..n_ctx - 1], first, |at, logits| {
            score.add(logits, chunk[at + 1]);
            progress.set((i * n_ctx + at) as u64);
        })?;
        each(&score)?;
    }
    Ok(score)
}

/// Sums over scored tokens of `−ln p` and its square.
#[derive(Default)]
pub(crate) struct Score {
    n: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Score {
    fn add(&mut self, logits: &[f32], token: u32) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|&logit| f64::from((logit - max).exp()))
            .sum();
        let nll = sum.ln() - f64::from(logits[token as usize] - max);
        self.n += 1;
        self.sum += nll;
        self.sum_of_squares += nll * nll;
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }

    /// `e` to the mean.
    fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Standard error of the perplexity, if there is a spread to tell it from.
    fn error(&self) -> Option<f64> {
        let variance = self.sum_of_squares / self.n as f64 - self.mean().powi(2);
        (variance > 0.0 && self.n > 1)
            .then(|| (variance / (self.n - 1) as f64).sqrt() * self.perplexity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn score_of_known_probabilities() {
        let mut score = Score::default();
        // p = 1/2 and 1/4: mean of -ln p is ln(8)/2.
        score.add(&[0.0, 0.0], 1);
        score.add(&[5.0, 5.0, 5.0, 5.0], 3);
        let ppl = 8f64.sqrt();
        assert!((score.perplexity() - ppl).abs() < 1e-12);
        // The two differ from their mean by ln(2)/2, which is also the standard error of the mean.
        assert!((score.error().unwrap() - 2f64.ln() / 2.0 * ppl).abs() < 1e-9);
    }
}
