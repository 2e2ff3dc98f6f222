//! The answer of a request that was admitted.

use crate::clock::Timer;
use crate::compute::hook::TokenKind;
use crate::compute::pooling::Pooling;
use crate::decode::DecodeError;
use crate::decode::output::{Piece, PieceWriter, StopReason, Timings};
use crate::decode::speculative::Speculator;
use crate::decode::speculative::passes::Asked;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::CachedTokens;
use crate::engine::sequence::Sequence;
use crate::kv::KvLayout;
use crate::lora::Adapter;
use crate::sample::Sampler;
use crate::scheduler::request::RequestId;
use crate::scheduler::stream::Sender;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Order of requests, best first: the pass in which a request came, minus [`AGING`] passes per
/// priority; then its number. As it never changes, the first request always advances, and every
/// request becomes the first eventually.
pub(super) type Rank = (i64, u64);

/// Rows of a request in a pass.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestRows {
    pub(super) n: usize,
    /// Whether the sequence decodes, rather than computing its existing tokens for the first time
    /// or again.
    pub(super) is_decoding: bool,
    /// First row whose logits are requested.
    pub(super) first_output: usize,
}

/// Tokens that a pass computes behind those of the text.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    pub(super) tokens: Vec<u32>,
    /// Position of the first.
    pub(super) at: usize,
    /// How many of them were sampled, too.
    pub(super) n_accepted: usize,
    /// All tokens of the pass.
    pub(super) pass: Vec<u32>,
}

/// A request that has not ended.
pub(crate) struct Live {
    pub(super) id: RequestId,
    pub(super) rank: Rank,
    pub(super) priority: i32,
    /// Deadline on the clock of the schedule.
    pub(super) deadline: Option<Duration>,
    pub(super) sampler: Sampler,
    pub(super) writer: PieceWriter,
    pub(super) adapters: Vec<(Arc<Adapter>, f32)>,
    pub(super) salt: Option<String>,
    pub(super) sender: Sender,
    /// The prompt and the generated tokens; the last ones may not be computed yet.
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    /// Tokens at the prompt's end whose logits are requested and were not seen yet.
    pub(super) n_unseen: usize,
    /// Kinds of the tokens that were computed before it was preempted.
    pub(super) kinds: Vec<TokenKind>,
    /// How its keys and values are laid out.
    pub(super) layout: Arc<KvLayout>,
    /// Tokens of the prompt that came from the prefix cache.
    pub(super) n_cached: CachedTokens,
    /// Tokens that must be computed before the sequence decodes: the prompt, or its tokens when it
    /// was preempted.
    pub(super) n_read: usize,
    /// A position at which a pass over the prompt ends, so that others can begin there.
    pub(super) read_to: Option<usize>,
    /// Pieces of the last tokens, which the sampler's mask forced and the next pass computes;
    /// without text yet.
    pub(super) forced: Vec<Piece>,
    /// How many of them have their log-probabilities.
    pub(super) n_told: usize,
    pub(super) speculator: Option<Speculator>,
    /// Drafts of the next pass.
    pub(super) drafts: Drafts,
    /// Passes in which it decoded.
    pub(super) n_passes: usize,
    /// Whether the logits behind the prompt were seen.
    pub(super) has_begun: bool,
    /// Keys and values; `None` while it waits.
    pub(super) seq: Option<Sequence>,
    /// What a sequence that was released had pooled.
    pub(super) pooling: Option<Pooling>,
    /// Its rows in the next pass.
    pub(super) rows: RequestRows,
    /// Whether some layers of these rows, or parts of one, are computed.
    pub(super) is_reading: bool,
    pub(super) since: Timer,
    pub(super) timings: Timings,
    pub(super) _place: Place,
}

impl Live {
    pub(super) fn position(&self) -> usize {
        self.seq.as_ref().map_or(0, Sequence::position)
    }

    /// Kind of the token at a position.
    pub(super) fn kind(&self, position: usize) -> TokenKind {
        let of_place = if position < self.n_prompt {
            TokenKind::Prompt
        } else {
            TokenKind::Generated
        };
        self.kinds.get(position).copied().unwrap_or(of_place)
    }

