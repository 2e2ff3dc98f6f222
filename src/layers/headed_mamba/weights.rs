//! Weights of PLaMo 2's mamba.

use crate::compute::weight::Linear;
use crate::layers::conv::weights::Conv;

/// Weights of PLaMo 2's mamba.
#[derive(Clone, Debug)]
pub(crate) struct HeadedMamba {
    /// To the gate and what is convolved, head by head.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    /// From convolved channels to what goes into the state, what comes out of it, and time steps of
    /// low rank.
    pub(crate) x: Linear,
    /// Norms of these three.
    pub(crate) norms: [Vec<f32>; 3],
    /// To time steps.
    pub(crate) dt: Linear,
    /// How fast each head forgets, negative.
    pub(crate) a: Vec<f32>,
    /// Factors on what bypasses the state, by head.
    pub(crate) d: Vec<f32>,
    pub(crate) output: Linear,
}
