//! Zhipu's GLM 4: chatglm files, the 0414 models with norms on both sides, and the mixtures GLM 4.5
//! and later.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::Biases;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn chatglm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_biases(Biases::Qkv);
    Ok(h)
}

pub(super) fn glm4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    // Converters reorder the rows of GLM-4V, whose files have sections.
    let mut h = h.with_sections(keys, false)?;
    if h.ropes[0].sections.is_none() {
        h.ropes[0].order = RopeOrder::Norm;
    }
    h.set_norms(Norms::Both);
    Ok(h)
}

/// GLM 4.5 Air has no norm of queries and keys.
pub(super) fn glm4moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.sigmoid_mixture(1, true)?)?;
    if keys.has_part("attn_q_norm.weight") {
        h.attention_mut()
            .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    }
    Ok(h)
}
