//! Many requests on one engine: continuous batching.
//!
//! A [`Schedule`] decides the contents of the next pass and hands out its results; it has no
//! thread. A [`Scheduler`] is a handle of one that runs on its own thread. Each step computes one
//! row (and the tokens that a grammar forces after it) of every sequence that decodes, and rows of
//! prompts, as far as the time between tokens of those sequences stays within its limit (`pace.
//! rs`): in the same pass, or, where there is no time for all layers, a piece of a pass of their
//! own. So prompts do not stop decoding sequences, and a finished sequence makes room at once
//! (Orca, OSDI 2022).
//!
//! Requests have one order, their [`Rank`]: it determines who is admitted first, whose prompt
//! advances first and, from its end, who loses its pages when the pool is full. A preempted request
//! keeps its tokens, which are computed again, those of the prompt as a prompt and the others as
//! generated ones, so that its text has the same bits.

use crate::clock::Timer;
use crate::compute::arena::reuse;
use crate::decode::output::StopReason;
use crate::decode::speculative::{Asked, DraftPasses};
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::{Engine, PiecePass};
use crate::engine::options::{CacheMode, CancelToken};
use crate::engine::sequence::Sequence;
use crate::kv::KvError;
use crate::layers::outputs::Outputs;
use crate::lora::Adapter;
use crate::scheduler::ScheduleError;
use crate::scheduler::admission::{AdmissionConfig, ScheduleOptions};
use crate::scheduler::live::{Live, RequestRows};
use crate::scheduler::pacing::Pace;
use crate::scheduler::request::{NoObserver, Observer, Request};
use crate::scheduler::stream::{Stream, Wake};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Passes after which a request goes before new ones of the next higher priority.
const AGING: i64 = 512;

/// Most rows of a pass in prompts whose logits are requested, beside nobody who decodes and beside
/// others: the head, in which no pass can pause, computes each as a generated one, and a row of
/// logits takes up to a megabyte.
const PROMPT_LOGITS: usize = 64;
const PROMPT_LOGITS_BESIDE: usize = 16;

/// Requests on an engine, without a thread: [`Schedule::step`] computes the next pass on the
/// caller's.
///
/// ```
/// use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
/// use ruvllm::{Model, Sampler, SamplerOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let mut schedule = Schedule::new(&model.engine()?, &ScheduleOptions::default())?;
/// let tokenizer = model.tokenizer().unwrap();
/// let sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
/// let request = |text| Request::new(tokenizer.encode_prompt(text), sampler.clone()).max_tokens(8);
/// let (one, other) = (schedule.submit(request("Ownership is"))?, schedule.submit(request("A slice is"))?);
/// while schedule.step() {}
/// assert!(!one.text()?.is_empty() && !other.text()?.is_empty());
/// # Ok(()) }
/// ```
pub struct Schedule {
    pub(super) terms: Arc<AdmissionConfig>,
    wake: Arc<Wake>,
    /// Both lists are in the order of ranks.
    pub(super) queue: VecDeque<Box<Live>>,
    #[expect(clippy::vec_box)] // moved from list to list, never copied
    pub(super) running: Vec<Box<Live>>,
    n_passes: u64,
    pace: Pace,
    pub(super) outputs: Outputs,
    /// Never cancelled: requests are, between passes.
    pub(super) cancel: CancelToken,
    /// Memory for the next pass's list of slots.
    slots: Vec<Slot<'static>>,
    /// The pass over prompts of which some parts are computed, and of how many requests.
    piece: PiecePass,
    n_reading: usize,
    /// Memory for [`Schedule::draft`].
    asked: Vec<Asked<'static>>,
    passes: DraftPasses,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Schedule {{ queued: {}, running: {}, .. }}",
            self.queue.len(),
            self.running.len()
        )
    }
}

impl Schedule {
    /// A schedule for `engine`, which can be shared, as passes are exclusive.
    ///
    /// # Errors
    /// If an option is invalid, or there is not enough memory.
    pub fn new(engine: &Engine, options: &ScheduleOptions) -> Result<Schedule, SessionError> {
        Schedule::observed(engine, options, NoObserver)
    }

    /// As [`Schedule::new`], with an observer of every request.
    ///
    /// # Errors
    /// As [`Schedule::new`].
    pub fn observed(
        engine: &Engine,
        options: &ScheduleOptions,
        observer: impl Observer + 'static,
    ) -> Result<Schedule, SessionError> {
        let terms = AdmissionConfig::new(engine, options, Box::new(observer))?;
        Ok(Schedule::on(Arc::new(terms), Arc::default()))
    }

