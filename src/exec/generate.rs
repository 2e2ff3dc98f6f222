//! Text from a session: encode, prefill, then sample and decode until something ends it.

use super::hook::Cut;
use super::{CachedTokens, Session};
use crate::clock::Timer;
use crate::error::{Error, SampleError, SessionError};
use crate::sample::Sampler;
use crate::tokenizer::TextStream;
use std::borrow::BorrowMut;
use std::collections::VecDeque;
use std::time::Duration;

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model ended its text.
    EndOfGeneration,
    /// A stop string appeared; it is not part of the text.
    StopString,
    /// The limit of [`Generation::max_tokens`] was reached.
    MaxTokens,
    /// The context is full; the session does not hold the last token.
    ContextFull,
}

/// One generated token and its text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// The text that the token completes: empty where it ends inside a character, cut where a stop string begins
    /// inside it.
    pub text: String,
    /// The token.
    pub token: u32,
    /// `ln p(token)` of the model, before bias and filters, where [`Generation::logprobs`] asked for it.
    pub logprob: Option<f32>,
    /// The most probable tokens and their `ln p`, as many as [`Generation::logprobs`] asked for.
    pub top_logprobs: Vec<(u32, f32)>,
}

impl Piece {
    fn new(token: u32) -> Piece {
        Piece { text: String::new(), token, logprob: None, top_logprobs: Vec::new() }
    }
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Finish {
    /// Why.
    pub reason: StopReason,
    /// Tokens of the prompt that were computed.
    pub n_prompt: usize,
    /// Tokens of the prompt before them, which came from the prefix cache.
    pub n_cached: CachedTokens,
    /// Tokens generated, those of a stop string included.
    pub n_generated: usize,
    /// Where the time went.
    pub timings: Timings,
}

/// Time that a generation took, part by part; all zero where there is no clock (wasm32-unknown-unknown).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timings {
    /// From text to tokens.
    pub tokenize: Duration,
    /// Computing the prompt.
    pub prefill: Duration,
    /// Computing generated tokens.
    pub decode: Duration,
    /// Choosing tokens, and turning them to text.
    pub sample: Duration,
    /// Products with adapters, part of `prefill` and `decode`.
    pub adapters: Duration,
    /// From the beginning to the first token chosen.
    pub first_token: Duration,
}

/// Text as it is generated, token by token. Nothing follows an error.
///
/// Tokens that the sampler's mask [forces](Sampler::forced) are computed in one pass with the token before them.
///
/// [`Session::generate`] borrows the session and the sampler for it, [`Session::into_generation`] moves them in; then
/// it is `Send + 'static`, and [`Generation::into_parts`] gives them back.
///
/// Whenever it ends, fails, or is dropped, the session holds the prompt and the tokens of the pieces that were handed
/// out; the last of them is computed by the next call. So the next [`Session::generate`] goes on from there:
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
/// Three exceptions: a token that ends the text ([`StopReason::EndOfGeneration`]) has none and is not held, so that the
/// prompt of the next turn brings it; of a full context the last token is missing; and where a stop string begins
/// inside a token, that token is not held, and [`Generation::rest`] tells which text is missing.
#[derive(Debug)]
pub struct Generation<S: BorrowMut<Session> = Session, P: BorrowMut<Sampler> = Sampler> {
    /// Session and sampler; taken by [`Generation::into_parts`] alone.
    parts: Option<(S, P)>,
    stream: Option<TextStream>,
    /// What is to be computed before the first token; empty afterwards.
    prompt: Vec<u32>,
    /// Refusal of the prompt, to be handed out first.
    refused: Option<Error>,
    stop: Vec<String>,
    max_tokens: usize,
    logprobs: Option<usize>,
    /// Pieces that were not handed out yet.
    pieces: VecDeque<Held>,
    /// How many of them can be.
    n_ready: usize,
    /// Their text from the first that is not ready on; it may be the beginning of a stop string.
    text: String,
    /// Position of the first token generated.
    start: usize,
    /// Tokens generated.
    tokens: Vec<u32>,
    /// Pieces that were handed out.
    n_out: usize,
    rest: String,
    /// Sampled, not yet in the session.
    pending: Option<Piece>,
    state: State,
    begun: Timer,
    n_prompt: usize,
    n_cached: CachedTokens,
    timings: Timings,
    /// What the session's adapters had taken before.
    adapters_before: Duration,
}

/// A piece that waits to be handed out.
#[derive(Debug)]
struct Held {
    piece: Piece,
    /// Whether its text ends a character.
    is_whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Running,
    Ended(StopReason),
    Failed,
}

