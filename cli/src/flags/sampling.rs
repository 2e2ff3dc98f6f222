//! Flags of the sampler.

use crate::io::{Failure, unescape};
#[cfg(feature = "chat")]
use clap::FromArgMatches;
use clap::{ArgAction, Args};
use ruvllm::Model;
use ruvllm::Sampler;
use ruvllm::SamplerOptions;
use ruvllm::Tokenizer;
use ruvllm::gguf::Metadata;
use ruvllm::sample::{Mirostat, TokenMask, breaker_sequences};
use std::hash::{BuildHasher, Hasher, RandomState};

/// How tokens are chosen. Defaults in brackets give way to what the model file recommends
/// (`general.sampling.*`).
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Seed: the same one repeats a run exactly, -1 draws one [default: -1; of `generate` with the
    /// built-in model a fixed one]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<Seed>,
    /// Temperature: 0 always takes the best token [default: 0.8]
    #[arg(
        long,
        alias = "temperature",
        value_name = "T",
        allow_negative_numbers = true
    )]
    pub(crate) temp: Option<f32>,
    /// Keep the K best tokens; 0 is off [default: 40]
    #[arg(
        long,
        value_name = "K",
        env = "LLAMA_ARG_TOP_K",
        allow_negative_numbers = true
    )]
    top_k: Option<i32>,
    /// Keep the best tokens up to this probability; 1 is off [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this probable relative to the best; 0 is off [default: 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Keep the most typical tokens up to this probability; 1 is off
    #[arg(
        long,
        alias = "typical-p",
        value_name = "P",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    typical: f32,
    /// Keep tokens within this many standard deviations of the best; below 0 is off
    #[arg(long, alias = "top-n-sigma", value_name = "N", default_value_t = -1.0, allow_negative_numbers = true)]
    top_nsigma: f32,
    /// Tokens that the penalties look back at; 0 is off, -1 is all [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Weaken tokens that were used; 1 is off [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Weaken tokens that were used, by this amount; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub(crate) presence_penalty: f32,
    /// Weaken tokens by this amount for each use; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub(crate) frequency_penalty: f32,
    /// DRY: penalty on tokens that continue a repetition; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    dry_multiplier: f32,
    /// DRY: growth of the penalty with the length of the repetition
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.75,
        allow_negative_numbers = true
    )]
    dry_base: f32,
    /// DRY: length of a repetition that costs nothing
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        allow_negative_numbers = true
    )]
    dry_allowed_length: usize,
    /// DRY: tokens to look back at; 0 is off, -1 is all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    dry_penalty_last_n: i32,
    /// DRY: text that ends a repetition; repeatable, `none` for none
    /// [default: newline, colon, double quote, asterisk]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    dry_sequence_breaker: Vec<String>,
    /// XTC: how often to drop the most probable tokens; 0 is off
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    xtc_probability: f32,
    /// XTC: from which probability on a token may be dropped
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.1,
        allow_negative_numbers = true
    )]
    xtc_threshold: f32,
    /// Let the temperature vary by this much with the entropy; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    dynatemp_range: f32,
    /// Exponent of the entropy in the varying temperature
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    dynatemp_exp: f32,
    /// Mirostat instead of the other filters: 0 is off, or version 1 or 2
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u8).range(0..=2))]
    mirostat: u8,
    /// Mirostat: learning rate
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.1,
        allow_negative_numbers = true
    )]
    mirostat_lr: f32,
    /// Mirostat: target entropy
    #[arg(
        long,
        value_name = "X",
        default_value_t = 5.0,
        allow_negative_numbers = true
    )]
    mirostat_ent: f32,
    /// Change the logit of a token, as in 15043+1 or 15043-inf; repeatable
    #[arg(long, value_name = "TOKEN±BIAS", value_parser = logit_bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    // The order is `FILTERS` in the library's `sample/mod.rs`; no test compares them.
    /// Filters to apply, in this order
    /// [default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]
    #[arg(long, value_name = "A;B;…")]
    samplers: Option<String>,
    /// Never end the text by itself
    #[arg(long, action = ArgAction::SetTrue)]
    ignore_eos: bool,
    #[cfg(feature = "grammar")]
    #[command(flatten)]
    grammar: super::grammar::GrammarArgs,
}

#[derive(Clone, Copy, Debug)]
struct Seed(Option<u64>);

impl std::str::FromStr for Seed {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Seed, &'static str> {
        match text.parse::<i128>() {
            Ok(-1) => Ok(Seed(None)),
            Ok(n) => u64::try_from(n)
                .map(|n| Seed(Some(n)))
                .map_err(|_| "expected -1, or 0 to 2^64 - 1"),
            Err(_) => Err("expected an integer"),
        }
    }
}

