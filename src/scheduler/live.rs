//! A request that has not ended: its answer, its sequence, its place among the others.

use crate::clock::Timer;
use crate::compute::hook::TokenKind;
use crate::compute::pooling::Pooling;
use crate::decode::DecodeError;
use crate::decode::answer::Answer;
use crate::decode::output::{Timings, TokenText};
use crate::decode::speculative::Asked;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::{CacheMode, CachedTokens};
use crate::engine::sequence::Sequence;
use crate::kv::KvLayout;
use crate::layers::spans::Spans;
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

/// Why a request in a pass has a sequence.
const SEQ: &str = "who runs has a sequence";

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

/// Tokens that a request dropped, in their order.
#[derive(Default)]
pub(super) struct Dropped {
    /// Position of the first.
    pub(super) at: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) kinds: Vec<TokenKind>,
}

/// A request that has not ended.
pub(crate) struct Live {
    pub(super) id: RequestId,
    pub(super) rank: Rank,
    pub(super) priority: i32,
    /// Deadline on the clock of the schedule.
    pub(super) deadline: Option<Duration>,
    pub(super) sampler: Sampler,
    pub(super) answer: Answer,
    /// Images of the prompt.
    pub(super) spans: Spans,
    pub(super) adapters: Vec<(Arc<Adapter>, f32)>,
    pub(super) salt: Option<String>,
    /// How it uses the prefix cache, and the least number of tokens that are worth it.
    pub(super) cache: CacheMode,
    pub(super) min_cache_tokens: usize,
    pub(super) sender: Sender,
    pub(super) n_prompt: usize,
    /// Tokens at the prompt's end whose logits are requested and were not seen yet.
    pub(super) n_unseen: usize,
    /// Kinds of the tokens that were computed before it was preempted.
    pub(super) kinds: Vec<TokenKind>,
    /// What it dropped of a full context.
    pub(super) dropped: Dropped,
    /// How its keys and values are laid out.
    pub(super) layout: Arc<KvLayout>,
    /// Tokens of the prompt that came from the prefix cache.
    pub(super) n_cached: CachedTokens,
    /// Tokens that must be computed before the sequence decodes: the prompt, or its tokens when it
    /// was preempted.
    pub(super) n_read: usize,
    /// A position at which a pass over the prompt ends, so that others can begin there.
    pub(super) read_to: Option<usize>,
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
    pub(super) _place: Permit,
}

impl Live {
    pub(super) fn position(&self) -> usize {
        self.seq.as_ref().map_or(0, Sequence::position)
    }

    /// Kind of the token at a position.
    pub(super) fn kind(&self, position: usize) -> TokenKind {
        let of_place = if position < self.n_prompt && !self.has_begun {
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
                self.n_cached = seq.reuse(&self.answer.text.tokens[..self.n_prompt])?;
            }
        } else {
            let n = self.kinds.len().min(seq.n_ctx());
            seq.recall(&self.answer.text.tokens, &self.kinds[..n])?;
        }
        if let Some(speculator) = &self.answer.speculator {
            // Without memory for it, who reads it drafts nothing.
            let _ = speculator.keep(&mut seq);
            seq.expect(self.n_read);
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
        let (position, rows) = (self.position(), self.rows);
        let kind = self.kind(position);
        let seq = self.seq.as_mut().expect(SEQ);
        let text = &mut self.answer.text;
        if !text.drafts.is_empty() {
            // So that what windows leave in this pass is still there when it is rewound.
            seq.kv.hold(position);
        }
        Slot::new(seq, &text.pass(position)[..rows.n], kind).outputs_from(rows.first_output)
    }

