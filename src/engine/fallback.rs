//! The CPU in place of a device that has failed.

use crate::compute::probe::NoCallback;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::engine::sequence::Sequence;
use crate::gpu::GpuError;
use crate::layers::outputs::{Outputs, Wanted};

/// Most tokens that are recomputed at a time.
const MISSING_BATCH: usize = 512;

impl Engine {
    /// Computes again what a sequence's cache has lost; nobody sees the rows.
    pub(crate) fn compute_missing(
        &self,
        seq: &mut Sequence,
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<(), SessionError> {
        self.leave_device(seq)?;
        match self.compute_missing_once(seq, outputs, cancel) {
            Err(error) if self.falls_back(&error) => {
                self.leave_device(seq)?;
                self.compute_missing_once(seq, outputs, cancel)
            }
            outcome => outcome,
        }
    }

    /// [`Engine::compute_missing`] on the device that there is.
    fn compute_missing_once(
        &self,
        seq: &mut Sequence,
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<(), SessionError> {
        if seq.n_missing() > 0 {
            seq.reload();
        }
        // Tokens that see each other are computed together.
        while let Some(start) = seq.spans.uncut_start(seq.kv.len()) {
            seq.kv.truncate(start);
        }
        while seq.n_missing() > 0 {
            let (tokens, kind) = seq.missing();
            let mut rest = &tokens[..];
            while !rest.is_empty() {
                let n = seq.spans.n_in_pass(seq.kv.len(), rest.len(), MISSING_BATCH);
                let tokens;
                (tokens, rest) = rest.split_at(n);
                let mut slot = [Slot::new(seq, tokens, kind).outputs_from(tokens.len())];
                self.compute(
                    &mut slot,
                    outputs,
                    Wanted::Logits,
                    cancel,
                    &mut NoCallback,
                    None,
                )?;
                let begin = seq.kv.len();
                let checkpoint = seq.spans.last_end(begin..begin + tokens.len());
                seq.kv.commit_at(tokens.len(), checkpoint);
            }
        }
        Ok(())
    }

    /// Lets the CPU go on after `error` if it is a failure of the device, and that is allowed.
    pub(super) fn falls_back(&self, error: &SessionError) -> bool {
        let Some(runner) = self.runner().filter(|_| self.has_cpu_fallback()) else {
            return false;
        };
        let failure = match error {
            SessionError::Gpu(failure) => failure.clone(),
            SessionError::OutOfMemory { bytes, .. } if !runner.shares_memory() => {
                GpuError::OutOfMemory {
                    bytes: usize::try_from(*bytes).unwrap_or(usize::MAX),
                }
            }
            _ => return false,
        };
        self.fail(failure);
        self.pool().lose_device();
        true
    }

    /// Lets the CPU compute a sequence whose keys and values a device held that has failed: what
    /// it has lost is missing from then on.
    fn leave_device(&self, seq: &mut Sequence) -> Result<(), SessionError> {
        if seq.kv.is_lost() {
            seq.kv.restart(self.layout(seq.kv.policy())?);
        }
        if self.gpu_failure().is_some() {
            seq.device = self.model().arch().name().to_owned();
        }
        Ok(())
    }
}
