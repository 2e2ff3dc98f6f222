//! What learning while running is worth on a text, and what it costs: every token is scored before
//! anything is learnt from it.

use crate::error::{Error, LearnError};
use crate::exec::{AdapterId, Session, SessionOptions};
use crate::lora::{Adapter, Gradients, HeadLearner, Learner, LearnerOptions, Lesson, Optimiser, Sgd, softmax};
use crate::model::{Model, Site};
use std::sync::Arc;
use std::time::Instant;

/// How to measure.
#[derive(Clone, Debug)]
pub struct LearningOptions {
    /// Context of the model, in tokens, at least 8; 0 means a quarter of what it was trained for, at most 1024. Each
    /// token is predicted from at least half of it.
    pub n_ctx: usize,
    /// Threads, as in [`SessionOptions`].
    pub n_threads: usize,
    /// What learns.
    pub learner: LearnerOptions,
    /// Step of backpropagation, relative to the norm of a matrix.
    pub deep_rate: f32,
    /// Resamples of the bootstrap.
    pub n_bootstrap: usize,
}

/// Rank of the adapters that backpropagation trains.
const DEEP_RANK: usize = 4;

/// What logits are divided by, one after the other, to tell what a change of temperature alone is worth.
const TEMPERATURES: [f32; 8] = [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7];

/// Whether backpropagation trains a matrix: those of feed-forward layers and of attention's output, in the
/// last quarter of the layers.
fn is_deep(site: &Site, n_layer: usize) -> bool {
    let part = ["ffn_down", "ffn_up", "ffn_gate", "attn_output"].iter().any(|part| site.part().starts_with(part));
    part && site.layer().is_some_and(|layer| layer >= n_layer - n_layer.div_ceil(4))
}

impl Default for LearningOptions {
    fn default() -> Self {
        LearningOptions {
            n_ctx: 0,
            n_threads: 0,
            learner: LearnerOptions::default(),
            deep_rate: 1.5e-3,
            n_bootstrap: 2000,
        }
    }
}

/// A number with the interval that 95 of 100 resamples fall into.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The number.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What an adapter did to the control text, the half of it that nothing was calibrated with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forgetting {
    /// Nats per token more than the base model.
    pub loss: Estimate,
    /// Mean `KL(base ‖ adapted)` in nats.
    pub divergence: f64,
    /// Share of tokens whose most likely successor stays the same.
    pub agreement: f64,
}

/// One way to predict the stream.
#[derive(Clone, Debug)]
pub struct Contender {
    /// What it is.
    pub name: String,
    /// Whether it is there to fail: it learns from something that cannot help.
    pub negative: bool,
    /// Nats per token.
    pub loss: f64,
    /// Nats per token less than the base model at equal context.
    pub gain: Estimate,
    /// Median milliseconds of an update of the direction; 0 if there is none.
    pub update_ms: f64,
    /// Median milliseconds that it takes to make updates effective: the product of the head and the adapter,
    /// the bound on forgetting, the length of the step.
    pub settle_ms: f64,
    /// Of those that change the model.
    pub forgetting: Option<Forgetting>,
    /// Nats gained so far, in total, after each chunk.
    pub running_gain: Vec<f64>,
}

/// A prequential measurement.
#[derive(Clone, Debug)]
pub struct LearningReport {
    /// Context in tokens.
    pub n_ctx: usize,
    /// Tokens scored, and tokens per chunk.
    pub n_tokens: usize,
    /// Tokens learnt from at a time.
    pub n_chunk: usize,
    /// Time of reading a chunk and learning it by backpropagation, in prefills of a whole context.
    pub deep_cost: f64,
    /// Nats per token of the base model.
    pub base_loss: f64,
    /// Nats per token of the base model on the control text.
    pub control_loss: f64,
    /// Mean upper bound, over updates, of the share of the gradient that truncation leaves out.
    pub truncation: f64,
    /// All contenders, the base model first.
    pub contenders: Vec<Contender>,
}

impl LearningReport {
    /// The contender of this name.
    pub fn contender(&self, name: &str) -> Option<&Contender> {
        self.contenders.iter().find(|c| c.name == name)
    }
}

