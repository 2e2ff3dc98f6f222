//! Cohere's Command R and R7B, and their mixtures: attention and feed-forward layer in parallel,
//! norms without bias. Command R7B rotates only in layers with windows.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn command_r(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    all(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn cohere2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    two(keys, keys.dense(Activation::SwiGlu)?)
}

pub(super) fn cohere2moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    // The mean of shared and chosen experts would be wanted, where others have the sum.
    keys.only("expert_shared_count", &[0.0])?;
    two(keys, keys.sigmoid_mixture(0, true)?)
}

fn two(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = all(keys, ffn)?;
    h.set_windows(keys, Some(4096), 4)?;
    h.rotate_in_windows_alone();
    Ok(h)
}

fn all(keys: &Keys<'_>, ffn: Vec<FfnSpec>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::LayerNoBias, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    h.set_norms(Norms::Shared);
    // Of Command R+.
    if keys.has_part("attn_q_norm.weight") {
        h.attention_mut()
            .for_each(|attn| attn.qk_norm = Some(QkNorm::LayerByHead));
    }
    h.logit_scale = keys.positive("logit_scale")?.unwrap_or(1.0);
    Ok(h)
}
