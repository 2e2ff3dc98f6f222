//! Embeddings for each layer (Gemma 3n, 4): weights. Their specification is one number, [`Hparams::per_layer_embd`](crate::layers::hparams::Hparams::per_layer_embd).

use crate::compute::weight::{Linear, Weight};
use crate::layers::norm::weights::Norm;

/// Weights that compute each layer's vector per token: `(norm(proj·x) + table)/√2` from the
/// embeddings `x`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayerInputs {
    /// Embeddings per token, `n_layer·n` values.
    pub(crate) table: Weight,
    pub(crate) proj: Weight,
    /// Norm of the `n` values of a layer.
    pub(crate) norm: Vec<f32>,
}

/// Weights that add such a vector in a layer: `norm(proj·(gelu(gate·x)·vector))`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayer {
    pub(crate) gate: Linear,
    pub(crate) proj: Linear,
    pub(crate) norm: Norm,
}
