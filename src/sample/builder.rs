//! The parameters of a sampler and their valid ranges.

use crate::sample::candidates::Candidates;
use crate::sample::dry::Dry;
use crate::sample::penalties::Penalties;
use crate::sample::rng::{Rng, random_seed};
use crate::sample::{FILTERS, Filter, SampleError, Sampler, mirostat};

/// Version of Mirostat, which replaces the chain of filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mirostat {
    /// None: the chain runs.
    #[default]
    Off,
    /// The paper's algorithm, with its estimate of Zipf's exponent.
    V1,
    /// The simplification that truncates by surprise directly.
    V2,
}

/// Parameters of a [`Sampler`], starting from llama.cpp's defaults.
///
/// Nothing is clamped: [`build`](Self::build) refuses invalid values.
///
/// ```
/// # fn main() -> Result<(), ruvllm::SampleError> {
/// use ruvllm::sample::Sampler;
/// let mut sampler = Sampler::builder().temperature(0.7).top_p(0.9).seed(1).build()?;
/// let logits = [0.1, 2.5, -1.0, 2.4];
/// let token = sampler.sample(&logits, &[])?;
/// assert!(token == 1 || token == 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct SamplerBuilder {
    pub(super) penalties: Penalties,
    pub(super) dry: Dry,
    pub(super) top_n_sigma: f32,
    pub(super) top_k: usize,
    pub(super) typical: f32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    pub(super) xtc_probability: f32,
    pub(super) xtc_threshold: f32,
    pub(super) temperature: f32,
    pub(super) dynatemp_range: f32,
    pub(super) dynatemp_exponent: f32,
    pub(super) mirostat: Mirostat,
    pub(super) logit_bias: Vec<(u32, f32)>,
    mirostat_tau: f32,
    mirostat_eta: f32,
    samplers: Option<String>,
    seed: Option<u64>,
}

impl Default for SamplerBuilder {
    fn default() -> Self {
        Self {
            penalties: Penalties::default(),
            dry: Dry::default(),
            top_n_sigma: -1.0,
            top_k: 40,
            typical: 1.0,
            top_p: 0.95,
            min_p: 0.05,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            mirostat: Mirostat::Off,
            logit_bias: Vec::new(),
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            samplers: None,
            seed: None,
        }
    }
}

impl SamplerBuilder {
    /// Number of last tokens that the three penalties consider; 0 turns them off, −1 means the
    /// whole history.
    pub fn repeat_last_n(mut self, n: i32) -> Self {
        self.penalties.last_n = n;
        self
    }

    /// Divisor of a positive logit (factor of a negative one) of a token used recently; 1 is off.
    pub fn repeat_penalty(mut self, penalty: f32) -> Self {
        self.penalties.repeat = penalty;
        self
    }

    /// Subtracted once from the logit of a token used recently; 0 is off, negative encourages.
    pub fn presence_penalty(mut self, penalty: f32) -> Self {
        self.penalties.presence = penalty;
        self
    }

    /// Subtracted for every recent use of the token; 0 is off, negative encourages.
    pub fn frequency_penalty(mut self, penalty: f32) -> Self {
        self.penalties.frequency = penalty;
        self
    }

    /// Scale of the DRY penalty, for tokens that would extend a repeated sequence; 0 is off.
    pub fn dry_multiplier(mut self, multiplier: f32) -> Self {
        self.dry.multiplier = multiplier;
        self
    }

    /// Factor by which the DRY penalty grows with every repeated token; below 1 turns DRY off.
    pub fn dry_base(mut self, base: f32) -> Self {
        self.dry.base = base;
        self
    }

    /// Length below which a repetition costs nothing; at this length it costs the multiplier.
    pub fn dry_allowed_length(mut self, n: usize) -> Self {
        self.dry.allowed_length = n;
        self
    }

    /// Number of last tokens that DRY considers; 0 turns it off, −1 means the whole history.
    pub fn dry_penalty_last_n(mut self, n: i32) -> Self {
        self.dry.last_n = n;
        self
    }

    /// Token sequences across which DRY sees no repetition. None by default, since a sampler knows
    /// no texts; [`breaker_sequences`](super::breaker_sequences) makes them from texts.
    /// llama.cpp's default breakers are `"\n"`, `":"`, `"\""` and `"*"`.
    pub fn dry_sequence_breakers(mut self, sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        self.dry.breakers = sequences.into_iter().collect();
        self.dry.breakers.sort_unstable();
        self.dry.breakers.dedup();
        self
    }

    /// Keeps logits within this many standard deviations of the best one; 0 or less is off.
    pub fn top_n_sigma(mut self, n: f32) -> Self {
        self.top_n_sigma = n;
        self
    }

    /// Keeps this many of the best tokens; 0 is off.
    pub fn top_k(mut self, k: usize) -> Self {
        self.top_k = k;
        self
    }

