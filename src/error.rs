//! Every way this crate can fail, one enum per layer. Data from outside (files, prompts, templates)
//! never causes a panic: it leads to one of these errors, which tells what is wrong, where, and
//! what to do.
//!
//! Messages are complete: they contain the system's message, and `source()` does not repeat it.

use crate::arch::KvType;
use std::path::PathBuf;

/// Shorthand for results of the whole crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the crate; wraps the error of the layer it came from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Values could not be converted from or to a storage format.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The file is not a readable GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is valid, but its vocabulary is not.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The file is valid, but does not describe a model this build can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A session could not do what was asked.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A request to a scheduler was refused, or lost.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// An adapter was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The sampling parameters are invalid.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Learning, or what was learnt, was refused.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A folder of trajectories and of what was learnt was refused.
    #[error(transparent)]
    Sona(#[from] SonaError),
    /// A saved session was refused.
    #[error(transparent)]
    State(#[from] StateError),
    /// A grammar was refused.
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// A chat template failed.
    #[cfg(feature = "chat")]
    #[error(transparent)]
    Chat(#[from] ChatError),
}

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

/// Why a vocabulary was refused, or tokens could not be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key of the tokenizer is missing or has the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The kind of tokenizer is not supported.
    #[error(
        "tokenizer model `{name}` is not supported; supported are llama (SentencePiece BPE), gpt2 and gemma4 (byte-level BPE), bert (WordPiece), t5 (unigram), rwkv"
    )]
    Model {
        /// `tokenizer.ggml.model`.
        name: String,
    },
    /// The pre-tokeniser is unknown; any other would silently produce wrong tokens.
    #[error("pre-tokenizer `{name}` is not known; known are {known}")]
    PreTokenizer {
        /// `tokenizer.ggml.pre`.
        name: String,
        /// The known names, comma-separated.
        known: String,
    },
    /// The vocabulary is empty.
    #[error("tokenizer.ggml.tokens is empty")]
    NoTokens,
    /// An array has more entries than 32-bit ids can number.
    #[error("{key} has {len} entries, more than can be numbered")]
    TooLarge {
        /// Key of the array.
        key: &'static str,
        /// Its length.
        len: usize,
    },
    /// An array that should have one entry per token has another length.
    #[error(
        "{key} has {len} entries for {n_vocab} tokens: the file is damaged or was converted wrongly"
    )]
    ArrayLength {
        /// Key of the array.
        key: &'static str,
        /// Its length.
        len: usize,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// Two tokens have the same text, so that encoding would be ambiguous.
    #[error("tokens {first} and {second} are both {text:?}")]
    DuplicateToken {
        /// Their text.
        text: String,
        /// The one with the lower id.
        first: u32,
        /// The other one.
        second: u32,
    },
    /// A token is marked as a byte, but its text is not `<0x`, two hexadecimal digits and `>`.
    #[error("token {id} is marked as a byte, but its text is {text:?} instead of <0x00> to <0xFF>")]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// A token is too long to be searched for in texts.
    #[error("token {id} is longer than {max} bytes")]
    TokenTooLong {
        /// The token.
        id: u32,
        /// The longest allowed.
        max: usize,
    },
    /// A key names a special token that the vocabulary does not have.
    #[error("{key} is {id}, but the vocabulary has {n_vocab} tokens")]
    SpecialId {
        /// The key.
        key: &'static str,
        /// Its value.
        id: u32,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// A flag requires a special token that is missing.
    #[error("the model wants `{flag}`, but the file does not say which token that is ({key})")]
    NoSpecialToken {
        /// The flag.
        flag: &'static str,
        /// The key that should name the token.
        key: &'static str,
    },
    /// A score is NaN, or infinite where scores are added up.
    #[error("the score of token {id} is not a finite number")]
    Score {
        /// The token.
        id: u32,
    },
    /// The replacements of characters are damaged.
    #[error("tokenizer.ggml.precompiled_charsmap is damaged ({wrong}): convert the model again")]
    Charsmap {
        /// What is wrong with it.
        wrong: &'static str,
    },
    /// A merge does not consist of two sides with a space between them.
    #[error("merge {rank} is {text:?} instead of two parts with a space between them")]
    Merge {
        /// Index of the merge.
        rank: u32,
        /// Its text.
        text: String,
    },
    /// There is no such token.
    #[error("there is no token {id}, the vocabulary has {n_vocab}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Number of tokens.
        n_vocab: usize,
    },
}

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

