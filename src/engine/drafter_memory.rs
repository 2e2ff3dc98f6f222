//! Memory of drafters that were trained for a model, in its plan.

use crate::arch::Arch;
use crate::engine::SessionError;
use crate::engine::hidden_states::{KEPT_STATES, kept_inputs_bytes, most_rows};
use crate::gguf::Gguf;
use crate::layers::draft::spec::DraftKind;
use crate::model::Model;
use crate::model::drafter::DraftModel;
use std::sync::Arc;

/// Memory of a [`TrainedDrafter`](crate::decode::TrainedDrafter), for
/// [`PlanOptions::drafters`](crate::engine::PlanOptions).
#[derive(Clone, Debug)]
pub struct DrafterMemory(pub(crate) Arc<DraftModel>);

impl DrafterMemory {
    /// That of a file's drafter for `target`; none if the file holds a model of another kind.
    ///
    /// # Errors
    /// If the file is invalid or was not made for this model.
    pub fn open(gguf: Gguf, target: &Model) -> Result<Option<DrafterMemory>, SessionError> {
        let model = DraftModel::open(gguf, target).map_err(SessionError::Drafter)?;
        Ok(model.map(|model| DrafterMemory(Arc::new(model))))
    }

    /// Bytes of its weights, which all texts share.
    pub fn weights(&self) -> u64 {
        self.0.weight_bytes()
    }

    /// Most bytes that it takes for a text of at most `n_ctx` tokens, whose prompts are computed
    /// `n_batch` at a time: its keys and values, its buffers, and what it reads of the model.
    pub fn of_text(&self, n_ctx: usize, n_batch: usize) -> u64 {
        let n_read = match self.0.spec.kind {
            // What the last layer leaves.
            DraftKind::Assistant => 1,
            _ => self.0.spec.inputs.len(),
        };
        kept_inputs_bytes(n_read * self.0.n_target, n_ctx, n_batch)
            .saturating_add(self.own_of_text(n_ctx))
    }

    /// The same without what sequences keep for it.
    pub(crate) fn own_of_text(&self, n_ctx: usize) -> u64 {
        self.0.text_bytes(n_ctx, most_rows(n_ctx))
    }

    /// Buffers of its passes.
    pub(crate) fn buffers(&self, arch: Arch, n_threads: usize, n_ctx: usize) -> u64 {
        self.0.pass_bytes(arch, n_threads, most_rows(n_ctx))
    }

    /// Most tokens of a prompt of which it reads what the last layer leaves.
    pub(crate) fn n_last(&self) -> usize {
        let of_states = self.0.spec.kind == DraftKind::Assistant;
        if of_states || self.0.spec.inputs.contains(&self.0.n_target_layer) {
            KEPT_STATES
        } else {
            0
        }
    }
}
