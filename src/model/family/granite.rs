//! IBM Granite 3: a llama with four multipliers.

use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, RopeOrder};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.rope.order = RopeOrder::Norm;
    // Here it says whether anything is rotated.
    keys.only("rope.scaling.finetuned", &[1.0])?;
    h.attn_scale = keys.positive("attention.scale")?.unwrap_or(h.attn_scale);
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(1.0);
    h.residual_scale = keys.positive("residual_scale")?.unwrap_or(1.0);
    h.logit_scale = 1.0 / keys.positive("logit_scale")?.unwrap_or(1.0);
    h.finish(keys)
}
