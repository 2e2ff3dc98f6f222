//! How far a model's distributions are from those of another one, whose log-probabilities a file
//! holds: that of llama.cpp's `llama-perplexity --kl-divergence-base`.
//!
//! The file: `_logits_`, then as 32-bit integers the context length, the size of the vocabulary, the
//! number of chunks, and the tokens. Then for each scored token its distribution: step and least
//! log-probability as `f32`, and a 16-bit code for each token of the vocabulary, an even number of
//! them.

use super::perplexity::{Score, score_chunk};
use crate::io::{Failure, Progress};
use ruvllm::Session;
use ruvllm::gguf::NewFile;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"_logits_";

/// Log-probabilities further below the largest are raised to this distance, as in llama.cpp.
const DEPTH: f32 = 16.0;

/// What a file of log-probabilities begins with.
#[derive(Debug, PartialEq)]
pub(crate) struct BaseHead {
    pub(crate) n_ctx: usize,
    pub(crate) n_vocab: usize,
    /// Of whole chunks.
    pub(crate) tokens: Vec<u32>,
}

impl BaseHead {
    /// Writes the beginning of a file.
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        out.write_all(MAGIC)?;
        let n_chunks = self.tokens.len() / self.n_ctx;
        for n in [self.n_ctx, self.n_vocab, n_chunks] {
            out.write_all(&(n as i32).to_le_bytes())?;
        }
        for &token in &self.tokens {
            out.write_all(&token.to_le_bytes())?;
        }
        Ok(())
    }
}

/// A file of log-probabilities that is gone afterwards.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes the log-probabilities of the first `n_chunks` chunks of as many tokens as the session
/// holds.
pub(crate) fn write_base(
    session: &mut Session,
    tokens: &[u32],
    n_chunks: usize,
    path: &Path,
    progress: &Progress,
) -> Result<Score, Failure> {
    let n_ctx = session.sequence().n_ctx();
    let head = BaseHead {
        n_ctx,
        n_vocab: session.model().hparams().n_vocab,
        tokens: tokens[..n_ctx * n_chunks].to_vec(),
    };
    let failed = Failure::file(path);
    let mut file = NewFile::create(path, false).map_err(&failed)?;
    head.write(&mut file).map_err(&failed)?;
    let (mut score, mut tokens) = (Score::default(), head.tokens);
    for (i, chunk) in tokens.chunks_exact_mut(n_ctx).enumerate() {
        score_chunk(session, chunk, |at, logits, token| {
            score.add(logits, token);
            progress.set((i * n_ctx + at) as u64);
            write_distribution(&mut file, logits).map_err(&failed)
        })?;
    }
    file.finish().map_err(&failed)?;
    Ok(score)
}

/// Writes the distribution of some logits.
fn write_distribution(out: &mut impl Write, logits: &[f32]) -> std::io::Result<()> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = logits.iter().copied().fold(f32::INFINITY, f32::min);
    let min = min.max(max - DEPTH);
    let step = (max - min) / 65535.0;
    out.write_all(&step.to_le_bytes())?;
    out.write_all(&(min - max - log_sum(logits, max)).to_le_bytes())?;
    let per_step = if step > 0.0 { 1.0 / step } else { 0.0 };
    for &logit in logits {
        let code = ((logit - min).max(0.0) * per_step).round() as u16;
        out.write_all(&code.to_le_bytes())?;
    }
    if logits.len() % 2 == 1 {
        out.write_all(&[0; 2])?;
    }
    Ok(())
}

/// `ln Σ exp(logit − max)`.
fn log_sum(logits: &[f32], max: f32) -> f32 {
    let sum: f64 = logits.iter().map(|&x| f64::from((x - max).exp())).sum();
    sum.ln() as f32
}

/// A file of log-probabilities.
pub(crate) struct Base {
    pub(crate) head: BaseHead,
    rest: BufReader<File>,
    /// A distribution, as stored.
    bytes: Vec<u8>,
}

