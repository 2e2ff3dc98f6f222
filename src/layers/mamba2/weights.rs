//! Weights of mamba 2.

use crate::compute::weight::Linear;
use crate::layers::conv::weights::Conv;

/// Weights of Mamba 2.
#[derive(Clone, Debug)]
pub(crate) struct Mamba2 {
    /// To the gate, what is convolved, and time steps.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    pub(crate) dt_bias: Vec<f32>,
    /// How fast each head forgets, negative.
    pub(crate) a: Vec<f32>,
    /// Factors on what bypasses the state, by head.
    pub(crate) d: Vec<f32>,
    /// Of the output, group by group.
    pub(crate) norm: Option<Vec<f32>>,
    pub(crate) output: Linear,
}
