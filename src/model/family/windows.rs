//! Mixtures of experts with special window patterns: Arcee's AFMoE (Trinity), Xiaomi's MiMo 2,
//! SmallThinker.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

/// AFMoE: only layers with windows are rotated.
pub(super) fn afmoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.sigmoid_mixture(0, true)?)?;
    h.embd_scale = (h.n_embd as f32).sqrt();
    h.set_norms(Norms::Both);
    h.set_windows(keys, None, 4)?;
    h.rotate_in_windows_alone();
    h.attention_mut()
        .for_each(|attn| (attn.qk_norm, attn.gated) = (Some(QkNorm::PerHead), true));
    Ok(h)
}

/// MiMo 2: layers with windows have their own rope, number of key/value heads, and sinks.
pub(super) fn mimo2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_dense = (0..keys.n_layer)
        .take_while(|&i| !keys.has_in_layer(i, "ffn_gate_inp.weight"))
        .count();
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.mixture(n_dense, true)?)?;
    h.set_windows(keys, None, 0)?;
    h.set_window_rope(
        keys.positive("rope.freq_base_swa")?
            .unwrap_or(h.ropes[0].theta),
    );
    h.set_sinks(keys);
    let value_scale = keys
        .number("attention.value_scale")?
        .filter(|&scale| scale != 0.0)
        .unwrap_or(1.0);
    h.attention_mut()
        .for_each(|attn| attn.value_scale = value_scale);
    Ok(h)
}

/// SmallThinker: if layers have windows, the first of every four has none and is not rotated.
pub(super) fn smallthinker(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut layers = keys.mixture(0, true)?;
    for moe in layers.iter_mut().filter_map(FfnSpec::moe_mut) {
        (moe.activation, moe.routes_early) = (Activation::ReGlu, true);
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, layers)?;
    h.set_windows(keys, None, 0)?;
    h.attention_mut()
        .step_by(4)
        .for_each(|attn| attn.rope = attn.rope.filter(|_| attn.window.take().is_none()));
    Ok(h)
}
