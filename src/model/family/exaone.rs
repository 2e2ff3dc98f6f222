//! EXAONE 4, with norms after each block, and the mixture K-EXAONE. If some layers have windows,
//! only those are rotated.

use crate::model::ModelError;
use crate::model::hparams::{Hparams, NormKind};
use crate::model::keys::Keys;
use crate::model::spec::{Activation, FfnSpec, Norms, QkNorm};

pub(super) fn exaone4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = both(keys, keys.dense(Activation::SwiGlu)?)?;
    h.set_norms(Norms::After);
    Ok(h)
}

pub(super) fn moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.sigmoid_mixture(1, true)?)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    h.set_windows(keys, None, 4)?;
    if h.attention().any(|attn| attn.window.is_some()) {
        h.rotate_in_windows_alone();
    }
    Ok(h)
}
