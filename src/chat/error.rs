//! Failures of chat templates.

#[cfg(feature = "grammar")]
use crate::grammar::GrammarError;

/// Why a chat template could not be parsed or rendered.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum ChatError {
    /// The grammar of calls was refused.
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The template is not valid Jinja, or uses a statement that chat templates lack.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// Line of the template, from 1.
        line: usize,
        /// What the parser expected or found.
        message: String,
    },
    /// The template is too long.
    #[error("the chat template has {len} bytes; the limit is {limit}")]
    TooLong {
        /// Its length.
        len: usize,
        /// Greatest length accepted.
        limit: usize,
    },
    /// The template refused these messages with `raise_exception`.
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
    /// The template failed for these inputs.
    #[error("chat template, line {line}: {message}")]
    Render {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// The template took more steps than any legitimate one.
    #[error("the chat template did not end within {steps} steps")]
    OutOfSteps {
        /// The limit.
        steps: u64,
    },
    /// The template took more time than any legitimate one.
    #[error("the chat template did not end within {limit:?}")]
    OutOfTime {
        /// The limit.
        limit: std::time::Duration,
    },
    /// The template took more memory than any legitimate one.
    #[error("the chat template takes more than {limit} bytes of memory")]
    OutOfMemory {
        /// The limit.
        limit: u64,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// The template wrote more than any legitimate one.
    #[error("the chat template wrote more than {limit} bytes")]
    OutputTooLong {
        /// The limit.
        limit: usize,
    },
    /// A tool is not described correctly, or cannot be called in the model's format.
    #[error("tool {index}: {message}")]
    Tool {
        /// Its index, from 0.
        index: usize,
        /// Description of the problem.
        message: String,
    },
    /// A time is not of the form `2025-01-15T09:05:07`.
    #[error("{0:?} is not a time of the form 2025-01-15T09:05:07")]
    Time(String),
}
