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

mod driver;
mod pace;
mod stream;

use super::batch::reuse;
use super::draft::{
    Asked, DraftPasses, DraftStats, RecentTexts, Speculation, Speculator, best_length,
};
use super::engine::{PiecePass, plan_options};
use super::hook::TokenKind;
use super::pooled::Pooling;
use super::writer::{Finish, Piece, PieceWriter, StopReason, Timings};
use super::{
    CacheMode, CachedTokens, CancelToken, Engine, Outputs, PlanOptions, Sequence, SessionOptions,
    Slot,
};
use crate::cache::KvError;
use crate::cache::{KvLayout, Reserved};
use crate::clock::Timer;
use crate::exec::DecodeError;
use crate::exec::{ScheduleError, SessionError};
use crate::lora::Adapter;
use crate::sample::Sampler;
use pace::Pace;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stream::{Sender, Wake};

pub use driver::Scheduler;
pub use stream::Stream;

/// Passes after which a request goes before new ones of the next higher priority.
const AGING: i64 = 512;

/// Sets of adapters that are remembered, and so kept in memory.
const MAX_ADAPTED: usize = 16;

/// Tenants whose last texts are remembered.
const MAX_TENANTS: usize = 32;

/// Options of a schedule. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug)]
pub struct ScheduleOptions {
    /// Options of each sequence. Its `n_batch` is the largest number of prompt rows in a pass.
    pub session: SessionOptions,
    /// Largest number of sequences computed concurrently. Default 16.
    pub n_parallel: usize,
    /// Largest number of requests that wait or run. Default 4096.
    pub max_requests: usize,
    /// Number of pieces waiting for a request's reader at which the request pauses. Default 64.
    pub n_pieces: usize,
    /// Limit on the time between two tokens of a sequence while prompts of others are computed.
    /// Default: twice the time without prompts.
    pub max_itl: Option<Duration>,
}

impl Default for ScheduleOptions {
    fn default() -> Self {
        let session = SessionOptions::default();
        ScheduleOptions {
            session,
            n_parallel: 16,
            max_requests: 4096,
            n_pieces: 64,
            max_itl: None,
        }
    }
}

/// Identifies a request, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A prompt to be continued, with options.
#[derive(Clone, Debug)]
pub struct Request {
    tokens: Vec<u32>,
    sampler: Sampler,
    max_tokens: usize,
    stop: Vec<String>,
    logprobs: Option<usize>,
    special: bool,
    priority: i32,
    deadline: Option<Duration>,
    adapters: Vec<(Arc<Adapter>, f32)>,
    salt: Option<String>,
    speculation: Option<Speculation>,
}

impl Request {
    /// Continues `tokens`, as [`Session::generate_from`](super::Session::generate_from) does.
    pub fn new(tokens: Vec<u32>, sampler: Sampler) -> Request {
        Request {
            tokens,
            sampler,
            max_tokens: usize::MAX,
            stop: Vec::new(),
            logprobs: None,
            special: false,
            priority: 0,
            deadline: None,
            adapters: Vec::new(),
            salt: None,
            speculation: None,
        }
    }

    /// Sets the largest number of tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Request {
        self.max_tokens = n;
        self
    }

    /// Sets stop strings, before which the text ends.
    #[must_use]
    pub fn stop<T: Into<String>>(mut self, stop: impl IntoIterator<Item = T>) -> Request {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the log-probability of each token, and of the `n_top` most probable ones.
    #[must_use]
    pub fn logprobs(mut self, n_top: usize) -> Request {
        self.logprobs = Some(n_top);
        self
    }

    /// Returns special tokens as their texts, as needed by parsers of tool calls.
    #[must_use]
    pub fn special(mut self) -> Request {
        self.special = true;
        self
    }

    /// Sets the priority: a request goes before those of lower priority, and keeps its pages
    /// longer. Default 0. A request that has waited for 512 passes goes before newer ones of
    /// the next higher priority.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Request {
        self.priority = priority;
        self
    }

    /// Ends the request after this time, as [`StopReason::Deadline`], with the text generated so
    /// far; never without a clock (wasm32).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Request {
        self.deadline = Some(deadline);
        self
    }

    /// Shares cached prefixes only with requests with this salt, one per tenant, instead of those
    /// with the schedule's [`PrefixOptions::salt`](super::PrefixOptions::salt).
    #[must_use]
    pub fn salt(mut self, salt: impl Into<String>) -> Request {
        self.salt = Some(salt.into());
        self
    }

    /// Computes several of its tokens per pass where that is faster for all that run; the text
    /// stays the same. See [`Speculation`].
    #[must_use]
    pub fn speculate(mut self, speculation: Speculation) -> Request {
        self.speculation = Some(speculation);
        self
    }

    /// Computes it with an adapter; repeatable. See [`Session::attach`](super::Session::attach).
    #[must_use]
    pub fn adapter(mut self, adapter: Arc<Adapter>, scale: f32) -> Request {
        self.adapters.push((adapter, scale));
        self
    }
}

