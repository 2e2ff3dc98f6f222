//! State spaces: Mamba 1 (also Falcon Mamba) and 2, Jamba, Falcon-H1, Nemotron-H.

use crate::layers::activation::spec::Activation;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::moe::spec::Gating;
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use crate::model::keys::{Keys, MixerKind};

pub(super) fn mamba(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    alone(keys, keys.mamba()?)
}

pub(super) fn mamba2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    alone(keys, keys.mamba2()?)
}

/// Nothing but state spaces.
fn alone(keys: &Keys<'_>, spec: RecurrentSpec) -> Result<Hparams, ModelError> {
    // Files say 0.
    keys.only("feed_forward_length", &[0.0])?;
    let mixers = vec![MixerKind::Recurrent(spec); keys.n_layer];
    Hparams::hybrid(
        keys,
        NormKind::Rms,
        vec![FfnSpec::None; keys.n_layer],
        mixers,
    )
}

/// AI21's Jamba: Mamba 1, attention between them that knows no positions, a mixture in some layers.
pub(super) fn jamba(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let dense = keys.dense(Activation::SwiGlu)?;
    let ffn = if keys.has_part("ffn_gate_inp.weight") {
        let layers = keys.mixture(0, false)?.into_iter().zip(dense).enumerate();
        let is_mixture = |i: usize| keys.has_in_layer(i, "ffn_gate_inp.weight");
        layers
            .map(|(i, (moe, dense))| if is_mixture(i) { moe } else { dense })
            .collect()
    } else {
        // One expert is a dense layer.
        keys.only("expert_count", &[0.0, 1.0])?;
        keys.only("expert_used_count", &[0.0, 1.0, 2.0])?;
        dense
    };
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, keys.attention_or(&keys.mamba()?)?)?;
    h.attention_mut().for_each(|attn| attn.rope = None);
    Ok(h)
}

/// TII's Falcon-H1: Mamba 2 beside attention. Converters multiply its many multipliers into the
/// weights.
pub(super) fn falcon_h1(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mixers = vec![MixerKind::Both(keys.mamba2()?); keys.n_layer];
    Hparams::hybrid(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?, mixers)
}

/// NVIDIA's Nemotron-H: each layer is Mamba 2, attention that knows no positions, or a feed-forward
/// layer.
pub(super) fn nemotron_h(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_ff = keys.opt_counts("feed_forward_length", 0..=1 << 20)?;
    let n_ff = n_ff.ok_or_else(|| keys.missing("feed_forward_length"))?;
    let activation = Activation::SquaredRelu;
    let ffn = if keys.has_part("ffn_gate_inp.weight") {
        let mut layers = keys.mixture(0, true)?;
        let latent = keys.opt_count("moe_latent_size", 1 << 20)?;
        for moe in layers.iter_mut().filter_map(FfnSpec::moe_mut) {
            (moe.activation, moe.gating, moe.latent) = (activation, Gating::Sigmoid, latent);
        }
        layers
    } else {
        let dense = |&n_ff: &usize| {
            FfnSpec::Dense(DenseSpec {
                n_ff,
                activation,
                ..DenseSpec::default()
            })
        };
        n_ff.iter().map(dense).collect()
    };
    let of_layers = keys
        .attention_or(&keys.mamba2()?)?
        .into_iter()
        .zip(ffn)
        .zip(n_ff);
    let (mixers, ffn) = of_layers
        .map(|((mixer, ffn), n_ff)| {
            if n_ff > 0 {
                (MixerKind::Nothing, ffn)
            } else {
                (mixer, FfnSpec::None)
            }
        })
        .unzip();
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, mixers)?;
    keys.ignore("rope.dimension_count");
    h.attention_mut().for_each(|attn| attn.rope = None);
    Ok(h)
}
