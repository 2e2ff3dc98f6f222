//! One answer: the state machine that decodes, for generations on a session and for requests of
//! the scheduler.
//!
//! ```text
//! prompt computed ─▶ next_rows ─▶ rows missing? ── yes ─▶ pass ─▶ computed ─┐
//!                       ▲              │ no                                │
//!                       └── consume ◀──┴───────────────────────────────────┘
//! ```
//!
//! [`Answer::next_rows`] appends what the sampler's mask forces, and leaves the tokens behind the
//! sequence's position to be computed, with drafts behind them. [`Answer::computed`] takes note of
//! the pass. [`Answer::consume`] samples one token from the row behind the text; as long as that is
//! the next draft, the row behind it is there, and no pass comes between. Each of them may end the
//! answer: then [`TextWriter::reason`] says why.
//!
//! A session consumes a token when its reader wants one, the scheduler whatever a pass computed.

use crate::decode::DecodeError;
use crate::decode::output::{Finish, StopReason, TextWriter, Timings, TokenText};
use crate::decode::speculative::{Asked, DraftStats, Speculator};
use crate::engine::engine::Engine;
use crate::engine::options::CachedTokens;
use crate::engine::sequence::Sequence;
use crate::sample::Sampler;
use std::ops::Range;

/// An answer that has not ended.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) writer: TextWriter,
    pub(crate) text: Text,
    pub(super) forced: Forced,
    /// Sampled behind the prompt, before the answer's limits were known.
    first: Option<TokenText>,
    pub(crate) speculator: Option<Speculator>,
    /// Passes that computed generated tokens.
    pub(super) n_passes: usize,
}

/// The tokens of an answer and of its next pass.
#[derive(Debug, Default)]
pub(crate) struct Text {
    /// The prompt and the generated tokens. Those from the sequence's position on are to be
    /// computed.
    pub(crate) tokens: Vec<u32>,
    /// Guesses that the next pass computes behind them.
    pub(crate) drafts: Vec<u32>,
    /// Memory for the tokens of a pass with drafts.
    pass: Vec<u32>,
}

impl Text {
    /// What the next pass computes, from `position` on.
    pub(crate) fn pass(&mut self, position: usize) -> &[u32] {
        if self.drafts.is_empty() {
            return &self.tokens[position..];
        }
        self.pass.clear();
        let text = &self.tokens[position..];
        self.pass.extend(text.iter().chain(&self.drafts));
        &self.pass
    }
}

/// Pieces of the text's last tokens, which the mask forced, without text until they are computed.
#[derive(Debug, Default)]
pub(super) struct Forced {
    pieces: Vec<TokenText>,
    /// How many of them have their log-probabilities.
    n_told: usize,
}

impl Forced {
    /// Adds the log-probabilities of the next piece, from the logits before it.
    pub(super) fn tell(&mut self, writer: &TextWriter, sampler: &mut Sampler, logits: &[f32]) {
        if let Some(piece) = self.pieces.get_mut(self.n_told) {
            writer.tell(piece, sampler, logits);
            self.n_told += 1;
        }
    }
}

impl Answer {
    pub(crate) fn new(writer: TextWriter) -> Answer {
        Answer {
            writer,
            text: Text::default(),
            forced: Forced::default(),
            first: None,
            speculator: None,
            n_passes: 0,
        }
    }

    /// Samples the first token, before the answer's limits are known, unless tokens are forced.
    pub(super) fn begin(
        &mut self,
        sampler: &mut Sampler,
        logits: &[f32],
    ) -> Result<(), DecodeError> {
        if self.writer.forced(sampler).is_empty() {
            self.first = self.writer.sample(sampler, logits, &self.text.tokens)?;
        }
        Ok(())
    }

    /// Number of the text's tokens that the next pass computes.
    pub(crate) fn n_missing(&self, seq: &Sequence) -> usize {
        self.text.tokens.len() - seq.position()
    }

    /// Rows of the next pass, and the first whose logits are needed: log-probabilities of forced
    /// tokens need those before each of them.
    pub(crate) fn rows(&self, seq: &Sequence) -> (usize, usize) {
        let n = self.n_missing(seq);
        let first = if self.writer.logprobs.is_some() {
            0
        } else {
            n.saturating_sub(1)
        };
        (n + self.text.drafts.len(), first)
    }

    /// Appends the tokens that the mask forces, or ends. `logits` are the last rows of the last
    /// pass of `seq`, `(n, n_vocab)`: those behind the text and its drafts.
    pub(crate) fn next_rows(
        &mut self,
        sampler: &mut Sampler,
        seq: &mut Sequence,
        logits: &[f32],
    ) -> Result<(), DecodeError> {
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        if self.first.is_some() {
            return Ok(());
        }
        let mut forced = self.writer.forced(sampler);
        match forced.iter().position(|&token| self.writer.is_eog(token)) {
            Some(0) => {
                if self.writer.accept(sampler, forced[0])? {
                    self.writer.end(StopReason::EndOfGeneration);
                }
                return Ok(());
            }
            Some(n) => forced.truncate(n),
            None => {}
        }
        let n_text = self.text.tokens.len();
        let Some(room) = seq.n_ctx().checked_sub(n_text) else {
            // A context that can be shifted is, before this is asked again.
            if !seq.shifts() {
                self.writer.end(StopReason::ContextFull);
            }
            return Ok(());
        };
        forced.truncate(room.min(self.writer.n_left()));
        self.text.tokens.extend_from_slice(&forced);
        let pieces = forced.iter().map(|&token| TokenText::new(token));
        self.forced.pieces.extend(pieces);
        // As far as they were drafted, they are computed.
        let mut n = 0;
        while n < forced.len() && seq.position() == n_text + n {
            self.forced.tell(&self.writer, sampler, row(seq, logits));
            if !seq.accept_draft(forced[n]) {
                break;
            }
            n += 1;
        }
        self.count_accepted(n);
        self.take_forced(sampler, n)
    }

