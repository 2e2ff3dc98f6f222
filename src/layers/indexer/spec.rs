//! Choice of the positions that attention sees.

use crate::layers::rope::spec::RopeId;

/// Widest head of an index.
pub(crate) const MAX_INDEX_DIM: usize = 256;

/// Sparse attention (DeepSeek V3.2): an index of few, short heads scores all earlier positions, and
/// a query sees only the best. The score of a key `k` is `Σ w_i·max(q_i·k, 0)` over the heads `i`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexSpec {
    /// Whether the layer has no index: its queries see what those of the last layer with one saw.
    pub shared: bool,
    /// Query heads; all share one key.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a query sees.
    pub top_k: usize,
    /// How queries and keys of the index are rotated; `None`: not at all.
    pub rope: Option<RopeId>,
    /// Whether the last dimensions of a head are those rotated, not the first.
    pub rotates_last: bool,
    /// Adjacent positions that are seen together: they have one key, the weighed mean of theirs.
    /// Positions of the last group are seen even if it is incomplete.
    pub pool: Option<usize>,
}

impl IndexSpec {
    /// Positions of a group.
    pub(crate) fn n_group(&self) -> usize {
        self.pool.unwrap_or(1)
    }

    /// Most positions that are chosen for a query, the last group's included.
    pub(crate) fn n_chosen(&self) -> usize {
        self.top_k + self.n_group() - 1
    }
}