/// Is notified of the events of every request, in this order, by the computing thread. A call
/// delays all requests.
pub trait Observer: Send + Sync {
    /// A step begins: at most one pass, and what is before and behind it.
    fn step_begins(&self) {}
    /// The step is over. After a panic it never is.
    fn step_ends(&self) {}
    /// The request was accepted; its prompt has `n_prompt` tokens.
    fn queued(&self, _id: RequestId, _n_prompt: usize) {}
    /// The request takes part in passes from now on; also after each preemption.
    fn admitted(&self, _id: RequestId) {}
    /// Its first token was chosen.
    fn first_token(&self, _id: RequestId) {}
    /// Its pages were given to others; it waits to be admitted again.
    fn preempted(&self, _id: RequestId) {}
    /// The request ended: with an answer, which may be cut short, or with an error.
    fn ended(&self, _id: RequestId, _outcome: Result<&Finish, &ScheduleError>) {}
}

/// An observer that ignores everything.
struct NoObserver;

impl Observer for NoObserver {}

/// Order of requests, best first: the pass in which a request came, minus [`AGING`] passes per
/// priority; then its number. As it never changes, the first request always advances, and every
/// request becomes the first eventually.
type Rank = (i64, u64);

/// Everything that admission depends on; does not change.
struct Terms {
    engine: Engine,
    options: ScheduleOptions,
    /// An empty sequence, of which those of requests are forks.
    empty: Sequence,
    /// The same with adapters attached, the most recently used last. Forks of one share its
    /// generation of adapters, so that requests with the same adapters find each other's
    /// prefixes.
    adapted: Mutex<Vec<Sequence>>,
    /// Where the prefix cache is on: what drafters remember of each tenant, by salt, the most
    /// recently used last.
    recent: Mutex<Vec<(String, RecentTexts)>>,
    observer: Box<dyn Observer>,
    clock: Timer,
    n_requests: Arc<AtomicUsize>,
    next_id: AtomicU64,
    _reserved: Option<Reserved>,
}

/// One of [`ScheduleOptions::max_requests`], until it is dropped.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// If memory is limited, takes from the pages the buffers that passes need besides those of one
/// session: of more sequences, and of a prompt in pieces.
fn reserve(engine: &Engine, options: &ScheduleOptions) -> Result<Option<Reserved>, SessionError> {
    let model = engine.model();
    if model.memory_limit().is_none() {
        return Ok(None);
    }
    let one = plan_options(options.session.clone(), engine.n_threads());
    // A device computes whole passes.
    let n_layered = if engine.runner().is_some() {
        0
    } else {
        options.session.n_batch
    };
    let pieces = PlanOptions {
        n_layered,
        ..one.clone()
    };
    model.check_memory(&pieces)?;
    let all = model.memory_plan(&PlanOptions {
        n_sequences: options.n_parallel,
        ..pieces
    })?;
    Ok(Some(
        engine
            .pool()
            .reserve(all.buffers - model.memory_plan(&one)?.buffers),
    ))
}

impl Terms {
    fn new(
        engine: &Engine,
        options: &ScheduleOptions,
        observer: Box<dyn Observer>,
    ) -> Result<Terms, SessionError> {
        let ScheduleOptions {
            session,
            n_parallel,
            max_requests,
            n_pieces,
            ..
        } = options;
        let sizes = [
            ("n_batch", session.n_batch),
            ("n_parallel", *n_parallel),
            ("max_requests", *max_requests),
            ("n_pieces", *n_pieces),
        ];
        if let Some((option, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(SessionError::Option {
                option,
                value,
                expected: "at least 1".into(),
            });
        }
        if session.context_shift.is_some() {
            return Err(SessionError::NoShift {
                what: "many requests",
            });
        }
        Ok(Terms {
            engine: engine.clone(),
            options: options.clone(),
            empty: engine.sequence(session)?,
            adapted: Mutex::default(),
            recent: Mutex::default(),
            observer,
            clock: Timer::start(),
            n_requests: Arc::default(),
            next_id: AtomicU64::new(0),
            _reserved: reserve(engine, options)?,
        })
    }

    /// How keys and values of a request that waits will be laid out.
    fn layout(&self, live: &Live) -> &KvLayout {
        self.empty.layout(if live.kinds.is_empty() {
            self.empty.is_pressed()
        } else {
            live.is_lower
        })
    }

    fn n_requests(&self) -> usize {
        self.n_requests.load(Ordering::Relaxed)
    }

    fn place(&self) -> Result<Place, ScheduleError> {
        let max = self.options.max_requests;
        let before = self.n_requests.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(&self.n_requests));
        if before < max {
            Ok(place)
        } else {
            Err(ScheduleError::QueueFull { max })
        }
    }

