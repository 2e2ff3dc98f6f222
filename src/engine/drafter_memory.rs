//! Memory of drafters, in the plan of the model that they draft for.

use crate::arch::Arch;
use crate::engine::SessionError;
use crate::engine::hidden_states::{KEPT_STATES, kept_inputs_bytes, most_rows};
use crate::engine::memory_plan::{MemoryPlan, PlanOptions};
use crate::engine::options::SessionOptions;
use crate::gguf::Gguf;
use crate::layers::draft::spec::DraftKind;
use crate::layers::hparams::Hparams;
use crate::model::Model;
use crate::model::drafter::DraftModel;
use std::sync::Arc;

/// Memory of a [`TrainedDrafter`](crate::decode::TrainedDrafter), or of a model that drafts, a
/// [`ModelDrafter`](crate::decode::ModelDrafter), for
/// [`PlanOptions::drafters`](crate::engine::PlanOptions).
#[derive(Clone, Debug)]
pub struct DrafterMemory(Of);

#[derive(Clone, Debug)]
enum Of {
    Trained(Arc<DraftModel>),
    /// A model with an engine of its own.
    Model(Arc<(Gguf, Hparams)>),
}

impl DrafterMemory {
    /// That of a file's drafter for `target`.
    ///
    /// # Errors
    /// If the file is invalid, or is a trained drafter of another model.
    pub fn open(gguf: Gguf, target: &Model) -> Result<DrafterMemory, SessionError> {
        let trained = DraftModel::open(gguf.clone(), target).map_err(SessionError::Drafter)?;
        if let Some(model) = trained {
            return Ok(DrafterMemory::of_trained(Arc::new(model)));
        }
        let h = Hparams::of(gguf.metadata(), gguf.tensors()).map_err(SessionError::Drafter)?;
        Ok(DrafterMemory(Of::Model(Arc::new((gguf, h)))))
    }

    pub(crate) fn of_trained(model: Arc<DraftModel>) -> DrafterMemory {
        DrafterMemory(Of::Trained(model))
    }

    /// Bytes that all texts share: its weights, and those of a model's vocabulary and buffers, of
    /// texts of at most `n_ctx` tokens.
    pub fn shared(&self, n_ctx: usize) -> u64 {
        match &self.0 {
            Of::Trained(model) => model.weight_bytes(),
            Of::Model(model) => of_model(model, n_ctx)
                .map_or(0, |plan| plan.weights + plan.vocabulary + plan.buffers),
        }
    }

    /// Most bytes that it takes for a text of at most `n_ctx` tokens, whose prompts are computed
    /// `n_batch` at a time: its keys and values, buffers of a trained one, and what that reads of
    /// the model.
    pub fn of_text(&self, n_ctx: usize, n_batch: usize) -> u64 {
        match &self.0 {
            Of::Trained(model) => {
                let n_read = match model.spec.kind {
                    // What the last layer leaves.
                    DraftKind::Assistant => 1,
                    _ => model.spec.inputs.len(),
                };
                kept_inputs_bytes(n_read * model.n_target, n_ctx, n_batch)
                    .saturating_add(own_of_text(model, n_ctx))
            }
            Of::Model(model) => of_model(model, n_ctx).map_or(0, |plan| plan.kv + plan.rest),
        }
    }

    /// Buffers of its passes that the model's engine has.
    pub(crate) fn buffers(&self, arch: Arch, n_threads: usize, n_ctx: usize) -> u64 {
        match &self.0 {
            Of::Trained(model) => model.pass_bytes(arch, n_threads, most_rows(n_ctx)),
            Of::Model(_) => 0,
        }
    }

    /// Most tokens of a prompt of which it reads what the last layer leaves.
    pub(crate) fn n_last(&self) -> usize {
        match &self.0 {
            Of::Trained(model)
                if model.spec.kind == DraftKind::Assistant
                    || model.spec.inputs.contains(&model.n_target_layer) =>
            {
                KEPT_STATES
            }
            _ => 0,
        }
    }
}

/// What a trained drafter takes for a text, without what sequences keep for it.
pub(crate) fn own_of_text(model: &DraftModel, n_ctx: usize) -> u64 {
    model.text_bytes(n_ctx, most_rows(n_ctx))
}

/// The plan of a model that drafts; none where it can have no such context, and drafts nothing.
fn of_model((gguf, h): &(Gguf, Hparams), n_ctx: usize) -> Option<MemoryPlan> {
    let session = SessionOptions {
        n_ctx: Some(n_ctx),
        ..Default::default()
    };
    MemoryPlan::of_header(gguf.header(), h, &PlanOptions::from(session)).ok()
}
