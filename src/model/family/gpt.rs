//! OpenAI's GPT-2, StarCoder 1 and others with learned positions; GPT-NeoX (Pythia), Falcon, BLOOM
//! and MPT.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::Biases;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn gpt2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = biased(keys, Activation::Gelu)?;
    h.attention_mut().for_each(|attn| attn.rope = None);
    h.learned_positions = true;
    Ok(h)
}

pub(super) fn gptneox(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = biased(keys, Activation::GeluErf)?;
    if keys.opt_bool("use_parallel_residual")?.unwrap_or(true) {
        h.set_norms(Norms::Parallel);
    }
    Ok(h)
}

/// BLOOM. Its ALiBi slopes are not in the file.
pub(super) fn bloom(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = biased(keys, Activation::Gelu)?;
    h.embd_norm = true;
    h.set_alibi(8.0);
    Ok(h)
}

fn biased(keys: &Keys<'_>, activation: Activation) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(activation)?)?;
    h.set_biases(Biases::All);
    Ok(h)
}

pub(super) fn mpt(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(
        keys,
        NormKind::LayerNoBias,
        keys.dense(Activation::GeluErf)?,
    )?;
    h.attention_mut().for_each(|attn| attn.rope = None);
    match keys
        .number("attention.max_alibi_bias")?
        .filter(|&bias| bias > 0.0)
    {
        Some(max_bias) => h.set_alibi(max_bias),
        None => h.learned_positions = true,
    }
    h.set_clip(keys)?;
    Ok(h)
}

/// Falcon. The 7B models have one norm for both branches, larger ones one for each.
pub(super) fn falcon(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::GeluErf)?)?;
    h.set_norms(if keys.has_part("attn_norm_2.weight") {
        Norms::Parallel
    } else {
        Norms::Shared
    });
    Ok(h)
}