impl Session {
    /// Continues `prompt`, which is computed at once. Special tokens written in the prompt count as such; a
    /// beginning-of-text token is added where the model wants one and the session is empty.
    ///
    /// # Errors
    /// If the file has no tokenizer, or as [`Session::prefill`].
    pub fn generate<'s>(
        &'s mut self,
        prompt: &str,
        sampler: &'s mut Sampler,
    ) -> Result<Generation<&'s mut Session, &'s mut Sampler>, Error> {
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
    ) -> Result<Generation<&'s mut Session, &'s mut Sampler>, Error> {
        Generation::new(self, sampler).with_tokens(tokens).prefilled()
    }

    /// As [`Session::generate`], but the generation owns session and sampler. The first call of
    /// [`next`](Iterator::next) computes the prompt, and yields what [`Session::generate`] would refuse.
    pub fn into_generation(self, prompt: &str, sampler: Sampler) -> Generation {
        Generation::new(self, sampler).with_text(prompt)
    }

    /// As [`Session::generate_from`], but the generation owns session and sampler: see [`Session::into_generation`].
    pub fn into_generation_from(self, tokens: &[u32], sampler: Sampler) -> Generation {
        Generation::new(self, sampler).with_tokens(tokens)
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Generation<S, P> {
    fn new(session: S, sampler: P) -> Self {
        let held = session.borrow();
        let stream = held.model().tokenizer().map(|tokenizer| TextStream::new(tokenizer, false));
        Generation {
            refused: stream.is_none().then(|| SessionError::NoTokenizer.into()),
            stream,
            start: held.position(),
            adapters_before: held.adapter_time(),
            parts: Some((session, sampler)),
            prompt: Vec::new(),
            stop: Vec::new(),
            max_tokens: usize::MAX,
            logprobs: None,
            pieces: VecDeque::new(),
            n_ready: 0,
            text: String::new(),
            tokens: Vec::new(),
            n_out: 0,
            rest: String::new(),
            pending: None,
            state: State::Running,
            begun: Timer::start(),
            n_prompt: 0,
            n_cached: CachedTokens::default(),
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
    fn prefilled(mut self) -> Result<Self, Error> {
        self.prefill()?;
        Ok(self)
    }

    /// Ends after `n` tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Self {
        self.max_tokens = n;
        self
    }

    /// Ends before any of these strings.
    #[must_use]
    pub fn stop<T: Into<String>>(mut self, stop: impl IntoIterator<Item = T>) -> Self {
        self.stop = stop.into_iter().map(Into::into).filter(|s: &String| !s.is_empty()).collect();
        self
    }

    /// Tells the log-probability of each token that is sampled from now on, and of the `n_top` most probable ones.
    #[must_use]
    pub fn logprobs(mut self, n_top: usize) -> Self {
        self.logprobs = Some(n_top);
        self
    }

    /// Tokens generated so far, those of a stop string included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How it ended, once it has; nothing if that was by an error.
    pub fn finish(&self) -> Option<Finish> {
        let State::Ended(reason) = self.state else { return None };
        let adapters = self.session().adapter_time().saturating_sub(self.adapters_before);
        let timings = Timings { adapters, ..self.timings };
        let &Generation { n_prompt, n_cached, .. } = self;
        Some(Finish { reason, n_prompt, n_cached, n_generated: self.tokens.len(), timings })
    }

    /// After [`StopReason::StopString`], the end of the text that the session does not hold, because the stop string
    /// begins inside its token; mostly empty. A next prompt begins with it.
    pub fn rest(&self) -> &str {
        &self.rest
    }

    /// All text that is left.
    ///
    /// # Errors
    /// The first that comes.
    pub fn text(self) -> Result<String, Error> {
        self.map(|piece| Ok(piece?.text)).collect()
    }

    /// The session it generates with.
    pub fn session(&self) -> &Session {
        self.parts.as_ref().map(|(session, _)| session.borrow()).expect("parts are there until `into_parts`")
    }

    /// Ends here, and gives back session and sampler.
    pub fn into_parts(mut self) -> (S, P) {
        self.take_back();
        self.parts.take().expect("parts are there until `into_parts`")
    }

    fn session_mut(&mut self) -> &mut Session {
        self.parts.as_mut().map(|(session, _)| session.borrow_mut()).expect("parts are there until `into_parts`")
    }

    /// Computes the prompt and samples the first token, unless that is done.
    fn prefill(&mut self) -> Result<(), Error> {
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
        self.start = self.session().position();
        // What is forced waits until it is known how many tokens there may be.
        if self.forced().is_empty() {
            self.sample()?;
        }
        self.timings.first_token = self.begun.elapsed();
        Ok(())
    }

    /// The tokens that the sampler's mask forces next.
    fn forced(&mut self) -> Vec<u32> {
        let Some((session, sampler)) = &mut self.parts else { return Vec::new() };
        let (session, sampler): (&Session, &mut Sampler) = ((*session).borrow(), sampler.borrow_mut());
        let tokenizer = session.model().tokenizer();
        tokenizer.map_or_else(Vec::new, |tokenizer| sampler.forced(&|text| tokenizer.encode_inside(text)))
    }

    /// Computes the token that waits and what the mask forces behind it, in one pass, and samples what follows; or ends.
    fn decode(&mut self) -> Result<(), Error> {
        let timer = Timer::start();
        let mut forced = self.forced();
        self.timings.sample += timer.elapsed();
        let session = self.session();
        let is_eog = |token: &u32| session.model().tokenizer().is_some_and(|tokenizer| tokenizer.is_eog(*token));
        let is_full = self.start + self.tokens.len() > session.position();
        let room = (session.n_ctx() - session.position()).min(self.max_tokens - self.tokens.len());
        match forced.iter().position(is_eog) {
            Some(0) => {
                self.accept(forced[0])?;
                return self.end(StopReason::EndOfGeneration);
            }
            Some(n) => forced.truncate(n),
            None => {}
        }
        if is_full {
            return self.end(StopReason::ContextFull);
        }
        forced.truncate(room);
        let pieces = self.compute(&forced)?;
        let timer = Timer::start();
        for piece in pieces {
            self.accept(piece.token)?;
            self.hold(piece)?;
            self.release();
            if self.state != State::Running {
                return Ok(());
            }
        }
        self.timings.sample += timer.elapsed();
        if self.tokens.len() < self.max_tokens { self.sample() } else { Ok(()) }
    }

    /// Computes the token that waits and `forced` behind it; the pieces of these, without text.
    fn compute(&mut self, forced: &[u32]) -> Result<Vec<Piece>, Error> {
        let timer = Timer::start();
        let n_top = self.logprobs;
        let Some((session, sampler)) = &mut self.parts else { return Ok(Vec::new()) };
        let (session, sampler): (&mut Session, &mut Sampler) = ((*session).borrow_mut(), (*sampler).borrow_mut());
        let n_vocab = session.model().tokenizer().map_or(usize::MAX, |tokenizer| tokenizer.n_vocab());
        let mut pieces: Vec<Piece> = forced.iter().map(|&token| Piece::new(token)).collect();
        let mut next = pieces.iter_mut();
        let mut tell = |logits: &[f32]| {
            if let (Some(n_top), Some(piece)) = (n_top, next.next()) {
                let told = sampler.logprobs(&logits[..n_vocab.min(logits.len())], piece.token, n_top);
                (piece.logprob, piece.top_logprobs) = (Some(told.logprob), told.top);
            }
        };
        session.catch_up_with(forced, n_top.is_some(), &mut tell)?;
        self.timings.decode += timer.elapsed();
        Ok(pieces)
    }

    /// Lets the mask take a token that was not sampled.
    fn accept(&mut self, token: u32) -> Result<(), Error> {
        let sampler = self.parts.as_mut().map(|(_, sampler)| sampler.borrow_mut());
        match sampler.and_then(Sampler::mask_mut) {
            Some(mask) => Ok(mask.accept(token).map_err(SampleError::from)?),
            None => Ok(()),
        }
    }

    fn sample(&mut self) -> Result<(), Error> {
        let timer = Timer::start();
        let Some((session, sampler)) = &mut self.parts else { return Ok(()) };
        let (session, sampler): (&Session, &mut Sampler) = ((*session).borrow(), sampler.borrow_mut());
        // Embedding tables are padded; rows behind the vocabulary are no tokens.
        let n_vocab = session.model().tokenizer().map_or(usize::MAX, |tokenizer| tokenizer.n_vocab());
        let logits = session.logits();
        let logits = &logits[..n_vocab.min(logits.len())];
        self.pending = Some(match self.logprobs {
            None => Piece::new(sampler.sample(logits, session.tokens())?),
            Some(n_top) => {
                let sampled = sampler.sample_with_logprobs(logits, session.tokens(), n_top)?;
                Piece { logprob: Some(sampled.logprob), top_logprobs: sampled.top, ..Piece::new(sampled.token) }
            }
        });
        self.timings.sample += timer.elapsed();
        Ok(())
    }

    /// Goes on by one token, and those that are forced before it: they are held, or the state is no longer running.
    fn advance(&mut self) -> Result<(), Error> {
        self.prefill()?;
        if self.tokens.len() >= self.max_tokens {
            return self.end(StopReason::MaxTokens);
        }
        if self.pending.is_none() {
            self.decode()?;
        }
        let Some(piece) = self.pending.take() else { return Ok(()) };
        let token = piece.token;
        if self.session().model().tokenizer().is_some_and(|tokenizer| tokenizer.is_eog(token)) {
            return self.end(StopReason::EndOfGeneration);
        }
        let timer = Timer::start();
        self.hold(piece)?;
        self.session_mut().push_ahead(token)?;
        self.release();
        self.timings.sample += timer.elapsed();
        Ok(())
    }

    /// Gives a piece its text, and holds it back until [`Self::release`].
    fn hold(&mut self, mut piece: Piece) -> Result<(), Error> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        piece.text.push_str(stream.push(piece.token)?);
        let is_whole = stream.is_whole();
        self.tokens.push(piece.token);
        self.text.push_str(&piece.text);
        self.pieces.push_back(Held { piece, is_whole });
        Ok(())
    }

    /// Makes pieces ready that cannot be part of a stop string; ends before one.
    fn release(&mut self) {
        if let Some(at) = self.stop.iter().filter_map(|s| self.text.find(s.as_str())).min() {
            self.end_before(at);
            return;
        }
        let is_beginning = |from: &usize| self.stop.iter().any(|s| s.starts_with(&self.text[*from..]));
        let free = (0..self.text.len()).filter(|&i| self.text.is_char_boundary(i)).find(is_beginning);
        let n = self.n_whole(free.unwrap_or(self.text.len()));
        self.make_ready(n);
    }

    /// Of the pieces that are not ready, how many end within the first `len` bytes of their text, at a whole character.
    fn n_whole(&self, len: usize) -> usize {
        let mut end = 0;
        let ends = self.pieces.iter().skip(self.n_ready).map(|held| {
            end += held.piece.text.len();
            (end, held.is_whole)
        });
        ends.enumerate().filter(|(_, (end, is_whole))| *is_whole && *end <= len).last().map_or(0, |(i, _)| i + 1)
    }

    fn make_ready(&mut self, n: usize) {
        let len = self.pieces.iter().skip(self.n_ready).take(n).map(|held| held.piece.text.len()).sum::<usize>();
        self.text.drain(..len);
        self.n_ready += n;
    }

    /// Ends before a stop string at byte `at` of the text that is not ready.
    fn end_before(&mut self, at: usize) {
        let n = self.n_whole(at);
        let kept = self.pieces.iter().skip(self.n_ready).take(n).map(|held| held.piece.text.len()).sum::<usize>();
        self.rest = self.text[kept..at].to_owned();
        let first_cut = self.pieces.drain(self.n_ready + n..).next();
        self.make_ready(n);
        self.text.clear();
        let position = self.start + self.n_out + self.n_ready;
        if let Some(Held { mut piece, .. }) = first_cut.filter(|_| !self.rest.is_empty()) {
            piece.text.clone_from(&self.rest);
            self.pieces.push_back(Held { piece, is_whole: true });
            self.n_ready += 1;
        }
        self.session_mut().cut(position, Cut::AnswerShortened);
        self.state = State::Ended(StopReason::StopString);
    }

    /// Ends; what was held back can be handed out.
    fn end(&mut self, reason: StopReason) -> Result<(), Error> {
        let rest = self.stream.as_mut().map_or("", TextStream::finish);
        if let Some(last) = self.pieces.back_mut() {
            last.piece.text.push_str(rest);
        }
        self.n_ready = self.pieces.len();
        self.text.clear();
        self.state = State::Ended(reason);
        Ok(())
    }

    /// Takes out of the session the tokens whose pieces nobody was given.
    fn take_back(&mut self) {
        let end = self.start + self.n_out;
        let nobody_has = !self.pieces.is_empty();
        if let Some((session, _)) = self.parts.as_mut().filter(|_| nobody_has) {
            let session: &mut Session = session.borrow_mut();
            if end < session.position() {
                session.cut(end, Cut::AnswerShortened);
            }
        }
        self.pieces.clear();
        self.n_ready = 0;
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Iterator for Generation<S, P> {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.n_ready == 0 && self.state == State::Running {
            if let Err(error) = self.advance() {
                self.state = State::Failed;
                self.take_back();
                return Some(Err(error));
            }
        }
        self.n_ready = self.n_ready.checked_sub(1)?;
        self.n_out += 1;
        self.pieces.pop_front().map(|held| Ok(held.piece))
    }
}

impl<S: BorrowMut<Session>, P: BorrowMut<Sampler>> Drop for Generation<S, P> {
    fn drop(&mut self) {
        self.take_back();
    }
}
