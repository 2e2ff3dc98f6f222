//! Failures of saving sessions and of gradients.

use crate::compute::ComputeError;
use crate::engine::SessionError;
use crate::gguf::GgufError;
use crate::kv::KvError;
use crate::lora::AdapterError;
use std::path::PathBuf;

/// Why a session could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The file itself is invalid, or could not be read or written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// There is no memory for its contents.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The file is not a saved session.
    #[error("general.type is {found:?}, expected \"session\": this file holds no session")]
    NotASession {
        /// `general.type`; empty if it is missing.
        found: String,
    },
    /// The file is of another version.
    #[error(
        "the session was saved in version {found}, this build reads {supported}: compute it again, or use the build that wrote it"
    )]
    Version {
        /// The file's.
        found: u32,
        /// This build's.
        supported: u32,
    },
    /// Something on which the session's bits depend differs.
    #[error("the session was saved with another {what}: {found}, this one has {expected}")]
    Other {
        /// What differs.
        what: &'static str,
        /// Its value in the file.
        found: String,
        /// Its value here.
        expected: String,
    },
    /// A session whose context was shifted: its keys are not those of its tokens.
    #[error(
        "the context was shifted, {n_dropped} tokens are gone: a session is saved before that, or after it was cleared"
    )]
    Shifted {
        /// Tokens that were dropped.
        n_dropped: usize,
    },
    /// Files of sessions do not hold what an encoder has read.
    #[error(
        "a session whose encoder has read a text cannot be saved; save both texts, and read them again"
    )]
    HasMemory,
    /// Files of sessions do not hold images.
    #[error("a session with images cannot be saved; save its text and images, and read them again")]
    HasImages,
    /// The contents are not the saved ones.
    #[error("the checksum is {found:016x}, expected {expected:016x}: the file is damaged")]
    Checksum {
        /// Checksum of the contents.
        found: u64,
        /// Checksum when saved.
        expected: u64,
    },
    /// The file has contents that no session has.
    #[error("{item}: {what}; the file is damaged")]
    Damaged {
        /// The tensor.
        item: &'static str,
        /// What is wrong.
        what: &'static str,
    },
}

impl From<ComputeError> for StateError {
    fn from(error: ComputeError) -> StateError {
        StateError::Session(error.into())
    }
}

impl From<KvError> for StateError {
    fn from(error: KvError) -> StateError {
        StateError::Session(error.into())
    }
}

/// Why a session that is kept by name could not be opened, renamed or deleted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptError {
    /// A file or the folder could not be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// There is no session of that name.
    #[error("there is no session {name}")]
    Missing {
        /// The name.
        name: String,
    },
    /// There is one of the new name.
    #[error("there is a session {name} already: delete it first")]
    Exists {
        /// The new name.
        name: String,
    },
    /// Somebody else has the session.
    #[error("{} is in use: wait until it is free, or name another session", folder.display())]
    InUse {
        /// Folder of the session.
        folder: PathBuf,
    },
}

impl KeptError {
    /// Adds the file to what the system says.
    pub(crate) fn io(path: &std::path::Path) -> impl Fn(std::io::Error) -> KeptError + '_ {
        move |error| KeptError::Io {
            path: path.to_owned(),
            error,
        }
    }
}

/// Why there are no gradients of an adapter.
#[derive(Debug, thiserror::Error)]
pub enum GradientError {
    /// A pass failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The adapter is not attached, or the gradients are not its own.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}
