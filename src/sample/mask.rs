//! What may come next: a restriction of the vocabulary that follows the text.

use std::fmt::Debug;

use crate::MaskError;

/// Which tokens may come next, token after token; a grammar is one.
///
/// A [`Sampler`](super::Sampler) that has one drops what the mask forbids before any filter runs, and tells it each
/// token it chose.
pub trait TokenMask: Debug + Send + Sync {
    /// The tokens that may come next: token `t` is bit `t % 32` of word `t / 32`. A token behind the last word may
    /// not.
    ///
    /// # Errors
    /// [`MaskError`]; a mask that allows nothing is [`MaskError::NothingAllowed`].
    fn mask(&mut self) -> Result<&[u32], MaskError>;

    /// Whether `token` may come next: its bit in [`mask`](Self::mask), mostly for less work.
    ///
    /// # Errors
    /// As [`mask`](Self::mask).
    fn allows(&mut self, token: u32) -> Result<bool, MaskError>;

    /// The tokens that come next whatever is chosen: the text that must come, as `encode` cuts a text inside a text. None
    /// where there is a choice. They are not accepted yet, and the mask may allow other cuts of the same text.
    fn forced(&mut self, _encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        Vec::new()
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// [`MaskError::Refused`] when the mask does not allow it; nothing has changed then.
    fn accept(&mut self, token: u32) -> Result<(), MaskError>;

    /// Takes the last `n` tokens back.
    ///
    /// # Errors
    /// [`MaskError::Rollback`] when fewer were accepted; nothing has changed then.
    fn rollback(&mut self, n: usize) -> Result<(), MaskError>;

    /// Takes all tokens back.
    fn reset(&mut self);

    /// A mask in the same state that goes its own way.
    fn boxed_clone(&self) -> Box<dyn TokenMask>;
}

impl Clone for Box<dyn TokenMask> {
    fn clone(&self) -> Self {
        (**self).boxed_clone()
    }
}

/// Bit `token` of a mask.
pub(super) fn is_set(words: &[u32], token: u32) -> bool {
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}
