//! Several residual streams.

/// Most residual streams.
pub(crate) const MAX_STREAMS: usize = 8;

/// Several residual streams (AltUp, arXiv 2301.13310), and in each layer a side path around
/// attention (Laurel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamsSpec {
    /// Streams.
    pub n_stream: usize,
    /// Width of the middle of a side path.
    pub laurel_rank: usize,
}
