//! Learning in a session.
//!
//! While tokens are computed, learning costs the adapter's few operations and a record of the
//! model's prediction. Everything else happens when [`Learning::observe`], [`Learning::feedback`]
//! or [`Learning::update`] is called.

use crate::clock::Timer;
use crate::learn::slices::Slices;
use crate::learn::teacher::{Teacher, head_rows};
use crate::learn::windows::windows;
use crate::learn::{LearnError, Learner, Losses, TrainingSignal, softmax};
use ruvllm::compute::{Cut, OutputHook, OutputRows};
use ruvllm::{Session, SessionError};
use std::time::Duration;

/// Fewest tokens of control text.
const LEAST_CONTROL: usize = 64;
/// Fraction of the old Fisher information that remains when more text is consolidated.
const FISHER_DECAY: f32 = 0.9;

/// What a [`Session`] with a [`Learner`] can do.
pub trait Learning {
    /// Lets the session learn with `learner`, new or loaded, which replaces one it has. The bound
    /// on forgetting holds from the first token on, whatever a file contained; only of inner
    /// layers, as of any adapter's file, what it says is believed. If it has learnt in inner
    /// layers, or the one before has, the session is emptied.
    ///
    /// # Errors
    /// If the learner belongs to another model.
    fn set_learner(&mut self, learner: Learner) -> Result<(), LearnError>;

    /// As [`Learning::set_learner`], in slices of a fraction of a millisecond, after each of which
    /// `pause` is called with the time that it took.
    ///
    /// # Errors
    /// As [`Learning::set_learner`].
    fn set_learner_in_slices(
        &mut self,
        learner: Learner,
        pause: &mut dyn FnMut(Duration),
    ) -> Result<(), LearnError>;

    /// The attached learner, with what it has learnt so far.
    fn learner(&self) -> Option<&Learner>;

    /// The attached learner, mutable.
    fn learner_mut(&mut self) -> Option<&mut Learner>;

    /// Detaches the learner; the session then computes as the model alone does.
    fn take_learner(&mut self) -> Option<Learner>;

    /// Appends `tokens`, text written by the user, as [`Session::prefill`] does, and learns from
    /// them: each is scored by the model and by all that was learnt before, then learnt. The
    /// losses are summed over all tokens that follow another one: the first of an empty session
    /// has no loss.
    ///
    /// # Errors
    /// As [`Session::prefill`], or if the session has no learner.
    fn observe(&mut self, tokens: &[u32]) -> Result<Losses, LearnError>;

    /// The first half of [`Learning::observe`]: scores `tokens` and stores what
    /// [`Learning::update`] needs to learn from them later.
    ///
    /// # Errors
    /// As [`Learning::observe`].
    fn record(&mut self, tokens: &[u32]) -> Result<Losses, LearnError>;

    /// Learns from the rating of the last answer, the tokens [decoded](Session::decode) since the
    /// last prompt: a rating above the running mean makes similar answers more probable, one
    /// below less (negative preference optimisation, arXiv 2404.05868). Returns the rating's
    /// advantage, its difference from that mean, which is all that counts: the first rating is
    /// compared with 0, so that its sign decides, and an advantage of 0 teaches nothing.
    ///
    /// A rating takes effect at once, and text observed later does not undo it: from the first
    /// rating on, the adapter stays in effect, within the bound on forgetting, even if that
    /// text is evidence against it.
    ///
    /// # Errors
    /// If there is no answer or learner, the rating is not finite, or the learner has neither
    /// control text nor enough observed text to tell what distinguishes the answer.
    fn feedback(&mut self, reward: f32) -> Result<f32, LearnError>;

    /// Learns from text that was [recorded](Learning::record) and not learnt from yet; a single
    /// token waits for another.
    ///
    /// # Errors
    /// If there is no memory for the product with the head.
    fn update(&mut self) -> Result<(), LearnError>;

    /// As [`Learning::update`], in slices of a fraction of a millisecond: between them other passes
    /// can be computed. Calls `pause` after each with the time that it took; if that returns
    /// false before directions are chosen, gives up, and what was recorded is still to be
    /// learnt.
    ///
    /// # Errors
    /// As [`Learning::update`].
    fn update_in_slices(
        &mut self,
        pause: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<(), LearnError>;

    /// Reads control text, on which the adapter must not change the model much. Stores moments of
    /// it, and the Fisher information that consolidation uses; further calls add to these.
    /// Empties the session.
    ///
    /// # Errors
    /// As [`Session::prefill`], if there are too few tokens, or if the session has no learner.
    fn calibrate(&mut self, tokens: &[u32]) -> Result<(), LearnError>;
}

impl Learning for Session {
    fn set_learner(&mut self, learner: Learner) -> Result<(), LearnError> {
        set_learner(self, learner, &mut Slices::whole())
    }

    fn set_learner_in_slices(
        &mut self,
        learner: Learner,
        pause: &mut dyn FnMut(Duration),
    ) -> Result<(), LearnError> {
        let mut pause = |took| {
            pause(took);
            true
        };
        set_learner(self, learner, &mut Slices::new(&mut pause))
    }

