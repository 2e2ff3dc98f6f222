//! Text from a session: encode, prefill, then sample and decode until something ends it.

use crate::clock::Timer;
use crate::compute::hook::Cut;
use crate::decode::DecodeError;
use crate::decode::output::{Finish, Piece, PieceWriter, StopReason, Timings};
use crate::decode::speculative::passes::DraftPasses;
use crate::decode::speculative::{DraftStats, Speculation, Speculator};
use crate::engine::SessionError;
use crate::engine::options::CachedTokens;
use crate::sample::Sampler;
use crate::session::session::Session;
use std::borrow::BorrowMut;
use std::time::Duration;

/// Text as it is generated, token by token. Nothing follows an error.
///
/// Tokens that the sampler's mask [forces](Sampler::forced) are computed in one pass with the token
/// before them.
///
/// [`Session::generate`] borrows the session and the sampler for it, [`Session::into_generation`]
/// moves them in; then it is `Send + 'static`, and [`Generation::into_parts`] gives them back.
///
/// Whenever it ends, fails, or is dropped, the session holds the prompt and the tokens of the
/// pieces that were handed out; the last of them is computed by the next call. So the next
/// [`Session::generate`] goes on from there:
///
/// ```
/// # fn main() -> Result<(), ruvllm::Error> {
/// # let model = ruvllm::Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// # let (mut session, mut sampler) = (model.session()?, ruvllm::Sampler::builder().temperature(0.0).build()?);
/// let begun = session.generate("Ownership is", &mut sampler)?.max_tokens(4).text()?;
/// let more = session.generate(" and borrowing", &mut sampler)?.max_tokens(4).text()?;
/// # let text = model.tokenizer().unwrap().decode_lossy(session.tokens(), false);
/// # assert_eq!(text.unwrap().trim_start(), format!("Ownership is{begun} and borrowing{more}"));
/// # Ok(()) }
/// ```
///
/// Three exceptions: a token that ends the text ([`StopReason::EndOfGeneration`]) has none and is
/// not held, so that the prompt of the next turn brings it; of a full context the last token is
/// missing; and where a stop string begins inside a token, that token is not held, and
/// [`Generation::rest`] tells which text is missing.
#[derive(Debug)]
pub struct Generation<S: BorrowMut<Session> = Session, P: BorrowMut<Sampler> = Sampler> {
    /// Session and sampler; `None` only after [`Generation::into_parts`].
    parts: Option<(S, P)>,
    writer: PieceWriter,
    /// Tokens to be computed before the first sampled one; empty afterwards.
    prompt: Vec<u32>,
    /// Refusal of the prompt, to be handed out first.
    refused: Option<DecodeError>,
    /// Position of the first token generated; less than 0 once the context was shifted beyond it.
    start: isize,
    /// Sampled, not yet in the session.
    pending: Option<Piece>,
    failed: bool,
    begun: Timer,
    n_prompt: usize,
    n_cached: CachedTokens,
    speculator: Option<Speculator>,
    passes: DraftPasses,
    /// Drafts of the last pass.
    drafts: Vec<u32>,
    /// Passes that computed generated tokens.
    n_passes: usize,
    timings: Timings,
    /// What the session's adapters had taken before.
    adapters_before: Duration,
}

