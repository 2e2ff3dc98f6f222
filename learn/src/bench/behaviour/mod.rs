//! Learning judged by behaviour: invented facts are taught in conversations and asked for in new
//! sessions.
//!
//! A question is a text to be continued, so that a model without a chat template can be judged, too.
//! It is judged by its most likely continuation, and by the probabilities of the right answer and of
//! three wrong ones of the same kind.

mod arms;
mod facts;
mod questions;
mod report;

use crate::clock::Timer;
use crate::learn::LearnError;
use crate::memory::{ConsolidationOptions, MemoryError};
use crate::sona::SonaError;
use arms::{Pupil, Taught};
use facts::{Fact, Form, Kind, Question, facts, known};
use questions::{Answer, ask, loss};
use ruvllm::engine::EngineOptions;
use ruvllm::lora::AdapterError;
use ruvllm::tokenizer::TokenizerError;
use ruvllm::{Engine, Model, SessionError, Tokenizer};
use std::num::NonZeroUsize;
use std::path::PathBuf;

pub use arms::BehaviourArm;
pub use report::{ArmReport, Rate, Score};

/// Wrong answers of a question.
const WRONG: usize = 3;
/// Fewest facts: of each kind as many as a question has answers.
const LEAST: usize = 4 * (WRONG + 1);
/// Most facts, and as many further ones, whose names do not run out: half of them are of two kinds,
/// with 384 names for the one that has fewest.
const MOST: usize = 700;
/// Tokens of a window of control text, and most windows that are scored.
const WINDOW: usize = 96;
const WINDOWS: usize = 12;
/// Most tokens of control text that a learner in the background is told.
const CALIBRATED: usize = 1536;
/// Questions are drawn from this seed on, so that a fact has the same ones in every way.
const QUESTIONS: u64 = 1 << 32;

/// Options of [`behaviour`]. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug)]
pub struct BehaviourOptions {
    /// Facts that are taught, and as many further ones afterwards; 16 to 700. Default 100.
    pub n_facts: usize,
    /// Seed of facts and questions. Default 1.
    pub seed: u64,
    /// Ways of being taught. Default: the first six.
    pub arms: Vec<BehaviourArm>,
    /// Context in tokens, at least 384; 0 is the model's, at most 4096. Default 0.
    pub n_ctx: usize,
    /// Number of threads, as in [`EngineOptions`].
    pub n_threads: Option<NonZeroUsize>,
    /// How often [`BehaviourArm::Consolidation`] reads its questions. Default as there.
    pub epochs: f32,
    /// Bound of [`BehaviourArm::Consolidation`] on the mean divergence on control text, in nats.
    /// Default 0.2.
    pub max_divergence: f64,
    /// Where folders are made and removed again. Default: the system's for temporary files.
    pub folder: PathBuf,
}

impl Default for BehaviourOptions {
    fn default() -> Self {
        let consolidation = ConsolidationOptions::default();
        BehaviourOptions {
            n_facts: 100,
            seed: 1,
            arms: BehaviourArm::ALL[..6].iter().map(|(_, arm)| *arm).collect(),
            n_ctx: 0,
            n_threads: None,
            epochs: consolidation.train.epochs,
            max_divergence: consolidation.train.max_divergence,
            folder: std::env::temp_dir(),
        }
    }
}

impl BehaviourOptions {
    fn context(&self, engine: &Engine) -> usize {
        match self.n_ctx {
            0 => engine.model().hparams().n_ctx_train.min(4096),
            n => n,
        }
    }

    /// Questions that [`behaviour`] asks in all.
    pub fn n_questions(&self) -> usize {
        let per_arm = self.n_facts * (Form::ALL.len() + 1) + known().len();
        self.arms.len() * per_arm + known().len()
    }

    fn check(&self) -> Result<(), LearnError> {
        let wrong = |option, value: usize, expected: String| LearnError::Option {
            option,
            value: value as f64,
            expected,
        };
        if !(LEAST..=MOST).contains(&self.n_facts) {
            let expected = format!("{LEAST} to {MOST}");
            return Err(wrong("n_facts", self.n_facts, expected));
        }
        if self.n_ctx != 0 && self.n_ctx < 384 {
            return Err(wrong("n_ctx", self.n_ctx, "at least 384".into()));
        }
        Ok(())
    }
}

