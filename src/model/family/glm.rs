//! Zhipu's GLM 4: chatglm files, the 0414 models with norms on both sides, and the mixtures GLM 4.5
//! and later.

use crate::model::ModelError;
use crate::model::hparams::{Hparams, NormKind};
use crate::model::keys::Keys;
use crate::model::rope::RopeOrder;
use crate::model::spec::{Activation, Biases, Norms, QkNorm};

pub(super) fn chatglm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_biases(Biases::Qkv);
    Ok(h)
}

pub(super) fn glm4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
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
