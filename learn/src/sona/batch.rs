//! Learning of a batch of trajectories, and the gate that its result has to pass.

use crate::learn::windows::from;
use crate::learn::{Evidence, Layers, Learner, Learning, Losses, Slices, UPDATE_TOKENS, learning};
use crate::sona::SonaError;
use crate::sona::builder::SonaBuilder;
use crate::sona::event::{Event, EventKind};
use crate::sona::folder::session_hash;
use crate::sona::trajectory::Trajectory;
use ruvllm::Session;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of a pass of the background, of which other passes wait for one at most, and of what text
/// is judged by.
const SLICE: usize = 16;
/// One in so many trajectories is kept from what is learnt of a batch, to judge it by: what is learnt
/// of fewer has no effect yet.
pub const JUDGED: usize = 4;

/// Where batches are learnt.
pub(super) struct Worker {
    pub(super) session: Session,
    /// All that was learnt, whether or not it is in effect.
    pub(super) working: Arc<Learner>,
}

/// What came of a batch.
pub(super) struct Outcome {
    pub(super) kind: EventKind,
    /// What was judged.
    pub(super) candidate: Arc<Learner>,
    /// What to learn on from.
    pub(super) working: Arc<Learner>,
    pub(super) event: Event,
}

/// Learns a batch from what is worked on, and judges the result against the learner `before`;
/// nothing if `slices` gave up.
pub(super) fn learn_batch(
    worker: &mut Worker,
    batch: &[Trajectory],
    before: &Arc<Learner>,
    options: &SonaBuilder,
    slices: &mut Slices<'_>,
) -> Result<Option<Outcome>, SonaError> {
    let Worker { session, working } = worker;
    let mut learner = Learner::clone(working);
    let batch = Batch::new(batch, &mut learner, options, slices);
    if !batch.learn_layers(session, &mut learner, &batch.learnt, slices)? {
        return Ok(None);
    }
    let Some(JudgedLayers { kept, supported }) =
        batch.judge_layers(session, &learner, before, slices)?
    else {
        return Ok(None);
    };
    learner.set_layers(supported, slices);
    let Some((candidate, _)) = batch.read(session, &learner, &batch.learnt, true, slices)? else {
        return Ok(None);
    };
    let candidate = Arc::new(candidate);
    let Some(judgement) = batch.judge(session, &candidate, before, slices)? else {
        return Ok(None);
    };
    let kind = judgement.kind();
    let is_refused = kind == EventKind::Refused;
    // With nothing learnt, in inner layers either.
    let is_harmful = if is_refused && judgement.is_valid {
        let alone = before.without_layers();
        let Some((_, alone)) = batch.read(session, &alone, &batch.judged, false, slices)? else {
            return Ok(None);
        };
        judgement.with > alone.iter().map(|slice| slice.base).sum()
    } else {
        is_refused
    };
    let from = if is_harmful { before } else { &candidate };
    // Judged once, the rest is learnt, too, unless it is what spoke against the candidate.
    let rest = if is_refused && !judgement.is_likelier() {
        &[]
    } else {
        &batch.judged[..]
    };
    let Some((mut next, _)) = batch.read(session, from, rest, true, slices)? else {
        return Ok(None);
    };
    if !is_harmful {
        next.set_layers(kept, slices);
        for &i in rest {
            next.add_to_topic(batch.topics[i], batch.text(i));
        }
        if !batch.learn_layers(session, &mut next, rest, slices)? {
            return Ok(None);
        }
    }
    Ok(Some(Outcome {
        kind,
        event: batch.event(kind, &judgement, &candidate),
        candidate,
        working: Arc::new(next),
    }))
}

/// What is learnt of some trajectories.
struct Batch<'b> {
    /// Each trajectory with the tokens that are learnt of it.
    lessons: Vec<(&'b Trajectory, Range<usize>)>,
    /// The topic of each lesson.
    topics: Vec<u32>,
    /// Indices of the lessons that are learnt at first, and of those that are kept to judge by.
    learnt: Vec<usize>,
    judged: Vec<usize>,
    /// Whether inner layers learn.
    has_layers: bool,
}

/// Adapters of inner layers after they were judged.
struct JudgedLayers {
    /// Those that no text speaks against, to learn on from.
    kept: Layers,
    /// Those that text supports, which may have an effect.
    supported: Layers,
}

