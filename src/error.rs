//! Every way this crate can fail, one enum per layer. Data that comes from outside
//! (files, prompts, templates) never panics: it ends here, with what, where and what to do.

use std::path::PathBuf;

/// Shorthand for results of the whole crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the crate; wraps the error of the layer it came from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not a readable GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is sound, but its vocabulary is not.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The file is sound, but does not describe a model this build can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A session could not do what was asked.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The sampling parameters make no sense.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A chat template failed.
    #[cfg(feature = "chat")]
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Why a GGUF file was refused. Offsets are bytes from the start of the named file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused to open, map or write the file.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why a vocabulary was refused, or a text could not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {}

/// Why a model was refused at open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {}

/// Why a session call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {}

/// Why a sampler could not be built, or could not choose.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum SampleError {
    /// A parameter has a value that makes no sense.
    #[error("sampling parameter {name} is {value}; it must be {allowed}")]
    Parameter {
        /// The builder method.
        name: &'static str,
        /// What it was given.
        value: f64,
        /// What it takes.
        allowed: &'static str,
    },
    /// A name in the list of samplers is not one.
    #[error("there is no sampler {name:?}; there are {known}")]
    UnknownSampler {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A DRY sequence breaker without tokens would break everywhere.
    #[error("a DRY sequence breaker has no tokens")]
    EmptyBreaker,
    /// A logit bias is for a token that the model does not have.
    #[error("the logit bias is for token {token}, but the vocabulary has {n_vocab} tokens")]
    BiasOutsideVocabulary {
        /// The token.
        token: u32,
        /// Number of logits.
        n_vocab: usize,
    },
    /// No token can be chosen.
    #[error(
        "none of {n_vocab} tokens can be chosen ({n_nan} logits are not a number, the others are \
         forbidden): the model file is damaged, or the logit bias forbids everything"
    )]
    NoCandidates {
        /// Number of logits.
        n_vocab: usize,
        /// How many of them are NaN.
        n_nan: usize,
    },
}

/// Why a chat template could not be parsed or rendered.
#[cfg(feature = "chat")]
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is not valid Jinja, or uses a statement that chat templates do not have.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// Line of the template, from 1.
        line: usize,
        /// What the parser expected or found.
        message: String,
    },
    /// The template is too long to be one.
    #[error("the chat template has {len} bytes; the limit is {limit}")]
    TooLong {
        /// Its length.
        len: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// The template refused these messages with `raise_exception`.
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
    /// The template did something impossible with these inputs.
    #[error("chat template, line {line}: {message}")]
    Render {
        /// Line of the template, from 1; 0 when it is not known.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// The template ran longer than any honest one would.
    #[error("the chat template did not end within {steps} steps")]
    OutOfSteps {
        /// The limit.
        steps: u64,
    },
    /// The template wrote more than any honest one would.
    #[error("the chat template wrote more than {limit} bytes")]
    OutputTooLong {
        /// The limit.
        limit: usize,
    },
    /// A point in time is not of the form `2025-01-15T09:05:07`.
    #[error("{0:?} is not a time of the form 2025-01-15T09:05:07")]
    Time(String),
}