    /// Refuses what could never be computed.
    fn judge(
        &self,
        request: Request,
        wake: &Arc<Wake>,
    ) -> Result<(Box<Live>, Stream), ScheduleError> {
        let Request {
            tokens,
            sampler,
            max_tokens,
            stop,
            logprobs,
            special,
            ..
        } = request;
        let Request {
            priority,
            deadline,
            adapters,
            salt,
            speculation,
            ..
        } = request;
        let place = self.place()?;
        let mut writer = PieceWriter::new(self.engine.model(), special);
        if !writer.has_text() {
            return Err(SessionError::NoTokenizer.into());
        }
        self.engine.check(&self.empty, &tokens)?;
        self.sequence(&adapters, salt.as_deref())?;
        let of_adapters = adapters.iter().map(|(adapter, _)| adapter.bytes()).sum();
        let need = self
            .empty
            .layout(false)
            .bytes_read(tokens.len())
            .saturating_add(of_adapters);
        let stats = self.engine.pool().stats();
        let budget = stats.budget.saturating_sub(stats.reserved);
        if need > budget {
            return Err(ScheduleError::PoolTooSmall { need, budget });
        }
        writer.set_stop(stop);
        (writer.max_tokens, writer.logprobs) = (max_tokens, logprobs);
        let speculator =
            speculation.map(|speculation| self.speculator(speculation, salt.as_deref()));
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, stream) = stream::stream(id, self.options.n_pieces, wake);
        let live = Live {
            id,
            rank: (0, id.0),
            priority,
            deadline: deadline.map(|deadline| self.clock.elapsed().saturating_add(deadline)),
            sampler,
            writer,
            adapters,
            salt,
            sender,
            n_prompt: tokens.len(),
            kinds: Vec::new(),
            is_lower: false,
            n_cached: CachedTokens::default(),
            n_read: tokens.len(),
            tokens,
            forced: Vec::new(),
            n_told: 0,
            speculator,
            drafts: Drafts::default(),
            n_passes: 0,
            has_begun: false,
            seq: None,
            pooling: None,
            rows: RequestRows::default(),
            is_reading: false,
            since: Timer::start(),
            timings: Timings::default(),
            _place: place,
        };
        Ok((Box::new(live), stream))
    }

    fn sequence(
        &self,
        adapters: &[(Arc<Adapter>, f32)],
        salt: Option<&str>,
    ) -> Result<Sequence, ScheduleError> {
        let mut seq = if adapters.is_empty() {
            self.empty.fork()?
        } else {
            self.adapted(adapters)?
        };
        if let Some(salt) = salt {
            seq.prefix.salt = salt.to_owned();
        }
        Ok(seq)
    }

    fn speculator(&self, speculation: Speculation, salt: Option<&str>) -> Speculator {
        let prefix = &self.options.session.prefix;
        let speculator = Speculator::new(speculation);
        if prefix.cache == CacheMode::Off {
            return speculator;
        }
        let salt = salt.unwrap_or(&prefix.salt);
        let mut tenants = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let known = tenants.iter().position(|(of, _)| of == salt);
        let tenant = known.map_or_else(
            || (salt.to_owned(), RecentTexts::default()),
            |i| tenants.remove(i),
        );
        let speculator = speculator.remember(&tenant.1);
        if tenants.len() == MAX_TENANTS {
            tenants.remove(0);
        }
        tenants.push(tenant);
        speculator
    }

    /// An empty sequence with these adapters.
    fn adapted(&self, adapters: &[(Arc<Adapter>, f32)]) -> Result<Sequence, ScheduleError> {
        let wanted = || {
            adapters
                .iter()
                .map(|(adapter, scale)| (Arc::as_ptr(adapter), scale.to_bits()))
        };
        let attached = |seq: &Sequence| {
            seq.adapters()
                .map(|(_, a, scale)| (Arc::as_ptr(a), scale.to_bits()))
                .eq(wanted())
        };
        let mut known = self.adapted.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody else holds, nobody can ask for again.
        known.retain(|seq| {
            seq.adapters()
                .all(|(_, adapter, _)| Arc::strong_count(adapter) > 1)
        });
        let mut seq = match known.iter().position(attached) {
            Some(i) => known.remove(i),
            None => {
                let mut seq = self.empty.fork()?;
                for (adapter, scale) in adapters {
                    seq.attach(Arc::clone(adapter), *scale)?;
                }
                seq
            }
        };
        let mut fork = seq.fork()?;
        fork.count_adapters(true);
        seq.count_adapters(false);
        if known.len() == MAX_ADAPTED {
            known.remove(0);
        }
        known.push(seq);
        Ok(fork)
    }
}

