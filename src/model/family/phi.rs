//! Phi 2, and Phi 3 to 4 (fused q/k/v and gate/up, long rope, partial rotation).

use crate::error::ModelError;
use crate::model::hparams::{Activation, Hparams, Keys, NormKind, Window};

pub(super) fn phi2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.norm = NormKind::Layer;
    h.activation = Activation::Gelu;
    h.parallel_residual = true;
    h.finish(keys)
}

pub(super) fn phi3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.window = keys.window()?.map(|size| Window { size, pattern: 0 });
    h.finish(keys)
}
