//! Prompts that begin alike are computed once.
//!
//! A request whose prompt begins as one that is being read waits in the queue until that one is
//! read so far, and then begins with its pages, by way of the prefix cache. If that one ends
//! before, its pages are in the cache as far as it came. Requests wait only for those before them
//! in rank, so that the first always advances.

use crate::arch::KV_BLOCK;
use crate::engine::options::CacheMode;
use crate::scheduler::live::Live;
use crate::scheduler::schedule::Schedule;
use std::sync::Arc;

impl Schedule {
    /// The first request of the queue that can be admitted now.
    pub(super) fn next_in_queue(&mut self) -> Option<usize> {
        // There is no place for more.
        let n = self.queue.len().min(self.terms.options.n_parallel);
        (0..n).find(|&i| !self.queue[i].is_paused() && !self.waits_for_prompt(i))
    }

    /// Whether request `i` of the queue waits for a prompt that is being read.
    fn waits_for_prompt(&mut self, i: usize) -> bool {
        let live = &self.queue[i];
        let reading = self
            .running
            .iter_mut()
            .filter(|other| !other.has_begun && other.rank < live.rank)
            .map(|other| (shared(live, other), other));
        let Some((n, other)) = longest(reading) else {
            return false;
        };
        // Windows and recurrent layers can part only where a pass ended.
        let border = other.spans.checkpoint(0..n);
        if live.layout.has_checkpoints() && border > other.position() {
            other.read_to = Some(other.read_to.map_or(border, |at| at.min(border)));
        }
        n > other.position() || other.is_reading
    }

    /// Leaves to the prefix cache what running requests have computed of the prompt of request `i`
    /// of the queue.
    pub(super) fn share_prompt(&self, i: usize) {
        let live = &self.queue[i];
        let computed = self
            .running
            .iter()
            .filter(|other| !other.is_reading)
            .map(|other| (shared(live, other).min(other.position()), other));
        if let Some((n, other)) = longest(computed)
            && let Some(seq) = &other.seq
        {
            // Without memory for it, the prompt is computed again.
            let _ = seq.share(n);
        }
    }
}

/// The longest of so many tokens, with whose they are.
fn longest<T>(all: impl Iterator<Item = (usize, T)>) -> Option<(usize, T)> {
    all.filter(|(n, _)| *n > 0).max_by_key(|(n, _)| *n)
}

/// Number of tokens of its prompt that a request can take from `other`: those at the beginning that
/// both have, but for its last, whose logits are computed; 0 where it is not worth it.
fn shared(live: &Live, other: &Live) -> usize {
    let same_adapters = live.adapters.len() == other.adapters.len()
        && live
            .adapters
            .iter()
            .zip(&other.adapters)
            .all(|((a, scale), (b, other))| Arc::ptr_eq(a, b) && scale == other);
    let may_share = live.cache != CacheMode::Off
        && other.cache == CacheMode::On
        // What was preempted has its own pages in the cache.
        && live.kinds.is_empty()
        && other.dropped.tokens.is_empty()
        && live.salt == other.salt
        && live.layout.policy() == other.layout.policy()
        && same_adapters;
    if !may_share {
        return 0;
    }
    let own = &live.answer.text.tokens[..live.n_prompt.saturating_sub(1)];
    let n = own
        .iter()
        .zip(&other.answer.text.tokens[..other.n_prompt])
        .enumerate()
        .take_while(|&(i, (a, b))| a == b && live.spans.key(i) == other.spans.key(i))
        .count();
    // Images are shared whole.
    let n = live.spans.whole_until(n);
    if n >= live
        .min_cache_tokens
        .max(other.min_cache_tokens)
        .max(KV_BLOCK)
    {
        n
    } else {
        0
    }
}
