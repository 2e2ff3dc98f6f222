//! Failures of grammars.

/// Why a grammar was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The model has no tokenizer.
    #[error("the model has no tokenizer; a grammar needs one")]
    NoTokenizer,
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
    /// A schema has too many parts.
    #[error("the JSON Schema is too large; the limit is {limit}")]
    TooLarge {
        /// Greatest number of parts, or of bytes, accepted.
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

/// A keyword of a JSON Schema that a grammar does not enforce: it accepts more than the schema.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Loosened {
    /// The keyword; `schema` for all of them.
    pub keyword: String,
    /// Where the schema with the keyword is, as a JSON pointer; empty for the whole schema.
    pub path: String,
    /// Why it is not enforced.
    pub message: String,
}

impl std::fmt::Display for Loosened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} at {:?} {}", self.keyword, self.path, self.message)
    }
}

impl From<Loosened> for GrammarError {
    fn from(of: Loosened) -> Self {
        let Loosened {
            keyword,
            path,
            message,
        } = of;
        Self::Keyword {
            keyword,
            path,
            message,
        }
    }
}
