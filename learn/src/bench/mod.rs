//! Gain and cost of learning during use, measured on a text: every token is scored before anything
//! is learnt from it.

mod arms;
pub mod behaviour;
mod deep;
mod estimate;
mod forgetting;
mod measurement;
mod report;
mod temperature;
mod truncation;

use crate::learn::{LearnError, LearnerOptions, softmax};
use measurement::Measurement;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::model::LogitTransform;
use std::num::NonZeroUsize;

pub use estimate::Estimate;
pub use forgetting::Forgetting;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct LearningOptions {
    /// Context of the model, in tokens, at least 8; 0 means a quarter of the context it was
    /// trained for, at most 1024. Each token is predicted from at least half of it.
    pub n_ctx: usize,
    /// Number of threads, as in [`EngineOptions`](ruvllm::engine::EngineOptions).
    pub n_threads: Option<NonZeroUsize>,
    /// Options of the learner.
    pub learner: LearnerOptions,
    /// Factor on the steps of the head adapter; a session has 1.
    pub head_rate: f32,
    /// Step length of backpropagation, relative to the norm of a matrix.
    pub deep_rate: f32,
    /// Whether to run negative controls of backpropagation, which take as long as everything else.
    pub deep_controls: bool,
    /// Number of resamples of the bootstrap.
    pub n_bootstrap: usize,
}

impl Default for LearningOptions {
    fn default() -> Self {
        LearningOptions {
            n_ctx: 0,
            n_threads: None,
            learner: LearnerOptions::default(),
            head_rate: 1.0,
            deep_rate: 1.5e-3,
            deep_controls: true,
            n_bootstrap: 2000,
        }
    }
}

/// One method of predicting the stream.
#[derive(Clone, Debug)]
pub struct Contender {
    /// Name of the method.
    pub name: String,
    /// Whether it is a negative control: it learns from something that cannot help.
    pub negative: bool,
    /// Loss in nats per token.
    pub loss: f64,
    /// Gain over the base model with the same context, in nats per token.
    pub gain: Estimate,
    /// Gain over the base model in nats per token if the logits of both are divided by their best
    /// temperatures, chosen in hindsight: what is learnt besides confidence. Only for adapters
    /// that learn from the stream.
    pub beyond_temperature: Option<Estimate>,
    /// Gain in nats per token over the same method learning the stream's words in another order:
    /// what is learnt besides confidence and word frequencies.
    pub beyond_words: Option<Estimate>,
    /// Median milliseconds per update of the direction; 0 if there is none.
    pub update_ms: f64,
    /// Median milliseconds to make updates effective: the product of head and adapter, the bound
    /// on forgetting, the length of the step.
    pub settle_ms: f64,
    /// Milliseconds of the longest update until it was effective, including a choice of
    /// directions.
    pub longest_ms: f64,
    /// Effect on control text, for methods that change the model.
    pub forgetting: Option<Forgetting>,
    /// Total gain so far after each chunk, in nats.
    pub running_gain: Vec<f64>,
}

/// Result of a prequential measurement: each token is predicted before it is learnt.
#[derive(Clone, Debug)]
pub struct LearningReport {
    /// Context in tokens.
    pub n_ctx: usize,
    /// Number of tokens scored.
    pub n_tokens: usize,
    /// Tokens per chunk, which are learnt together.
    pub n_chunk: usize,
    /// Time of reading a chunk and learning it by backpropagation, in units of a prefill of the
    /// whole context. Checking whether that helps takes half a prefill more, on average.
    pub deep_cost: f64,
    /// Loss of the base model, in nats per token.
    pub base_loss: f64,
    /// Loss of the base model on the control text, in nats per token.
    pub control_loss: f64,
    /// Mean fraction of the head adapter's gradient, by length, that truncation leaves out,
    /// measured on one chunk in eight; NaN if none was learnt from.
    pub truncation: f64,
    /// Mean over all updates of the upper bound of that fraction, which is known without the exact
    /// gradient.
    pub truncation_bound: f64,
    /// All methods, the base model first.
    pub contenders: Vec<Contender>,
}

impl LearningReport {
    /// The method with this name.
    pub fn contender(&self, name: &str) -> Option<&Contender> {
        self.contenders.iter().find(|c| c.name == name)
    }
}

/// Measures on `stream` how well the model predicts it with and without learning. The first half of
/// `control` is used for calibration, the second to measure forgetting.
///
/// # Errors
/// If a text is too short, an option is invalid, or a session fails.
pub fn learning(
    model: &Model,
    stream: &[u32],
    control: &[u32],
    options: &LearningOptions,
) -> Result<LearningReport, LearnError> {
    const LEAST: usize = 512;
    // Rehearsal needs windows of a quarter of the context with at least two tokens.
    const LEAST_CTX: usize = 8;
    let n_ctx = match options.n_ctx {
        0 => (model.hparams().n_ctx_train / 4).clamp(16, 1024),
        n => n,
    };
    if n_ctx < LEAST_CTX {
        let expected = format!("at least {LEAST_CTX}");
        return Err(LearnError::Option {
            option: "n_ctx",
            value: n_ctx as f64,
            expected,
        });
    }
    // Such a window must fit the half of the control text used for calibration.
    for (n, least) in [(stream.len(), LEAST), (control.len(), LEAST.max(n_ctx / 2))] {
        if n < least {
            return Err(LearnError::TooLittleText { n, least });
        }
    }
    let (known, unknown) = control.split_at(control.len() / 2);
    let mut measurement = Measurement::new(model, stream, known, n_ctx, options)?;
    let n_chunk = measurement.n_chunk;
    for (c, start) in (0..stream.len()).step_by(n_chunk).enumerate() {
        measurement.chunk(c, start..(start + n_chunk).min(stream.len()))?;
    }
    measurement.report(unknown)
}

/// Probabilities `p` and logits of the base model from the head's product `raw`; returns the
/// logarithm of the sum of exponentials.
fn base_softmax(
    arch: Arch,
    transform: LogitTransform,
    raw: &[f32],
    p: &mut Vec<f32>,
    logits: &mut Vec<f32>,
) -> f64 {
    logits.clear();
    logits.extend_from_slice(raw);
    transform.row(logits);
    softmax(arch, logits, p)
}
