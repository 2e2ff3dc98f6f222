//! RWKV.

/// Time mix of RWKV: each head has a matrix as state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeMixSpec {
    /// Heads.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The version, by the ranks of its products of low rank.
    pub ranks: TimeMixRanks,
}

/// Versions of RWKV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeMixRanks {
    /// RWKV 6.
    Six {
        /// Of the blends of each of five inputs.
        blend: usize,
        /// Of decays.
        decay: usize,
    },
    /// RWKV 7.
    Seven {
        /// Of decays.
        decay: usize,
        /// Of learning rates.
        rate: usize,
        /// Of the blends with the first layer's values; `None`: this is the first layer.
        residual: Option<usize>,
        /// Of gates.
        gate: usize,
    },
}

impl TimeMixSpec {
    /// Width of all heads.
    pub fn n_embd(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Width of the widest product of low rank.
    pub(crate) fn most_rank(&self) -> usize {
        match self.ranks {
            TimeMixRanks::Six { blend, decay } => decay.max(5 * blend),
            TimeMixRanks::Seven {
                decay,
                rate,
                residual,
                gate,
            } => decay.max(rate).max(residual.unwrap_or(0)).max(gate),
        }
    }

    /// Values that feed a token into the states.
    pub(crate) fn n_feed(&self) -> usize {
        self.n_embd()
            * if let TimeMixRanks::Six { .. } = self.ranks {
                4
            } else {
                6
            }
    }
}

/// Channel mix of RWKV: a feed-forward layer that also reads the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelMixSpec {
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the hidden layer.
    pub n_ff: usize,
    /// Whether the output is multiplied by the sigmoid of a product with the input (RWKV 6).
    pub gated: bool,
}
