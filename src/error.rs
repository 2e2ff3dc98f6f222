//! Every way this crate can fail, one enum per layer. Data that comes from outside
//! (files, prompts, templates) never panics: it ends here, with what, where and what to do.
//!
//! Messages are whole: what the system said is part of them, and `source()` does not repeat it.

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
    /// The file is sound, but its vocabulary is not.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The file is sound, but does not describe a model this build can run.
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
    /// The sampling parameters make no sense.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Learning, or what was learnt, was refused.
    #[error(transparent)]
    Learn(#[from] LearnError),
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
    /// The type holds tables or other integers.
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
    /// The lengths do not belong together.
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
    /// A value that no weight can have.
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
        /// What the system said.
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
    /// The version of the format is not one this build reads.
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
    /// The prefix given to the parser ends inside the header; the file goes on.
    #[error("the header does not end within the first {have} bytes: at least {need} are needed")]
    HeaderIncomplete {
        /// Length of the prefix.
        have: u64,
        /// A lower bound of the bytes needed.
        need: u64,
    },
    /// The file ends inside its header: it is cut off, or a length in it is wrong.
    #[error(
        "the file ends too early: {item} at byte {offset} takes {need} bytes, the file has {file_size} (incomplete download, or corrupt)"
    )]
    UnexpectedEnd {
        /// What was being read.
        item: String,
        /// Where it begins.
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
    /// The header goes on beyond the limit, so that a length in it might overflow 32 bits.
    #[error("{item} at byte {offset} takes {need} bytes: headers over {limit} bytes are refused")]
    HeaderTooLarge {
        /// What was being read.
        item: String,
        /// Where it begins.
        offset: u64,
        /// Its length, or a lower bound of it.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// A count promises more than the rest of the file can hold.
    #[error("{item} at byte {offset} is {count}, but the {left} bytes that follow cannot hold so many")]
    CountTooLarge {
        /// What is counted.
        item: String,
        /// Where the count stands.
        offset: u64,
        /// The count.
        count: u64,
        /// Bytes left in the file.
        left: u64,
    },
    /// More metadata entries than any model has.
    #[error("the file has {count} metadata entries; at most {max} are allowed")]
    TooManyEntries {
        /// How many.
        count: usize,
        /// How many are read.
        max: usize,
    },

    /// A key or tensor name is empty or too long.
    #[error("{item} at byte {offset} has {found} bytes; 1 to {max} are allowed")]
    NameLength {
        /// Which key or name.
        item: String,
        /// Where it begins.
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
        /// Where the type stands.
        offset: u64,
        /// The type in the file.
        found: u32,
    },
    /// The element type of an array is not one of GGUF's.
    #[error("`{key}` at byte {offset}: {found} is not an array element type (0 to 12 are)")]
    ArrayElementType {
        /// The key.
        key: String,
        /// Where the type stands.
        offset: u64,
        /// The type in the file.
        found: u32,
    },
    /// Arrays of arrays go too deep.
    #[error("`{key}` at byte {offset}: arrays are nested more than {max} deep")]
    ArrayDepth {
        /// The key.
        key: String,
        /// Where the array too many begins.
        offset: u64,
        /// The limit.
        max: usize,
    },
    /// A boolean is neither 0 nor 1.
    #[error("`{key}` at byte {offset}: {found} is not a boolean (0 or 1)")]
    InvalidBool {
        /// The key.
        key: String,
        /// Where the byte stands.
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

    /// A metadata key that is needed is not there.
    #[error("the metadata key `{key}` is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value has another type than it must have.
    #[error("`{key}` is of type {found}, not {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
        /// The type in the file.
        found: &'static str,
    },
    /// A number does not fit the type asked for.
    #[error("`{key}` is {found}, which does not fit {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// The type asked for.
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
    #[error("tensor `{name}`: rows of {row} values are not whole blocks of {block} values of {dtype}")]
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
    #[error("tensor `{name}`: its offset {offset} into the tensor data is not a multiple of {alignment}")]
    TensorMisaligned {
        /// The tensor.
        name: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A tensor lies outside the file, and not because the file is cut off.
    #[error("tensor `{name}`: {n_bytes} bytes at byte {offset} lie outside the file of {file_size} bytes")]
    TensorOutOfFile {
        /// The tensor.
        name: String,
        /// Where it begins.
        offset: u64,
        /// Its length.
        n_bytes: u64,
        /// Size of the file.
        file_size: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor `{name}` at byte {offset} overlaps tensor `{other}`, which ends at byte {other_end}")]
    TensorOverlap {
        /// The later tensor.
        name: String,
        /// Where it begins.
        offset: u64,
        /// The earlier tensor.
        other: String,
        /// Where that one ends.
        other_end: u64,
    },

    /// A part of a split model does not carry the name its parts are found by.
    #[error(
        "this is part {no} of a model split into {count} files, whose names have to end in `{expected}`: rename it back"
    )]
    SplitName {
        /// Which part, counted from 1.
        no: u64,
        /// How many there are.
        count: u64,
        /// How the name of this part has to end.
        expected: String,
    },
    /// The parts of a split model contradict each other.
    #[error(
        "`{key}` is {found}, but {expected} was expected: this file does not belong to the other parts of the model"
    )]
    SplitMismatch {
        /// The key that tells.
        key: &'static str,
        /// What the other parts promise.
        expected: u64,
        /// What this part says.
        found: u64,
    },
    /// A split model cannot be opened from memory.
    #[error("this is one of {count} files of a split model: join them into one file to load it from memory")]
    SplitInMemory {
        /// How many files there are.
        count: u64,
    },

    /// The file to be written is there already.
    #[error("{path} exists already and is not overwritten unless asked for")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The data given for a tensor has another length than its shape and type need.
    #[error("tensor `{name}` needs {expected} bytes of data, but {found} were given")]
    TensorData {
        /// The tensor.
        name: String,
        /// Bytes its shape and type need.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
}