/// Why behaviour could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BehaviourError {
    /// Learning failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// Learning in the background failed.
    #[error(transparent)]
    Sona(#[from] SonaError),
    /// The memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A pass failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// An adapter was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// A continuation is no text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A temporary folder could not be made.
    #[error("{}: the temporary folder cannot be made: {source}", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// What ways of being taught are worth.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BehaviourReport {
    /// Facts that were taught, and as many further ones.
    pub n_facts: usize,
    /// Context in tokens.
    pub n_ctx: usize,
    /// Loss of the model alone on control text, in nats per token.
    pub control_loss: f64,
    /// Milliseconds to the first token after a prompt of 512 tokens, the median of three; a shorter
    /// prompt counts in proportion where the context is shorter.
    pub first_token_ms: f64,
    /// By way.
    pub arms: Vec<ArmReport>,
}

/// What is measured with.
struct Measurement<'a> {
    engine: Engine,
    tokenizer: &'a Tokenizer,
    options: &'a BehaviourOptions,
    taught: Vec<Fact>,
    further: Vec<Fact>,
    known: Vec<Question>,
    /// Halves of the control text: on which nothing may change, and which is measured.
    calibrated: &'a [u32],
    windows: Vec<&'a [u32]>,
    progress: &'a mut dyn FnMut(BehaviourArm, usize),
    n_asked: usize,
}

/// Teaches invented facts in several ways, and asks for them. `control` is text on which nothing may
/// change; half of it is told to what learns. `progress` is called before each question with the
/// number of questions so far, of [`BehaviourOptions::n_questions`].
///
/// # Errors
/// If the model has no tokenizer, the control text is too short, an option is invalid, or a pass or
/// a way of learning fails.
pub fn behaviour(
    model: &Model,
    control: &str,
    options: &BehaviourOptions,
    progress: &mut dyn FnMut(BehaviourArm, usize),
) -> Result<BehaviourReport, BehaviourError> {
    options.check()?;
    let tokenizer = model.tokenizer().ok_or(SessionError::NoTokenizer)?;
    let engine = Engine::new(
        model,
        &EngineOptions {
            n_threads: options.n_threads,
            ..Default::default()
        },
    )?;
    let control = tokenizer.encode(control, true, false);
    let (calibrated, measured) = control.split_at(control.len() / 2);
    let windows: Vec<&[u32]> = measured.chunks_exact(WINDOW).take(WINDOWS).collect();
    if windows.is_empty() {
        let (n, least) = (control.len(), 2 * WINDOW);
        return Err(LearnError::TooLittleText { n, least }.into());
    }
    let mut all = facts(2 * options.n_facts, options.seed);
    let further = all.split_off(options.n_facts);
    let mut measurement = Measurement {
        engine: engine.clone(),
        tokenizer,
        options,
        taught: all,
        further,
        known: known(),
        calibrated,
        windows,
        progress,
        n_asked: 0,
    };
    let first_token_ms = measurement.first_token_ms()?;
    let mut alone = measurement.pupil(BehaviourArm::Nothing)?;
    let (choices, control_loss) = (
        measurement.choices(&mut alone)?,
        measurement.loss(&mut alone)?,
    );
    let arms = options.arms.iter();
    let arms = arms.map(|&arm| measurement.arm(arm, &choices, control_loss));
    Ok(BehaviourReport {
        n_facts: options.n_facts,
        n_ctx: options.context(&engine),
        control_loss,
        first_token_ms,
        arms: arms.collect::<Result<_, _>>()?,
    })
}

/// What notes cost, over all questions.
#[derive(Default)]
struct NoteCosts {
    found: Vec<bool>,
    tokens: Vec<f64>,
    ms: Vec<f64>,
}

