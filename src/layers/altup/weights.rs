//! Weights of several residual streams.

use crate::compute::weight::{Linear, Weight};
use crate::layers::norm::weights::Norm;

/// Weights between the residual streams of a layer, see `layers/altup.rs`, and of its side path.
#[derive(Clone, Debug)]
pub(crate) struct AltUp {
    pub(crate) norm: Norm,
    pub(crate) router: Linear,
    /// `(n_stream², n_stream)` and `(n_stream, n_stream)`.
    pub(crate) predict: Vec<f32>,
    pub(crate) correct: Vec<f32>,
    /// Factors on the corrected first stream, `(n_embd)`.
    pub(crate) scale: Vec<f32>,
    pub(crate) laurel: Laurel,
}

/// A learned residual of low rank, `x + norm(R·L·x)` (arXiv 2411.07501).
#[derive(Clone, Debug)]
pub(crate) struct Laurel {
    pub(crate) left: Linear,
    pub(crate) right: Linear,
    pub(crate) norm: Norm,
}

/// Matrices that make residual streams from embeddings, and that bring them together, for all but
/// the first.
#[derive(Clone, Debug)]
pub(crate) struct AltUpEnds {
    pub(crate) project: Vec<Weight>,
    pub(crate) unproject: Vec<Weight>,
}
