//! Lightning attention.

/// Lightning attention (arXiv 2401.04658): each head has a matrix from keys to values as state, which
/// it forgets at a rate of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LightningSpec {
    /// Heads.
    pub n_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the rates at which heads forget, which is another in every layer.
    pub rate: f32,
}

impl LightningSpec {
    /// Width of all heads.
    pub(crate) fn n_out(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// What is left of a head's state after a token: `exp(-rate·2^(-8·(head + 1)/n_head))`.
    pub(crate) fn decay(&self, head: usize) -> f32 {
        let exponent = 8.0 * (head + 1) as f32 / self.n_head as f32;
        (-self.rate * (-exponent).exp2()).exp()
    }
}
