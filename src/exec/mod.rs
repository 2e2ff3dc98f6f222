//! Running a model: sessions, and the forward pass behind them.

mod adapters;
mod arena;
mod backward;
mod cores;
mod forward;
mod generate;
mod gradient;
mod learn;
mod linear;
mod probe;

use crate::cache::{KvCache, KvShape};
use crate::error::SessionError;
use crate::lora::{Learner, LearnerOptions, Losses, Source};
use crate::model::{Hparams, Model};
use adapters::Adapters;
use arena::Arena;
use backward::Saved;
use forward::{Pass, RopeTables, forward};
use learn::Apart;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use crate::cache::KvType;
pub use crate::team::Team;
pub use adapters::AdapterId;
pub use cores::default_threads;
pub use generate::{Generation, StopReason};
pub use gradient::cross_entropy;
pub use probe::{NoProbe, Probe};

/// Context length of a session unless told otherwise (the model's own, if that is shorter).
pub const DEFAULT_CTX: usize = 4096;

/// Most threads a session takes: more are a slip of the finger that would stall the machine.
pub const MAX_THREADS: usize = 1024;

/// How a session runs. `..Default::default()` fills what you do not care about.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Tokens the session can hold; 0 means as many as the model was trained for. Default: the
    /// model's own, at most [`DEFAULT_CTX`].
    pub n_ctx: Option<usize>,
    /// Most tokens computed at a time in [`Session::prefill`]. Default 512.
    pub n_batch: usize,
    /// Precision of the key/value cache. Default [`KvType::F16`].
    pub kv_type: KvType,
    /// Threads, the caller's included; 0 means [`default_threads`]. Ignored if `team` is given.
    pub n_threads: usize,
    /// Threads shared with other sessions. They take turns; one that finds the team busy computes on
    /// its caller's thread alone, which must have a stack of 1 MiB.
    pub team: Option<Arc<Team>>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions { n_ctx: None, n_batch: 512, kv_type: KvType::default(), n_threads: 0, team: None }
    }
}

/// Ends long calls from another thread: clone it, hand it on, [`CancelToken::cancel`] it.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Makes calls under way, and later ones, end with [`SessionError::Cancelled`].
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Lets calls run again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Memory a session takes, in bytes, besides the mapped file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Key/value cache when the context is full.
    pub kv_cache: u64,
    /// Buffers of the largest pass, roughly.
    pub compute: u64,
    /// What a [`Learner`] holds when it is full, and the most it takes meanwhile to learn; 0 without one.
    pub learner: u64,
}

impl MemoryEstimate {
    /// What a session with these options will take, from hyper-parameters alone.
    pub fn of(h: &Hparams, options: &SessionOptions) -> MemoryEstimate {
        let shape = kv_shape(h, options);
        let m = options.n_batch.min(shape.n_ctx) as u64;
        let attention = (2 * h.n_head + h.n_head_kv) * (h.head_dim + h.head_dim_v);
        // What enters a product is kept in a second form, of at most 32 bits.
        let (n_ff, moe) = h.experts.map_or((h.n_ff, 0), |x| (h.n_ff.max(x.n_ff_shared), 2 * h.n_embd + x.n_expert));
        let widest = n_ff.max(h.n_embd).max(h.n_head * h.head_dim_v);
        let width = 3 * h.n_embd + attention.max(2 * n_ff) + widest + moe;
        MemoryEstimate {
            kv_cache: shape.bytes(options.kv_type),
            compute: m.saturating_mul(width as u64 * 4).saturating_add(4 * h.n_vocab as u64),
            learner: 0,
        }
    }

    /// The same with adapters attached, whose ranks sum to `rank`.
    pub fn with_adapters(mut self, rank: usize, options: &SessionOptions) -> MemoryEstimate {
        self.compute = self.compute.saturating_add(linear::low_bytes(options.n_batch, rank));
        self
    }

