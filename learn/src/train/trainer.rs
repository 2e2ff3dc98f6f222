//! Training, step by step.

use crate::learn::LearnError;
use crate::train::ewc::Ewc;
use crate::train::example::Judgement;
use crate::train::flat::flat;
use crate::train::preference::{Examples, Preferences};
use crate::train::replay::Replay;
use crate::train::{Example, Loss, TrainOptions};
use ruvllm::Engine;
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::engine::AdapterId;
use ruvllm::kv::KvError;
use ruvllm::kv::hash::{SEED, mix};
use ruvllm::lora::{Adam, Adapter, Gradients, Optimiser};
use ruvllm::{CancelToken, SessionOptions};
use std::sync::Arc;

/// Longest context that is chosen without being asked for.
const DEFAULT_CTX: usize = 2048;

/// One step of training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Its number, from 1.
    pub step: usize,
    /// Loss of the step's examples before it; see [`Loss`] for its unit.
    pub loss: f64,
    /// Learning rate.
    pub rate: f64,
    /// Euclidean norm of the gradient before it was clipped.
    pub norm: f64,
}

/// What an adapter does on text that it is not trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Steps before it.
    pub step: usize,
    /// Loss of the examples held out; NaN if none are.
    pub held_out: f64,
    /// The strength at which the adapter keeps the bound on control text: 1 unless it had to be
    /// reduced. Training goes on at that strength.
    pub scale: f32,
    /// Mean `KL(base ‖ adapted)` on the replayed half of the control text, in nats per token; 0
    /// without control text.
    pub divergence: f64,
    /// Rise of the loss on the other half of the control text, in nats per token; 0 without
    /// control text.
    pub control: f64,
    /// Sum of the loss of each example held out.
    pub losses: Vec<f64>,
    /// Sum of the rise of the loss on each window of control text.
    pub rises: Vec<f64>,
}

/// The course of a training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainReport {
    /// All steps so far.
    pub steps: Vec<Step>,
    /// All evaluations so far, the first one before the first step.
    pub evaluations: Vec<Evaluation>,
    /// Index of the evaluation whose adapter is kept.
    pub kept: usize,
    /// Steps if training is not stopped before.
    pub n_steps: usize,
    /// Number of examples that are trained on.
    pub n_trained: usize,
    /// Tokens to be learnt of each example held out; 1 for preferences, whose losses have no
    /// tokens.
    pub held_out_tokens: Vec<usize>,
    /// Tokens of each window of control text on which the rise is measured.
    pub control_tokens: Vec<usize>,
    /// Tokens of the control text that are neither replayed nor measured on, as there are more than
    /// evaluations can read.
    pub n_control_left_out: usize,
}

/// What a training will do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Steps and evaluations that are left, if training is not stopped before.
    pub n_steps: usize,
    /// See `n_steps`.
    pub n_evaluations: usize,
    /// Tokens that a step reads, on average, with those of control text.
    pub step_tokens: usize,
    /// Tokens that an evaluation reads at least.
    pub evaluation_tokens: usize,
}

impl Plan {
    /// Forward passes of all its tokens: a gradient takes about as long as three, and an evaluation
    /// reads control text about twice.
    pub fn n_tokens(&self) -> usize {
        3 * self.n_steps * self.step_tokens + 2 * self.n_evaluations * self.evaluation_tokens
    }
}

impl TrainReport {
    /// The evaluation of the adapter that is kept.
    ///
    /// # Panics
    /// If there was none yet: before the first step.
    pub fn best(&self) -> &Evaluation {
        &self.evaluations[self.kept]
    }
}

/// Trains an adapter on examples with Adam.
///
/// Every step adds up the gradients of [`TrainOptions::batch`] examples, in an order that only the
/// seed determines, and those of the divergence from the base model on a window of control text and
/// of [`TrainOptions::ewc_lambda`]. Evaluations measure the loss on examples held out; if the
/// divergence on control text is above the bound, the adapter's strength is reduced until it is
/// not. The adapter with the least loss is kept, or the last one if nothing is held out.
///
/// Results do not depend on the number of threads, and are the same after an interruption (see
/// [`Trainer::save`]). The memory is that of [`SessionTraining::gradient`](ruvllm::session::SessionTraining::gradient), and seven values per value of
/// the adapter; one more for preferences, two more for elastic weight consolidation.
pub struct Trainer {
    pub(super) session: Session,
    pub(super) id: AdapterId,
    options: TrainOptions,
    pub(super) gradients: Gradients,
    pub(super) adam: Adam,
    examples: Examples,
    held_out: Examples,
    /// Unless texts are imitated.
    preferences: Option<Preferences>,
    pub(super) replay: Option<Replay>,
    pub(super) ewc: Option<Ewc>,
    pub(super) best: Adapter,
    pub(super) report: TrainReport,
    pub(super) is_finished: bool,
    /// Hash of examples, control text and options.
    pub(super) fingerprint: u64,
    /// The order of the examples in an epoch.
    order: (usize, Vec<usize>),
}

