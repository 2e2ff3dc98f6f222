//! Adapters of the output head that learn from the stream, and their negative controls.

use crate::bench::LearningOptions;
use crate::bench::temperature::Tempered;
use crate::clock::Timer;
use crate::learn::teacher::Teacher;
use crate::learn::{
    Experts, HeadLearner, LearnError, Learner, LearnerOptions, Slices, TrainingSignal,
};
use ruvllm::Model;
use ruvllm::arch::Arch;

/// What an adapter learns from.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Reads {
    Stream,
    /// The stream's contexts, each followed by a token from half a stream away: right words in
    /// wrong places.
    Shuffled,
    /// Contexts of the control text, shuffled likewise, so that the words are wrong, too.
    OtherShuffled,
}

/// A token of the stream, and what the base model made of its context.
pub(super) struct Predicted<'t> {
    pub(super) context: &'t [u32],
    pub(super) token: u32,
    /// Hidden state after the final norm, and the head's product.
    pub(super) h: &'t [f32],
    pub(super) raw: &'t [f32],
    pub(super) logits: &'t [f32],
    /// Loss of the base model.
    pub(super) loss: f64,
}

/// An adapter without a mixture.
pub(super) struct Arm {
    pub(super) name: String,
    lesson: TrainingSignal,
    pub(super) reads: Reads,
    pub(super) adapter: HeadLearner,
    /// Loss of each chunk.
    pub(super) losses: Vec<f64>,
    pub(super) tempered: Option<Tempered>,
    pub(super) mixture: Option<Mixture>,
    pub(super) update_ms: Vec<f64>,
    pub(super) settle_ms: Vec<f64>,
    pub(super) longest_ms: f64,
}

/// A mixture whose caches hold each chunk's words in another order: it measures what a mixture
/// gains by word frequencies and lower confidence alone. Its weights adapt to the stream.
pub(super) struct Mixture {
    pub(super) name: &'static str,
    experts: Experts,
    /// All tokens that the caches have stored.
    text: Vec<u32>,
    pub(super) losses: Vec<f64>,
}

impl Mixture {
    /// Stores a chunk's tokens, in random order, with its hidden states `(n, n_embd)`.
    pub(super) fn keep(&mut self, arch: Arch, states: &[f32], tokens: &[u32], turn: usize) {
        let mut state = turn as u64;
        let mut tokens = tokens.to_vec();
        for i in (1..tokens.len()).rev() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            tokens.swap(i, (state >> 33) as usize % (i + 1));
        }
        for (h, token) in states
            .chunks_exact(states.len() / tokens.len().max(1))
            .zip(tokens)
        {
            self.experts.keep(arch, &self.text, h, token);
            self.text.push(token);
        }
    }
}

impl Arm {
    /// All adapters, with the control text of `learner`, which was calibrated.
    pub(super) fn all(
        model: &Model,
        options: &LearningOptions,
        learner: &Learner,
    ) -> Result<Vec<Arm>, LearnError> {
        let ranks = [1, 2, 4].map(|rank| {
            let name = format!("head adapter, rank {rank}");
            (name, rank, TrainingSignal::Text, Reads::Stream)
        });
        let negatives = [
            (
                "learns from the stream, shuffled",
                TrainingSignal::Text,
                Reads::Shuffled,
            ),
            (
                "learns from other text, shuffled",
                TrainingSignal::Text,
                Reads::OtherShuffled,
            ),
            (
                "learns the opposite",
                TrainingSignal::Opposite,
                Reads::Stream,
            ),
        ]
        .map(|(what, lesson, reads)| (format!("control: adapter {what}"), 4, lesson, reads));
        let random = "control: adapter, random direction of equal length".to_owned();
        let random = (random, 4, TrainingSignal::Chance, Reads::Stream);
        let all = ranks.into_iter().chain(negatives).chain([random]);
        all.map(|(name, rank, lesson, reads)| {
            let options = LearnerOptions {
                rank,
                ..options.learner.clone()
            };
            let mut own = Learner::new(model, &options)?;
            own.adapter.control = learner.adapter.control.clone();
            own.adapter.fisher = learner.adapter.fisher.clone();
            own.adapter.rates.rate = learner.adapter.rates.rate;
            Ok(Arm::new(name, lesson, reads, own))
        })
        .collect()
    }

    fn new(name: String, lesson: TrainingSignal, reads: Reads, learner: Learner) -> Arm {
        let mixture = match reads {
            Reads::Stream => None,
            Reads::Shuffled => Some("mixture, caches of the stream's words in another order"),
            Reads::OtherShuffled => Some("mixture, caches of other text's words in another order"),
        };
        let experts = learner.experts;
        Arm {
            name,
            lesson,
            reads,
            adapter: learner.adapter,
            losses: Vec::new(),
            tempered: (lesson == TrainingSignal::Text && reads == Reads::Stream)
                .then(Tempered::default),
            mixture: mixture.map(|name| Mixture {
                name,
                experts,
                text: Vec::new(),
                losses: Vec::new(),
            }),
            update_ms: Vec::new(),
            settle_ms: Vec::new(),
            longest_ms: 0.0,
        }
    }

    pub(super) fn next_chunk(&mut self) {
        self.losses.push(0.0);
        self.tempered.iter_mut().for_each(Tempered::next_chunk);
        let mixture = self.mixture.iter_mut();
        mixture.for_each(|mixture| mixture.losses.push(0.0));
    }

    /// Adds the loss of a token to that of the latest chunk; `q` and `adapted` are buffers.
    pub(super) fn score(
        &mut self,
        arch: Arch,
        t: &Predicted<'_>,
        q: &mut Vec<f32>,
        adapted: &mut Vec<f32>,
    ) {
        let loss = self
            .adapter
            .loss(arch, t.h, t.raw, t.loss, t.token, q, adapted);
        *self.losses.last_mut().unwrap_or(&mut 0.0) += loss;
        if let Some(tempered) = &mut self.tempered {
            let is_idle = self.adapter.head.is_idle();
            let logits = if is_idle { t.logits } else { &**adapted };
            tempered.add(arch, logits, t.token, q);
        }
        if let Some(Mixture {
            experts,
            losses: mixed,
            ..
        }) = &mut self.mixture
        {
            let scored = experts.score(arch, t.context, t.h, t.loss, loss, t.token);
            *mixed.last_mut().unwrap_or(&mut 0.0) += scored.mixture;
        }
    }

    /// Makes the updates that are due, and times them.
    pub(super) fn learn(&mut self, teacher: &Teacher<'_>) -> Result<(), LearnError> {
        let begun = Timer::start();
        teacher.prepare(&mut self.adapter, self.lesson, &mut Slices::whole())?;
        let mut before = Timer::start();
        while teacher.teach(&mut self.adapter, self.lesson)? {
            self.update_ms.push(before.elapsed().as_secs_f64() * 1e3);
            before = Timer::start();
        }
        if !self.adapter.is_undecided() {
            teacher.settle(&mut self.adapter, self.lesson, &mut Slices::whole())?;
            self.settle_ms.push(before.elapsed().as_secs_f64() * 1e3);
            let longest = begun.elapsed().as_secs_f64() * 1e3;
            self.longest_ms = self.longest_ms.max(longest);
        }
        Ok(())
    }
}
