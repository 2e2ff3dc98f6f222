//! IBM Granite 3, dense and mixture of experts, and MiniCPM: a llama with multipliers.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind, RopeOrder};
use crate::model::spec::{Activation, FfnSpec};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    all(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    all(keys, keys.mixture(0, true)?)
}

fn all(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    // In Granite files this key says whether anything is rotated.
    keys.only("rope.scaling.finetuned", &[1.0])?;
    if let Some(scale) = keys.positive("attention.scale")? {
        h.attention_mut().for_each(|attn| attn.scale = scale);
    }
    if let Some(scale) = keys.positive("residual_scale")? {
        h.layers.iter_mut().for_each(|layer| layer.residual_scale = scale);
    }
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(1.0);
    h.logit_scale = 1.0 / keys.positive("logit_scale")?.unwrap_or(1.0);
    Ok(h)
}

/// Granite with windows in some layers, and attention sinks.
pub(super) fn swa(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.set_windows(keys, None, 0)?;
    h.set_sinks(keys);
    Ok(h)
}

/// MiniCPM. Older files lack the multipliers.
pub(super) fn minicpm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    for key in ["embedding_scale", "residual_scale", "logit_scale"] {
        keys.positive(key)?.ok_or_else(|| keys.missing(key))?;
    }
    hparams(keys)
}
