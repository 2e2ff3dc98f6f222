//! Weights of cross attention.

use crate::compute::weight::Linear;
use crate::layers::norm::weights::Norm;

/// Weights of cross attention.
#[derive(Clone, Debug)]
pub(crate) struct CrossAttn {
    /// Norm of what queries are computed from.
    pub(crate) norm: Norm,
    pub(crate) q: Linear,
    /// Matrices of what the encoder left.
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) output: Linear,
}
