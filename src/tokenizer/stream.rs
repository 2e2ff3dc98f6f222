//! Text from tokens, as they arrive.

use crate::tokenizer::{Tokenizer, TokenizerError};
use std::sync::Arc;

/// Incremental detokeniser: token by token, in whole UTF-8 characters.
///
/// A token may end inside a character; its bytes are kept until the character is complete. Bytes
/// that are not UTF-8 become U+FFFD. All texts together equal [`String::from_utf8_lossy`] of the
/// bytes of all tokens.
///
/// Special tokens give no text unless `render_special`. Unlike [`Tokenizer::decode`], spaces are
/// not changed, since the text continues a prompt.
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    render_special: bool,
    /// Bytes of an incomplete character: at most three, before a token is added.
    held: Vec<u8>,
    text: String,
}

impl std::fmt::Debug for TextStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TextStream")
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl TextStream {
    /// A stream of the tokens of `tokenizer`.
    pub fn new(tokenizer: &Arc<Tokenizer>, render_special: bool) -> Self {
        TextStream {
            tokenizer: Arc::clone(tokenizer),
            render_special,
            held: Vec::new(),
            text: String::new(),
        }
    }

    /// The text that `token` completes: usually its own, sometimes empty.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] if there is no such token; the stream is then unchanged.
    pub fn push(&mut self, token: u32) -> Result<&str, TokenizerError> {
        self.tokenizer
            .append_bytes(token, self.render_special, &mut self.held)?;
        self.text.clear();
        let mut kept = 0;
        for chunk in self.held.utf8_chunks() {
            self.text.push_str(chunk.valid());
            let at_end = chunk.invalid().as_ptr_range().end == self.held.as_ptr_range().end;
            if at_end && is_prefix(chunk.invalid()) {
                kept = chunk.invalid().len();
            } else if !chunk.invalid().is_empty() {
                self.text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.held.drain(..self.held.len() - kept);
        Ok(&self.text)
    }

    /// Whether no incomplete character is pending.
    pub(crate) fn is_whole(&self) -> bool {
        self.held.is_empty()
    }

    /// Text of the pending bytes, when no more tokens come. Resets the stream.
    pub fn finish(&mut self) -> &str {
        self.text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        &self.text
    }
}

/// Whether more bytes could complete `bytes`, which is not valid UTF-8.
fn is_prefix(bytes: &[u8]) -> bool {
    matches!(str::from_utf8(bytes), Err(e) if e.error_len().is_none())
}
