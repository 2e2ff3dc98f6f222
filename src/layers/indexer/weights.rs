//! Weights of an index.

use crate::compute::weight::Linear;

/// Weights of an index.
#[derive(Clone, Debug)]
pub(crate) struct Indexer {
    /// Queries, from the low-rank vector from which those of attention are computed.
    pub(crate) q: Linear,
    /// Keys, from the layer's input; then their norm.
    pub(crate) k: Linear,
    pub(crate) k_norm: Vec<f32>,
    pub(crate) k_norm_bias: Vec<f32>,
    /// Weights of the heads, from the layer's input.
    pub(crate) proj: Linear,
    /// Scores of keys within their group, from the layer's input, and what is added by place in it:
    /// `(pool, head_dim)`.
    pub(crate) pool: Option<(Linear, Vec<f32>)>,
}
