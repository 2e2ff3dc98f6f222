//! Text from a session: encode, prefill, then sample and decode until something ends it.

use crate::clock::Timer;
use crate::compute::hook::{Cut, OutputRows, TokenKind};
use crate::compute::probe::NoCallback;
use crate::decode::DecodeError;
use crate::decode::answer::Answer;
use crate::decode::output::{Finish, StopReason, TextWriter, Timings, TokenText};
use crate::decode::speculative::{DraftPasses, DraftStats, Speculation, Speculator};
use crate::engine::SessionError;
use crate::engine::options::CachedTokens;
use crate::sample::Sampler;
use crate::session::session::Session;
use std::borrow::BorrowMut;
use std::time::Duration;

/// Why session and sampler are there.
const PARTS: &str = "parts are there until `into_parts`";

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
/// # let (mut session, mut sampler) = (model.session()?, ruvllm::Sampler::new(ruvllm::SamplerOptions { temperature: 0.0, ..Default::default() })?);
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
    answer: Answer,
    /// Tokens to be computed before the first sampled one; empty afterwards.
    prompt: Vec<u32>,
    /// Refusal of the prompt, to be handed out first.
    refused: Option<DecodeError>,
    /// Position of the first token generated; less than 0 once the context was shifted beyond it.
    start: isize,
    failed: bool,
    begun: Timer,
    n_prompt: usize,
    n_cached: CachedTokens,
    passes: DraftPasses,
    timings: Timings,
    /// What the session's adapters had taken before.
    adapters_before: Duration,
}

/// A prompt: a text, or its tokens.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'p> {
    /// Special tokens written in it are parsed; a beginning-of-text token is added if the model
    /// expects one and the session is empty.
    Text(&'p str),
    /// Tokens, which are appended to the session as they are.
    Tokens(&'p [u32]),
}

impl<'p> From<&'p str> for Prompt<'p> {
    fn from(text: &'p str) -> Prompt<'p> {
        Prompt::Text(text)
    }
}

impl<'p> From<&'p String> for Prompt<'p> {
    fn from(text: &'p String) -> Prompt<'p> {
        Prompt::Text(text)
    }
}

impl<'p> From<&'p [u32]> for Prompt<'p> {
    fn from(tokens: &'p [u32]) -> Prompt<'p> {
        Prompt::Tokens(tokens)
    }
}

impl<'p, const N: usize> From<&'p [u32; N]> for Prompt<'p> {
    fn from(tokens: &'p [u32; N]) -> Prompt<'p> {
        Prompt::Tokens(tokens)
    }
}

impl<'p> From<&'p Vec<u32>> for Prompt<'p> {
    fn from(tokens: &'p Vec<u32>) -> Prompt<'p> {
        Prompt::Tokens(tokens)
    }
}

impl Speculation {
    /// Keeps what the drafters read of a session from now on: also of tokens that are computed before
    /// a generation begins, and from one generation to the next.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn keep_in(&self, session: &mut Session) -> Result<(), SessionError> {
        self.keep(&mut session.seq)?;
        session.seq.pin_kept();
        Ok(())
    }
}

impl Session {
    /// Continues a text or tokens, which are computed at once.
    ///
    /// # Errors
    /// If the file has no tokenizer, or as [`Session::prefill`].
    pub fn generate<'s, 'p>(
        &'s mut self,
        prompt: impl Into<Prompt<'p>>,
        sampler: &'s mut Sampler,
    ) -> Result<Generation<&'s mut Session, &'s mut Sampler>, DecodeError> {
        let mut generation = Generation::new(self, prompt, sampler);
        generation.prefill()?;
        Ok(generation)
    }

