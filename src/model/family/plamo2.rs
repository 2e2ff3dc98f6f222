//! PLaMo 2: Mamba and attention in turn, norms on both sides of everything.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// Least width of what time steps are products with (Hugging Face `Plamo2Config`).
const LEAST_RANK: usize = 64;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_embd = keys.count("embedding_length", 1 << 17)?;
    let spec = HeadedMambaSpec {
        n_inner: keys.count("ssm.inner_size", 1 << 17)?,
        n_head: keys.count("ssm.time_step_rank", 1 << 12)?,
        n_state: keys.count("ssm.state_size", 1 << 12)?,
        dt_rank: LEAST_RANK.max(n_embd / 16),
        n_tap: keys.taps("ssm.conv_kernel")?,
    };
    keys.only("ssm.group_count", &[0.0])?;
    keys.divides(
        "ssm.inner_size",
        spec.n_inner,
        "ssm.time_step_rank",
        spec.n_head,
    )?;
    let mut h = Hparams::hybrid(
        keys,
        NormKind::Rms,
        keys.dense_fused(Activation::SwiGlu)?,
        keys.attention_or(&RecurrentSpec::HeadedMamba(spec))?,
    )?;
    h.set_norms(Norms::Both);
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::RmsByHead));
    Ok(h)
}
