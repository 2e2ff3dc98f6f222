//! Failures of forward and backward passes.

use crate::kv::KvError;

/// Why a forward or backward pass was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ComputeError {
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// Not enough memory.
    #[error(
        "no memory for {what} of {bytes} bytes; use a smaller context, or compute fewer tokens at \
         a time"
    )]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
    },
    /// Keys and values could not be stored.
    #[error(transparent)]
    Kv(#[from] KvError),
}