impl GgufError {
    /// The error without the file name: what to match on.
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
        "tokenizer model `{name}` is not supported; supported are llama (SentencePiece BPE), gpt2 and gemma4 (byte-level BPE)"
    )]
    Model {
        /// `tokenizer.ggml.model`.
        name: String,
    },
    /// The pre-tokeniser is not known; any other would give wrong tokens without a sign of it.
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
    /// An array that goes with the tokens does not have one entry per token.
    #[error("{key} has {len} entries for {n_vocab} tokens: the file is damaged or was converted wrongly")]
    ArrayLength {
        /// Key of the array.
        key: &'static str,
        /// Its length.
        len: usize,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// Two tokens have the same text, so that a text has no definite tokens.
    #[error("tokens {first} and {second} are both {text:?}")]
    DuplicateToken {
        /// Their text.
        text: String,
        /// The one with the lower id.
        first: u32,
        /// The other one.
        second: u32,
    },
    /// A token is marked as a byte, but its text is not `<0x` two hexadecimal digits `>`.
    #[error("token {id} is marked as a byte, but its text is {text:?} instead of <0x00> to <0xFF>")]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// A special token is too long to be looked for in texts.
    #[error("special token {id} is longer than {max} bytes")]
    SpecialTokenTooLong {
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
    /// A flag asks for a special token that is not there.
    #[error("the model wants `{flag}`, but the file does not say which token that is ({key})")]
    NoSpecialToken {
        /// The flag.
        flag: &'static str,
        /// The key that should name the token.
        key: &'static str,
    },
    /// A score is not a number.
    #[error("the score of token {id} is not a number")]
    Score {
        /// The token.
        id: u32,
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
    /// The file itself is not sound.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its vocabulary is not sound.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
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
    /// The file holds a hyper-parameter that this build would ignore.
    #[error("metadata key {key:?} is not part of architecture {arch:?} as this build knows it; refusing to ignore it")]
    UnknownKey {
        /// The key.
        key: String,
        /// The architecture.
        arch: String,
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
    /// A weight is missing in one layer and there in another.
    #[error("tensor {name:?} is missing, though {present:?} is there; layers have to be alike")]
    MissingInLayer {
        /// The tensor.
        name: String,
        /// The same of another layer.
        present: String,
    },
    /// A tensor holds a number that cannot be computed with.
    #[error("tensor {name:?} holds {value} at index {index}, expected {expected}")]
    TensorValue {
        /// The tensor.
        name: String,
        /// Which of its elements.
        index: usize,
        /// The element.
        value: f32,
        /// What would make sense.
        expected: &'static str,
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
    /// There is no room for a copy of the weights.
    #[error("no room for a copy of {n_bytes} bytes of weights ({error}): use the mapped file")]
    NoRoom {
        /// Size of the copy.
        n_bytes: u64,
        /// What the system said.
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
    /// The progress callback asked to stop.
    #[error("loading was cancelled")]
    Cancelled,
}

/// A part of the key/value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPart {
    /// What queries are compared with.
    Key,
    /// What is summed by weight.
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
    /// Not enough memory.
    #[error("no memory for {what} of {bytes} bytes; use a smaller context, or compute fewer tokens at a time")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The pool of pages for keys and values is full.
    #[error(
        "the key/value pool of {budget} bytes is full: {used} are in use, {need} more are needed; end a session, or give it more"
    )]
    PoolFull {
        /// Bytes of the page that was asked for.
        need: u64,
        /// Bytes in use.
        used: u64,
        /// Most that may be.
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
    #[error("there is no context shift with {what}; leave it out (--context-shift), and use a larger context")]
    NoShift {
        /// What it does not go with.
        what: &'static str,
    },
    /// A key or value is beyond 65,504, the largest number of half precision.
    #[error("a {part} of layer {layer} is too large for a half-precision cache; use KvType::F32 (-ctk f32 -ctv f32)")]
    KvOverflow {
        /// The layer.
        layer: usize,
        /// Which of the two.
        part: KvPart,
    },
    /// Precision by age begins with half precision.
    #[error("kv_tiers begin with f16 keys and values, not with {k} and {v}; leave those types out (-ctk, -ctv)")]
    TiersNeedF16 {
        /// Type of keys asked for.
        k: KvType,
        /// Type of values.
        v: KvType,
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
    #[error("cannot start {n_threads} threads: {error}")]
    Threads {
        /// Threads asked for.
        n_threads: usize,
        /// What the system said.
        error: String,
    },
    /// The folder of the prefix cache cannot be used.
    #[error("{}: {error}; the prefix cache needs a folder it can read and write", path.display())]
    PrefixFolder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        error: String,
    },
    /// A sequence was given to the engine of another model.
    #[error("the sequence belongs to another model than the engine")]
    OtherModel,
    /// The model has no tokenizer, so text cannot be used with it.
    #[error("this file has no tokenizer; use token ids")]
    NoTokenizer,
    /// The model's tokens see later ones, so that it cannot go on with a text.
    #[error(
        "the model is an encoder: it makes vectors of whole texts (Model::embedder, ruvllm embed) and generates none"
    )]
    Encoder,
    /// Gradients do not go back through something that the model has.
    #[error("there are no gradients of {what}; adapt another model, or let the head alone learn")]
    NoGradient {
        /// What it is.
        what: &'static str,
    },
    /// The device that computes the engine's passes cannot do this.
    #[error("{device} does without {what}; open the model with Device::Cpu")]
    NotOnDevice {
        /// What computes.
        device: String,
        /// What was asked for.
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
            format!("one of {n_ctx} fits with {k} keys and {v} values (-c {n_ctx} -ctk {k} -ctv {v})")
        }
        None => "none fits: use a smaller model".into(),
    }
}

