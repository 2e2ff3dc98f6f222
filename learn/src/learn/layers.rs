//! Adapters of inner layers, one for each topic, that are learnt in the background by
//! backpropagation, within a bound on control text.

use crate::learn::control_window::{ControlWindow, FIRST_STRENGTH, next_strength};
use crate::learn::inner_layers::{Layers, WINDOW};
use crate::learn::slices::Slices;
use crate::learn::topics::{Counts, Trained};
use crate::learn::{Evidence, LearnError, Learner};
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::engine::AdapterId;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Gradients, Sgd};
use ruvllm::session::{cross_entropy, log_sum};
use std::ops::Range;
use std::sync::Arc;

/// Rank of the adapter.
const RANK: usize = 4;
/// Tokens of a pass whose gradient is computed.
const SLICE: usize = 16;
/// Tokens of a pass that only reads: others wait for one of them at most.
const READ: usize = 8;
/// One in so many windows of control text is measured on, the others are rehearsed.
const MEASURED: usize = 4;
/// Fraction of the bound that divergence on rehearsed text must stay below: on other text it is
/// larger.
const REHEARSED: f64 = 0.95;
/// Inner layers' part of the root of the bound: small changes add up as vectors do, whose squared
/// length is the divergence.
const PART: f64 = 0.95;

/// What the head may add to the divergence of an adapter of inner layers, so that both stay within
/// `bound`.
fn left_of(bound: f64, layers: f64) -> f64 {
    (bound.sqrt() - layers.sqrt()).max(0.0).powi(2).min(bound)
}

/// Texts, and which of their tokens are to be learnt.
pub(crate) type Lessons<'t> = [(&'t [u32], Range<usize>)];

/// Whether a matrix is changed: those of feed-forward layers and the output of attention.
fn is_trained(site: &TargetModule) -> bool {
    let part = ["ffn_down", "ffn_up", "ffn_gate", "attn_output"]
        .iter()
        .any(|part| site.part().starts_with(part));
    part && site.layer().is_some() && site.part() != "ffn_gate_inp"
}

/// A session that reads in passes of a few tokens, in slices.
struct Reader<'a, 'p> {
    session: &'a mut Session,
    slices: &'a mut Slices<'p>,
}

