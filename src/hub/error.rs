//! What can go wrong between this machine, its cache and the hub.

use crate::model::ModelError;
use std::io;
use std::path::{Path, PathBuf};

/// Failure of a look-up or a download.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Name, revision, type or variable of the environment that leads to nothing, or to several; the
    /// message lists what there is.
    #[error("{0}")]
    Asked(String),
    /// Model that is not here, while the hub is not to be asked.
    #[error("{name} is not here, and the hub is not asked (HF_HUB_OFFLINE)")]
    Offline {
        /// `OWNER/NAME[:QUANT]`.
        name: String,
    },
    /// Answer of the hub, or of a host that it leads to, that is missing or not as it has to be.
    #[error("{what}: {why}")]
    Answer {
        /// Repository, file or address.
        what: String,
        /// Reason.
        why: String,
    },
    /// Model that this build, or the memory of this machine, does not run.
    #[error("{what}: {why}")]
    Unrunnable {
        /// Repository or file.
        what: String,
        /// Reason, file by file.
        why: String,
    },
    /// Download of a file that another process has begun.
    #[error("{file}: another process downloads it")]
    Busy {
        /// Path in the repository.
        file: String,
    },
    /// Bytes that are not those of the hub; they were removed.
    #[error("{file}: its SHA-256 is {found}, the hub's is {expected}; it was removed")]
    Sum {
        /// Path in the repository.
        file: String,
        /// Sum of the bytes that came.
        found: String,
        /// Sum that the hub tells.
        expected: String,
    },
    /// Model that is here, but was refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// File or folder of the cache that the system refused to read or write.
    #[error("{path}: {error}")]
    Io {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

impl HubError {
    /// Error of an answer.
    pub(super) fn answer(what: &str, why: impl std::fmt::Display) -> HubError {
        HubError::Answer {
            what: what.into(),
            why: why.to_string(),
        }
    }

    /// Error of a path.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> HubError + '_ {
        |error| HubError::Io {
            path: path.into(),
            error,
        }
    }
}
