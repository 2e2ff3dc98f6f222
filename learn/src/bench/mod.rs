//! Gain and cost of learning during use, measured on a text: every token is scored before anything
//! is learnt from it.

mod deep;
mod estimate;
mod forgetting;
mod temperature;

use crate::clock::Timer;
use crate::learn::teacher::{Teacher, head_rows};
use crate::learn::windows::{window, windows};
use crate::learn::{
    Experts, HeadLearner, LearnError, Learner, LearnerOptions, Learning, Lesson, Ranks, Slices,
    UPDATE_TOKENS, softmax,
};
use deep::{DeepArm, Rehearsal, Told};
use estimate::bootstrap;
use forgetting::{forgetting, forgetting_of};
use ruvllm::arch::Arch;
use ruvllm::engine::SessionOptions;
use ruvllm::engine::{Engine, EngineOptions};
use ruvllm::model::{LogitTransform, Model};
use std::num::NonZeroUsize;
use temperature::Tempered;

pub use estimate::Estimate;
pub use forgetting::Forgetting;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct LearningOptions {
    /// Context of the model, in tokens, at least 8; 0 means a quarter of the context it was
    /// trained for, at most 1024. Each token is predicted from at least half of it.
    pub n_ctx: usize,
    /// Number of threads, as in [`EngineOptions`].
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

/// One chunk in this many times a prefill, with which costs are compared.
const TIMED: usize = 4;
/// One chunk in this many is scored without the adapters of backpropagation, to check whether they
/// help.
const JUDGED: usize = 2;
/// One chunk in this many is also learnt with the exact gradient, to measure what truncation leaves
/// out.
const COMPARED: usize = 8;

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

/// What an adapter learns from.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    Stream,
    /// The stream's contexts, each followed by a token from half a stream away: right words in
    /// wrong places.
    Shuffled,
    /// Contexts of the control text, shuffled likewise, so that the words are wrong, too.
    OtherShuffled,
}

/// An adapter without a mixture.
struct Arm {
    name: String,
    lesson: Lesson,
    reads: Reads,
    adapter: HeadLearner,
    losses: Vec<f64>,
    tempered: Option<Tempered>,
    mixture: Option<Mixture>,
    update_ms: Vec<f64>,
    settle_ms: Vec<f64>,
    longest_ms: f64,
}

/// A mixture whose caches hold each chunk's words in another order: it measures what a mixture
/// gains by word frequencies and lower confidence alone. Its weights adapt to the stream.
struct Mixture {
    name: &'static str,
    experts: Experts,
    /// All tokens that the caches have stored.
    text: Vec<u32>,
    losses: Vec<f64>,
}

