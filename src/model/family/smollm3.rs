//! SmolLM 3: a llama whose every fourth layer is not rotated.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::SwiGlu)?)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.attention_mut()
        .skip(3)
        .step_by(4)
        .for_each(|attn| attn.rope = None);
    Ok(h)
}