impl Trainer {
    /// Prepares training on `examples`. `control` is text that the model must stay good at: the
    /// first half is replayed, forgetting is measured on the second; empty if there is none.
    ///
    /// # Errors
    /// If an option or an example is invalid, too few examples are left to train on, or there is no
    /// memory for the session.
    pub fn new(
        engine: &Engine,
        examples: &[Example],
        control: &[u32],
        options: &TrainOptions,
    ) -> Result<Trainer, LearnError> {
        let mut adapter = Adapter::zeros(engine.model(), options.rank, options.seed, |site| {
            options.targets.contains(site)
        })?;
        if let Some(alpha) = options.alpha {
            adapter.set_alpha(alpha)?;
        }
        Trainer::continuing(engine, adapter, examples, control, options)
    }

    /// Prepares further training of an adapter, which takes the place of [`TrainOptions::rank`],
    /// [`TrainOptions::alpha`] and [`TrainOptions::targets`].
    ///
    /// # Errors
    /// As [`Trainer::new`], and if the adapter is for another model.
    pub fn continuing(
        engine: &Engine,
        adapter: Adapter,
        examples: &[Example],
        control: &[u32],
        options: &TrainOptions,
    ) -> Result<Trainer, LearnError> {
        options.check()?;
        let model = engine.model();
        let h = model.hparams();
        let n_ctx = if options.n_ctx == 0 {
            h.n_ctx_train.min(DEFAULT_CTX)
        } else {
            options.n_ctx
        };
        check_examples(examples, options, n_ctx, h.n_vocab)?;
        let n = examples.len();
        let n_held_out = ((f64::from(options.held_out) * n as f64).round() as usize).min(n);
        // The loss of KTO compares with the completion of another example.
        let least = if options.loss == Loss::Kto { 2 } else { 1 };
        if n == n_held_out || n < least {
            return Err(LearnError::TooFewExamples { n, least });
        }
        let order = shuffled(n, options.seed);
        let [held_out, examples] = [&order[..n_held_out], &order[n_held_out..]]
            .map(|part| Examples::pick(examples, part, n_ctx));

        let gradients = Gradients::zeros(&adapter);
        let mut session = engine.session_with(&SessionOptions {
            n_ctx: Some(n_ctx),
            ..Default::default()
        })?;
        let best = adapter.clone();
        let values = flat(&adapter);
        let id = session.adapters().attach(Arc::new(adapter), 1.0)?;
        let replay = if control.is_empty() {
            None
        } else {
            Some(Replay::new(&session, control))
        };
        if replay.as_ref().is_some_and(Replay::is_empty) {
            return Err(LearnError::TooLittleText {
                n: control.len(),
                least: 4,
            });
        }
        let preferences = (options.loss != Loss::Sft).then(|| Preferences::new(options, &best));
        let ewc = (options.ewc_lambda > 0.0).then(|| Ewc::new(options.ewc_lambda, values.clone()));
        if ewc.is_some() && replay.is_none() {
            let (option, value) = ("ewc_lambda", f64::from(options.ewc_lambda));
            return Err(LearnError::Option {
                option,
                value,
                expected: "0 where there is no control text".into(),
            });
        }
        let mut adam = Adam::new();
        (adam.betas, adam.decay) = (options.betas, options.weight_decay);
        let n_steps = (f64::from(options.epochs) * examples.all.len() as f64 / options.batch as f64)
            .ceil() as usize;
        let report = TrainReport {
            n_steps: n_steps.max(1),
            n_trained: examples.all.len(),
            held_out_tokens: match options.loss {
                Loss::Sft => held_out.all.iter().map(Example::n_learnt).collect(),
                Loss::Dpo | Loss::Kto => vec![1; n_held_out],
            },
            control_tokens: replay
                .as_ref()
                .map(Replay::measured_tokens)
                .unwrap_or_default(),
            n_control_left_out: replay.as_ref().map_or(0, |replay| replay.n_left_out),
            ..Default::default()
        };
        let fingerprint = fingerprint(&examples, &held_out, control, options, &values);
        Ok(Trainer {
            session,
            id,
            options: options.clone(),
            gradients,
            adam,
            examples,
            held_out,
            preferences,
            replay,
            ewc,
            best,
            report,
            is_finished: false,
            fingerprint,
            order: (usize::MAX, Vec::new()),
        })
    }

