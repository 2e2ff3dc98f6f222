//! Mamba of PLaMo 2.

use crate::layers::conv::spec::ConvSpec;

/// Mamba of PLaMo 2: Mamba 2's state spaces, whose time steps and what goes into and out of the state
/// come from convolved channels, as in Mamba 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadedMambaSpec {
    /// Channels of all heads.
    pub n_inner: usize,
    /// Heads.
    pub n_head: usize,
    /// Values of a channel's state.
    pub n_state: usize,
    /// Width of what time steps are products with.
    pub dt_rank: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
}

impl HeadedMambaSpec {
    /// The convolution before the state.
    pub(crate) fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: self.n_inner,
            n_tap: self.n_tap,
        }
    }

    /// Channels, what goes into and out of the state, and time steps.
    pub(crate) fn n_feed(&self) -> usize {
        self.n_inner + 2 * self.n_state + self.n_head
    }
}
