//! Talkie: norms without weights, embeddings that every layer adds again.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::RmsPlain, keys.dense(Activation::SwiGlu)?)?;
    h.embd_norm = true;
    h.logit_scale = keys.positive("logit_scale")?.unwrap_or(1.0);
    h.layers.iter_mut().for_each(|layer| layer.embd_skip = true);
    h.attention_mut()
        .for_each(|attn| (attn.qk_norm, attn.q_gains) = (Some(QkNorm::PlainRotated), true));
    Ok(h)
}
