//! Tencent's Hunyuan 1, dense and mixture of experts: a llama whose queries and keys have norms after they are rotated.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind};
use crate::model::spec::{Activation, FfnSpec, QkNorm};

pub(super) fn dense(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.mixture(0, true)?)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut().for_each(|attn| attn.qk_norm = Some(QkNorm::PerHeadRotated));
    Ok(h)
}