/// A part of the key/value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPart {
    /// Keys, with which queries are compared.
    Key,
    /// Values, of which weighted sums are computed.
    Value,
}

impl std::fmt::Display for KvPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            KvPart::Key => "key",
            KvPart::Value => "value",
        })
    }
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
    /// No token was given, but at least one is required.
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
    /// A position is after the end of the session.
    #[error("cannot rewind to position {position}: the session is at {n_past}")]
    RewindAhead {
        /// Requested position.
        position: usize,
        /// Position of the session.
        n_past: usize,
    },
    /// The cancel token was set.
    #[error("cancelled")]
    Cancelled,
    /// Not enough memory.
    #[error(
        "no memory for {what} of {bytes} bytes; use a smaller context, or compute fewer tokens at a time"
    )]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
    },
    /// The pool of pages for keys and values is full.
    #[error(
        "the key/value pool of {budget} bytes is full: {used} are in use, {need} more are needed; end a session, or give it more"
    )]
    PoolFull {
        /// Bytes of the requested page.
        need: u64,
        /// Bytes in use.
        used: u64,
        /// Size of the pool in bytes.
        budget: u64,
    },
    /// A context does not fit into the memory limit that the model was opened with.
    #[error("a context of {n_ctx} tokens takes {need} bytes with the weights, the memory limit is {limit}; {}", fitting(.fits))]
    MemoryLimit {
        /// Tokens of the context asked for.
        n_ctx: usize,
        /// Bytes it takes, with weights, buffers and all.
        need: u64,
        /// The limit.
        limit: u64,
        /// A context that fits, if there is one, and its precision of keys and of values.
        fits: Option<(usize, KvType, KvType)>,
    },
    /// A full context cannot be shifted.
    #[error(
        "there is no context shift with {what}; leave it out (--context-shift), and use a larger context"
    )]
    NoShift {
        /// What it does not go with.
        what: &'static str,
    },
    /// A key or value is beyond 65,504, the largest number of half precision.
    #[error(
        "a {part} of layer {layer} is too large for a half-precision cache; use KvType::F32 (-ctk f32 -ctv f32)"
    )]
    KvOverflow {
        /// The layer.
        layer: usize,
        /// Keys or values.
        part: KvPart,
    },
    /// Precision by age requires half precision for new keys and values.
    #[error(
        "kv_tiers begin with f16 keys and values, not with {k} and {v}; leave those types out (-ctk, -ctv)"
    )]
    TiersNeedF16 {
        /// Requested type of keys.
        k: KvType,
        /// Requested type of values.
        v: KvType,
    },
    /// Precision under pressure has no fewer bits than that without.
    #[error(
        "keys and values of {pressure} under pressure have no fewer bits than {usual}; choose a smaller type (--kv-pressure)"
    )]
    PressureNotLower {
        /// Requested type under pressure.
        pressure: KvType,
        /// Precision without it.
        usual: String,
    },
    /// A session option is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The valid values.
        expected: String,
    },
    /// The system could not start threads.
    #[error("cannot start {n_threads} threads: {error}")]
    Threads {
        /// Number of threads requested.
        n_threads: usize,
        /// The system's error.
        error: String,
    },
    /// The folder of the prefix cache cannot be used.
    #[error("{}: {error}; the prefix cache needs a folder it can read and write", path.display())]
    PrefixFolder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        error: String,
    },
    /// A sequence was given to the engine of another model.
    #[error("the sequence belongs to another model than the engine")]
    OtherModel,
    /// The model has no tokenizer, so text cannot be used with it.
    #[error("this file has no tokenizer; use token ids")]
    NoTokenizer,
    /// A model that is to draft has another vocabulary.
    #[error(
        "the draft model has another vocabulary: token {token} is {found:?}, and {expected:?} in the model that it is to \
         draft for; use one of the same family"
    )]
    DraftVocabulary {
        /// The first token that differs.
        token: u32,
        /// Its text in the draft model, if there is such a token.
        found: Option<String>,
        /// Its text in the other model.
        expected: Option<String>,
    },
    /// The model cannot draft by itself.
    #[error("the model has no block for multi-token prediction that can draft{}", why.as_ref().map_or_else(String::new, |why| format!(": {why}")))]
    NoMtp {
        /// What is wrong with the block that its file has, if it has one.
        why: Option<String>,
    },
    /// The model is bidirectional, so it cannot continue a text.
    #[error(
        "the model is an encoder: it makes vectors of whole texts (Model::embedder, ruvllm embed) and generates none"
    )]
    Encoder,
    /// The model has no head that scores pairs of texts.
    #[error(
        "the model scores no pairs: its file has no pooling_type 4 (rank); take a reranker, or compare vectors"
    )]
    NoClassifier,
    /// The model has a part through which gradients are not implemented.
    #[error("there are no gradients of {what}; adapt another model, or let the head alone learn")]
    NoGradient {
        /// The part.
        what: &'static str,
    },
    /// The device that computes the engine's passes does not support this.
    #[error("{device} does without {what}; open the model with Device::Cpu")]
    NotOnDevice {
        /// Name of the device.
        device: String,
        /// The requested feature.
        what: &'static str,
    },
    /// The GPU failed, or cannot compute this model.
    #[cfg(feature = "metal")]
    #[error(transparent)]
    Metal(#[from] MetalError),
}

