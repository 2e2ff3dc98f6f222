//! Weights of gated short convolutions; their specification is [`ConvSpec`](crate::layers::conv::spec::ConvSpec).

use crate::compute::weight::Linear;
use crate::layers::conv::weights::Conv;

/// Weights of a gated short convolution.
#[derive(Clone, Debug)]
pub(crate) struct ShortConv {
    /// To two gates and what is convolved.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    pub(crate) output: Linear,
}
