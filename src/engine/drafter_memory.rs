//! Memory of drafters, in the plan of the model that they draft for.

use crate::arch::Arch;
use crate::engine::hidden_states::{KEPT_STATES, kept_inputs_bytes, most_rows};
use crate::gguf::Gguf;
use crate::layers::draft::spec::DraftKind;
use crate::layers::hparams::Hparams;
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
    Model(Arc<SmallModel>),
}

/// A model that drafts.
#[derive(Clone, Debug)]
pub(crate) struct SmallModel {
    pub(crate) gguf: Gguf,
    pub(crate) h: Hparams,
    /// Bytes of its vocabulary, for which the tables of a tokenizer are made.
    pub(crate) vocabulary: u64,
}

impl DrafterMemory {
    pub(crate) fn of_model(model: SmallModel) -> DrafterMemory {
        DrafterMemory(Of::Model(Arc::new(model)))
    }

    pub(crate) fn of_trained(model: Arc<DraftModel>) -> DrafterMemory {
        DrafterMemory(Of::Trained(model))
    }

    /// The drafter, if it was trained for the model.
    pub(crate) fn trained(&self) -> Option<&DraftModel> {
        match &self.0 {
            Of::Trained(model) => Some(model),
            Of::Model(_) => None,
        }
    }

    /// The model that drafts, if it is one, which has an engine of its own.
    pub(crate) fn model(&self) -> Option<&SmallModel> {
        match &self.0 {
            Of::Trained(_) => None,
            Of::Model(model) => Some(model),
        }
    }

    /// Buffers of its passes that the model's engine has.
    pub(crate) fn buffers(&self, arch: Arch, n_threads: usize, n_ctx: usize) -> u64 {
        let trained = self.trained();
        trained.map_or(0, |model| {
            model.pass_bytes(arch, n_threads, most_rows(n_ctx))
        })
    }

    /// Most tokens of a prompt of which it reads what the last layer leaves.
    pub(crate) fn n_last(&self) -> usize {
        let reads_last = |model: &DraftModel| {
            model.spec.kind == DraftKind::Assistant
                || model.spec.inputs.contains(&model.n_target_layer)
        };
        match self.trained().is_some_and(reads_last) {
            true => KEPT_STATES,
            false => 0,
        }
    }
}

/// What a trained drafter takes for a text: its keys and values, its buffers, and what sequences
/// keep for it, whose prompts are computed `n_batch` tokens at a time.
pub(crate) fn of_text(model: &DraftModel, n_ctx: usize, n_batch: usize) -> u64 {
    let n_read = match model.spec.kind {
        // What the last layer leaves.
        DraftKind::Assistant => 1,
        _ => model.spec.inputs.len(),
    };
    kept_inputs_bytes(n_read * model.n_target, n_ctx, n_batch)
        .saturating_add(own_of_text(model, n_ctx))
}

/// What a trained drafter takes for a text, without what sequences keep for it.
pub(crate) fn own_of_text(model: &DraftModel, n_ctx: usize) -> u64 {
    model.text_bytes(n_ctx, most_rows(n_ctx))
}
