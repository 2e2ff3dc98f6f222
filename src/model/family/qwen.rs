//! Qwen 2, 2.5 and 3, dense and mixture of experts.

use super::Layout;
use super::llama::experts;
use crate::error::ModelError;
use crate::model::hparams::{Hparams, Keys, QkNorm};

pub(super) const QWEN2: Layout = Layout { biased: &["attn_q", "attn_k", "attn_v", "attn_qkv"], ..super::LAYOUT };
pub(super) const QWEN2MOE: Layout = Layout { own_head: true, ..QWEN2 };

pub(super) fn qwen2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.window = keys.window(None, 0)?;
    h.finish(keys)
}

pub(super) fn qwen3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    Ok(Hparams { qk_norm: QkNorm::PerHead, ..qwen2(keys)? })
}

pub(super) fn qwen2moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    moe(qwen2(keys)?, keys, false)
}

pub(super) fn qwen3moe(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    moe(qwen3(keys)?, keys, true)
}

fn moe(mut h: Hparams, keys: &Keys<'_>, normalise: bool) -> Result<Hparams, ModelError> {
    let mut experts = experts(keys, normalise)?
        .ok_or_else(|| ModelError::MissingKey { key: format!("{}.expert_count", keys.arch) })?;
    experts.n_ff_shared = keys.opt_count("expert_shared_feed_forward_length", 1 << 20)?.unwrap_or(0);
    h.n_ff = match keys.opt_count("expert_feed_forward_length", 1 << 20)? {
        Some(n) => n,
        None => h.n_ff / experts.n_used,
    };
    h.experts = Some(experts);
    Ok(h)
}
