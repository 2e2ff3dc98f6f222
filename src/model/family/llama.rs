//! Llama 1 to 3 and what is built like it: Mistral, Mixtral, TinyLlama, Yi, InternLM 2 and 3, Baichuan 7B, ERNIE 4.5, …

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind, RopeOrder};
use crate::model::spec::Activation;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let ffn = match keys.opt_u64("expert_count")? {
        None | Some(0) => keys.dense(Activation::SwiGlu)?,
        Some(_) => keys.mixture(0, true)?,
    };
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}

/// Queries that grow with the position.
pub(super) fn mistral3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.set_temperature(keys)?;
    Ok(h)
}

/// The 13B models, told by their layer count, have ALiBi instead of a rope.
pub(super) fn baichuan(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    if keys.n_layer == 40 {
        return Err(ModelError::OutOfRange {
            key: "baichuan.block_count".into(),
            value: "40".into(),
            expected: "32, as models with 40 layers have ALiBi".into(),
        });
    }
    hparams(keys)
}

/// Mixtures in all layers but the first ones.
pub(super) fn ernie4_5(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("interleave_moe_layer_step", &[1.0])?;
    hparams(keys)
}
