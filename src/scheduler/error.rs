//! Failures of requests.

use crate::decode::DecodeError;
use crate::engine::SessionError;
use crate::lora::AdapterError;
use crate::sample::SampleError;
use crate::tokenizer::TokenizerError;

/// Why a scheduler refused a request, or lost it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A session would refuse the request, too.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Its adapters cannot be attached.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A token has no text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// There are too many requests.
    #[error(
        "{max} requests are waiting or running already; try again later, or raise max_requests"
    )]
    QueueFull {
        /// Largest number of requests.
        max: usize,
    },
    /// The prompt exceeds the pool, even if it were alone.
    #[error(
        "keys and values of the prompt take {need} bytes, the pool has {budget}: use a shorter prompt, a larger pool, \
         or less precision"
    )]
    PoolTooSmall {
        /// Bytes of its pages.
        need: u64,
        /// Bytes of the pool.
        budget: u64,
    },
    /// The system could not start a thread for the scheduler.
    #[error("cannot start the scheduler's thread: {error}")]
    Thread {
        /// The system's error.
        error: String,
    },
    /// The scheduler stopped before the request was finished.
    #[error("the scheduler has ended")]
    Ended,
}

impl From<DecodeError> for ScheduleError {
    fn from(error: DecodeError) -> ScheduleError {
        match error {
            DecodeError::Session(error) => error.into(),
            DecodeError::Sample(error) => error.into(),
            DecodeError::Tokenizer(error) => error.into(),
        }
    }
}
