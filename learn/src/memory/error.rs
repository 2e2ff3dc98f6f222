//! Failures of a memory.

use crate::sona::SonaError;
use ruvllm::SessionError;
use ruvllm::decode::DecodeError;
use ruvllm::sample::SampleError;

/// Why something was not remembered, found or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A file or the folder was refused.
    #[error(transparent)]
    Folder(#[from] SonaError),
    /// A vector could not be computed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A question could not be written.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Options of sampling were refused.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A text has no words.
    #[error("there is nothing to remember: the text has no letter or digit")]
    Empty,
    /// A text is too long to be a note.
    #[error(
        "the text has {n} bytes, an entry at most {limit}: cut it into what is to be remembered"
    )]
    TooLong {
        /// Its length.
        n: usize,
        /// The limit.
        limit: usize,
    },
    /// There is no such entry.
    #[error("there is no entry {number}; `ruvllm memory list` shows all")]
    NoSuchEntry {
        /// Its number.
        number: u64,
    },
    /// Nothing was consolidated.
    #[error("no adapter is in effect; `ruvllm memory consolidate` makes one")]
    NoVersion,
    /// An option is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: u64,
        /// Valid values.
        expected: &'static str,
    },
}
