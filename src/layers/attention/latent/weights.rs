//! Weights of latent attention.

use crate::compute::weight::{Linear, Weight};

/// Weights of latent attention besides those in [`Attn`](crate::layers::attention::weights::Attn).
#[derive(Clone, Debug)]
pub(crate) struct Latent {
    /// Low-rank matrix before `wq`, and its norm; if absent, `wq` reads the layer's input.
    pub(crate) q_a: Option<(Linear, Vec<f32>)>,
    /// Norm of the latent.
    pub(crate) kv_norm: Vec<f32>,
    /// From a head's queries to the latent, one matrix per head, in the absorbed form.
    pub(crate) k_b: Option<Weight>,
    /// Norm of the rotated part of keys.
    pub(crate) rot_norm: Option<Vec<f32>>,
}
