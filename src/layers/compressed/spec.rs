//! Attention to a window and to compressed blocks.

use crate::layers::rope::spec::RopeId;

/// Attention to the last positions and to entries, each of which stands for a block of earlier ones
/// (DeepSeek V4). There is one key for all heads, which is the value, too.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CompressedSpec {
    /// Query heads.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the low-rank vector from which queries are computed.
    pub q_rank: usize,
    /// Positions seen as they are, the current one included.
    pub window: usize,
    /// How the last dimensions of heads are rotated; those of outputs are turned back.
    pub rope: RopeId,
    /// Groups of heads whose outputs are multiplied by a matrix each, and the rank of those.
    pub n_out_group: usize,
    /// See `n_out_group`.
    pub out_rank: usize,
    /// The entries, if there are some.
    pub blocks: Option<BlocksSpec>,
}

/// Entries of blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlocksSpec {
    /// Positions of a block.
    pub ratio: usize,
    /// Whether an entry is made of the block before, too, by channels of its own.
    pub overlaps: bool,
    /// Choice of the entries that are seen; `None`: all of complete blocks.
    pub index: Option<BlockIndexSpec>,
}

/// Choice of entries: those with the largest `Σ w_i·max(q_i·k, 0)` over the heads `i`, whose keys
/// are made like entries.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockIndexSpec {
    /// Query heads.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Entries that a query sees.
    pub top_k: usize,
}

impl BlocksSpec {
    /// Parts of what a token gives to entries, each as wide as an entry.
    pub(crate) fn n_part(&self) -> usize {
        if self.overlaps { 2 } else { 1 }
    }
}
