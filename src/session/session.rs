//! One sequence of tokens on an engine.

use crate::backward::saved::Saved;
use crate::compute::hook::{Cut, OutputRows, TokenKind};
use crate::compute::probe::{EvalCallback, NoCallback};
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::hidden_states::KEPT_STATES;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::engine::sequence::Sequence;
use crate::layers::outputs::Outputs;
use crate::model::Model;
#[cfg(feature = "vision")]
use crate::vision::{ImageOptions, Projector};
use std::fmt;
use std::time::Duration;

/// One sequence of tokens through a model: its keys and values, its position, its adapters.
///
/// `Send + 'static`: it keeps its engine, and so its model, alive. So a struct can own a model,
/// sessions and a generation, and be moved to another thread:
///
/// ```
/// use ruvllm::{Generation, Model, Sampler, SamplerOptions, Session};
///
/// struct Assistant {
///     model: Model,
///     notes: Session,
///     answer: Generation, // owns a second session
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let (notes, session) = (model.session()?, model.session()?);
/// let sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
/// let answer = session.into_generation("Ownership is", sampler).max_tokens(4);
/// let mut assistant = Assistant { model, notes, answer };
/// let worker = std::thread::spawn(move || -> Result<String, ruvllm::Error> {
///     let mut text = String::new();
///     for piece in &mut assistant.answer {
///         text += &piece?.text;
///     }
///     assistant.notes.prefill(&assistant.model.tokenizer().unwrap().encode(&text, true, false))?;
///     Ok(text)
/// });
/// assert!(!worker.join().map_err(|_| "the worker panicked")??.is_empty());
/// # Ok(()) }
/// ```
///
/// Calls compute on the calling thread and return when they are done. In async code, run them on
/// the runtime's blocking threads (`spawn_blocking`) and cancel them with the [`CancelToken`]; see
/// `examples/async_use.rs`.
pub struct Session {
    pub(crate) engine: Engine,
    pub(crate) seq: Sequence,
    pub(crate) outputs: Outputs,
    pub(crate) saved: Saved,
    /// Whether the last token was generated and never computed: the next pass begins with it.
    pub(crate) ahead: bool,
    pub(crate) n_batch: usize,
    pub(crate) cancel: CancelToken,
    /// What encodes images, and bounds of their tokens.
    #[cfg(feature = "vision")]
    pub(crate) projector: Option<(Projector, ImageOptions)>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (position, n_ctx, n_batch) = (self.position(), self.seq.n_ctx(), self.n_batch);
        write!(
            f,
            "Session {{ position: {position}, n_ctx: {n_ctx}, n_batch: {n_batch}, .. }}"
        )
    }
}

impl Engine {
    /// A session with [`Model::session_options`].
    ///
    /// # Errors
    /// If there is no memory for its buffers.
    pub fn session(&self) -> Result<Session, SessionError> {
        self.session_with(&self.model().session_options()?)
    }

    /// A session with the given options.
    ///
    /// # Errors
    /// If an option is invalid, or there is not enough memory.
    pub fn session_with(&self, options: &SessionOptions) -> Result<Session, SessionError> {
        Session::new(self.clone(), options)
    }
}

impl Model {
    /// A session of the model's default engine, with default options.
    ///
    /// # Errors
    /// As [`Engine::session`], or if the system cannot start threads.
    pub fn session(&self) -> Result<Session, SessionError> {
        self.engine()?.session()
    }

    /// A session of the model's default engine, with the given options.
    ///
    /// # Errors
    /// As [`Engine::session_with`], or if the system cannot start threads.
    pub fn session_with(&self, options: &SessionOptions) -> Result<Session, SessionError> {
        self.engine()?.session_with(options)
    }
}