/// Why a session could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The file itself is not sound, or could not be read or written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// There is no room for what it holds.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The file holds something else.
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
    /// What its bits depend on is another here.
    #[error("the session was saved with another {what}: {found}, this one has {expected}")]
    Other {
        /// What differs.
        what: &'static str,
        /// The file's.
        found: String,
        /// This session's.
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
    /// The contents are not those that were saved.
    #[error("the checksum is {found:016x}, expected {expected:016x}: the file is damaged")]
    Checksum {
        /// Of what is there.
        found: u64,
        /// Of what was saved.
        expected: u64,
    },
    /// Something that no session holds.
    #[error("{item}: {what}; the file is damaged")]
    Damaged {
        /// The tensor.
        item: &'static str,
        /// What is wrong.
        what: &'static str,
    },
}

/// Why a scheduler refused a request, or lost it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The request makes no sense to a session either.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Its adapters cannot be attached.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// There are too many requests.
    #[error("{max} requests are waiting or running already; try again later, or raise max_requests")]
    QueueFull {
        /// Most that there may be.
        max: usize,
    },
    /// The prompt would not fit, were it alone.
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
    /// The system gave no thread for the scheduler.
    #[error("cannot start the scheduler's thread: {error}")]
    Thread {
        /// What the system said.
        error: String,
    },
    /// The scheduler ended before the request did.
    #[error("the scheduler has ended")]
    Ended,
}

