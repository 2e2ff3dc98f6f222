//! Dense feed-forward layer.

use crate::layers::activation::spec::Activation;

/// Dense feed-forward layer: `down(act(x))`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct DenseSpec {
    /// Width of the hidden layer.
    pub n_ff: usize,
    /// `act`.
    pub activation: Activation,
    /// Whether gate and up are one matrix, the gate first.
    pub fused: bool,
    /// Standard deviations above their mean below which gates are 0; what is left is reduced by as
    /// much (Gemma 3n).
    pub sparsity: Option<f32>,
    /// Whether what `down` is multiplied by has a norm.
    pub sub_norm: bool,
}
