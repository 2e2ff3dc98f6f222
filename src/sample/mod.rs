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
//! Each filter is a small file with its formula and source; a new one is a file, a builder method
//! and a line in the `FILTERS` table. Read `candidates.rs` first.
//!
//! [`repeat_last_n`]: SamplerBuilder::repeat_last_n
//! [`repeat_penalty`]: SamplerBuilder::repeat_penalty
//! [`presence_penalty`]: SamplerBuilder::presence_penalty
//! [`frequency_penalty`]: SamplerBuilder::frequency_penalty
//! [`dry_multiplier`]: SamplerBuilder::dry_multiplier
//! [`dry_base`]: SamplerBuilder::dry_base
//! [`dry_allowed_length`]: SamplerBuilder::dry_allowed_length
//! [`dry_penalty_last_n`]: SamplerBuilder::dry_penalty_last_n
//! [`dry_sequence_breakers`]: SamplerBuilder::dry_sequence_breakers
//! [`top_n_sigma`]: SamplerBuilder::top_n_sigma
//! [`top_k`]: SamplerBuilder::top_k
//! [`typical`]: SamplerBuilder::typical
//! [`top_p`]: SamplerBuilder::top_p
//! [`min_p`]: SamplerBuilder::min_p
//! [`xtc_probability`]: SamplerBuilder::xtc_probability
//! [`xtc_threshold`]: SamplerBuilder::xtc_threshold
//! [`temperature`]: SamplerBuilder::temperature
//! [`dynatemp_range`]: SamplerBuilder::dynatemp_range
//! [`dynatemp_exponent`]: SamplerBuilder::dynatemp_exponent
//! [`logit_bias`]: SamplerBuilder::logit_bias
//! [`mirostat`]: SamplerBuilder::mirostat

mod builder;
mod candidates;
mod dry;
mod error;
mod mask;
mod min_p;
mod mirostat;
mod penalties;
pub(crate) mod rng;
mod temperature;
mod top_k;
mod top_n_sigma;
mod top_p;
mod typical;
mod xtc;

pub use builder::{Mirostat, SamplerBuilder};
use candidates::{Candidate, Candidates};
pub use dry::breaker_sequences;
pub use error::{MaskError, SampleError};
pub use mask::TokenMask;

use rng::Rng;

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

/// Chooses tokens, as the [module documentation](self) describes; [`Sampler::builder`] makes one.
///
/// A sampler is a value: a clone draws the same random numbers.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerBuilder,
    chain: Vec<Filter>,
    seed: u64,
    rng: Rng,
    mirostat: Option<mirostat::Mirostat>,
    mask: Option<Box<dyn TokenMask>>,
    candidates: Candidates,
    ranked: Candidates,
}

impl Sampler {
    /// A builder with llama.cpp's defaults.
    pub fn builder() -> SamplerBuilder {
        SamplerBuilder::default()
    }

    /// The seed in use, given or drawn at random.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Restricts the tokens from now on; `None` removes the restriction.
    pub fn set_mask(&mut self, mask: Option<Box<dyn TokenMask>>) {
        self.mask = mask;
    }

    /// The mask, for instance to ask for tokens that it forces or whether the text is complete.
    pub fn mask_mut(&mut self) -> Option<&mut dyn TokenMask> {
        // Shortens the lifetime of the trait object, which `as_deref_mut` cannot.
        match &mut self.mask {
            Some(mask) => Some(&mut **mask),
            None => None,
        }
    }

    /// Rewinds the [mask](Self::set_mask) by `n` tokens that are not kept in the text.
    ///
    /// # Errors
    /// [`MaskError::Rollback`] if fewer were sampled since the mask was
    /// set or reset.
    pub fn rollback(&mut self, n: usize) -> Result<(), SampleError> {
        match &mut self.mask {
            Some(mask) => Ok(mask.rollback(n)?),
            None => Ok(()),
        }
    }

