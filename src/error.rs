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
pub enum ModelError {
    /// The file itself is not sound.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its vocabulary is not sound.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// `RUVLLM_ARCH` asks for a level that cannot be used.
    #[error(transparent)]
    Arch(#[from] crate::arch::ArchError),
    /// No family of this build is called so.
    #[error("architecture {arch:?} is not supported; this build runs: {}", .supported.join(", "))]
    UnsupportedArchitecture {
        /// `general.architecture` of the file.
        arch: String,
        /// What could be run instead.
        supported: Vec<&'static str>,
    },
    /// The file is no model at all.
    #[error("this GGUF file holds {what}, not a model")]
    NotAModel {
        /// What it holds instead.
        what: String,
    },
    /// A hyper-parameter is missing.
    #[error("metadata key {key:?} is missing; the file was not converted as a complete model")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A hyper-parameter makes no sense.
    #[error("metadata key {key:?} is {value}, expected {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What would make sense.
        expected: String,
    },
    /// A hyper-parameter differs between layers, which no supported family does.
    #[error("metadata key {key:?} differs between layers, which this build does not support")]
    VariesByLayer {
        /// The key.
        key: String,
    },
    /// Hyper-parameters contradict each other.
    #[error("the hyper-parameters contradict each other: {what}")]
    Inconsistent {
        /// How.
        what: String,
    },
    /// A weight is missing.
    #[error("tensor {name:?} is missing")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A weight has the wrong shape.
    #[error("tensor {name:?} has the shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its dimensions, fastest first.
        found: Vec<u64>,
        /// What the hyper-parameters ask for.
        expected: Vec<u64>,
    },
    /// A weight has a type that cannot be used for it.
    #[error("tensor {name:?} is of type {found}, expected {expected}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
        /// What can be used.
        expected: &'static str,
    },
    /// The file holds a weight that this build would ignore.
    #[error("tensor {name:?} is not part of architecture {arch:?} as this build knows it; refusing to ignore it")]
    UnknownTensor {
        /// The tensor.
        name: String,
        /// The architecture.
        arch: String,
    },
    /// The progress callback asked to stop.
    #[error("loading was cancelled")]
    Cancelled,
}

/// Why a session call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The context is full.
    #[error("the context holds {n_ctx} tokens, {n_past} are used, {n_new} more do not fit")]
    ContextFull {
        /// Size of the context.
        n_ctx: usize,
        /// Tokens in it.
        n_past: usize,
        /// Tokens that were to be added.
        n_new: usize,
    },
    /// No token was given where at least one is needed.
    #[error("no tokens were given")]
    NoTokens,
    /// A token is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {n_vocab}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A position lies behind the end of the session.
    #[error("cannot rewind to position {position}: the session is at {n_past}")]
    RewindAhead {
        /// Where to.
        position: usize,
        /// Where the session is.
        n_past: usize,
    },
    /// The cancel token was set.
    #[error("cancelled")]
    Cancelled,
    /// Not enough memory for the key/value cache.
    #[error("no memory for a key/value cache of {bytes} bytes; use a smaller context")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A session option makes no sense.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: usize,
        /// What would make sense.
        expected: String,
    },
    /// The system gave no threads.
    #[error("cannot start {n_threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        n_threads: usize,
        /// What the system said.
        source: rayon::ThreadPoolBuildError,
    },
    /// The model has no tokenizer, so text cannot be used with it.
    #[error("this file has no tokenizer; use token ids")]
    NoTokenizer,
}

/// Why a sampler could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {}

/// Why a chat template could not be parsed or rendered.
#[cfg(feature = "chat")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {}
