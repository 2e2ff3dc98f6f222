//! Failures of choosing tokens.

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
        /// Number of NaN among them.
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
    /// Rewind by more tokens than were accepted.
    #[error("{n} tokens cannot be rewound: the grammar has accepted {n_tokens}")]
    Rollback {
        /// Tokens to rewind.
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
