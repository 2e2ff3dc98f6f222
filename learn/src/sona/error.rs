//! Failures of folders of trajectories.

use crate::learn::LearnError;
use ruvllm::SessionError;
use ruvllm::lora::AdapterError;
use std::path::PathBuf;

/// Why a folder of trajectories and of what was learnt was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SonaError {
    /// A pass failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Learning failed.
    #[error(transparent)]
    Learn(LearnError),
    /// An adapter was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// A file or the folder could not be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Another process has the folder open.
    #[error("another process has {} open: wait until it has ended, or name another folder", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// A file was changed by something else.
    #[error("{} is damaged at byte {offset}: {what}; restore it from a copy, or move it away", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A file is of another version.
    #[error("{} is of version {found}, this build reads {supported}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The file's.
        found: u32,
        /// This build's.
        supported: u32,
    },
    /// A request is too long to be recorded.
    #[error("the record of a request has {n} bytes; the limit is {limit}")]
    TooLong {
        /// Its length.
        n: usize,
        /// The limit.
        limit: usize,
    },
    /// An option or a rating is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: f64,
        /// Valid values.
        expected: &'static str,
    },
    /// A trajectory is inconsistent.
    #[error("the trajectory {what}")]
    Trajectory {
        /// What is wrong.
        what: String,
    },
    /// There is no such version.
    #[error("there is no version {version} to go back to; `status` lists all")]
    NoSuchVersion {
        /// The version.
        version: u64,
    },
    /// There is no such session.
    #[error("nothing of a session {session_id:?} was recorded or learnt")]
    NoSuchSession {
        /// Its name.
        session_id: String,
    },
    /// There is no such request.
    #[error("no request {request_id:?} was recorded")]
    NoSuchRequest {
        /// Its name.
        request_id: String,
    },
}

impl From<LearnError> for SonaError {
    /// What came from below stays what it is.
    fn from(error: LearnError) -> SonaError {
        match error {
            LearnError::Session(error) => error.into(),
            LearnError::Adapter(error) => error.into(),
            error => SonaError::Learn(error),
        }
    }
}

impl SonaError {
    /// Adds the file to what the system says.
    pub(crate) fn io(path: &std::path::Path) -> impl Fn(std::io::Error) -> SonaError + '_ {
        move |error| SonaError::Io {
            path: path.to_owned(),
            error,
        }
    }
}
