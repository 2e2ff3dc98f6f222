//! Weights of an index.

use crate::compute::weight::Linear;

/// Weights of an index.
#[derive(Clone, Debug)]
pub(crate) struct Indexer {
    /// Queries, from the low-rank vector from which those of attention are computed, or from the
    /// layer's input; then the norm of heads.
    pub(crate) q: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    /// Keys, from the layer's input; then their norm, by the root mean square if there is no bias.
    pub(crate) k: Linear,
    pub(crate) k_norm: Vec<f32>,
    pub(crate) k_norm_bias: Option<Vec<f32>>,
    /// Weights of the heads, from the layer's input.
    pub(crate) proj: Option<Linear>,
    /// Scores of keys within their group, from the layer's input, and what is added by place in it:
    /// `(pool, head_dim)`.
    pub(crate) pool: Option<(Linear, Vec<f32>)>,
}
