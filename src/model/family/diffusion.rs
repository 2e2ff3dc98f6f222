//! Models that denoise: Dream, LLaDA and its mixture, RND1. Every token sees the whole text.

use crate::layers::attention::spec::QkNorm;
use crate::layers::diffusion::DiffusionSpec;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::family::{llama, qwen};
use crate::model::keys::Keys;

/// Dream: a Qwen 2.
pub(super) fn dream(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    denoises(keys, qwen::qwen2(keys)?, true)
}

/// RND1: a Qwen 3 mixture.
pub(super) fn rnd1(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    denoises(keys, qwen::qwen3moe(keys)?, true)
}

/// LLaDA: a llama.
pub(super) fn llada(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    denoises(keys, llama::hparams(keys)?, false)
}

/// LLaDA's mixture, with a norm for each head of queries and keys.
pub(super) fn llada_moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.mixture(0, false)?)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    denoises(keys, h, false)
}

/// `shifted` is what files mean that do not say it.
fn denoises(keys: &Keys<'_>, mut h: Hparams, shifted: bool) -> Result<Hparams, ModelError> {
    keys.only("attention.causal", &[0.0])?;
    h.attention_mut().for_each(|attn| attn.causal = false);
    let in_file = keys.metadata.opt_bool("diffusion.shift_logits")?;
    h.diffusion = Some(DiffusionSpec {
        shifted: in_file.unwrap_or(shifted),
    });
    Ok(h)
}
