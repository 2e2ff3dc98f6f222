//! Reuse of the engine's prefix cache by a session.

use crate::compute::hook::Cut;
use crate::engine::SessionError;
use crate::engine::options::CachedTokens;
use crate::session::state::SessionCache;

impl SessionCache<'_> {
    /// Begins an empty session with the part of `tokens` that the engine's prefix cache has, as
    /// [`Session::prefill`](crate::Session::prefill) does: for callers who append a prompt in pieces. Returns how many
    /// tokens these are; the next prompt continues after them.
    ///
    /// # Errors
    /// As [`Session::prefill`](crate::Session::prefill).
    pub fn reuse(&mut self, tokens: &[u32]) -> Result<CachedTokens, SessionError> {
        self.0.engine.check(&self.0.seq, tokens)?;
        self.0.seq.reuse(tokens)
    }

    /// Releases the pages of this session; see
    /// [`Sequence::unload`](crate::engine::Sequence::unload). Its logits stay.
    pub fn unload(&mut self) {
        self.0.seq.unload();
    }

    /// Keeps the longest common prefix with `tokens` and drops the rest; returns its length. At
    /// least the last of `tokens` is not kept, so that there is something to compute: a
    /// conversation that is rendered again for each turn continues with
    /// `generate(&tokens[kept..], …)`.
    pub fn keep(&mut self, tokens: &[u32]) -> usize {
        let same = self
            .0
            .tokens()
            .iter()
            .zip(tokens)
            .take_while(|(a, b)| a == b)
            .count();
        // Equal placeholders may stand for other images.
        let same = same.min(self.0.seq.spans.start().unwrap_or(same));
        let kept = same.min(tokens.len().saturating_sub(1));
        self.0.cut(kept, Cut::Rewound);
        kept
    }
}
