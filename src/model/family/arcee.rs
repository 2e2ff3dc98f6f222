//! Arcee's AFM: a llama whose feed-forward layer is a squared ReLU without a gate.

use crate::model::ModelError;
use crate::model::hparams::{Hparams, NormKind};
use crate::model::keys::Keys;
use crate::model::rope::RopeOrder;
use crate::model::spec::Activation;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SquaredRelu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}
