//! Requests whose context is full go on without a part of it, where the schedule's
//! [`SessionOptions::context_shift`](crate::SessionOptions::context_shift) says so.
//!
//! What is left has keys and values of tokens that saw what was dropped. So a request that is
//! preempted afterwards computes all of its tokens again, and drops again what it dropped when the
//! context was full, as often as that was.

use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::engine::sequence::Sequence;
use crate::kv::KvError;
use crate::layers::outputs::Outputs;
use crate::scheduler::ScheduleError;
use crate::scheduler::live::{Dropped, Live};
use crate::scheduler::schedule::Schedule;

impl Schedule {
    /// Shifts the contexts that are full. One for which there are no pages waits for those before
    /// it.
    pub(super) fn shift(&mut self) {
        let mut i = 0;
        while let Some(live) = self.running.get_mut(i) {
            if !live.is_full() || live.is_paused() {
                i += 1;
                continue;
            }
            let rank = live.rank;
            let outcome = live.shift(&self.terms.engine, &mut self.outputs, &self.cancel);
            let error = match outcome {
                Ok(()) if live.answer.writer.reason().is_none() => {
                    i += 1;
                    continue;
                }
                outcome => outcome,
            };
            if let Err(ScheduleError::Session(SessionError::Kv(KvError::PoolFull { .. }))) = error {
                if let Some(victim) = self.victim(|other| other.rank > rank) {
                    self.preempt(victim);
                    i -= usize::from(victim < i);
                    continue;
                }
                if self.running.len() > 1 {
                    i += 1;
                    continue;
                }
            }
            let live = self.running.remove(i);
            self.end(live, error);
        }
    }
}

impl Live {
    /// Whether there is no room for its next token. Without context shift its answer ends then.
    pub(super) fn is_full(&self) -> bool {
        let is_full =
            |seq: &Sequence| seq.position() == seq.n_ctx() && self.answer.n_missing(seq) > 0;
        self.seq.as_ref().is_some_and(is_full)
    }

    /// Drops a part of its full context.
    fn shift(
        &mut self,
        engine: &Engine,
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<(), ScheduleError> {
        let Some(seq) = &mut self.seq else {
            return Ok(());
        };
        // One that was preempted has more, and what its mask forces there is known.
        let is_first_time = self.answer.n_missing(seq) == 1;
        let kinds = seq.kinds().to_vec();
        let gone = engine.shift(seq, outputs, cancel)?;
        self.dropped.at = gone.start;
        self.dropped
            .tokens
            .extend(self.answer.shifted(gone.clone()));
        self.dropped.kinds.extend_from_slice(&kinds[gone.clone()]);
        let n_known = self.kinds.len();
        self.kinds
            .drain(gone.start.min(n_known)..gone.end.min(n_known));
        self.n_read = self.n_read.saturating_sub(gone.len());
        if is_first_time {
            self.answer.next_rows(&mut self.sampler, seq, &[])?;
        }
        Ok(())
    }

    /// Takes back what it dropped, for a sequence that is computed again.
    pub(super) fn unshift(&mut self) {
        let Dropped { at, tokens, kinds } = std::mem::take(&mut self.dropped);
        if tokens.is_empty() {
            return;
        }
        self.answer.unshifted(at, &tokens);
        self.kinds.splice(at..at, kinds);
        self.n_read += tokens.len();
        if let Some(pooling) = &mut self.pooling {
            pooling.unshift(tokens.len());
        }
    }
}
