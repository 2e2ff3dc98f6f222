//! Context shift: a sequence whose context is full goes on without half of what lies behind its
//! first tokens.
//!
//! Whole pages go, and the keys behind them are turned to their new positions, in 32 bits, and
//! rounded once more. Keys and values of deeper layers still are those of tokens that saw what was
//! dropped: what follows differs from what computing the rest anew would give, and depends on when
//! the context was full. It is the one operation of which that is true, so nothing of a shifted
//! sequence enters the prefix cache or a file.

use crate::arch::KV_BLOCK;
use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::engine::sequence::Sequence;
use crate::kv::KvError;
use crate::layers::outputs::Outputs;
use std::ops::Range;

impl Engine {
    /// Drops half of the whole pages behind the first `keep` tokens (rounded up to a page) of a
    /// sequence, and turns the keys behind them to their new positions. Returns the positions of
    /// the tokens that it dropped; none if there is no whole page to drop.
    ///
    /// # Errors
    /// [`SessionError::NoShift`] if the sequence was not made for it, or has a hook or images; if
    /// the call is cancelled; if there is no memory for pages that it shares. Nothing has changed
    /// then. If a key does not fit its precision any more ([`KvError::Overflow`]), the sequence
    /// holds the kept tokens alone.
    pub(crate) fn shift(
        &self,
        seq: &mut Sequence,
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<Range<usize>, SessionError> {
        let no_shift = |what| Err(SessionError::NoShift { what });
        let Some(keep) = seq.context_shift else {
            return no_shift("a session that was made without SessionOptions::context_shift");
        };
        if seq.hook.is_some() {
            return no_shift("a learner, which sees every token");
        }
        if !seq.spans.is_empty() {
            return no_shift("a text that has images");
        }
        self.compute_missing(seq, outputs, cancel)?;
        let first = keep.div_ceil(KV_BLOCK);
        let n_pages = (seq.kv.len() / KV_BLOCK).saturating_sub(first).div_ceil(2);
        let gone = first * KV_BLOCK..(first + n_pages) * KV_BLOCK;
        if n_pages == 0 {
            return Ok(gone);
        }
        let (model, rope) = (self.model().clone(), seq.rope.clone());
        let arch = model.arch();
        let [cos, sin] = rope.back(arch, gone.len());
        let stored = model.hparams().attention().filter(|attn| !attn.shares_kv);
        let turns: Vec<_> = stored
            .map(|attn| attn.rope.map(|id| rope.rotation(arch, id, 1, &cos, &sin)))
            .collect();
        let turn = |layer: usize, key: &mut [f32]| {
            turns[layer]
                .iter()
                .for_each(|rotation| rotation.apply(0, key))
        };
        let outcome = self.enter(cancel, |threads, _| {
            let pages = first..first + n_pages;
            seq.kv.shift(threads, arch, pages, &turn)
        })?;
        match outcome {
            Ok(()) => {
                seq.drop_tokens(gone.clone());
                Ok(gone)
            }
            Err(error) => {
                if matches!(error, KvError::Overflow { .. }) {
                    seq.truncate(gone.start);
                }
                Err(error.into())
            }
        }
    }
}