impl Session {
    pub(crate) fn new(engine: Engine, options: &SessionOptions) -> Result<Session, SessionError> {
        let seq = engine.sequence(options)?;
        let mut outputs = Outputs::default();
        outputs.reserve(engine.model().hparams().n_vocab, 0)?;
        Ok(Session {
            n_batch: options.n_batch.min(seq.n_ctx()),
            engine,
            seq,
            outputs,
            saved: Saved::default(),
            ahead: false,
            cancel: options.cancel.clone().unwrap_or_default(),
            #[cfg(feature = "vision")]
            projector: None,
        })
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        self.engine.model()
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Its tokens, keys and values: precision, context length, attached adapters, hook, tokens
    /// that came from the prefix cache.
    pub fn sequence(&self) -> &Sequence {
        &self.seq
    }

    /// Tokens it holds: the position of the next one.
    pub fn position(&self) -> usize {
        self.seq.position()
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[u32] {
        self.seq.tokens()
    }

    /// Logits of what follows the last token computed, `(n_vocab)`; empty before the first, and
    /// after tokens were taken off the end.
    pub fn logits(&self) -> &[f32] {
        self.outputs.before_last(self.seq.n_drafts())
    }

    /// A token that cancels this session's calls from elsewhere:
    /// [`SessionOptions::cancel`], or one of its own.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Time that products with adapters took so far, divided by the number of threads.
    pub(crate) fn adapter_time(&self) -> Duration {
        self.seq.adapter_time
    }

    /// Appends `tokens`; [`Session::logits`] are then those after the last of them. An empty
    /// session begins with the part of them that the engine's prefix cache has, if
    /// [`SessionOptions::prefix`] enables it.
    ///
    /// # Errors
    /// If there are none, they do not fit, or are not in the vocabulary; if the call is cancelled,
    /// or there is no memory for its buffers. In the last two cases finished batches are kept:
    /// [`Session::position`] tells how many.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<(), SessionError> {
        let last = tokens.len().saturating_sub(1);
        self.prefill_each(tokens, last, |_, _| ())
    }

    /// Appends one generated token; [`Session::logits`] are then those after it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<(), SessionError> {
        self.run(
            TokenKind::Generated,
            &[token],
            0,
            &mut NoCallback,
            &mut |_, _| (),
        )
    }

    /// See [`SessionHooks::prefill_each`].
    pub(super) fn prefill_each(
        &mut self,
        tokens: &[u32],
        first: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.engine.check(&self.seq, tokens)?;
        let n = self
            .seq
            .reuse(&tokens[..tokens.len().min(first.saturating_add(1))])?
            .total();
        self.run(
            TokenKind::Prompt,
            &tokens[n..],
            first - n,
            &mut NoCallback,
            &mut |i, logits| each(n + i, logits),
        )
    }

    /// Appends `tokens` and passes on the logits from `first` on. Begins with the pending token, if
    /// there is one.
    pub(crate) fn run(
        &mut self,
        kind: TokenKind,
        tokens: &[u32],
        first: usize,
        probe: &mut dyn EvalCallback,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.catch_up()?;
        let (begin, n_vocab) = (self.position(), self.model().hparams().n_vocab);
        // Both ends of a prompt are likely targets of a rewind.
        if kind == TokenKind::Prompt {
            self.seq.kv.checkpoint();
        }
        self.passes(kind, tokens, first, false, probe, &mut |rows| {
            for (j, logits) in rows.logits.chunks_exact(n_vocab).enumerate() {
                each(rows.first - begin + j, logits);
            }
        })?;
        if kind == TokenKind::Prompt {
            self.seq.kv.checkpoint();
        }
        Ok(())
    }

    /// See [`SessionHooks::catch_up`]. Whatever appends tokens begins with it.
    pub(crate) fn catch_up(&mut self) -> Result<(), SessionError> {
        self.drop_drafts();
        let Some(token) = self.take_ahead() else {
            return Ok(());
        };
        let outcome = self.passes(
            TokenKind::Generated,
            &[token],
            0,
            false,
            &mut NoCallback,
            &mut |_| (),
        );
        if outcome.is_err() {
            self.push_ahead(token)?;
        }
        outcome
    }

    /// Forgets the drafts that were not accepted, as if they had never been computed.
    pub(crate) fn drop_drafts(&mut self) {
        self.outputs.drop_last(self.seq.n_drafts());
        self.seq.drop_drafts();
    }

    /// Takes out the token that waits to be computed, if there is one.
    pub(crate) fn take_ahead(&mut self) -> Option<u32> {
        std::mem::take(&mut self.ahead)
            .then(|| self.seq.pop())
            .flatten()
    }