impl<'b> Batch<'b> {
    /// Sorts lessons into topics of `learner`, and keeps some of each topic from what is learnt of
    /// it.
    fn new(
        trajectories: &'b [Trajectory],
        learner: &mut Learner,
        options: &SonaBuilder,
        slices: &mut Slices<'_>,
    ) -> Batch<'b> {
        let lessons = trajectories
            .iter()
            .map(|found| (found, found.lesson(options.quality_threshold)));
        let mut batch = Batch {
            lessons: lessons.filter(|(_, lesson)| !lesson.is_empty()).collect(),
            topics: Vec::new(),
            learnt: Vec::new(),
            judged: Vec::new(),
            has_layers: options.inner_layers && learner.can_learn_layers(),
        };
        for i in 0..batch.lessons.len() {
            slices.tick();
            let text = batch.text(i);
            let topic = if batch.has_layers {
                learner.sort(text)
            } else {
                0
            };
            let n_before = batch.topics.iter().filter(|&&other| other == topic).count();
            if n_before % JUDGED == JUDGED - 1 {
                batch.judged.push(i);
            } else {
                learner.add_to_topic(topic, text);
                batch.learnt.push(i);
            }
            batch.topics.push(topic);
        }
        batch
    }

    /// Tokens of a lesson.
    fn text(&self, i: usize) -> &'b [u32] {
        let (trajectory, lesson) = &self.lessons[i];
        &trajectory.tokens[lesson.clone()]
    }

    /// Those of some lessons that belong to a topic, after the tokens before them.
    fn texts(&self, which: &[usize], topic: u32) -> Vec<(&'b [u32], Range<usize>)> {
        let which = which.iter().filter(|&&i| self.topics[i] == topic);
        which
            .map(|&i| (&*self.lessons[i].0.tokens, self.lessons[i].1.clone()))
            .collect()
    }

    /// Scores some lessons one after the other, and learns them if `learns`; nothing if `slices`
    /// gave up.
    fn read(
        &self,
        session: &mut Session,
        learner: &Learner,
        which: &[usize],
        learns: bool,
        slices: &mut Slices<'_>,
    ) -> Result<Option<(Learner, Vec<Losses>)>, SonaError> {
        slices.tick();
        let mut learner = learner.clone();
        let mut losses = Vec::new();
        for &i in which {
            let (trajectory, lesson) = &self.lessons[i];
            let (tokens, lesson) = (&trajectory.tokens, lesson.clone());
            let Some((next, more)) = read_lesson(session, learner, tokens, lesson, learns, slices)?
            else {
                return Ok(None);
            };
            learner = next;
            losses.extend(more);
        }
        Ok(Some((learner, losses)))
    }

    /// Learns some lessons in inner layers, topic by topic; returns whether `slices` went on.
    fn learn_layers(
        &self,
        session: &mut Session,
        learner: &mut Learner,
        which: &[usize],
        slices: &mut Slices<'_>,
    ) -> Result<bool, SonaError> {
        for topic in learner.layers.topics.ids() {
            let texts = self.texts(which, topic);
            if self.has_layers
                && !texts.is_empty()
                && !learner.learn_layers(session, topic, &texts, slices)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Judges what inner layers learnt of each topic; nothing if `slices` gave up.
    fn judge_layers(
        &self,
        session: &mut Session,
        learner: &Learner,
        before: &Learner,
        slices: &mut Slices<'_>,
    ) -> Result<Option<JudgedLayers>, SonaError> {
        // What is not supported yet is learnt on without effect, unless text speaks against it.
        let (mut kept, mut supported) = (learner.layers.clone(), learner.layers.clone());
        for topic in kept.topics.ids() {
            let texts = self.texts(&self.judged, topic);
            let Some(evidence) =
                learner.evidence_of_layers(before, session, topic, &texts, slices)?
            else {
                return Ok(None);
            };
            let earlier = before.layers.topics.trained(topic);
            if evidence.sum < 0.0 {
                kept.topics.set_trained(topic, earlier.clone());
            }
            if evidence.verdict() != Some(true) {
                supported.topics.set_trained(topic, earlier);
            }
        }
        Ok(Some(JudgedLayers { kept, supported }))
    }

    /// Compares `candidate` with the learner `before` on the lessons kept for that; nothing if
    /// `slices` gave up.
    fn judge(
        &self,
        session: &mut Session,
        candidate: &Learner,
        before: &Learner,
        slices: &mut Slices<'_>,
    ) -> Result<Option<Judgement>, SonaError> {
        let Some((_, with)) = self.read(session, candidate, &self.judged, false, slices)? else {
            return Ok(None);
        };
        let Some((_, without)) = self.read(session, before, &self.judged, false, slices)? else {
            return Ok(None);
        };
        Ok(Some(Judgement::new(candidate, &with, &without)))
    }

    /// What the log says of the batch.
    fn event(&self, kind: EventKind, judgement: &Judgement, candidate: &Learner) -> Event {
        let sessions = self.lessons.iter();
        let mut sessions: Vec<u64> = sessions
            .map(|(found, _)| session_hash(&found.session_id))
            .collect();
        sessions.sort_unstable();
        sessions.dedup();
        let n_tokens: usize = self.lessons.iter().map(|(_, lesson)| lesson.len()).sum();
        let n = judgement.n_tokens;
        let mean = |total: f64| total / n.max(1) as f64;
        Event {
            n_learnt: [self.lessons.len() as u64, n_tokens as u64],
            judged: (n as u64, mean(judgement.without), mean(judgement.with)),
            divergence: candidate.divergence(),
            sessions,
            ..Event::new(kind, 0, 0)
        }
    }
}

/// Comparison of a candidate with the learner in effect.
struct Judgement {
    /// Sums of their losses, in nats.
    with: f64,
    without: f64,
    n_tokens: usize,
    gain: Evidence,
    /// Whether the candidate keeps the bound on control text, and its losses are finite.
    is_valid: bool,
}

impl Judgement {
    fn new(candidate: &Learner, with: &[Losses], without: &[Losses]) -> Judgement {
        // What is in effect when text is generated.
        let mixes = candidate.options().generate_with_mixture;
        let loss = |slice: &Losses| if mixes { slice.mixture } else { slice.adapter };
        let total = |slices: &[Losses]| slices.iter().map(loss).sum::<f64>();
        let mut gain = Evidence::default();
        for (with, without) in with.iter().zip(without) {
            gain.add(loss(without) - loss(with), SLICE);
        }
        let is_bounded = candidate.n_control() == 0
            || candidate.divergence() <= candidate.options().max_divergence;
        Judgement {
            with: total(with),
            without: total(without),
            n_tokens: with.iter().map(|slice| slice.n).sum(),
            gain,
            is_valid: is_bounded && total(with).is_finite(),
        }
    }

    fn is_likelier(&self) -> bool {
        self.with < self.without
    }

    /// Judged on little text, chance would let some changes pass: what is gained has to be two
    /// standard errors.
    fn kind(&self) -> EventKind {
        if self.is_valid && self.with == self.without {
            EventKind::Unchanged
        } else if self.is_valid && self.is_likelier() && self.gain.verdict() == Some(true) {
            EventKind::Accepted
        } else {
            EventKind::Refused
        }
    }
}

/// Scores `tokens[lesson]`, the losses of [`SLICE`] tokens each, and learns them if `learns`;
/// nothing if `slices` gave up.
fn read_lesson(
    session: &mut Session,
    mut learner: Learner,
    tokens: &[u32],
    lesson: Range<usize>,
    learns: bool,
    slices: &mut Slices<'_>,
) -> Result<Option<(Learner, Vec<Losses>)>, SonaError> {
    let mut losses = Vec::new();
    session.clear();
    learner.set_topic_in_slices(learner.nearest_topic(&tokens[lesson.clone()]), slices);
    learning::set_learner(session, learner, slices)?;
    let outcome = read_text(session, tokens, lesson, learns, &mut losses, slices);
    let learner = session.take_learner();
    session.clear();
    outcome?;
    Ok(learner.filter(|_| slices.goes_on()).map(|mut learner| {
        learner.set_topic_in_slices(None, slices);
        (learner, losses)
    }))
}

/// [`read_lesson`] with the session's learner, unless `slices` give up.
fn read_text(
    session: &mut Session,
    tokens: &[u32],
    lesson: Range<usize>,
    learns: bool,
    losses: &mut Vec<Losses>,
    slices: &mut Slices<'_>,
) -> Result<(), SonaError> {
    let n_ctx = session.sequence().n_ctx();
    let mut at = lesson.start;
    while at < lesson.end {
        // Half of the context is what came before, after the model's token for the beginning.
        let (mut before, begin) = from(session, tokens, at, n_ctx / 2);
        let end = (begin + n_ctx - before.len()).min(lesson.end);
        before.extend_from_slice(&tokens[begin..at]);
        session.clear();
        for slice in before.chunks(SLICE) {
            session.prefill(slice)?;
            if slices.tick().is_none() {
                return Ok(());
            }
        }
        for chunk in tokens[at..end].chunks(UPDATE_TOKENS) {
            for slice in chunk.chunks(SLICE) {
                losses.push(learning::record(session, slice, slices)?);
                if !slices.goes_on() {
                    return Ok(());
                }
            }
            if learns {
                learning::update(session, slices)?;
            }
        }
        at = end;
    }
    Ok(())
}
