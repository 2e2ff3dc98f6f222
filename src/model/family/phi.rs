//! Phi 2, and Phi 3 to 4 (fused q/k/v and gate/up, long rope, partial rotation).

use super::{Gate, Layout, Norms};
use crate::error::ModelError;
use crate::model::hparams::{Activation, Hparams, Keys, NormKind};

pub(super) const PHI2: Layout = Layout {
    norms: Norms::Shared,
    gate: Gate::None,
    biased: &["attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down", "output"],
    own_head: true,
};
/// Phi 4 mini has no head of its own.
pub(super) const PHI3: Layout = Layout { gate: Gate::InUp, ..super::LAYOUT };

pub(super) fn phi2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.norm = NormKind::Layer;
    h.activation = Activation::Gelu;
    h.parallel_residual = true;
    h.finish(keys)
}

pub(super) fn phi3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::base(keys)?;
    h.window = keys.window(None, 0)?;
    h.finish(keys)
}