    fn learner(&self) -> Option<&Learner> {
        self.sequence().hook()
    }

    fn learner_mut(&mut self) -> Option<&mut Learner> {
        self.hooks().get_mut()
    }

    fn take_learner(&mut self) -> Option<Learner> {
        let mut learner: Learner = *self.hooks().take()?;
        if let Some(id) = learner.layers.attached.take() {
            self.clear();
            // Somebody else may have detached it.
            let _ = self.adapters().detach(id);
        }
        Some(learner)
    }

    fn observe(&mut self, tokens: &[u32]) -> Result<Losses, LearnError> {
        let losses = self.record(tokens)?;
        self.update()?;
        Ok(losses)
    }

    fn record(&mut self, tokens: &[u32]) -> Result<Losses, LearnError> {
        if tokens.is_empty() {
            return Err(SessionError::NoTokens.into());
        }
        // A generated token that is still to be computed belongs to the previous answer.
        self.hooks().catch_up()?;
        let Some(learner) = self.learner_mut() else {
            return Err(LearnError::NotLearning);
        };
        learner.recording = Some(Losses::default());
        let outcome = self.hooks().prefill_each(tokens, 0, |_, _| ());
        let losses = self
            .learner_mut()
            .and_then(|learner| learner.recording.take());
        outcome?;
        Ok(losses.unwrap_or_default())
    }

    fn feedback(&mut self, reward: f32) -> Result<f32, LearnError> {
        let mut apart = Apart::of(self);
        let (session, learner) = apart.both()?;
        if !reward.is_finite() {
            return Err(LearnError::Reward { value: reward });
        }
        if learner.adapter.answer.len() == 0 {
            return Err(LearnError::NoAnswer);
        }
        if learner.adapter.is_undecided()
            && !learner.adapter.is_due()
            && learner.adapter.control.len() == 0
        {
            return Err(LearnError::NothingToCompare);
        }
        let advantage = learner.advantage(reward);
        let Learner { rows, adapter, .. } = learner;
        if let Some(rows) = rows.as_ref().filter(|_| advantage != 0.0) {
            let lesson = TrainingSignal::Answer(advantage);
            let slices = &mut Slices::whole();
            let teacher = Teacher::new(session.engine(), rows);
            teacher.prepare(adapter, TrainingSignal::Text, slices)?;
            if adapter.is_undecided() {
                teacher.choose(adapter, lesson, slices)?;
            }
            if teacher.teach(adapter, lesson)? {
                teacher.settle(adapter, lesson, slices)?;
            }
        }
        adapter.answer.clear();
        Ok(advantage)
    }

    fn update(&mut self) -> Result<(), LearnError> {
        update(self, &mut Slices::whole())
    }

    fn update_in_slices(
        &mut self,
        pause: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<(), LearnError> {
        update(self, &mut Slices::new(pause))
    }

    fn calibrate(&mut self, tokens: &[u32]) -> Result<(), LearnError> {
        if tokens.len() < LEAST_CONTROL {
            return Err(LearnError::TooLittleText {
                n: tokens.len(),
                least: LEAST_CONTROL,
            });
        }
        // No pass computes the last token; it is only predicted.
        let n_vocab = self.model().hparams().n_vocab;
        if let Some(&token) = tokens.last().filter(|&&token| token as usize >= n_vocab) {
            return Err(SessionError::TokenOutOfRange { token, n_vocab }.into());
        }
        let mut apart = Apart::of(self);
        let (session, learner) = apart.both()?;
        let outcome = read_control(session, learner, tokens);
        drop(apart);
        self.clear();
        Ok(outcome?)
    }
}

impl OutputHook for Learner {
    fn rows(&mut self, rows: OutputRows<'_>) {
        let arch = self.arch;
        self.follow(arch, rows, &mut Slices::whole());
    }

    fn cut(&mut self, cut: Cut) {
        match cut {
            Cut::Rewound => self.interrupt(),
            Cut::AnswerShortened => self.end_text(),
        }
    }

    fn fork(&self) -> Box<dyn OutputHook> {
        Box::new(self.clone())
    }
}

/// A session and its learner, separated so that both can be borrowed mutably; rejoined on drop,
/// also after a panic.
struct Apart<'s> {
    session: &'s mut Session,
    learner: Option<Box<Learner>>,
}

impl Drop for Apart<'_> {
    fn drop(&mut self) {
        if let Some(learner) = self.learner.take() {
            self.session.hooks().set(learner);
        }
    }
}

