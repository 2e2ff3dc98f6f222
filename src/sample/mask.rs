//! Masks: restrictions of the vocabulary that follow the text.

use crate::sample::MaskError;
use std::fmt::Debug;

/// Restricts which tokens may come next, token after token; a grammar is one example.
///
/// A [`Sampler`](super::Sampler) with a mask drops forbidden tokens before any filter runs, and
/// passes each chosen token to the mask.
pub trait TokenMask: Debug + Send + Sync {
    /// The tokens that may come next: token `t` is bit `t % 32` of word `t / 32`. Tokens after the
    /// last word are forbidden.
    ///
    /// # Errors
    /// [`MaskError`]; a mask that allows nothing is [`MaskError::NothingAllowed`].
    fn mask(&mut self) -> Result<&[u32], MaskError>;

    /// Whether `token` may come next: its bit in [`mask`](Self::mask), usually computed with less
    /// work.
    ///
    /// # Errors
    /// As [`mask`](Self::mask).
    fn allows(&mut self, token: u32) -> Result<bool, MaskError>;

    /// The tokens of the text that must come next, as `encode` tokenises a text inside a text;
    /// empty if there is a choice. They are not accepted yet, and the mask may allow other
    /// tokenisations of the same text.
    fn forced(&mut self, _encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        Vec::new()
    }

    /// Accepts the next token.
    ///
    /// # Errors
    /// [`MaskError::Refused`] if the mask does not allow it; the state is then unchanged.
    fn accept(&mut self, token: u32) -> Result<(), MaskError>;

    /// Rewinds by `n` tokens.
    ///
    /// # Errors
    /// [`MaskError::Rollback`] if fewer were accepted; the state is then unchanged.
    fn rollback(&mut self, n: usize) -> Result<(), MaskError>;

    /// Takes back all tokens.
    fn reset(&mut self);

    /// A clone of the mask in its current state.
    fn boxed_clone(&self) -> Box<dyn TokenMask>;
}

impl Clone for Box<dyn TokenMask> {
    fn clone(&self) -> Self {
        (**self).boxed_clone()
    }
}

/// Bit of `token` in a mask.
pub(super) fn is_set(words: &[u32], token: u32) -> bool {
    words
        .get(token as usize / 32)
        .is_some_and(|word| word >> (token % 32) & 1 == 1)
}