    /// Sets its sequence, which begins with what the prefix cache has.
    pub(super) fn begin(&mut self, mut seq: Sequence) -> Result<(), SessionError> {
        if self.kinds.is_empty() {
            // Nothing is known of the logits of tokens that come from the cache.
            if self.n_unseen == 0 {
                self.n_cached = seq.reuse(&self.tokens[..self.n_prompt])?;
            }
        } else {
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
    pub(super) fn slot(&mut self) -> Slot<'_> {
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
    pub(super) fn ask(&mut self, engine: &Engine) -> Option<Asked<'_>> {
        let (seq, speculator) = (self.seq.as_ref()?, self.speculator.as_mut()?);
        let room = engine.n_draftable(seq, self.tokens.len());
        let n = room.min(self.writer.n_left().saturating_sub(self.forced.len() + 1));
        Some(Asked::new(speculator, seq, (&self.tokens, &[]), n))
    }

    /// Computes the first `n` guesses in the next pass.
    pub(super) fn take_drafts(&mut self, n: usize) {
        if let Some(speculator) = self.speculator.as_mut().filter(|_| n > 0) {
            self.drafts.tokens.extend(speculator.take(n));
            self.drafts.at = self.tokens.len();
        }
    }

    /// Takes the drafts that were not accepted out of the sequence.
    pub(super) fn drop_drafts(&mut self) {
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
    pub(super) fn stop_reading(&mut self) {
        if let (true, Some(seq)) = (std::mem::take(&mut self.is_reading), &mut self.seq) {
            seq.kv.abandon();
        }
        self.rows = RequestRows::default();
    }

    /// Releases its pages.
    pub(super) fn release_sequence(&mut self) {
        self.stop_reading();
        if let Some(mut seq) = self.seq.take() {
            self.timings.adapters += seq.adapter_time;
            self.pooling = seq.pooling.take();
        }
    }

    /// Sends the pieces that are ready.
    pub(super) fn hand_out(&mut self) {
        if self.writer.is_ready() {
            self.sender.send(std::iter::from_fn(|| self.writer.pop()));
        }
    }

    /// Whether its reader lags behind. A request without text so far has nothing to read.
    pub(super) fn is_paused(&self) -> bool {
        self.has_begun && self.sender.is_paused()
    }

    /// Its rows in the next pass, at most `chunk` rows of tokens before it decodes.
    pub(super) fn next_rows(&self, chunk: usize) -> RequestRows {
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
        let end = self.read_to.filter(|&at| at > position);
        let n = (position..end.unwrap_or(self.n_read).min(self.n_read))
            .take(chunk)
            .take_while(|&position| self.kind(position) == kind)
            .count();
        let is_last = !self.has_begun && position + n == self.n_prompt;
        let n_unwanted = n - usize::from(is_last && n > 0);
        // What was preempted is computed again, and not told again.
        let n_seen = match self.n_unseen {
            0 => n_unwanted,
            n_unseen => (self.n_prompt - n_unseen).saturating_sub(position),
        };
        RequestRows {
            n,
            is_decoding: false,
            first_output: n_unwanted.min(n_seen),
        }
    }

    /// Goes on after a pass that computed its rows; `logits` are those it asked for, `(n,
    /// n_vocab)`.
    pub(super) fn follow(&mut self, logits: &[f32], n_vocab: usize) -> Result<(), DecodeError> {
        let mut rows = logits.chunks_exact(n_vocab.max(1));
        let Some(last) = logits.rchunks_exact(n_vocab.max(1)).next() else {
            return Ok(());
        };
        if self.n_unseen > 0 {
            self.tell_prompt(logits, n_vocab);
            if self.n_unseen > 0 {
                return Ok(());
            }
        }
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

    /// Tells the tokens of the prompt behind those of `logits`, and the first.
    fn tell_prompt(&mut self, logits: &[f32], n_vocab: usize) {
        let (end, n_prompt) = (self.position(), self.n_prompt);
        let rows = logits.chunks_exact(n_vocab);
        let mut pieces = Vec::with_capacity(rows.len() + 1);
        if self.n_unseen == n_prompt {
            pieces.push(Piece::new(self.tokens[0]));
        }
        let behind = &self.tokens[end + 1 - rows.len()..n_prompt];
        for (&token, logits) in behind.iter().zip(rows) {
            let mut piece = Piece::new(token);
            self.writer.tell(&mut piece, &mut self.sampler, logits);
            pieces.push(piece);
        }
        self.n_unseen = n_prompt - end;
        self.sender.send(pieces.into_iter());
    }

    /// Samples a token from the first row of `logits`, and goes on as long as it and what the mask
    /// forces behind it are the drafts that the next rows belong to.
    pub(super) fn verify(&mut self, logits: &[f32], n_vocab: usize) -> Result<(), DecodeError> {
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
    pub(super) fn sample(&mut self, logits: &[f32]) -> Result<(), DecodeError> {
        if self.writer.n_left() == 0 {
            self.writer.end(StopReason::MaxTokens);
            return Ok(());
        }
        let sampled = self
            .writer
            .sample(&mut self.sampler, logits, &self.tokens)?;
        let Some(piece) = sampled else {
            return Ok(());
        };
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
    pub(super) fn go_on(&mut self, forced: Vec<u32>) -> Result<(), DecodeError> {
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

/// One of [`ScheduleOptions::max_requests`], until it is dropped.
pub(super) struct Place(pub(super) Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
