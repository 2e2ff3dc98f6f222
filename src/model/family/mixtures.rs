//! Mixtures of experts that differ from a llama in little else: DeepSeek 1 and OCR, Ling 1 and 2,
//! dots.llm1, Hunyuan 3, MiniMax M2, OLMoE, Mellum 2.

use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// Mixtures with a norm for each head of queries and keys, and a dense first layer.
pub(super) fn head_norms(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, keys.sigmoid_mixture(1, true)?, QkNorm::PerHead)
}

pub(super) fn minimax(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, keys.sigmoid_mixture(0, true)?, QkNorm::Full)
}

pub(super) fn olmoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, keys.mixture(0, false)?, QkNorm::Full)
}

/// DeepSeek-OCR, of which the text part.
pub(super) fn deepseek_ocr(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams::llama(keys, NormKind::Rms, keys.mixture(0, false)?)
}

/// DeepSeek 1 and Ling 1: expert weights are divided by their sum only if the file says so.
pub(super) fn deepseek(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.mixture(0, false)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}

/// JetBrains' Mellum 2: windows in three of four layers, whose rope is not scaled.
pub(super) fn mellum(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = mixture(keys, keys.mixture(0, true)?, QkNorm::PerHead)?;
    h.set_windows(keys, None, 4)?;
    h.set_window_rope(
        keys.positive("rope.freq_base_swa")?
            .unwrap_or(h.ropes[0].theta),
    );
    Ok(h)
}

/// Databricks' DBRX: clamped queries, keys and values, norms without bias.
pub(super) fn dbrx(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::LayerNoBias, keys.mixture(0, true)?)?;
    h.set_clip(keys)?;
    Ok(h)
}

fn mixture(keys: &Keys<'_>, layers: Vec<FfnSpec>, qk_norm: QkNorm) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, layers)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(qk_norm));
    Ok(h)
}
