//! Qwen 1 to 3.5, dense and mixture of experts, and Seed OSS. Of the vision models, only the text
//! part.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::classifier::Pooling;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec};
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

pub(super) fn qwen2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    two(keys, keys.dense(Activation::SwiGlu)?)
}

/// Qwen 1, whose files say twice the width of its feed-forward layers.
pub(super) fn qwen1(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut layers = keys.dense(Activation::SwiGlu)?;
    for layer in &mut layers {
        if let FfnSpec::Dense(ffn) = layer {
            ffn.n_ff = (ffn.n_ff / 2).max(1);
        }
    }
    two(keys, layers)
}

/// Qwen 3, also as a reranker, whose score is the probability of "yes" against "no".
pub(super) fn qwen3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = three(keys, keys.dense(Activation::SwiGlu)?)?;
    h.classifier = keys.classifier(h.n_embd, Pooling::Last)?;
    h.classifier
        .iter_mut()
        .for_each(|classifier| classifier.softmax = true);
    Ok(h)
}

pub(super) fn qwen2moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    two(keys, moe(keys, false)?)
}

pub(super) fn qwen3moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    three(keys, moe(keys, true)?)
}

/// Qwen 2 VL: an image's tokens have positions of time, row and column. Those of text are equal.
pub(super) fn qwen2vl(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    qwen2(keys)?.with_sections(keys, false)
}

pub(super) fn qwen3vl(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("n_deepstack_layers");
    qwen3(keys)?.with_sections(keys, true)
}

pub(super) fn qwen3vlmoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("n_deepstack_layers");
    qwen3moe(keys)?.with_sections(keys, true)
}

pub(super) fn qwen3next(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    hybrid(keys, moe(keys, true)?, false)
}

pub(super) fn qwen35(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    hybrid(keys, keys.dense(Activation::SwiGlu)?, true)?.with_sections(keys, true)
}

pub(super) fn qwen35moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    hybrid(keys, moe(keys, true)?, true)?.with_sections(keys, true)
}

/// Gated delta rules, and gated attention in every so manieth layer. Of Qwen 3.5 converters lay
/// value heads out as `tiled` says.
fn hybrid(keys: &Keys<'_>, ffn: Vec<FfnSpec>, tiled: bool) -> Result<Hparams, ModelError> {
    let (n_head, n_inner) = (
        keys.count("ssm.time_step_rank", 1 << 12)?,
        keys.count("ssm.inner_size", 1 << 17)?,
    );
    let (n_head_k, head_dim_k) = (
        keys.count("ssm.group_count", 1 << 12)?,
        keys.count("ssm.state_size", 1 << 12)?,
    );
    keys.divides("ssm.inner_size", n_inner, "ssm.time_step_rank", n_head)?;
    keys.divides("ssm.time_step_rank", n_head, "ssm.group_count", n_head_k)?;
    let spec = RecurrentSpec::Delta(DeltaSpec {
        n_head,
        n_head_k,
        head_dim_k,
        head_dim_v: n_inner / n_head,
        n_tap: keys.taps("ssm.conv_kernel")?,
        tiled,
        fused: keys.has_part("ssm_ba.weight"),
        ..DeltaSpec::default()
    });
    let interval = keys
        .opt_count("full_attention_interval", 1024)?
        .unwrap_or(4);
    let recurrent = keys.bools("attention.recurrent_layers")?;
    let is_recurrent = |i: usize| {
        recurrent
            .as_ref()
            .map_or(i % interval < interval - 1, |layers| layers[i])
    };
    let mixer = |i: usize| {
        if is_recurrent(i) {
            MixerKind::Recurrent(spec.clone())
        } else {
            MixerKind::Attention
        }
    };
    let mut h = Hparams::hybrid(
        keys,
        NormKind::Rms,
        ffn,
        (0..keys.n_layer).map(mixer).collect(),
    )?;
    for attn in h.attention_mut() {
        if attn.head_dim_v != attn.head_dim {
            let what = format!(
                "heads of {} have gates of {}",
                attn.head_dim_v, attn.head_dim
            );
            return Err(ModelError::Inconsistent { what });
        }
        (attn.qk_norm, attn.gated, attn.gate_in_q) = (Some(QkNorm::PerHead), true, true);
    }
    Ok(h)
}

fn two(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = both(keys, ffn)?;
    h.set_biases(Biases::Qkv);
    Ok(h)
}

/// Seed OSS, with biases or without.
pub(super) fn seed_oss(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.dense(Activation::SwiGlu)?)
}

fn three(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = both(keys, ffn)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}

/// Mixtures. If a file lacks the experts' width, `feed_forward_length` is that of all used experts
/// together; the shared one has a gate.
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
