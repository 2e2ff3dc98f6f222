//! Qwen 2, 2.5 and 3, dense and mixture of experts, and Seed OSS. Of the vision models, only the text part.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind};
use crate::model::spec::{Activation, Biases, FfnSpec, QkNorm};

pub(super) fn qwen2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    two(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn qwen3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    three(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn qwen2moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = two(keys, moe(keys, false)?)?;
    h.own_head = true;
    Ok(h)
}

pub(super) fn qwen3moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    three(keys, moe(keys, true)?)
}

/// Qwen 2 VL. A text token has three equal positions, so the sections of dimensions do not matter.
pub(super) fn qwen2vl(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    qwen2(keys)
}

pub(super) fn qwen3vl(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    keys.ignore("n_deepstack_layers");
    qwen3(keys)
}

pub(super) fn qwen3vlmoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    keys.ignore("n_deepstack_layers");
    qwen3moe(keys)
}

fn two(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = both(keys, ffn)?;
    h.set_biases(Biases::Qkv);
    Ok(h)
}

fn three(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = both(keys, ffn)?;
    h.attention_mut().for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}

/// Mixtures. If a file lacks the experts' width, `feed_forward_length` is that of all used experts together; the shared
/// one has a gate.
fn moe(keys: &Keys<'_>, normalise: bool) -> Result<Vec<FfnSpec>, ModelError> {
    let mut layers = keys.mixture(0, normalise)?;
    let together = keys.opt_u64("expert_feed_forward_length")?.is_none();
    for moe in layers.iter_mut().filter_map(FfnSpec::moe_mut) {
        if together {
            moe.n_ff /= moe.n_used;
        }
        if let Some(shared) = &mut moe.shared {
            shared.gated = true;
        }
    }
    Ok(layers)
}