fn fitting(fits: &Option<(usize, KvType, KvType)>) -> String {
    match fits {
        Some((n_ctx, k, v)) => {
            format!(
                "one of {n_ctx} fits with {k} keys and {v} values (-c {n_ctx} -ctk {k} -ctv {v})"
            )
        }
        None => "none fits: use a smaller model".into(),
    }
}

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

/// Why a scheduler refused a request, or lost it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A session would refuse the request, too.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Its adapters cannot be attached.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// There are too many requests.
    #[error(
        "{max} requests are waiting or running already; try again later, or raise max_requests"
    )]
    QueueFull {
        /// Largest number of requests.
        max: usize,
    },
    /// The prompt exceeds the pool, even if it were alone.
    #[error(
        "keys and values of the prompt take {need} bytes, the pool has {budget}: use a shorter prompt, a larger pool, \
         or less precision"
    )]
    PoolTooSmall {
        /// Bytes of its pages.
        need: u64,
        /// Bytes of the pool.
        budget: u64,
    },
    /// The system could not start a thread for the scheduler.
    #[error("cannot start the scheduler's thread: {error}")]
    Thread {
        /// The system's error.
        error: String,
    },
    /// The scheduler stopped before the request was finished.
    #[error("the scheduler has ended")]
    Ended,
}

