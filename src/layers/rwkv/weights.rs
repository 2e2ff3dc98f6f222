//! Weights of RWKV.

use crate::compute::weight::{Linear, Weight};
use crate::layers::conv::weights::Conv;
use crate::layers::norm::weights::Norm;

/// Weights of RWKV's time mix. Blends of a token's input with that of the one before have shares,
/// `(n_embd)` each.
#[derive(Clone, Debug)]
pub(crate) struct TimeMix {
    /// Gives out the inputs of the tokens before.
    pub(crate) shift: Conv,
    pub(crate) receptance: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    /// Of each head of the output.
    pub(crate) norm: Option<Norm>,
    pub(crate) output: Linear,
    pub(crate) weights: TimeMixWeights,
}

/// What differs between versions.
#[derive(Clone, Debug)]
pub(crate) enum TimeMixWeights {
    Six(Box<TimeMix6>),
    Linear(Box<TimeMix6>),
    Seven(Box<TimeMix7>),
}

/// Weights of RWKV 6, also as linear attention.
#[derive(Clone, Debug)]
pub(crate) struct TimeMix6 {
    /// Of the blend from which shares are computed by products of low rank, those of decay, key,
    /// value, receptance and gate; and what is added to these.
    pub(crate) share: Vec<f32>,
    pub(crate) low: Linear,
    pub(crate) up: Weight,
    pub(crate) shares: Vec<f32>,
    pub(crate) decay: Vec<f32>,
    pub(crate) decay_low: Linear,
    pub(crate) decay_up: Linear,
    /// Weight of a token in its own output; empty where that is as of later ones.
    pub(crate) first: Vec<f32>,
    pub(crate) gate: Linear,
}

/// Weights of RWKV 7; pairs of matrices are products of low rank.
#[derive(Clone, Debug)]
pub(crate) struct TimeMix7 {
    /// Shares for receptance, decay, key, value, rate and gate.
    pub(crate) shares: Vec<f32>,
    pub(crate) decay: [Linear; 2],
    pub(crate) decay_bias: Vec<f32>,
    /// How much of the first layer's values is taken; the first layer has none.
    pub(crate) residual: Option<(Vec<f32>, [Linear; 2])>,
    pub(crate) rate: [Linear; 2],
    pub(crate) rate_bias: Vec<f32>,
    pub(crate) gate: Option<[Linear; 2]>,
    /// Factors on keys, for what is removed from the state, and for what replaces it.
    pub(crate) removal: Vec<f32>,
    pub(crate) replacement: Vec<f32>,
    /// Weight of a token in its own output.
    pub(crate) bonus: Vec<f32>,
}

/// Weights of RWKV's channel mix.
#[derive(Clone, Debug)]
pub(crate) struct ChannelMix {
    /// As of a time mix.
    pub(crate) shift: Conv,
    pub(crate) share_key: Vec<f32>,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    /// Share of the gate's blend, and the gate.
    pub(crate) receptance: Option<(Vec<f32>, Linear)>,
}
