//! Failures of opening models.

use crate::gguf::GgufError;
use crate::model::quantize::RecipeError;
use crate::quant::RowError;
use crate::tokenizer::TokenizerError;

/// Why a model was refused at open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file itself is invalid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its vocabulary is invalid.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// This build has no family with this architecture.
    #[error("architecture {arch:?} is not supported; this build runs: {}", .supported.join(", "))]
    UnsupportedArchitecture {
        /// `general.architecture` of the file.
        arch: String,
        /// The supported architectures.
        supported: Vec<&'static str>,
    },
    /// The file is not a model.
    #[error("this GGUF file holds {what}, not a model")]
    NotAModel {
        /// What it contains instead.
        what: String,
    },
    /// A hyper-parameter is missing.
    #[error("metadata key {key:?} is missing; the file was not converted as a complete model")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A hyper-parameter is out of range.
    #[error("metadata key {key:?} is {value}, expected {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// The file has a hyper-parameter that this build would ignore.
    #[error(
        "metadata key {key:?} is not part of architecture {arch:?} as this build knows it; refusing to ignore it"
    )]
    UnknownKey {
        /// The key.
        key: String,
        /// The architecture.
        arch: String,
    },
    /// A hyper-parameter differs between layers, which no supported family allows.
    #[error("metadata key {key:?} differs between layers, which this build does not support")]
    VariesByLayer {
        /// The key.
        key: String,
    },
    /// Hyper-parameters are inconsistent.
    #[error("the hyper-parameters contradict each other: {what}")]
    Inconsistent {
        /// The inconsistency.
        what: String,
    },
    /// A weight is missing.
    #[error("tensor {name:?} is missing")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A weight is missing in one layer but present in another.
    #[error("tensor {name:?} is missing, though {present:?} is there; layers have to be alike")]
    MissingInLayer {
        /// The tensor.
        name: String,
        /// Its counterpart in another layer.
        present: String,
    },
    /// A tensor has a value that would make results NaN or infinite.
    #[error("tensor {name:?} holds {value} at index {index}, expected {expected}")]
    TensorValue {
        /// The tensor.
        name: String,
        /// Index of the element.
        index: usize,
        /// The element.
        value: f32,
        /// The valid values.
        expected: &'static str,
    },
    /// A weight has the wrong shape.
    #[error("tensor {name:?} has the shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its dimensions, fastest first.
        found: Vec<u64>,
        /// Dimensions according to the hyper-parameters.
        expected: Vec<u64>,
    },
    /// A weight has a type that cannot be used for it.
    #[error("tensor {name:?} is of type {found}, expected {expected}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
        /// Types that can be used.
        expected: &'static str,
    },
    /// The file has a weight that this build would ignore.
    #[error(
        "tensor {name:?} is not part of architecture {arch:?} as this build knows it; refusing to ignore it"
    )]
    UnknownTensor {
        /// The tensor.
        name: String,
        /// The architecture.
        arch: String,
    },
    /// It is not known how the family's blocks for multi-token prediction are computed.
    #[error(
        "how blocks for multi-token prediction of architecture {arch:?} are computed is not known here"
    )]
    UnknownMtp {
        /// The architecture.
        arch: String,
    },
    /// There is no memory for a copy of the weights.
    #[error("no room for a copy of {n_bytes} bytes of weights ({error}): use the mapped file")]
    NoRoom {
        /// Size of the copy.
        n_bytes: u64,
        /// The system's error.
        error: std::io::Error,
    },
    /// The recipe of quantising while opening does not go with the model.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A weight cannot be quantised.
    #[error(transparent)]
    Row(#[from] RowError),
    /// The system starts no threads that quantise.
    #[error("no threads to quantise with: {0}")]
    QuantizeThreads(std::io::Error),
    /// The weights alone exceed the memory limit.
    #[error(
        "the weights take {need} bytes, the memory limit is {limit}: use a smaller model, or fewer bits per weight"
    )]
    MemoryLimit {
        /// Bytes of the weights.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// The progress callback cancelled.
    #[error("loading was cancelled")]
    Cancelled,
}
