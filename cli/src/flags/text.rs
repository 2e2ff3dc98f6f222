//! Flags of commands that write one text, and how that begins.

use super::learn::{LearnArgs, Learning};
use super::sampling::SamplingArgs;
use super::session::SessionArgs;
use super::speculation::SpeculationArgs;
use crate::io::{Failure, Progress};
use clap::builder::BoolishValueParser;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm_learn::Learning as _;
use ruvllm_learn::sona::pooled_layer;

/// What `generate` and `chat` share: how a text ends, what is learnt, session and sampler.
#[derive(clap::Args)]
#[command(next_help_heading = None::<&'static str>)]
pub(crate) struct TextArgs {
    /// Maximum number of tokens to generate (-1 or -2: until the context is full) [default: -1; of the
    /// built-in model a paragraph]
    #[arg(short, long, aliases = ["predict", "max-tokens"], value_name = "N", env = "LLAMA_ARG_N_PREDICT",
          allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-2..))]
    n_predict: Option<i64>,
    /// End before this text appears; repeatable
    #[arg(
        short,
        long,
        alias = "stop",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    pub(crate) reverse_prompt: Vec<String>,
    /// When the context is full, drop half of what lies behind the tokens of --keep and go on
    /// [default: end the text]
    #[arg(long, help_heading = "Context", env = "LLAMA_ARG_CONTEXT_SHIFT", value_parser = BoolishValueParser::new(), conflicts_with = "learn")]
    context_shift: bool,
    /// Tokens at the beginning that --context-shift keeps, rounded up to 64
    #[arg(
        long,
        value_name = "N",
        help_heading = "Context",
        default_value_t = 0,
        requires = "context_shift",
        allow_negative_numbers = true
    )]
    keep: u32,
    /// Show timings even if stderr is no terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Generate with the mixture of the adapted model, n-grams and neighbours of what was learnt
    #[arg(long, requires = "learn", help_heading = "Learning")]
    learn_mixture: bool,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) learn: LearnArgs,
    #[command(flatten)]
    pub(crate) session: SessionArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

impl TextArgs {
    /// Options of a session of the model.
    pub(crate) fn options(&self, model: &Model) -> SessionOptions {
        let options = self.session.options(None, KvType::default());
        SessionOptions {
            context_shift: self.context_shift.then_some(self.keep as usize),
            keep_states: self.speculation.reads_states(),
            pooled_layer: self.learn.folder.as_ref().and_then(|_| pooled_layer(model)),
            ..options
        }
    }

    /// Begins to learn what is said in a session of that name, if the flags say so.
    pub(crate) fn begin_learning(
        &self,
        session: &Session,
        session_id: String,
    ) -> Result<Option<Learning>, Failure> {
        self.learn
            .begin(session.engine(), self.learn_mixture, session_id)
    }

    /// Maximum number of tokens to generate.
    pub(crate) fn max_tokens(&self) -> usize {
        let n = self.n_predict.unwrap_or(-1);
        usize::try_from(n).unwrap_or(usize::MAX)
    }

    /// Whether no flag says where the text ends.
    pub(crate) fn has_no_end(&self) -> bool {
        let sampling = &self.sampling;
        self.n_predict.is_none()
            && self.reverse_prompt.is_empty()
            && !sampling.ignores_eos()
            && !sampling.has_mask()
    }
}

/// Computes tokens of a prompt, with progress, and returns how many: whole batches, or all but the
/// last token, if they are learnt from or `all` that can be is wanted.
pub(crate) fn read(
    session: &mut Session,
    ids: &[u32],
    n_batch: usize,
    all: bool,
) -> Result<usize, Failure> {
    let progress = Progress::new("reading the prompt", ids.len() as u64);
    let learns = session.learner().is_some();
    // What is learnt from is read as such; the last token begins the answer.
    let last = if learns || all {
        ids.len().saturating_sub(1)
    } else {
        ids.len().saturating_sub(1) / n_batch * n_batch
    };
    for (i, batch) in ids[..last].chunks(n_batch).enumerate() {
        if learns {
            session.record(batch)?;
        } else {
            session.prefill(batch)?;
        }
        progress.set(((i + 1) * n_batch) as u64);
    }
    Ok(last)
}
