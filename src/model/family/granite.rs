//! IBM Granite 3 and 4, dense and mixture of experts, and MiniCPM: a llama with multipliers.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::RopeOrder;
use crate::layers::switch::spec::SwitchSpec;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    all(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    all(keys, keys.mixture(0, true)?)
}

/// Granite 4: Mamba 2, attention between them.
pub(super) fn hybrid(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let is_mixture = keys.has_part("ffn_gate_inp.weight");
    let ffn = if is_mixture {
        keys.mixture(0, true)?
    } else {
        keys.dense(Activation::SwiGlu)?
    };
    let mut h = Hparams::hybrid(
        keys,
        NormKind::Rms,
        ffn,
        keys.attention_or(&keys.mamba2()?)?,
    )?;
    if keys.opt_bool("rope.scaling.finetuned")? == Some(false) {
        h.attention_mut().for_each(|attn| attn.rope = None);
    }
    multiplied(keys, h)
}

fn all(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    // Of a hybrid model without state spaces (Granite 4.0 Micro) files say the sizes of those all
    // the same.
    for key in [
        "conv_kernel",
        "group_count",
        "inner_size",
        "state_size",
        "time_step_rank",
    ] {
        keys.ignore(&format!("ssm.{key}"));
    }
    // In Granite files this key says whether anything is rotated.
    keys.only("rope.scaling.finetuned", &[1.0])?;
    multiplied(keys, h)
}

fn multiplied(keys: &Keys<'_>, mut h: Hparams) -> Result<Hparams, ModelError> {
    h.ropes
        .iter_mut()
        .for_each(|rope| rope.order = RopeOrder::Norm);
    if let Some(scale) = keys.positive("attention.scale")? {
        h.attention_mut().for_each(|attn| attn.scale = scale);
    }
    if let Some(scale) = keys.positive("residual_scale")? {
        h.layers
            .iter_mut()
            .for_each(|layer| layer.residual_scale = scale);
    }
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(1.0);
    h.logit_scale = 1.0 / keys.positive("logit_scale")?.unwrap_or(1.0);
    Ok(h)
}

/// Granite with windows in some layers, and attention sinks; dense or a mixture.
pub(super) fn swa(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = if keys.has_part("ffn_gate_inp.weight") {
        moe(keys)?
    } else {
        hparams(keys)?
    };
    h.set_windows(keys, None, 0)?;
    h.set_sinks(keys);
    Ok(h)
}

/// Granite Switch: low-rank adapters in the file, of which tokens choose one.
pub(super) fn switch(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    /// Most adapters.
    const MAX: usize = 1 << 10;
    let mut h = hparams(keys)?;
    let tokens = |key: &str| keys.tokens(key, MAX);
    let spec = SwitchSpec {
        activate: tokens("adapters.token_ids_activate")?,
        substitute: tokens("adapters.token_ids_substitute")?,
        rank: keys.count("adapters.lora_rank", 1 << 12)?,
    };
    // The gain makes the weights of other tokens vanish; a small one would not.
    if let Some(gain) = keys
        .number("adapters.router_gain")?
        .filter(|&gain| gain < 10.0)
    {
        return Err(ModelError::OutOfRange {
            key: format!("{}.adapters.router_gain", keys.arch),
            value: gain.to_string(),
            expected: "at least 10".into(),
        });
    }
    let count = keys.count("adapters.count", MAX)?;
    if [spec.activate.len(), spec.substitute.len()] != [count; 2] {
        return Err(ModelError::Inconsistent {
            what: format!(
                "{count} adapters that {} tokens choose, with {} substitutes",
                spec.activate.len(),
                spec.substitute.len()
            ),
        });
    }
    h.switch = Some(spec);
    Ok(h)
}

/// MiniCPM. Older files lack the multipliers.
pub(super) fn minicpm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    for key in ["embedding_scale", "residual_scale", "logit_scale"] {
        keys.positive(key)?.ok_or_else(|| keys.missing(key))?;
    }
    hparams(keys)
}
