//! Causal convolution.

/// Convolution of each channel with its own values at this token and the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvSpec {
    /// Channels.
    pub n_channel: usize,
    /// Tokens, this one included.
    pub n_tap: usize,
}
