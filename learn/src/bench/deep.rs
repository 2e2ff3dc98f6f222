//! Backpropagation into the last quarter of the layers, chunk by chunk.

use crate::bench::LearningOptions;
use crate::clock::Timer;
use crate::learn::LearnError;
use crate::learn::rein::Rein;
use crate::learn::windows::from;
use crate::learn::{Evidence, random, softmax};
use ruvllm::Engine;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm::engine::AdapterId;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Gradients, Optimiser, Sgd};
use ruvllm::session::{Reference, cross_entropy};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Rank of the adapters.
const RANK: usize = 4;
/// Fraction of the bound that divergence on rehearsed text must stay below: on other text it is
/// larger.
const REHEARSED_SHARE: f64 = 0.8;
/// How often adapters are made weaker behind a step before they are dropped.
const MAX_SHORTENED: usize = 6;
/// Most windows of control text that are rehearsed in turn.
const REHEARSED: usize = 64;

/// Control text on which backpropagation must keep the base model's predictions.
pub(super) struct Rehearsal {
    /// Each window, and what the model alone predicts there.
    windows: Vec<(Vec<u32>, Reference)>,
}

impl Rehearsal {
    pub(super) fn new(
        session: &mut Session,
        text: &[u32],
        n_chunk: usize,
    ) -> Result<Self, LearnError> {
        let n = (text.len() / n_chunk).min(REHEARSED);
        let mut windows = Vec::new();
        for i in 0..n {
            let start = i * (text.len() - n_chunk) / n;
            let (mut window, _) = from(session, text, start, 0);
            window.extend(&text[start..start + n_chunk - 1]);
            session.clear();
            let reference = session.training().reference(&window)?;
            windows.push((window, reference));
        }
        Ok(Rehearsal { windows })
    }

    /// Adds the gradient of `strength·KL(base ‖ adapted)` per token on window `turn`; returns the
    /// divergence.
    fn gradient(
        &self,
        session: &mut Session,
        id: AdapterId,
        turn: usize,
        strength: f32,
        gradients: &mut Gradients,
    ) -> Result<f64, LearnError> {
        let (window, reference) = &self.windows[turn % self.windows.len()];
        session.clear();
        let weight = strength / window.len() as f32;
        let loss = session
            .training()
            .divergence_gradient(id, window, reference, weight, gradients, None)?;
        Ok(loss / f64::from(strength))
    }
}

/// What backpropagation learns from.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Told {
    Stream,
    /// The stream's contexts, each followed by a token from half a stream away.
    Shuffled,
    /// The stream, with the gradient negated.
    Opposite,
    /// Random directions as long as the stream's gradient.
    Chance,
}

/// Adapters in the last quarter of the layers.
pub(super) struct DeepArm {
    pub(super) told: Told,
    pub(super) session: Session,
    id: AdapterId,
    gradients: Gradients,
    /// Of no term.
    none: Gradients,
    descent: Sgd,
    max_divergence: f64,
    rein: Rein,
    /// Step length within the bound.
    rate: f32,
    /// Evidence that the adapters help on tokens not learnt yet.
    pub(super) evidence: Evidence,
    /// Loss of each chunk.
    pub(super) losses: Vec<f64>,
    /// Loss of each chunk if the adapters take effect only while they help.
    pub(super) judged_losses: Vec<f64>,
    pub(super) update_ms: Vec<f64>,
    /// Logits that predicted the latest chunk before it was learnt, `(n, n_vocab)`.
    pub(super) logits: Vec<f32>,
}

/// Whether backpropagation trains a matrix: those of feed-forward layers and the output of
/// attention, in the last quarter of the layers.
fn is_trained(site: &TargetModule, n_layer: usize) -> bool {
    let part = ["ffn_down", "ffn_up", "ffn_gate", "attn_output"]
        .iter()
        .any(|part| site.part().starts_with(part));
    part && site
        .layer()
        .is_some_and(|layer| layer >= n_layer - n_layer.div_ceil(4))
}

impl DeepArm {
    pub(super) fn new(
        engine: &Engine,
        n_ctx: usize,
        options: &LearningOptions,
        told: Told,
    ) -> Result<Self, LearnError> {
        let model = engine.model();
        let mut session = engine.session_with(&SessionOptions {
            n_ctx: Some(n_ctx),
            ..Default::default()
        })?;
        let adapter = Adapter::zeros(model, RANK, 1, |site| {
            is_trained(site, model.hparams().n_layer)
        })?;
        let gradients = Gradients::zeros(&adapter);
        let none = Gradients::for_terms(&adapter, |_| false);
        let mut descent = Sgd::new(model.site_norms());
        descent.rate = options.deep_rate;
        let id = session.adapters().attach(Arc::new(adapter), 1.0)?;
        Ok(DeepArm {
            told,
            session,
            id,
            gradients,
            none,
            descent,
            max_divergence: options.learner.max_divergence,
            rein: Rein::new(),
            rate: options.deep_rate,
            evidence: Evidence::default(),
            losses: Vec::new(),
            judged_losses: Vec::new(),
            update_ms: Vec::new(),
            logits: Vec::new(),
        })
    }