impl<'a> Measurement<'a> {
    fn pupil(&self, arm: BehaviourArm) -> Result<Pupil<'a>, BehaviourError> {
        let (engine, tokenizer) = (&self.engine, self.tokenizer);
        // Training reads windows of all of it.
        let control = match arm {
            BehaviourArm::Consolidation => self.calibrated,
            _ => &self.calibrated[..self.calibrated.len().min(CALIBRATED)],
        };
        Pupil::new(arm, engine, tokenizer, control, self.options)
    }

    fn first_token_ms(&self) -> Result<f64, BehaviourError> {
        let bos = self.tokenizer.bos().filter(|_| self.tokenizer.add_bos());
        let text = self.windows.concat();
        let n = 512.min(self.options.context(&self.engine) - 1);
        let text = bos.into_iter().chain(text.iter().copied().cycle());
        let tokens: Vec<u32> = text.take(n).collect();
        let mut session = self.engine.session()?;
        let mut times = Vec::new();
        for _ in 0..3 {
            session.clear();
            let before = Timer::start();
            session.prefill(&tokens)?;
            times.push(before.elapsed().as_secs_f64() * 1e3);
        }
        Ok(super::report::median(&times).unwrap_or(0.0) * 512.0 / n as f64)
    }

    fn arm(
        &mut self,
        arm: BehaviourArm,
        alone: &[usize],
        control_loss: f64,
    ) -> Result<ArmReport, BehaviourError> {
        (self.progress)(arm, self.n_asked);
        let mut pupil = self.pupil(arm)?;
        let taught = self.taught.clone();
        let teach_seconds = pupil.teach(&Taught::of(&taught))?;
        let bytes = pupil.bytes()?;
        let mut costs = NoteCosts::default();
        let mut scores = Vec::new();
        let mut corrected = Vec::new();
        for (kind, form) in Form::ALL {
            let answers = self.answers(&mut pupil, &taught, form, &mut costs)?;
            if form == Form::Cloze {
                let of = taught.iter().zip(&answers);
                let of = of.filter(|(fact, _)| fact.kind == Kind::Correction);
                corrected = of.map(|(_, answer)| *answer).collect();
            }
            scores.push(Score::of(kind, &answers));
        }
        scores.push(Score::of("conflict", &corrected));
        let choices = self.choices(&mut pupil)?;
        let locality = Rate::of(alone.iter().zip(&choices).map(|(a, b)| a == b));
        let control_percent = 100.0 * (self.loss(&mut pupil)? / control_loss - 1.0);

        pupil.teach(&Taught::of(&self.further))?;
        let mut later = NoteCosts::default();
        let answers = self.answers(&mut pupil, &taught, Form::Cloze, &mut later)?;
        scores.push(Score::of("retention", &answers));
        Ok(ArmReport {
            arm,
            scores,
            locality,
            control_percent,
            found: (!costs.found.is_empty()).then(|| Rate::of(costs.found.iter().copied())),
            // A sum of nothing is -0.
            note_tokens: (costs.tokens.iter().sum::<f64>() + 0.0)
                / costs.tokens.len().max(1) as f64,
            note_ms: super::report::median(&costs.ms).unwrap_or(0.0),
            teach_seconds,
            bytes,
        })
    }

    /// The answers to questions of a form, one for each fact.
    fn answers(
        &mut self,
        pupil: &mut Pupil<'_>,
        facts: &[Fact],
        form: Form,
        costs: &mut NoteCosts,
    ) -> Result<Vec<Answer>, BehaviourError> {
        let mut answers = Vec::with_capacity(facts.len());
        for (i, fact) in facts.iter().enumerate() {
            let question = fact.question(form, facts, QUESTIONS + i as u64);
            answers.push(self.ask(pupil, &question, costs)?);
        }
        Ok(answers)
    }

    fn ask(
        &mut self,
        pupil: &mut Pupil<'_>,
        question: &Question,
        costs: &mut NoteCosts,
    ) -> Result<Answer, BehaviourError> {
        (self.progress)(pupil.arm, self.n_asked);
        self.n_asked += 1;
        let before = Timer::start();
        let (notes, stem) = pupil.prepare(&question.prompt)?;
        if let Some(is_told) = pupil.tells(&notes, &question.fact) {
            costs.ms.push(before.elapsed().as_secs_f64() * 1e3);
            costs.tokens.push(notes.n_tokens as f64);
            costs.found.push(is_told);
        }
        ask(&stem, self.tokenizer, &notes.text, question)
    }

    /// The most likely answers to what was never taught.
    fn choices(&mut self, pupil: &mut Pupil<'_>) -> Result<Vec<usize>, BehaviourError> {
        let known = self.known.clone();
        let mut costs = NoteCosts::default();
        let answers = known.iter().map(|question| {
            let answer = self.ask(pupil, question, &mut costs)?;
            Ok(answer.chosen)
        });
        answers.collect()
    }

    /// Loss of control text in nats per token.
    fn loss(&self, pupil: &mut Pupil<'_>) -> Result<f64, BehaviourError> {
        let (mut sum, mut n) = (0.0, 0);
        for window in &self.windows {
            let given = self.tokenizer.decode_lossy(&window[..WINDOW / 2], false)?;
            let (notes, stem) = pupil.prepare(&given)?;
            let notes = self.tokenizer.encode(&notes.text, false, false);
            let (loss, tokens) = loss(&stem, &notes, window)?;
            sum += loss;
            n += tokens;
        }
        Ok(sum / n as f64)
    }
}