/// First weight of the rehearsal's divergence in the loss of backpropagation.
const FIRST_REHEARSAL: f32 = 8.0;
/// Share of the bound that divergence on rehearsed text is held to: on other text it is larger.
const REHEARSED_SHARE: f64 = 0.8;
/// Most windows of control text that are rehearsed in turn.
const REHEARSED: usize = 64;

/// Control text that backpropagation must predict as the base model does.
struct Rehearsal {
    /// First token, and the base model's `ln p` of what follows each token of the window, `(n − 1, n_vocab)`.
    windows: Vec<(usize, Vec<f32>)>,
    n_chunk: usize,
}

impl Rehearsal {
    fn new(session: &mut Session<'_>, text: &[u32], n_chunk: usize) -> Result<Rehearsal, Error> {
        let (arch, finish) = (session.model().arch(), session.model().hparams().logit_finish());
        let n = (text.len() / n_chunk).min(REHEARSED);
        let (mut p, mut logits) = (Vec::new(), Vec::new());
        let mut windows = Vec::new();
        for i in 0..n {
            let start = i * (text.len() - n_chunk) / n;
            let mut log_p = Vec::new();
            session.window(text, start..start + n_chunk, 0, &mut |_, _, raw| {
                let lse = base_softmax(arch, finish, raw, &mut p, &mut logits);
                log_p.extend(logits.iter().map(|l| l - lse as f32));
            })?;
            windows.push((start, log_p));
        }
        Ok(Rehearsal { windows, n_chunk })
    }

    /// Adds the gradient of `strength·KL(base ‖ adapted)` on window `turn`; the mean divergence in nats.
    fn gradient(
        &self,
        session: &mut Session<'_>,
        id: AdapterId,
        text: &[u32],
        turn: usize,
        strength: f32,
        gradients: &mut Gradients,
    ) -> Result<f64, Error> {
        let (start, log_p) = &self.windows[turn % self.windows.len()];
        let n_vocab = session.model().hparams().n_vocab;
        let n = self.n_chunk - 1;
        let weight = strength / n as f32;
        session.clear();
        let objective = |i: usize, logits: &mut [f32]| {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let lse = max + logits.iter().map(|l| (l - max).exp()).sum::<f32>().ln();
            let mut divergence = 0.0;
            for (logit, &log_p) in logits.iter_mut().zip(&log_p[i * n_vocab..]) {
                let (p, log_q) = (log_p.exp(), *logit - lse);
                divergence += f64::from(p * (log_p - log_q));
                *logit = weight * (log_q.exp() - p);
            }
            divergence
        };
        let total = session.gradient(id, &text[*start..start + n], 0, &objective, gradients)?;
        Ok(total / n as f64)
    }
}

/// What an adapter learns from.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    Stream,
    /// The stream's contexts, each with a token from half a stream away: its words are right, their places wrong.
    Shuffled,
    /// The same of the control text, so that not even the words are right.
    OtherShuffled,
}

/// An adapter by itself.
struct Arm {
    name: String,
    lesson: Lesson,
    reads: Reads,
    adapter: HeadLearner,
    losses: Vec<f64>,
    update_ms: Vec<f64>,
    settle_ms: Vec<f64>,
}

