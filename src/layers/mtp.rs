//! Inputs of a block for multi-token prediction: weights.

use crate::compute::weight::Linear;
use crate::layers::norm::weights::Norm;

/// Weights that make the inputs of a block for multi-token prediction: `proj·[norm(embedding);
/// norm(state)]`.
#[derive(Clone, Debug)]
pub(crate) struct MtpInput {
    pub(crate) embd_norm: Norm,
    pub(crate) state_norm: Norm,
    pub(crate) proj: Linear,
}