/// Rows of a request in a pass.
#[derive(Clone, Copy, Debug, Default)]
struct RequestRows {
    n: usize,
    /// Whether the sequence decodes, rather than computing its existing tokens for the first time
    /// or again.
    is_decoding: bool,
    /// First row whose logits are requested.
    first_output: usize,
}

/// Tokens that a pass computes behind those of the text.
#[derive(Debug, Default)]
struct Drafts {
    tokens: Vec<u32>,
    /// Position of the first.
    at: usize,
    /// How many of them were sampled, too.
    n_accepted: usize,
    /// All tokens of the pass.
    pass: Vec<u32>,
}

/// A request that has not ended.
struct Live {
    id: RequestId,
    rank: Rank,
    priority: i32,
    /// Deadline on the clock of the schedule.
    deadline: Option<Duration>,
    sampler: Sampler,
    writer: PieceWriter,
    adapters: Vec<(Arc<Adapter>, f32)>,
    salt: Option<String>,
    sender: Sender,
    /// The prompt and the generated tokens; the last ones may not be computed yet.
    tokens: Vec<u32>,
    n_prompt: usize,
    /// Kinds of the tokens that were computed before it was preempted.
    kinds: Vec<TokenKind>,
    /// Whether these began under pressure, see [`SessionOptions::kv_pressure`].
    is_lower: bool,
    /// Tokens of the prompt that came from the prefix cache.
    n_cached: CachedTokens,
    /// Tokens that must be computed before the sequence decodes: the prompt, or its tokens when it
    /// was preempted.
    n_read: usize,
    /// Pieces of the last tokens, which the sampler's mask forced and the next pass computes;
    /// without text yet.
    forced: Vec<Piece>,
    /// How many of them have their log-probabilities.
    n_told: usize,
    speculator: Option<Speculator>,
    /// Drafts of the next pass.
    drafts: Drafts,
    /// Passes in which it decoded.
    n_passes: usize,
    /// Whether the logits behind the prompt were seen.
    has_begun: bool,
    /// Keys and values; `None` while it waits.
    seq: Option<Sequence>,
    /// What a sequence that was released had pooled.
    pooling: Option<Pooling>,
    /// Its rows in the next pass.
    rows: RequestRows,
    /// Whether some layers of these rows, or parts of one, are computed.
    is_reading: bool,
    since: Timer,
    timings: Timings,
    _place: Place,
}

impl Live {
    fn position(&self) -> usize {
        self.seq.as_ref().map_or(0, Sequence::position)
    }

    /// Kind of the token at a position.
    fn kind(&self, position: usize) -> TokenKind {
        let of_place = if position < self.n_prompt {
            TokenKind::Prompt
        } else {
            TokenKind::Generated
        };
        self.kinds.get(position).copied().unwrap_or(of_place)
    }

    /// Sets its sequence, which begins with what the prefix cache has.
    fn begin(&mut self, mut seq: Sequence) -> Result<(), SessionError> {
        if self.kinds.is_empty() {
            self.n_cached = seq.reuse(&self.tokens[..self.n_prompt])?;
        } else {
            seq.set_lower(self.is_lower);
            seq.recall(&self.tokens, &self.kinds)?;
        }
        if self
            .speculator
            .as_ref()
            .is_some_and(Speculator::reads_states)
        {
            seq.keep_states()?;
            seq.states
                .iter_mut()
                .for_each(|states| states.expect(self.n_read));
        }
        // What is computed again is not pooled again.
        if self.pooling.is_some() {
            seq.pooling = self.pooling.take();
        }
        self.seq = Some(seq);
        Ok(())
    }