    /// Takes the next step; `None` once all are taken, or nothing was gained for so long that
    /// training ends.
    ///
    /// # Errors
    /// [`LearnError::Diverged`] if loss, gradient, keys or values are not finite; as
    /// [`SessionTraining::nll_gradient`](ruvllm::session::SessionTraining::nll_gradient). The adapter is the one before the step then.
    pub fn step(&mut self) -> Result<Option<Step>, LearnError> {
        let step = self.report.steps.len();
        self.try_step().map_err(|error| match error {
            // The model itself has no such values.
            LearnError::Session(SessionError::Kv(KvError::Overflow { .. })) if step > 0 => {
                LearnError::Diverged { step }
            }
            error => error,
        })
    }

    /// Steps between two evaluations.
    fn eval_every(&self) -> usize {
        match self.options.eval_every {
            0 => self.examples.all.len().div_ceil(self.options.batch),
            every => every,
        }
    }

    /// What is left to do.
    pub fn plan(&self) -> Plan {
        let n_steps = if self.is_finished {
            0
        } else {
            self.report.n_steps.saturating_sub(self.report.steps.len())
        };
        let tokens = |examples: &Examples| -> usize {
            let all = examples.all.iter();
            all.map(|example| example.tokens().len()).sum()
        };
        let of_control = self.replay.as_ref().map_or(0, Replay::evaluated_tokens);
        let n_examples = self.examples.all.len();
        Plan {
            n_steps,
            n_evaluations: n_steps.div_ceil(self.eval_every()),
            step_tokens: tokens(&self.examples) * self.options.batch / n_examples
                + self.replay.as_ref().map_or(0, Replay::window_tokens),
            evaluation_tokens: tokens(&self.held_out) + of_control,
        }
    }