impl Base {
    /// Opens a file and reads what it begins with.
    ///
    /// # Errors
    /// If it is no such file, or ends too early for what it says it holds.
    pub(crate) fn open(path: &Path) -> Result<Base, Failure> {
        let wrong = |what: &str| Failure::Work(format!("{}: {what}", path.display()));
        let file = File::open(path).map_err(Failure::file(path))?;
        let length = file.metadata().map_err(Failure::file(path))?.len();
        let mut rest = BufReader::with_capacity(1 << 20, file);
        let mut head = [0; 20];
        rest.read_exact(&mut head)
            .map_err(|_| wrong("too short for a file of log-probabilities"))?;
        if &head[..8] != MAGIC {
            return Err(wrong(
                "not a file of log-probabilities of llama-perplexity or ruvllm",
            ));
        }
        let number = |i: usize| {
            let bytes = [head[i], head[i + 1], head[i + 2], head[i + 3]];
            usize::try_from(i32::from_le_bytes(bytes)).unwrap_or(0)
        };
        let (n_ctx, n_vocab, n_chunks) = (number(8), number(12), number(16));
        if n_ctx < 4 || n_vocab == 0 || n_chunks == 0 {
            return Err(wrong(
                "a context, vocabulary or number of chunks that cannot be",
            ));
        }
        let scored = (n_ctx - 1 - n_ctx / 2) as u64;
        let distribution = 8 + 2 * (n_vocab as u64).next_multiple_of(2);
        let expected = (n_chunks as u64)
            .checked_mul(4 * n_ctx as u64)
            .and_then(|tokens| {
                let chunks = (n_chunks as u64).checked_mul(scored)?;
                chunks.checked_mul(distribution)?.checked_add(tokens + 20)
            });
        if expected.is_none_or(|expected| length < expected) {
            return Err(wrong("it ends before the last of its chunks"));
        }
        let mut bytes = vec![0; 4 * n_ctx * n_chunks];
        rest.read_exact(&mut bytes).map_err(Failure::file(path))?;
        let tokens = bytes.as_chunks::<4>().0.iter();
        let tokens: Vec<u32> = tokens.map(|&b| u32::from_le_bytes(b)).collect();
        if tokens.iter().any(|&token| token as usize >= n_vocab) {
            return Err(wrong("a token outside of its vocabulary"));
        }
        Ok(Base {
            head: BaseHead {
                n_ctx,
                n_vocab,
                tokens,
            },
            rest,
            bytes: vec![0; distribution as usize],
        })
    }

    /// How far the model of a session is from this one, over the first `n_chunks` chunks of the
    /// file at `path`.
    pub(crate) fn compare(
        &mut self,
        session: &mut Session,
        n_chunks: usize,
        path: &Path,
        progress: &Progress,
    ) -> Result<Divergence, Failure> {
        let (mut divergence, mut log_probs) = (Divergence::default(), Vec::new());
        let (n_ctx, mut tokens) = (self.head.n_ctx, self.head.tokens.clone());
        for (i, chunk) in tokens.chunks_exact_mut(n_ctx).take(n_chunks).enumerate() {
            score_chunk(session, chunk, |at, logits, token| {
                self.next(&mut log_probs).map_err(Failure::file(path))?;
                divergence.add(logits, &log_probs, token);
                progress.set((i * n_ctx + at) as u64);
                Ok(())
            })?;
        }
        Ok(divergence)
    }

    /// The next distribution as log-probabilities.
    fn next(&mut self, into: &mut Vec<f32>) -> std::io::Result<()> {
        self.rest.read_exact(&mut self.bytes)?;
        let (head, codes) = self.bytes.split_at(8);
        let float = |i: usize| f32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
        let (step, least) = (float(0), float(4));
        let codes = codes.as_chunks::<2>().0.iter().take(self.head.n_vocab);
        into.clear();
        into.extend(codes.map(|&code| step * f32::from(u16::from_le_bytes(code)) + least));
        Ok(())
    }
}

/// What is measured token by token.
#[derive(Default)]
pub(crate) struct Divergence {
    /// Kullback-Leibler divergence of the model from the base.
    kl: Vec<f64>,
    /// Difference of the probabilities of the token that follows.
    p_diff: Vec<f64>,
    /// How well the model predicts the text.
    pub(crate) score: Score,
    nll_base: f64,
    n_same_top: usize,
}

