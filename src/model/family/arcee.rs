//! Arcee's AFM: a llama whose feed-forward layer is a squared ReLU without a gate.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SquaredRelu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}
