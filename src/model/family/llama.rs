//! Llama 1 to 3 and models of the same form: Mistral, Mixtral, TinyLlama, Yi, InternLM 2 and 3,
//! Baichuan, XVERSE, Maincoder, ERNIE 4.5, …

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, Mixer};
use crate::layers::moe::spec::{Gating, SharedSpec};
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let ffn = match keys.opt_u64("expert_count")? {
        None | Some(0) => keys.dense(Activation::SwiGlu)?,
        Some(_) => keys.mixture(0, true)?,
    };
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}

/// Mistral 3: a factor on queries that grows with the position.
pub(super) fn mistral3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    let n_ctx_orig = h.ropes[0].n_ctx_orig;
    h.set_temperature(keys, (0.0, n_ctx_orig), 0)?;
    Ok(h)
}

/// Llama 4. Of every four layers the last sees everything and is not rotated, the others see chunks
/// of 8192 positions; neither the chunks nor the temperature's parameters are in the file
/// (llama.cpp's `llama-model.cpp`).
pub(super) fn llama4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut mixtures = keys.mixture(0, false)?;
    for moe in mixtures.iter_mut().filter_map(FfnSpec::moe_mut) {
        (moe.gating, moe.weighs_inputs) = (Gating::Sigmoid, true);
        moe.shared = Some(SharedSpec {
            n_ff: moe.n_ff,
            ..SharedSpec::default()
        });
    }
    let step = keys.count("interleave_moe_layer_step", 1024)?;
    let mut layers = keys.dense(Activation::SwiGlu)?;
    (step - 1..keys.n_layer)
        .step_by(step)
        .for_each(|i| layers[i] = mixtures[i].clone());
    let mut h = Hparams::llama(keys, NormKind::Rms, layers)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_windows(keys, Some(8192), 4)?;
    h.set_temperature(keys, (0.1, 8192), 1)?;
    h.rotate_in_windows_alone();
    // Maverick, recognised by its number of experts, has no norm of queries and keys.
    let qk_norm = (h.mixtures().all(|moe| moe.n_expert != 128)).then_some(QkNorm::PlainRotated);
    for attn in h.attention_mut() {
        if attn.window.is_some() {
            (attn.chunked, attn.qk_norm, attn.temperature) = (true, qk_norm, None);
        }
    }
    Ok(h)
}

/// Baichuan. The 13B models, recognised by their layer count, have ALiBi instead of a rope, whose
/// exponent is not in the file (llama.cpp's `models/baichuan.cpp`).
pub(super) fn baichuan(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    if h.n_layer == 40 {
        h.set_alibi(8.0);
    }
    Ok(h)
}

/// Refact: ALiBi instead of a rope, whose exponent is not in the file (llama.cpp's
/// `models/refact.cpp`).
pub(super) fn refact(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)?;
    h.set_alibi(8.0);
    Ok(h)
}

/// Llamas that NVIDIA pruned (Nemotron Super and Ultra), DeciLM: layers differ in heads and widths,
/// and may lack attention, the feed-forward layer, or both.
pub(super) fn deci(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let counts = |key: &str, max| {
        keys.opt_counts(key, 0..=max)?
            .ok_or_else(|| keys.missing(key))
    };
    let (n_head, n_head_kv) = (
        counts("attention.head_count", 1024)?,
        counts("attention.head_count_kv", 1024)?,
    );
    if n_head
        .iter()
        .zip(&n_head_kv)
        .any(|(&n, &n_kv)| n > 0 && n_kv == 0)
    {
        return Err(ModelError::Inconsistent {
            what: "attention replaced by a matrix is not supported".into(),
        });
    }
    let mixers = n_head
        .iter()
        .map(|&n| {
            if n > 0 {
                MixerKind::Attention
            } else {
                MixerKind::Nothing
            }
        })
        .collect();
    let dense = |n_ff| {
        FfnSpec::Dense(DenseSpec {
            n_ff,
            ..DenseSpec::default()
        })
    };
    let n_ff = counts("feed_forward_length", 1 << 20)?.into_iter();
    let ffn = n_ff
        .map(|n| if n > 0 { dense(n) } else { FfnSpec::None })
        .collect();
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, mixers)?;
    h.ropes
        .iter_mut()
        .for_each(|rope| rope.order = RopeOrder::Norm);
    for layer in h
        .layers
        .iter_mut()
        .filter(|layer| layer.mixer == Mixer::None)
    {
        layer.norms = Norms::BeforeFfn;
    }
    if let Some(scale) = keys.positive("attention.scale")? {
        h.attention_mut().for_each(|attn| attn.scale = scale);
    }
    Ok(h)
}

/// Maincoder: a norm of rotated queries and keys.
pub(super) fn maincoder(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = hparams(keys)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHeadRotated));
    Ok(h)
}

/// ERNIE 4.5: mixtures in the layers that have a router. The width of the shared expert that
/// converters write is a guess.
pub(super) fn ernie4_5(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("interleave_moe_layer_step");
    let mut h = hparams(keys)?;
    let dense = keys.dense(Activation::SwiGlu)?;
    for (i, (layer, dense)) in h.layers.iter_mut().zip(dense).enumerate() {
        if !keys.has_in_layer(i, "ffn_gate_inp.weight") {
            layer.ffn = dense;
        } else if let Some(shared) = layer.ffn.moe_mut().and_then(|moe| moe.shared.as_mut()) {
            shared.n_ff = keys
                .n_out(&format!("blk.{i}.ffn_gate_shexp.weight"))
                .unwrap_or(shared.n_ff);
        }
    }
    Ok(h)
}
