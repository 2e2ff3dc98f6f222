//! Models whose attention is gated: Meta's Muse Glimmer, Poolside's Laguna, iFlytek's Spark 2.5,
//! StepFun's Step 3.5.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::family::clamps;
use crate::model::keys::Keys;

/// Muse Glimmer: normed embeddings, gates of each value; layers without a window are not rotated.
pub(super) fn muse(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)?;
    h.set_norms(Norms::Both);
    // As in Hugging Face's `MuseGlimmerModel`; no key says it.
    h.layers
        .iter_mut()
        .for_each(|layer| layer.post_norm_eps = Some(1e-8));
    (h.embd_norm, h.embd_norm_plain) = (true, true);
    h.ropes[0].order = RopeOrder::Norm;
    h.set_windows(keys, None, 4)?;
    h.rotate_in_windows_alone();
    if let Some(theta) = keys.positive("rope.freq_base_swa")? {
        h.set_window_rope(theta);
    }
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    h.set_gates(keys);
    h.logit_scale = keys.positive("logit_scale")?.unwrap_or(1.0);
    h.final_softcap = keys.positive("final_logit_softcapping")?;
    Ok(h)
}

/// Laguna: a mixture whose layers differ in heads; gates by softplus. If layers have windows, the
/// first of every four has none.
pub(super) fn laguna(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.sigmoid_mixture(1, true)?)?;
    h.set_windows(keys, None, 0)?;
    if !keys.has_key("attention.sliding_window_pattern") {
        h.attention_mut()
            .step_by(4)
            .for_each(|attn| attn.window = None);
    }
    let n_dims = h.ropes[0].n_dims;
    h.set_window_rope_of(keys, n_dims)?;
    h.set_gates(keys);
    h.attention_mut()
        .for_each(|attn| (attn.qk_norm, attn.gate_softplus) = (Some(QkNorm::PerHead), true));
    Ok(h)
}

/// Spark 2.5.
pub(super) fn spark(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::GeGlu)?)?;
    h.set_windows(keys, None, 0)?;
    let n_dims = h.ropes[0].n_dims;
    h.set_window_rope_of(keys, n_dims)?;
    h.set_gates(keys);
    Ok(h)
}

/// Step 3.5: a mixture whose layers differ in heads. Layers without a window rotate half as many
/// dimensions.
pub(super) fn step(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("moe_every_n_layers", &[0.0, 1.0])?;
    let mut ffn = keys.sigmoid_mixture(0, true)?;
    clamps::set(keys, &mut ffn, clamps::after)?;
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.set_windows(keys, None, 0)?;
    let n_dims = h.ropes[0].n_dims;
    h.set_window_rope_of(keys, n_dims)?;
    h.ropes[0].n_dims = n_dims / 4 * 2;
    h.set_gates(keys);
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    h.raw_states = true;
    Ok(h)
}
