//! Adapters of inner layers, one for each topic, that are learnt in the background by
//! backpropagation, within a bound on control text.

use crate::learn::inner_layers::{Layers, WINDOW};
use crate::learn::rein::Rein;
use crate::learn::slices::Slices;
use crate::learn::topics::{Counts, Trained};
use crate::learn::windows::{bos_of, from};
use crate::learn::{Evidence, LearnError, Learner};
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::engine::AdapterId;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Gradients, Sgd};
use ruvllm::session::{Reference, cross_entropy, log_sum};
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
/// predicted. It begins as the whole text does, if that is the model's token for it.
fn pieces(session: &Session, lessons: &Lessons<'_>) -> Vec<(Vec<u32>, usize)> {
    let n_ctx = session.sequence().n_ctx();
    let mut pieces = Vec::new();
    for (tokens, lesson) in lessons {
        let bos = bos_of(session.model(), tokens);
        let window = WINDOW.min(n_ctx - usize::from(bos.is_some()));
        for start in lesson.clone().step_by(window) {
            let room = n_ctx - window - usize::from(bos.is_some());
            let (mut text, begin) = from(session, tokens, start, room);
            let first = (text.len() + start - begin).max(1);
            text.extend_from_slice(&tokens[begin..(start + window).min(lesson.end)]);
            if text.len() > first {
                pieces.push((text, first));
            }
        }
    }
    pieces
}

/// A window of control text.
struct Window {
    /// They begin as all of the text does, if that is the model's token for it.
    tokens: Vec<u32>,
    /// What the model alone predicts in each slice of it; as long as it is not known, nothing.
    references: Vec<Reference>,
}

/// A session with the adapter that is trained.
struct Training<'a, 'p> {
    reader: Reader<'a, 'p>,
    id: AdapterId,
    gradients: Gradients,
    /// Gradients of nothing.
    none: Gradients,
    rein: Rein,
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

    /// Makes sure that it is known what the model alone predicts in a window, unless the slices give
    /// up.
    fn refer(&mut self, window: &mut Window, scale: f32) -> Result<(), LearnError> {
        if !window.references.is_empty() {
            return Ok(());
        }
        let mut references = Vec::new();
        self.reader.session.clear();
        self.reader.session.adapters().set_scale(self.id, 0.0)?;
        let read = self
            .reader
            .passes(&window.tokens, SLICE, |session, _, _, part| {
                references.push(session.training().reference(part)?);
                Ok(())
            });
        self.reader.session.clear();
        self.reader.session.adapters().set_scale(self.id, scale)?;
        read?;
        if self.reader.slices.goes_on() {
            window.references = references;
        }
        Ok(())
    }

    /// `weight` times the divergence from the model of each token of a window; adds its gradient if
    /// it is `rehearsed`.
    fn divergence_on(
        &mut self,
        window: &Window,
        weight: f32,
        rehearsed: bool,
    ) -> Result<f64, LearnError> {
        let Training {
            reader,
            id,
            gradients,
            none,
            ..
        } = self;
        let gradients = if rehearsed { gradients } else { none };
        let mut sum = 0.0;
        reader.passes(&window.tokens, SLICE, |session, slices, start, part| {
            let mut between = || {
                slices.tick();
            };
            let reference = &window.references[start / SLICE];
            sum += session.training().divergence_gradient(
                *id,
                part,
                reference,
                weight,
                gradients,
                Some(&mut between),
            )?;
            Ok(())
        })?;
        Ok(sum)
    }

    /// Adds the gradient of the divergence from the model on a window, and adapts its weight and the
    /// pace; returns the factor on the adapter that keeps the bound.
    fn rehearse(&mut self, window: &mut Window, max_divergence: f64) -> Result<f32, LearnError> {
        self.refer(window, 1.0)?;
        if !self.reader.slices.goes_on() {
            return Ok(1.0);
        }
        let strength = self.rein.strength;
        let weight = strength / (window.tokens.len() - 1) as f32;
        let loss = self.divergence_on(window, weight, true)?;
        let divergence = loss / f64::from(strength);
        Ok(self.rein.pull(divergence, max_divergence, REHEARSED))
    }

