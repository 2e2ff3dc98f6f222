//! Weights of attention.

use crate::compute::weight::Linear;
use crate::layers::attention::latent::weights::Latent;
use crate::layers::indexer::weights::Indexer;

/// Weights of attention.
#[derive(Clone, Debug)]
pub(crate) struct Attn {
    pub(crate) wq: Linear,
    /// In a layer that reads another's keys and values, these are the other's.
    pub(crate) wk: Linear,
    pub(crate) wv: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    /// What [`balance`](crate::layers::attention::balance::balance) has multiplied keys by.
    pub(crate) key_factors: Option<Vec<f32>>,
    /// Factors on query heads.
    pub(crate) q_gains: Option<Vec<f32>>,
    pub(crate) wo: Linear,
    /// Biases of layer norms of queries and keys.
    pub(crate) qk_norm_biases: Option<[Vec<f32>; 2]>,
    /// Biases of scores, `(n_bucket, n_head)`, see
    /// [`AttnSpec::relative`](crate::layers::attention::spec::AttnSpec::relative).
    pub(crate) relative: Option<Vec<f32>>,
    /// Attention sinks: a score per head.
    pub(crate) sinks: Option<Vec<f32>>,
    /// Gate of the output of all heads, see
    /// [`AttnSpec::gated`](crate::layers::attention::spec::AttnSpec::gated).
    pub(crate) gate: Option<Linear>,
    /// Norm of the output of all heads.
    pub(crate) sub_norm: Option<Vec<f32>>,
    /// With latent attention, `wk` computes the latent and the rotated part of keys. `wv` holds
    /// the matrices of all heads from the latent to keys and values or, in the absorbed form,
    /// to values only.
    pub(crate) latent: Option<Box<Latent>>,
    /// Index of the positions that are seen, if the layer has one of its own.
    pub(crate) index: Option<Box<Indexer>>,
}
