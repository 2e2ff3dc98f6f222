//! GroveMoE: a Qwen 3 mixture with adjugate experts behind the others.

use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::moe::spec::AdjugateSpec;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// Factor on adjugate experts in files that lack it (llama.cpp's `models/grovemoe.cpp`).
const SCALE: f32 = 0.05;
/// Experts of a group in such files.
const N_GROUP: usize = 2;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.mixture(0, true)?;
    let n_ff = keys.count("expert_chunk_feed_forward_length", 1 << 20)?;
    let n_group = keys
        .opt_count("experts_per_group", 1024)?
        .unwrap_or(N_GROUP);
    let scale = keys.number("expert_group_scale")?.unwrap_or(SCALE);
    for moe in ffn.iter_mut().filter_map(FfnSpec::moe_mut) {
        keys.divides("expert_count", moe.n_expert, "experts_per_group", n_group)?;
        if moe.shared.is_some() {
            return Err(ModelError::Inconsistent {
                what: "a shared expert beside adjugate ones".into(),
            });
        }
        moe.adjugate = Some(AdjugateSpec {
            n_group,
            n_ff,
            scale,
        });
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}
