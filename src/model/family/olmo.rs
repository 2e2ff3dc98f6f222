//! OLMo 1. OLMo 2: norms after each block instead of before it, q/k norm over all heads. OLMo 3:
//! windows in three of four layers, whose rope is not scaled.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)?;
    h.set_norms(Norms::After);
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::Full));
    h.set_windows(keys, None, 4)?;
    h.set_window_rope(
        keys.positive("rope.freq_base_swa")?
            .unwrap_or(h.ropes[0].theta),
    );
    Ok(h)
}

/// OLMo 1: norms without weights, clamped queries, keys and values.
pub(super) fn olmo1(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::LayerPlain, keys.dense(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_clip(keys)?;
    Ok(h)
}
