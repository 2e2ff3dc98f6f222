//! Llama 1 to 3 and what is built like it: Mistral, Mixtral, TinyLlama, Yi, …

use crate::error::ModelError;
use crate::model::hparams::{Experts, Hparams, Keys, RopeOrder};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.rope.order = RopeOrder::Norm;
    h.window = keys.window(None, 0)?;
    h.experts = experts(keys, true)?;
    h.finish(keys)
}

/// `expert_count` and `expert_used_count`, if the file has experts.
pub(super) fn experts(keys: &Keys<'_>, normalise: bool) -> Result<Option<Experts>, ModelError> {
    let Some(n_expert) = keys.opt_count("expert_count", 1024)? else { return Ok(None) };
    let n_used = keys.count("expert_used_count", n_expert)?;
    Ok(Some(Experts { n_expert, n_used, normalise, n_ff_shared: 0 }))
}
