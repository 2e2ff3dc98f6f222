//! Llamas whose rotated pairs are halves of a head: EXAONE 3, Pangu Embedded, PaddleOCR, OpenELM, PLaMo.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind};
use crate::model::spec::{Activation, Norms, QkNorm};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)
}

/// PaddleOCR's text part. A text token has three equal positions, so the sections of dimensions do not matter.
pub(super) fn paddleocr(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    hparams(keys)
}

/// Apple's OpenELM: layers differ in heads and widths.
pub(super) fn openelm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.attention_mut().for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}

/// PLaMo: attention and feed-forward layer in parallel.
pub(super) fn plamo(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.set_norms(Norms::Shared);
    Ok(h)
}
