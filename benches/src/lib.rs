//! Measuring the engine: `ruvllm bench`, and the same from a program.
//!
//! A [`Test`] is a prompt of `n_prompt` tokens, then `n_gen` single tokens, at some depth of
//! context. Tokenising and sampling are left out, as in llama-bench. Speeds come with their share
//! of the read bandwidth, which limits single tokens, and of the arithmetic peak, which limits
//! prompts, both measured in the same run.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod kernels;
mod machine;
mod replay;
mod scenario;
mod synthetic;

use ruvllm::Engine;
use ruvllm::Error;
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::compute::TokenKind;
use ruvllm::engine::Outputs;
use ruvllm::engine::Sequence;
use ruvllm::engine::Slot;
use ruvllm::lora::Adapter;
use ruvllm::{CancelToken, SessionOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use kernels::{KernelRow, attend, kernels};
pub use machine::{Load, arithmetic_peak, read_bandwidth};
pub use replay::{Replay, Replayed};
pub use scenario::{FirstToken, Scenario, ScenarioOutcome, first_tokens, scenario};
pub use synthetic::{Shape, synthetic, synthetic_file, synthetic_with_tokens};

/// A combination of prompt, generation and depth to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    /// Tokens of the prompt; 0 to measure generation alone.
    pub n_prompt: usize,
    /// Tokens generated one by one; 0 to measure the prompt alone.
    pub n_gen: usize,
    /// Tokens in the context before the measurement starts.
    pub depth: usize,
    /// Sequences that generate in one batch, `n_gen` tokens each; 0 means a single session.
    pub rows: usize,
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.n_prompt, self.n_gen) {
            (p, 0) => write!(f, "pp{p}")?,
            _ if self.rows > 0 => write!(f, "gr{}", self.rows)?,
            (0, g) => write!(f, "tg{g}")?,
            (p, g) => write!(f, "pp{p}+tg{g}")?,
        }
        if self.depth > 0 {
            write!(f, " @ d{}", self.depth)
        } else {
            Ok(())
        }
    }
}

/// Result of a test.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The test.
    pub test: Test,
    /// Threads used.
    pub n_threads: usize,
    /// Tokens per second of each repetition.
    pub rates: Vec<f64>,
    /// Time of the prompt in each repetition, if there is one: with its logits the first token can
    /// be chosen.
    pub first: Vec<Duration>,
    /// Times between two tokens of a sequence, of all repetitions.
    pub next: Vec<Duration>,
    /// Bytes read per generated token: weights, and keys and values of the context; for `rows`
    /// sequences in a batch, each one's share.
    pub bytes_per_token: u64,
    /// Average operations per prompt token: a multiplication and an addition for every weight, and
    /// for every key and value of its context.
    pub flops_per_token: u64,
    /// CPU time that other processes used during the test, as a fraction of the machine.
    pub noise: Option<f64>,
}

impl Outcome {
    /// Mean of the rates.
    pub fn mean(&self) -> f64 {
        self.rates.iter().sum::<f64>() / self.rates.len() as f64
    }

