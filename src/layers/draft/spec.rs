//! What a model that drafts for another reads of it, and how it guesses.

/// A drafter that was trained for one model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DraftSpec {
    pub(crate) kind: DraftKind,
    /// Layers of the other model whose inputs it reads, side by side; the number of layers stands for
    /// what the last one leaves.
    pub(crate) inputs: Vec<usize>,
    /// Factor on embeddings of tokens.
    pub(crate) embd_scale: f32,
}

/// How it guesses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DraftKind {
    /// Token by token, from its own state (EAGLE 3, arXiv 2503.01840).
    Eagle3 {
        /// Whether the residual stream begins with the normed features.
        norm_before_residual: bool,
        /// Whether features are normed before they are multiplied.
        norm_before_fc: bool,
    },
    /// A block of tokens at once, whose places see each other (DFlash).
    Dflash {
        /// Places of a block, that of the last token of the text included.
        n_block: usize,
        /// The token at places that are to be guessed.
        mask: u32,
    },
    /// Token by token, from keys and values of the other model (Gemma 4's assistant).
    Assistant,
}
