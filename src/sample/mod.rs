//! From logits to a token: a chain of filters, then a draw.
//!
//! A [`Sampler`] loads the logits as candidates, runs its filters over them in order, and
//! draws from the softmax of what is left. Names, defaults and order are llama.cpp's:
//!
//! | filter | parameters | default |
//! |---|---|---|
//! | `penalties` | [`repeat_last_n`], [`repeat_penalty`], [`presence_penalty`], [`frequency_penalty`] | 64, 1, 0, 0: off |
//! | `dry` | [`dry_multiplier`], [`dry_base`], [`dry_allowed_length`], [`dry_penalty_last_n`], [`dry_sequence_breakers`] | 0, 1.75, 2, −1, none: off |
//! | `top_n_sigma` | [`top_n_sigma`] | −1: off |
//! | `top_k` | [`top_k`] | 40 |
//! | `typ_p` | [`typical`] | 1: off |
//! | `top_p` | [`top_p`] | 0.95 |
//! | `min_p` | [`min_p`] | 0.05 |
//! | `xtc` | [`xtc_probability`], [`xtc_threshold`] | 0, 0.1: off |
//! | `temperature` | [`temperature`], [`dynatemp_range`], [`dynatemp_exponent`] | 0.8, 0, 1 |
//!
//! [`logit_bias`] comes before all of them, and so does a [`TokenMask`], such as a grammar: the
//! tokens it forbids are no candidates. [`mirostat`] replaces the chain, as in llama.cpp: only
//! bias, mask and temperature remain.
//!
//! The choice depends only on the parameters, the seed, and the logits and histories of the calls
//! since the sampler was built or [reset](Sampler::reset). Tokens dropped by one filter are gone
//! for the next; they count neither as candidates nor in an entropy.
//!
//! Each filter is a small file with its formula and source; a new one is a file, a field of
//! [`SamplerOptions`](crate::SamplerOptions) with its rule, and a line in the `FILTERS` table. One
//! that llama.cpp has not is off by default, so that answers stay llama.cpp's. Read
//! `candidates.rs` first.
//!
//! [`repeat_last_n`]: crate::SamplerOptions::repeat_last_n
//! [`repeat_penalty`]: crate::SamplerOptions::repeat_penalty
//! [`presence_penalty`]: crate::SamplerOptions::presence_penalty
//! [`frequency_penalty`]: crate::SamplerOptions::frequency_penalty
//! [`dry_multiplier`]: crate::SamplerOptions::dry_multiplier
//! [`dry_base`]: crate::SamplerOptions::dry_base
//! [`dry_allowed_length`]: crate::SamplerOptions::dry_allowed_length
//! [`dry_penalty_last_n`]: crate::SamplerOptions::dry_penalty_last_n
//! [`dry_sequence_breakers`]: crate::SamplerOptions::dry_sequence_breakers
//! [`top_n_sigma`]: crate::SamplerOptions::top_n_sigma
//! [`top_k`]: crate::SamplerOptions::top_k
//! [`typical`]: crate::SamplerOptions::typical
//! [`top_p`]: crate::SamplerOptions::top_p
//! [`min_p`]: crate::SamplerOptions::min_p
//! [`xtc_probability`]: crate::SamplerOptions::xtc_probability
//! [`xtc_threshold`]: crate::SamplerOptions::xtc_threshold
//! [`temperature`]: crate::SamplerOptions::temperature
//! [`dynatemp_range`]: crate::SamplerOptions::dynatemp_range
//! [`dynatemp_exponent`]: crate::SamplerOptions::dynatemp_exponent
//! [`logit_bias`]: crate::SamplerOptions::logit_bias
//! [`mirostat`]: crate::SamplerOptions::mirostat

mod candidates;
mod dry;
mod error;
mod mask;
mod min_p;
mod mirostat;
pub(crate) mod options;
mod penalties;
pub(crate) mod rng;
pub(crate) mod sampler;
mod temperature;
mod top_k;
mod top_n_sigma;
mod top_p;
mod typical;
mod xtc;

pub use dry::breaker_sequences;
pub use error::{MaskError, SampleError};
pub use mask::TokenMask;
pub use options::Mirostat;
pub(crate) use sampler::Sampler;

/// A filter of the chain.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filter {
    Penalties,
    Dry,
    TopNSigma,
    TopK,
    TypP,
    TopP,
    MinP,
    Xtc,
    Temperature,
}

/// Names of the filters, llama.cpp's other spellings of them, and the default order.
const FILTERS: [(&str, &[&str], Filter); 9] = [
    ("penalties", &[], Filter::Penalties),
    ("dry", &[], Filter::Dry),
    ("top_n_sigma", &["top-n-sigma"], Filter::TopNSigma),
    ("top_k", &["top-k"], Filter::TopK),
    (
        "typ_p",
        &["typical-p", "typical", "typ-p", "typ"],
        Filter::TypP,
    ),
    ("top_p", &["top-p", "nucleus"], Filter::TopP),
    ("min_p", &["min-p"], Filter::MinP),
    ("xtc", &[], Filter::Xtc),
    ("temperature", &["temp"], Filter::Temperature),
];

/// A chosen token with the model's log-probabilities; see [`Sampler::sample_with_logprobs`].
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The chosen token.
    pub token: u32,
    /// Its natural log-probability.
    pub logprob: f32,
    /// The most probable tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}
