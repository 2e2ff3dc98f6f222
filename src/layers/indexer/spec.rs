//! Choice of the positions that attention sees.

use crate::layers::rope::spec::RopeId;

/// Widest head of an index.
pub(crate) const MAX_INDEX_DIM: usize = 256;

/// Sparse attention: an index of few, short heads scores all earlier positions, and a query sees only
/// the best.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexSpec {
    /// Whether the layer has no index: its queries see what those of the last layer with one saw.
    pub shared: bool,
    /// How positions are scored.
    pub kind: IndexKind,
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
    /// Adjacent positions that are seen together.
    pub n_group: usize,
}

/// Scores of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexKind {
    /// `Σ w_i·max(q_i·k, 0)` over the heads `i`, whose weights the layer's input gives (DeepSeek
    /// V3.2).
    Weighed,
    /// The same, of a key for each group: the weighed mean of its positions' keys. An incomplete last
    /// group is always seen (GLM 5 Next).
    Pooled,
    /// `Σ max(q_i·k, 0)`, where the key of a group is the mean of its positions', behind which are
    /// norm and rotation. An incomplete last group is always seen (Qwen 4).
    Mean,
    /// For each key/value head of attention, the largest product of its query with a key of the
    /// group (MiniMax M3).
    Largest {
        /// Last groups that are always seen, the query's own included.
        n_local: usize,
    },
}

impl IndexSpec {
    /// Choices of a query: one for all heads, or one for each key/value head.
    pub(crate) fn n_choice(&self) -> usize {
        match self.kind {
            IndexKind::Weighed | IndexKind::Pooled | IndexKind::Mean => 1,
            IndexKind::Largest { .. } => self.n_head,
        }
    }

    /// Most positions that are chosen for a query, the last group's included.
    pub(crate) fn n_chosen(&self) -> usize {
        self.top_k + self.n_group - 1
    }
}