    /// Its part of the next pass.
    fn slot(&mut self) -> Slot<'_> {
        let (
            position,
            RequestRows {
                n, first_output, ..
            },
        ) = (self.position(), self.rows);
        let kind = self.kind(position);
        let seq = self.seq.as_mut().expect("who runs has a sequence");
        let Drafts {
            tokens: drafts,
            pass,
            ..
        } = &mut self.drafts;
        if drafts.is_empty() {
            return Slot::new(seq, &self.tokens[position..position + n], kind)
                .outputs_from(first_output);
        }
        // So that what windows leave in this pass is still there when it is rewound.
        seq.kv.hold(position);
        pass.clear();
        pass.extend(self.tokens[position..].iter().chain(&*drafts));
        Slot::new(seq, pass, kind).outputs_from(first_output)
    }

    /// Asks for guesses how the text goes on.
    fn ask(&mut self, engine: &Engine) -> Option<Asked<'_>> {
        let (seq, speculator) = (self.seq.as_ref()?, self.speculator.as_mut()?);
        let room = engine.n_draftable(seq, self.tokens.len());
        let n = room.min(self.writer.n_left().saturating_sub(self.forced.len() + 1));
        Some(Asked::new(speculator, seq, (&self.tokens, &[]), n))
    }

    /// Computes the first `n` guesses in the next pass.
    fn take_drafts(&mut self, n: usize) {
        if let Some(speculator) = self.speculator.as_mut().filter(|_| n > 0) {
            self.drafts.tokens.extend(speculator.take(n));
            self.drafts.at = self.tokens.len();
        }
    }

    /// Takes the drafts that were not accepted out of the sequence.
    fn drop_drafts(&mut self) {
        let Drafts {
            tokens,
            at,
            n_accepted,
            ..
        } = &mut self.drafts;
        if tokens.is_empty() {
            return;
        }
        if let Some(seq) = &mut self.seq {
            seq.truncate(*at + *n_accepted);
            seq.kv.release();
        }
        if let Some(speculator) = &mut self.speculator {
            speculator.accepted(*n_accepted);
        }
        tokens.clear();
        *n_accepted = 0;
    }

    /// Forgets what is computed of its rows.
    fn stop_reading(&mut self) {
        if let (true, Some(seq)) = (std::mem::take(&mut self.is_reading), &mut self.seq) {
            seq.kv.abandon();
        }
        self.rows = RequestRows::default();
    }

    /// Releases its pages.
    fn release_sequence(&mut self) {
        self.stop_reading();
        if let Some(mut seq) = self.seq.take() {
            self.timings.adapters += seq.adapter_time;
            self.pooling = seq.pooling.take();
        }
    }

    /// Sends the pieces that are ready.
    fn hand_out(&mut self) {
        if self.writer.is_ready() {
            self.sender.send(std::iter::from_fn(|| self.writer.pop()));
        }
    }

    /// Whether its reader lags behind. A request without text so far has nothing to read.
    fn is_paused(&self) -> bool {
        self.has_begun && self.sender.is_paused()
    }

    /// Its rows in the next pass, at most `chunk` rows of tokens before it decodes.
    fn next_rows(&self, chunk: usize) -> RequestRows {
        let position = self.position();
        if self.has_begun && position >= self.n_read {
            // Log-probabilities of forced tokens need the logits before each of them.
            let n = self.tokens.len() - position;
            let first_output = if self.writer.logprobs.is_some() {
                0
            } else {
                n - 1
            };
            return RequestRows {
                n: n + self.drafts.tokens.len(),
                is_decoding: true,
                first_output,
            };
        }
        let kind = self.kind(position);
        let n = (position..self.n_read)
            .take(chunk)
            .take_while(|&position| self.kind(position) == kind)
            .count();
        let is_last = !self.has_begun && position + n == self.n_prompt;
        RequestRows {
            n,
            is_decoding: false,
            first_output: n - usize::from(is_last && n > 0),
        }
    }

    /// Goes on after a pass that computed its rows; `logits` are those it asked for, `(n,
    /// n_vocab)`.
    fn follow(&mut self, logits: &[f32], n_vocab: usize) -> Result<(), DecodeError> {
        let mut rows = logits.chunks_exact(n_vocab.max(1));
        let Some(last) = logits.rchunks_exact(n_vocab.max(1)).next() else {
            return Ok(());
        };
        if self.has_begun {
            let Live {
                writer,
                sampler,
                forced,
                n_told,
                ..
            } = self;
            for (piece, logits) in forced[*n_told..].iter_mut().zip(&mut rows) {
                writer.tell(piece, sampler, logits);
            }
            writer.take_forced(sampler, forced.drain(..))?;
            // The last row of the text, and those of drafts.
            let n = (self.drafts.tokens.len() + 1) * n_vocab;
            return self.verify(&logits[logits.len() - n..], n_vocab);
        }
        self.has_begun = true;
        // Forced tokens are computed before anything is sampled.
        let forced = self.writer.forced(&mut self.sampler);
        if !forced.is_empty() && self.writer.n_left() > 0 {
            self.go_on(forced)?;
            if let Some(piece) = self.forced.first_mut() {
                self.writer.tell(piece, &mut self.sampler, last);
                self.n_told = 1;
            }
        }
        if self.forced.is_empty() && self.writer.reason().is_none() {
            self.sample(last)
        } else {
            Ok(())
        }
    }

    /// Samples a token from the first row of `logits`, and goes on as long as it and what the mask
    /// forces behind it are the drafts that the next rows belong to.
    fn verify(&mut self, logits: &[f32], n_vocab: usize) -> Result<(), DecodeError> {
        let row = |i: usize| &logits[i * n_vocab..][..n_vocab];
        let mut n = 0;
        while self.writer.reason().is_none() {
            let n_before = self.tokens.len();
            self.sample(row(n))?;
            let drafted = self.tokens[n_before..].iter().zip(&self.drafts.tokens[n..]);
            let n_same = drafted.take_while(|(token, draft)| token == draft).count();
            n += n_same;
            self.drafts.n_accepted = n;
            // The first is the one that was sampled.
            let Some(n_forced) = n_same
                .checked_sub(1)
                .filter(|_| self.writer.reason().is_none())
            else {
                break;
            };
            let Live {
                writer,
                sampler,
                forced,
                n_told,
                ..
            } = self;
            // What is forced, and the first that the next pass computes, come behind rows that are
            // here.
            for (i, piece) in forced.iter_mut().enumerate().take(n_forced + 1) {
                writer.tell(piece, sampler, row(n - n_forced + i));
            }
            writer.take_forced(sampler, forced.drain(..n_forced))?;
            if !forced.is_empty() {
                *n_told = 1;
                break;
            }
        }
        Ok(())
    }

    /// Samples a token, which the next pass computes, and takes what the mask forces behind it; or
    /// ends.
    fn sample(&mut self, logits: &[f32]) -> Result<(), DecodeError> {
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        let piece = self
            .writer
            .sample(&mut self.sampler, logits, &self.tokens)?;
        let token = piece.token;
        if self.writer.is_eog(token) {
            self.writer.end(StopReason::EndOfGeneration);
            return Ok(());
        }
        self.writer.hold(piece)?;
        if self.writer.release().is_some() {
            return Ok(());
        }
        self.tokens.push(token);
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        let forced = self.writer.forced(&mut self.sampler);
        self.go_on(forced)
    }

    /// Appends forced tokens, as far as there is room; or ends.
    fn go_on(&mut self, forced: Vec<u32>) -> Result<(), DecodeError> {
        let n_ctx = self.seq.as_ref().map_or(0, Sequence::n_ctx);
        let room = n_ctx.saturating_sub(self.tokens.len());
        let forced =
            self.writer
                .go_on(&mut self.sampler, forced, (room, self.tokens.len() > n_ctx))?;
        self.tokens.extend_from_slice(&forced);
        self.forced.extend(forced.into_iter().map(Piece::new));
        self.n_told = 0;
        Ok(())
    }
}

