//! How well a model predicts a text, measured as llama.cpp measures it, so that numbers can be
//! compared.
//!
//! The tokens are cut into chunks of `n_ctx`. In each, only the tokens of the second half are
//! scored, so that all of them have at least half a context before them; the first token of a chunk
//! is replaced by the beginning-of-text token where the model wants one.

use crate::io::{Failure, Progress};
use ruvllm::Session;

/// Context length of llama.cpp's tool.
pub(crate) const DEFAULT_CTX: usize = 512;

/// The last token of a chunk is only read, so that two are left to score one of them.
pub(crate) const LEAST_CTX: usize = 4;

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
    let mut score = Score::default();
    let n_ctx = session.sequence().n_ctx();
    for (i, chunk) in tokens.chunks_exact_mut(n_ctx).take(n_chunks).enumerate() {
        score_chunk(session, chunk, |at, logits, token| {
            score.add(logits, token);
            progress.set((i * n_ctx + at) as u64);
            Ok(())
        })?;
        each(&score)?;
    }
    Ok(score)
}

/// Computes a chunk; `each` gets the logits at each scored position, and the token that follows.
pub(crate) fn score_chunk(
    session: &mut Session,
    chunk: &mut [u32],
    mut each: impl FnMut(usize, &[f32], u32) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (n_ctx, tokenizer) = (chunk.len(), session.model().tokenizer());
    let bos = tokenizer.and_then(|tokenizer| tokenizer.bos().filter(|_| tokenizer.add_bos()));
    let first_token = chunk[0];
    if let Some(bos) = bos {
        chunk[0] = bos;
    }
    session.clear();
    let mut outcome = Ok(());
    // What follows the last token is in the next chunk, so its logits are not needed.
    session
        .hooks()
        .prefill_each(&chunk[..n_ctx - 1], n_ctx / 2, |at, logits| {
            if outcome.is_ok() {
                outcome = each(at, logits, chunk[at + 1]);
            }
        })?;
    chunk[0] = first_token;
    outcome
}

/// Sums over scored tokens of `−ln p` and its square.
#[derive(Default)]
pub(crate) struct Score {
    pub(crate) n: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Score {
    pub(crate) fn add(&mut self, logits: &[f32], token: u32) {
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
    pub(crate) fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Standard error of the perplexity, if there is a spread to tell it from.
    pub(crate) fn error(&self) -> Option<f64> {
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