    /// The same of a session that is asked for the logits of so many tokens of a batch at a time, instead of one's.
    pub fn with_logits(mut self, h: &Hparams, rows: usize) -> MemoryEstimate {
        let more = rows.saturating_sub(1) as u64;
        self.compute = self.compute.saturating_add(more.saturating_mul(4 * h.n_vocab as u64));
        self
    }

    /// The same of a session that learns: an upper bound of what that adds. Text to learn from needs logits
    /// of all tokens of a batch.
    pub fn with_learner(mut self, h: &Hparams, options: &SessionOptions, learner: &LearnerOptions) -> MemoryEstimate {
        let m = options.n_batch.min(kv_shape(h, options).n_ctx) as u64;
        let rows = m.saturating_mul((h.n_embd + h.n_vocab) as u64 * 4);
        self.learner = learner.bytes(h.n_embd, h.n_vocab).saturating_add(rows);
        self
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.kv_cache.saturating_add(self.compute).saturating_add(self.learner)
    }
}

fn kv_shape(h: &Hparams, options: &SessionOptions) -> KvShape {
    let n_ctx = match options.n_ctx {
        None => h.n_ctx_train.min(DEFAULT_CTX),
        Some(0) => h.n_ctx_train,
        Some(n) => n,
    };
    KvShape { n_layer: h.n_layer, n_ctx, n_head_kv: h.n_head_kv, head_dim: h.head_dim, head_dim_v: h.head_dim_v }
}

/// What memory is for, in [`SessionError::OutOfMemory`].
const LOGITS: &str = "logits";
const TOKENS: &str = "tokens";
const STATES: &str = "hidden states";

/// Makes room for `n` values in all.
fn reserve<T>(values: &mut Vec<T>, n: usize, what: &'static str) -> Result<(), SessionError> {
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    let more = n.saturating_sub(values.len());
    values.try_reserve_exact(more).map_err(|_| SessionError::OutOfMemory { what, bytes })
}

/// One stream of tokens through a model: its cache, its position, its adapters, its buffers.
///
/// It borrows its model, which any number of sessions share. A thread that outlives the caller owns the model by an
/// `Arc` and makes its session itself:
///
/// ```
/// # use ruvllm::{Model, SessionError};
/// # use std::sync::Arc;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Arc::new(Model::open("models/ruvllm-rust-6m-q8_0.gguf")?);
/// let shared = Arc::clone(&model);
/// let worker = std::thread::spawn(move || -> Result<usize, SessionError> {
///     let mut session = shared.session()?;
///     session.prefill(&[1, 2, 3])?; // requests would come through a channel
///     Ok(session.position())
/// });
/// assert_eq!(worker.join().map_err(|_| "the worker panicked")??, 3);
/// # Ok(()) }
/// ```
///
/// A struct cannot own a model and a session that borrows it. Where both have to live in one, either keep the model
/// there and make a session per request (it takes its cache from the system, but computes nothing), give the session a
/// thread as above, or, for a model that is used until the program ends, make it `'static`:
///
/// ```
/// # use ruvllm::{Model, Session};
/// struct Assistant {
///     session: Session<'static>,
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model: &'static Model = Box::leak(Box::new(Model::open("models/ruvllm-rust-6m-q8_0.gguf")?));
/// let assistant = Assistant { session: model.session()? };
/// # assert_eq!(assistant.session.position(), 0);
/// # Ok(()) }
/// ```
pub struct Session<'m> {
    model: &'m Model,
    team: Arc<Team>,
    rope: Arc<RopeTables>,
    kv: KvCache,
    adapters: Adapters,
    arena: Arena,
    saved: Saved,
    logits: Vec<f32>,
    learner: Option<Box<Learner>>,
    /// Hidden states of a pass, for those who learn from them.
    states: Vec<f32>,
    /// Tokens it holds; all but perhaps the last are in the cache.
    tokens: Vec<u32>,
    /// Whether the last token was generated and waits for the next pass to be computed.
    ahead: bool,
    n_ctx: usize,
    n_batch: usize,
    cancel: CancelToken,
}