/// Requests on an engine, without a thread: [`Schedule::step`] computes the next pass on the
/// caller's.
///
/// ```
/// use ruvllm::exec::{Request, Schedule, ScheduleOptions};
/// use ruvllm::{Model, Sampler};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let mut schedule = Schedule::new(&model.engine()?, &ScheduleOptions::default())?;
/// let tokenizer = model.tokenizer().unwrap();
/// let sampler = Sampler::builder().temperature(0.0).build()?;
/// let request = |text| Request::new(tokenizer.encode_prompt(text), sampler.clone()).max_tokens(8);
/// let (one, other) = (schedule.submit(request("Ownership is"))?, schedule.submit(request("A slice is"))?);
/// while schedule.step() {}
/// assert!(!one.text()?.is_empty() && !other.text()?.is_empty());
/// # Ok(()) }
/// ```
pub struct Schedule {
    terms: Arc<Terms>,
    wake: Arc<Wake>,
    /// Both lists are in the order of ranks.
    queue: VecDeque<Box<Live>>,
    #[expect(clippy::vec_box)] // moved from list to list, never copied
    running: Vec<Box<Live>>,
    n_passes: u64,
    pace: Pace,
    outputs: Outputs,
    /// Never cancelled: requests are, between passes.
    cancel: CancelToken,
    /// Memory for the next pass's list of slots.
    slots: Vec<Slot<'static>>,
    /// The pass over prompts of which some parts are computed, and of how many requests.
    piece: PiecePass,
    n_reading: usize,
    /// Memory for [`Schedule::draft`]: who drafts; how probable each guess is, and its request;
    /// drafts for each request.
    asked: Vec<Asked<'static>>,
    passes: DraftPasses,
    chances: Vec<(f64, usize)>,
    lengths: Vec<usize>,
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
        let terms = Terms::new(engine, options, Box::new(observer))?;
        Ok(Schedule::on(Arc::new(terms), Arc::default()))
    }

    fn on(terms: Arc<Terms>, wake: Arc<Wake>) -> Schedule {
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
            chances: Vec::new(),
            lengths: Vec::new(),
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

    fn accept(&mut self, mut live: Box<Live>) {
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
    fn next_deadline(&self) -> Option<Duration> {
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
                self.running[i].writer.end(reason);
                let live = self.running.remove(i);
                self.end(live, Ok(()));
            }
        }
        for i in (0..self.queue.len()).rev() {
            if let Some(reason) = reason(&self.queue[i]) {
                self.queue[i].writer.end(reason);
                self.queue
                    .remove(i)
                    .into_iter()
                    .for_each(|live| self.end(live, Ok(())));
            }
        }
    }

    /// Hands out the last pieces of a request, and its result.
    fn end(&self, mut live: Box<Live>, outcome: Result<(), ScheduleError>) {
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
        let outcome = outcome.map(|()| Finish {
            reason: live.writer.reason().expect("an answer ends for a reason"),
            stop: live.writer.stopped_by(),
            n_prompt: n_prompt.saturating_sub(live.n_cached.total()),
            n_cached: live.n_cached,
            n_generated: live.writer.tokens().len(),
            drafts: DraftStats {
                n_passes: live.n_passes,
                ..live
                    .speculator
                    .as_ref()
                    .map(Speculator::stats)
                    .unwrap_or_default()
            },
            timings: live.timings,
        });
        self.terms.observer.ended(live.id, outcome.as_ref());
        live.hand_out();
        live.sender.end(outcome, pooled);
    }

    /// Admits the next requests, as long as there are pages, possibly taking those of requests
    /// after it.
    fn admit(&mut self) {
        while let Some(i) = self.queue.iter().position(|live| !live.is_paused()) {
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
            let Some(mut live) = self.queue.remove(i) else {
                return;
            };
            let seq = self.terms.sequence(&live.adapters, live.salt.as_deref());
            match seq.and_then(|seq| Ok(live.begin(seq)?)) {
                Ok(()) => {
                    self.terms.observer.admitted(live.id);
                    let at = self.running.partition_point(|other| other.rank < live.rank);
                    self.running.insert(at, live);
                }
                Err(error) => self.end(live, Err(error.into())),
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
        // Upper bounds of the bytes that it lacks.
        let to_come = |live: &Live| {
            let layout = live
                .seq
                .as_ref()
                .map_or_else(|| self.terms.layout(live), |seq| seq.kv.layout());
            layout
                .bytes(live.n_read + 1, n_batch)
                .saturating_sub(layout.bytes(live.position() + live.rows.n, n_batch))
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
    fn victim(&self, is_behind: impl Fn(&Live) -> bool) -> Option<usize> {
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
    fn preempt(&mut self, i: usize) {
        let mut live = self.running.remove(i);
        live.drop_drafts();
        live.n_read = live.n_read.max(live.position());
        if let Some(seq) = &live.seq {
            let known = live.kinds.len().min(seq.kinds().len());
            live.kinds.extend_from_slice(&seq.kinds()[known..]);
            live.is_lower = seq.is_lower();
        }
        live.release_sequence();
        self.terms.observer.preempted(live.id);
        self.enqueue(live);
    }

    /// Drafts for those that decode, so many in all that most tokens per second are expected. A
    /// pass that reads prompts has no time for guesses.
    fn draft(&mut self) {
        self.running.iter_mut().for_each(|live| live.drop_drafts());
        if self.running.iter().all(|live| live.speculator.is_none()) {
            return;
        }
        let reads = |live: &Live| !live.next_rows(0).is_decoding && !live.is_paused();
        if self.running.iter().any(|live| reads(live)) {
            return;
        }
        let Schedule {
            terms,
            running,
            asked,
            passes,
            chances,
            lengths,
            ..
        } = self;
        let engine = &terms.engine;
        chances.clear();
        lengths.clear();
        lengths.resize(running.len(), 0);
        let decoding = || {
            running
                .iter()
                .enumerate()
                .filter(|(_, live)| !live.is_paused())
        };
        let mut n_rows = decoding().map(|(_, live)| live.next_rows(0).n).sum();
        let mut all = reuse(std::mem::take(asked));
        all.extend(
            running
                .iter_mut()
                .filter(|live| !live.is_paused())
                .filter_map(|live| live.ask(engine)),
        );
        passes.guess(engine, n_rows, &mut all);
        *asked = reuse(all);
        let decoding = running
            .iter()
            .enumerate()
            .filter(|(_, live)| !live.is_paused());
        for (i, speculator) in decoding.filter_map(|(i, live)| Some((i, live.speculator.as_ref()?)))
        {
            let probabilities = speculator.probabilities();
            if speculator.is_fixed() {
                lengths[i] = probabilities.len();
                n_rows += lengths[i];
            } else {
                chances.extend(probabilities.iter().map(|&p| (p, i)));
            }
        }
        // Those of a sequence descend: how many are among the first, not which, is what counts.
        chances.sort_unstable_by(|(a, _), (b, _)| b.total_cmp(a));
        let n = best_length(&engine.times(), n_rows, chances.iter().map(|(p, _)| *p));
        chances[..n].iter().for_each(|&(_, i)| lengths[i] += 1);
        running
            .iter_mut()
            .zip(lengths)
            .for_each(|(live, n)| live.take_drafts(*n));
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
        let (mut n_decode, mut n_prompt, mut i) = (0, 0, 0);
        while let Some(live) = self.running.get(i) {
            if live.is_reading {
                n_prompt += live.rows.n;
                i += 1;
                continue;
            }
            let rows = if live.is_paused() {
                RequestRows::default()
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
            chunk -= if rows.is_decoding { 0 } else { rows.n };
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
                None if is_full && !rows.is_decoding && rows.n > 1 => {
                    rows = self.running[i].next_rows(rows.n / 2)
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
                    of_prompts.at(),
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
        let n_vocab = terms.engine.model().hparams().n_vocab;
        let (mut i, mut slot) = (0, 0);
        while let Some(live) = self.running.get_mut(i) {
            if !taken(live) {
                i += 1;
                continue;
            }
            // Whose rows cannot be computed fails alone.
            let (outcome, at) = match outcome {
                Ok(_) => (Ok(()), slot),
                Err(_) if live.rows.is_decoding => {
                    // Of its drafts, too.
                    live.drop_drafts();
                    live.rows = live.next_rows(0);
                    (
                        self.terms
                            .engine
                            .step(&mut [live.slot()], &mut self.outputs, &self.cancel),
                        0,
                    )
                }
                Err(_) => (
                    self.terms
                        .engine
                        .step(&mut [live.slot()], &mut self.outputs, &self.cancel),
                    0,
                ),
            };
            slot += 1;
            let had_token = !live.writer.tokens().is_empty();
            let outcome = outcome.map_err(ScheduleError::from).and_then(|()| {
                live.n_passes += usize::from(live.rows.is_decoding);
                Ok(live.follow(self.outputs.logits(at), n_vocab)?)
            });
            live.drop_drafts();
            if !had_token && !live.writer.tokens().is_empty() {
                live.timings.first_token = live.since.elapsed();
                self.terms.observer.first_token(live.id);
            }
            if outcome.is_err() || live.writer.reason().is_some() {
                let live = self.running.remove(i);
                self.end(live, outcome);
            } else {
                live.hand_out();
                i += 1;
            }
        }
        outcome.is_ok().then_some(time)
    }
}
