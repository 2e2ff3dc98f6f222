//! What a session holds in memory: read as one thing, and changed as one.

use crate::session::session::Session;

/// What a session holds in memory (tokens, keys and values, logits): saved, and counted.
#[derive(Debug)]
pub struct SessionState<'s>(pub(super) &'s Session);

/// What a session holds in memory, changed as a whole: loaded, taken from the prefix cache,
/// kept as far as it fits another text, released, shifted.
#[derive(Debug)]
pub struct SessionCache<'s>(pub(super) &'s mut Session);

impl Session {
    /// What it holds in memory, to be saved or counted.
    pub fn state(&self) -> SessionState<'_> {
        SessionState(self)
    }

    /// What it holds in memory, to be loaded, reused, released or shifted.
    pub fn cache(&mut self) -> SessionCache<'_> {
        SessionCache(self)
    }
}