/// Measures on `stream` how well the model predicts it with and without learning. The first half of
/// `control` calibrates, the second is what forgetting is measured on.
///
/// # Errors
/// If a text is too short, an option makes no sense, or a session fails.
pub fn learning(
    model: &Model,
    stream: &[u32],
    control: &[u32],
    options: &LearningOptions,
) -> Result<LearningReport, Error> {
    const LEAST: usize = 512;
    // Rehearsal predicts a token from another in windows of a quarter of the context.
    const LEAST_CTX: usize = 8;
    let n_ctx = match options.n_ctx {
        0 => (model.hparams().n_ctx_train / 4).clamp(16, 1024),
        n => n,
    };
    if n_ctx < LEAST_CTX {
        let expected = format!("at least {LEAST_CTX}");
        return Err(LearnError::Option { option: "n_ctx", value: n_ctx as f64, expected }.into());
    }
    // Such a window must fit the half of the control text that calibrates.
    for (n, least) in [(stream.len(), LEAST), (control.len(), LEAST.max(n_ctx / 2))] {
        if n < least {
            return Err(LearnError::TooLittleText { n, least }.into());
        }
    }
    let n_chunk = n_ctx / 2;
    let at = |n_ctx| {
        let options = SessionOptions { n_ctx: Some(n_ctx), n_threads: options.n_threads, ..Default::default() };
        model.session_with(&options)
    };
    let (mut session, mut far) = (at(n_ctx)?, at(4 * n_ctx)?);
    let arch = model.arch();
    let (known, unknown) = control.split_at(control.len() / 2);

    session.set_learner(Learner::new(model, &options.learner)?)?;
    session.calibrate(known)?;
    let Some(mut learner) = session.take_learner() else { return Err(LearnError::NotLearning.into()) };
    let rows = session.head_rows();

    let ranks = [1, 2, 4].map(|rank| (format!("head adapter, rank {rank}"), rank, Lesson::Text, Reads::Stream));
    let negatives = [
        ("control: learns from the stream, shuffled", Lesson::Text, Reads::Shuffled),
        ("control: learns from other text, shuffled", Lesson::Text, Reads::OtherShuffled),
        ("control: learns the opposite", Lesson::Opposite, Reads::Stream),
        ("control: random direction of equal length", Lesson::Chance, Reads::Stream),
    ]
    .map(|(name, lesson, reads)| (name.to_owned(), 4, lesson, reads));
    let mut arms = Vec::new();
    for (name, rank, lesson, reads) in ranks.into_iter().chain(negatives) {
        let mut adapter = Learner::new(model, &LearnerOptions { rank, ..options.learner.clone() })?.adapter;
        adapter.control = learner.adapter.control.clone();
        adapter.fisher = learner.adapter.fisher.clone();
        arms.push(Arm {
            name,
            lesson,
            reads,
            adapter,
            losses: Vec::new(),
            update_ms: Vec::new(),
            settle_ms: Vec::new(),
        });
    }

    // Base at four times the context; the same tokens, in larger chunks.
    let finish = model.hparams().logit_finish();
    let (mut p, mut logits) = (Vec::new(), Vec::new());
    let mut tempered = TEMPERATURES.map(|_| Vec::new());
    let mut far_losses = vec![0.0; stream.len()];
    far.windows(stream, |i, _, raw| {
        logits.clear();
        logits.extend_from_slice(raw);
        finish.row(&mut logits);
        far_losses[i] = softmax(arch, &logits, &mut p) - f64::from(logits[stream[i] as usize]);
    })?;

    // Backpropagation into the last quarter of the layers.
    let mut deep = at(n_ctx)?;
    let adapter = Adapter::zeros(model, DEEP_RANK, 1, |site| is_deep(site, model.hparams().n_layer))?;
    let mut gradients = Gradients::for_terms(&adapter, |_| true);
    let mut descent = Sgd::new(model.site_norms());
    descent.rate = options.deep_rate;
    let id = deep.attach(Arc::new(adapter), 1.0)?;
    let (mut deep_losses, mut deep_ms, mut prefill_ms) = (Vec::new(), Vec::new(), Vec::new());

    let rehearsal = Rehearsal::new(&mut session, known, n_chunk / 2)?;
    let mut strength = FIRST_REHEARSAL;

    let mut by_chunk: [Vec<f64>; 5] = Default::default();
    let mut far_by_chunk = Vec::new();
    let mut sizes = Vec::new();
    let (mut truncation, mut n_truncation) = (0.0, 0);
    for (c, start) in (0..stream.len()).step_by(n_chunk).enumerate() {
        let chunk = start..(start + n_chunk).min(stream.len());
        let mut sums = [0.0; 5];
        let mut n = 0;
        let before = Instant::now();
        session.window(stream, chunk.clone(), n_chunk, &mut |_, _, _| ())?;
        prefill_ms.push(before.elapsed().as_secs_f64() * 1e3);
        let begin = chunk.start.saturating_sub(n_chunk);
        let first = chunk.start.max(1) - 1;
        let before = Instant::now();
        if begin < first {
            deep.prefill(&stream[begin..first])?;
        }
        let predicted = chunk.end - first - 1;
        gradients.clear();
        let mut loss = 0.0;
        if predicted > 0 {
            let (tokens, targets) = (&stream[first..chunk.end - 1], &stream[first + 1..chunk.end]);
            let weights = vec![1.0 / predicted as f32; predicted];
            loss = deep.nll_gradient(id, tokens, targets, &weights, &mut gradients)?;
            let divergence = rehearsal.gradient(&mut deep, id, known, c, strength, &mut gradients)?;
            // A price that rises while the bound is broken, and falls while it is not.
            let excess = divergence / (REHEARSED_SHARE * options.learner.max_divergence) - 1.0;
            strength = (strength * (0.15 * excess.clamp(-1.0, 3.0)).exp() as f32).clamp(1.0, 1000.0);
            deep.update_adapter(id, |adapter| descent.step(adapter, &gradients))?;
        }
        deep_ms.push(before.elapsed().as_secs_f64() * 1e3);
        deep_losses.push(loss * predicted as f64);
        arms.iter_mut().for_each(|arm| arm.losses.push(0.0));
        tempered.iter_mut().for_each(|losses| losses.push(0.0));
        session.window(stream, chunk.clone(), n_chunk, &mut |i, h, raw| {
            let token = stream[i];
            let losses = learner.met(arch, &stream[..i], h, raw, token);
            let all = [losses.base, losses.adapter, losses.ngram, losses.knn, losses.mixture];
            sums.iter_mut().zip(all).for_each(|(sum, loss)| *sum += loss);
            n += 1;
            for (losses, temperature) in tempered.iter_mut().zip(TEMPERATURES) {
                logits.clear();
                logits.extend(raw.iter().map(|&raw| finish.logit(raw) / temperature));
                let loss = softmax(arch, &logits, &mut p) - f64::from(logits[token as usize]);
                *losses.last_mut().unwrap_or(&mut 0.0) += loss;
            }
            for arm in &mut arms {
                let loss = if arm.adapter.head.is_idle() {
                    losses.base
                } else {
                    arm.adapter.exact_loss(arch, h, raw, token, &mut p, &mut logits)
                };
                *arm.losses.last_mut().unwrap_or(&mut 0.0) += loss;
                let token = match arm.reads {
                    Reads::Stream => token,
                    Reads::Shuffled => stream[(i + stream.len() / 2) % stream.len()],
                    Reads::OtherShuffled => continue,
                };
                let lse = base_softmax(arch, finish, raw, &mut p, &mut logits);
                arm.adapter.observed(arch, h, raw, &p, lse, token);
            }
        })?;
        // Contexts of other text, and what came in quite other contexts of it; again from the start at its end, but
        // elsewhere, since what comes twice can be learnt, and never in its own place.
        let pieces = (known.len() / n_chunk).max(1);
        let (turn, start) = (c / pieces, c % pieces * n_chunk);
        let away = (1 + (3 + turn) % 8) * known.len() / 9;
        session.window(known, start..(start + n_chunk).min(known.len()), n_chunk, &mut |i, h, raw| {
            for arm in arms.iter_mut().filter(|arm| arm.reads == Reads::OtherShuffled) {
                let lse = base_softmax(arch, finish, raw, &mut p, &mut logits);
                arm.adapter.observed(arch, h, raw, &p, lse, known[(i + away) % known.len()]);
            }
        })?;
        for (sum, by_chunk) in sums.into_iter().zip(&mut by_chunk) {
            by_chunk.push(sum);
        }
        far_by_chunk.push(far_losses[chunk.clone()].iter().sum());
        sizes.push(n as f64);

        session.prepare(&mut learner.adapter, &rows, Lesson::Text);
        while session.teach(&mut learner.adapter, &rows, Lesson::Text) {
            truncation += learner.adapter.truncation;
            n_truncation += 1;
        }
        session.settle(&mut learner.adapter, Lesson::Text);
        for arm in &mut arms {
            session.prepare(&mut arm.adapter, &rows, arm.lesson);
            let mut before = Instant::now();
            while session.teach(&mut arm.adapter, &rows, arm.lesson) {
                arm.update_ms.push(before.elapsed().as_secs_f64() * 1e3);
                before = Instant::now();
            }
            if !arm.adapter.is_undecided() {
                session.settle(&mut arm.adapter, arm.lesson);
                arm.settle_ms.push(before.elapsed().as_secs_f64() * 1e3);
            }
        }
    }

    let control_loss;
    let forgetting = {
        let heads: Vec<&HeadLearner> = arms.iter().map(|arm| &arm.adapter).collect();
        let (base, found) = forgetting(&mut session, unknown, &heads, options.n_bootstrap)?;
        control_loss = base;
        found
    };
    let n_tokens = sizes.iter().sum::<f64>();
    let base = &by_chunk[0];
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
            gain: bootstrap(base.iter().zip(losses).map(|(b, l)| b - l), &sizes, options.n_bootstrap),
            update_ms: 0.0,
            settle_ms: 0.0,
            forgetting: None,
        }
    };
    let sum = |losses: &Vec<f64>| losses.iter().sum::<f64>();
    let best = tempered.iter().min_by(|x, y| sum(x).total_cmp(&sum(y))).unwrap_or(base);
    let mut contenders = vec![
        contender("base", base),
        contender("base, the best temperature in hindsight", best),
        contender("base, 4 times the context", &far_by_chunk),
        contender("n-gram cache", &by_chunk[2]),
        contender("nearest neighbours", &by_chunk[3]),
    ];
    for (arm, forgetting) in arms.iter_mut().zip(&forgetting) {
        let (update_ms, settle_ms) = (median(&mut arm.update_ms), median(&mut arm.settle_ms));
        let common = contender(&arm.name, &arm.losses);
        contenders.push(Contender { update_ms, settle_ms, forgetting: Some(*forgetting), ..common });
    }
    contenders.insert(8, contender("mixture", &by_chunk[4]));
    let forgetting = forgetting_of(&mut session, &mut deep, unknown, options.n_bootstrap)?;
    let update_ms = median(&mut deep_ms);
    let name = "last quarter of the layers, backpropagation";
    let common = contender(name, &deep_losses);
    contenders.insert(9, Contender { update_ms, forgetting: Some(forgetting), ..common });
    Ok(LearningReport {
        n_ctx,
        n_tokens: n_tokens as usize,
        n_chunk,
        deep_cost: update_ms / median(&mut prefill_ms).max(f64::MIN_POSITIVE),
        base_loss: base.iter().sum::<f64>() / n_tokens,
        control_loss,
        truncation: truncation / f64::from(n_truncation.max(1)),
        contenders,
    })
}

