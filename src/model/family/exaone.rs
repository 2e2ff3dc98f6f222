//! EXAONE 4, with norms after each block, and the mixture K-EXAONE. If some layers have windows,
//! only those are rotated.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

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