impl<'s> Apart<'s> {
    fn of(session: &'s mut Session) -> Apart<'s> {
        let learner = session.hooks().take();
        Apart { session, learner }
    }

    fn both(&mut self) -> Result<(&mut Session, &mut Learner), LearnError> {
        let learner = self.learner.as_mut().ok_or(LearnError::NotLearning)?;
        Ok((self.session, learner))
    }
}

/// [`Learning::set_learner`] in slices.
pub(crate) fn set_learner(
    session: &mut Session,
    mut learner: Learner,
    slices: &mut Slices<'_>,
) -> Result<(), LearnError> {
    learner.check(session.model())?;
    learner.interrupt();
    let rows = match learner.rows.take() {
        Some(rows) => rows,
        None => head_rows(session.engine())?,
    };
    let (teacher, arch) = (
        Teacher::new(session.engine(), &rows),
        session.model().arch(),
    );
    teacher.measure_confidence(&mut learner.adapter, slices)?;
    teacher.refresh(&mut learner.adapter, slices)?;
    learner.adapter.reproject(arch, slices);
    learner.adapter.limit(arch, slices);
    learner.rows = Some(rows);
    let adapter = learner.layers.adapter().cloned();
    if adapter.is_some() {
        session.clear();
    }
    learner.layers.attached = adapter
        .map(|adapter| session.adapters().attach(adapter, 1.0))
        .transpose()?;
    drop(session.take_learner());
    session.hooks().set(Box::new(learner));
    Ok(())
}

/// [`Learning::record`] in slices, without logits.
pub(crate) fn record(
    session: &mut Session,
    tokens: &[u32],
    slices: &mut Slices<'_>,
) -> Result<Losses, LearnError> {
    session.hooks().catch_up()?;
    let mut apart = Apart::of(session);
    let (session, learner) = apart.both()?;
    learner.recording = Some(Losses::default());
    let arch = learner.arch;
    let outcome = session
        .hooks()
        .prefill_rows(tokens, 0, &mut |rows| learner.follow(arch, rows, slices));
    let losses = learner.recording.take();
    outcome?;
    Ok(losses.unwrap_or_default())
}

/// [`Learning::update`] in slices; does nothing without a learner.
pub(crate) fn update(session: &mut Session, slices: &mut Slices<'_>) -> Result<(), LearnError> {
    let mut apart = Apart::of(session);
    let Ok((session, learner)) = apart.both() else {
        return Ok(());
    };
    let Learner {
        rows: Some(rows),
        adapter,
        times,
        ..
    } = learner
    else {
        return Ok(());
    };
    let teacher = Teacher::new(session.engine(), rows);
    let timer = Timer::start();
    if teacher
        .prepare(adapter, TrainingSignal::Text, slices)?
        .is_none()
    {
        return Ok(());
    }
    let chosen = timer.elapsed().as_secs_f64();
    let (timer, mut n) = (Timer::start(), 0);
    while teacher.teach(adapter, TrainingSignal::Text)? {
        n += 1;
        slices.tick();
    }
    if n > 0 {
        let taught = timer.elapsed().as_secs_f64();
        teacher.settle(adapter, TrainingSignal::Text, slices)?;
        *times = [
            chosen,
            taught / f64::from(n),
            timer.elapsed().as_secs_f64() - taught,
        ];
        slices.tick();
    }
    Ok(())
}

/// [`Learning::calibrate`] with a session whose learner is apart from it.
fn read_control(
    session: &mut Session,
    learner: &mut Learner,
    tokens: &[u32],
) -> Result<(), SessionError> {
    let Learner {
        rows: Some(rows),
        adapter,
        layers,
        ..
    } = learner
    else {
        return Ok(());
    };
    let (arch, n) = (session.model().arch(), session.model().hparams().n_embd);
    let control = &mut adapter.control;
    let every = (tokens.len() / control.capacity()).max(1);
    let transform = adapter.transform;
    let (mut p, mut logits) = (Vec::new(), Vec::new());
    let mut xi = vec![0.0; n];
    let mut n_tokens = 0usize;
    let read = windows(session, tokens, |i, h, raw| {
        n_tokens += 1;
        xi.iter_mut().zip(h).for_each(|(xi, h)| *xi += h * h);
        if i % every == 0 {
            logits.clear();
            logits.extend_from_slice(raw);
            transform.row(&mut logits);
            let lse = softmax(arch, &logits, &mut p);
            control.push(arch, transform, h, raw, &p, lse, tokens[i]);
        }
    });
    let slices = &mut Slices::whole();
    if read.is_err() {
        // Text read up to here is part of the control text, so the bound must hold on it.
        adapter.reproject(arch, slices);
        adapter.limit(arch, slices);
        adapter.keep();
        return read;
    }
    layers.add_control(tokens);
    let teacher = Teacher::new(session.engine(), rows);
    xi.iter_mut().for_each(|x| *x /= n_tokens.max(1) as f32);
    let g = teacher
        .error_vectors(&adapter.control_errors(), slices)?
        .unwrap_or_default();
    let mut gamma = vec![0.0; n];
    g.chunks_exact(n)
        .for_each(|g| gamma.iter_mut().zip(g).for_each(|(y, g)| *y += g * g));
    gamma
        .iter_mut()
        .for_each(|y| *y *= n as f32 / g.len().max(1) as f32);
    adapter.fisher.merge(&gamma, &xi, FISHER_DECAY);
    adapter.reproject(arch, slices);
    teacher.measure_confidence(adapter, slices)?;
    adapter.steady();
    teacher.settle(adapter, TrainingSignal::Text, slices)
}
