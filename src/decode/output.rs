//! The text of an answer as it comes into being: tokens are sampled or forced, become pieces, and
//! end.

use crate::decode::DecodeError;
use crate::decode::speculative::DraftStats;
use crate::engine::options::CachedTokens;
use crate::model::Model;
use crate::sample::{MaskError, SampleError, Sampler};
use crate::tokenizer::TextStream;
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
    /// The limit of [`Generation::max_tokens`](crate::Generation::max_tokens) was reached.
    MaxTokens,
    /// The context is full; the session does not hold the last token.
    ContextFull,
    /// The sampler's mask, such as a grammar, allows no token or has reached its limits: the text
    /// obeys it so far, and is not complete.
    MaskLimit,
    /// A request to a [`Scheduler`](crate::scheduler::Scheduler) was cancelled, or its
    /// [`Stream`](crate::scheduler::Stream) dropped.
    Cancelled,
    /// The time that a request to a [`Scheduler`](crate::scheduler::Scheduler) had is over.
    Deadline,
}

/// One generated token and its text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenText {
    /// The text that the token completes: empty if it ends inside a character, cut if a stop
    /// string begins inside it.
    pub text: String,
    /// The token.
    pub token: u32,
    /// `ln p(token)` of the model, before bias and filters, if
    /// [`Generation::logprobs`](crate::Generation::logprobs) requested it.
    pub logprob: Option<f32>,
    /// The most probable tokens and their `ln p`, as many as
    /// [`Generation::logprobs`](crate::Generation::logprobs) requested.
    pub top_logprobs: Vec<(u32, f32)>,
}

impl TokenText {
    pub(crate) fn new(token: u32) -> TokenText {
        TokenText {
            text: String::new(),
            token,
            logprob: None,
            top_logprobs: Vec::new(),
        }
    }
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Finish {
    /// Reason for the end.
    pub reason: StopReason,
    /// Index of the stop string that appeared, among those that were set.
    pub stop: Option<usize>,
    /// Number of prompt tokens that were computed.
    pub n_prompt: usize,
    /// Number of prompt tokens before them, which came from the prefix cache.
    pub n_cached: CachedTokens,
    /// Tokens generated, those of a stop string included.
    pub n_generated: usize,
    /// Passes that computed generated tokens, and what became of drafts.
    pub drafts: DraftStats,
    /// Where the time went.
    pub timings: Timings,
}

/// Times of the parts of a generation; all zero without a clock (wasm32-unknown-unknown).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timings {
    /// Encoding text to tokens.
    pub tokenize: Duration,
    /// Computing the prompt.
    pub prefill: Duration,
    /// Computing generated tokens.
    pub decode: Duration,
    /// Choosing tokens and converting them to text.
    pub sample: Duration,
    /// Products with adapters, part of `prefill` and `decode`.
    pub adapters: Duration,
    /// From the start until the first token was chosen.
    pub first_token: Duration,
}

/// Turns the tokens of one answer into pieces, and detects its end. It does not compute tokens.
#[derive(Debug)]
pub(crate) struct TextWriter {
    model: Model,
    stream: Option<TextStream>,
    /// Stop strings with their indices.
    stop: Vec<(usize, String)>,
    /// Index of the one that appeared: see [`Finish::stop`].
    pub(super) stopped_by: Option<usize>,
    pub(crate) max_tokens: usize,
    /// Log-probabilities to return: of the token, and of this many others.
    pub(crate) logprobs: Option<usize>,
    /// Pieces that were not handed out yet.
    pieces: VecDeque<PendingText>,
    /// Number of them that can be handed out.
    n_ready: usize,
    /// Text of the pieces that are not ready; it may be the beginning of a stop string.
    text: String,
    /// Tokens generated.
    tokens: Vec<u32>,
    /// Number of pieces that were handed out.
    pub(super) n_out: usize,
    /// After a stop string, the number of tokens of the text before it.
    pub(super) n_kept: usize,
    /// See [`Generation::rest`](crate::Generation::rest).
    pub(super) rest: String,
    reason: Option<StopReason>,
}

/// A piece that was not handed out yet.
#[derive(Debug)]
struct PendingText {
    piece: TokenText,
    /// Whether its text ends a character.
    is_whole: bool,
}