    /// Mean divergence from the model over windows, with the adapter at `scale`.
    fn divergence<'w>(
        &mut self,
        windows: impl Iterator<Item = &'w mut Window>,
        scale: f32,
    ) -> Result<f64, LearnError> {
        let (mut sum, mut n) = (0.0, 0);
        for window in windows {
            self.refer(window, scale)?;
            if !self.reader.slices.goes_on() {
                break;
            }
            sum += self.divergence_on(window, 1.0, false)?;
            n += window.tokens.len() - 1;
        }
        Ok(sum / n.max(1) as f64)
    }

    /// Takes a step for each piece of the lessons, together with the divergence on a window of
    /// control text.
    fn learn(
        &mut self,
        lessons: &Lessons<'_>,
        rehearsed: &mut [Window],
        turn: u64,
        bound: f64,
    ) -> Result<(), LearnError> {
        let arch = self.reader.session.model().arch();
        let mut descent = Sgd::new(self.reader.session.model().site_norms());
        let rate = descent.rate;
        let texts = pieces(self.reader.session, lessons);
        for (i, (text, first)) in texts.iter().enumerate() {
            let first = *first;
            self.gradients.clear();
            let weight = 1.0 / (text.len() - first) as f32;
            let objective =
                |i: usize, logits: &mut [f32]| cross_entropy(arch, logits, text[i], weight);
            self.gradient(text, first, &objective)?;
            let window = (turn as usize + i) % rehearsed.len();
            descent.rate = rate * self.rein.pace as f32;
            let pull = self.rehearse(&mut rehearsed[window], bound)?;
            let (Reader { session, slices }, gradients) = (&mut self.reader, &self.gradients);
            if !slices.goes_on() {
                break;
            }
            if gradients.norm().is_finite() {
                session.adapters().update(self.id, |adapter| {
                    if pull < 1.0 {
                        adapter.rescale(pull);
                    }
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
    fn limit(&mut self, measured: &mut [Window], bound: f64) -> Result<f64, LearnError> {
        // A few windows tell about how strong it may be, all of them whether it is.
        let (mut scale, mut steps) = (1.0, [4, 1].into_iter());
        let mut step = steps.next();
        let mut divergence = 0.0;
        while let Some(every) = step {
            let session = &mut self.reader.session;
            session.clear();
            session.adapters().set_scale(self.id, scale)?;
            divergence = self.divergence(measured.iter_mut().step_by(every), scale)?;
            let excess = divergence / bound.max(1e-12);
            if !self.reader.slices.goes_on() || excess <= 1.0 {
                step = steps.next();
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
fn windows(session: &Session, control: &[u32], measured: bool) -> Vec<Window> {
    let bos = bos_of(session.model(), control);
    let control = &control[usize::from(bos.is_some())..];
    let n = WINDOW.min(session.sequence().n_ctx()) - usize::from(bos.is_some());
    let pieces = control.chunks(n.max(1)).enumerate();
    let windows = pieces
        .filter(|(i, _)| (i % MEASURED == MEASURED - 1) == measured)
        .map(|(_, piece)| Window {
            tokens: bos.into_iter().chain(piece.iter().copied()).collect(),
            references: Vec::new(),
        });
    windows.filter(|window| window.tokens.len() > 1).collect()
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
        let none = Gradients::for_terms(&adapter, |_| false);
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
            none,
            rein: Rein::new(),
        };
        let (control, bound) = (
            &self.layers.control,
            PART.powi(2) * self.options.max_divergence,
        );
        let [mut rehearsed, mut measured] =
            [false, true].map(|measured| windows(training.reader.session, control, measured));
        let learnt = training.learn(lessons, &mut rehearsed, self.n_updates(), bound);
        let outcome = learnt.and_then(|()| training.limit(&mut measured, bound));
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
        let mut evidence = Evidence::default();
        let both = [self, before].map(|learner| learner.layers.topics.trained(topic).adapter);
        if both[0].as_ref().map(Arc::as_ptr) == both[1].as_ref().map(Arc::as_ptr) {
            return Ok(Some(evidence));
        }
        for (text, first) in &pieces(session, lessons) {
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
                    if slice * SLICE + i + 1 >= *first {
                        gain += gains[i] - gains.iter().sum::<f64>() / gains.len() as f64;
                    }
                }
                evidence.add(gain, SLICE);
            }
        }
        Ok(Some(evidence))
    }
}
