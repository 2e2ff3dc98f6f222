//! xAI's Grok 1 and 2: mixtures with norms on both sides, and many factors.

use crate::layers::activation::spec::Activation;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{BesideSpec, FfnSpec};
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;
use std::f32::consts::FRAC_1_SQRT_2;

/// Factors of files that lack them (llama.cpp's `models/grok.cpp`).
const EMBEDDING_SCALE: f32 = 78.383_67;
const LOGIT_SCALE: f32 = 0.577_350_26;
const ATTENTION_SCALE: f32 = 0.088_388_346;
const SOFTCAP: f32 = 30.0;

/// Grok. In Grok 2 a dense layer is beside each mixture.
pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.mixture(0, true)?;
    let n_ff = keys.count("feed_forward_length", 1 << 20)?;
    for (i, ffn) in ffn.iter_mut().enumerate() {
        let Some(moe) = ffn.moe_mut() else { continue };
        moe.activation = Activation::GeGlu;
        if keys.has_in_layer(i, "ffn_up.weight") {
            let dense = DenseSpec {
                n_ff,
                activation: Activation::GeGlu,
                ..DenseSpec::default()
            };
            let beside = BesideSpec {
                reads_input: false,
                scale: FRAC_1_SQRT_2,
            };
            *ffn = FfnSpec::Beside(dense, moe.clone(), beside);
        }
    }
    // It is stored, but nobody applies it.
    keys.ignore("router_logit_softcapping");
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.set_norms(Norms::Both);
    let scale = keys.positive("attention.output_scale")?;
    let softcap = keys.positive("attn_logit_softcapping")?;
    for attn in h.attention_mut() {
        attn.scale = scale.unwrap_or(ATTENTION_SCALE);
        attn.softcap = Some(softcap.unwrap_or(SOFTCAP));
    }
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(EMBEDDING_SCALE);
    h.logit_scale = keys.positive("logit_scale")?.unwrap_or(LOGIT_SCALE);
    h.final_softcap = keys
        .number("final_logit_softcapping")?
        .filter(|&cap| cap > 0.0);
    Ok(h)
}
