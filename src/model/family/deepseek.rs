//! Models with latent attention: DeepSeek 2 and 3 and those of the same form (GLM 4.7 Flash, Kimi
//! K2), MiniCPM 3, Mistral 4, PLM, Kimi Linear, Ling 3.

use crate::layers::activation::spec::Activation;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::residual_attention::MAX_CHECKPOINTS;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::family::clamps;
use crate::model::keys::Keys;

/// DeepSeek 2. Its files do not say that expert weights are not divided by their sum. Files of its
/// successors have a bias for the choice of experts, but not always the key that says that their
/// scores are sigmoids.
pub(super) fn deepseek2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let is_later = keys.has_part("exp_probs_b.bias");
    let ffn = if is_later {
        keys.sigmoid_mixture(0, false)?
    } else {
        keys.mixture(0, false)?
    };
    let mut h = latent(keys, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}

/// Mistral 4: a factor on queries that grows with the position, if the file says so.
pub(super) fn mistral4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = deepseek2(keys)?;
    let n_ctx_orig = h.ropes[0].n_ctx_orig;
    h.set_temperature(keys, (0.0, n_ctx_orig), 0)?;
    Ok(h)
}

/// PLM: squared ReLU without a gate.
pub(super) fn plm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = latent(keys, keys.dense(Activation::SquaredRelu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}

/// MiniCPM 3. Its factors are not in the file (llama.cpp's `models/minicpm3.cpp`).
pub(super) fn minicpm3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = latent(keys, keys.dense(Activation::SwiGlu)?)?;
    let depth = (h.n_layer as f32).sqrt();
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(12.0);
    h.logit_scale = 256.0 / h.n_embd as f32;
    h.layers
        .iter_mut()
        .for_each(|layer| layer.residual_scale = 1.4 / depth);
    Ok(h)
}

/// Latent attention; if YaRN stretches the context, its magnitude is a factor on scores.
pub(super) fn latent(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.set_latent(keys)?;
    let stretched = keys
        .number("rope.scaling.yarn_log_multiplier")?
        .zip(keys.positive("rope.scaling.factor")?);
    let magnitude = stretched.map_or(1.0, |(multiplier, factor)| 1.0 + multiplier * factor.ln());
    h.attention_mut()
        .for_each(|attn| attn.scale *= magnitude * magnitude);
    Ok(h)
}

/// Moonshot's Kimi Linear: delta rules whose rates are by channel, latent attention that knows no
/// positions in some layers.
pub(super) fn kimi_linear(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let spec = RecurrentSpec::Delta(kda(keys)?);
    let mut h = Hparams::hybrid(
        keys,
        NormKind::Rms,
        keys.mixture(1, true)?,
        keys.attention_or(&spec)?,
    )?;
    h.set_latent(keys)?;
    h.attention_mut().for_each(|attn| attn.rope = None);
    Ok(h)
}

/// Kimi's delta attention by the sizes of the file.
pub(super) fn kda(keys: &Keys<'_>) -> Result<DeltaSpec, ModelError> {
    let (n_head, head_dim) = (
        keys.count("attention.head_count", 1024)?,
        keys.count("kda.head_dim", 1 << 12)?,
    );
    Ok(DeltaSpec {
        n_head,
        n_head_k: n_head,
        head_dim_k: head_dim,
        head_dim_v: head_dim,
        n_tap: keys.taps("ssm.conv_kernel")?,
        by_channel: true,
        ..DeltaSpec::default()
    })
}

/// The same whose rates have a lower bound in the file.
pub(super) fn bounded_kda(keys: &Keys<'_>) -> Result<DeltaSpec, ModelError> {
    let key = "kda.gate_lower_bound";
    let bound = keys.number(key)?.ok_or_else(|| keys.missing(key))?;
    if bound >= 0.0 {
        return Err(ModelError::OutOfRange {
            key: format!("{}.{key}", keys.arch),
            value: bound.to_string(),
            expected: "a finite number below 0".into(),
        });
    }
    Ok(DeltaSpec {
        bound: Some(bound),
        ..kda(keys)?
    })
}

/// Kimi K3: Kimi Linear with residual attention, gated attention, and experts of a latent vector.
pub(super) fn kimi3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let delta = match keys.has_key("kda.gate_lower_bound") {
        true => bounded_kda(keys)?,
        false => kda(keys)?,
    };
    let spec = RecurrentSpec::Delta(DeltaSpec {
        length_eps: keys.positive("attention.layer_norm_rms_epsilon")?,
        ..delta
    });
    let key = "activation.situ_beta";
    let activation = Activation::Situ {
        beta: keys.positive(key)?.ok_or_else(|| keys.missing(key))?,
        linear: keys
            .number("activation.situ_linear_beta")?
            .filter(|&linear| linear > 0.0),
    };
    let mut ffn = keys.sigmoid_mixture(1, true)?;
    let latent = keys.opt_count("expert_latent_length", 1 << 17)?;
    for ffn in &mut ffn {
        match ffn {
            FfnSpec::Dense(dense) => dense.activation = activation,
            FfnSpec::Moe(moe) => {
                moe.activation = activation;
                (moe.latent, moe.latent_norm) = (latent, latent.is_some());
            }
            FfnSpec::Both(..) | FfnSpec::Beside(..) | FfnSpec::None => {}
        }
    }
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, keys.attention_or(&spec)?)?;
    h.set_latent(keys)?;
    h.attention_mut().for_each(|attn| attn.rope = None);
    h.set_gates(keys);
    let each = keys.opt_count("attn_res.block_size", 1024)?;
    if let Some(each) = each.filter(|each| h.n_layer.div_ceil(*each) > MAX_CHECKPOINTS) {
        return Err(ModelError::OutOfRange {
            key: format!("{}.attn_res.block_size", keys.arch),
            value: each.to_string(),
            expected: format!("at most {MAX_CHECKPOINTS} blocks of {} layers", h.n_layer),
        });
    }
    h.checkpoints = each;
    Ok(h)
}

/// Ling 3: delta attention whose rates have a bound, latent attention with a gate for each head in
/// some layers.
pub(super) fn bailing3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("kda.safe_gate", &[1.0])?;
    let length_eps = keys.positive("attention.layer_norm_rms_epsilon")?;
    let spec = RecurrentSpec::Delta(DeltaSpec {
        length_eps,
        ..bounded_kda(keys)?
    });
    let mut ffn = keys.sigmoid_mixture(1, true)?;
    clamps::set(keys, &mut ffn, clamps::after)?;
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, keys.attention_or(&spec)?)?;
    h.set_latent(keys)?;
    h.ropes
        .iter_mut()
        .for_each(|rope| rope.order = RopeOrder::Norm);
    h.set_gates(keys);
    Ok(h)
}
