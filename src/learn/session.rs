//! Learning in a session.
//!
//! While tokens are computed, learning costs the adapter's few operations and a record of the
//! model's prediction. Everything else happens when [`Session::observe`], [`Session::feedback`] or
//! [`Session::update`] is called.

use crate::clock::Timer;
use crate::compute::hook::{Cut, OutputHook, OutputRows, TokenKind};
use crate::compute::linear::{Ctx, Product, RowAdapters, linear, with_scratch};
use crate::compute::probe::NoProbe;
use crate::engine::SessionError;
use crate::engine::memory_plan::MemoryPlan;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::learn::moments::SLOTS;
use crate::learn::optimiser::ErrorFactors;
use crate::learn::slices::Slices;
use crate::learn::{
    HeadLearner, HeadRows, LearnError, Learner, LearnerOptions, Lesson, Losses, Ranks, softmax,
};
use crate::model::{Hparams, Weight};
use crate::session::session::Session;
use std::ops::Range;
use std::time::Duration;

/// Number of partial sums into which products with rows of the head are split: fixed, so that
/// results do not depend on the number of threads.
const PARTS: usize = 8;
/// Values of the head's rows that are added up before another pass gets its turn: half a
/// millisecond.
const SLICE_VALUES: usize = 1 << 20;
/// Values of the head that are multiplied by an adapter before another pass gets its turn: also
/// about half a millisecond.
const PRODUCT_VALUES: usize = 4 << 20;
/// Fewest tokens of control text.
const LEAST_CONTROL: usize = 64;
/// Fraction of the old Fisher information that remains when more text is consolidated.
const FISHER_DECAY: f32 = 0.9;

/// Callback with a token's index, and the hidden state and head product that predicted it.
type Visit<'v> = dyn FnMut(usize, &[f32], &[f32]) + 'v;

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
            self.session.set_hook(learner);
        }
    }
}

impl<'s> Apart<'s> {
    fn of(session: &'s mut Session) -> Apart<'s> {
        let learner = session.take_hook();
        Apart { session, learner }
    }
}

impl MemoryPlan {
    /// Adds what learning takes, but for inner layers. Learning from text needs logits of all
    /// tokens of a batch.
    #[must_use]
    pub fn with_learner(
        mut self,
        h: &Hparams,
        options: &SessionOptions,
        learner: &LearnerOptions,
    ) -> MemoryPlan {
        let m = options.n_batch.min(self.n_ctx) as u64;
        let rows = m.saturating_mul((h.n_embd + h.n_vocab) as u64 * 4);
        self.learner = learner.bytes(h.n_embd, h.n_vocab).saturating_add(rows);
        self
    }
}

impl Session {
    /// Lets the session learn with `learner`, new or loaded, which replaces one it has. The bound
    /// on forgetting holds from the first token on, whatever a file contained; only of inner
    /// layers, as of any adapter's file, what it says is believed. If it has learnt in inner
    /// layers, or the one before has, the session is emptied.
    ///
    /// # Errors
    /// If the learner belongs to another model.
    pub fn set_learner(&mut self, learner: Learner) -> Result<(), LearnError> {
        self.set_learner_with(learner, &mut Slices::whole())
    }

    /// As [`Session::set_learner`], in slices of a fraction of a millisecond, after each of which
    /// `pause` is called with the time that it took.
    ///
    /// # Errors
    /// As [`Session::set_learner`].
    pub fn set_learner_in_slices(
        &mut self,
        learner: Learner,
        pause: &mut dyn FnMut(Duration),
    ) -> Result<(), LearnError> {
        self.set_learner_with(
            learner,
            &mut Slices::new(&mut |took| {
                pause(took);
                true
            }),
        )
    }

    pub(crate) fn set_learner_with(
        &mut self,
        mut learner: Learner,
        slices: &mut Slices<'_>,
    ) -> Result<(), LearnError> {
        learner.check(self.model())?;
        learner.interrupt();
        if learner.rows.is_none() {
            learner.rows = Some(self.head_rows()?);
        }
        if let Some(rows) = &learner.rows {
            self.measure_confidence(&mut learner.adapter, rows, slices)?;
        }
        self.refresh(&mut learner.adapter, slices)?;
        learner.adapter.reproject(self.model().arch(), slices);
        learner.adapter.limit(self.model().arch(), slices);
        let adapter = learner.layers.adapter().cloned();
        learner.layers.attached = adapter
            .map(|adapter| self.attach(adapter, 1.0))
            .transpose()?;
        drop(self.take_learner());
        self.set_hook(Box::new(learner));
        Ok(())
    }