/// `ID+BIAS` or `ID-BIAS`.
fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let expected =
        || format!("expected a token id, + or -, and a number, as in 15043+1; found {text:?}");
    let at = text.find(['+', '-']).ok_or_else(expected)?;
    let id = text[..at].trim().parse().map_err(|_| expected())?;
    match text[at..].parse::<f32>() {
        Ok(bias) if !bias.is_nan() => Ok((id, bias)),
        _ => Err(expected()),
    }
}

impl SamplingArgs {
    /// The sampler for a model.
    #[cfg(feature = "chat")]
    pub(crate) fn sampler(&self, model: &Model, tokenizer: &Tokenizer) -> Result<Sampler, Failure> {
        let mut sampler = self.chain(model.gguf().metadata(), tokenizer, None)?;
        sampler.set_mask(self.mask(model)?);
        Ok(sampler)
    }

    /// These flags with one more, as `["--temp", "0.6"]`. What the text has to obey is replaced, not
    /// joined.
    #[cfg(feature = "chat")]
    pub(crate) fn with(&self, flag: &[&str]) -> Result<SamplingArgs, clap::Error> {
        // The defaults of what is not said would win over what was said before.
        let command = SamplingArgs::augment_args_for_update(clap::Command::new("/set"))
            .no_binary_name(true)
            .disable_help_flag(true)
            .mut_args(|arg| arg.default_value(None).env(None));
        let mut matches = command.try_get_matches_from(flag)?;
        let mut new = self.clone();
        #[cfg(feature = "grammar")]
        if super::grammar::is_in(&matches) {
            new.grammar = Default::default();
        }
        new.update_from_arg_matches_mut(&mut matches)?;
        new.ignore_eos |= self.ignore_eos;
        Ok(new)
    }

    /// The seed, if one was given.
    #[cfg(feature = "serve")]
    pub(crate) fn given_seed(&self) -> Option<u64> {
        self.seed.and_then(|seed| seed.0)
    }

    /// Whether the text does not end by itself.
    pub(crate) fn ignores_eos(&self) -> bool {
        self.ignore_eos
    }

    /// Begins what a [mask](Self::mask) needs, beside what else has to be done before a text.
    #[cfg(feature = "grammar")]
    pub(crate) fn begin_mask(&self, model: &Model) {
        if self.has_mask() {
            super::grammar::begin_trie(model);
        }
    }

    #[cfg(not(feature = "grammar"))]
    pub(crate) fn begin_mask(&self, _: &Model) {}

    /// Whether the text has to obey anything.
    #[cfg(feature = "grammar")]
    pub(crate) fn has_mask(&self) -> bool {
        self.grammar.is_given()
    }

    #[cfg(not(feature = "grammar"))]
    pub(crate) fn has_mask(&self) -> bool {
        false
    }

    /// What the text has to obey.
    #[cfg(feature = "grammar")]
    pub(crate) fn mask(&self, model: &Model) -> Result<Option<Box<dyn TokenMask>>, Failure> {
        self.grammar.mask(model)
    }

    #[cfg(not(feature = "grammar"))]
    pub(crate) fn mask(&self, _: &Model) -> Result<Option<Box<dyn TokenMask>>, Failure> {
        Ok(None)
    }

    /// The sampler without a mask, with `seed` if no flag says one.
    pub(crate) fn chain(
        &self,
        metadata: &Metadata,
        tokenizer: &Tokenizer,
        seed: Option<u64>,
    ) -> Result<Sampler, Failure> {
        // 32 bits are easier to type again.
        let seed = self
            .seed
            .map_or(seed, |seed| seed.0)
            .unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        let options = SamplerOptions {
            seed: Some(seed),
            ..self.options(metadata, tokenizer)?
        };
        Sampler::new(options).map_err(|error| Failure::Usage(error.to_string()))
    }