impl Session {
    /// Continues `prompt`, which is computed at once. Special tokens written in the prompt are
    /// parsed; a beginning-of-text token is added if the model expects one and the session is
    /// empty.
    ///
    /// # Errors
    /// If the file has no tokenizer, or as [`Session::prefill`].
    pub fn generate<'s>(
        &'s mut self,
        prompt: &str,
        sampler: &'s mut Sampler,
    ) -> Result<Generation<&'s mut Session, &'s mut Sampler>, DecodeError> {
        Generation::new(self, sampler).with_text(prompt).prefilled()
    }

    /// Continues `tokens`, which are appended to the session as they are and computed at once.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn generate_from<'s>(
        &'s mut self,
        tokens: &[u32],
        sampler: &'s mut Sampler,
    ) -> Result<Generation<&'s mut Session, &'s mut Sampler>, DecodeError> {
        Generation::new(self, sampler)
            .with_tokens(tokens)
            .prefilled()
    }

    /// As [`Session::generate`], but the generation owns session and sampler. The first call of
    /// [`next`](Iterator::next) computes the prompt, and returns the errors of
    /// [`Session::generate`].
    pub fn into_generation(self, prompt: &str, sampler: Sampler) -> Generation {
        Generation::new(self, sampler).with_text(prompt)
    }

    /// As [`Session::generate_from`], but the generation owns session and sampler: see
    /// [`Session::into_generation`].
    pub fn into_generation_from(self, tokens: &[u32], sampler: Sampler) -> Generation {
        Generation::new(self, sampler).with_tokens(tokens)
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Generation<S, P> {
    fn new(session: S, sampler: P) -> Self {
        let held = session.borrow();
        let writer = PieceWriter::new(held.model(), false);
        Generation {
            refused: (!writer.has_text()).then(|| SessionError::NoTokenizer.into()),
            writer,
            start: held.position() as isize,
            adapters_before: held.adapter_time(),
            parts: Some((session, sampler)),
            prompt: Vec::new(),
            pending: None,
            failed: false,
            begun: Timer::start(),
            n_prompt: 0,
            n_cached: CachedTokens::default(),
            speculator: None,
            passes: DraftPasses::default(),
            drafts: Vec::new(),
            n_passes: 0,
            timings: Timings::default(),
        }
    }

    fn with_text(self, prompt: &str) -> Self {
        let timer = Timer::start();
        let session = self.session();
        let tokens = match (session.model().tokenizer(), session.tokens().last()) {
            (Some(tokenizer), None) => tokenizer.encode_prompt(prompt),
            (Some(tokenizer), Some(&last)) => tokenizer.encode_continuation(prompt, last),
            (None, _) => Vec::new(),
        };
        let mut generation = self.with_tokens(&tokens);
        generation.timings.tokenize = timer.elapsed();
        generation
    }

    fn with_tokens(mut self, tokens: &[u32]) -> Self {
        self.prompt = tokens.to_vec();
        if tokens.is_empty() {
            self.refused.get_or_insert(SessionError::NoTokens.into());
        }
        self
    }

    /// Computes the prompt.
    fn prefilled(mut self) -> Result<Self, DecodeError> {
        self.prefill()?;
        Ok(self)
    }

    /// Sets the largest number of tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Self {
        self.writer.max_tokens = n;
        self
    }

    /// Sets stop strings, before which the text ends.
    #[must_use]
    pub fn stop<T: Into<String>>(mut self, stop: impl IntoIterator<Item = T>) -> Self {
        self.writer.set_stop(stop);
        self
    }

    /// Returns the log-probability of each token that is sampled from now on, and of the `n_top`
    /// most probable ones.
    #[must_use]
    pub fn logprobs(mut self, n_top: usize) -> Self {
        self.writer.logprobs = Some(n_top);
        self
    }

    /// Computes several tokens per pass where that is faster: the text stays the same, see
    /// [`Speculation`]. Sessions with a [hook](crate::compute::OutputHook), and engines on a
    /// device, do without.
    #[must_use]
    pub fn speculate(mut self, speculation: Speculation) -> Self {
        let speculator = Speculator::new(speculation);
        if speculator.reads_states() {
            // Without memory for them, who reads them drafts nothing.
            let _ = self.session_mut().seq.keep_states();
        }
        self.speculator = Some(speculator);
        self
    }

    /// Passes that computed generated tokens so far.
    pub fn n_passes(&self) -> usize {
        self.n_passes
    }

    /// What became of each drafter's drafts.
    pub fn drafters(&self) -> Vec<(&'static str, DraftStats)> {
        self.speculator
            .iter()
            .flat_map(Speculator::by_drafter)
            .collect()
    }

    /// Tokens generated so far, those of a stop string included.
    pub fn tokens(&self) -> &[u32] {
        self.writer.tokens()
    }

    /// How it ended, once it has; `None` after an error.
    pub fn finish(&self) -> Option<Finish> {
        let reason = self.writer.reason()?;
        let adapters = self
            .session()
            .adapter_time()
            .saturating_sub(self.adapters_before);
        let timings = Timings {
            adapters,
            ..self.timings
        };
        let &Generation {
            n_prompt,
            n_cached,
            n_passes,
            ..
        } = self;
        let drafts = DraftStats {
            n_passes,
            ..self
                .speculator
                .as_ref()
                .map(Speculator::stats)
                .unwrap_or_default()
        };
        let (stop, n_generated) = (self.writer.stopped_by(), self.tokens().len());
        Some(Finish {
            reason,
            stop,
            n_prompt,
            n_cached,
            n_generated,
            drafts,
            timings,
        })
    }

    /// After [`StopReason::StopString`], the end of the text that the session does not hold,
    /// because the stop string begins inside its token; usually empty. The next prompt should
    /// begin with it.
    pub fn rest(&self) -> &str {
        self.writer.rest()
    }

    /// All remaining text.
    ///
    /// # Errors
    /// The first error of the generation.
    pub fn text(self) -> Result<String, DecodeError> {
        self.map(|piece| Ok(piece?.text)).collect()
    }

    /// The session it generates with.
    pub fn session(&self) -> &Session {
        self.parts
            .as_ref()
            .map(|(session, _)| session.borrow())
            .expect("parts are there until `into_parts`")
    }

    /// Ends the generation, and returns session and sampler.
    pub fn into_parts(mut self) -> (S, P) {
        self.take_back();
        self.parts
            .take()
            .expect("parts are there until `into_parts`")
    }

    fn session_mut(&mut self) -> &mut Session {
        self.parts
            .as_mut()
            .map(|(session, _)| session.borrow_mut())
            .expect("parts are there until `into_parts`")
    }

    /// Computes the prompt and samples the first token, unless that is done.
    fn prefill(&mut self) -> Result<(), DecodeError> {
        if let Some(refusal) = self.refused.take() {
            return Err(refusal);
        }
        if self.prompt.is_empty() {
            return Ok(());
        }
        let prompt = std::mem::take(&mut self.prompt);
        let timer = Timer::start();
        self.session_mut().prefill(&prompt)?;
        self.timings.prefill = timer.elapsed();
        self.n_cached = self.session().cached_tokens();
        self.n_prompt = prompt.len() - self.n_cached.total();
        self.start = self.session().position() as isize;
        // What is forced waits until it is known how many tokens there may be.
        if self.forced().is_empty() {
            self.sample()?;
        }
        self.timings.first_token = self.begun.elapsed();
        Ok(())
    }

    /// The tokens that the sampler's mask forces next.
    fn forced(&mut self) -> Vec<u32> {
        let Some((_, sampler)) = &mut self.parts else {
            return Vec::new();
        };
        self.writer.forced(sampler.borrow_mut())
    }

    /// Computes the token that waits and what the mask forces behind it, in one pass, unless drafts
    /// have done that, and samples what follows; or ends.
    fn decode(&mut self) -> Result<(), DecodeError> {
        let timer = Timer::start();
        let is_full = self.position_of(self.tokens().len()) > self.session().position();
        let room = self.session().n_ctx() - self.session().position();
        let Some((_, sampler)) = &mut self.parts else {
            return Ok(());
        };
        let sampler = sampler.borrow_mut();
        let forced = self.writer.forced(sampler);
        let forced = self.writer.go_on(sampler, forced, (room, is_full))?;
        self.timings.sample += timer.elapsed();
        if self.writer.reason().is_some() {
            return Ok(());
        }
        let pieces = self.compute(&forced)?;
        let timer = Timer::start();
        let Some((_, sampler)) = &mut self.parts else {
            return Ok(());
        };
        let kept = self.writer.take_forced(sampler.borrow_mut(), pieces)?;
        self.timings.sample += timer.elapsed();
        match kept {
            Some(n) => self.keep(n),
            None if self.writer.n_left() > 0 => self.sample()?,
            None => {}
        }
        Ok(())
    }

    /// Computes the token that waits and `forced` behind it, as far as they were not drafted, and
    /// new drafts; the pieces of `forced`, without text.
    fn compute(&mut self, forced: &[u32]) -> Result<Vec<Piece>, DecodeError> {
        let timer = Timer::start();
        let Generation {
            parts: Some((session, sampler)),
            writer,
            speculator,
            passes,
            drafts,
            ..
        } = self
        else {
            return Ok(Vec::new());
        };
        let (session, sampler): (&mut Session, &mut Sampler) =
            ((*session).borrow_mut(), (*sampler).borrow_mut());
        let mut pieces: Vec<Piece> = forced.iter().map(|&token| Piece::new(token)).collect();
        let mut n = 0;
        while n < forced.len() && session.is_drafted(forced[n]) {
            writer.tell(&mut pieces[n], sampler, session.logits());
            session.accept(forced[n]);
            n += 1;
        }
        if let Some(speculator) = speculator {
            speculator.accepted(n);
        }
        let forced = &forced[n..];
        if session.is_ahead() || !forced.is_empty() {
            session.drop_drafts();
            drafts.clear();
            if let Some(speculator) = speculator {
                let room = session.n_draftable(forced.len());
                let n = room.min(writer.n_left().saturating_sub(forced.len() + 1));
                speculator.draft(
                    (&session.engine, passes),
                    &session.seq,
                    (session.tokens(), forced),
                    n,
                    drafts,
                );
            }
            loop {
                let mut next = pieces[n..].iter_mut();
                let mut tell = |logits: &[f32]| {
                    next.next()
                        .into_iter()
                        .for_each(|piece| writer.tell(piece, sampler, logits))
                };
                match session.catch_up_with(forced, drafts, writer.logprobs.is_some(), &mut tell) {
                    // What cannot be computed may be a draft.
                    Err(error)
                        if !drafts.is_empty() && !matches!(error, SessionError::Cancelled) =>
                    {
                        drafts.clear()
                    }
                    outcome => break outcome?,
                }
            }
            self.n_passes += 1;
        }
        self.timings.decode += timer.elapsed();
        Ok(pieces)
    }

    fn sample(&mut self) -> Result<(), DecodeError> {
        let timer = Timer::start();
        let Some((session, sampler)) = &mut self.parts else {
            return Ok(());
        };
        let (session, sampler): (&Session, &mut Sampler) =
            ((*session).borrow(), sampler.borrow_mut());
        self.pending = self
            .writer
            .sample(sampler, session.logits(), session.tokens())?;
        self.timings.sample += timer.elapsed();
        Ok(())
    }

    /// Advances by one token, and those that are forced before it: their pieces are held, or the
    /// generation has ended.
    fn advance(&mut self) -> Result<(), DecodeError> {
        self.prefill()?;
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        if self.pending.is_none() {
            self.decode()?;
        }
        let Some(piece) = self.pending.take() else {
            return Ok(());
        };
        let token = piece.token;
        if self.writer.is_eog(token) {
            self.writer.end(StopReason::EndOfGeneration);
            return Ok(());
        }
        let timer = Timer::start();
        self.writer.hold(piece)?;
        if self.session_mut().accept(token) {
            self.speculator
                .iter_mut()
                .for_each(|speculator| speculator.accepted(1));
        } else {
            self.make_room()?;
            self.session_mut().push_ahead(token)?;
        }
        if let Some(n) = self.writer.release() {
            self.keep(n);
        }
        self.timings.sample += timer.elapsed();
        Ok(())
    }

    /// Shifts a context that is full, if the session was made for it.
    fn make_room(&mut self) -> Result<(), DecodeError> {
        let session = self.session_mut();
        if session.seq.context_shift.is_some() && session.position() == session.n_ctx() {
            let n_dropped = session.shift()?;
            self.start -= n_dropped as isize;
            self.speculator
                .iter_mut()
                .for_each(|speculator| speculator.shifted(n_dropped));
        }
        Ok(())
    }

    /// Position of the generated token `n`.
    fn position_of(&self, n: usize) -> usize {
        self.start
            .saturating_add_unsigned(n)
            .try_into()
            .unwrap_or(0)
    }

    /// Takes all but the first `n` generated tokens out of the session.
    fn keep(&mut self, n: usize) {
        let position = self.position_of(n);
        self.session_mut().cut(position, Cut::AnswerShortened);
    }

    /// Takes out of the session the tokens whose pieces nobody was given.
    fn take_back(&mut self) {
        let end = self.position_of(self.writer.n_out());
        let nobody_has = self.writer.forget();
        if let Some((session, _)) = self.parts.as_mut().filter(|_| nobody_has) {
            let session: &mut Session = session.borrow_mut();
            if end < session.position() {
                session.cut(end, Cut::AnswerShortened);
            }
        }
        if let Some((session, _)) = &mut self.parts {
            (*session).borrow_mut().drop_drafts();
        }
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Iterator for Generation<S, P> {
    type Item = Result<Piece, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.writer.is_ready() && self.writer.reason().is_none() && !self.failed {
            if let Err(error) = self.advance() {
                self.failed = true;
                self.take_back();
                return Some(Err(error));
            }
        }
        self.writer.pop().map(Ok)
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Drop for Generation<S, P> {
    fn drop(&mut self) {
        self.take_back();
    }
}