impl Mixture {
    /// Stores a chunk's tokens, in random order, with its hidden states `(n, n_embd)`.
    fn keep(&mut self, arch: Arch, states: &[f32], tokens: &[u32], turn: usize) {
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

/// Sums of a chunk's exact gradient with respect to `s·B`, as factors of the head's rows, for
/// comparison with the truncated one.
struct Exact {
    rows: Vec<(u32, Ranks)>,
}

impl Exact {
    fn new(n_vocab: usize) -> Exact {
        Exact {
            rows: (0..n_vocab as u32).map(|v| (v, Ranks::default())).collect(),
        }
    }

    fn add(&mut self, adapter: &HeadLearner, z: &Ranks, p: &[f32], logits: &[f32], token: u32) {
        for (v, (row, &p)) in self.rows.iter_mut().zip(p).enumerate() {
            let came = if v == token as usize { 1.0 } else { 0.0 };
            let error = (p - came) * adapter.transform.slope(logits[v]) / UPDATE_TOKENS as f32;
            row.1.iter_mut().zip(z).for_each(|(u, z)| *u += error * z);
        }
    }
}

/// Running mean.
#[derive(Default)]
struct Mean {
    sum: f64,
    n: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        (self.sum, self.n) = (self.sum + x, self.n + 1.0);
    }

    /// The mean; NaN without numbers.
    fn value(&self) -> f64 {
        self.sum / self.n
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
    let n_chunk = n_ctx / 2;
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
    let arch = model.arch();
    let transform = model.hparams().logit_transform();
    let n_vocab = model.hparams().n_vocab;
    let (known, unknown) = control.split_at(control.len() / 2);

    session.set_learner(Learner::new(model, &options.learner)?)?;
    session.calibrate(known)?;
    let Some(mut learner) = session.take_learner() else {
        return Err(LearnError::NotLearning);
    };
    learner.adapter.rates.rate = options.head_rate;
    let rows = head_rows(session.engine())?;

    let ranks = [1, 2, 4].map(|rank| {
        (
            format!("head adapter, rank {rank}"),
            rank,
            Lesson::Text,
            Reads::Stream,
        )
    });
    let negatives = [
        (
            "control: adapter learns from the stream, shuffled",
            Lesson::Text,
            Reads::Shuffled,
        ),
        (
            "control: adapter learns from other text, shuffled",
            Lesson::Text,
            Reads::OtherShuffled,
        ),
        (
            "control: adapter learns the opposite",
            Lesson::Opposite,
            Reads::Stream,
        ),
        (
            "control: adapter, random direction of equal length",
            Lesson::Chance,
            Reads::Stream,
        ),
    ]
    .map(|(name, lesson, reads)| (name.to_owned(), 4, lesson, reads));
    let mut arms = Vec::new();
    for (name, rank, lesson, reads) in ranks.into_iter().chain(negatives) {
        let mut all = Learner::new(
            model,
            &LearnerOptions {
                rank,
                ..options.learner.clone()
            },
        )?;
        all.adapter.control = learner.adapter.control.clone();
        all.adapter.fisher = learner.adapter.fisher.clone();
        all.adapter.rates.rate = options.head_rate;
        let mixture = match reads {
            Reads::Stream => None,
            Reads::Shuffled => Some("mixture, caches of the stream's words in another order"),
            Reads::OtherShuffled => Some("mixture, caches of other text's words in another order"),
        };
        let experts = all.experts;
        arms.push(Arm {
            name,
            lesson,
            reads,
            adapter: all.adapter,
            losses: Vec::new(),
            tempered: (lesson == Lesson::Text && reads == Reads::Stream).then(Tempered::default),
            mixture: mixture.map(|name| Mixture {
                name,
                experts,
                text: Vec::new(),
                losses: Vec::new(),
            }),
            update_ms: Vec::new(),
            settle_ms: Vec::new(),
            longest_ms: 0.0,
        });
    }

    // The base model with four times the context; the same tokens, in larger chunks.
    let (mut p, mut q, mut logits, mut adapted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut far_losses = vec![0.0; stream.len()];
    windows(&mut far, stream, |i, _, raw| {
        let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
        far_losses[i] = lse - f64::from(logits[stream[i] as usize]);
    })?;

    let rehearsal = Rehearsal::new(&mut session, known, n_chunk / 2)?;
    let mut deep_arms = Vec::new();
    for told in [Told::Stream, Told::Shuffled, Told::Opposite, Told::Chance] {
        if told == Told::Stream || options.deep_controls {
            deep_arms.push(DeepArm::new(&engine, n_ctx, options, told)?);
        }
    }
    let mut prefill_ms = Vec::new();

    let mut by_chunk: [Vec<f64>; 5] = Default::default();
    let (mut base_tempered, mut deep_tempered) = (Tempered::default(), Tempered::default());
    let mut far_by_chunk = Vec::new();
    let mut sizes = Vec::new();
    let (mut bounds, mut left_out) = (Mean::default(), Mean::default());
    let mut states = Vec::new();
    for (c, start) in (0..stream.len()).step_by(n_chunk).enumerate() {
        let chunk = start..(start + n_chunk).min(stream.len());
        if c % TIMED == 0 {
            let before = Timer::start();
            window(
                &mut session,
                stream,
                chunk.clone(),
                n_chunk,
                &mut |_, _, _| (),
            )?;
            prefill_ms.push(before.elapsed().as_secs_f64() * 1e3);
        }
        // Nothing predicts the first token of the stream.
        let came = &stream[chunk.start.max(1)..chunk.end.max(1)];
        let compared = c % COMPARED == COMPARED - 1 && chunk.len() % UPDATE_TOKENS == 0;
        let mut exact = compared.then(|| Exact::new(n_vocab));
        let mut sums = [0.0; 5];
        states.clear();
        base_tempered.next_chunk();
        for arm in &mut arms {
            arm.losses.push(0.0);
            arm.tempered.iter_mut().for_each(Tempered::next_chunk);
            arm.mixture
                .iter_mut()
                .for_each(|mixture| mixture.losses.push(0.0));
        }
        window(
            &mut session,
            stream,
            chunk.clone(),
            n_chunk,
            &mut |i, h, raw| {
                let token = stream[i];
                states.extend_from_slice(h);
                let losses = learner.met(arch, &stream[..i], h, raw, token);
                let all = [
                    losses.base,
                    losses.adapter,
                    losses.ngram,
                    losses.knn,
                    losses.mixture,
                ];
                sums.iter_mut()
                    .zip(all)
                    .for_each(|(sum, loss)| *sum += loss);
                let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
                base_tempered.add(arch, &logits, token, &mut q);
                if let Some(exact) = &mut exact {
                    learner
                        .adapter
                        .exact_loss(arch, h, raw, token, &mut q, &mut adapted);
                    exact.add(
                        &learner.adapter,
                        &learner.adapter.head.project(arch, h),
                        &q,
                        &adapted,
                        token,
                    );
                }
                for arm in &mut arms {
                    let loss =
                        arm.adapter
                            .loss(arch, h, raw, losses.base, token, &mut q, &mut adapted);
                    *arm.losses.last_mut().unwrap_or(&mut 0.0) += loss;
                    if let Some(tempered) = &mut arm.tempered {
                        tempered.add(
                            arch,
                            if arm.adapter.head.is_idle() {
                                &logits
                            } else {
                                &adapted
                            },
                            token,
                            &mut q,
                        );
                    }
                    if let Some(Mixture {
                        experts,
                        losses: mixed,
                        ..
                    }) = &mut arm.mixture
                    {
                        let scored = experts.score(arch, &stream[..i], h, losses.base, loss, token);
                        *mixed.last_mut().unwrap_or(&mut 0.0) += scored.mixture;
                    }
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
            arm.mixture
                .iter_mut()
                .for_each(|mixture| mixture.keep(arch, &states, came, c));
        }
        // Contexts of other text, each followed by a token from quite another place in it; at the
        // end of that text it starts again with another shift, since repetitions could be
        // learnt, and no token keeps its own place.
        let pieces = (known.len() / n_chunk).max(1);
        let (turn, start) = (c / pieces, c % pieces * n_chunk);
        let away = (1 + (3 + turn) % 8) * known.len() / 9;
        let other = start..(start + n_chunk).min(known.len());
        states.clear();
        window(
            &mut session,
            known,
            other.clone(),
            n_chunk,
            &mut |i, h, raw| {
                states.extend_from_slice(h);
                let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
                for arm in arms
                    .iter_mut()
                    .filter(|arm| arm.reads == Reads::OtherShuffled)
                {
                    arm.adapter
                        .observed(arch, h, raw, &p, lse, known[(i + away) % known.len()]);
                }
            },
        )?;
        for arm in arms
            .iter_mut()
            .filter(|arm| arm.reads == Reads::OtherShuffled)
        {
            let tokens = &known[other.start.max(1)..other.end];
            arm.mixture
                .iter_mut()
                .for_each(|mixture| mixture.keep(arch, &states, tokens, c));
        }
        for (sum, by_chunk) in sums.into_iter().zip(&mut by_chunk) {
            by_chunk.push(sum);
        }
        far_by_chunk.push(far_losses[chunk.clone()].iter().sum());
        sizes.push(came.len() as f64);

        deep_tempered.next_chunk();
        for arm in &mut deep_arms {
            let helps = arm.evidence.verdict() == Some(true);
            let loss = arm.learn(stream, chunk.clone(), n_chunk, c, &rehearsal)?;
            arm.judged_losses.push(if helps { loss } else { sums[0] });
            if c % JUDGED == 0 {
                arm.evidence.add(sums[0] - loss, came.len());
            }
            if arm.told == Told::Stream {
                let rows = arm.logits.chunks_exact(n_vocab).zip(came);
                rows.for_each(|(logits, &token)| deep_tempered.add(arch, logits, token, &mut q));
            }
        }

        let moved = learner.adapter.is_due() || learner.adapter.is_undecided();
        let teacher = Teacher::new(session.engine(), &rows);
        teacher.prepare(&mut learner.adapter, Lesson::Text, &mut Slices::whole())?;
        let mut truncated: Vec<f32> = Vec::new();
        while let Some(g) = teacher.head_gradient(&mut learner.adapter, Lesson::Text)? {
            learner.adapter.step(Lesson::Text, &g);
            bounds.add(learner.adapter.truncation);
            truncated.resize(g.len(), 0.0);
            arch.add(&mut truncated, &g);
        }
        teacher.settle(&mut learner.adapter, Lesson::Text, &mut Slices::whole())?;
        if let Some(exact) = exact.filter(|_| !moved) {
            let exact = teacher.combine(
                &exact.rows,
                &Default::default(),
                learner.adapter.head.rank,
                &mut Slices::whole(),
            )?;
            let norm =
                |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let error = norm(&mut exact.iter().zip(&truncated).map(|(x, y)| x - y));
            left_out.add(error / norm(&mut exact.iter().copied()).max(f64::MIN_POSITIVE));
        }
        for arm in &mut arms {
            let begun = Timer::start();
            teacher.prepare(&mut arm.adapter, arm.lesson, &mut Slices::whole())?;
            let mut before = Timer::start();
            while teacher.teach(&mut arm.adapter, arm.lesson)? {
                arm.update_ms.push(before.elapsed().as_secs_f64() * 1e3);
                before = Timer::start();
            }
            if !arm.adapter.is_undecided() {
                teacher.settle(&mut arm.adapter, arm.lesson, &mut Slices::whole())?;
                arm.settle_ms.push(before.elapsed().as_secs_f64() * 1e3);
                arm.longest_ms = arm.longest_ms.max(begun.elapsed().as_secs_f64() * 1e3);
            }
        }
    }

    let (control_loss, forgotten) = {
        let heads: Vec<&HeadLearner> = arms.iter().map(|arm| &arm.adapter).collect();
        forgetting(&mut session, unknown, &heads, options.n_bootstrap)?
    };
    let n_tokens = sizes.iter().sum::<f64>();
    let base = &by_chunk[0];
    let less = |base: &[f64], losses: &[f64]| {
        bootstrap(
            base.iter().zip(losses).map(|(b, l)| b - l),
            &sizes,
            options.n_bootstrap,
        )
    };
    let contender = |name: &str, losses: &[f64]| {
        let mut so_far = 0.0;
        let running_gain = base.iter().zip(losses).map(|(b, l)| {
            so_far += b - l;
            so_far
        });
        Contender {
            name: name.to_owned(),
            negative: name.starts_with("control"),
            loss: losses.iter().sum::<f64>() / n_tokens,
            running_gain: running_gain.collect(),
            gain: less(base, losses),
            beyond_temperature: None,
            beyond_words: None,
            update_ms: 0.0,
            settle_ms: 0.0,
            longest_ms: 0.0,
            forgetting: None,
        }
    };
    let beyond = |tempered: &Tempered| less(base_tempered.best(), tempered.best());
    let mut contenders = vec![
        contender("base", base),
        contender(
            "base, the best temperature in hindsight",
            base_tempered.best(),
        ),
        contender("base, 4 times the context", &far_by_chunk),
        contender("n-gram cache", &by_chunk[2]),
        contender("nearest neighbours", &by_chunk[3]),
    ];
    let mixtures: Vec<&Mixture> = arms.iter().filter_map(|arm| arm.mixture.as_ref()).collect();
    let beyond_words = mixtures
        .first()
        .map(|words| less(&words.losses, &by_chunk[4]));
    contenders.push(Contender {
        beyond_words,
        ..contender("mixture", &by_chunk[4])
    });
    contenders.extend(mixtures.iter().map(|m| contender(m.name, &m.losses)));
    let (mut learning, mut negative) = (Vec::new(), Vec::new());
    let shuffled = arms
        .iter()
        .find(|arm| arm.reads == Reads::Shuffled)
        .map(|arm| arm.losses.clone());
    for (arm, forgetting) in arms.iter_mut().zip(&forgotten) {
        let found = Contender {
            update_ms: median(&arm.update_ms).unwrap_or(0.0),
            settle_ms: median(&arm.settle_ms).unwrap_or(0.0),
            longest_ms: arm.longest_ms,
            forgetting: Some(*forgetting),
            beyond_temperature: arm.tempered.as_ref().map(beyond),
            beyond_words: arm
                .tempered
                .as_ref()
                .and(shuffled.as_ref())
                .map(|words| less(words, &arm.losses)),
            ..contender(&arm.name, &arm.losses)
        };
        if found.negative {
            &mut negative
        } else {
            &mut learning
        }
        .push(found);
    }
    let mut deep_ms = 0.0;
    let shuffled = deep_arms
        .iter()
        .find(|arm| arm.told == Told::Shuffled)
        .map(|arm| arm.losses.clone());
    for mut arm in deep_arms {
        let forgetting =
            forgetting_of(&mut session, &mut arm.session, unknown, options.n_bootstrap)?;
        let longest_ms = arm.update_ms.iter().copied().fold(0.0, f64::max);
        let update_ms = median(&arm.update_ms).unwrap_or(0.0);
        let (name, judged) = arm.names();
        let found = Contender {
            update_ms,
            longest_ms,
            forgetting: Some(forgetting),
            ..contender(name, &arm.losses)
        };
        let judged = judged.map(|name| contender(name, &arm.judged_losses));
        if arm.told == Told::Stream {
            deep_ms = update_ms;
            let beyond_words = shuffled.as_ref().map(|words| less(words, &arm.losses));
            learning.push(Contender {
                beyond_temperature: Some(beyond(&deep_tempered)),
                beyond_words,
                ..found
            });
            learning.extend(judged);
        } else {
            negative.push(found);
            negative.extend(judged);
        }
    }
    contenders.extend(learning);
    contenders.extend(negative);
    Ok(LearningReport {
        n_ctx,
        n_tokens: n_tokens as usize,
        n_chunk,
        deep_cost: deep_ms / median(&prefill_ms).unwrap_or(0.0).max(f64::MIN_POSITIVE),
        base_loss: base.iter().sum::<f64>() / n_tokens,
        control_loss,
        truncation: left_out.value(),
        truncation_bound: bounds.value(),
        contenders,
    })
}

/// Median of `values`, if there are any.
fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}

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
