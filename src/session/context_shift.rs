//! Context shift: a session whose context is full goes on without half of what lies behind its
//! first tokens.
//!
//! Whole pages go, and the keys behind them are turned to their new positions, in 32 bits, and
//! rounded once more. Keys and values of deeper layers still are those of tokens that saw what was
//! dropped: what follows differs from what computing the rest anew would give, and depends on when
//! the context was full. It is the one operation of which that is true, so nothing of a shifted
//! session enters the prefix cache or a file.

use crate::arch::KV_BLOCK;
use crate::engine::SessionError;
use crate::kv::KvError;
use crate::session::session::Session;
use crate::session::state::SessionCache;

impl SessionCache<'_> {
    /// Drops half of the whole pages behind the first
    /// [`SessionOptions::context_shift`](crate::engine::SessionOptions::context_shift) tokens
    /// (rounded up to a page), and turns the keys behind them to their new positions. Returns
    /// how many tokens it dropped, which are the first ones behind those that stay; 0 if there
    /// is no whole page to drop. A [`Generation`](crate::decode::Generation) does so when the
    /// context is full.
    ///
    /// # Errors
    /// [`SessionError::NoShift`] if the session was not made for it, or has a hook (a learner),
    /// which sees every token; if the call is cancelled; if there is no memory for pages that
    /// it shares. Nothing has changed then. If a key does not fit its precision any more
    /// ([`KvError::Overflow`]), the session holds the kept tokens alone.
    pub fn shift(&mut self) -> Result<usize, SessionError> {
        let Some(keep) = self.0.seq.context_shift else {
            return Err(SessionError::NoShift {
                what: "a session that was made without SessionOptions::context_shift",
            });
        };
        if self.0.seq.hook.is_some() {
            return Err(SessionError::NoShift {
                what: "a learner, which sees every token",
            });
        }
        if !self.0.seq.spans.is_empty() {
            return Err(SessionError::NoShift {
                what: "a text that has images",
            });
        }
        self.0.catch_up()?;
        let Session {
            engine,
            seq,
            outputs,
            cancel,
            ..
        } = &mut *self.0;
        engine.compute_missing(seq, outputs, cancel)?;
        let first = keep.div_ceil(KV_BLOCK);
        let n_pages = (seq.kv.len() / KV_BLOCK).saturating_sub(first).div_ceil(2);
        if n_pages == 0 {
            return Ok(0);
        }
        let (model, rope) = (engine.model().clone(), seq.rope.clone());
        let arch = model.arch();
        let [cos, sin] = rope.back(arch, n_pages * KV_BLOCK);
        let stored = model.hparams().attention().filter(|attn| !attn.shares_kv);
        let turns: Vec<_> = stored
            .map(|attn| attn.rope.map(|id| rope.rotation(arch, id, 1, &cos, &sin)))
            .collect();
        let turn = |layer: usize, key: &mut [f32]| {
            turns[layer]
                .iter()
                .for_each(|rotation| rotation.apply(0, key))
        };
        let gone = first..first + n_pages;
        let outcome = engine.enter(cancel, |threads, _| {
            seq.kv.shift(threads, arch, gone.clone(), &turn)
        })?;
        match outcome {
            Ok(()) => {
                seq.drop_tokens(gone.start * KV_BLOCK..gone.end * KV_BLOCK);
                Ok(n_pages * KV_BLOCK)
            }
            Err(error) => {
                if matches!(error, KvError::Overflow { .. }) {
                    seq.truncate(gone.start * KV_BLOCK);
                    self.0.forget_outputs();
                }
                Err(error.into())
            }
        }
    }
}
