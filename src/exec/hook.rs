//! A guest at the output head: sees what the head computed and may change the logits.

use super::Session;
use std::any::Any;

/// How a token came into a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Given: part of a prompt.
    Prompt,
    /// Sampled, drafted or forced.
    Generated,
}

/// Rows that the output head computed in one pass of one sequence.
#[derive(Debug)]
#[non_exhaustive]
pub struct OutputRows<'a> {
    /// All tokens of the sequence, those of the pass included.
    pub tokens: &'a [u32],
    /// Position of the first token of the pass.
    pub start: usize,
    /// Position of the first token with a row: rows belong to `tokens[first..]`.
    pub first: usize,
    /// How the tokens of the pass came.
    pub kind: TokenKind,
    /// Hidden states that the head read, `(rows, n_embd)`.
    pub states: &'a [f32],
    /// The head's products on entry, to be left as logits, `(rows, n_vocab)`.
    pub logits: &'a mut [f32],
}

/// What becomes of the sequence a hook follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The text goes on elsewhere: the sequence was cleared, or rewound by the caller.
    Rewound,
    /// The end of a generated text was taken back, as nobody was given it.
    AnswerShortened,
}

/// Follows the passes of a session behind the last norm: hidden states and the head's products in, logits out.
///
/// What a hook adds does not enter keys and values. It turns each row of products into logits itself, in order; row
/// `i` may depend on all rows before it.
pub trait OutputHook: Any + Send + Sync {
    /// Turns the head's products into logits.
    fn rows(&mut self, rows: OutputRows<'_>);

    /// Hears that tokens were taken from the end of the sequence.
    fn cut(&mut self, cut: Cut);

    /// A copy for a [fork](Session::fork) of the session.
    fn fork(&self) -> Box<dyn OutputHook>;
}

impl Session {
    /// Lets `hook` follow this session, in place of the hook it has.
    pub fn set_hook(&mut self, hook: Box<dyn OutputHook>) {
        self.seq.hook = Some(hook);
    }

    /// The session's hook, if it is a `T`.
    pub fn hook<T: OutputHook>(&self) -> Option<&T> {
        let hook: &dyn Any = self.seq.hook.as_deref()?;
        hook.downcast_ref()
    }

    /// The session's hook, if it is a `T`.
    pub fn hook_mut<T: OutputHook>(&mut self) -> Option<&mut T> {
        let hook: &mut dyn Any = self.seq.hook.as_deref_mut()?;
        hook.downcast_mut()
    }

    /// Takes the hook off, if it is a `T`.
    pub fn take_hook<T: OutputHook>(&mut self) -> Option<Box<T>> {
        self.hook::<T>()?;
        let hook: Box<dyn Any> = self.seq.hook.take()?;
        hook.downcast().ok()
    }
}