    /// Its parameters for a model, without a seed.
    pub(crate) fn options(
        &self,
        metadata: &Metadata,
        tokenizer: &Tokenizer,
    ) -> Result<SamplerOptions, Failure> {
        let recommended = |key: &str| metadata.opt_f32(&format!("general.sampling.{key}"));
        let recommended_int = |key: &str| metadata.opt_i32(&format!("general.sampling.{key}"));

        let n_vocab = tokenizer.n_vocab();
        if let Some((id, _)) = self
            .logit_bias
            .iter()
            .find(|(id, _)| *id as usize >= n_vocab)
        {
            return Err(Failure::Usage(format!(
                "--logit-bias: there is no token {id}, the vocabulary has {n_vocab}"
            )));
        }
        let bias = self.logit_bias.iter().copied();
        let never = tokenizer
            .eog()
            .filter(|_| self.ignore_eos)
            .map(|id| (id, f32::NEG_INFINITY));
        let temperature = self.temp.or(recommended("temp")?).unwrap_or(0.8);
        Ok(SamplerOptions {
            temperature: if temperature < 0.0 { 0.0 } else { temperature },
            top_k: usize::try_from(self.top_k.or(recommended_int("top_k")?).unwrap_or(40))
                .unwrap_or(0),
            top_p: self.top_p.or(recommended("top_p")?).unwrap_or(0.95),
            min_p: self.min_p.or(recommended("min_p")?).unwrap_or(0.05),
            typical: self.typical,
            top_n_sigma: self.top_nsigma,
            repeat_last_n: self
                .repeat_last_n
                .or(recommended_int("penalty_last_n")?)
                .unwrap_or(64),
            repeat_penalty: self
                .repeat_penalty
                .or(recommended("penalty_repeat")?)
                .unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: self.dry_penalty_last_n,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exp,
            mirostat: match self.mirostat {
                0 => Mirostat::Off,
                1 => Mirostat::V1,
                _ => Mirostat::V2,
            },
            mirostat_tau: self.mirostat_ent,
            mirostat_eta: self.mirostat_lr,
            logit_bias: bias.chain(never).collect(),
            dry_sequence_breakers: if self.dry_multiplier == 0.0 {
                Vec::new()
            } else {
                self.breakers(tokenizer).1
            },
            samplers: self.samplers.clone(),
            seed: None,
        })
    }

    /// The texts that break a repetition for DRY, and their tokens.
    pub(crate) fn breakers(&self, tokenizer: &Tokenizer) -> (Vec<String>, Vec<Vec<u32>>) {
        let texts: Vec<String> = match &self.dry_sequence_breaker[..] {
            [] => ["\n", ":", "\"", "*"].map(String::from).into(),
            given => given
                .iter()
                .filter(|text| *text != "none")
                .map(|text| unescape(text))
                .collect(),
        };
        let n_vocab = tokenizer.n_vocab() as u32;
        let vocabulary: Vec<_> = (0..n_vocab)
            .filter_map(|id| Some((id, tokenizer.token_bytes(id)?)))
            .collect();
        let mut sequences = Vec::new();
        for text in &texts {
            let pieces = vocabulary.iter().map(|(id, piece)| (*id, &piece[..]));
            let encode = |text: &[u8]| tokenizer.encode_bytes(text, false, false);
            sequences.extend(breaker_sequences(text.as_bytes(), pieces, encode));
        }
        (texts, sequences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases() {
        assert_eq!(logit_bias("15043+1").unwrap(), (15043, 1.0));
        assert_eq!(logit_bias("2-inf").unwrap(), (2, f32::NEG_INFINITY));
        assert_eq!(logit_bias("2-1.5e1").unwrap(), (2, -15.0));
        for wrong in ["15043", "+1", "x+1", "1+", "1+nan", "1++1"] {
            assert!(logit_bias(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(feature = "chat")]
    #[test]
    fn one_more_flag() {
        let command = SamplingArgs::augment_args(clap::Command::new("chat"));
        let words = ["chat", "--typical", "0.7", "--ignore-eos", "-s", "3"];
        let given = SamplingArgs::from_arg_matches(&command.get_matches_from(words)).unwrap();
        let new = given.with(&["--temp", "0.5"]).unwrap();
        assert_eq!(
            (new.temp, new.typical, new.ignore_eos),
            (Some(0.5), 0.7, true)
        );
        assert_eq!(new.seed.and_then(|seed| seed.0), Some(3));
        let new = new.with(&["--typical", "0.9"]).unwrap();
        assert_eq!((new.temp, new.typical), (Some(0.5), 0.9));
        for wrong in [
            &["--temp", "warm"][..],
            &["--temp"],
            &["--warmth", "1"],
            &["--help"],
        ] {
            assert!(given.with(wrong).is_err(), "{wrong:?}");
        }
        #[cfg(feature = "grammar")]
        {
            let regex = new.with(&["--regex", "a+"]).unwrap();
            let json = regex.with(&["--json-schema", "{}"]).unwrap();
            assert!(regex.has_mask() && json.has_mask());
            assert!(json.with(&["--temp", "1"]).unwrap().has_mask());
        }
    }

    #[test]
    fn seeds() {
        for (text, seed) in [
            ("-1", Some(None)),
            ("0", Some(Some(0))),
            ("18446744073709551615", Some(Some(u64::MAX))),
            ("-2", None),
            ("x", None),
        ] {
            assert_eq!(text.parse::<Seed>().ok().map(|s| s.0), seed, "{text}");
        }
    }
}
