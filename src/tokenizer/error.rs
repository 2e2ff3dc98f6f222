//! Failures of vocabularies.

use crate::gguf::GgufError;

/// Why a vocabulary was refused, or tokens could not be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key of the tokenizer is missing or has the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The kind of tokenizer is not supported.
    #[error(
        "tokenizer model `{name}` is not supported; supported are llama (SentencePiece BPE), gpt2 and gemma4 (byte-level BPE), bert (WordPiece), t5 (unigram), rwkv, plamo2"
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
    /// A byte has no token, which a character without one needs.
    #[error("there is no token for byte {byte:#04x}, as <0x{byte:02X}>")]
    NoByteToken {
        /// The byte.
        byte: u8,
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