/// Why learning, or a file of what was learnt, was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The file itself is invalid, or could not be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A pass that learning required failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// What was learnt in inner layers was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// An option is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: f64,
        /// The valid values.
        expected: String,
    },
    /// The file is not a saved learner.
    #[error("general.type is {found:?}, expected \"learned\": this file holds nothing learnt")]
    NotLearned {
        /// `general.type`; empty if it is missing.
        found: String,
    },
    /// The file is of another version.
    #[error(
        "what was learnt was saved in version {found}, this build reads {supported}: learn again, or use the build \
         that wrote it"
    )]
    Version {
        /// The file's.
        found: u32,
        /// This build's.
        supported: u32,
    },
    /// What was learnt belongs to another model.
    #[error(
        "this was learnt with another model (fingerprint {found:016x}, this one has {expected:016x})"
    )]
    OtherModel {
        /// Fingerprint of the model it was learnt with.
        found: u64,
        /// Fingerprint of this model.
        expected: u64,
    },
    /// A tensor is missing, or has a wrong shape or type.
    #[error("tensor {name:?} is {found}, expected {expected}: the file is damaged")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// Actual shape and type.
        found: String,
        /// Required shape and type.
        expected: String,
    },
    /// A tensor has values that cannot result from learning.
    #[error("tensor {name:?} holds {what}: the file is damaged")]
    Value {
        /// The tensor.
        name: &'static str,
        /// What is wrong.
        what: String,
    },
    /// The file is not a checkpoint of a training.
    #[error(
        "general.type is {found:?}, expected \"training\": this file is no checkpoint of a training"
    )]
    NotTraining {
        /// `general.type`; empty if it is missing.
        found: String,
    },
    /// A checkpoint was made with other examples, control text or options.
    #[error(
        "the checkpoint was made with other examples, control text or options: give the same to continue, or delete it \
         to begin anew"
    )]
    OtherTraining,
    /// An example cannot be trained on.
    #[error("example {index} {what}")]
    Example {
        /// Its index.
        index: usize,
        /// What is wrong.
        what: String,
    },
    /// Too few examples to train on.
    #[error("{n} examples are too few: at least {least} must be left to train on")]
    TooFewExamples {
        /// Examples given.
        n: usize,
        /// Least number.
        least: usize,
    },
    /// A loss or gradient is infinite or NaN.
    #[error("training diverged in step {step}: use a smaller rate")]
    Diverged {
        /// The step.
        step: usize,
    },
    /// The session has no learner.
    #[error("this session does not learn: give it a learner first")]
    NotLearning,
    /// There was no answer to rate.
    #[error("there is no answer to rate: nothing was generated since the last prompt or rating")]
    NoAnswer,
    /// A rating came before any text with which answers could be compared.
    #[error(
        "nothing to compare the answer with: calibrate with control text, or let some pages be observed first"
    )]
    NothingToCompare,
    /// A rating is infinite or NaN.
    #[error("the rating is {value}, expected a finite number")]
    Reward {
        /// Its value.
        value: f32,
    },
    /// There is nothing to export.
    #[error("nothing has been learnt yet")]
    NothingLearnt,
    /// What was learnt has no effect yet, so there is nothing to export.
    #[error(
        "what was learnt has no effect yet: text that came later did not speak for it, or the bound on forgetting \
         leaves it no room; let it read more, or calibrate"
    )]
    NoEffect,
    /// Too little text to calibrate or to measure with.
    #[error("a text of {n} tokens is too short: at least {least} are needed")]
    TooLittleText {
        /// Tokens given.
        n: usize,
        /// Least number of tokens.
        least: usize,
    },
}

/// Why a folder of trajectories and of what was learnt was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SonaError {
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

impl SonaError {
    /// Adds the file to what the system says.
    pub(crate) fn io(path: &std::path::Path) -> impl Fn(std::io::Error) -> SonaError + '_ {
        move |error| SonaError::Io {
            path: path.to_owned(),
            error,
        }
    }
}

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
        /// The key that tells the kind of file.
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

/// Why a sampler could not be built, or could not choose.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum SampleError {
    /// A parameter has an invalid value.
    #[error("sampling parameter {name} is {value}; it must be {allowed}")]
    Parameter {
        /// The builder method.
        name: &'static str,
        /// The value given.
        value: f64,
        /// The valid values.
        allowed: &'static str,
    },
    /// A name in the list of samplers is unknown.
    #[error("there is no sampler {name:?}; there are {known}")]
    UnknownSampler {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },
    /// A DRY sequence breaker without tokens would match everywhere.
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
    /// The mask failed.
    #[error(transparent)]
    Mask(#[from] MaskError),
    /// There are no logits to choose from.
    #[error("no logits were given: there is nothing to choose from")]
    NoLogits,
    /// No token can be chosen.
    #[error(
        "none of {n_vocab} tokens can be chosen ({n_nan} logits are not a number, the others are \
         forbidden): the model file is damaged, or logit bias and grammar together forbid everything"
    )]
    NoCandidates {
        /// Number of logits.
        n_vocab: usize,
        /// How many of them are NaN.
        n_nan: usize,
    },
}