/// Why learning, or a file of what was learnt, was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The file itself is not sound, or could not be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Learning needed a pass that failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// An option makes no sense.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: f64,
        /// What would make sense.
        expected: String,
    },
    /// The file holds something else.
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
    #[error("this was learnt with another model (fingerprint {found:016x}, this one has {expected:016x})")]
    OtherModel {
        /// Fingerprint of the model it was learnt with.
        found: u64,
        /// Fingerprint of this model.
        expected: u64,
    },
    /// A tensor is missing, or of another shape or type than it must have.
    #[error("tensor {name:?} is {found}, expected {expected}: the file is damaged")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// What is there.
        found: String,
        /// What should be there.
        expected: String,
    },
    /// A tensor holds values that cannot have been learnt.
    #[error("tensor {name:?} holds {what}: the file is damaged")]
    Value {
        /// The tensor.
        name: &'static str,
        /// What is wrong.
        what: String,
    },
    /// The session has no learner.
    #[error("this session does not learn: give it a learner first")]
    NotLearning,
    /// There was no answer to rate.
    #[error("there is no answer to rate: nothing was generated since the last prompt or rating")]
    NoAnswer,
    /// Ratings came before anything that answers could be compared with.
    #[error("nothing to compare the answer with: calibrate with control text, or let some pages be observed first")]
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
    /// What was learnt has no effect so far, so that there is nothing to export.
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
        /// Tokens needed.
        least: usize,
    },
}

/// Why an adapter was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The file itself is not sound, or could not be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Values could not be converted.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The rows of a matrix are not whole blocks of the type it is to have.
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
    /// The file holds something else.
    #[error("{key} is {found:?}, expected {expected:?}: this file is no LoRA adapter")]
    NotAnAdapter {
        /// The key that tells.
        key: &'static str,
        /// Its value; empty if it is missing.
        found: String,
        /// Its value in an adapter.
        expected: &'static str,
    },
    /// The adapter does more than this build can do.
    #[error("the adapter sets {key}, which this build does not support; it would not work as it was trained")]
    Unsupported {
        /// The key.
        key: &'static str,
    },
    /// It is for a model of another architecture.
    #[error("the adapter is for a model of architecture {found:?}, this one is {expected:?}")]
    Architecture {
        /// The adapter's.
        found: String,
        /// The model's.
        expected: String,
    },
    /// It was made for a model with other matrices.
    #[error("the adapter is for another model: they differ in tensor {tensor:?}")]
    OtherModel {
        /// The first tensor that differs.
        tensor: String,
    },
    /// A tensor is neither half of a pair.
    #[error("tensor {name:?} is neither `.lora_a` nor `.lora_b` of a weight; refusing to ignore it")]
    UnknownTensor {
        /// The tensor.
        name: String,
    },
    /// It changes a matrix that the model does not have.
    #[error("the adapter changes {tensor:?}, which is no matrix of this model: it is for another one")]
    NoSuchMatrix {
        /// The matrix.
        tensor: String,
    },
    /// Half of a pair is missing.
    #[error("tensor {missing:?} is missing, its partner is there")]
    Unpaired {
        /// The missing tensor.
        missing: String,
    },
    /// A tensor does not fit its matrix, or its partner.
    #[error("tensor {name:?} has the shape {found:?}, expected {expected:?}: the adapter is for another model")]
    Shape {
        /// The tensor.
        name: String,
        /// Its dimensions, fastest first.
        found: Vec<u64>,
        /// What would fit.
        expected: Vec<u64>,
    },
    /// A rank makes no sense.
    #[error("the rank of the change of {tensor:?} is {rank}, expected 1 to {max}")]
    Rank {
        /// The matrix.
        tensor: String,
        /// The rank.
        rank: usize,
        /// The largest that makes sense.
        max: usize,
    },
    /// A tensor has a type that holds no weights.
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
        /// Position in it.
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
    /// It changes nothing at all.
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
    /// The mask has no answer.
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

