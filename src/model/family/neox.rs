//! Llamas whose rotated pairs are halves of a head: EXAONE 3, Pangu Embedded, PaddleOCR, OpenELM,
//! PLaMo 1 and 3.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)
}

/// PaddleOCR's text part. A text token has three equal positions, so the sections of dimensions do
/// not matter.
pub(super) fn paddleocr(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    hparams(keys)
}

/// Apple's OpenELM: layers differ in heads and widths.
pub(super) fn openelm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}

/// PLaMo: attention and feed-forward layer in parallel.
pub(super) fn plamo(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.set_norms(Norms::Shared);
    Ok(h)
}

/// PLaMo 3: windows in all but every eighth layer, norms on both sides.
pub(super) fn plamo3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    h.set_norms(Norms::Both);
    h.set_windows(keys, None, 8)?;
    h.set_window_rope(keys.positive("rope.freq_base_swa")?.unwrap_or(10000.0));
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}
