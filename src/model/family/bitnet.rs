//! BitNet b1.58: a llama of ternary matrices, with norms before the output matrices of attention and
//! feed-forward layer.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// BitNet. Its feed-forward layers compute SiLU: whether a model was trained with squared ReLU is
/// not in the file (llama.cpp's `models/bitnet.cpp`).
pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.dense(Activation::SwiGlu)?;
    for ffn in &mut ffn {
        if let FfnSpec::Dense(ffn) = ffn {
            ffn.sub_norm = true;
        }
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut().for_each(|attn| attn.sub_norm = true);
    Ok(h)
}
