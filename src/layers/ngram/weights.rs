//! Weights of embeddings of several tokens.

use crate::compute::weight::{Linear, Weight};

/// Weights of embeddings of several tokens.
#[derive(Clone, Debug)]
pub(crate) struct Ngrams {
    pub(crate) table: Weight,
    /// From embeddings to a key for each stream, and to a value for all of them.
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    /// Norms of each stream.
    pub(crate) key_norm: Vec<f32>,
    pub(crate) query_norm: Vec<f32>,
    pub(crate) conv_norm: Vec<f32>,
    /// Of each channel of all streams, the factors of its tokens, the last one last.
    pub(crate) taps: Vec<f32>,
}
