//! Failures of adapters.

use crate::gguf::GgufError;
use crate::quant::QuantError;

/// Why an adapter was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The file itself is invalid, or could not be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Values could not be converted.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The rows of a matrix are not whole blocks of its new type.
    #[error("rows of {name:?} have {n} values, {dtype} has blocks of {block}; choose another type")]
    RowLength {
        /// The matrix.
        name: String,
        /// Values per row.
        n: u64,
        /// The type.
        dtype: String,
        /// Values per block.
        block: usize,
    },
    /// The file is not an adapter.
    #[error("{key} is {found:?}, expected {expected:?}: this file is no LoRA adapter")]
    NotAnAdapter {
        /// The key that names the kind of file.
        key: &'static str,
        /// Its value; empty if it is missing.
        found: String,
        /// Its value in an adapter.
        expected: &'static str,
    },
    /// The adapter uses a feature that this build does not support.
    #[error(
        "the adapter sets {key}, which this build does not support; it would not work as it was trained"
    )]
    Unsupported {
        /// The key.
        key: &'static str,
    },
    /// The adapter is for a model of another architecture.
    #[error("the adapter is for a model of architecture {found:?}, this one is {expected:?}")]
    Architecture {
        /// The adapter's.
        found: String,
        /// The model's.
        expected: String,
    },
    /// The adapter was made for a model with other matrices.
    #[error("the adapter is for another model: they differ in tensor {tensor:?}")]
    OtherModel {
        /// The first tensor that differs.
        tensor: String,
    },
    /// A tensor is neither `lora_a` nor `lora_b`.
    #[error(
        "tensor {name:?} is neither `.lora_a` nor `.lora_b` of a weight; refusing to ignore it"
    )]
    UnknownTensor {
        /// The tensor.
        name: String,
    },
    /// The adapter changes a matrix that the model does not have.
    #[error(
        "the adapter changes {tensor:?}, which is no matrix of this model: it is for another one"
    )]
    NoSuchMatrix {
        /// The matrix.
        tensor: String,
    },
    /// One tensor of a pair is missing.
    #[error("tensor {missing:?} is missing, its partner is there")]
    Unpaired {
        /// The missing tensor.
        missing: String,
    },
    /// A tensor does not match its matrix, or the other tensor of the pair.
    #[error(
        "tensor {name:?} has the shape {found:?}, expected {expected:?}: the adapter is for another model"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its dimensions, fastest first.
        found: Vec<u64>,
        /// Dimensions that would match.
        expected: Vec<u64>,
    },
    /// A registry has no adapter of this name.
    #[error("no adapter is called {name:?}")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// An adapter alone is larger than the budget of its registry.
    #[error(
        "the adapter {name:?} takes {bytes} bytes, the budget of all adapters is {budget}; raise it"
    )]
    OverBudget {
        /// Its name.
        name: String,
        /// Bytes that it takes.
        bytes: u64,
        /// The budget.
        budget: u64,
    },
    /// A rank is 0 or too large.
    #[error("the rank of the change of {tensor:?} is {rank}, expected 1 to {max}")]
    Rank {
        /// The matrix.
        tensor: String,
        /// The rank.
        rank: usize,
        /// The largest possible rank.
        max: usize,
    },
    /// A tensor has a type that is not used for weights.
    #[error("tensor {name:?} is of type {found}, expected a weight format")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A tensor holds infinities or NaN.
    #[error("value {index} of tensor {name:?} is {value}: the adapter is damaged")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Index of the value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// The strength is infinite or NaN.
    #[error("adapter.lora.alpha is {value}, expected a finite number")]
    Alpha {
        /// Its value.
        value: f32,
    },
    /// A scale is infinite or NaN.
    #[error("the adapter's scale is {value}, expected a finite number")]
    Scale {
        /// Its value.
        value: f32,
    },
    /// An option of merging adapters is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Merge {
        /// What is invalid.
        option: &'static str,
        /// Its value.
        value: f64,
        /// Valid values.
        expected: &'static str,
    },
    /// The adapter changes nothing.
    #[error("the adapter changes no matrix")]
    Empty,
    /// No such adapter is attached.
    #[error("no adapter of this id is attached to the session")]
    NotAttached,
}
