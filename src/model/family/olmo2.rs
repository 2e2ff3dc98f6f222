//! OLMo 2: norms behind each block instead of before it, q/k norm over all heads.

use super::{Layout, Norms};
use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, QkNorm};

pub(super) const LAYOUT: Layout = Layout { norms: Norms::After, own_head: true, ..super::LAYOUT };

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Hparams { qk_norm: QkNorm::Full, ..Hparams::base(keys)? }.finish(keys)
}
