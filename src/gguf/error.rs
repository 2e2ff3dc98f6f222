//! Failures of reading and writing files.

use std::path::PathBuf;

/// Why a GGUF file was refused. Offsets are bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused to open, map, read or write the file.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// One of the errors below, with the file it was found in.
    #[error("{path}: {error}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<GgufError>,
    },

    /// The file does not begin with `GGUF`.
    #[error("not a GGUF file: it begins with the bytes {found:02x?}{hint}")]
    BadMagic {
        /// The first bytes of the file, at most four.
        found: Vec<u8>,
        /// What the file seems to be instead, as the end of a sentence; empty if unknown.
        hint: &'static str,
    },
    /// This build does not read this version of the format.
    #[error(
        "GGUF version {found} is not supported (versions 2 and 3 are): convert the model again with a current converter"
    )]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The file was written for big-endian machines.
    #[error(
        "this is a big-endian GGUF file (version {version}); only little-endian files can be read: download or convert the little-endian one"
    )]
    BigEndian {
        /// The version in the file, in its byte order.
        version: u32,
    },
    /// The prefix given to the parser ends inside the header.
    #[error("the header does not end within the first {have} bytes: at least {need} are needed")]
    HeaderIncomplete {
        /// Length of the prefix.
        have: u64,
        /// A lower bound of the bytes needed.
        need: u64,
    },
    /// The file ends inside its header: it is truncated, or a length in it is wrong.
    #[error(
        "the file ends too early: {item} at byte {offset} takes {need} bytes, the file has {file_size} (incomplete download, or corrupt)"
    )]
    UnexpectedEnd {
        /// What was being read.
        item: String,
        /// Offset at which it begins.
        offset: u64,
        /// Its length, or a lower bound of it.
        need: u64,
        /// Size of the file.
        file_size: u64,
    },
    /// The file ends inside its tensor data.
    #[error(
        "the file is incomplete: its tensors end at byte {expected}, but it has {actual} bytes; copying or downloading it is under way or broke off"
    )]
    Truncated {
        /// Bytes the file needs to have.
        expected: u64,
        /// Bytes it has.
        actual: u64,
    },
    /// The header exceeds the limit, beyond which a length in it might overflow 32 bits.
    #[error("{item} at byte {offset} takes {need} bytes: headers over {limit} bytes are refused")]
    HeaderTooLarge {
        /// What was being read.
        item: String,
        /// Offset at which it begins.
        offset: u64,
        /// Its length, or a lower bound of it.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// A count exceeds what the rest of the file can contain.
    #[error(
        "{item} at byte {offset} is {count}, but the {left} bytes that follow cannot hold so many"
    )]
    CountTooLarge {
        /// What is counted.
        item: String,
        /// Offset of the count.
        offset: u64,
        /// The count.
        count: u64,
        /// Bytes left in the file.
        left: u64,
    },
    /// More metadata entries than any model has.
    #[error("the file has {count} metadata entries; at most {max} are allowed")]
    TooManyEntries {
        /// Number of entries.
        count: usize,
        /// Largest number accepted.
        max: usize,
    },

    /// A key or tensor name is empty or too long.
    #[error("{item} at byte {offset} has {found} bytes; 1 to {max} are allowed")]
    NameLength {
        /// Which key or name.
        item: String,
        /// Offset at which it begins.
        offset: u64,
        /// Its length.
        found: u64,
        /// The limit.
        max: u64,
    },
    /// A text that has to be UTF-8 is not.
    #[error("{item} is not valid UTF-8")]
    NotUtf8 {
        /// Which text.
        item: String,
    },
    /// Two metadata entries have the same key.
    #[error("the metadata key `{key}` occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// The type of a metadata value is not one of GGUF's.
    #[error("`{key}` at byte {offset}: {found} is not a metadata type (0 to 12 are)")]
    ValueType {
        /// The key.
        key: String,
        /// Offset of the type.
        offset: u64,
        /// The type in the file.
        found: u32,
    },
    /// The element type of an array is not one of GGUF's.
    #[error("`{key}` at byte {offset}: {found} is not an array element type (0 to 12 are)")]
    ArrayElementType {
        /// The key.
        key: String,
        /// Offset of the type.
        offset: u64,
        /// The type in the file.
        found: u32,
    },
    /// Arrays of arrays go too deep.
    #[error("`{key}` at byte {offset}: arrays are nested more than {max} deep")]
    ArrayDepth {
        /// The key.
        key: String,
        /// Offset of the first array that is too deep.
        offset: u64,
        /// The limit.
        max: usize,
    },
    /// A boolean is neither 0 nor 1.
    #[error("`{key}` at byte {offset}: {found} is not a boolean (0 or 1)")]
    InvalidBool {
        /// The key.
        key: String,
        /// Offset of the byte.
        offset: u64,
        /// The byte.
        found: u8,
    },
    /// `general.alignment` is not usable.
    #[error("general.alignment is {found}; it has to be a power of two from 8 to {max}")]
    Alignment {
        /// The value in the file.
        found: u64,
        /// The limit.
        max: u64,
    },

    /// A required metadata key is missing.
    #[error("the metadata key `{key}` is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value has another type than required.
    #[error("`{key}` is of type {found}, not {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The required type.
        expected: &'static str,
        /// The type in the file.
        found: &'static str,
    },
    /// A number does not fit the required type.
    #[error("`{key}` is {found}, which does not fit {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// The required type.
        expected: &'static str,
        /// The number in the file.
        found: String,
    },

    /// Two tensors have the same name.
    #[error("the tensor name `{name}` occurs twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A tensor has more dimensions than ggml's tensors can have.
    #[error("tensor `{name}` has {found} dimensions; at most {max} are allowed")]
    TensorRank {
        /// The tensor.
        name: String,
        /// Dimensions in the file.
        found: u32,
        /// The limit.
        max: u32,
    },
    /// A dimension of a tensor is zero.
    #[error("tensor `{name}`: dimension {axis} of {dims:?} is zero")]
    ZeroDim {
        /// The tensor.
        name: String,
        /// Which dimension, counted from 0, fastest first.
        axis: usize,
        /// All of them.
        dims: Vec<u64>,
    },
    /// The type of a tensor is unknown to this build, or was removed from GGUF.
    #[error("tensor `{name}` has the element type {found}, which {}", removed_type(*found))]
    TensorType {
        /// The tensor.
        name: String,
        /// The type in the file.
        found: u32,
    },
    /// The rows of a tensor are not whole blocks.
    #[error(
        "tensor `{name}`: rows of {row} values are not whole blocks of {block} values of {dtype}"
    )]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// Values per row (the first dimension).
        row: u64,
        /// Values per block.
        block: u64,
    },
    /// The size of a tensor does not fit 63 bits.
    #[error("tensor `{name}` of shape {dims:?} and type {dtype} is too large to exist")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// Its dimensions, fastest first.
        dims: Vec<u64>,
    },
    /// A tensor does not begin at a multiple of the alignment.
    #[error(
        "tensor `{name}`: its offset {offset} into the tensor data is not a multiple of {alignment}"
    )]
    TensorMisaligned {
        /// The tensor.
        name: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A tensor lies outside the file, which is not merely truncated.
    #[error(
        "tensor `{name}`: {n_bytes} bytes at byte {offset} lie outside the file of {file_size} bytes"
    )]
    TensorOutOfFile {
        /// The tensor.
        name: String,
        /// Offset at which it begins.
        offset: u64,
        /// Its length.
        n_bytes: u64,
        /// Size of the file.
        file_size: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "tensor `{name}` at byte {offset} overlaps tensor `{other}`, which ends at byte {other_end}"
    )]
    TensorOverlap {
        /// The later tensor.
        name: String,
        /// Offset at which it begins.
        offset: u64,
        /// The earlier tensor.
        other: String,
        /// Offset at which that one ends.
        other_end: u64,
    },

    /// A part of a split model does not have the file name by which parts are found.
    #[error(
        "this is part {no} of a model split into {count} files, whose names have to end in `{expected}`: rename it back"
    )]
    SplitName {
        /// Number of the part, from 1.
        no: u64,
        /// Number of parts.
        count: u64,
        /// Required end of this part's name.
        expected: String,
    },
    /// The parts of a split model are inconsistent.
    #[error(
        "`{key}` is {found}, but {expected} was expected: this file does not belong to the other parts of the model"
    )]
    SplitMismatch {
        /// The key that differs.
        key: &'static str,
        /// Its value in the other parts.
        expected: u64,
        /// Its value in this part.
        found: u64,
    },
    /// A split model cannot be opened from memory.
    #[error(
        "this is one of {count} files of a split model: join them into one file to load it from memory"
    )]
    SplitInMemory {
        /// Number of files.
        count: u64,
    },

    /// The file to be written already exists.
    #[error("{path} exists already and is not overwritten unless asked for")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The data of a tensor has another length than its shape and type require.
    #[error("tensor `{name}` needs {expected} bytes of data, but {found} were given")]
    TensorData {
        /// The tensor.
        name: String,
        /// Bytes that its shape and type require.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
}

impl GgufError {
    /// The error without the file name, for matching.
    pub fn cause(&self) -> &GgufError {
        match self {
            GgufError::InFile { error, .. } => error.cause(),
            other => other,
        }
    }
}

fn removed_type(id: u32) -> &'static str {
    match id {
        4 | 5 | 31..=33 | 36..=38 => "was removed from GGUF: convert or quantise the model again",
        _ => "this build does not know: a newer version of this program may",
    }
}
