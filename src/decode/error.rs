//! Failures of answers.

use crate::engine::SessionError;
use crate::sample::SampleError;
use crate::tokenizer::TokenizerError;

/// Why an answer broke off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A pass failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A token has no text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