impl TextWriter {
    /// A writer for an answer of `model`; if `special`, special tokens have their texts.
    pub(crate) fn new(model: &Model, special: bool) -> TextWriter {
        TextWriter {
            model: model.clone(),
            stream: model
                .tokenizer()
                .map(|tokenizer| TextStream::new(tokenizer, special)),
            stop: Vec::new(),
            stopped_by: None,
            max_tokens: usize::MAX,
            logprobs: None,
            pieces: VecDeque::new(),
            n_ready: 0,
            text: String::new(),
            tokens: Vec::new(),
            n_out: 0,
            n_kept: 0,
            rest: String::new(),
            reason: None,
        }
    }

    /// Whether there is a tokenizer: pieces have text.
    pub(crate) fn has_text(&self) -> bool {
        self.stream.is_some()
    }

    /// Sets stop strings, before which the text ends.
    pub(crate) fn set_stop<T: Into<String>>(&mut self, stop: impl IntoIterator<Item = T>) {
        self.stop = stop
            .into_iter()
            .map(Into::into)
            .enumerate()
            .filter(|(_, s): &(_, String)| !s.is_empty())
            .collect();
    }

    /// Generated tokens, including those of a stop string.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens that may still be generated.
    pub(crate) fn n_left(&self) -> usize {
        self.max_tokens.saturating_sub(self.tokens.len())
    }

    /// Why the answer ended, once it has.
    pub(crate) fn reason(&self) -> Option<StopReason> {
        self.reason
    }

    /// Whether `token` ends a text.
    pub(crate) fn is_eog(&self, token: u32) -> bool {
        self.model
            .tokenizer()
            .is_some_and(|tokenizer| tokenizer.is_eog(token))
    }

    /// The tokens that the sampler's mask forces next.
    pub(crate) fn forced(&self, sampler: &mut Sampler) -> Vec<u32> {
        let tokenizer = self.model.tokenizer();
        tokenizer.map_or_else(Vec::new, |tokenizer| {
            sampler.forced(&|text| tokenizer.encode_inside(text))
        })
    }

