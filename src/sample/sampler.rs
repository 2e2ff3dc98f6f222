//! The sampler: a chain of filters behind a mask, and a draw.

use crate::sample::candidates::{Candidate, Candidates};
use crate::sample::dry::Dry;
use crate::sample::mask;
use crate::sample::options::{Mirostat, SamplerOptions};
use crate::sample::penalties::Penalties;
use crate::sample::rng::{Rng, random_seed};
use crate::sample::{
    Filter, SampleError, Sampled, TokenMask, min_p, mirostat, temperature, top_k, top_n_sigma,
    top_p, typical, xtc,
};

/// Chooses tokens, as the [module documentation](crate::sample) describes.
///
/// A sampler is a value: a clone draws the same random numbers.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    penalties: Penalties,
    dry: Dry,
    chain: Vec<Filter>,
    seed: u64,
    rng: Rng,
    mirostat: Option<mirostat::Mirostat>,
    mask: Option<Box<dyn TokenMask>>,
    candidates: Candidates,
    ranked: Candidates,
}

impl Sampler {
    /// A sampler with these options.
    ///
    /// # Errors
    /// [`SampleError::Parameter`] names the first parameter with an invalid value;
    /// [`SampleError::UnknownSampler`] a name in [`SamplerOptions::samplers`] that is no filter.
    pub fn new(mut options: SamplerOptions) -> Result<Sampler, SampleError> {
        let chain = options.check()?;
        let mut breakers = std::mem::take(&mut options.dry_sequence_breakers);
        breakers.sort_unstable();
        breakers.dedup();
        let mirostat = (options.mirostat != Mirostat::Off)
            .then(|| mirostat::Mirostat::new(options.mirostat_tau, options.mirostat_eta));
        let seed = options.seed.unwrap_or_else(random_seed);
        Ok(Sampler {
            chain,
            seed,
            rng: Rng::new(seed),
            mirostat,
            mask: None,
            candidates: Candidates::default(),
            ranked: Candidates::default(),
            penalties: Penalties {
                last_n: options.repeat_last_n,
                repeat: options.repeat_penalty,
                frequency: options.frequency_penalty,
                presence: options.presence_penalty,
                ..Penalties::default()
            },
            dry: Dry {
                multiplier: options.dry_multiplier,
                base: options.dry_base,
                allowed_length: options.dry_allowed_length,
                last_n: options.dry_penalty_last_n,
                breakers,
                ..Dry::default()
            },
            options,
        })
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
    /// [`MaskError::Rollback`](crate::sample::MaskError::Rollback) if fewer were sampled since the mask was
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
            self.options
                .logit_bias
                .contains(&(*token, f32::NEG_INFINITY))
        };
        let n = tokens.iter().position(never).unwrap_or(tokens.len());
        tokens.truncate(n);
        tokens
    }

    /// Resets to the state after [`Sampler::new`], with the same seed; a mask returns to
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
        let bias = &self.options.logit_bias;
        if let Some(&(token, _)) = bias.iter().find(|(id, _)| *id as usize >= n_vocab) {
            return Err(SampleError::BiasOutsideVocabulary { token, n_vocab });
        }
        let candidates = &mut self.candidates;
        let chain = self.chain.as_slice();
        let few = match self.mirostat {
            None if bias.is_empty() => self.options.n_best(chain).filter(|n| n_vocab / 4 > *n),
            _ => None,
        };
        let load = |candidates: &mut Candidates, allowed: Option<&[u32]>| match (few, allowed) {
            (Some(n), allowed) => candidates.load_best(logits, n, allowed),
            (None, allowed) => {
                candidates.load(logits, bias);
                if let Some(words) = allowed {
                    candidates.retain(|c| mask::is_set(words, c.id));
                }
            }
        };
        match &mut self.mask {
            None => load(candidates, None),
            Some(mask) => {
                let greedy = self.mirostat.is_none() && self.options.is_argmax(chain);
                let best = if greedy {
                    load(candidates, None);
                    candidates.best()
                } else {
                    None
                };
                match best {
                    Some(best) if mask.allows(best.id)? => candidates.retain(|c| c.id == best.id),
                    _ => load(candidates, Some(mask.mask()?)),
                }
            }
        }
        if candidates.is_empty() {
            let n_nan = logits.iter().filter(|l| l.is_nan()).count();
            return Err(SampleError::NoCandidates { n_vocab, n_nan });
        }

        let p = &self.options;
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
                Filter::Penalties => self.penalties.apply(candidates, history, n_vocab),
                Filter::Dry => self.dry.apply(candidates, history, n_vocab),
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

        self.ranked.load_best(logits, n_top, None);
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