    /// The evaluation before the first step, unless there was one: with it, how long the plan takes
    /// can be told. [`Trainer::step`] begins with it otherwise.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn begin(&mut self) -> Result<(), LearnError> {
        if self.report.evaluations.is_empty() {
            self.evaluate()?;
        }
        Ok(())
    }

    fn try_step(&mut self) -> Result<Option<Step>, LearnError> {
        let (step, n_steps) = (self.report.steps.len(), self.report.n_steps);
        let TrainOptions {
            batch,
            schedule,
            warmup,
            patience,
            ..
        } = self.options;
        let every = self.eval_every();
        // Evaluations belong to the beginning of a step, so that one that was cancelled is made up
        // for.
        let is_due = step.is_multiple_of(every) || step == n_steps;
        if is_due
            && self
                .report
                .evaluations
                .last()
                .is_none_or(|last| last.step < step)
        {
            self.evaluate()?;
            let since = self.report.evaluations.len() - 1 - self.report.kept;
            self.is_finished |= step == n_steps || (patience > 0 && since >= patience);
        }
        if self.is_finished {
            return Ok(None);
        }
        if let (Some(ewc), Some(replay)) = (&mut self.ewc, &self.replay) {
            ewc.measure(&mut self.session, self.id, replay, &mut self.gradients)?;
        }
        let picked: Vec<usize> = (step * batch..(step + 1) * batch)
            .map(|i| self.example(i))
            .collect();
        self.gradients.clear();
        let loss = self.gradient(&picked)?;
        let mut pull = 1.0;
        let pace = self.replay.as_ref().map_or(1.0, |replay| replay.rein.pace);
        if let Some(replay) = &mut self.replay {
            let (session, most) = (&mut self.session, self.options.max_divergence);
            let mut none = Gradients::for_terms(&self.best, |_| false);
            replay.refer(session, self.id, &mut none)?;
            pull = replay.gradient(session, self.id, step, most, &mut self.gradients)?;
        }
        if let Some(ewc) = &self.ewc
            && let Some((_, adapter, _)) = self
                .session
                .sequence()
                .adapters()
                .find(|(id, ..)| *id == self.id)
        {
            ewc.gradient(adapter, &mut self.gradients);
        }
        let norm = self.gradients.norm();
        if !(loss.is_finite() && norm.is_finite()) {
            return Err(LearnError::Diverged { step: step + 1 });
        }
        if norm > f64::from(self.options.clip) {
            self.gradients
                .scale((f64::from(self.options.clip) / norm) as f32);
        }
        let rate = f64::from(self.options.rate)
            * schedule.factor(step, n_steps, warmup.min(n_steps))
            * pace;
        self.adam.rate = rate as f32;
        let Trainer {
            session,
            adam,
            gradients,
            ..
        } = self;
        session.adapters().update(self.id, |adapter| {
            weaken(adapter, pull);
            adam.step(adapter, gradients);
        })?;
        let done = Step {
            step: step + 1,
            loss,
            rate,
            norm,
        };
        self.report.steps.push(done);
        Ok(Some(done))
    }

    /// Adds the gradient of the loss of the examples `picked`, and returns the loss.
    fn gradient(&mut self, picked: &[usize]) -> Result<f64, LearnError> {
        let Trainer {
            session,
            id,
            gradients,
            examples,
            preferences,
            ..
        } = self;
        if let Some(preferences) = preferences {
            preferences.refer(session, *id, examples, picked)?;
            let losses = preferences.losses(session, *id, examples, picked, Some(gradients))?;
            return Ok(losses.iter().sum::<f64>() / picked.len() as f64);
        }
        let n: usize = picked.iter().map(|&i| examples.all[i].n_learnt()).sum();
        let texts: Vec<_> = picked
            .iter()
            .map(|&i| (&examples.all[i], 1.0 / n as f32))
            .collect();
        Ok(Example::nll_gradients(session, *id, &texts, gradients)?
            .iter()
            .sum())
    }

    /// Index of the `i`th example to be read, counted over all epochs.
    fn example(&mut self, i: usize) -> usize {
        let n = self.examples.all.len();
        if self.order.0 != i / n {
            // The seed itself has drawn the examples held out.
            self.order = (i / n, shuffled(n, self.options.seed ^ (1 + (i / n) as u64)));
        }
        self.order.1[i % n]
    }

    /// Measures the adapter on the examples held out and on control text, and keeps it if it is the
    /// best.
    fn evaluate(&mut self) -> Result<(), LearnError> {
        let measured = self.measure();
        self.session.clear();
        self.session.adapters().set_scale(self.id, 1.0)?;
        let evaluation = measured?;
        if !evaluation.losses.is_empty() && !evaluation.held_out.is_finite() {
            return Err(LearnError::Diverged {
                step: evaluation.step,
            });
        }
        if evaluation.scale < 1.0 {
            let scale = evaluation.scale;
            self.session
                .adapters()
                .update(self.id, |adapter| weaken(adapter, scale))?;
            if let Some(replay) = &mut self.replay {
                replay.rein.shrunk(f64::from(scale));
                replay.rein.divergence = evaluation.divergence;
            }
        }
        let report = &mut self.report;
        let is_first = report.evaluations.is_empty();
        // With nothing held out there is no loss to compare, and the latest is kept.
        let is_better = is_first
            || evaluation.losses.is_empty()
            || evaluation.held_out < report.best().held_out;
        report.evaluations.push(evaluation);
        let mut held = self.session.sequence().adapters();
        if let Some((_, adapter, _)) = held.find(|(id, ..)| *id == self.id).filter(|_| is_better) {
            report.kept = report.evaluations.len() - 1;
            self.best = Adapter::clone(adapter);
        }
        Ok(())
    }

    /// Reduces the adapter's strength until it keeps the bound on control text, and measures it at
    /// that strength.
    fn measure(&mut self) -> Result<Evaluation, LearnError> {
        let (mut scale, mut divergence, mut rises) = (1.0, 0.0, Vec::new());
        let all: Vec<usize> = (0..self.held_out.all.len()).collect();
        if let Some(preferences) = &mut self.preferences {
            preferences.refer(&mut self.session, self.id, &mut self.held_out, &all)?;
        }
        let mut none = Gradients::for_terms(&self.best, |_| false);
        let is_idle = {
            let mut held = self.session.sequence().adapters();
            let held = held.find(|(id, ..)| *id == self.id);
            held.is_none_or(|(_, adapter, _)| adapter.terms().all(|(_, term)| term.is_zero()))
        };
        if let Some(replay) = &mut self.replay {
            let (session, id) = (&mut self.session, self.id);
            replay.refer(session, id, &mut none)?;
            if is_idle {
                rises = replay.no_rises();
            } else {
                let most = self.options.max_divergence;
                (scale, divergence) = replay.limit(session, id, most, &mut none)?;
                rises = replay.rises(session, id, &mut none)?;
            }
        }
        let Trainer {
            session, held_out, ..
        } = self;
        let losses = match &mut self.preferences {
            Some(preferences) => preferences.losses(session, self.id, held_out, &all, None)?,
            None => {
                let texts: Vec<_> = held_out.all.iter().map(|example| (example, 1.0)).collect();
                Example::nll_gradients(session, self.id, &texts, &mut none)?
            }
        };
        let report = &self.report;
        let mean = |sums: &[f64], sizes: &[usize]| {
            sums.iter().sum::<f64>() / sizes.iter().sum::<usize>() as f64
        };
        Ok(Evaluation {
            step: report.steps.len(),
            held_out: mean(&losses, &report.held_out_tokens),
            scale,
            divergence,
            control: if rises.is_empty() {
                0.0
            } else {
                mean(&rises, &report.control_tokens)
            },
            losses,
            rises,
        })
    }

    /// The course so far.
    pub fn report(&self) -> &TrainReport {
        &self.report
    }

    /// The adapter that is kept.
    pub fn adapter(&self) -> &Adapter {
        &self.best
    }

    /// A token that cancels [`Trainer::step`].
    pub fn cancel_token(&self) -> CancelToken {
        self.session.cancel_token()
    }
}

