//! Gemma 2 and 3. Norm weights are `1 + w` in the file already.

use super::{Layout, Norms};
use crate::error::ModelError;
use crate::model::hparams::{Activation, Hparams, Keys, QkNorm};

pub(super) const LAYOUT: Layout = Layout { norms: Norms::Both, ..super::LAYOUT };

pub(super) fn gemma2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = gemma(keys, 46)?;
    h.window = keys.window(Some(4096), 2)?;
    h.attn_softcap = keys.positive("attn_logit_softcapping")?.unwrap_or(50.0);
    h.final_softcap = keys.positive("final_logit_softcapping")?.unwrap_or(30.0);
    h.finish(keys)
}

pub(super) fn gemma3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = gemma(keys, 62)?;
    h.window = keys.window(None, 6)?;
    h.qk_norm = QkNorm::PerHead;
    h.rope.theta_window = Some(keys.positive("rope.freq_base_swa")?.unwrap_or(10000.0));
    h.final_softcap = keys.positive("final_logit_softcapping")?.unwrap_or(0.0);
    h.finish(keys)
}

/// What both share. The 27B models, told by their layer count, scale queries by
/// `(n_embd/n_head)^-½`, all others by `head_dim^-½`.
fn gemma(keys: &Keys<'_>, layers_27b: usize) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.activation = Activation::Gelu;
    h.embd_scale = (h.n_embd as f32).sqrt();
    if h.n_layer == layers_27b {
        h.attn_scale = 1.0 / ((h.n_embd / h.n_head) as f32).sqrt();
    }
    Ok(h)
}
