//! Hooks at the output head: they see what the head computed and may change the logits.

use std::any::Any;

/// Origin of a token in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Given, as a part of a prompt.
    Prompt,
    /// Sampled, drafted or forced.
    Generated,
}

/// Rows that the output head computed in one pass of one sequence.
#[derive(Debug)]
#[non_exhaustive]
pub struct OutputRows<'a> {
    /// All tokens of the sequence, including those of the pass.
    pub tokens: &'a [u32],
    /// Position of the first token of the pass.
    pub start: usize,
    /// Position of the first token with a row: rows belong to `tokens[first..]`.
    pub first: usize,
    /// Origin of the tokens of the pass.
    pub kind: TokenKind,
    /// Hidden states that the head read, `(rows, n_embd)`.
    pub states: &'a [f32],
    /// `(rows, n_vocab)`: the head's products, which the hook replaces by logits.
    pub logits: &'a mut [f32],
}

/// Why tokens were removed from the end of a sequence with a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The sequence was cleared or rewound by the caller, so its text does not continue.
    Rewound,
    /// The end of a generated text was taken back because it was not handed out.
    AnswerShortened,
}

/// Follows the passes of a session after the last norm: gets hidden states and the head's products,
/// returns logits.
///
/// A hook does not affect keys and values. It turns each row of products into logits itself, in
/// order; row `i` may depend on all rows before it.
pub trait OutputHook: Any + Send + Sync {
    /// Turns the head's products into logits.
    fn rows(&mut self, rows: OutputRows<'_>);

    /// Called when tokens are removed from the end of the sequence.
    fn cut(&mut self, cut: Cut);

    /// A copy for a [fork](crate::Session::fork) of the session.
    fn fork(&self) -> Box<dyn OutputHook>;
}