/// Multiplies all `ΔW` of an adapter by `factor`, in its values: what is saved of it while it is
/// trained. A factor of 0 removes what is no number, too.
fn weaken(adapter: &mut Adapter, factor: f32) {
    for (_, term) in adapter.terms_mut().filter(|_| factor != 1.0) {
        let b = term.parts_mut().1;
        if factor == 0.0 {
            b.fill(0.0);
        }
        b.iter_mut().for_each(|b| *b *= factor);
    }
}

/// Checks that each example is for the loss of `options`, and fits the context and the vocabulary.
fn check_examples(
    examples: &[Example],
    options: &TrainOptions,
    n_ctx: usize,
    n_vocab: usize,
) -> Result<(), LearnError> {
    for (index, example) in examples.iter().enumerate() {
        if example.loss() != options.loss {
            let what = format!(
                "is for the loss {}, not {}",
                example.loss().name(),
                options.loss.name()
            );
            return Err(LearnError::Example { index, what });
        }
        let rejected = match example.judgement() {
            Judgement::Chosen(rejected) => Some(&**rejected),
            Judgement::Imitated | Judgement::Labelled(_) => None,
        };
        for text in [example].into_iter().chain(rejected) {
            let tokens = text.tokens();
            let what = if tokens.len() > n_ctx {
                format!("has {} tokens, more than the context {n_ctx}", tokens.len())
            } else if tokens.iter().any(|&t| t as usize >= n_vocab) {
                "has a token outside the vocabulary".into()
            } else if text.n_learnt() == 0 {
                "has no token to learn".into()
            } else {
                continue;
            };
            return Err(LearnError::Example { index, what });
        }
    }
    Ok(())
}

/// Hash of what a training depends on, apart from the model; `values` are the adapter's first ones.
fn fingerprint(
    examples: &Examples,
    held_out: &Examples,
    control: &[u32],
    options: &TrainOptions,
    values: &[f32],
) -> u64 {
    let all = examples.all.iter().chain(&held_out.all);
    let hash = all.fold(SEED, |hash, example| example.hash(hash));
    let hash = mix(hash, bytemuck::cast_slice(control));
    let hash = mix(hash, format!("{options:?}").as_bytes());
    mix(hash, bytemuck::cast_slice(values))
}

/// The numbers below `n` in an order that only the seed determines (Fisher and Yates; SplitMix64).
fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut state = seed;
    let mut next = |below: usize| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(x ^ (x >> 31)) * below as u128) >> 64) as usize
    };
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, next(i + 1));
    }
    order
}
