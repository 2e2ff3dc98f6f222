//! StableLM 2, StarCoder 2, Nemotron and Jais 2: llamas with layer norms. The last three have no gate.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, NormKind};
use crate::model::spec::{Activation, Biases};

pub(super) fn stablelm(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("use_parallel_residual", &[0.0])?;
    Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn starcoder2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::Gelu)?)?;
    h.set_biases(Biases::All);
    Ok(h)
}

pub(super) fn nemotron(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams::llama(keys, NormKind::Layer, keys.dense(Activation::SquaredRelu)?)
}

pub(super) fn jais2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = nemotron(keys)?;
    h.set_biases(Biases::All);
    Ok(h)
}