    pub(crate) fn on(terms: Arc<AdmissionConfig>, wake: Arc<Wake>) -> Schedule {
        // A device computes whole passes.
        let pace = Pace::new(
            terms
                .engine
                .runner()
                .map_or(terms.engine.model().hparams().n_layer, |_| 1),
        );
        let piece = terms.engine.piece_pass();
        Schedule {
            terms,
            wake,
            queue: VecDeque::new(),
            running: Vec::new(),
            n_passes: 0,
            pace,
            outputs: Outputs::default(),
            cancel: CancelToken::default(),
            slots: Vec::new(),
            piece,
            n_reading: 0,
            asked: Vec::new(),
            passes: DraftPasses::default(),
        }
    }

    /// Submits a request.
    ///
    /// # Errors
    /// If the request could never be computed, or there are too many requests.
    pub fn submit(&mut self, request: Request) -> Result<Stream, ScheduleError> {
        let (live, stream) = self.terms.judge(request, &self.wake)?;
        self.accept(live);
        Ok(stream)
    }

    pub(crate) fn accept(&mut self, mut live: Box<Live>) {
        live.rank.0 = (self.n_passes as i64).saturating_sub(i64::from(live.priority) * AGING);
        self.terms.observer.queued(live.id, live.n_prompt);
        self.enqueue(live);
    }

    fn enqueue(&mut self, live: Box<Live>) {
        let at = self.queue.partition_point(|other| other.rank < live.rank);
        self.queue.insert(at, live);
    }

    /// Number of requests that wait to be admitted.
    pub fn n_queued(&self) -> usize {
        self.queue.len()
    }

