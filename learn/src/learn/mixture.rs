//! Mixtures of several predictions that are never much worse than the base model alone.
//!
//! There are two layers. A [`Blend`] is a linear mixture whose weights follow what has helped,
//! separately for each kind of context; a blend is one more expert. Above the blends, [`Bayes`]
//! weighs experts by how well they predicted everything so far. Since its prediction is `Σ
//! prior·p_expert`, its loss over any stream is at most that of any expert plus `ln(1/prior)`: with
//! prior ½ for the base, at most `ln 2 ≈ 0.69` nats more than the base, in total.

/// Weights of a linear mixture, one set for each kind of context.
#[derive(Clone, Debug)]
pub(crate) struct Blend {
    n: usize,
    /// Weights `(kinds, n)`, each row a distribution.
    weights: Vec<f64>,
    /// Number of updates of each kind.
    seen: Vec<f64>,
}

/// Number of updates for which the initial weights of a kind count.
const PRIOR_STRENGTH: f64 = 24.0;
/// Smallest rate at which weights adapt, so that they can follow a change of the text.
const LEAST_RATE: f64 = 0.004;
/// Upper bound of the count of updates, long after the rate has become constant.
const MOST_SEEN: f64 = 1e9;
/// Smallest weight.
const LEAST_WEIGHT: f64 = 0.001;
/// Tolerance for the sum of weights read from a file: far more than any step deviates, and no more
/// than the allowed difference of a stream's loss.
const ROUNDING: f64 = 1e-9;

impl Blend {
    /// A blend that begins with the weights `prior`.
    pub(crate) fn new(prior: &[f64], kinds: usize) -> Blend {
        let sum: f64 = prior.iter().sum();
        let row = prior.iter().map(|w| w / sum);
        Blend {
            n: prior.len(),
            weights: (0..kinds).flat_map(|_| row.clone()).collect(),
            seen: vec![0.0; kinds],
        }
    }

    pub(crate) fn weights(&self, kind: usize) -> &[f64] {
        &self.weights[kind * self.n..][..self.n]
    }

    /// Probability of the observed token, given the experts' probabilities of it.
    pub(crate) fn probability(&self, kind: usize, p: &[f64]) -> f64 {
        self.weights(kind).iter().zip(p).map(|(w, p)| w * p).sum()
    }

    /// The loss for [`Blend::probability`], given the base model's loss, that of expert `base`: the
    /// base model's share bounds the loss where the probability underflows.
    pub(crate) fn loss(&self, kind: usize, p: &[f64], base: usize, base_loss: f64) -> f64 {
        (-self.probability(kind, p).ln()).min(base_loss - self.weights(kind)[base].ln())
    }

    /// Moves weight to the experts that predicted the observed token: one step of expectation
    /// maximisation.
    pub(crate) fn learn(&mut self, kind: usize, p: &[f64]) {
        let total = self.probability(kind, p);
        if total <= 0.0 {
            return;
        }
        self.seen[kind] = (self.seen[kind] + 1.0).min(MOST_SEEN);
        let rate = (1.0 / (self.seen[kind] + PRIOR_STRENGTH)).max(LEAST_RATE);
        let weights = &mut self.weights[kind * self.n..][..self.n];
        for (w, p) in weights.iter_mut().zip(p) {
            *w = ((1.0 - rate) * *w + rate * *w * p / total).max(LEAST_WEIGHT);
        }
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }

    /// The state as numbers.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        self.weights.iter().chain(&self.seen).copied().collect()
    }

    /// Restores the state from [`Blend::numbers`]; returns whether it is valid.
    pub(crate) fn restore(&mut self, numbers: &[f64]) -> bool {
        let (weights, seen) = numbers.split_at(self.weights.len().min(numbers.len()));
        let sound = numbers.len() == self.weights.len() + self.seen.len()
            && weights.chunks_exact(self.n).all(|row| {
                row.iter().all(|&w| w > 0.0 && w <= 1.0)
                    && (row.iter().sum::<f64>() - 1.0).abs() < ROUNDING
            })
            && seen.iter().all(|n| (0.0..=MOST_SEEN).contains(n));
        if sound {
            self.weights = weights.to_vec();
            self.seen = seen.to_vec();
        }
        sound
    }
}

/// Lower bound of log weights, far below any effect, so that they stay finite.
const LEAST_LOG_WEIGHT: f64 = -1e30;

/// Weights of experts by Bayes' rule.
#[derive(Clone, Debug)]
pub(crate) struct Bayes {
    /// Logarithms of prior times all past probabilities, normalised.
    log_weights: Vec<f64>,
    /// Fraction of all weight that is redistributed after each step, so that the best expert may
    /// change (fixed share, Herbster & Warmuth 1998). The bound on total loss holds only if it
    /// is 0.
    share: f64,
}

impl Bayes {
    /// Experts with these prior weights, which sum to one.
    pub(crate) fn new(prior: &[f64]) -> Bayes {
        Bayes {
            log_weights: prior.iter().map(|w| w.ln()).collect(),
            share: 0.0,
        }
    }

    /// `n` experts of equal weight, of which different ones are best at different times.
    pub(crate) fn switching(n: usize, share: f64) -> Bayes {
        Bayes {
            log_weights: vec![-(n as f64).ln(); n],
            share,
        }
    }