    /// Mean and spread of the head's rows.
    pub(crate) fn head_rows(&self) -> Result<HeadRows, SessionError> {
        let model = self.model();
        self.engine().enter(&CancelToken::default(), |crew, _| {
            let ctx = Ctx {
                arch: model.arch(),
                crew,
                gguf: model.gguf(),
                adapters: RowAdapters::All(&[]),
                n_generated: 0,
                adapter_nanos: None,
            };
            head_rows(ctx, &model.weights().output.w)
        })
    }

    /// The attached learner, with what it has learnt so far.
    pub fn learner(&self) -> Option<&Learner> {
        self.hook()
    }

    /// The attached learner, mutable.
    pub fn learner_mut(&mut self) -> Option<&mut Learner> {
        self.hook_mut()
    }

    /// Detaches the learner; the session then computes as the model alone does.
    pub fn take_learner(&mut self) -> Option<Learner> {
        let mut learner: Learner = *self.take_hook()?;
        if let Some(id) = learner.layers.attached.take() {
            // Somebody else may have detached it.
            let _ = self.detach(id);
        }
        Some(learner)
    }

    /// Appends `tokens`, text written by the user, as [`Session::prefill`] does, and learns from
    /// them: each is scored by the model and by all that was learnt before, then learnt. The
    /// losses are summed over all tokens that follow another one: the first of an empty session
    /// has no loss.
    ///
    /// # Errors
    /// As [`Session::prefill`], or if the session has no learner.
    pub fn observe(&mut self, tokens: &[u32]) -> Result<Losses, LearnError> {
        let losses = self.record(tokens)?;
        self.update()?;
        Ok(losses)
    }

    /// The first half of [`Session::observe`]: scores `tokens` and stores what [`Session::update`]
    /// needs to learn from them later.
    ///
    /// # Errors
    /// As [`Session::observe`].
    pub fn record(&mut self, tokens: &[u32]) -> Result<Losses, LearnError> {
        if tokens.is_empty() {
            return Err(SessionError::NoTokens.into());
        }
        // A generated token that is still to be computed belongs to the previous answer.
        self.catch_up()?;
        let Some(learner) = self.learner_mut() else {
            return Err(LearnError::NotLearning);
        };
        learner.recording = Some(Losses::default());
        let outcome = self.prefill_each(tokens, 0, |_, _| ());
        let losses = self
            .learner_mut()
            .and_then(|learner| learner.recording.take());
        outcome?;
        Ok(losses.unwrap_or_default())
    }

    /// [`Session::record`] in slices, for who needs no logits.
    pub(crate) fn record_with(
        &mut self,
        tokens: &[u32],
        slices: &mut Slices<'_>,
    ) -> Result<Losses, LearnError> {
        self.catch_up()?;
        let mut apart = Apart::of(self);
        let Apart {
            session,
            learner: Some(learner),
        } = &mut apart
        else {
            return Err(LearnError::NotLearning);
        };
        learner.recording = Some(Losses::default());
        let arch = learner.arch;
        let mut follow = |rows: OutputRows<'_>| learner.follow(arch, rows, slices);
        let outcome = session.passes(
            TokenKind::Prompt,
            tokens,
            0,
            true,
            &mut NoProbe,
            &mut follow,
        );
        let losses = learner.recording.take();
        outcome?;
        Ok(losses.unwrap_or_default())
    }

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
    pub fn feedback(&mut self, reward: f32) -> Result<f32, LearnError> {
        let mut apart = Apart::of(self);
        let Apart {
            session,
            learner: Some(learner),
        } = &mut apart
        else {
            return Err(LearnError::NotLearning);
        };
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
        let Learner { rows, adapter, .. } = &mut **learner;
        if let Some(rows) = rows.as_ref().filter(|_| advantage != 0.0) {
            let lesson = Lesson::Answer(advantage);
            let slices = &mut Slices::whole();
            session.prepare(adapter, rows, Lesson::Text, slices)?;
            if adapter.is_undecided() {
                session.choose(adapter, rows, lesson, slices)?;
            }
            if session.teach(adapter, rows, lesson)? {
                session.settle(adapter, lesson, slices)?;
            }
        }
        adapter.answer.clear();
        Ok(advantage)
    }