/// Why a mask, such as a grammar, could not say which tokens may come next, or not take one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MaskError {
    /// The text cannot be continued.
    #[error("after {n_tokens} tokens the grammar allows no token of the vocabulary")]
    NothingAllowed {
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// The token may not come here.
    #[error("the grammar does not allow token {token} after {n_tokens} tokens")]
    Refused {
        /// The token.
        token: u32,
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// More tokens are to be taken back than there are.
    #[error("{n} tokens cannot be taken back: the grammar has accepted {n_tokens}")]
    Rollback {
        /// Tokens to take back.
        n: usize,
        /// Tokens accepted so far.
        n_tokens: usize,
    },
    /// The grammar needs more work or memory at this point than one mask may take.
    #[error(
        "after {n_tokens} tokens the grammar is too complex ({limit}); make it less ambiguous, or its repetitions and texts shorter"
    )]
    TooComplex {
        /// Tokens accepted so far.
        n_tokens: usize,
        /// The limit that was reached, in words.
        limit: String,
    },
}

/// Why a grammar was refused.
#[cfg(feature = "grammar")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Nothing could end a text.
    #[error("the tokenizer has no token that ends a generation; a grammar needs one")]
    NoEnd,
    /// The vocabulary is not one that grammars can be matched with.
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
        /// The most that is accepted.
        limit: usize,
    },
    /// Brackets, groups or schemas nest too deep.
    #[error("the grammar nests deeper than {limit} levels")]
    TooDeep {
        /// The most that is accepted.
        limit: usize,
    },
    /// Compiling takes too long.
    #[error("the grammar was not compiled within {seconds} seconds")]
    OutOfTime {
        /// The limit.
        seconds: u64,
    },
    /// It is not a grammar of this syntax, matches nothing, or takes more work or memory to compile than allowed.
    #[error("{syntax}: {message}")]
    Invalid {
        /// The syntax, such as `JSON Schema`.
        syntax: &'static str,
        /// What is wrong, and where.
        message: String,
    },
    /// A line of a GBNF grammar is wrong.
    #[error("GBNF grammar, line {line}: {message}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A schema asks what cannot be enforced.
    #[error("JSON Schema: {keyword:?} at {path:?} {message}")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// Where the schema with the keyword is, as a JSON pointer; empty for the whole schema.
        path: String,
        /// What is wrong with it.
        message: String,
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
    /// The template took longer than any honest one would.
    #[error("the chat template did not end within {seconds} seconds")]
    OutOfTime {
        /// The limit.
        seconds: u64,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// The template wrote more than any honest one would.
    #[error("the chat template wrote more than {limit} bytes")]
    OutputTooLong {
        /// The limit.
        limit: usize,
    },
    /// A tool is not described, or cannot be called in the model's format.
    #[error("tool {index}: {message}")]
    Tool {
        /// Its number, from 0.
        index: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A point in time is not of the form `2025-01-15T09:05:07`.
    #[error("{0:?} is not a time of the form 2025-01-15T09:05:07")]
    Time(String),
}

/// What can go wrong on an Apple GPU.
#[cfg(feature = "metal")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MetalError {
    /// There is no GPU.
    #[error("this machine has no Metal GPU; compute on the CPU (Device::Cpu, -ngl 0)")]
    NoDevice,
    /// The model, or what was asked of it, needs a kernel that is not there.
    #[error("there is no Metal kernel for {what}; compute on the CPU (Device::Cpu, -ngl 0)")]
    Unsupported {
        /// What is not there.
        what: String,
    },
    /// The GPU lacks what the kernels need.
    #[error("{device} is too old: Metal 3 and Apple family 7 (M1, A14) or later are needed")]
    TooOld {
        /// Name of the GPU.
        device: String,
    },
    /// The library of kernels cannot be compiled or loaded.
    #[error("the Metal library cannot be loaded: {message}")]
    Library {
        /// What Metal says.
        message: String,
    },
    /// A kernel is missing, or the GPU cannot take it.
    #[error("the kernel {kernel} cannot be loaded: {message}")]
    Kernel {
        /// Its full name.
        kernel: String,
        /// What Metal says.
        message: String,
    },
    /// There is no memory.
    #[error("the GPU has no memory for {bytes} bytes")]
    OutOfMemory {
        /// Bytes asked for; 0 for a queue or a pass.
        bytes: usize,
    },
    /// A buffer is shorter than the table of kernels says.
    #[error("buffer {index} of the kernel {kernel} has {found} bytes instead of {needed}")]
    ShortBuffer {
        /// Full name of the kernel.
        kernel: String,
        /// Index of the buffer.
        index: usize,
        /// Bytes that it has to have.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The GPU did not finish a pass.
    #[error("the GPU stopped: {message}")]
    Pass {
        /// What Metal says.
        message: String,
    },
}
