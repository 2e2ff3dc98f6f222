//! The parameters of a sampler and their valid ranges.

use crate::sample::{FILTERS, Filter, SampleError};

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

/// Parameters of a [`Sampler`](crate::Sampler), starting from llama.cpp's defaults.
///
/// Nothing is clamped: [`Sampler::new`](crate::Sampler::new) refuses invalid values.
///
/// ```
/// # fn main() -> Result<(), ruvllm::sample::SampleError> {
/// use ruvllm::Sampler;
/// use ruvllm::SamplerOptions;
///
/// let options = SamplerOptions { temperature: 0.7, top_p: 0.9, seed: Some(1), ..Default::default() };
/// let mut sampler = Sampler::new(options)?;
/// let logits = [0.1, 2.5, -1.0, 2.4];
/// let token = sampler.sample(&logits, &[])?;
/// assert!(token == 1 || token == 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SamplerOptions {
    /// Number of last tokens that the three penalties consider; 0 turns them off, −1 means the
    /// whole history.
    pub repeat_last_n: i32,
    /// Divisor of a positive logit (factor of a negative one) of a token used recently; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted once from the logit of a token used recently; 0 is off, negative encourages.
    pub presence_penalty: f32,
    /// Subtracted for every recent use of the token; 0 is off, negative encourages.
    pub frequency_penalty: f32,
    /// Scale of the DRY penalty, for tokens that would extend a repeated sequence; 0 is off.
    pub dry_multiplier: f32,
    /// Factor by which the DRY penalty grows with every repeated token; below 1 turns DRY off.
    pub dry_base: f32,
    /// Length below which a repetition costs nothing; at this length it costs the multiplier.
    pub dry_allowed_length: usize,
    /// Number of last tokens that DRY considers; 0 turns it off, −1 means the whole history.
    pub dry_penalty_last_n: i32,
    /// Token sequences across which DRY sees no repetition. None by default, since a sampler knows
    /// no texts; [`breaker_sequences`](super::breaker_sequences) makes them from texts.
    /// llama.cpp's default breakers are `"\n"`, `":"`, `"\""` and `"*"`.
    pub dry_sequence_breakers: Vec<Vec<u32>>,
    /// Keeps logits within this many standard deviations of the best one; 0 or less is off.
    pub top_n_sigma: f32,
    /// Keeps this many of the best tokens; 0 is off.
    pub top_k: usize,
    /// Keeps the most typical tokens up to this probability mass, in `[0, 1]`; 1 is off.
    pub typical: f32,
    /// Keeps the most probable tokens up to this probability mass, in `[0, 1]`; 1 is off.
    pub top_p: f32,
    /// Keeps tokens at least this probable relative to the best, in `[0, 1]`; 0 is off.
    pub min_p: f32,
    /// Probability that XTC drops the top choices, in `[0, 1]`; 0 is off.
    pub xtc_probability: f32,
    /// Smallest probability that makes a token a top choice for XTC, in `[0, 1]`; above 0.5 XTC is
    /// off.
    pub xtc_threshold: f32,
    /// Divides the logits: below 1 sharpens, above 1 flattens, 0 always takes the best token that
    /// the filters before it have kept.
    pub temperature: f32,
    /// Range of the dynamic temperature, which follows the entropy up and down by this much; 0 is
    /// off.
    pub dynatemp_range: f32,
    /// Exponent of the normalised entropy in the dynamic temperature.
    pub dynatemp_exponent: f32,
    /// Replaces the chain by Mirostat.
    pub mirostat: Mirostat,
    /// Mirostat's target surprise in bits per token.
    pub mirostat_tau: f32,
    /// Mirostat's learning rate.
    pub mirostat_eta: f32,
    /// Adds to the logits of tokens before anything else; −∞ forbids a token. Biases of the same
    /// token add up.
    pub logit_bias: Vec<(u32, f32)>,
    /// The filters to run and their order, by name, separated by `;`, for example
    /// `"top_k;temperature"`. A filter that is left out does not run, whatever its parameters;
    /// without `temperature`, a temperature of 0 has no effect either. An empty list draws from
    /// the softmax of the logits.
    pub samplers: Option<String>,
    /// Seed, which makes runs repeat exactly. Without it one comes from the operating system.
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            repeat_last_n: 64,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: -1,
            dry_sequence_breakers: Vec::new(),
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
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            logit_bias: Vec::new(),
            samplers: None,
            seed: None,
        }
    }
}

