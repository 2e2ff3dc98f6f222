//! Failures of converting values.

/// Why a row of values could not be converted from or to a storage format.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The type is used for tables or other integers.
    #[error("{dtype} is not a type of weights")]
    NotAWeight {
        /// The type.
        dtype: String,
    },
    /// There is no quantiser for the type.
    #[error("{dtype} can be read but not written; choose another type")]
    ReadOnly {
        /// The type.
        dtype: String,
    },
    /// The lengths do not match.
    #[error(
        "{values} values in {bytes} bytes of {dtype}, \
         whose blocks are {block_elems} values in {block_bytes} bytes"
    )]
    RowLength {
        /// The type.
        dtype: String,
        /// Values of the row.
        values: usize,
        /// Bytes of the row.
        bytes: usize,
        /// Values per block.
        block_elems: usize,
        /// Bytes per block.
        block_bytes: usize,
    },
    /// A value that cannot be a weight.
    #[error("value {index} of the row is {value}: the tensor is damaged")]
    NotFinite {
        /// Position in the row.
        index: usize,
        /// The value.
        value: f32,
    },
}
