//! Reuse of the engine's prefix cache by a session.

use crate::engine::SessionError;
use crate::engine::options::CachedTokens;
use crate::session::session::Session;

impl Session {
    /// Begins an empty session with the part of `tokens` that the engine's prefix cache has, as
    /// [`Session::prefill`] does: for callers who append a prompt in pieces. Returns how many
    /// tokens these are; the next prompt continues after them.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn reuse(&mut self, tokens: &[u32]) -> Result<CachedTokens, SessionError> {
        self.engine.check(&self.seq, tokens)?;
        self.cached = self.seq.reuse(tokens)?;
        Ok(self.cached)
    }

    /// Tokens of the last prompt that came from the prefix cache, which is used if the session is
    /// empty.
    pub fn cached_tokens(&self) -> CachedTokens {
        self.cached
    }

    /// Releases the pages of this session; see
    /// [`Sequence::unload`](crate::engine::Sequence::unload). Its logits stay.
    pub fn unload(&mut self) {
        self.seq.unload();
    }
}
