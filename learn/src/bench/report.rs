//! From losses to the report.

use crate::bench::arms::{Mixture, Reads};
use crate::bench::deep::Told;
use crate::bench::estimate::{Estimate, bootstrap};
use crate::bench::forgetting::{Forgetting, forgetting, forgetting_of};
use crate::bench::measurement::Measurement;
use crate::bench::temperature::Tempered;
use crate::bench::{Contender, LearningReport};
use crate::learn::{HeadLearner, LearnError};

/// Comparison with the base model.
struct Comparison<'m> {
    base: &'m [f64],
    base_tempered: &'m Tempered,
    sizes: &'m [f64],
    n_bootstrap: usize,
}

impl Comparison<'_> {
    fn n_tokens(&self) -> f64 {
        self.sizes.iter().sum()
    }

    /// Gain of `losses` over `base`, both by chunk.
    fn gain(&self, base: &[f64], losses: &[f64]) -> Estimate {
        let gains = base.iter().zip(losses).map(|(b, l)| b - l);
        bootstrap(gains, self.sizes, self.n_bootstrap)
    }

    fn beyond_temperature(&self, tempered: &Tempered) -> Estimate {
        self.gain(self.base_tempered.best(), tempered.best())
    }

    fn contender(&self, name: &str, losses: &[f64]) -> Contender {
        let mut so_far = 0.0;
        let running_gain = self.base.iter().zip(losses).map(|(b, l)| {
            so_far += b - l;
            so_far
        });
        Contender {
            name: name.to_owned(),
            negative: name.starts_with("control"),
            loss: losses.iter().sum::<f64>() / self.n_tokens(),
            running_gain: running_gain.collect(),
            gain: self.gain(self.base, losses),
            beyond_temperature: None,
            beyond_words: None,
            update_ms: 0.0,
            settle_ms: 0.0,
            longest_ms: 0.0,
            forgetting: None,
        }
    }
}

/// Methods that learn, and negative controls.
#[derive(Default)]
struct Learners {
    learning: Vec<Contender>,
    negative: Vec<Contender>,
    /// Median milliseconds of an update by backpropagation.
    deep_ms: f64,
}

impl Measurement<'_> {
    /// The report; forgetting is measured on `unknown`.
    pub(super) fn report(mut self, unknown: &[u32]) -> Result<LearningReport, LearnError> {
        let n_bootstrap = self.options.n_bootstrap;
        let heads: Vec<&HeadLearner> = self.arms.iter().map(|arm| &arm.adapter).collect();
        let (control_loss, of_heads) = forgetting(&mut self.session, unknown, &heads, n_bootstrap)?;
        let mut of_deep = Vec::new();
        for arm in &mut self.deep_arms {
            let (session, own) = (&mut self.session, &mut arm.session);
            of_deep.push(forgetting_of(session, own, unknown, n_bootstrap)?);
        }
        let compare = Comparison {
            base: &self.by_chunk.base,
            base_tempered: &self.base_tempered,
            sizes: &self.by_chunk.sizes,
            n_bootstrap,
        };
        let mut found = Learners::default();
        self.add_heads(&compare, &of_heads, &mut found);
        self.add_deep(&compare, &of_deep, &mut found);
        let mut contenders = self.without_adapters(&compare);
        contenders.extend(found.learning);
        contenders.extend(found.negative);
        let prefill_ms = median(&self.prefill_ms).unwrap_or(0.0);
        let n_tokens = compare.n_tokens();
        Ok(LearningReport {
            n_ctx: self.n_ctx,
            n_tokens: n_tokens as usize,
            n_chunk: self.n_chunk,
            deep_cost: found.deep_ms / prefill_ms.max(f64::MIN_POSITIVE),
            base_loss: compare.base.iter().sum::<f64>() / n_tokens,
            control_loss,
            truncation: self.truncation.left_out.value(),
            truncation_bound: self.truncation.bound.value(),
            contenders,
        })
    }

    /// The base model, the caches, and mixtures.
    fn without_adapters(&self, compare: &Comparison<'_>) -> Vec<Contender> {
        let (by_chunk, tempered) = (&self.by_chunk, self.base_tempered.best());
        let arms = self.arms.iter();
        let mixtures: Vec<&Mixture> = arms.filter_map(|arm| arm.mixture.as_ref()).collect();
        let beyond_words = mixtures
            .first()
            .map(|words| compare.gain(&words.losses, &by_chunk.mixture));
        let mut contenders = vec![
            compare.contender("base", compare.base),
            compare.contender("base, the best temperature in hindsight", tempered),
            compare.contender("base, 4 times the context", &by_chunk.far),
            compare.contender("n-gram cache", &by_chunk.ngrams),
            compare.contender("nearest neighbours", &by_chunk.neighbours),
            Contender {
                beyond_words,
                ..compare.contender("mixture", &by_chunk.mixture)
            },
        ];
        contenders.extend(
            mixtures
                .iter()
                .map(|m| compare.contender(m.name, &m.losses)),
        );
        contenders
    }

    /// Adds the adapters of the output head.
    fn add_heads(&self, compare: &Comparison<'_>, forgetting: &[Forgetting], found: &mut Learners) {
        let mut arms = self.arms.iter();
        let shuffled = arms.find(|arm| arm.reads == Reads::Shuffled);
        for (arm, forgetting) in self.arms.iter().zip(forgetting) {
            let shuffled = arm.tempered.as_ref().and(shuffled);
            let contender = Contender {
                update_ms: median(&arm.update_ms).unwrap_or(0.0),
                settle_ms: median(&arm.settle_ms).unwrap_or(0.0),
                longest_ms: arm.longest_ms,
                forgetting: Some(*forgetting),
                beyond_temperature: arm
                    .tempered
                    .as_ref()
                    .map(|tempered| compare.beyond_temperature(tempered)),
                beyond_words: shuffled.map(|words| compare.gain(&words.losses, &arm.losses)),
                ..compare.contender(&arm.name, &arm.losses)
            };
            if contender.negative {
                found.negative.push(contender);
            } else {
                found.learning.push(contender);
            }
        }
    }

    /// Adds the adapters of backpropagation, each as it is and while it helps.
    fn add_deep(&self, compare: &Comparison<'_>, forgetting: &[Forgetting], found: &mut Learners) {
        let mut arms = self.deep_arms.iter();
        let shuffled = arms.find(|arm| arm.told == Told::Shuffled);
        for (arm, forgetting) in self.deep_arms.iter().zip(forgetting) {
            let (name, judged) = arm.names();
            let mut contender = Contender {
                update_ms: median(&arm.update_ms).unwrap_or(0.0),
                longest_ms: arm.update_ms.iter().copied().fold(0.0, f64::max),
                forgetting: Some(*forgetting),
                ..compare.contender(name, &arm.losses)
            };
            let judged = judged.map(|name| compare.contender(name, &arm.judged_losses));
            let found_of = if arm.told == Told::Stream {
                found.deep_ms = contender.update_ms;
                contender.beyond_temperature =
                    Some(compare.beyond_temperature(&self.deep_tempered));
                contender.beyond_words =
                    shuffled.map(|words| compare.gain(&words.losses, &arm.losses));
                &mut found.learning
            } else {
                &mut found.negative
            };
            found_of.push(contender);
            found_of.extend(judged);
        }
    }
}

/// Median of `values`, if there are any.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}
