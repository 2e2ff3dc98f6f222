//! A measurement: sessions and adapters at work, and their losses so far.

use crate::bench::arms::{Arm, Predicted, Reads};
use crate::bench::deep::{DeepArm, Rehearsal, Told};
use crate::bench::temperature::Tempered;
use crate::bench::truncation::{Exact, Truncation};
use crate::bench::{LearningOptions, base_softmax};
use crate::clock::Timer;
use crate::learn::teacher::{Teacher, head_rows};
use crate::learn::windows::{window, windows};
use crate::learn::{HeadRows, LearnError, Learner, Learning, UPDATE_TOKENS};
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::engine::EngineOptions;
use ruvllm::model::LogitTransform;
use ruvllm::{Engine, SessionOptions};
use std::ops::Range;

/// One chunk in this many times a prefill, with which costs are compared.
const TIMED: usize = 4;
/// One chunk in this many is scored without the adapters of backpropagation, to check whether they
/// help.
const JUDGED: usize = 2;
/// One chunk in this many is also learnt with the exact gradient, to measure what truncation leaves
/// out.
const COMPARED: usize = 8;

/// Losses of each chunk, in nats, of methods without an adapter of their own.
#[derive(Default)]
pub(super) struct ByChunk {
    /// Number of tokens that are predicted.
    pub(super) sizes: Vec<f64>,
    pub(super) base: Vec<f64>,
    pub(super) ngrams: Vec<f64>,
    pub(super) neighbours: Vec<f64>,
    pub(super) mixture: Vec<f64>,
    /// Of the base model with 4 times the context.
    pub(super) far: Vec<f64>,
}

pub(super) struct Measurement<'a> {
    pub(super) options: &'a LearningOptions,
    arch: Arch,
    transform: LogitTransform,
    n_vocab: usize,
    pub(super) n_ctx: usize,
    pub(super) n_chunk: usize,
    stream: &'a [u32],
    /// Control text that the learners were calibrated on.
    known: &'a [u32],
    pub(super) session: Session,
    rows: HeadRows,
    learner: Learner,
    rehearsal: Rehearsal,
    pub(super) arms: Vec<Arm>,
    pub(super) deep_arms: Vec<DeepArm>,
    /// Loss of the base model with 4 times the context, of each token.
    far_losses: Vec<f64>,
    pub(super) by_chunk: ByChunk,
    pub(super) base_tempered: Tempered,
    pub(super) deep_tempered: Tempered,
    pub(super) truncation: Truncation,
    pub(super) prefill_ms: Vec<f64>,
}

impl<'a> Measurement<'a> {
    pub(super) fn new(
        model: &Model,
        stream: &'a [u32],
        known: &'a [u32],
        n_ctx: usize,
        options: &'a LearningOptions,
    ) -> Result<Measurement<'a>, LearnError> {
        let engine = Engine::new(
            model,
            &EngineOptions {
                n_threads: options.n_threads,
                ..Default::default()
            },
        )?;
        let at = |n_ctx| {
            engine.session_with(&SessionOptions {
                n_ctx: Some(n_ctx),
                ..Default::default()
            })
        };
        let (mut session, mut far) = (at(n_ctx)?, at(4 * n_ctx)?);
        let (arch, h) = (model.arch(), model.hparams());
        let (transform, n_chunk) = (h.logit_transform(), n_ctx / 2);

        session.set_learner(Learner::new(model, &options.learner)?)?;
        session.calibrate(known)?;
        let Some(mut learner) = session.take_learner() else {
            return Err(LearnError::NotLearning);
        };
        learner.adapter.rates.rate = options.head_rate;
        let rows = head_rows(session.engine())?;
        let arms = Arm::all(model, options, &learner)?;

        let (mut p, mut logits) = (Vec::new(), Vec::new());
        let mut far_losses = vec![0.0; stream.len()];
        windows(&mut far, stream, |i, _, raw| {
            let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
            far_losses[i] = lse - f64::from(logits[stream[i] as usize]);
        })?;

