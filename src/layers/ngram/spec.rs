//! Embeddings of several adjacent tokens.

/// Embeddings of the last two, three, … tokens together, which a layer adds to residual streams
/// (Qwen 4): rows of a table, by hashes of the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NgramSpec {
    /// Most tokens of an embedding.
    pub n_gram: usize,
    /// Tokens that the convolution behind it sees, `n_gram` apart.
    pub n_tap: usize,
    /// The token that stands for those before the text, and before which nothing is seen.
    pub eos: u32,
    /// Width of a row of the table, and its rows.
    pub n_row_embd: usize,
    /// Rows of the table.
    pub n_row: usize,
    /// A factor for each token, the last one first.
    pub multipliers: Vec<u64>,
    /// First row and number of rows of each hash: the first ones are of two tokens, and so on.
    pub hashes: Vec<(u64, u64)>,
}

impl NgramSpec {
    /// Width of all rows of a token.
    pub(crate) fn n_embd(&self) -> usize {
        self.hashes.len() * self.n_row_embd
    }

    /// Hashes of so many tokens.
    pub(crate) fn n_each(&self) -> usize {
        self.hashes.len() / (self.n_gram - 1)
    }

    /// The row of hash `i` for the tokens `window`, the last one first.
    pub(crate) fn row(&self, i: usize, window: &[u64]) -> usize {
        let n = 2 + i / self.n_each();
        let terms = window.iter().zip(&self.multipliers).take(n);
        let mixed = terms.fold(0, |mixed, (token, factor)| {
            mixed ^ token.wrapping_mul(*factor)
        });
        let (first, n_rows) = self.hashes[i];
        (mixed % n_rows + first) as usize
    }
}