impl fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Session { n_ctx, n_batch, tokens, .. } = self;
        write!(f, "Session {{ position: {}, n_ctx: {n_ctx}, n_batch: {n_batch}, .. }}", tokens.len())
    }
}

impl Model {
    /// A session with default options.
    ///
    /// # Errors
    /// If there is no memory for its cache or no thread to be had.
    pub fn session(&self) -> Result<Session<'_>, SessionError> {
        self.session_with(&SessionOptions::default())
    }

    /// A session with options of your own.
    ///
    /// # Errors
    /// If an option makes no sense, or there is no memory or thread for it.
    pub fn session_with(&self, options: &SessionOptions) -> Result<Session<'_>, SessionError> {
        let h = self.hparams();
        let shape = kv_shape(h, options);
        if shape.n_ctx > u32::MAX as usize / 2 {
            return Err(SessionError::Option {
                option: "n_ctx",
                value: shape.n_ctx,
                expected: "less than 2^31".into(),
            });
        }
        if options.n_batch == 0 {
            return Err(SessionError::Option { option: "n_batch", value: 0, expected: "at least 1".into() });
        }
        if options.n_threads > MAX_THREADS {
            let expected = format!("at most {MAX_THREADS}, 0 for as many as the process may use");
            return Err(SessionError::Option { option: "n_threads", value: options.n_threads, expected });
        }
        let team = match &options.team {
            Some(team) => Arc::clone(team),
            None => {
                let n_threads = if options.n_threads == 0 { default_threads() } else { options.n_threads };
                Arc::new(Team::new(n_threads).map_err(|error| SessionError::Threads { n_threads, error })?)
            }
        };
        let mut logits = Vec::new();
        reserve(&mut logits, h.n_vocab, LOGITS)?;
        let mut tokens = Vec::new();
        reserve(&mut tokens, shape.n_ctx, TOKENS)?;
        Ok(Session {
            model: self,
            team,
            rope: Arc::new(RopeTables::new(self, shape.n_ctx)),
            kv: KvCache::new(options.kv_type, shape)?,
            adapters: Adapters::default(),
            arena: Arena::default(),
            saved: Saved::default(),
            logits,
            learner: None,
            states: Vec::new(),
            tokens,
            ahead: false,
            n_ctx: shape.n_ctx,
            n_batch: options.n_batch.min(shape.n_ctx),
            cancel: CancelToken::default(),
        })
    }
}

/// What a pass computed.
struct Rows<'a> {
    /// All tokens of the session, those of the pass included.
    tokens: &'a [u32],
    /// Position of the first token of the pass.
    start: usize,
    /// Position of the first token with a row.
    first: usize,
    /// Its place among the tokens that were handed in.
    offset: usize,
    /// `(rows, n_embd)`, or empty.
    states: &'a [f32],
    /// `(rows, n_vocab)`.
    logits: &'a mut [f32],
}

impl<'m> Session<'m> {
    /// The model it runs.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Tokens it can hold.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Tokens it holds: the position of the next one.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Threads it computes with.
    pub fn n_threads(&self) -> usize {
        self.team.n_threads()
    }

    /// A token that ends this session's calls from elsewhere.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Makes the session listen to `cancel`, which can be shared with others.
    pub fn set_cancel_token(&mut self, cancel: CancelToken) {
        self.cancel = cancel;
    }