impl Reader<'_, '_> {
    /// Calls `pass` with each part of `tokens[..n − 1]` of so many tokens and its place, unless the
    /// slices give up.
    fn passes(
        &mut self,
        tokens: &[u32],
        each: usize,
        mut pass: impl FnMut(&mut Session, &mut Slices<'_>, usize, &[u32]) -> Result<(), LearnError>,
    ) -> Result<(), LearnError> {
        self.session.clear();
        for (i, part) in tokens[..tokens.len() - 1].chunks(each).enumerate() {
            if self.slices.tick().is_none() {
                break;
            }
            pass(self.session, self.slices, i * each, part)?;
        }
        Ok(())
    }

    /// Calls `visit` with each of `1..n` and the logits before that token.
    fn read(
        &mut self,
        tokens: &[u32],
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<(), LearnError> {
        self.passes(tokens, READ, |session, slices, start, part| {
            Ok(session.hooks().prefill_each(part, 0, |i, logits| {
                visit(start + i + 1, logits);
                slices.tick();
            })?)
        })
    }

    /// For each token of a text, the `ln p` in its place of all that the same slice predicts.
    fn exchanged(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, LearnError> {
        let mut all = Vec::new();
        self.read(tokens, |i, logits| {
            let lse = log_sum(logits);
            let start = (i - 1) / SLICE * SLICE + 1;
            let slice = &tokens[start..(start + SLICE).min(tokens.len())];
            all.push(
                slice
                    .iter()
                    .map(|&token| logits[token as usize] - lse)
                    .collect(),
            );
        })?;
        Ok(all)
    }
}

/// A text with as much context as there is room for, and the first of its tokens that is to be
/// predicted.
fn pieces<'t>(lessons: &'t Lessons<'t>, n_ctx: usize) -> impl Iterator<Item = (&'t [u32], usize)> {
    let window = WINDOW.min(n_ctx);
    let pieces = lessons.iter().flat_map(move |(tokens, lesson)| {
        lesson.clone().step_by(window).map(move |start| {
            let begin = start.saturating_sub(n_ctx - window);
            (
                &tokens[begin..(start + window).min(lesson.end)],
                (start - begin).max(1),
            )
        })
    });
    pieces.filter(|(text, first)| text.len() > *first)
}

/// A session with the adapter that is trained.
struct Training<'a, 'p> {
    reader: Reader<'a, 'p>,
    id: AdapterId,
    gradients: Gradients,
    /// Weight of the divergence on rehearsed text.
    strength: f32,
}

impl Training<'_, '_> {
    /// Adds the gradient of `objective` over the logits before each of `tokens[first..]`; returns
    /// the loss.
    fn gradient(
        &mut self,
        tokens: &[u32],
        first: usize,
        objective: &(dyn Fn(usize, &mut [f32]) -> f64 + Sync),
    ) -> Result<f64, LearnError> {
        let Training {
            reader,
            id,
            gradients,
            ..
        } = self;
        let mut loss = 0.0;
        reader.passes(tokens, SLICE, |session, slices, start, part| {
            if start + part.len() < first {
                return Ok(session.prefill(part)?);
            }
            let objective = |i: usize, logits: &mut [f32]| objective(start + i + 1, logits);
            let first = (first - 1).saturating_sub(start);
            let mut between = || {
                slices.tick();
            };
            loss += session.training().gradient(
                *id,
                part,
                first,
                &objective,
                gradients,
                Some(&mut between),
            )?;
            Ok(())
        })?;
        Ok(loss)
    }

    /// What the model alone predicts in a window.
    fn base(&mut self, tokens: &[u32], scale: f32) -> Result<ControlWindow, LearnError> {
        let mut window = ControlWindow::new(self.reader.session.model().hparams().n_vocab);
        self.reader.session.clear();
        self.reader.session.adapters().set_scale(self.id, 0.0)?;
        self.reader.read(tokens, |_, logits| window.push(logits))?;
        self.reader.session.clear();
        self.reader.session.adapters().set_scale(self.id, scale)?;
        Ok(window)
    }

    /// Adds the gradient of the divergence from the model on a window, and adapts its weight.
    fn rehearse(&mut self, tokens: &[u32], max_divergence: f64) -> Result<(), LearnError> {
        let window = self.base(tokens, 1.0)?;
        if !self.reader.slices.goes_on() {
            return Ok(());
        }
        let objective = window.objective(self.strength);
        let loss = self.gradient(tokens, 1, &|i, logits: &mut [f32]| objective(i - 1, logits))?;
        self.strength = next_strength(self.strength, loss, REHEARSED * max_divergence);
        Ok(())
    }

    /// Mean divergence from the model over windows, with the adapter at `scale`.
    fn divergence(&mut self, windows: &[&[u32]], scale: f32) -> Result<f64, LearnError> {
        let (mut sum, mut n, mut row) = (0.0, 0, Vec::new());
        for tokens in windows {
            let window = self.base(tokens, scale)?;
            if !self.reader.slices.goes_on() {
                break;
            }
            self.reader.read(tokens, |i, logits| {
                row.clear();
                row.extend_from_slice(logits);
                sum += window.divergence(i - 1, &mut row);
                n += 1;
            })?;
        }
        Ok(sum / f64::from(n.max(1)))
    }

    /// Takes a step for each piece of the lessons, together with the divergence on a window of
    /// control text.
    fn learn(
        &mut self,
        lessons: &Lessons<'_>,
        control: &[u32],
        turn: u64,
        bound: f64,
    ) -> Result<(), LearnError> {
        let (arch, n_ctx) = (
            self.reader.session.model().arch(),
            self.reader.session.sequence().n_ctx(),
        );
        let rehearsed: Vec<&[u32]> = windows(control, n_ctx, false).collect();
        let mut descent = Sgd::new(self.reader.session.model().site_norms());
        for (i, (text, first)) in pieces(lessons, n_ctx).enumerate() {
            self.gradients.clear();
            let weight = 1.0 / (text.len() - first) as f32;
            let objective =
                |i: usize, logits: &mut [f32]| cross_entropy(arch, logits, text[i], weight);
            self.gradient(text, first, &objective)?;
            self.rehearse(rehearsed[(turn as usize + i) % rehearsed.len()], bound)?;
            let (Reader { session, slices }, gradients) = (&mut self.reader, &self.gradients);
            if !slices.goes_on() {
                break;
            }
            if gradients.norm().is_finite() {
                session.adapters().update(self.id, |adapter| {
                    for (site, _) in gradients.terms() {
                        slices.tick();
                        descent.step_at(site, adapter, gradients);
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Reduces the strength until the divergence on control text is within the bound; returns it.
    fn limit(&mut self, control: &[u32], bound: f64) -> Result<f64, LearnError> {
        let measured: Vec<&[u32]> =
            windows(control, self.reader.session.sequence().n_ctx(), true).collect();
        // A few windows tell about how strong it may be, all of them whether it is.
        let few: Vec<&[u32]> = measured.iter().copied().step_by(4).collect();
        let (mut scale, mut measures) = (1.0, [&few, &measured].into_iter());
        let mut windows = measures.next();
        let mut divergence = 0.0;
        while let Some(measured) = windows {
            divergence = self.divergence(measured, scale)?;
            let excess = divergence / bound.max(1e-12);
            if !self.reader.slices.goes_on() || excess <= 1.0 {
                windows = measures.next();
                continue;
            }
            // The divergence grows with the square of the strength, as long as it is small.
            scale = if scale < 1e-3 || excess.is_nan() {
                0.0
            } else {
                scale * (0.98 / excess.sqrt()).max(0.1) as f32
            };
        }
        self.reader
            .session
            .adapters()
            .update(self.id, |adapter| adapter.rescale(scale))?;
        Ok(divergence)
    }
}

/// The windows of control text that are measured on, or those that are rehearsed.
fn windows(control: &[u32], n_ctx: usize, measured: bool) -> impl Iterator<Item = &[u32]> {
    let windows = control
        .chunks(WINDOW.min(n_ctx))
        .filter(|window| window.len() > 1)
        .enumerate();
    windows
        .filter(move |(i, _)| (i % MEASURED == MEASURED - 1) == measured)
        .map(|(_, window)| window)
}

impl Learner {
    /// The learner without what it learnt in inner layers.
    pub(crate) fn without_layers(&self) -> Learner {
        let mut learner = self.clone();
        learner.set_layers(
            Layers::new(self.layers.control.clone()),
            &mut Slices::whole(),
        );
        learner
    }

    /// Replaces what was learnt in inner layers; the head has what they leave of the bound.
    pub(crate) fn set_layers(&mut self, layers: Layers, slices: &mut Slices<'_>) {
        self.layers = layers;
        self.share_bound(slices);
    }

    /// Replaces what was learnt of a topic, if it is known.
    pub(crate) fn set_trained(&mut self, topic: u32, trained: Trained, slices: &mut Slices<'_>) {
        self.layers.topics.set_trained(topic, trained);
        self.share_bound(slices);
    }

    /// The head has what the adapter in effect leaves of the bound: all of it where there is none.
    pub(crate) fn share_bound(&mut self, slices: &mut Slices<'_>) {
        let left = left_of(self.options.max_divergence, self.layers.divergence());
        if left == self.adapter.rates.max_divergence {
            return;
        }
        self.adapter.share(left);
        if self.rows.is_some() {
            self.adapter.limit(self.arch, slices);
        }
    }

    /// The most that head and layers can have together with any topic's adapter, given the head's
    /// divergence now.
    pub(super) fn divergence_of_both(&self, head: f64) -> f64 {
        let (bound, now) = (
            self.options.max_divergence,
            self.adapter.rates.max_divergence.max(f64::MIN_POSITIVE),
        );
        let both =
            |layers: f64| ((head * left_of(bound, layers) / now).sqrt() + layers.sqrt()).powi(2);
        self.layers.divergences().map(both).fold(0.0, f64::max)
    }

    /// Whether there is enough control text to learn in inner layers.
    pub(crate) fn can_learn_layers(&self) -> bool {
        self.layers.control.len() >= 2 * MEASURED * WINDOW
    }

    /// The topic that a text belongs to, which may be a new one.
    pub(crate) fn sort(&mut self, text: &[u32]) -> u32 {
        let n_vocab = self.n_vocab;
        let Layers {
            topics, ordinary, ..
        } = &mut self.layers;
        topics.sort(&Counts::of(text), ordinary, n_vocab)
    }

    /// Adds a text to a topic.
    pub(crate) fn add_to_topic(&mut self, topic: u32, text: &[u32]) {
        self.layers.topics.add(topic, &Counts::of(text));
    }

    /// Learns lessons of a topic in inner layers, of a session without learner or adapters, then
    /// reduces their strength until the bound holds; without lessons it does only that. Nothing
    /// is learnt where the model has parts without a gradient, and nothing stays without
    /// control text. False if `slices` gave up: then nothing has changed.
    pub(crate) fn learn_layers(
        &mut self,
        session: &mut Session,
        topic: u32,
        lessons: &Lessons<'_>,
        slices: &mut Slices<'_>,
    ) -> Result<bool, LearnError> {
        if !self.can_learn_layers() {
            self.set_trained(topic, Trained::default(), slices);
            return Ok(true);
        }
        let adapter = match self.layers.topics.trained(topic).adapter {
            Some(adapter) => adapter,
            None if lessons.is_empty() => return Ok(true),
            None => match Adapter::zeros(session.model(), RANK, 1, is_trained) {
                Ok(adapter) => Arc::new(adapter),
                Err(_) => return Ok(true),
            },
        };
        let gradients = Gradients::zeros(&adapter);
        session.clear();
        let id = session.adapters().attach(adapter, 1.0)?;
        let reader = Reader {
            session: &mut *session,
            slices,
        };
        let mut training = Training {
            reader,
            id,
            gradients,
            strength: FIRST_STRENGTH,
        };
        let (control, bound) = (
            &self.layers.control,
            PART.powi(2) * self.options.max_divergence,
        );
        let learnt = training.learn(lessons, control, self.n_updates(), bound);
        let outcome = learnt.and_then(|()| training.limit(control, bound));
        session.clear();
        let adapter = session.adapters().detach(id)?;
        let goes_on = slices.goes_on();
        match outcome {
            Ok(divergence) if goes_on => self.set_trained(
                topic,
                Trained {
                    adapter: Some(adapter),
                    divergence,
                },
                slices,
            ),
            Err(LearnError::Session(SessionError::NoGradient { .. })) | Ok(_) => {}
            Err(error) => return Err(error),
        }
        Ok(goes_on)
    }

    /// Reduces the strength of what was learnt of each topic until the bound holds.
    pub(crate) fn limit_layers(&mut self, session: &mut Session) -> Result<(), LearnError> {
        for topic in self.layers.topics.ids() {
            self.learn_layers(session, topic, &[], &mut Slices::whole())?;
        }
        Ok(())
    }

    /// What text of a topic that is not learnt yet says of what was learnt of it in inner layers,
    /// compared with what `before` has: its tokens became likelier in their own places than in
    /// each other's only if their order is predicted better. Nothing if `slices` gave up.
    pub(crate) fn evidence_of_layers(
        &self,
        before: &Learner,
        session: &mut Session,
        topic: u32,
        lessons: &Lessons<'_>,
        slices: &mut Slices<'_>,
    ) -> Result<Option<Evidence>, LearnError> {
        let n_ctx = session.sequence().n_ctx();
        let mut evidence = Evidence::default();
        let both = [self, before].map(|learner| learner.layers.topics.trained(topic).adapter);
        if both[0].as_ref().map(Arc::as_ptr) == both[1].as_ref().map(Arc::as_ptr) {
            return Ok(Some(evidence));
        }
        for (text, first) in pieces(lessons, n_ctx) {
            let mut found = [Vec::new(), Vec::new()];
            for (adapter, found) in both.iter().zip(&mut found) {
                session.clear();
                let id = adapter
                    .clone()
                    .map(|adapter| session.adapters().attach(adapter, 1.0))
                    .transpose()?;
                let outcome = Reader {
                    session: &mut *session,
                    slices: &mut *slices,
                }
                .exchanged(text);
                session.clear();
                if let Some(id) = id {
                    session.adapters().detach(id)?;
                }
                *found = outcome?;
                if !slices.goes_on() {
                    return Ok(None);
                }
            }
            let [with, without] = &found;
            for (slice, (with, without)) in
                with.chunks(SLICE).zip(without.chunks(SLICE)).enumerate()
            {
                let mut gain = 0.0;
                for (i, (with, without)) in with.iter().zip(without).enumerate() {
                    let gains: Vec<f64> = with
                        .iter()
                        .zip(without)
                        .map(|(x, y)| f64::from(x - y))
                        .collect();
                    if slice * SLICE + i + 1 >= first {
                        gain += gains[i] - gains.iter().sum::<f64>() / gains.len() as f64;
                    }
                }
                evidence.add(gain, SLICE);
            }
        }
        Ok(Some(evidence))
    }
}
