//! Mixtures of experts that differ from a llama in little else: dots.llm1, Hunyuan 3, Ling 2, MiniMax M2, OLMoE.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind};
use crate::model::spec::QkNorm;

/// Mixtures with a norm for each head of queries and keys, and a dense first layer.
pub(super) fn head_norms(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, 1, true, QkNorm::PerHead)
}

pub(super) fn minimax(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, 0, true, QkNorm::Full)
}

pub(super) fn olmoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    mixture(keys, 0, false, QkNorm::Full)
}

/// Databricks' DBRX: clamped queries, keys and values, norms without bias.
pub(super) fn dbrx(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::LayerNoBias, keys.mixture(0, true)?)?;
    h.own_head = true;
    h.set_clip(keys)?;
    Ok(h)
}

fn mixture(keys: &Keys<'_>, n_dense: usize, normalise: bool, qk_norm: QkNorm) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.mixture(n_dense, normalise)?)?;
    h.own_head = true;
    h.attention_mut().for_each(|attn| attn.qk_norm = Some(qk_norm));
    Ok(h)
}