    /// Appends `tokens`; the logits of what follows the last of them, `(n_vocab)`.
    ///
    /// # Errors
    /// If there are none, they do not fit, or are not in the vocabulary; if the call is cancelled, or there is no
    /// memory for its buffers. These two keep the batches that were finished: [`Session::position`] tells how
    /// many.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<&[f32], SessionError> {
        let last = tokens.len().saturating_sub(1);
        self.run(Source::Prompt, tokens, last, &mut NoProbe, &mut |_, _| ())?;
        Ok(&self.logits)
    }

    /// Appends one token; the logits of what follows it, `(n_vocab)`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32], SessionError> {
        self.run(Source::Answer, &[token], 0, &mut NoProbe, &mut |_, _| ())?;
        Ok(&self.logits)
    }

    /// Appends `tokens` and hands over the logits that follow each of `tokens[first..]`, in order, as
    /// `(index, logits)`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_each(
        &mut self,
        tokens: &[u32],
        first: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.run(Source::Prompt, tokens, first, &mut NoProbe, &mut each)?;
        Ok(())
    }

    /// [`Session::prefill_each`] with a look inside.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_probed(
        &mut self,
        tokens: &[u32],
        first: usize,
        probe: &mut impl Probe,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.run(Source::Prompt, tokens, first, probe, &mut each)?;
        Ok(())
    }

    /// Appends `tokens`, hands over the logits from `first` on, and lets the learner, if there is one,
    /// follow; its losses where it learns. Begins with the token that waits, if there is one.
    fn run<P: Probe>(
        &mut self,
        source: Source,
        tokens: &[u32],
        first: usize,
        probe: &mut P,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Losses, SessionError> {
        self.catch_up()?;
        self.follow(source, tokens, first, probe, each)
    }

    /// Computes the token that waits, if there is one: the logits are then those of what follows it.
    fn catch_up(&mut self) -> Result<(), SessionError> {
        let Some(token) = self.tokens.pop_if(|_| self.ahead) else { return Ok(()) };
        let outcome = self.follow(Source::Answer, &[token], 0, &mut NoProbe, &mut |_, _| ());
        if outcome.is_err() {
            self.tokens.push(token);
        }
        self.ahead = outcome.is_err();
        outcome.map(drop)
    }

    /// Appends `token`, to be computed by the next pass, if there is room.
    fn push_ahead(&mut self, token: u32) {
        if self.tokens.len() < self.n_ctx {
            self.tokens.push(token);
            self.ahead = true;
        }
    }

    /// [`Session::run`] where no token waits.
    fn follow<P: Probe>(
        &mut self,
        source: Source,
        tokens: &[u32],
        first: usize,
        probe: &mut P,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Losses, SessionError> {
        let (arch, n_vocab) = (self.model.arch(), self.model.hparams().n_vocab);
        let mut losses = Losses::default();
        let mut apart = self.apart();
        let Apart { session, learner } = &mut apart;
        session.passes(tokens, first, learner.is_some(), probe, &mut |rows| {
            if let Some(learner) = learner {
                losses += learner.follow(arch, source, rows.tokens, rows.start..rows.first, rows.states, rows.logits);
            }
            for (j, logits) in rows.logits.chunks_exact(n_vocab).enumerate() {
                each(rows.offset + j, logits);
            }
        })?;
        Ok(losses)
    }

    /// Appends `tokens`, batch by batch, and hands over the rows from `first` on. With `raw` these are the
    /// head's products, with the hidden states that it read.
    fn passes<P: Probe>(
        &mut self,
        tokens: &[u32],
        first: usize,
        raw: bool,
        probe: &mut P,
        each: &mut dyn FnMut(Rows<'_>),
    ) -> Result<(), SessionError> {
        let n_vocab = self.model.hparams().n_vocab;
        if tokens.is_empty() {
            return Err(SessionError::NoTokens);
        }
        if tokens.len() > self.n_ctx - self.tokens.len() {
            let (n_ctx, n_past) = (self.n_ctx, self.tokens.len());
            return Err(SessionError::ContextFull { n_ctx, n_past, n_new: tokens.len() });
        }
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(SessionError::TokenOutOfRange { token, n_vocab });
        }
        // Of all batches, so that memory does not run out between them.
        let n_rows = tokens.len().saturating_sub(first).min(self.n_batch);
        reserve(&mut self.logits, n_rows.saturating_mul(n_vocab), LOGITS)?;
        if raw {
            reserve(&mut self.states, n_rows.saturating_mul(self.model.hparams().n_embd), STATES)?;
        }
        let Session { model, team, rope, kv, adapters, arena, logits, states, cancel, .. } = self;
        let adapters = &adapters.attached;
        let cancelled = || cancel.is_cancelled();
        for (i, batch) in tokens.chunks(self.n_batch).enumerate() {
            let offset = i * self.n_batch;
            let first_output = first.saturating_sub(offset).min(batch.len());
            logits.resize((batch.len() - first_output) * n_vocab, 0.0);
            states.clear();
            let pos = self.tokens.len();
            let kept = raw.then_some(&mut *states);
            let cancelled = &cancelled;
            let pass = Pass { model, adapters, rope, kv, tokens: batch, pos, first_output, states: kept, cancelled };
            team.enter(|crew| forward(pass, crew, arena, logits, probe))?;
            self.tokens.extend_from_slice(batch);
            if batch.len() == 1 {
                model.decoded();
            }
            let (first, offset) = (pos + first_output, offset + first_output);
            each(Rows { tokens: &self.tokens, start: pos, first, offset, states, logits });
        }
        Ok(())
    }

    /// Forgets everything from `position` on. What comes next continues from there, as if the rest
    /// had never been.
    ///
    /// # Errors
    /// If the session is not that far.
    pub fn rewind(&mut self, position: usize) -> Result<(), SessionError> {
        if position > self.tokens.len() {
            return Err(SessionError::RewindAhead { position, n_past: self.tokens.len() });
        }
        self.truncate(position);
        self.learner.iter_mut().for_each(|learner| learner.interrupt());
        Ok(())
    }

    /// Keeps what it holds of the beginning of `tokens` and forgets the rest; returns how many tokens that is. At least
    /// the last of `tokens` is not kept, so that there is something to compute: a conversation that is written anew
    /// for each turn goes on with `generate_from(&tokens[kept..], …)`.
    pub fn keep(&mut self, tokens: &[u32]) -> usize {
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let kept = same.min(tokens.len().saturating_sub(1));
        self.truncate(kept);
        self.learner.iter_mut().for_each(|learner| learner.interrupt());
        kept
    }

    /// Forgets the end of an answer, which can still be rated.
    fn cut_answer(&mut self, position: usize) {
        self.truncate(position);
        self.learner.iter_mut().for_each(|learner| learner.end_text());
    }

    fn truncate(&mut self, position: usize) {
        self.ahead &= position >= self.tokens.len();
        self.tokens.truncate(position);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.truncate(0);
        self.learner.iter_mut().for_each(|learner| learner.interrupt());
    }

    /// A session that continues independently from the same point, with the same adapters and what was
    /// learnt so far. It shares the threads.
    ///
    /// # Errors
    /// If there is no memory for a second cache.
    pub fn fork(&self) -> Result<Session<'m>, SessionError> {
        let mut tokens = Vec::new();
        reserve(&mut tokens, self.n_ctx, TOKENS)?;
        tokens.extend_from_slice(&self.tokens);
        let mut logits = Vec::new();
        reserve(&mut logits, self.logits.len(), LOGITS)?;
        logits.extend_from_slice(&self.logits);
        Ok(Session {
            model: self.model,
            team: Arc::clone(&self.team),
            rope: Arc::clone(&self.rope),
            kv: self.kv.fork(self.tokens.len())?,
            adapters: self.adapters.clone(),
            arena: Arena::default(),
            saved: Saved::default(),
            logits,
            learner: self.learner.clone(),
            states: Vec::new(),
            tokens,
            ahead: self.ahead,
            n_ctx: self.n_ctx,
            n_batch: self.n_batch,
            cancel: CancelToken::default(),
        })
    }
}