    /// Keeps the most typical tokens up to this probability mass, in `[0, 1]`; 1 is off.
    pub fn typical(mut self, p: f32) -> Self {
        self.typical = p;
        self
    }

    /// Keeps the most probable tokens up to this probability mass, in `[0, 1]`; 1 is off.
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = p;
        self
    }

    /// Keeps tokens at least this probable relative to the best, in `[0, 1]`; 0 is off.
    pub fn min_p(mut self, p: f32) -> Self {
        self.min_p = p;
        self
    }

    /// Probability that XTC drops the top choices, in `[0, 1]`; 0 is off.
    pub fn xtc_probability(mut self, p: f32) -> Self {
        self.xtc_probability = p;
        self
    }

    /// Smallest probability that makes a token a top choice for XTC, in `[0, 1]`; above 0.5 XTC is
    /// off.
    pub fn xtc_threshold(mut self, p: f32) -> Self {
        self.xtc_threshold = p;
        self
    }

    /// Divides the logits: below 1 sharpens, above 1 flattens, 0 always takes the best token that
    /// the filters before it have kept.
    pub fn temperature(mut self, t: f32) -> Self {
        self.temperature = t;
        self
    }

    /// Range of the dynamic temperature, which follows the entropy up and down by this much; 0 is
    /// off.
    pub fn dynatemp_range(mut self, range: f32) -> Self {
        self.dynatemp_range = range;
        self
    }

    /// Exponent of the normalised entropy in the dynamic temperature.
    pub fn dynatemp_exponent(mut self, exponent: f32) -> Self {
        self.dynatemp_exponent = exponent;
        self
    }

    /// Replaces the chain by Mirostat.
    pub fn mirostat(mut self, version: Mirostat) -> Self {
        self.mirostat = version;
        self
    }

    /// Mirostat's target surprise in bits per token.
    pub fn mirostat_tau(mut self, tau: f32) -> Self {
        self.mirostat_tau = tau;
        self
    }

    /// Mirostat's learning rate.
    pub fn mirostat_eta(mut self, eta: f32) -> Self {
        self.mirostat_eta = eta;
        self
    }

    /// Adds to the logits of tokens before anything else; −∞ forbids a token. Biases of the same
    /// token add up.
    pub fn logit_bias(mut self, bias: impl IntoIterator<Item = (u32, f32)>) -> Self {
        self.logit_bias.extend(bias);
        self
    }

    /// The filters to run and their order, by name, separated by `;`, for example
    /// `"top_k;temperature"`. A filter that is left out does not run, whatever its parameters;
    /// without `temperature`, a temperature of 0 has no effect either. An empty list draws from
    /// the softmax of the logits.
    pub fn samplers(mut self, names: impl Into<String>) -> Self {
        self.samplers = Some(names.into());
        self
    }

    /// Seed, which makes runs repeat exactly. Without it one comes from the operating system.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the sampler.
    ///
    /// # Errors
    /// [`SampleError::Parameter`] names the first parameter with an invalid value;
    /// [`SampleError::UnknownSampler`] a name in [`samplers`](Self::samplers) that is no
    /// filter.
    pub fn build(self) -> Result<Sampler, SampleError> {
        let probability = |v: f32| (0.0..=1.0).contains(&v);
        let at_least_0 = |v: f32| v.is_finite() && v >= 0.0;
        let above_0 = |v: f32| v.is_finite() && v > 0.0;
        let finite = |v: f32| v.is_finite();
        let rules: [(&str, f32, &str, bool); 17] = {
            let rule = |name, value, allowed, check: &dyn Fn(f32) -> bool| {
                (name, value, allowed, check(value))
            };
            let unit = "a number from 0 to 1";
            [
                rule("repeat_penalty", self.penalties.repeat, "above 0", &above_0),
                rule(
                    "presence_penalty",
                    self.penalties.presence,
                    "finite",
                    &finite,
                ),
                rule(
                    "frequency_penalty",
                    self.penalties.frequency,
                    "finite",
                    &finite,
                ),
                rule(
                    "dry_multiplier",
                    self.dry.multiplier,
                    "0 or more",
                    &at_least_0,
                ),
                rule("dry_base", self.dry.base, "0 or more", &at_least_0),
                rule("top_n_sigma", self.top_n_sigma, "finite", &finite),
                rule("typical", self.typical, unit, &probability),
                rule("top_p", self.top_p, unit, &probability),
                rule("min_p", self.min_p, unit, &probability),
                rule("xtc_probability", self.xtc_probability, unit, &probability),
                rule("xtc_threshold", self.xtc_threshold, unit, &probability),
                rule("temperature", self.temperature, "0 or more", &at_least_0),
                rule(
                    "dynatemp_range",
                    self.dynatemp_range,
                    "0 or more",
                    &at_least_0,
                ),
                rule(
                    "dynatemp_exponent",
                    self.dynatemp_exponent,
                    "0 or more",
                    &at_least_0,
                ),
                rule("mirostat_tau", self.mirostat_tau, "0 or more", &at_least_0),
                rule("mirostat_eta", self.mirostat_eta, "0 or more", &at_least_0),
                rule("logit_bias", self.worst_bias(), "below infinity", &|v| {
                    v < f32::INFINITY
                }),
            ]
        };
        if let Some(&(name, value, allowed, _)) = rules.iter().find(|rule| !rule.3) {
            return Err(SampleError::Parameter {
                name,
                value: f64::from(value),
                allowed,
            });
        }
        for (name, value) in [
            ("repeat_last_n", self.penalties.last_n),
            ("dry_penalty_last_n", self.dry.last_n),
        ] {
            if value < -1 {
                let (value, allowed) = (f64::from(value), "-1, 0 or a number of tokens");
                return Err(SampleError::Parameter {
                    name,
                    value,
                    allowed,
                });
            }
        }
        if self.dry.breakers.iter().any(Vec::is_empty) {
            return Err(SampleError::EmptyBreaker);
        }

        let chain = match &self.samplers {
            None => FILTERS.iter().map(|&(_, _, filter)| filter).collect(),
            Some(names) => parse_chain(names)?,
        };
        let mirostat = (self.mirostat != Mirostat::Off)
            .then(|| mirostat::Mirostat::new(self.mirostat_tau, self.mirostat_eta));
        let seed = self.seed.unwrap_or_else(random_seed);
        Ok(Sampler {
            chain,
            seed,
            rng: Rng::new(seed),
            mirostat,
            mask: None,
            candidates: Candidates::default(),
            ranked: Candidates::default(),
            params: self,
        })
    }

    /// Whether `chain` always takes the token with the best logit.
    pub(super) fn is_argmax(&self, chain: &[Filter]) -> bool {
        self.temperature == 0.0
            && self.dynatemp_range == 0.0
            && chain.contains(&Filter::Temperature)
            && !chain.iter().any(|filter| match filter {
                Filter::Penalties => !self.penalties.is_off(),
                Filter::Dry => self.dry.multiplier > 0.0,
                Filter::TypP => self.typical < 1.0,
                Filter::Xtc => self.xtc_probability > 0.0,
                Filter::TopNSigma
                | Filter::TopK
                | Filter::TopP
                | Filter::MinP
                | Filter::Temperature => false,
            })
    }

    /// A bias that is NaN or +∞, if there is one.
    fn worst_bias(&self) -> f32 {
        let mut values = self.logit_bias.iter().map(|&(_, v)| v);
        values
            .find(|&v| v.is_nan() || v == f32::INFINITY)
            .unwrap_or(0.0)
    }
}

