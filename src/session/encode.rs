//! Texts that the encoder of a session's model reads.

use crate::engine::{CacheMode, SessionError};
use crate::session::Session;
use std::sync::Arc;

impl Session {
    /// Reads a text with the model's encoder: what the session holds from now on, of which nothing
    /// is left, goes on with it. The session's own text begins with
    /// [`EncoderSpec::start`](crate::model::EncoderSpec::start). Its keys and values are kept out of
    /// the engine's prefix cache, which knows tokens alone.
    ///
    /// # Errors
    /// [`SessionError::NoEncoder`]; if there are no tokens, more than the model has positions, or one
    /// outside the vocabulary; if the call is cancelled, or there is not enough memory. The session
    /// is then unchanged.
    pub fn encode(&mut self, tokens: &[u32]) -> Result<(), SessionError> {
        let memory = self.engine.memory_of(tokens, &self.cancel)?;
        self.seq.prefix.cache = CacheMode::Off;
        self.clear();
        self.seq.memory = Some(Arc::new(memory));
        Ok(())
    }
}
