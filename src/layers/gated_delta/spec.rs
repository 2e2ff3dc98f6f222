//! Gated delta rule.

use crate::layers::conv::spec::ConvSpec;

/// Gated delta rule: each head has a matrix from keys to values, which a token corrects by as much
/// as it errs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct DeltaSpec {
    /// Heads of values.
    pub n_head: usize,
    /// Heads of queries and keys.
    pub n_head_k: usize,
    /// Width of a query or key head.
    pub head_dim_k: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Which heads of values share one of keys: with `n_head_k` of them, every `n_head_k`-th;
    /// otherwise neighbours.
    pub tiled: bool,
    /// Whether each key dimension forgets at a rate of its own (arXiv 2510.26692), and the
    /// output's gate is a sigmoid.
    pub by_channel: bool,
    /// Whether strengths and rates are products with one matrix, by key head.
    pub fused: bool,
    /// Lower bound of the logarithms of rates, below 0: they are `bound·σ(a·(f + b))`, where those
    /// without one are `−a·ln(1 + e^(f + b))`.
    pub bound: Option<f32>,
    /// Added to the squared length that a query or key is divided by; `None`: 1e-6.
    pub length_eps: Option<f32>,
    /// Whether the output's gate is a sigmoid without rates by channel, too.
    pub sigmoid_gate: bool,
}

impl DeltaSpec {
    /// The convolution of queries, keys and values.
    pub(crate) fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: 2 * self.n_head_k * self.head_dim_k + self.n_out(),
            n_tap: self.n_tap,
        }
    }

    /// Width of the output of all heads.
    pub(crate) fn n_out(&self) -> usize {
        self.n_head * self.head_dim_v
    }

    /// Rates at which the heads forget.
    pub(crate) fn n_rate(&self) -> usize {
        if self.by_channel {
            self.n_head * self.head_dim_k
        } else {
            self.n_head
        }
    }
}
