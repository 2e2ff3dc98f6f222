//! Mamba 2.

use crate::layers::conv::spec::ConvSpec;

/// Mamba 2: each head of channels has a state for each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mamba2Spec {
    /// Channels of all heads.
    pub n_inner: usize,
    /// Heads.
    pub n_head: usize,
    /// Groups of heads that share what goes into and out of the state.
    pub n_group: usize,
    /// Values of a channel's state.
    pub n_state: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Whether the output of each group has a norm.
    pub norm: bool,
}

impl Mamba2Spec {
    /// The convolution before the state.
    pub(crate) fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: self.n_inner + 2 * self.n_group * self.n_state,
            n_tap: self.n_tap,
        }
    }
}