    /// Asks for guesses how the text goes on, for a pass of at most `max_rows` rows.
    pub(crate) fn ask<'a>(
        &'a mut self,
        engine: &Engine,
        seq: &'a Sequence,
        max_rows: usize,
    ) -> Option<Asked<'a>> {
        let n_missing = self.n_missing(seq);
        let Text { tokens, drafts, .. } = &mut self.text;
        let room = engine.n_draftable(seq, tokens.len());
        let n_left = self.writer.n_left();
        let n = room
            .min(max_rows.saturating_sub(n_missing))
            .min(n_left.saturating_sub(self.forced.pieces.len() + 1));
        let speculator = self.speculator.as_mut()?;
        Some(Asked::new(speculator, seq, (tokens, drafts), n))
    }

    /// Takes note that a pass computed the rows; `logits` are those of them that nothing was told
    /// of yet.
    pub(crate) fn computed(
        &mut self,
        sampler: &mut Sampler,
        seq: &mut Sequence,
        logits: &[f32],
    ) -> Result<(), DecodeError> {
        self.n_passes += 1;
        seq.set_drafts(self.text.drafts.len());
        self.text.drafts.clear();
        for row in logits.chunks_exact(n_vocab(seq)) {
            self.forced.tell(&self.writer, sampler, row);
        }
        self.take_forced(sampler, self.forced.pieces.len())
    }

    /// Takes the first `n` forced pieces, which were computed, up to a stop string or a limit of the mask.
    fn take_forced(&mut self, sampler: &mut Sampler, n: usize) -> Result<(), DecodeError> {
        self.forced.n_told = self.forced.n_told.saturating_sub(n);
        for piece in self.forced.pieces.drain(..n) {
            if !self.writer.accept(sampler, piece.token)? {
                break;
            }
            self.writer.hold(piece)?;
            if self.writer.release() {
                break;
            }
        }
        Ok(())
    }

    /// Samples the token behind the text, or ends; `logits` as of [`Answer::next_rows`].
    pub(crate) fn consume(
        &mut self,
        sampler: &mut Sampler,
        seq: &mut Sequence,
        logits: &[f32],
    ) -> Result<(), DecodeError> {
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        let piece = match self.first.take() {
            Some(piece) => Some(piece),
            None => self
                .writer
                .sample(sampler, row(seq, logits), &self.text.tokens)?,
        };
        let Some(piece) = piece else { return Ok(()) };
        let token = piece.token;
        if self.writer.is_eog(token) {
            self.writer.end(StopReason::EndOfGeneration);
            return Ok(());
        }
        self.writer.hold(piece)?;
        self.text.tokens.push(token);
        let is_drafted = seq.next_draft() == Some(token);
        self.count_accepted(usize::from(is_drafted));
        // The last token of a stop string is not held.
        if !self.writer.release() && is_drafted {
            seq.accept_draft(token);
        }
        Ok(())
    }

    /// The tokens `gone` were dropped from the sequence; returns them.
    pub(crate) fn shifted(&mut self, gone: Range<usize>) -> impl Iterator<Item = u32> {
        if let Some(speculator) = &mut self.speculator {
            speculator.shifted(&self.text.tokens, &gone);
        }
        self.text.tokens.drain(gone)
    }

    /// Puts tokens that were dropped back in their place, for a sequence that is computed again
    /// from its beginning.
    pub(crate) fn unshifted(&mut self, at: usize, tokens: &[u32]) {
        if let Some(speculator) = &mut self.speculator {
            speculator.unshifted(tokens.len());
        }
        self.text.tokens.splice(at..at, tokens.iter().copied());
    }

    fn count_accepted(&mut self, n: usize) {
        if let Some(speculator) = &mut self.speculator {
            speculator.accepted(n);
        }
    }

    /// Forgets drafts, those to be computed and those that `seq` has and nothing accepted.
    pub(crate) fn drop_drafts(&mut self, seq: &mut Sequence) {
        if !self.text.drafts.is_empty() {
            self.text.drafts.clear();
            seq.kv.release();
        }
        seq.drop_drafts();
    }

    /// How it ended, once it has.
    pub(crate) fn finish(
        &self,
        (n_prompt, n_cached): (usize, CachedTokens),
        timings: Timings,
    ) -> Option<Finish> {
        let stats = self.speculator.as_ref().map(Speculator::stats);
        Some(Finish {
            reason: self.writer.reason()?,
            stop: self.writer.stopped_by,
            n_prompt,
            n_cached,
            n_generated: self.writer.tokens().len(),
            drafts: DraftStats {
                n_passes: self.n_passes,
                ..stats.unwrap_or_default()
            },
            timings,
        })
    }
}

fn n_vocab(seq: &Sequence) -> usize {
    seq.model().hparams().n_vocab.max(1)
}

/// The row behind the text's last token: the one before those of drafts.
fn row<'l>(seq: &Sequence, logits: &'l [f32]) -> &'l [f32] {
    let n_vocab = n_vocab(seq);
    let end = logits.len().saturating_sub(seq.n_drafts() * n_vocab);
    &logits[end.saturating_sub(n_vocab)..end]
}
