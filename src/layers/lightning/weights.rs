//! Weights of lightning attention.

use crate::compute::weight::Linear;

/// Weights of lightning attention.
#[derive(Clone, Debug)]
pub(crate) struct Lightning {
    /// To queries, keys and values, head by head.
    pub(crate) qkv: Linear,
    /// To the gate of the output.
    pub(crate) gate: Linear,
    /// Norm of the output of all heads.
    pub(crate) norm: Vec<f32>,
    pub(crate) output: Linear,
}