/// The filters named in `names`.
fn parse_chain(names: &str) -> Result<Vec<Filter>, SampleError> {
    let names = names
        .split(';')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    names
        .map(|name| {
            FILTERS
                .iter()
                .find(|(canonical, others, _)| *canonical == name || others.contains(&name))
                .map(|&(_, _, filter)| filter)
                .ok_or_else(|| SampleError::UnknownSampler {
                    name: name.to_owned(),
                    known: FILTERS.map(|(name, ..)| name).join(", "),
                })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::sample::builder::*;

    #[test]
    fn default_order_is_llama_cpp_s() {
        let names = FILTERS.map(|(name, ..)| name).join(";");
        assert_eq!(
            names,
            "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
        );
        assert_eq!(
            SamplerBuilder::default().build().unwrap().chain,
            parse_chain(&names).unwrap()
        );
    }

    #[test]
    fn defaults_are_llama_cpp_s() {
        let b = SamplerBuilder::default();
        let p = &b.penalties;
        assert_eq!(
            (p.last_n, p.repeat, p.frequency, p.presence),
            (64, 1.0, 0.0, 0.0)
        );
        let d = &b.dry;
        assert_eq!(
            (d.multiplier, d.base, d.allowed_length, d.last_n),
            (0.0, 1.75, 2, -1)
        );
        assert_eq!((b.top_n_sigma, b.top_k, b.typical), (-1.0, 40, 1.0));
        assert_eq!((b.top_p, b.min_p), (0.95, 0.05));
        assert_eq!((b.xtc_probability, b.xtc_threshold), (0.0, 0.1));
        assert_eq!(
            (b.temperature, b.dynatemp_range, b.dynatemp_exponent),
            (0.8, 0.0, 1.0)
        );
        assert_eq!(
            (b.mirostat, b.mirostat_tau, b.mirostat_eta),
            (Mirostat::Off, 5.0, 0.1)
        );
    }
}