    /// Grammar-forced tokens: those that the [mask](Self::set_mask) leaves no choice about,
    /// tokenised by `encode` ([`Tokenizer::encode_inside`]), up to the first that a bias of −∞
    /// forbids; empty if there is a choice. The mask has not accepted them yet.
    ///
    /// They need no logits, so one forward pass can compute all of them: [`Session::generate`] does
    /// that.
    ///
    /// [`Tokenizer::encode_inside`]: crate::Tokenizer::encode_inside
    /// [`Session::generate`]: crate::Session::generate
    pub fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        let mut tokens = self
            .mask
            .as_mut()
            .map_or_else(Vec::new, |mask| mask.forced(encode));
        let never = |token: &u32| {
            self.params
                .logit_bias
                .contains(&(*token, f32::NEG_INFINITY))
        };
        let n = tokens.iter().position(never).unwrap_or(tokens.len());
        tokens.truncate(n);
        tokens
    }

    /// Resets to the state after [`SamplerBuilder::build`], with the same seed; a mask returns to
    /// its beginning.
    pub fn reset(&mut self) {
        if let Some(mask) = &mut self.mask {
            mask.reset();
        }
        self.rng = Rng::new(self.seed);
        if let Some(m) = &mut self.mirostat {
            m.reset();
        }
    }

    /// Chooses the next token from `logits` `(n_vocab)`; `history` (prompt and text so far, oldest
    /// first) is the input of the penalties. On return the [mask](Self::set_mask) has accepted the
    /// token.
    ///
    /// # Errors
    /// [`SampleError::NoLogits`] if `logits` is empty, [`SampleError::NoCandidates`] if no token
    /// can be chosen: every logit is NaN or −∞, or belongs to a token that the mask forbids.
    /// [`SampleError::BiasOutsideVocabulary`] if a biased token is not in the vocabulary.
    /// [`SampleError::Mask`] if the mask fails.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, SampleError> {
        let token = self.choose(logits, history)?;
        if let Some(mask) = &mut self.mask {
            mask.accept(token)?;
        }
        Ok(token)
    }

    fn choose(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, SampleError> {
        let n_vocab = logits.len();
        if n_vocab == 0 {
            return Err(SampleError::NoLogits);
        }
        let bias = &self.params.logit_bias;
        if let Some(&(token, _)) = bias.iter().find(|(id, _)| *id as usize >= n_vocab) {
            return Err(SampleError::BiasOutsideVocabulary { token, n_vocab });
        }
        let candidates = &mut self.candidates;
        candidates.load(logits, bias);
        if let Some(mask) = &mut self.mask {
            let greedy = self.mirostat.is_none() && self.params.is_argmax(&self.chain);
            match candidates.best().filter(|_| greedy) {
                Some(best) if mask.allows(best.id)? => candidates.retain(|c| c.id == best.id),
                _ => {
                    let words = mask.mask()?;
                    candidates.retain(|c| mask::is_set(words, c.id));
                }
            }
        }
        if candidates.is_empty() {
            let n_nan = logits.iter().filter(|l| l.is_nan()).count();
            return Err(SampleError::NoCandidates { n_vocab, n_nan });
        }

        let p = &mut self.params;
        if let Some(mirostat) = &mut self.mirostat {
            temperature::apply(candidates, p.temperature);
            match p.mirostat {
                Mirostat::V1 => mirostat.truncate_v1(candidates, n_vocab),
                _ => mirostat.truncate_v2(candidates),
            }
            let chosen = draw(candidates, &mut self.rng);
            mirostat.learn(chosen.p);
            return Ok(chosen.id);
        }
        for filter in &self.chain {
            match filter {
                Filter::Penalties => p.penalties.apply(candidates, history, n_vocab),
                Filter::Dry => p.dry.apply(candidates, history, n_vocab),
                Filter::TopNSigma => top_n_sigma::apply(candidates, p.top_n_sigma),
                Filter::TopK => top_k::apply(candidates, p.top_k),
                Filter::TypP => typical::apply(candidates, p.typical),
                Filter::TopP => top_p::apply(candidates, p.top_p),
                Filter::MinP => min_p::apply(candidates, p.min_p),
                Filter::Xtc => {
                    xtc::apply(
                        candidates,
                        p.xtc_probability,
                        p.xtc_threshold,
                        &mut self.rng,
                    );
                }
                Filter::Temperature => temperature::apply_dynamic(
                    candidates,
                    p.temperature,
                    p.dynatemp_range,
                    p.dynatemp_exponent,
                ),
            }
        }
        Ok(draw(candidates, &mut self.rng).id)
    }

    /// [`Self::sample`], and the log-probabilities of the chosen token and of the `n_top` most
    /// probable ones.
    ///
    /// They are the model's: `ln softmax(logits)` before bias and filters, as the OpenAI API and
    /// llama.cpp report them, so the chosen token need not be among the top. If the model gives
    /// the chosen token no probability (only a bias can cause that), it is −∞.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn sample_with_logprobs(
        &mut self,
        logits: &[f32],
        history: &[u32],
        n_top: usize,
    ) -> Result<Sampled, SampleError> {
        let token = self.sample(logits, history)?;
        Ok(self.logprobs(logits, token, n_top))
    }

    /// The log-probabilities of `token` and of the `n_top` most probable ones, as
    /// [`Self::sample_with_logprobs`] returns them.
    pub(crate) fn logprobs(&mut self, logits: &[f32], token: u32, n_top: usize) -> Sampled {
        let valid = || logits.iter().copied().filter(|l| !l.is_nan());
        let max = valid().fold(f32::NEG_INFINITY, f32::max);
        // As in the softmax: logits at the maximum weigh 1, even infinite ones.
        let below = |l: f32| {
            if l == max {
                0.0
            } else {
                f64::from(l) - f64::from(max)
            }
        };
        let ln_sum = valid().map(|l| below(l).exp()).sum::<f64>().ln();
        let logprob = |l: f32| (below(l) - ln_sum) as f32;

        self.ranked.load(logits, &[]);
        self.ranked.keep_best(n_top);
        let top = self
            .ranked
            .as_slice()
            .iter()
            .map(|c| (c.id, logprob(c.logit)))
            .collect();
        let chosen = logits
            .get(token as usize)
            .map_or(f32::NEG_INFINITY, |&l| logprob(l));
        Sampled {
            token,
            logprob: chosen,
            top,
        }
    }
}

/// Draws from the softmax of the candidates, at least one: walks the running sum up to a uniform
/// random number times the total.
fn draw(candidates: &mut Candidates, rng: &mut Rng) -> Candidate {
    candidates.softmax();
    let items = candidates.as_slice();
    let total: f64 = items.iter().map(|c| f64::from(c.p)).sum();
    let target = rng.uniform() * total;
    let mut sum = 0.0;
    for c in items {
        sum += f64::from(c.p);
        if target < sum {
            return *c;
        }
    }
    // The products above are below the total unless rounded up to it.
    items[items.len() - 1]
}