    /// Appends `token`, to be computed by the next pass, if there is room.
    pub(crate) fn push_ahead(&mut self, token: u32) -> Result<(), SessionError> {
        if self.position() < self.seq.n_ctx() {
            self.seq.reserve(1)?;
            self.seq.push(&[token], TokenKind::Generated);
            self.ahead = true;
        }
        Ok(())
    }

    /// Appends `tokens`, batch by batch, and passes on the rows from `first` on. If `raw`, the
    /// logits are the head's bare products, and hidden states are returned, too.
    pub(crate) fn passes(
        &mut self,
        kind: TokenKind,
        tokens: &[u32],
        first: usize,
        raw: bool,
        probe: &mut dyn EvalCallback,
        each: &mut dyn FnMut(OutputRows<'_>),
    ) -> Result<(), SessionError> {
        let Session {
            engine,
            seq,
            outputs,
            n_batch,
            cancel,
            ..
        } = self;
        // Everything is checked, and has its memory, before the first batch, so that later ones
        // cannot fail for lack of it.
        engine.check(seq, tokens)?;
        let h = engine.model().hparams();
        let end = seq.position() + tokens.len();
        seq.expect(end);
        let has_states = raw || seq.hook.is_some();
        let most = seq.spans.most_in_pass(*n_batch);
        let n_rows = tokens.len().saturating_sub(first).min(most);
        let n_states = match &seq.states {
            Some(_) => tokens.len().min(most).min(KEPT_STATES).max(n_rows),
            None if has_states => n_rows,
            None => 0,
        };
        outputs.reserve(
            n_rows.saturating_mul(h.n_vocab),
            n_states.saturating_mul(h.n_embd),
        )?;
        let mut n_done = 0;
        while n_done < tokens.len() {
            let rest = &tokens[n_done..];
            let batch = &rest[..seq.spans.n_in_pass(seq.position(), rest.len(), *n_batch)];
            let (start, first_output) = (
                seq.position(),
                first.saturating_sub(n_done).min(batch.len()),
            );
            n_done += batch.len();
            let slot = Slot::new(seq, batch, kind).outputs_from(first_output);
            engine.pass(&mut [slot], outputs, raw, cancel, probe)?;
            let (states, logits) = (&*outputs.states, &mut *outputs.logits);
            each(OutputRows {
                tokens: seq.tokens(),
                start,
                first: start + first_output,
                kind,
                states,
                logits,
            });
        }
        Ok(())
    }

    /// Drops everything from `position` on. Later calls continue from there, as if the rest had
    /// never existed.
    ///
    /// # Errors
    /// If `position` is after the end.
    pub fn rewind(&mut self, position: usize) -> Result<(), SessionError> {
        if position > self.position() {
            return Err(SessionError::RewindAhead {
                position,
                n_past: self.position(),
            });
        }
        if self.seq.spans.splits(position) {
            return Err(SessionError::HasImages {
                what: "rewinding to a position inside of an image",
                instead: "; rewind to its start",
            });
        }
        self.cut(position, Cut::Rewound);
        Ok(())
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.cut(0, Cut::Rewound);
    }

    pub(crate) fn cut(&mut self, position: usize, cut: Cut) {
        self.drop_drafts();
        if position < self.position() {
            self.forget_outputs();
        }
        self.seq.cut(position, cut);
    }

    /// Takes note that the end of the sequence is not what the last pass left.
    pub(crate) fn forget_outputs(&mut self) {
        self.drop_drafts();
        self.ahead = false;
        self.outputs.clear();
    }

    /// An independent session that continues from the same point: same engine, adapters and
    /// [`CancelToken`], and a copy of the hook. Keys and values are shared until one of them
    /// writes.
    ///
    /// # Errors
    /// If there is no memory for its tokens and logits.
    pub fn fork(&self) -> Result<Session, SessionError> {
        let seq = self.seq.fork()?;
        let (n_vocab, mut outputs) = (self.model().hparams().n_vocab, Outputs::default());
        outputs.reserve(n_vocab, 0)?;
        outputs.set_last(self.logits(), n_vocab);
        Ok(Session {
            engine: self.engine.clone(),
            seq,
            outputs,
            saved: Saved::default(),
            ahead: self.ahead,
            n_batch: self.n_batch,
            cancel: self.cancel.clone(),
            #[cfg(feature = "vision")]
            projector: self.projector.clone(),
        })
    }
}
