//! Models that draft for another and do not run without it. Of their hyper-parameters, the layers
//! say what a drafter's layers have.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::draft::spec::{DraftKind, DraftSpec};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::OutputScale;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::family::gemma4;
use crate::model::keys::Keys;

/// Most layers of the other model that a drafter reads.
const MAX_INPUTS: usize = 64;
/// Most places of a block.
const MAX_BLOCK: usize = 256;

/// Reads hyper-parameters; the target is so many values wide.
type Read = fn(&Keys<'_>, usize) -> Result<(Hparams, DraftSpec), ModelError>;

/// One architecture of drafters.
pub(crate) struct DrafterFamily {
    /// `general.architecture`.
    pub(crate) arch: &'static str,
    pub(crate) hparams: Read,
}

/// All architectures of drafters.
pub(crate) static DRAFTERS: &[DrafterFamily] = &[
    DrafterFamily {
        arch: "eagle3",
        hparams: eagle3,
    },
    DrafterFamily {
        arch: "dflash",
        hparams: dflash,
    },
    DrafterFamily {
        arch: "gemma4-assistant",
        hparams: assistant,
    },
];

/// The one layer of EAGLE 3 (arXiv 2503.01840).
fn eagle3(keys: &Keys<'_>, n_target: usize) -> Result<(Hparams, DraftSpec), ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)?;
    keys.only("block_count", &[1.0])?;
    keys.only("target_hidden_size", &[n_target as f64])?;
    h.ropes
        .iter_mut()
        .for_each(|rope| rope.order = RopeOrder::Norm);
    let is_set = |key: &str| Ok::<_, ModelError>(keys.opt_bool(key)?.unwrap_or(false));
    let spec = DraftSpec {
        kind: DraftKind::Eagle3 {
            norm_before_residual: is_set("norm_before_residual")?,
            norm_before_fc: is_set("norm_before_fc")?,
        },
        inputs: inputs(keys)?,
        embd_scale: 1.0,
    };
    Ok((h, spec))
}

/// DFlash in its plain form.
fn dflash(keys: &Keys<'_>, _: usize) -> Result<(Hparams, DraftSpec), ModelError> {
    let activation = match keys.opt_str("hidden_activation")? {
        None | Some("silu" | "swish") => Activation::SwiGlu,
        Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_tanh") => Activation::GeGlu,
        Some("gelu") => Activation::GeGluErf,
        Some(other) => {
            return Err(ModelError::OutOfRange {
                key: format!("{}.hidden_activation", keys.arch),
                value: other.to_owned(),
                expected: "silu, gelu or gelu_pytorch_tanh".into(),
            });
        }
    };
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(activation)?)?;
    h.set_windows(keys, None, 0)?;
    h.set_sinks(keys);
    let scale = keys.positive("attention.scale")?;
    let value_scale = keys.number("attention.value_scale")?;
    for (i, attn) in h.attention_mut().enumerate() {
        attn.qk_norm = Some(QkNorm::PerHead);
        attn.scale = scale.unwrap_or(attn.scale);
        attn.value_scale = value_scale.unwrap_or(1.0);
        attn.keys_as_values = !keys.has_in_layer(i, "attn_v.weight");
        if attn.keys_as_values && attn.head_dim != attn.head_dim_v {
            let (k, v) = (attn.head_dim, attn.head_dim_v);
            return Err(ModelError::Inconsistent {
                what: format!(
                    "layer {i} has no values of its own, and keys of {k} are none of {v}"
                ),
            });
        }
    }
    set_optional(keys, &mut h);
    let key = "tokenizer.ggml.mask_token_id";
    let mask = keys.metadata.opt_u64(key)?;
    let mask = mask.ok_or_else(|| ModelError::MissingKey { key: key.into() })?;
    let mask = u32::try_from(mask)
        .ok()
        .filter(|&id| (id as usize) < keys.n_vocab);
    let spec = DraftSpec {
        kind: DraftKind::Dflash {
            n_block: block_size(keys)?,
            mask: mask.ok_or_else(|| ModelError::OutOfRange {
                key: key.into(),
                value: keys
                    .metadata
                    .opt_u64(key)
                    .ok()
                    .flatten()
                    .unwrap_or(0)
                    .to_string(),
                expected: format!("a token below {}", keys.n_vocab),
            })?,
        },
        inputs: inputs(keys)?,
        embd_scale: keys.positive("embedding_scale")?.unwrap_or(1.0),
    };
    Ok((h, spec))
}

/// Places of a block: that of the last token, and some to guess.
fn block_size(keys: &Keys<'_>) -> Result<usize, ModelError> {
    match keys.count("block_size", MAX_BLOCK)? {
        1 => Err(ModelError::OutOfRange {
            key: format!("{}.block_size", keys.arch),
            value: "1".into(),
            expected: format!("2 to {MAX_BLOCK}"),
        }),
        n => Ok(n),
    }
}

/// Gemma 4's assistant, whose layers have no keys and values of their own.
fn assistant(keys: &Keys<'_>, n_target: usize) -> Result<(Hparams, DraftSpec), ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::GeGlu)?)?;
    let n_layer = [h.n_layer as f64];
    keys.only("nextn_predict_layers", &n_layer)?;
    keys.only("attention.shared_kv_layers", &n_layer)?;
    keys.only("embedding_length_per_layer_input", &[0.0])?;
    keys.only("embedding_length_out", &[n_target as f64])?;
    // It has no influence on which token is the best.
    keys.ignore("final_logit_softcapping");
    gemma4::set_attention(keys, &mut h)?;
    h.attention_mut().for_each(|attn| attn.shares_kv = true);
    set_optional(keys, &mut h);
    let spec = DraftSpec {
        kind: DraftKind::Assistant,
        inputs: Vec::new(),
        embd_scale: (n_target as f32).sqrt(),
    };
    Ok((h, spec))
}

/// Norms behind branches, and factors behind layers, as the file has them.
fn set_optional(keys: &Keys<'_>, h: &mut Hparams) {
    for (i, layer) in h.layers.iter_mut().enumerate() {
        if keys.has_in_layer(i, "layer_output_scale.weight") {
            layer.output_scale = OutputScale::OfFile;
        }
        if keys.has_in_layer(i, "post_attention_norm.weight")
            || keys.has_in_layer(i, "post_ffw_norm.weight")
        {
            layer.norms = Norms::Both;
        }
    }
}

/// Layers of the target whose inputs it reads.
fn inputs(keys: &Keys<'_>) -> Result<Vec<usize>, ModelError> {
    let inputs = keys.list("target_layers")?;
    let inputs = inputs.ok_or_else(|| keys.missing("target_layers"))?;
    if inputs.is_empty() || inputs.len() > MAX_INPUTS {
        return Err(ModelError::OutOfRange {
            key: format!("{}.target_layers", keys.arch),
            value: format!("a list of {}", inputs.len()),
            expected: format!("1 to {MAX_INPUTS} layers"),
        });
    }
    Ok(inputs.into_iter().map(|layer| layer as usize).collect())
}