    /// As [`Session::generate`], but the generation owns session and sampler. The first call of
    /// [`next`](Iterator::next) computes the prompt, and returns the errors of
    /// [`Session::generate`].
    pub fn into_generation<'p>(
        self,
        prompt: impl Into<Prompt<'p>>,
        sampler: Sampler,
    ) -> Generation {
        Generation::new(self, prompt, sampler)
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Generation<S, P> {
    fn new<'p>(session: S, prompt: impl Into<Prompt<'p>>, sampler: P) -> Self {
        let (begun, timer) = (Timer::start(), Timer::start());
        let held = session.borrow();
        let prompt = match (
            prompt.into(),
            held.model().tokenizer(),
            held.tokens().last(),
        ) {
            (Prompt::Tokens(tokens), ..) => tokens.to_vec(),
            (Prompt::Text(text), Some(tokenizer), None) => tokenizer.encode_prompt(text),
            (Prompt::Text(text), Some(tokenizer), Some(&last)) => {
                tokenizer.encode_continuation(text, last)
            }
            (Prompt::Text(_), None, _) => Vec::new(),
        };
        let tokenize = timer.elapsed();
        let writer = TextWriter::new(held.model(), false);
        let refusal = match (writer.has_text(), prompt.is_empty()) {
            (false, _) => Some(SessionError::NoTokenizer.into()),
            (true, true) => Some(SessionError::NoTokens.into()),
            (true, false) => None,
        };
        Generation {
            refused: refusal,
            answer: Answer::new(writer),
            start: held.position() as isize,
            adapters_before: held.adapter_time(),
            parts: Some((session, sampler)),
            prompt,
            failed: false,
            begun,
            n_prompt: 0,
            n_cached: CachedTokens::default(),
            passes: DraftPasses::default(),
            timings: Timings {
                tokenize,
                ..Timings::default()
            },
        }
    }

    /// Sets the largest number of tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Self {
        self.answer.writer.max_tokens = n;
        self
    }

    /// Sets stop strings, before which the text ends.
    #[must_use]
    pub fn stop<T: Into<String>>(mut self, stop: impl IntoIterator<Item = T>) -> Self {
        self.answer.writer.set_stop(stop);
        self
    }

    /// Returns the log-probability of each token that is sampled from now on, and of the `n_top`
    /// most probable ones.
    #[must_use]
    pub fn logprobs(mut self, n_top: usize) -> Self {
        self.answer.writer.logprobs = Some(n_top);
        self
    }

    /// Computes several tokens per pass where that is faster: the text stays the same, see
    /// [`Speculation`]. Sessions with a [hook](crate::compute::OutputHook) do without.
    #[must_use]
    pub fn speculate(mut self, speculation: Speculation) -> Self {
        let speculator = Speculator::new(speculation);
        // Without memory for it, who reads it drafts nothing.
        let _ = speculator.keep(&mut self.split().0.seq);
        self.answer.speculator = Some(speculator);
        self
    }

    /// Passes that computed generated tokens so far.
    pub fn n_passes(&self) -> usize {
        self.answer.n_passes
    }

    /// What became of each drafter's drafts.
    pub fn drafters(&self) -> Vec<(&'static str, DraftStats)> {
        let speculator = self.answer.speculator.iter();
        speculator.flat_map(Speculator::by_drafter).collect()
    }

    /// Tokens generated so far, those of a stop string included.
    pub fn tokens(&self) -> &[u32] {
        self.answer.writer.tokens()
    }

    /// How it ended, once it has; `None` after an error.
    pub fn finish(&self) -> Option<Finish> {
        let adapters = self.session().adapter_time();
        let timings = Timings {
            adapters: adapters.saturating_sub(self.adapters_before),
            ..self.timings
        };
        self.answer.finish((self.n_prompt, self.n_cached), timings)
    }

    /// After [`StopReason::StopString`], the end of the text that the session does not hold,
    /// because the stop string begins inside its token; usually empty. The next prompt should
    /// begin with it.
    pub fn rest(&self) -> &str {
        &self.answer.writer.rest
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
        self.parts.as_ref().expect(PARTS).0.borrow()
    }

    /// Ends the generation, and returns session and sampler.
    pub fn into_parts(mut self) -> (S, P) {
        self.take_back();
        self.parts.take().expect(PARTS)
    }

    fn split(&mut self) -> (&mut Session, &mut Sampler, &mut Answer, &mut DraftPasses) {
        let (session, sampler) = self.parts.as_mut().expect(PARTS);
        let (session, sampler) = ((*session).borrow_mut(), (*sampler).borrow_mut());
        (session, sampler, &mut self.answer, &mut self.passes)
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
        let (session, sampler, answer, _) = self.split();
        session.prefill(&prompt)?;
        let time = timer.elapsed();
        answer.text.tokens = session.tokens().to_vec();
        answer.begin(sampler, session.logits())?;
        self.n_cached = self.session().sequence().cached_tokens();
        self.n_prompt = prompt.len() - self.n_cached.total();
        self.start = self.session().position() as isize;
        self.timings.prefill = time;
        self.timings.first_token = self.begun.elapsed();
        Ok(())
    }

    /// Computes what the answer needs next, and takes one token, with those that are forced before
    /// it; or ends.
    fn step(&mut self) -> Result<(), DecodeError> {
        let timer = Timer::start();
        let (session, sampler, answer, _) = self.split();
        session.take_ahead();
        answer.next_rows(sampler, &mut session.seq, &session.outputs.logits)?;
        let is_over = answer.writer.reason().is_some();
        let is_missing = answer.n_missing(&session.seq) > 0;
        self.timings.sample += timer.elapsed();
        if !is_over && is_missing {
            self.compute()?;
        }
        let timer = Timer::start();
        let (session, sampler, answer, _) = self.split();
        // The limit may be raised before the next piece is wanted.
        if answer.writer.reason().is_some() || answer.writer.n_left() == 0 {
            return Ok(());
        }
        answer.consume(sampler, &mut session.seq, &session.outputs.logits)?;
        if answer.n_missing(&session.seq) > 0 {
            session.drop_drafts();
            // A full context is shifted, if the session was made for it.
            if session.seq.context_shift.is_some() && session.position() == session.seq.n_ctx() {
                let gone = session.shift_tokens()?;
                drop(answer.shifted(gone.clone()));
                self.start -= gone.len() as isize;
            }
        }
        self.timings.sample += timer.elapsed();
        Ok(())
    }

    /// Computes the tokens that the answer wants computed, and drafts behind them.
    fn compute(&mut self) -> Result<(), DecodeError> {
        let timer = Timer::start();
        let (session, sampler, answer, passes) = self.split();
        session.drop_drafts();
        let n_missing = answer.n_missing(&session.seq);
        if let Some(asked) = answer.ask(&session.engine, &session.seq, session.n_batch) {
            passes.draft(&session.engine, n_missing, &mut [asked]);
        }
        let n_vocab = session.model().hparams().n_vocab;
        let outcome = loop {
            // A hook sees every token.
            let (_, first) = answer.rows(&session.seq);
            let first = if session.seq.hook.is_some() { 0 } else { first };
            let (position, n_drafts) = (session.position(), answer.text.drafts.len());
            if n_drafts > 0 {
                session.seq.kv.hold(position);
            }
            let Answer {
                writer,
                text,
                forced,
                ..
            } = &mut *answer;
            let (pass, probe) = (text.pass(position), &mut NoCallback);
            let mut tell = |rows: OutputRows<'_>| {
                let rows = rows.logits.chunks_exact(n_vocab);
                rows.for_each(|row| forced.tell(writer, sampler, row));
            };
            let outcome =
                session.passes(TokenKind::Generated, pass, first, false, probe, &mut tell);
            let Err(error) = outcome else {
                break answer.computed(sampler, &mut session.seq, &[]);
            };
            answer.drop_drafts(&mut session.seq);
            // What cannot be computed may be a draft.
            if n_drafts == 0 || matches!(error, SessionError::Cancelled) {
                break Err(error.into());
            }
        };
        self.timings.decode += timer.elapsed();
        outcome
    }

    /// Lets the session hold the prompt and the tokens generated: the last one may wait for the
    /// next pass.
    fn settle(&mut self) -> Result<(), DecodeError> {
        let last = self.tokens().last().copied();
        let end = self.position_of(self.tokens().len());
        let kept = match self.answer.writer.reason() {
            Some(StopReason::StopString) => self.position_of(self.answer.writer.n_kept),
            _ => end,
        };
        let (session, ..) = self.split();
        if let Some(token) = last.filter(|_| session.position() + 1 == end) {
            session.push_ahead(token)?;
        }
        if kept < session.position() {
            session.cut(kept, Cut::AnswerShortened);
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

    /// Takes out of the session the tokens whose pieces nobody was given.
    fn take_back(&mut self) {
        let end = self.position_of(self.answer.writer.n_out);
        let nobody_has = self.answer.writer.forget();
        if self.parts.is_some() {
            let (session, ..) = self.split();
            if nobody_has && end < session.position() {
                session.cut(end, Cut::AnswerShortened);
            }
            session.drop_drafts();
            session.seq.release_kept();
        }
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Iterator for Generation<S, P> {
    type Item = Result<TokenText, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        let is_wanted = |writer: &TextWriter| !writer.is_ready() && writer.reason().is_none();
        while is_wanted(&self.answer.writer) && !self.failed {
            let outcome = self.prefill().and_then(|()| {
                let outcome = self.step();
                outcome.and(self.settle())
            });
            if let Err(error) = outcome {
                self.failed = true;
                self.take_back();
                return Some(Err(error));
            }
        }
        self.answer.writer.pop().map(Ok)
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Drop for Generation<S, P> {
    fn drop(&mut self) {
        self.take_back();
    }
}
