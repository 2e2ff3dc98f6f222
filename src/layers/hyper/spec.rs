//! Hyper-connections: several residual streams, which every part of a layer reads and writes with
//! weights of its own.

/// Most streams.
pub(crate) const MAX_HYPER: usize = 8;

/// Hyper-connections (arXiv 2409.19606): a part of a layer reads a weighed sum of streams, and adds
/// its output to each with a weight. The weights are computed from all streams.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct HyperSpec {
    /// Streams.
    pub n_stream: usize,
    /// Added to weights, and to the sums that divide them.
    pub eps: f32,
    /// How streams are connected.
    pub kind: HyperKind,
    /// Whether the head reads a sum with weights of its own. Otherwise it reads the mean.
    pub weighs_last: bool,
}

/// Connection of streams.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum HyperKind {
    /// A stream keeps what it is: outputs are added (Hunyuan 4).
    Independent {
        /// Factor on the weights of outputs.
        magnitude: f32,
    },
    /// Streams are mixed, too, by a matrix whose rows and columns all sum to 1 (arXiv 2512.24880).
    Manifold {
        /// Divisions by the sums of columns, between which rows are divided by theirs.
        n_iter: usize,
    },
    /// A part reads the mean of normed streams, each value of which has a gate; outputs are added
    /// with weights (Qwen 4).
    LowRank {
        /// Width of the middle of what makes the gates.
        rank: usize,
    },
}

impl HyperSpec {
    /// Weights of a part of a layer.
    pub(crate) fn n_weight(&self) -> usize {
        let n = self.n_stream;
        match self.kind {
            HyperKind::Independent { .. } => 2 * n,
            HyperKind::LowRank { .. } => n,
            HyperKind::Manifold { .. } => 2 * n + n * n,
        }
    }

    /// Kinds of weights, each of which has a factor.
    pub(crate) fn n_scale(&self) -> usize {
        match self.kind {
            HyperKind::Independent { .. } => 2,
            HyperKind::Manifold { .. } => 3,
            HyperKind::LowRank { .. } => 0,
        }
    }
}