    /// Log probability of the observed token by the mixture, without learning.
    pub(crate) fn log_probability(&self, log_p: &[f64]) -> f64 {
        log_sum(self.log_weights.iter().zip(log_p).map(|(w, p)| w + p))
    }

    /// Weights of the experts, summing to one.
    pub(crate) fn weights(&self) -> impl Iterator<Item = f64> {
        self.log_weights.iter().map(|w| w.exp())
    }

    pub(crate) fn log_weights(&self) -> &[f64] {
        &self.log_weights
    }

    /// Restores log weights; returns whether they are valid.
    pub(crate) fn restore(&mut self, log_weights: &[f64]) -> bool {
        let sum: f64 = log_weights.iter().map(|w| w.exp()).sum();
        let sound = log_weights.len() == self.log_weights.len()
            && log_weights
                .iter()
                .all(|w| (LEAST_LOG_WEIGHT..ROUNDING).contains(w))
            && (sum - 1.0).abs() < ROUNDING;
        if sound {
            self.log_weights = log_weights.to_vec();
        }
        sound
    }

    /// Returns the loss `−ln Σ w·p` of the observed token, given the experts' log probabilities of
    /// it; then updates `w ← w·p`, normalised.
    pub(crate) fn learn(&mut self, log_p: &[f64]) -> f64 {
        let log_p_mixed = self.log_probability(log_p);
        let (kept, dealt) = (1.0 - self.share, self.share / self.log_weights.len() as f64);
        for (w, p) in self.log_weights.iter_mut().zip(log_p) {
            *w = (*w + (p - log_p_mixed)).max(LEAST_LOG_WEIGHT);
            if self.share > 0.0 {
                *w = (kept * w.exp() + dealt).ln();
            }
            // Rounding must not give an expert more than all the weight.
            *w = w.min(0.0);
        }
        -log_p_mixed
    }
}

fn log_sum(terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = terms.clone().fold(f64::NEG_INFINITY, f64::max);
    max + terms.map(|x| (x - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use crate::learn::mixture::*;
    use proptest::prelude::*;

    proptest! {
        /// The bound holds for any probabilities, up to the rounding of a sum of logarithms, although the weights are
        /// saved and loaded all the time.
        #[test]
        fn total_loss_is_bounded(stream in prop::collection::vec((1e-12f64..1.0, 1e-12f64..1.0, 1e-12f64..1.0), 1..400)) {
            let mut bayes = Bayes::new(&[0.5, 0.25, 0.25]);
            let (mut total, mut base, mut other) = (0.0, 0.0, 0.0);
            for (a, b, c) in stream {
                total += bayes.learn(&[a.ln(), b.ln(), c.ln()]);
                let saved = bayes.log_weights().to_vec();
                bayes = Bayes::new(&[0.2, 0.4, 0.4]);
                prop_assert!(bayes.restore(&saved));
                base -= a.ln();
                other -= b.ln();
            }
            prop_assert!(total <= base + 2f64.ln() + 1e-9);
            prop_assert!(total <= other + 4f64.ln() + 1e-9);
        }

        #[test]
        fn blends_stay_distributions(stream in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 1..200)) {
            let mut blend = Blend::new(&[0.7, 0.3], 2);
            for (i, (a, b)) in stream.into_iter().enumerate() {
                blend.learn(i % 2, &[a, b]);
            }
            for kind in 0..2 {
                prop_assert!((blend.weights(kind).iter().sum::<f64>() - 1.0).abs() < 1e-9);
                prop_assert!(blend.weights(kind).iter().all(|&w| w > 0.0));
            }
            let mut copy = Blend::new(&[0.7, 0.3], 2);
            prop_assert!(copy.restore(&blend.numbers()));
            prop_assert!(copy.numbers() == blend.numbers());
            prop_assert!(!copy.restore(&[f64::NAN; 6]));
        }
    }

    /// One expert gets all the weight, then becomes the worst of all.
    #[test]
    fn what_any_step_leaves_can_be_restored() {
        let (good, bad) = (0.9f64, 0.003f64);
        for share in [0.0, 0.002] {
            let mut bayes = Bayes {
                share,
                ..Bayes::new(&[0.5, 0.25, 0.25])
            };
            let (mut total, mut base) = (0.0, 0.0);
            for i in 0..6000 {
                let p = [1, 0, 2].map(|turn| {
                    let p = if i / 1000 % 3 == turn {
                        good - 0.0001 * f64::from(i * 7919 % 1009)
                    } else {
                        bad
                    };
                    p.ln()
                });
                total += bayes.learn(&p);
                base -= p[0];
                let saved = bayes.log_weights().to_vec();
                assert!(bayes.restore(&saved), "{i}: {saved:?}");
            }
            assert!(
                share > 0.0 || total <= base + 2f64.ln() + 1e-9,
                "{total} {base}"
            );
        }
        let mut bayes = Bayes::new(&[0.5, 0.5]);
        for unsound in [
            [-0.5, -0.5],
            [f64::NAN, 0.0],
            [f64::NEG_INFINITY, 0.0],
            [f64::INFINITY, 0.0],
        ] {
            assert!(!bayes.restore(&unsound), "{unsound:?}");
        }
    }
}
