//! Gemma 4: layers with and without windows differ in heads and ropes, the last layers read the
//! keys and values of others, and each layer has a vector for each token; or mixtures beside the
//! dense layers.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, OutputScale};
use crate::layers::moe::spec::MoeSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.dense(Activation::GeGlu)?;
    if keys.opt_u64("expert_count")?.is_some_and(|n| n > 0) {
        for (ffn, moe) in ffn.iter_mut().zip(keys.mixture(0, true)?) {
            if let (FfnSpec::Dense(dense), FfnSpec::Moe(moe)) = (&*ffn, moe) {
                let moe = MoeSpec {
                    activation: Activation::GeGlu,
                    router_norm: true,
                    output_scales: true,
                    ..moe
                };
                *ffn = FfnSpec::Both(dense.clone(), moe);
            }
        }
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.embd_scale = (h.n_embd as f32).sqrt();
    set_attention(keys, &mut h)?;
    for (i, attn) in h.attention_mut().enumerate() {
        attn.keys_as_values = !keys.has_in_layer(i, "attn_v.weight");
    }
    h.share_kv(keys.opt_u64("attention.shared_kv_layers")?.unwrap_or(0) as usize)?;
    h.attention_mut()
        .filter(|attn| attn.shares_kv)
        .for_each(|attn| attn.keys_as_values = false);
    h.per_layer_embd = keys
        .opt_u64("embedding_length_per_layer_input")?
        .map(|n| n.min(1 << 16) as usize)
        .filter(|&n| n > 0);
    h.layers.iter_mut().enumerate().for_each(|(i, layer)| {
        if keys.has_in_layer(i, "layer_output_scale.weight") {
            layer.output_scale = OutputScale::OfFile;
        }
    });
    h.final_softcap = keys.positive("final_logit_softcapping")?;
    Ok(h)
}

/// Sets norms, and heads and ropes of layers with and without a window.
pub(super) fn set_attention(keys: &Keys<'_>, h: &mut Hparams) -> Result<(), ModelError> {
    h.set_norms(Norms::Both);
    h.set_windows(keys, None, 6)?;
    h.set_window_rope(keys.positive("rope.freq_base_swa")?.unwrap_or(10000.0));
    let head_dim = keys.opt_count("attention.key_length_swa", MAX_HEAD_DIM)?;
    let head_dim_v = keys.opt_count("attention.value_length_swa", MAX_HEAD_DIM)?;
    for attn in h.attention_mut() {
        if attn.window.is_some() {
            attn.head_dim = head_dim.unwrap_or(attn.head_dim);
            attn.head_dim_v = head_dim_v.unwrap_or(attn.head_dim_v);
        }
        (attn.qk_norm, attn.value_norm, attn.scale) = (Some(QkNorm::PerHead), true, 1.0);
    }
    // In layers without a window, frequency divisors say which part of a head is rotated.
    let narrowest = h
        .attention()
        .filter(|attn| attn.window.is_some())
        .map(|attn| attn.head_dim)
        .min();
    let n_dims = keys
        .opt_count("rope.dimension_count_swa", MAX_HEAD_DIM)?
        .unwrap_or(h.ropes[1].n_dims);
    if narrowest.is_some_and(|head_dim| n_dims % 2 != 0 || n_dims > head_dim) {
        return Err(ModelError::Inconsistent {
            what: format!("rope rotates {n_dims} dimensions of heads of {narrowest:?}"),
        });
    }
    (h.ropes[1].n_dims, h.ropes[1].factors) = (n_dims, false);
    Ok(())
}
