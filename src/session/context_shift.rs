//! Context shift of a session.

use crate::engine::SessionError;
use crate::session::session::Session;
use crate::session::state::SessionCache;
use std::ops::Range;

impl SessionCache<'_> {
    /// Drops half of the whole pages behind the first
    /// [`SessionOptions::context_shift`](crate::SessionOptions::context_shift) tokens
    /// (rounded up to a page), and turns the keys behind them to their new positions. Returns
    /// how many tokens it dropped, which are the first ones behind those that stay; 0 if there
    /// is no whole page to drop. A [`Generation`](crate::Generation) does so when the
    /// context is full.
    ///
    /// # Errors
    /// [`SessionError::NoShift`] if the session was not made for it, or has a hook (a learner),
    /// which sees every token, or images; if the call is cancelled; if there is no memory for
    /// pages that it shares. Nothing has changed then. If a key does not fit its precision any
    /// more ([`KvError::Overflow`](crate::kv::KvError::Overflow)), the session holds the kept
    /// tokens alone.
    pub fn shift(&mut self) -> Result<usize, SessionError> {
        Ok(self.0.shift_tokens()?.len())
    }
}

impl Session {
    /// [`SessionCache::shift`]; returns the positions of the tokens that it dropped.
    pub(crate) fn shift_tokens(&mut self) -> Result<Range<usize>, SessionError> {
        self.catch_up()?;
        let n_before = self.position();
        let Session {
            engine,
            seq,
            outputs,
            cancel,
            ..
        } = self;
        let outcome = engine.shift(seq, outputs, cancel);
        if outcome.is_err() && self.position() < n_before {
            self.forget_outputs();
        }
        outcome
    }
}
