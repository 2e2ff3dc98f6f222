//! Weights of gated delta rule.

use crate::compute::weight::Linear;
use crate::layers::conv::weights::Conv;

/// Weights of a gated delta rule.
#[derive(Clone, Debug)]
pub(crate) struct Delta {
    pub(crate) input: DeltaInput,
    pub(crate) conv: Conv,
    /// How fast each head forgets, negative unless rates have a bound, and what is added to its rates.
    pub(crate) a: Vec<f32>,
    pub(crate) dt_bias: Vec<f32>,
    /// Of a head of the output.
    pub(crate) norm: Vec<f32>,
    pub(crate) output: Linear,
}

/// The matrices that a delta rule's input is multiplied by.
#[derive(Clone, Debug)]
pub(crate) enum DeltaInput {
    /// Strengths and rates in one, by key head (Qwen3-Next).
    Fused {
        qkv: Linear,
        gate: Linear,
        beta_rate: Linear,
    },
    /// One for each (Qwen 3.5).
    Split {
        qkv: Linear,
        gate: Linear,
        beta: Linear,
        rate: Linear,
    },
    /// Rates and gates of one matrix each or, of low rank, of two (Kimi Linear).
    Low {
        qkv: Box<[Linear; 3]>,
        beta: Linear,
        rate: Box<[Linear]>,
        gate: Box<[Linear]>,
    },
}
