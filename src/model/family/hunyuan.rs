//! Tencent's Hunyuan 1, dense, mixture of experts and vision: a llama whose queries and keys have
//! norms after they are rotated.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn dense(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    both(keys, keys.mixture(0, true)?)
}

/// Hunyuan's vision model, of which the text part: a text token has equal positions, so the
/// sections of dimensions do not matter. Long contexts raise the base of the frequencies.
pub(super) fn vision(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.ignore("rope.dimension_sections");
    let mut h = dense(keys)?;
    if let Some(alpha) = keys
        .number("rope.scaling.alpha")?
        .filter(|&alpha| alpha > 0.0)
    {
        for rope in &mut h.ropes {
            let n = rope.n_dims as f32;
            rope.theta *= alpha.powf(n / (n - 2.0));
        }
    }
    Ok(h)
}

fn both(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHeadRotated));
    Ok(h)
}
