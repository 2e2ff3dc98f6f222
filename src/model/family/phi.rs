//! Phi 2, and Phi 3 to 4 (fused q/k/v and gate/up, long rope, partial rotation).

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec};
use crate::layers::moe::spec::Gating;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn phi2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::Gelu)?)?;
    h.set_norms(Norms::Shared);
    h.set_biases(Biases::All);
    h.head_bias = true;
    Ok(h)
}

/// Phi 3.5 MoE. Each of the router's two picks has its own softmax, as in Hugging Face; llama.cpp
/// has one softmax.
pub(super) fn phimoe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut layers = keys.mixture(0, false)?;
    layers
        .iter_mut()
        .filter_map(FfnSpec::moe_mut)
        .for_each(|moe| moe.gating = Gating::SparseMixer);
    let mut h = Hparams::llama(keys, NormKind::Layer, layers)?;
    h.set_windows(keys, None, 0)?;
    h.set_biases(Biases::All);
    h.head_bias = true;
    Ok(h)
}

/// Phi 3 and 4; Phi 4 mini has no head of its own.
pub(super) fn phi3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense_fused(Activation::SwiGlu)?)?;
    h.set_windows(keys, None, 0)?;
    Ok(h)
}