    /// Number of requests that take part in passes.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty()
    }

    /// Computes a pass. Returns false if there is nothing to do: no request, or all wait for their
    /// readers.
    pub fn step(&mut self) -> bool {
        self.terms.observer.step_begins();
        let has_work = self.advance();
        self.terms.observer.step_ends();
        has_work
    }

    fn advance(&mut self) -> bool {
        let n = self.queue.len() + self.running.len();
        self.running
            .iter_mut()
            .filter(|live| !live.is_reading)
            .for_each(|live| live.rows = RequestRows::default());
        self.sweep();
        self.give_back();
        self.admit();
        self.shift();
        self.draft();
        let (n_decode, n_prompt) = self.plan();
        if n_decode + n_prompt > 0 {
            self.compute(n_decode, n_prompt);
            return true;
        }
        // Ended requests made room.
        self.queue.len() + self.running.len() < n
    }

    /// The earliest deadline of a request.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let deadline = self
            .queue
            .iter()
            .chain(&self.running)
            .filter_map(|live| live.deadline)
            .min()?;
        Some(deadline.saturating_sub(self.terms.clock.elapsed()))
    }

    /// Ends requests that were cancelled, or whose deadline has passed.
    fn sweep(&mut self) {
        let now = self.terms.clock.elapsed();
        let reason = |live: &Live| match live.deadline {
            _ if live.sender.is_cancelled() => Some(StopReason::Cancelled),
            Some(deadline) if now >= deadline => Some(StopReason::Deadline),
            _ => None,
        };
        for i in (0..self.running.len()).rev() {
            if let Some(reason) = reason(&self.running[i]) {
                self.running[i].answer.writer.end(reason);
                let live = self.running.remove(i);
                self.end(live, Ok(()));
            }
        }
        for i in (0..self.queue.len()).rev() {
            if let Some(reason) = reason(&self.queue[i]) {
                self.queue[i].answer.writer.end(reason);
                self.queue
                    .remove(i)
                    .into_iter()
                    .for_each(|live| self.end(live, Ok(())));
            }
        }
    }

    /// Hands out the last pieces of a request, and its result.
    pub(super) fn end(&self, mut live: Box<Live>, outcome: Result<(), ScheduleError>) {
        let n_prompt = if live.has_begun {
            live.n_prompt
        } else {
            live.position()
        };
        let pooled = live
            .seq
            .as_mut()
            .map(Sequence::take_pooled)
            .unwrap_or_default();
        live.release_sequence();
        let n_prompt = n_prompt.saturating_sub(live.n_cached.total());
        let finish = live.answer.finish((n_prompt, live.n_cached), live.timings);
        let outcome = outcome.map(|()| finish.expect("an answer ends for a reason"));
        self.terms.observer.ended(live.id, outcome.as_ref());
        live.hand_out();
        live.sender.end(outcome, pooled);
    }

    /// Admits the next requests, as long as there are pages, possibly taking those of requests
    /// after it.
    fn admit(&mut self) {
        while let Some(i) = self.next_in_queue() {
            let live = &self.queue[i];
            let has_place = self.running.len() < self.terms.options.n_parallel;
            if !has_place || !self.has_room(live) {
                let rank = live.rank;
                let Some(victim) = self.victim(|other| other.rank > rank) else {
                    return;
                };
                self.preempt(victim);
                continue;
            }
            self.share_prompt(i);
            let Some(mut live) = self.queue.remove(i) else {
                return;
            };
            match self
                .terms
                .sequence(&live)
                .and_then(|seq| Ok(live.begin(seq)?))
            {
                Ok(()) => {
                    self.terms.observer.admitted(live.id);
                    let at = self.running.partition_point(|other| other.rank < live.rank);
                    self.running.insert(at, live);
                }
                Err(error) => self.end(live, Err(error)),
            }
        }
    }

    /// Above the pool's high mark, requests that wait for their readers leave their pages to the
    /// prefix cache, which gives pages back, down to the low mark.
    fn give_back(&mut self) {
        let pool = self.terms.engine.pool();
        if self.terms.options.session.prefix.cache != CacheMode::On || !pool.is_high(0) {
            return;
        }
        let pool = pool.clone();
        while !pool.give_back(0) {
            let Some(idle) = self.running.iter().rposition(|live| live.is_paused()) else {
                return;
            };
            self.preempt(idle);
        }
    }

    /// Whether the pool has room for the tokens that a request must compute and its next page,
    /// besides those that running requests still need. A request alone may try. The prefix
    /// cache makes room.
    fn has_room(&self, live: &Live) -> bool {
        let pool = self.terms.engine.pool();
        if self.running.is_empty() || pool.stats().budget == u64::MAX {
            return true;
        }
        let n_batch = self.terms.options.session.n_batch;
        let n_ctx = self.terms.empty.n_ctx();
        // Upper bounds of the bytes that it lacks.
        let to_come = |live: &Live| {
            live.layout
                .bytes((live.n_read + 1).min(n_ctx), n_batch)
                .saturating_sub(live.layout.bytes(live.position() + live.rows.n, n_batch))
        };
        let is_attached = |(adapter, _): &(Arc<Adapter>, f32)| {
            self.running
                .iter()
                .flat_map(|live| &live.adapters)
                .any(|(other, _)| Arc::ptr_eq(adapter, other))
        };
        let of_adapters: u64 = live
            .adapters
            .iter()
            .filter(|a| !is_attached(a))
            .map(|(a, _)| a.bytes())
            .sum();
        let promised = self
            .running
            .iter()
            .fold(to_come(live), |sum, live| sum.saturating_add(to_come(live)));
        let promised = promised.saturating_add(of_adapters);
        promised <= pool.stats().left().saturating_add(pool.prefixes().bytes)
    }

    /// The request that loses its pages next: one that waits for its reader, otherwise the last
    /// one, if it `is_behind`.
    pub(super) fn victim(&self, is_behind: impl Fn(&Live) -> bool) -> Option<usize> {
        let paused = self
            .running
            .iter()
            .rposition(|live| live.rows.n == 0 && live.is_paused());
        paused.or_else(|| {
            self.running
                .len()
                .checked_sub(1)
                .filter(|&last| is_behind(&self.running[last]))
        })
    }

    /// Takes a running request's pages; it keeps its tokens.
    pub(super) fn preempt(&mut self, i: usize) {
        let mut live = self.running.remove(i);
        live.drop_drafts();
        live.n_read = live.n_read.max(live.position());
        if let Some(seq) = &live.seq {
            let known = live.kinds.len().min(seq.kinds().len());
            live.kinds.extend_from_slice(&seq.kinds()[known..]);
        }
        live.release_sequence();
        live.unshift();
        self.terms.observer.preempted(live.id);
        self.enqueue(live);
    }

    /// Drafts for those that decode, so many in all that most tokens per second are expected. A
    /// pass that reads prompts has no time for guesses.
    fn draft(&mut self) {
        self.running.iter_mut().for_each(|live| live.drop_drafts());
        if self
            .running
            .iter()
            .all(|live| live.answer.speculator.is_none())
        {
            return;
        }
        let reads = |live: &Live| !live.next_rows(0).is_decoding && !live.is_paused();
        if self.running.iter().any(|live| reads(live)) {
            return;
        }
        let decoding = || self.running.iter().filter(|live| !live.is_paused());
        let n_rows = decoding().map(|live| live.next_rows(0).n).sum();
        let engine = &self.terms.engine;
        let mut asked = reuse(std::mem::take(&mut self.asked));
        asked.extend(
            self.running
                .iter_mut()
                .filter(|live| !live.is_paused())
                .filter_map(|live| live.ask(engine)),
        );
        self.passes.draft(engine, n_rows, &mut asked);
        self.asked = reuse(asked);
    }

    /// Chooses the rows of the next step, and takes their pages. Returns how many decode, and how
    /// many are read.
    fn plan(&mut self) -> (usize, usize) {
        let options = &self.terms.options;
        let n_decoding = self
            .running
            .iter()
            .filter(|live| live.next_rows(0).is_decoding && !live.is_paused())
            .count();
        let n_rows = self
            .pace
            .rows(n_decoding, options.max_itl, options.session.n_batch);
        let mut chunk = if self.n_reading > 0 { 0 } else { n_rows };
        let mut n_logits = self.max_prompt_logits(n_decoding);
        let (mut n_decode, mut n_prompt, mut i) = (0, 0, 0);
        while let Some(live) = self.running.get(i) {
            if live.is_reading {
                n_prompt += live.rows.n;
                i += 1;
                continue;
            }
            let rows = if live.is_paused() {
                RequestRows::default()
            } else if live.n_unseen > 0 {
                live.next_rows(chunk.min(n_logits))
            } else {
                live.next_rows(chunk)
            };
            if rows.n == 0 {
                i += 1;
                continue;
            }
            let Some((at, rows)) = self.reserve(i, rows, n_decode + n_prompt > 0) else {
                continue;
            };
            i = at + 1;
            self.running[at].rows = rows;
            let n = if rows.is_decoding {
                &mut n_decode
            } else {
                &mut n_prompt
            };
            *n += rows.n;
            // An image that is not cut may be longer than the rest.
            let n_read = if rows.is_decoding { 0 } else { rows.n };
            chunk = chunk.saturating_sub(n_read);
            n_logits = n_logits.saturating_sub(if self.running[at].n_unseen > 0 {
                rows.n
            } else {
                0
            });
        }
        if self.running.iter().filter(|live| live.is_reading).count() == self.n_reading {
            return (n_decode, n_prompt);
        }
        // One of them is gone: their pass begins anew, without it.
        self.n_reading = 0;
        self.piece.restart();
        self.running.iter_mut().for_each(|live| live.stop_reading());
        self.plan()
    }

    /// Most rows of a pass, beside so many that decode, in prompts whose logits are requested.
    fn max_prompt_logits(&self, n_decoding: usize) -> usize {
        let AdmissionConfig {
            engine, options, ..
        } = &*self.terms;
        match engine.model().memory_limit() {
            // The plan has room for a row of each sequence.
            Some(_) => (options.n_parallel + 1).saturating_sub(self.running.len()),
            None if n_decoding > 0 => PROMPT_LOGITS_BESIDE,
            None => PROMPT_LOGITS,
        }
    }

    /// Takes the pages of a running request for its rows, possibly those of requests after it.
    /// Returns its new index and the rows that have pages: none if it waits until others are
    /// done, which it can if `may_wait`; fewer of a prompt if windows give back pages between
    /// passes. `None` if it has ended.
    fn reserve(
        &mut self,
        mut i: usize,
        mut rows: RequestRows,
        may_wait: bool,
    ) -> Option<(usize, RequestRows)> {
        // Half of them, unless an image is among them that is not cut.
        let fewer = |live: &Live, rows: RequestRows| live.next_rows((rows.n / 2).max(1));
        loop {
            let seq = self.running[i]
                .seq
                .as_mut()
                .expect("who runs has a sequence");
            let error = match seq.kv.reserve(rows.n) {
                Ok(()) => return Some((i, rows)),
                Err(error) => error,
            };
            let is_full = matches!(error, KvError::PoolFull { .. });
            let rank = self.running[i].rank;
            match self.victim(|other| other.rank > rank).filter(|_| is_full) {
                Some(victim) => {
                    self.preempt(victim);
                    i -= usize::from(victim < i);
                }
                None if is_full && may_wait => return Some((i, RequestRows::default())),
                None if is_full
                    && !rows.is_decoding
                    && fewer(&self.running[i], rows).n < rows.n =>
                {
                    rows = fewer(&self.running[i], rows);
                }
                None => {
                    let live = self.running.remove(i);
                    self.end(live, Err(SessionError::from(error).into()));
                    return None;
                }
            }
        }
    }

    fn compute(&mut self, n_decode: usize, n_prompt: usize) {
        self.n_passes += 1;
        let max_itl = self.terms.options.max_itl;
        if self.n_reading == 0 && self.pace.has_time(n_decode, max_itl, n_prompt) {
            if let Some(time) = self.pass(|_| true, None) {
                self.pace.note(n_decode, n_prompt, time);
            }
            return;
        }
        let step = Timer::start();
        if n_decode > 0
            && let Some(time) = self.pass(|rows| rows.is_decoding, None)
        {
            self.pace.note_beside(n_decode, time);
        }
        self.pass(|rows| !rows.is_decoding, Some((n_decode, n_prompt, step)));
        if n_decode > 0 {
            self.pace.note_step(n_decode, max_itl, step.elapsed());
        }
    }

    /// Computes a pass of those whose rows are `taken`, and hands out its results; or, beside so
    /// many rows that decode, as much of one over so many rows of prompts as there is time in a
    /// step. Returns the time that it took, unless it failed.
    fn pass(
        &mut self,
        taken: impl Fn(&RequestRows) -> bool,
        piece: Option<(usize, usize, Timer)>,
    ) -> Option<Duration> {
        let taken = |live: &Live| live.rows.n > 0 && taken(&live.rows);
        let Schedule {
            terms,
            running,
            outputs,
            cancel,
            slots,
            piece: of_prompts,
            pace,
            ..
        } = self;
        let timer = Timer::start();
        let mut pass = reuse(std::mem::take(slots));
        pass.extend(
            running
                .iter_mut()
                .filter(|live| taken(live))
                .map(|live| live.slot()),
        );
        let n_slots = pass.len();
        let outcome = match piece {
            None => terms.engine.step(&mut pass, outputs, cancel).map(|()| true),
            Some((n_decode, n_prompt, step)) => {
                let pause = &pace.pause(
                    (n_decode, terms.options.max_itl),
                    n_prompt,
                    of_prompts.cursor(),
                    step,
                );
                terms
                    .engine
                    .step_piece(&mut pass, outputs, cancel, of_prompts, pause)
            }
        };
        *slots = reuse(pass);
        let time = timer.elapsed();
        // Those of the step's other pass wait meanwhile.
        for live in running.iter_mut().filter(|live| live.rows.n > 0) {
            let part = if live.rows.is_decoding {
                &mut live.timings.decode
            } else {
                &mut live.timings.prefill
            };
            *part += time;
        }
        if piece.is_some() {
            let is_reading = matches!(outcome, Ok(false));
            running
                .iter_mut()
                .filter(|live| taken(live))
                .for_each(|live| live.is_reading = is_reading);
            self.n_reading = if is_reading { n_slots } else { 0 };
            if is_reading {
                return Some(time);
            }
        }
        let (mut i, mut slot) = (0, 0);
        while let Some(live) = self.running.get(i) {
            let is_taken = taken(live);
            let goes_on = !is_taken || self.follow(i, outcome.is_ok().then_some(slot));
            slot += usize::from(is_taken);
            i += usize::from(goes_on);
        }
        outcome.is_ok().then_some(time)
    }

    /// Goes on with running request `i` after a pass that computed its rows as `slot`, or alone
    /// after one that failed. Returns whether it still runs.
    fn follow(&mut self, i: usize, slot: Option<usize>) -> bool {
        let AdmissionConfig {
            engine, observer, ..
        } = &*self.terms;
        let live = &mut self.running[i];
        let mut outcome = Ok(());
        if slot.is_none() {
            // Whose rows cannot be computed fails alone.
            if live.rows.is_decoding {
                // Of its drafts, too.
                live.drop_drafts();
                live.rows = live.next_rows(0);
            }
            outcome = engine.step(&mut [live.slot()], &mut self.outputs, &self.cancel);
        }
        let had_token = !live.answer.writer.tokens().is_empty();
        let outcome = outcome.map_err(ScheduleError::from).and_then(|()| {
            let logits = self.outputs.logits(slot.unwrap_or(0));
            Ok(live.follow(logits)?)
        });
        live.drop_drafts();
        if !had_token && !live.answer.writer.tokens().is_empty() {
            live.timings.first_token = live.since.elapsed();
            observer.first_token(live.id);
        }
        if outcome.is_err() || live.answer.writer.reason().is_some() {
            let live = self.running.remove(i);
            self.end(live, outcome);
            return false;
        }
        live.hand_out();
        true
    }
}