    /// Names of the arm, and of its variant that takes effect only while it helps.
    pub(super) fn names(&self) -> (&'static str, Option<&'static str>) {
        match self.told {
            Told::Stream => (
                "last quarter of the layers, backpropagation",
                Some("last quarter of the layers, backpropagation, while it helps"),
            ),
            Told::Shuffled => (
                "backpropagation of the stream's words in another order",
                None,
            ),
            Told::Opposite => (
                "control: backpropagation of the opposite",
                Some("control: backpropagation of the opposite, while it helps"),
            ),
            Told::Chance => (
                "control: backpropagation, random direction of equal length",
                None,
            ),
        }
    }

    /// Scores the part `chunk` of the stream after at most `context` tokens, then learns it, as
    /// chunk number `turn`. Returns the loss.
    pub(super) fn learn(
        &mut self,
        stream: &[u32],
        chunk: Range<usize>,
        context: usize,
        turn: usize,
        rehearsal: &Rehearsal,
    ) -> Result<f64, LearnError> {
        let (arch, n_vocab) = (
            self.session.model().arch(),
            self.session.model().hparams().n_vocab,
        );
        let (mut read, begin) = from(&self.session, stream, chunk.start, context);
        let first = chunk.start.max(1) - 1;
        let before = Timer::start();
        self.session.clear();
        read.extend(&stream[begin.min(first)..first]);
        if !read.is_empty() {
            self.session.prefill(&read)?;
        }
        let n = chunk.end - first - 1;
        self.gradients.clear();
        self.logits.resize(n * n_vocab, 0.0);
        if n > 0 {
            let sign = if self.told == Told::Opposite {
                -1.0
            } else {
                1.0
            };
            let away = if self.told == Told::Shuffled {
                stream.len() / 2
            } else {
                0
            };
            let kept = Mutex::new(&mut self.logits);
            let objective = |i: usize, logits: &mut [f32]| {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept[i * n_vocab..][..n_vocab].copy_from_slice(logits);
                drop(kept);
                let token = stream[(first + 1 + i + away) % stream.len()];
                cross_entropy(arch, logits, token, sign / n as f32)
            };
            let tokens = &stream[first..chunk.end - 1];
            self.session.training().gradient(
                self.id,
                tokens,
                0,
                &objective,
                &mut self.gradients,
                None,
            )?;
            if self.told == Told::Chance {
                self.randomise(turn);
            }
            let divergence = rehearsal.gradient(
                &mut self.session,
                self.id,
                turn,
                self.rein.strength,
                &mut self.gradients,
            )?;
            self.descent.rate = self.rate * self.rein.pace as f32;
            let pull = self
                .rein
                .pull(divergence, self.max_divergence, REHEARSED_SHARE);
            let DeepArm {
                session,
                descent,
                gradients,
                ..
            } = self;
            session.adapters().update(self.id, |adapter| {
                if pull < 1.0 {
                    adapter.rescale(pull);
                }
                descent.step(adapter, gradients);
            })?;
            self.shorten(rehearsal, turn)?;
        }
        self.update_ms.push(before.elapsed().as_secs_f64() * 1e3);
        let mut p = Vec::new();
        let came = &stream[first + 1..chunk.end];
        let losses = self
            .logits
            .chunks_exact(n_vocab)
            .zip(came)
            .map(|(logits, &token)| {
                softmax(arch, logits, &mut p) - f64::from(logits[token as usize])
            });
        let loss = losses.sum();
        self.losses.push(loss);
        Ok(loss)
    }

    /// Makes the adapters weaker until a window of control text keeps the bound: what a step costs
    /// is known only behind it, and the first steps on a model may be far too long.
    fn shorten(&mut self, rehearsal: &Rehearsal, turn: usize) -> Result<(), LearnError> {
        for tries in 0..MAX_SHORTENED {
            let divergence =
                rehearsal.gradient(&mut self.session, self.id, turn, 1.0, &mut self.none)?;
            if divergence <= self.max_divergence {
                break;
            }
            // The divergence grows with the square of the strength, as long as it is small.
            let factor = match (REHEARSED_SHARE * self.max_divergence / divergence).sqrt() {
                factor if factor.is_finite() && tries + 1 < MAX_SHORTENED => factor.max(0.1),
                _ => 0.0,
            };
            self.rein.shrunk(factor);
            let adapters = &mut self.session.adapters();
            adapters.update(self.id, |adapter| adapter.rescale(factor as f32))?;
        }
        Ok(())
    }

    fn randomise(&mut self, turn: usize) {
        let n = self.gradients.sites().len();
        for site in 0..n {
            let Some(term) = self.gradients.term_mut(site) else {
                continue;
            };
            let (a, b) = term.parts_mut();
            for (i, part) in [a, b].into_iter().enumerate() {
                let length = part.iter().map(|x| x * x).sum::<f32>().sqrt();
                let seed = (turn * 2 + i) * n + site;
                part.copy_from_slice(&random(part.len(), length, seed as u64));
            }
        }
    }
}
