//! Adapters in the model's file, chosen by tokens.

/// Low-rank adapters that are part of the model (IBM's Granite Switch): tokens of the past choose
/// one for each token, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SwitchSpec {
    /// Tokens that choose an adapter, in the adapters' order.
    pub activate: Vec<u32>,
    /// Tokens whose embeddings those have.
    pub substitute: Vec<u32>,
    /// Rank of the adapters.
    pub rank: usize,
}

impl SwitchSpec {
    /// Adapters, the empty one included.
    pub(crate) fn n_slot(&self) -> usize {
        self.activate.len() + 1
    }

    /// The number of the adapter that a token chooses; 0: none.
    pub(crate) fn chosen_by(&self, token: u32) -> usize {
        let chosen = self.activate.iter().position(|&t| t == token);
        chosen.map_or(0, |i| i + 1)
    }

    /// The token whose embedding a token has.
    pub(crate) fn embedded(&self, token: u32) -> u32 {
        match self.chosen_by(token) {
            0 => token,
            i => self.substitute[i - 1],
        }
    }
}