fn base_softmax(
    arch: crate::arch::Arch,
    finish: crate::model::Finish,
    raw: &[f32],
    p: &mut Vec<f32>,
    logits: &mut Vec<f32>,
) -> f64 {
    logits.clear();
    logits.extend_from_slice(raw);
    finish.row(logits);
    softmax(arch, logits, p)
}

/// Loss of the base model on a text, and what adapters do to it.
fn forgetting(
    session: &mut Session<'_>,
    text: &[u32],
    heads: &[&HeadLearner],
    n_bootstrap: usize,
) -> Result<(f64, Vec<Forgetting>), Error> {
    let arch = session.model().arch();
    let finish = session.model().hparams().logit_finish();
    let n_chunk = session.n_ctx() / 2;
    let n_chunks = text.len().div_ceil(n_chunk);
    let mut sizes = vec![0.0; n_chunks];
    let mut more = vec![vec![0.0; n_chunks]; heads.len()];
    let mut found = vec![Forgetting::default(); heads.len()];
    let (mut p, mut q, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    let (mut total, mut n) = (0.0, 0usize);
    session.windows(text, |i, h, raw| {
        let lse = base_softmax(arch, finish, raw, &mut p, &mut logits);
        let loss = lse - f64::from(logits[text[i] as usize]);
        let best = largest(&p);
        total += loss;
        n += 1;
        sizes[i / n_chunk] += 1.0;
        for ((head, more), found) in heads.iter().zip(&mut more).zip(&mut found) {
            more[i / n_chunk] += head.exact_loss(arch, h, raw, text[i], &mut q, &mut logits) - loss;
            let divergence = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            found.divergence += divergence.map(|(&p, &q)| f64::from(p) * f64::from(p / q.max(1e-38)).ln()).sum::<f64>();
            found.agreement += f64::from(u8::from(largest(&q) == best));
        }
    })?;
    for (found, more) in found.iter_mut().zip(more) {
        found.loss = bootstrap(more.into_iter(), &sizes, n_bootstrap);
        found.divergence /= n as f64;
        found.agreement /= n as f64;
    }
    Ok((total / n as f64, found))
}

/// What the adapters of `adapted` do to a text that `base` reads.
fn forgetting_of(
    base: &mut Session<'_>,
    adapted: &mut Session<'_>,
    text: &[u32],
    n_bootstrap: usize,
) -> Result<Forgetting, Error> {
    let arch = base.model().arch();
    let finish = base.model().hparams().logit_finish();
    let n_chunk = base.n_ctx() / 2;
    let (mut sizes, mut more, mut found) = (Vec::new(), Vec::new(), Forgetting::default());
    let (mut q, mut logits) = (Vec::new(), Vec::new());
    for start in (0..text.len()).step_by(n_chunk) {
        let chunk = start..(start + n_chunk).min(text.len());
        let mut rows: Vec<(Vec<f32>, f64)> = Vec::new();
        base.window(text, chunk.clone(), n_chunk, &mut |i, _, raw| {
            let mut p = Vec::new();
            let lse = base_softmax(arch, finish, raw, &mut p, &mut logits);
            rows.push((p, lse - f64::from(logits[text[i] as usize])));
        })?;
        let (mut sum, mut rows_left) = (0.0, rows.iter());
        adapted.window(text, chunk, n_chunk, &mut |i, _, raw| {
            let Some((p, loss)) = rows_left.next() else { return };
            let lse = base_softmax(arch, finish, raw, &mut q, &mut logits);
            sum += lse - f64::from(logits[text[i] as usize]) - loss;
            let divergence = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            found.divergence += divergence.map(|(&p, &q)| f64::from(p) * f64::from(p / q.max(1e-38)).ln()).sum::<f64>();
            found.agreement += f64::from(u8::from(largest(&q) == largest(p)));
        })?;
        sizes.push(rows.len() as f64);
        more.push(sum);
    }
    let n = sizes.iter().sum::<f64>();
    let loss = bootstrap(more.into_iter(), &sizes, n_bootstrap);
    Ok(Forgetting { loss, divergence: found.divergence / n, agreement: found.agreement / n })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn largest(p: &[f32]) -> usize {
    (0..p.len()).max_by(|&i, &j| p[i].total_cmp(&p[j])).unwrap_or(0)
}

/// `Σ sums / Σ sizes`, and how far it moves when chunks are drawn again with replacement. Chunks of text
/// depend on each other less than tokens do.
fn bootstrap(sums: impl Iterator<Item = f64>, sizes: &[f64], n: usize) -> Estimate {
    let sums: Vec<f64> = sums.collect();
    let ratio = |picked: &mut dyn Iterator<Item = usize>| {
        let (mut sum, mut size) = (0.0, 0.0);
        for i in picked {
            sum += sums[i];
            size += sizes[i];
        }
        sum / f64::max(size, 1.0)
    };
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize * sums.len()) >> 31
    };
    let mut resampled: Vec<f64> = (0..n.max(1)).map(|_| ratio(&mut (0..sums.len()).map(|_| draw()))).collect();
    resampled.sort_by(f64::total_cmp);
    let quantile = |q: f64| resampled[((resampled.len() - 1) as f64 * q).round() as usize];
    Estimate { value: ratio(&mut (0..sums.len())), low: quantile(0.025), high: quantile(0.975) }
}
