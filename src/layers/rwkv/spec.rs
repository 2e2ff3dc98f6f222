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
    /// Whether the output of each head has a norm.
    pub norm: bool,
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
    /// RWKV 6 as linear attention, with keys and values that heads share (RWKV 6 Qwen 2, arXiv
    /// 2505.03005).
    Linear {
        /// As in RWKV 6.
        blend: usize,
        /// As in RWKV 6.
        decay: usize,
        /// Heads of keys and values.
        n_head_kv: usize,
    },
    /// RWKV 7.
    Seven {
        /// Of decays.
        decay: usize,
        /// Of learning rates.
        rate: usize,
        /// Of the blends with the first layer's values; `None`: this is the first layer.
        residual: Option<usize>,
        /// Of gates; `None`: there are none.
        gate: Option<usize>,
    },
}

impl TimeMixSpec {
    /// Width of all heads.
    pub(crate) fn n_embd(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Width of the widest product of low rank.
    pub(crate) fn most_rank(&self) -> usize {
        match self.ranks {
            TimeMixRanks::Six { blend, decay } | TimeMixRanks::Linear { blend, decay, .. } => {
                decay.max(5 * blend)
            }
            TimeMixRanks::Seven {
                decay,
                rate,
                residual,
                gate,
            } => decay
                .max(rate)
                .max(residual.unwrap_or(0))
                .max(gate.unwrap_or(0)),
        }
    }

    /// Values that feed a token into the states.
    pub(crate) fn n_feed(&self) -> usize {
        self.n_embd()
            * match self.ranks {
                TimeMixRanks::Six { .. } | TimeMixRanks::Linear { .. } => 4,
                TimeMixRanks::Seven { .. } => 6,
            }
    }

    /// Width of the keys of a token, and of its values.
    pub(crate) fn n_key(&self) -> usize {
        match self.ranks {
            TimeMixRanks::Linear { n_head_kv, .. } => n_head_kv * self.head_dim,
            TimeMixRanks::Six { .. } | TimeMixRanks::Seven { .. } => self.n_embd(),
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