/// Why a mask, such as a grammar, could not compute the allowed tokens, or refused one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MaskError {
    /// The text cannot be continued.
    #[error("after {n_tokens} tokens the grammar allows no token of the vocabulary")]
    NothingAllowed {
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// The token is not allowed here.
    #[error("the grammar does not allow token {token} after {n_tokens} tokens")]
    Refused {
        /// The token.
        token: u32,
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// More tokens should be taken back than were accepted.
    #[error("{n} tokens cannot be taken back: the grammar has accepted {n_tokens}")]
    Rollback {
        /// Tokens to take back.
        n: usize,
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// The grammar needs more work or memory at this point than is allowed for one mask.
    #[error(
        "after {n_tokens} tokens the grammar is too complex ({limit}); make it less ambiguous, or its repetitions and texts shorter"
    )]
    TooComplex {
        /// Tokens accepted so far.
        n_tokens: usize,
        /// The limit that was reached, for the message.
        limit: String,
    },
}

/// Why a grammar was refused.
#[cfg(feature = "grammar")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// No token ends a text.
    #[error("the tokenizer has no token that ends a generation; a grammar needs one")]
    NoEnd,
    /// Grammars cannot be used with this vocabulary.
    #[error("grammars cannot be matched with this vocabulary of {n_vocab} tokens: {message}")]
    Vocabulary {
        /// Number of tokens.
        n_vocab: usize,
        /// What is wrong with it.
        message: String,
    },
    /// The text is too long.
    #[error("the grammar has {len} bytes; the limit is {limit}")]
    TooLong {
        /// Its length.
        len: usize,
        /// Greatest length accepted.
        limit: usize,
    },
    /// Brackets, groups or schemas nest too deep.
    #[error("the grammar nests deeper than {limit} levels")]
    TooDeep {
        /// Greatest depth accepted.
        limit: usize,
    },
    /// Compiling takes too long.
    #[error("the grammar was not compiled within {seconds} seconds")]
    OutOfTime {
        /// The limit.
        seconds: u64,
    },
    /// The source is not a grammar of this syntax, matches nothing, or exceeds the limits of
    /// compiling.
    #[error("{syntax}: {message}")]
    Invalid {
        /// The syntax, such as `JSON Schema`.
        syntax: &'static str,
        /// What is wrong, and where.
        message: String,
    },
    /// A line of a GBNF grammar is invalid.
    #[error("GBNF grammar, line {line}: {message}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A schema has a keyword that cannot be enforced.
    #[error("JSON Schema: {keyword:?} at {path:?} {message}")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// Where the schema with the keyword is, as a JSON pointer; empty for the whole schema.
        path: String,
        /// Why it is refused.
        message: String,
    },
}

/// Why a chat template could not be parsed or rendered.
#[cfg(feature = "chat")]
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum ChatError {
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

/// Failures of an Apple GPU.
#[cfg(feature = "metal")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MetalError {
    /// There is no GPU.
    #[error("this machine has no Metal GPU; compute on the CPU (Device::Cpu, -ngl 0)")]
    NoDevice,
    /// The model, or a request, needs a kernel that does not exist.
    #[error("there is no Metal kernel for {what}; compute on the CPU (Device::Cpu, -ngl 0)")]
    Unsupported {
        /// The missing feature.
        what: String,
    },
    /// The GPU lacks features that the kernels need.
    #[error("{device} is too old: Metal 3 and Apple family 7 (M1, A14) or later are needed")]
    TooOld {
        /// Name of the GPU.
        device: String,
    },
    /// The library of kernels cannot be compiled or loaded.
    #[error("the Metal library cannot be loaded: {message}")]
    Library {
        /// Metal's message.
        message: String,
    },
    /// A kernel is missing, or the GPU cannot run it.
    #[error("the kernel {kernel} cannot be loaded: {message}")]
    Kernel {
        /// Its full name.
        kernel: String,
        /// Metal's message.
        message: String,
    },
    /// There is not enough memory.
    #[error("the GPU has no memory for {bytes} bytes")]
    OutOfMemory {
        /// Bytes requested; 0 for a queue or a pass.
        bytes: usize,
    },
    /// A buffer is shorter than required by the table of kernels.
    #[error("buffer {index} of the kernel {kernel} has {found} bytes instead of {needed}")]
    ShortBuffer {
        /// Full name of the kernel.
        kernel: String,
        /// Index of the buffer.
        index: usize,
        /// Bytes required.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The GPU did not finish a pass.
    #[error("the GPU stopped: {message}")]
    Pass {
        /// Metal's message.
        message: String,
    },
}
