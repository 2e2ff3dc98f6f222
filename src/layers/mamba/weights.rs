//! Weights of mamba 1.

use crate::compute::weight::Linear;
use crate::layers::conv::weights::Conv;

/// Weights of Mamba 1.
#[derive(Clone, Debug)]
pub(crate) struct Mamba {
    /// To what is convolved, and the gate.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    /// From convolved channels to time steps of low rank, what goes into the state, and what comes
    /// out of it.
    pub(crate) x: Linear,
    /// Norms of these three; empty if there are none.
    pub(crate) norms: Vec<Vec<f32>>,
    /// To time steps.
    pub(crate) dt: Linear,
    /// How fast each value of a state is forgotten, negative: `(n_state, n_block)` for each
    /// [`MambaSpec::n_block`](crate::layers::mamba::spec::MambaSpec::n_block) channels.
    pub(crate) a: Vec<f32>,
    /// Factors on what bypasses the state.
    pub(crate) d: Vec<f32>,
    pub(crate) output: Linear,
}