        let rehearsal = Rehearsal::new(&mut session, known, n_chunk / 2)?;
        let deep_arms = [Told::Stream, Told::Shuffled, Told::Opposite, Told::Chance]
            .into_iter()
            .filter(|told| *told == Told::Stream || options.deep_controls)
            .map(|told| DeepArm::new(&engine, n_ctx, options, told))
            .collect::<Result<_, _>>()?;
        Ok(Measurement {
            options,
            arch,
            transform,
            n_vocab: h.n_vocab,
            n_ctx,
            n_chunk,
            stream,
            known,
            session,
            rows,
            learner,
            rehearsal,
            arms,
            deep_arms,
            far_losses,
            by_chunk: ByChunk::default(),
            base_tempered: Tempered::default(),
            deep_tempered: Tempered::default(),
            truncation: Truncation::default(),
            prefill_ms: Vec::new(),
        })
    }

    /// Scores chunk number `c` of the stream with all methods, then lets them learn it.
    pub(super) fn chunk(&mut self, c: usize, chunk: Range<usize>) -> Result<(), LearnError> {
        if c.is_multiple_of(TIMED) {
            self.time_prefill(chunk.clone())?;
        }
        let compared = c % COMPARED == COMPARED - 1 && chunk.len().is_multiple_of(UPDATE_TOKENS);
        let mut exact = compared.then(|| Exact::new(self.n_vocab));
        self.score(c, chunk.clone(), &mut exact)?;
        self.read_other_text(c)?;
        self.learn_deep(c, chunk)?;

        let teacher = Teacher::new(self.session.engine(), &self.rows);
        let adapter = &mut self.learner.adapter;
        self.truncation.learn(self.arch, &teacher, adapter, exact)?;
        self.arms.iter_mut().try_for_each(|arm| arm.learn(&teacher))
    }

    fn time_prefill(&mut self, chunk: Range<usize>) -> Result<(), LearnError> {
        let before = Timer::start();
        let none = &mut |_: usize, _: &[f32], _: &[f32]| ();
        window(&mut self.session, self.stream, chunk, self.n_chunk, none)?;
        self.prefill_ms.push(before.elapsed().as_secs_f64() * 1e3);
        Ok(())
    }

    /// The tokens of a chunk that are predicted: nothing predicts the first one of the stream.
    fn came(&self, chunk: &Range<usize>) -> &'a [u32] {
        &self.stream[chunk.start.max(1)..chunk.end.max(1)]
    }

    /// Scores a chunk with all methods but backpropagation, which remember it to learn from it.
    fn score(
        &mut self,
        c: usize,
        chunk: Range<usize>,
        exact: &mut Option<Exact>,
    ) -> Result<(), LearnError> {
        let (arch, transform, stream) = (self.arch, self.transform, self.stream);
        let came = self.came(&chunk);
        let Measurement {
            session,
            learner,
            arms,
            base_tempered,
            ..
        } = self;
        let (mut p, mut q, mut logits, mut adapted) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut sums, mut states) = ([0.0; 4], Vec::new());
        base_tempered.next_chunk();
        arms.iter_mut().for_each(Arm::next_chunk);
        window(
            session,
            stream,
            chunk.clone(),
            self.n_chunk,
            &mut |i, h, raw| {
                let (context, token) = (&stream[..i], stream[i]);
                states.extend_from_slice(h);
                let losses = learner.met(arch, context, h, raw, token);
                let all = [losses.base, losses.ngram, losses.knn, losses.mixture];
                let sums = sums.iter_mut().zip(all);
                sums.for_each(|(sum, loss)| *sum += loss);
                let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
                base_tempered.add(arch, &logits, token, &mut q);
                if let Some(exact) = exact {
                    let adapter = &learner.adapter;
                    exact.add(arch, adapter, (h, raw, token), &mut q, &mut adapted);
                }
                let predicted = Predicted {
                    context,
                    token,
                    h,
                    raw,
                    logits: &logits,
                    loss: losses.base,
                };
                for arm in arms.iter_mut() {
                    arm.score(arch, &predicted, &mut q, &mut adapted);
                    let token = match arm.reads {
                        Reads::Stream => token,
                        Reads::Shuffled => stream[(i + stream.len() / 2) % stream.len()],
                        Reads::OtherShuffled => continue,
                    };
                    arm.adapter.observed(arch, h, raw, &p, lse, token);
                }
            },
        )?;
        for arm in arms.iter_mut().filter(|arm| arm.reads == Reads::Shuffled) {
            let mixture = arm.mixture.iter_mut();
            mixture.for_each(|mixture| mixture.keep(arch, &states, came, c));
        }
        let [base, ngrams, neighbours, mixture] = sums;
        self.by_chunk.base.push(base);
        self.by_chunk.ngrams.push(ngrams);
        self.by_chunk.neighbours.push(neighbours);
        self.by_chunk.mixture.push(mixture);
        let far = &self.far_losses[chunk];
        self.by_chunk.far.push(far.iter().sum());
        self.by_chunk.sizes.push(came.len() as f64);
        Ok(())
    }

    /// Shows contexts of other text, each followed by a token from quite another place in it; at
    /// the end of that text it starts again with another shift, since repetitions could be learnt,
    /// and no token keeps its own place.
    fn read_other_text(&mut self, c: usize) -> Result<(), LearnError> {
        let (arch, transform, known, n_chunk) =
            (self.arch, self.transform, self.known, self.n_chunk);
        let pieces = (known.len() / n_chunk).max(1);
        let (turn, start) = (c / pieces, c % pieces * n_chunk);
        let away = (1 + (3 + turn) % 8) * known.len() / 9;
        let other = start..(start + n_chunk).min(known.len());
        let arms = self.arms.iter_mut();
        let mut arms: Vec<&mut Arm> = arms
            .filter(|arm| arm.reads == Reads::OtherShuffled)
            .collect();
        let (mut states, mut p, mut logits) = (Vec::new(), Vec::new(), Vec::new());
        window(
            &mut self.session,
            known,
            other.clone(),
            n_chunk,
            &mut |i, h, raw| {
                states.extend_from_slice(h);
                let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
                let token = known[(i + away) % known.len()];
                for arm in &mut arms {
                    arm.adapter.observed(arch, h, raw, &p, lse, token);
                }
            },
        )?;
        let tokens = &known[other.start.max(1)..other.end];
        for arm in arms {
            let mixture = arm.mixture.iter_mut();
            mixture.for_each(|mixture| mixture.keep(arch, &states, tokens, c));
        }
        Ok(())
    }

    /// Scores a chunk with the adapters of backpropagation, which learn it then.
    fn learn_deep(&mut self, c: usize, chunk: Range<usize>) -> Result<(), LearnError> {
        let came = self.came(&chunk);
        let base = self.by_chunk.base.last().copied().unwrap_or(0.0);
        let mut q = Vec::new();
        self.deep_tempered.next_chunk();
        for arm in &mut self.deep_arms {
            let helps = arm.evidence.verdict() == Some(true);
            let loss = arm.learn(self.stream, chunk.clone(), self.n_chunk, c, &self.rehearsal)?;
            arm.judged_losses.push(if helps { loss } else { base });
            if c.is_multiple_of(JUDGED) {
                arm.evidence.add(base - loss, came.len());
            }
            if arm.told == Told::Stream {
                for (logits, &token) in arm.logits.chunks_exact(self.n_vocab).zip(came) {
                    self.deep_tempered.add(self.arch, logits, token, &mut q);
                }
            }
        }
        Ok(())
    }
}
