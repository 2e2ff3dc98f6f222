//! SmolLM 3: a llama whose every fourth layer is not rotated.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, RopeOrder};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.rope.order = RopeOrder::Norm;
    h.no_rope_step = 4;
    h.finish(keys)
}
