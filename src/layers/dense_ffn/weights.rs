//! Weights of dense feed-forward layers.

use crate::compute::weight::Linear;
use crate::layers::activation::spec::Activation;

/// Weights of a dense feed-forward layer or of one expert.
#[derive(Clone, Debug)]
pub(crate) struct Ffn {
    pub(crate) activation: Activation,
    /// See [`DenseSpec::sparsity`](crate::layers::dense_ffn::spec::DenseSpec::sparsity).
    pub(crate) sparsity: Option<f32>,
    /// Weights and epsilon of the norm of the input of `down`.
    pub(crate) sub_norm: Option<(Vec<f32>, f32)>,
    pub(crate) gate: Option<Linear>,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}