    /// Sample standard deviation of the rates.
    pub fn deviation(&self) -> f64 {
        let (mean, n) = (self.mean(), self.rates.len() as f64);
        if n < 2.0 {
            0.0
        } else {
            (self.rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
        }
    }

    /// Median of the rates; NaN if there are none, as for the mean.
    pub fn median(&self) -> f64 {
        median(&self.rates).unwrap_or(f64::NAN)
    }
}

/// Median of `values`, if there are any: the mean of both middle ones if their number is even.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}

/// Runs `test` on `engine` with `adapters` (and their scales), once to warm up, then `repetitions`
/// times. Of several adapters each sequence of a test with [`Test::rows`] has one, in turns; a
/// single session has all.
///
/// # Errors
/// If a session cannot be made or is too small for the test, or an adapter is for another model.
pub fn run(
    engine: &Engine,
    adapters: &[(Arc<Adapter>, f32)],
    test: Test,
    options: &SessionOptions,
    repetitions: usize,
) -> Result<Outcome, Error> {
    let n_ctx = test
        .depth
        .saturating_add(test.n_prompt)
        .saturating_add(test.n_gen)
        .max(1);
    let options = SessionOptions {
        n_ctx: Some(options.n_ctx.unwrap_or(0).max(n_ctx)),
        ..options.clone()
    };
    let model = engine.model();
    if test.n_gen > 0 {
        model.settle();
    }
    if test.rows > 0 {
        return run_rows(engine, adapters, test, &options, repetitions);
    }
    let mut session = engine.session_with(&options)?;
    for (adapter, scale) in adapters {
        session.adapters().attach(Arc::clone(adapter), *scale)?;
    }
    let n_vocab = model.hparams().n_vocab;
    // Any tokens will do; these are spread over the embedding table.
    let tokens: Vec<u32> = (0..n_ctx).map(|i| (i * 7919 % n_vocab) as u32).collect();
    let (context, rest) = tokens.split_at(test.depth);
    if !context.is_empty() {
        session.prefill(context)?;
    }
    once(
        &mut session,
        test,
        &rest[..rest.len().min(8)],
        &mut (vec![], vec![]),
    )?;
    let load = Load::now();
    let (mut rates, mut times) = (Vec::with_capacity(repetitions), (vec![], vec![]));
    for _ in 0..repetitions.max(1) {
        session.rewind(test.depth)?;
        let start = Instant::now();
        once(&mut session, test, rest, &mut times)?;
        rates.push((test.n_prompt + test.n_gen) as f64 / start.elapsed().as_secs_f64());
    }
    let h = model.hparams();
    let depth = test.depth + test.n_prompt + test.n_gen / 2;
    Ok(Outcome {
        test,
        n_threads: session.engine().n_threads(),
        rates,
        first: times.0,
        next: times.1,
        bytes_per_token: model.bytes_per_token() + options.kv_bytes_read(h, depth),
        flops_per_token: model.flops_per_token(test.depth + test.n_prompt / 2),
        noise: Load::since(load),
    })
}

/// [`run`] for a test with [`Test::rows`].
fn run_rows(
    engine: &Engine,
    adapters: &[(Arc<Adapter>, f32)],
    test: Test,
    options: &SessionOptions,
    repetitions: usize,
) -> Result<Outcome, Error> {
    let (model, cancel, mut outputs) = (engine.model(), CancelToken::default(), Outputs::default());
    let h = model.hparams();
    let token = |i: usize, position: usize| ((position * 7919 + i * 104_729) % h.n_vocab) as u32;
    let mut sequences = Vec::with_capacity(test.rows);
    for i in 0..test.rows {
        let mut seq = engine.sequence(options)?;
        if let Some((adapter, scale)) = adapters.get(i % adapters.len().max(1)) {
            seq.attach(Arc::clone(adapter), *scale)?;
        }
        let context: Vec<u32> = (0..test.depth).map(|position| token(i, position)).collect();
        for tokens in context.chunks(options.n_batch) {
            engine.step(
                &mut [Slot::new(&mut seq, tokens, TokenKind::Prompt)],
                &mut outputs,
                &cancel,
            )?;
        }
        sequences.push(seq);
    }
    let mut generate = |n: usize, next: &mut Vec<Duration>| -> Result<f64, Error> {
        let mut forks = sequences
            .iter()
            .map(Sequence::fork)
            .collect::<Result<Vec<_>, _>>()?;
        let start = Instant::now();
        for position in test.depth..test.depth + n {
            let tokens: Vec<u32> = (0..test.rows).map(|i| token(i, position)).collect();
            let slots = forks.iter_mut().zip(tokens.chunks(1));
            let mut slots: Vec<Slot<'_>> = slots
                .map(|(seq, t)| Slot::new(seq, t, TokenKind::Generated))
                .collect();
            let pass = Instant::now();
            engine.step(&mut slots, &mut outputs, &cancel)?;
            next.push(pass.elapsed());
        }
        Ok((n * test.rows) as f64 / start.elapsed().as_secs_f64())
    };
    generate(test.n_gen.min(2), &mut vec![])?;
    let (load, mut next) = (Load::now(), vec![]);
    let rates = (0..repetitions.max(1))
        .map(|_| generate(test.n_gen, &mut next))
        .collect::<Result<Vec<_>, _>>()?;
    let depth = test.depth + test.n_gen / 2;
    Ok(Outcome {
        test,
        n_threads: engine.n_threads(),
        rates,
        first: vec![],
        next,
        bytes_per_token: model.bytes_per_pass(test.rows) / test.rows as u64
            + options.kv_bytes_read(h, depth),
        // Generated tokens are computed in every layer and in the head.
        flops_per_token: model.flops_per_row(depth),
        noise: Load::since(load),
    })
}

/// Computes the tokens of a repetition; adds the time of the prompt and of each token behind it.
fn once(
    session: &mut Session,
    test: Test,
    tokens: &[u32],
    (first, next): &mut (Vec<Duration>, Vec<Duration>),
) -> Result<(), SessionError> {
    let (prompt, generated) = tokens.split_at(test.n_prompt.min(tokens.len()));
    if !prompt.is_empty() {
        let start = Instant::now();
        session.prefill(prompt)?;
        first.push(start.elapsed());
    }
    for &token in generated {
        let start = Instant::now();
        session.decode(token)?;
        next.push(start.elapsed());
    }
    Ok(())
}
