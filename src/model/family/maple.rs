//! Maple: mixtures whose gates and inputs are clamped before SwiGLU; only layers with a window are
//! rotated.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.mixture(0, true)?;
    keys.ignore("swiglu_clamp_exp");
    let limits = keys.numbers("maple.swiglu_clamp_exp")?;
    for (moe, limit) in ffn.iter_mut().filter_map(FfnSpec::moe_mut).zip(limits) {
        if !(limit.is_finite() && limit > 0.0) {
            return Err(ModelError::OutOfRange {
                key: "maple.swiglu_clamp_exp".into(),
                value: limit.to_string(),
                expected: "finite numbers above 0".into(),
            });
        }
        moe.activation = Activation::SwiGluClamped { limit };
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    h.set_windows(keys, None, 0)?;
    h.rotate_in_windows_alone();
    if let Some(theta) = keys.positive("rope.freq_base_swa")? {
        h.set_window_rope(theta);
    }
    Ok(h)
}