impl SamplerOptions {
    /// The chain of filters, if all values are valid.
    pub(super) fn check(&self) -> Result<Vec<Filter>, SampleError> {
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
                rule("repeat_penalty", self.repeat_penalty, "above 0", &above_0),
                rule("presence_penalty", self.presence_penalty, "finite", &finite),
                rule(
                    "frequency_penalty",
                    self.frequency_penalty,
                    "finite",
                    &finite,
                ),
                rule(
                    "dry_multiplier",
                    self.dry_multiplier,
                    "0 or more",
                    &at_least_0,
                ),
                rule("dry_base", self.dry_base, "0 or more", &at_least_0),
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
            ("repeat_last_n", self.repeat_last_n),
            ("dry_penalty_last_n", self.dry_penalty_last_n),
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
        if self.dry_sequence_breakers.iter().any(Vec::is_empty) {
            return Err(SampleError::EmptyBreaker);
        }

        match &self.samplers {
            None => Ok(FILTERS.iter().map(|&(_, _, filter)| filter).collect()),
            Some(names) => parse_chain(names),
        }
    }

    /// Whether `chain` always takes the token with the best logit: the temperature is 0, and no
    /// filter changes which one is best, or may drop it. Those of the last arm keep the best.
    pub(super) fn is_argmax(&self, chain: &[Filter]) -> bool {
        self.temperature == 0.0
            && self.dynatemp_range == 0.0
            && chain.contains(&Filter::Temperature)
            && !chain.iter().any(|filter| match filter {
                Filter::Penalties | Filter::Dry | Filter::TypP | Filter::Xtc => self.does(filter),
                Filter::TopNSigma
                | Filter::TopK
                | Filter::TopP
                | Filter::MinP
                | Filter::Temperature => false,
            })
    }

    /// Whether a filter may change anything.
    fn does(&self, filter: &Filter) -> bool {
        match filter {
            Filter::Penalties => {
                let penalties = [
                    (self.repeat_penalty, 1.0),
                    (self.frequency_penalty, 0.0),
                    (self.presence_penalty, 0.0),
                ];
                self.repeat_last_n != 0 && penalties.iter().any(|(penalty, off)| penalty != off)
            }
            Filter::Dry => self.dry_multiplier > 0.0,
            Filter::TopNSigma => self.top_n_sigma > 0.0,
            Filter::TopK => self.top_k > 0,
            Filter::TypP => self.typical < 1.0,
            Filter::TopP => self.top_p < 1.0,
            Filter::MinP => self.min_p > 0.0,
            Filter::Xtc => self.xtc_probability > 0.0,
            Filter::Temperature => true,
        }
    }

    /// Number of the best candidates that `chain` chooses from, whatever the others are, if it says so
    /// before another filter does anything.
    pub(super) fn n_best(&self, chain: &[Filter]) -> Option<usize> {
        if self.is_argmax(chain) {
            return Some(1);
        }
        let first = chain.iter().find(|filter| self.does(filter));
        (first == Some(&Filter::TopK)).then_some(self.top_k)
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
    use crate::sample::options::*;

    #[test]
    fn default_order_is_llama_cpp_s() {
        let names = FILTERS.map(|(name, ..)| name).join(";");
        assert_eq!(
            names,
            "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
        );
        assert_eq!(
            SamplerOptions::default().check().unwrap(),
            parse_chain(&names).unwrap()
        );
    }

    #[test]
    fn defaults_are_llama_cpp_s() {
        let b = SamplerOptions::default();
        assert_eq!(
            (
                b.repeat_last_n,
                b.repeat_penalty,
                b.frequency_penalty,
                b.presence_penalty
            ),
            (64, 1.0, 0.0, 0.0)
        );
        assert_eq!(
            (
                b.dry_multiplier,
                b.dry_base,
                b.dry_allowed_length,
                b.dry_penalty_last_n
            ),
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
