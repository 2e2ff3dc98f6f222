//! Dense feed-forward layer.

use crate::layers::activation::spec::Activation;

/// Dense feed-forward layer: `down(act(gate(x))·up(x))`, or `down(act(up(x)))`.
// The default is derived, in which a factor would be 0: it has to be an `Option`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct DenseSpec {
    /// Width of the hidden layer.
    pub n_ff: usize,
    /// `act`, which says whether there is a gate.
    pub activation: Activation,
    /// Whether gate and up are one matrix, the gate first.
    pub fused: bool,
    /// Standard deviations above their mean below which gates are 0; what is left is reduced by as
    /// much (Gemma 3n).
    pub sparsity: Option<f32>,
    /// Whether the input of `down` has a norm.
    pub sub_norm: bool,
}