    /// The logits of tokens. Embedding tables are padded; rows after the vocabulary are not tokens.
    fn of_tokens<'a>(&self, logits: &'a [f32]) -> &'a [f32] {
        let n_vocab = self
            .model
            .tokenizer()
            .map_or(usize::MAX, |tokenizer| tokenizer.n_vocab());
        &logits[..n_vocab.min(logits.len())]
    }

    /// Samples the token that follows `history`; or ends, where the sampler's mask cannot go on.
    pub(crate) fn sample(
        &mut self,
        sampler: &mut Sampler,
        logits: &[f32],
        history: &[u32],
    ) -> Result<Option<TokenText>, DecodeError> {
        let logits = self.of_tokens(logits);
        let piece = match self.logprobs {
            None => sampler.sample(logits, history).map(TokenText::new),
            Some(n_top) => {
                let sampled = sampler.sample_with_logprobs(logits, history, n_top);
                sampled.map(|sampled| TokenText {
                    logprob: Some(sampled.logprob),
                    top_logprobs: sampled.top,
                    ..TokenText::new(sampled.token)
                })
            }
        };
        self.within_limits(piece)
    }

    /// What a sampler's mask took part in; `None` where the mask cannot go on, which ends the text.
    fn within_limits<T>(
        &mut self,
        outcome: Result<T, SampleError>,
    ) -> Result<Option<T>, DecodeError> {
        match outcome {
            Err(SampleError::Mask(
                MaskError::TooComplex { .. } | MaskError::NothingAllowed { .. },
            )) => {
                self.end(StopReason::MaskLimit);
                Ok(None)
            }
            outcome => Ok(Some(outcome?)),
        }
    }

    /// Lets the sampler's mask accept a token that was not sampled; `false` where the mask cannot
    /// go on, which ends the text before the token.
    pub(super) fn accept(
        &mut self,
        sampler: &mut Sampler,
        token: u32,
    ) -> Result<bool, DecodeError> {
        let accepted = match sampler.mask_mut() {
            Some(mask) => mask.accept(token).map_err(SampleError::from),
            None => Ok(()),
        };
        Ok(self.within_limits(accepted)?.is_some())
    }

    /// Adds the log-probabilities of a forced piece, if they are requested, from the logits before
    /// it.
    pub(crate) fn tell(&self, piece: &mut TokenText, sampler: &mut Sampler, logits: &[f32]) {
        if let Some(n_top) = self.logprobs {
            let told = sampler.logprobs(self.of_tokens(logits), piece.token, n_top);
            (piece.logprob, piece.top_logprobs) = (Some(told.logprob), told.top);
        }
    }

    /// Gives a piece its text, and holds it back until [`Self::release`].
    pub(crate) fn hold(&mut self, mut piece: TokenText) -> Result<(), DecodeError> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        piece.text.push_str(stream.push(piece.token)?);
        let is_whole = stream.is_whole();
        self.tokens.push(piece.token);
        self.text.push_str(&piece.text);
        self.pieces.push_back(PendingText { piece, is_whole });
        Ok(())
    }

    /// Makes pieces ready that cannot be part of a stop string. Returns whether one ended the text.
    pub(crate) fn release(&mut self) -> bool {
        let found = self
            .stop
            .iter()
            .filter_map(|(i, s)| Some((self.text.find(s.as_str())?, *i)));
        if let Some((at, i)) = found.min() {
            self.stopped_by = Some(i);
            self.end_before(at);
            return true;
        }
        let is_beginning = |from: &usize| {
            self.stop
                .iter()
                .any(|(_, s)| s.starts_with(&self.text[*from..]))
        };
        let free = (0..self.text.len())
            .filter(|&i| self.text.is_char_boundary(i))
            .find(is_beginning);
        let n = self.n_whole(free.unwrap_or(self.text.len()));
        self.make_ready(n);
        false
    }

    /// Number of pieces, among those not ready, that end within the first `len` bytes of their
    /// text, at a whole character.
    fn n_whole(&self, len: usize) -> usize {
        let mut end = 0;
        let ends = self.pieces.iter().skip(self.n_ready).map(|held| {
            end += held.piece.text.len();
            (end, held.is_whole)
        });
        ends.enumerate()
            .filter(|(_, (end, is_whole))| *is_whole && *end <= len)
            .last()
            .map_or(0, |(i, _)| i + 1)
    }

    /// Returns the length of their text.
    fn make_ready(&mut self, n: usize) -> usize {
        let pieces = self.pieces.range(self.n_ready..self.n_ready + n);
        let len = pieces.map(|held| held.piece.text.len()).sum();
        self.text.drain(..len);
        self.n_ready += n;
        len
    }

    /// Ends before a stop string at byte `at` of the text that is not ready.
    fn end_before(&mut self, at: usize) {
        let kept = self.make_ready(self.n_whole(at));
        self.rest = self.text[..at - kept].to_owned();
        let first_cut = self.pieces.drain(self.n_ready..).next();
        self.text.clear();
        self.n_kept = self.n_out + self.n_ready;
        if let Some(PendingText { mut piece, .. }) = first_cut.filter(|_| !self.rest.is_empty()) {
            piece.text.clone_from(&self.rest);
            self.pieces.push_back(PendingText {
                piece,
                is_whole: true,
            });
            self.n_ready += 1;
        }
        self.reason = Some(StopReason::StopString);
    }

    /// Ends the answer; held pieces can be handed out.
    pub(crate) fn end(&mut self, reason: StopReason) {
        let rest = self.stream.as_mut().map_or("", TextStream::finish);
        if let Some(last) = self.pieces.back_mut() {
            last.piece.text.push_str(rest);
        }
        self.n_ready = self.pieces.len();
        self.text.clear();
        self.reason = Some(reason);
    }

    /// Whether [`Self::pop`] has a piece.
    pub(crate) fn is_ready(&self) -> bool {
        self.n_ready > 0
    }

    /// Removes and returns the next piece that is ready.
    pub(crate) fn pop(&mut self) -> Option<TokenText> {
        self.n_ready = self.n_ready.checked_sub(1)?;
        self.n_out += 1;
        self.pieces.pop_front().map(|held| held.piece)
    }

    /// Drops the pieces that were not handed out; returns whether there were any.
    pub(crate) fn forget(&mut self) -> bool {
        self.n_ready = 0;
        let had_any = !self.pieces.is_empty();
        self.pieces.clear();
        had_any
    }
}