impl Divergence {
    /// Adds a token, given the logits of the model and the log-probabilities of the base.
    pub(crate) fn add(&mut self, logits: &[f32], base: &[f32], token: u32) {
        let largest = |x: &[f32]| {
            let first = x.iter().enumerate();
            first.fold(
                (0, f32::NEG_INFINITY),
                |m, (i, &x)| if x > m.1 { (i, x) } else { m },
            )
        };
        let ((top, max), (base_top, _)) = (largest(logits), largest(base));
        let normal = max + log_sum(logits, max);
        let divergence = |(&base, &logit): (&f32, &f32)| {
            f64::from(base.exp()) * f64::from(base - (logit - normal))
        };
        // Of what lies below, the depth of the file says nothing.
        let known = base.iter().zip(logits).filter(|(base, _)| **base > -DEPTH);
        self.kl.push(known.map(divergence).sum());
        let (of_base, of_model) = (base[token as usize], logits[token as usize] - normal);
        self.p_diff
            .push(f64::from(of_model.exp()) - f64::from(of_base.exp()));
        self.score.add(logits, token);
        self.nll_base -= f64::from(of_base);
        self.n_same_top += usize::from(top == base_top);
    }

    /// Tokens so far.
    pub(crate) fn n(&self) -> usize {
        self.kl.len()
    }

    /// Mean divergence, and its standard error.
    pub(crate) fn mean(&self) -> (f64, f64) {
        let n = self.n() as f64;
        let mean = self.kl.iter().sum::<f64>() / n;
        let variance = self.kl.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        (mean, (variance / (n - 1.0).max(1.0)).sqrt())
    }

    /// The divergence that a share `0..=1` of the tokens stay below.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let at = share * (sorted.len() - 1) as f64;
        let (below, above) = (at.floor() as usize, at.ceil() as usize);
        sorted[below] + (at - below as f64) * (sorted[above] - sorted[below])
    }

    /// Share of tokens whose most probable token is the base's.
    pub(crate) fn same_top(&self) -> f64 {
        self.n_same_top as f64 / self.n() as f64
    }

    /// Root mean square of the differences of probabilities.
    pub(crate) fn p_diff(&self) -> f64 {
        let squares = self.p_diff.iter().map(|x| x * x);
        (squares.sum::<f64>() / self.n() as f64).sqrt()
    }

    /// Perplexities of the model and of the base.
    pub(crate) fn perplexities(&self) -> (f64, f64) {
        let base = self.nll_base / self.n() as f64;
        (self.score.perplexity(), base.exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_return_within_half_a_step() {
        let logits = [3.0, 1.0, -40.0, 0.5, 2.0];
        let path = std::env::temp_dir().join(format!("ruvllm-base-{}", std::process::id()));
        let head = BaseHead {
            n_ctx: 4,
            n_vocab: 5,
            tokens: vec![0, 1, 4, 2],
        };
        let mut bytes = Vec::new();
        head.write(&mut bytes).unwrap();
        write_distribution(&mut bytes, &logits).unwrap();
        // 20 of the head, 4 tokens, step and least, 5 codes and one more.
        assert_eq!(bytes.len(), 20 + 16 + 8 + 12);
        std::fs::write(&path, &bytes).unwrap();
        let mut base = Base::open(&path).unwrap();
        let mut found = Vec::new();
        base.next(&mut found).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let cut = Base::open(&path).is_err();
        std::fs::remove_file(&path).unwrap();
        assert!(cut && base.head == head);
        let normal = 3.0 + log_sum(&logits, 3.0);
        for (found, logit) in found.iter().zip(logits) {
            let expected = logit.max(3.0 - DEPTH) - normal;
            assert!(
                (found - expected).abs() <= 0.6 * DEPTH / 65535.0,
                "{found} {expected}"
            );
        }
    }

    #[test]
    fn divergence_of_known_distributions() {
        let (half, quarter) = (0.5f32.ln(), 0.25f32.ln());
        let mut divergence = Divergence::default();
        divergence.add(&[0.0, 0.0], &[half, half], 0);
        // 3/4 and 1/4 from 1/4 and 3/4: half of ln 3.
        divergence.add(&[0.75f32.ln(), quarter], &[quarter, 0.75f32.ln()], 1);
        let half_ln_3 = 0.5 * 3f64.ln();
        let (mean, _) = divergence.mean();
        assert!((mean - half_ln_3 / 2.0).abs() < 1e-6, "{mean}");
        assert!((divergence.quantile(1.0) - half_ln_3).abs() < 1e-6);
        assert_eq!(divergence.same_top(), 0.5);
        assert!((divergence.p_diff() - 0.125f64.sqrt()).abs() < 1e-6);
    }
}
