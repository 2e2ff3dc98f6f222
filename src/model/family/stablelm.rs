//! Llamas with layer norms: StableLM 2, Orion, Jais 1; without a gate StarCoder 2, CodeShell,
//! Nemotron, Jais 2.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::Biases;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn stablelm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::SwiGlu)?)?;
    // Of StableLM 2 12B.
    if keys.opt_bool("use_parallel_residual")? == Some(true) {
        h.set_norms(Norms::Shared);
    }
    if keys.has_part("attn_q_norm.weight") {
        h.attention_mut()
            .for_each(|attn| attn.qk_norm = Some(QkNorm::LayerByHead));
    }
    Ok(h)
}

/// Jais 1: ALiBi, and scores divided by the width of a head instead of its root (llama.cpp's
/// `models/jais.cpp`).
pub(super) fn jais(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::SwiGlu)?)?;
    h.set_biases(Biases::All);
    h.set_alibi(
        keys.positive("attention.max_alibi_bias")?
            .ok_or_else(|| keys.missing("attention.max_alibi_bias"))?,
    );
    h.attention_mut()
        .for_each(|attn| attn.scale = 1.0 / attn.head_dim as f32);
    Ok(h)
}

pub(super) fn starcoder2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::Gelu)?)?;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}

pub(super) fn nemotron(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::SquaredRelu)?)
}

pub(super) fn jais2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = nemotron(keys)?;
    h.set_biases(Biases::All);
    Ok(h)
}