    /// Asks for guesses how the text goes on.
    pub(super) fn ask(&mut self, engine: &Engine) -> Option<Asked<'_>> {
        self.answer.ask(engine, self.seq.as_ref()?, usize::MAX)
    }

    /// Takes the drafts that were not accepted out of the sequence.
    pub(super) fn drop_drafts(&mut self) {
        if let Some(seq) = &mut self.seq {
            self.answer.drop_drafts(seq);
        }
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
        if let Some(speculator) = &mut self.answer.speculator {
            speculator.release();
        }
        if let Some(mut seq) = self.seq.take() {
            self.timings.adapters += seq.adapter_time;
            self.pooling = seq.pooling.take();
        }
    }

    /// Sends the pieces that are ready.
    pub(super) fn hand_out(&mut self) {
        let writer = &mut self.answer.writer;
        if writer.is_ready() {
            self.sender.send(std::iter::from_fn(|| writer.pop()));
        }
    }

    /// Whether its reader lags behind. A request without text so far has nothing to read.
    pub(super) fn is_paused(&self) -> bool {
        self.has_begun && self.sender.is_paused()
    }

    /// Its rows in the next pass, at most `chunk` rows of tokens before it decodes; more if an image
    /// whose tokens see each other begins with the first of them.
    pub(super) fn next_rows(&self, chunk: usize) -> RequestRows {
        let position = self.position();
        if self.is_full() {
            return RequestRows::default();
        }
        if let Some(seq) = &self.seq
            && self.has_begun
            && position >= self.n_read
        {
            let (n, first_output) = self.answer.rows(seq);
            return RequestRows {
                n,
                is_decoding: true,
                first_output,
            };
        }
        let kind = self.kind(position);
        let end = self.read_to.filter(|&at| at > position);
        let most = self
            .n_read
            .min(self.seq.as_ref().map_or(0, Sequence::n_ctx));
        let n = (position..end.unwrap_or(most).min(most))
            .take(chunk)
            .take_while(|&position| self.kind(position) == kind)
            .count();
        // Images whose tokens see each other are not cut.
        let n = match n {
            0 => 0,
            n => self.spans.n_in_pass(position, self.n_read - position, n),
        };
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
    pub(super) fn follow(&mut self, logits: &[f32]) -> Result<(), DecodeError> {
        if logits.is_empty() {
            return Ok(());
        }
        if self.n_unseen > 0 {
            self.tell_prompt(logits);
            if self.n_unseen > 0 {
                return Ok(());
            }
        }
        let (answer, sampler) = (&mut self.answer, &mut self.sampler);
        let seq = self.seq.as_mut().expect(SEQ);
        if std::mem::replace(&mut self.has_begun, true) {
            answer.computed(sampler, seq, logits)?;
        } else {
            answer.next_rows(sampler, seq, logits)?;
        }
        while answer.writer.reason().is_none() && answer.n_missing(seq) == 0 {
            answer.consume(sampler, seq, logits)?;
            if answer.writer.reason().is_none() {
                answer.next_rows(sampler, seq, logits)?;
            }
        }
        Ok(())
    }

    /// Tells the tokens of the prompt behind those of `logits`, and the first.
    fn tell_prompt(&mut self, logits: &[f32]) {
        let (end, n_prompt) = (self.position(), self.n_prompt);
        let seq = self.seq.as_ref().expect(SEQ);
        let rows = logits.chunks_exact(seq.model().hparams().n_vocab);
        let mut pieces = Vec::with_capacity(rows.len() + 1);
        if self.n_unseen == n_prompt {
            pieces.push(TokenText::new(self.answer.text.tokens[0]));
        }
        let behind = &self.answer.text.tokens[end + 1 - rows.len()..n_prompt];
        for (&token, logits) in behind.iter().zip(rows) {
            let mut piece = TokenText::new(token);
            let writer = &self.answer.writer;
            writer.tell(&mut piece, &mut self.sampler, logits);
            pieces.push(piece);
        }
        self.n_unseen = n_prompt - end;
        self.sender.send(pieces.into_iter());
    }
}

/// One of [`ScheduleOptions::max_requests`], until it is dropped.
pub(super) struct Permit(pub(super) Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
