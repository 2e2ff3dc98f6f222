//! OpenAI's gpt-oss: a mixture with attention sinks, windows in every second layer, and biases
//! everywhere.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec};
use crate::layers::moe::spec::Gating;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut layers = keys.mixture(0, false)?;
    for moe in layers.iter_mut().filter_map(FfnSpec::moe_mut) {
        (moe.activation, moe.gating) = (Activation::SwiGluOai, Gating::SoftmaxAfterTopK);
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, layers)?;
    h.set_biases(Biases::Everywhere);
    h.set_windows(keys, None, 2)?;
    h.set_sinks(keys);
    Ok(h)
}
