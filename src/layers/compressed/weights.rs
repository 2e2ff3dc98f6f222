//! Weights of attention to compressed blocks.

use crate::compute::weight::Linear;

/// Weights of attention to compressed blocks.
#[derive(Clone, Debug)]
pub(crate) struct Compressed {
    pub(crate) q_a: Linear,
    pub(crate) q_a_norm: Vec<f32>,
    pub(crate) q_b: Linear,
    pub(crate) kv: Linear,
    pub(crate) kv_norm: Vec<f32>,
    /// A score per head of no key.
    pub(crate) sinks: Vec<f32>,
    /// Of each group of heads, one after the other; then of all groups together.
    pub(crate) out_a: Linear,
    pub(crate) out_b: Linear,
    pub(crate) blocks: Option<Compressor>,
    pub(crate) index: Option<BlockIndex>,
}

/// What makes entries of blocks: means of `kv`, weighed in each channel by the softmax of `gate` and
/// what is added by place in a block, `(ratio, n_part·n)`; then a norm.
#[derive(Clone, Debug)]
pub(crate) struct Compressor {
    pub(crate) kv: Linear,
    pub(crate) gate: Linear,
    pub(crate) places: Vec<f32>,
    pub(crate) norm: Vec<f32>,
}

/// Choice of entries.
#[derive(Clone, Debug)]
pub(crate) struct BlockIndex {
    pub(crate) keys: Compressor,
    /// Queries, from the low-rank vector of the others, and weights of heads.
    pub(crate) q: Linear,
    pub(crate) proj: Linear,
}