    /// Learns from text that was [recorded](Session::record) and not learnt from yet; a single
    /// token waits for another.
    ///
    /// # Errors
    /// If there is no memory for the product with the head.
    pub fn update(&mut self) -> Result<(), LearnError> {
        self.update_with(&mut Slices::whole())
    }

    /// As [`Session::update`], in slices of a fraction of a millisecond: between them other passes
    /// can be computed. Calls `pause` after each with the time that it took; if that returns
    /// false before directions are chosen, gives up, and what was recorded is still to be
    /// learnt.
    ///
    /// # Errors
    /// As [`Session::update`].
    pub fn update_in_slices(
        &mut self,
        pause: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<(), LearnError> {
        self.update_with(&mut Slices::new(pause))
    }

    pub(crate) fn update_with(&mut self, slices: &mut Slices<'_>) -> Result<(), LearnError> {
        let mut apart = Apart::of(self);
        let Apart {
            session,
            learner: Some(learner),
        } = &mut apart
        else {
            return Ok(());
        };
        let Learner {
            rows: Some(rows),
            adapter,
            times,
            ..
        } = &mut **learner
        else {
            return Ok(());
        };
        let timer = Timer::start();
        if session
            .prepare(adapter, rows, Lesson::Text, slices)?
            .is_none()
        {
            return Ok(());
        }
        let chosen = timer.elapsed().as_secs_f64();
        let (timer, mut n) = (Timer::start(), 0);
        while session.teach(adapter, rows, Lesson::Text)? {
            n += 1;
            slices.tick();
        }
        if n > 0 {
            let taught = timer.elapsed().as_secs_f64();
            session.settle(adapter, Lesson::Text, slices)?;
            *times = [
                chosen,
                taught / f64::from(n),
                timer.elapsed().as_secs_f64() - taught,
            ];
            slices.tick();
        }
        Ok(())
    }

    /// Reads control text, on which the adapter must not change the model much. Stores moments of
    /// it, and the Fisher information that consolidation uses; further calls add to these.
    /// Empties the session.
    ///
    /// # Errors
    /// As [`Session::prefill`], if there are too few tokens, or if the session has no learner.
    pub fn calibrate(&mut self, tokens: &[u32]) -> Result<(), LearnError> {
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
        let Apart {
            session,
            learner: Some(learner),
        } = &mut apart
        else {
            return Err(LearnError::NotLearning);
        };
        let outcome = session.read_control(learner, tokens);
        drop(apart);
        self.clear();
        Ok(outcome?)
    }

    fn read_control(&mut self, learner: &mut Learner, tokens: &[u32]) -> Result<(), SessionError> {
        let (arch, n) = (self.model().arch(), self.model().hparams().n_embd);
        let control = &mut learner.adapter.control;
        let every = (tokens.len() / control.capacity()).max(1);
        let finish = learner.adapter.finish;
        let (mut p, mut logits) = (Vec::new(), Vec::new());
        let mut xi = vec![0.0; n];
        let mut n_tokens = 0usize;
        let read = self.windows(tokens, |i, h, raw| {
            n_tokens += 1;
            xi.iter_mut().zip(h).for_each(|(xi, h)| *xi += h * h);
            if i % every == 0 {
                logits.clear();
                logits.extend_from_slice(raw);
                finish.row(&mut logits);
                let lse = softmax(arch, &logits, &mut p);
                control.push(arch, finish, h, raw, &p, lse, tokens[i]);
            }
        });
        if read.is_err() {
            // Text read up to here is part of the control text, so the bound must hold on it.
            learner.adapter.reproject(arch, &mut Slices::whole());
            learner.adapter.limit(arch, &mut Slices::whole());
            learner.adapter.keep();
            return read;
        }
        learner.layers.add_control(tokens);
        xi.iter_mut().for_each(|x| *x /= n_tokens.max(1) as f32);
        let g = match &learner.rows {
            Some(rows) => self
                .error_vectors(
                    rows,
                    &learner.adapter.control_errors(),
                    &mut Slices::whole(),
                )?
                .unwrap_or_default(),
            None => Vec::new(),
        };
        let mut gamma = vec![0.0; n];
        g.chunks_exact(n)
            .for_each(|g| gamma.iter_mut().zip(g).for_each(|(y, g)| *y += g * g));
        gamma
            .iter_mut()
            .for_each(|y| *y *= n as f32 / g.len().max(1) as f32);
        learner.adapter.fisher.merge(&gamma, &xi, FISHER_DECAY);
        let slices = &mut Slices::whole();
        learner.adapter.reproject(arch, slices);
        if let Some(rows) = &learner.rows {
            self.measure_confidence(&mut learner.adapter, rows, slices)?;
            learner.adapter.steady();
        }
        self.settle(&mut learner.adapter, Lesson::Text, slices)
    }

    /// Reads a text in windows that overlap by half, and calls `visit` with each token `i` and the
    /// hidden state and head product that predicted it. Contexts are between half of the
    /// session's length and all of it.
    pub(crate) fn windows(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(usize, &[f32], &[f32]),
    ) -> Result<(), SessionError> {
        let half = (self.n_ctx() / 2).max(1);
        for start in (0..tokens.len()).step_by(half) {
            self.window(
                tokens,
                start..(start + half).min(tokens.len()),
                half,
                &mut each,
            )?;
        }
        Ok(())
    }

    /// The part `chunk` of [`Session::windows`], after at most `context` tokens.
    pub(crate) fn window(
        &mut self,
        tokens: &[u32],
        chunk: Range<usize>,
        context: usize,
        each: &mut Visit<'_>,
    ) -> Result<(), SessionError> {
        let (n, n_vocab) = (
            self.model().hparams().n_embd,
            self.model().hparams().n_vocab,
        );
        let begin = chunk.start.saturating_sub(context);
        self.clear();
        if chunk.end - begin < 2 {
            return Ok(());
        }
        // Row `i` predicts token `i + 1`; nothing predicts the first token.
        let first = (chunk.start - begin).saturating_sub(1);
        let kind = TokenKind::Prompt;
        self.passes(
            kind,
            &tokens[begin..chunk.end - 1],
            first,
            true,
            &mut NoProbe,
            &mut |rows| {
                for (j, (h, raw)) in rows
                    .states
                    .chunks_exact(n)
                    .zip(rows.logits.chunks_exact(n_vocab))
                    .enumerate()
                {
                    each(begin + rows.first + j + 1, h, raw);
                }
            },
        )
    }

    /// Chooses directions if that is due, and makes them effective; `None` if `slices` gave up.
    pub(crate) fn prepare(
        &self,
        adapter: &mut HeadLearner,
        rows: &HeadRows,
        lesson: Lesson,
        slices: &mut Slices<'_>,
    ) -> Result<Option<()>, SessionError> {
        if adapter.is_due() {
            self.choose(adapter, rows, lesson, slices)
        } else {
            Ok(Some(()))
        }
    }

    fn choose(
        &self,
        adapter: &mut HeadLearner,
        rows: &HeadRows,
        lesson: Lesson,
        slices: &mut Slices<'_>,
    ) -> Result<Option<()>, SessionError> {
        let arch = self.model().arch();
        let errors = adapter.errors(arch, lesson, slices);
        let chosen = errors
            .map(|errors| self.error_vectors(rows, &errors, slices))
            .transpose()?
            .flatten();
        if chosen
            .and_then(|g| adapter.choose(arch, &g, lesson, slices))
            .is_none()
        {
            return Ok(None);
        }
        self.measure_confidence(adapter, rows, slices)?;
        adapter.steady();
        self.settle(adapter, lesson, slices)?;
        Ok(Some(()))
    }

    /// Computes the gradient of the model's confidence for the current `A`.
    fn measure_confidence(
        &self,
        adapter: &mut HeadLearner,
        rows: &HeadRows,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        let surer = adapter.surer(self.model().arch(), slices);
        adapter.confidence =
            self.combine(rows, &surer.rows, &surer.rest, adapter.head.rank, slices)?;
        Ok(())
    }

    /// Takes one update step of the direction; returns whether there was anything to learn from.
    /// [`Session::settle`] makes it effective.
    pub(crate) fn teach(
        &self,
        adapter: &mut HeadLearner,
        rows: &HeadRows,
        lesson: Lesson,
    ) -> Result<bool, SessionError> {
        let Some(g) = self.head_gradient(adapter, rows, lesson)? else {
            return Ok(false);
        };
        adapter.step(lesson, &g);
        Ok(true)
    }

    /// Gradient `(rank, n_embd)` that [`Session::teach`] follows; `None` if there is nothing to
    /// learn from.
    pub(crate) fn head_gradient(
        &self,
        adapter: &mut HeadLearner,
        rows: &HeadRows,
        lesson: Lesson,
    ) -> Result<Option<Vec<f32>>, SessionError> {
        let Some(gradient) = adapter.gradient(self.model().arch(), rows, lesson) else {
            return Ok(None);
        };
        let slices = &mut Slices::whole();
        self.combine(
            rows,
            &gradient.rows,
            &gradient.rest,
            adapter.head.rank,
            slices,
        )
        .map(Some)
    }

    /// Makes updates effective: computes `W·B`, then the step length within the bound.
    pub(crate) fn settle(
        &self,
        adapter: &mut HeadLearner,
        lesson: Lesson,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        self.refresh(adapter, slices)?;
        adapter.settle(self.model().arch(), lesson, slices);
        Ok(())
    }

    /// Recomputes the adapter's `W·B` and its statistics.
    fn refresh(
        &self,
        adapter: &mut HeadLearner,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        let (model, head) = (self.model(), &mut adapter.head);
        let (w, n_vocab) = (&model.weights().output.w, head.n_vocab());
        // So many rows of the head at a time: other passes need not wait for all.
        let each = (PRODUCT_VALUES / w.n_in).clamp(1, n_vocab);
        let mut part = vec![0.0; head.rank * each];
        for first in (0..n_vocab).step_by(each) {
            let w = w.rows(first..(first + each).min(n_vocab));
            let part = &mut part[..head.rank * w.n_out];
            self.engine()
                .enter(&CancelToken::default(), |crew, arena| {
                    let ctx = Ctx {
                        arch: model.arch(),
                        crew,
                        gguf: model.gguf(),
                        adapters: RowAdapters::All(&[]),
                        n_generated: head.rank,
                        adapter_nanos: None,
                    };
                    with_scratch(model, crew, arena, head.rank, |scratch| {
                        linear(
                            ctx,
                            scratch,
                            &head.b,
                            head.rank,
                            &mut [Product::of_weight(&w, part, head.rank)],
                        );
                    })
                })??;
            for (wb, part) in head
                .wb
                .chunks_exact_mut(n_vocab)
                .zip(part.chunks_exact(w.n_out))
            {
                wb[first..][..w.n_out].copy_from_slice(part);
            }
            slices.tick();
        }
        head.measure();
        Ok(())
    }

    /// `Σ_v W_v·parts[v]ᵀ + mean·restᵀ`, `(rank, n_embd)`.
    pub(crate) fn combine(
        &self,
        rows: &HeadRows,
        parts: &[(u32, Ranks)],
        rest: &Ranks,
        rank: usize,
        slices: &mut Slices<'_>,
    ) -> Result<Vec<f32>, SessionError> {
        let (model, n) = (self.model(), self.model().hparams().n_embd);
        let w = &model.weights().output.w;
        let (arch, data, row) = (model.arch(), w.data(model.gguf()), w.row_bytes());
        let bytes = |token: u32| &data[token as usize * row..][..row];
        let share = parts.len().div_ceil(PARTS).max(1);
        let mut sums = vec![0.0; PARTS * rank * n];
        // So many rows of each part at a time: other passes need not wait for all.
        let slice = (SLICE_VALUES / (PARTS * n)).max(1);
        for first in (0..share).step_by(slice) {
            self.engine().enter(&CancelToken::default(), |crew, _| {
                crew.for_chunks(&mut sums, rank * n, |i, sum| {
                    let mut values = vec![0.0; n];
                    let end = ((i + 1) * share).min(parts.len());
                    for (j, (token, u)) in parts[..end]
                        .iter()
                        .enumerate()
                        .skip(i * share + first)
                        .take(slice)
                    {
                        if let Some((next, _)) = parts.get(j + 1) {
                            arch.prefetch(bytes(*next));
                        }
                        arch.dequantize(w.dtype, bytes(*token), &mut values);
                        sum.chunks_exact_mut(n)
                            .zip(u)
                            .for_each(|(sum, &u)| arch.add_scaled(sum, &values, u));
                    }
                });
            })?;
            slices.tick();
        }
        let (total, others) = sums.split_at_mut(rank * n);
        others
            .chunks_exact(rank * n)
            .for_each(|sum| arch.add(total, sum));
        total
            .chunks_exact_mut(n)
            .zip(rest)
            .for_each(|(sum, &u)| arch.add_scaled(sum, &rows.mean, u));
        sums.truncate(rank * n);
        Ok(sums)
    }

    /// `∂loss/∂h` at moments, `(moments, n_embd)`; `None` if `slices` gave up.
    fn error_vectors(
        &self,
        rows: &HeadRows,
        errors: &[ErrorFactors],
        slices: &mut Slices<'_>,
    ) -> Result<Option<Vec<f32>>, SessionError> {
        let (model, n) = (self.model(), self.model().hparams().n_embd);
        let w = &model.weights().output.w;
        let (arch, data, row) = (model.arch(), w.data(model.gguf()), w.row_bytes());
        let mut g = vec![0.0; errors.len() * n];
        let each = (SLICE_VALUES / (SLOTS * n)).max(1);
        for (g, errors) in g.chunks_mut(each * n).zip(errors.chunks(each)) {
            self.engine().enter(&CancelToken::default(), |crew, _| {
                crew.for_chunks(g, n, |i, g| {
                    let (parts, rest) = &errors[i];
                    let mut values = vec![0.0; n];
                    for &(token, error) in parts {
                        arch.dequantize(w.dtype, &data[token as usize * row..][..row], &mut values);
                        arch.add_scaled(g, &values, error);
                    }
                    arch.add_scaled(g, &rows.mean, *rest);
                });
            })?;
            if slices.tick().is_none() {
                return Ok(None);
            }
        }
        Ok(Some(g))
    }
}

fn head_rows(ctx: Ctx<'_>, w: &Weight) -> HeadRows {
    let (n, row, data) = (w.n_in, w.row_bytes(), w.data(ctx.gguf));
    let share = w.n_out.div_ceil(PARTS);
    let each = |part: usize, visit: &mut dyn FnMut(&[f32])| {
        let mut values = vec![0.0; n];
        for v in part * share..((part + 1) * share).min(w.n_out) {
            ctx.arch
                .dequantize(w.dtype, &data[v * row..][..row], &mut values);
            visit(&values);
        }
    };
    let mut sums = vec![0.0; PARTS * n];
    ctx.crew.for_chunks(&mut sums, n, |i, sum| {
        each(i, &mut |w| ctx.arch.add(sum, w))
    });
    let (mean, others) = sums.split_at_mut(n);
    others
        .chunks_exact(n)
        .for_each(|sum| ctx.arch.add(mean, sum));
    mean.iter_mut().for_each(|x| *x /= w.n_out as f32);
    let mean = mean.to_vec();
    let mut largest = vec![0.0f32; PARTS];
    ctx.crew.for_chunks(&mut largest, 1, |i, largest| {
        each(i, &mut |w| {
            let distance: f32 = w.iter().zip(&mean).map(|(w, m)| (w - m) * (w - m)).sum();
            largest[0] = largest[0].max(distance);
        });
    });
    HeadRows {
        mean,
        spread: largest.into_iter().fold(0.0, f32::max).sqrt(),
    }
}
