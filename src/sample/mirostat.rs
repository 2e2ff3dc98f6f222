//! Mirostat: keeps the surprise of the text near a target by moving the cut of the candidates
//! (Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity",
//! arXiv:2007.14966).

use crate::sample::candidates::Candidates;

/// Number of candidates from which version 1 estimates Zipf's exponent, as in the paper.
const M: usize = 100;

/// The controller. `mu` is the largest surprise, in bits, of a token that is kept.
#[derive(Debug, Clone)]
pub(super) struct Mirostat {
    /// Target surprise, bits.
    pub(super) tau: f32,
    /// Learning rate.
    pub(super) eta: f32,
    mu: f32,
}

impl Mirostat {
    /// Starts at `mu = 2 · tau`.
    pub(super) fn new(tau: f32, eta: f32) -> Self {
        Self {
            tau,
            eta,
            mu: 2.0 * tau,
        }
    }

    /// Resets to the initial state.
    pub(super) fn reset(&mut self) {
        self.mu = 2.0 * self.tau;
    }

    /// Version 1: estimates the exponent `s` of Zipf's law from the best [`M`] candidates, by
    /// least squares over `b_i = s · t_i` with `t_i = ln((i+2)/(i+1))`, `b_i = ln(p_i/p_{i+1})`,
    /// and keeps the `k` best with, for `ε = s − 1` and a vocabulary of `N`,
    ///
    /// `k = (ε · 2^mu / (1 − N^−ε))^(1/s)`
    pub(super) fn truncate_v1(&self, candidates: &mut Candidates, n_vocab: usize) {
        candidates.softmax();
        candidates.sort();
        let best = &candidates.as_slice()[..candidates.len().min(M)];
        let (mut sum_tb, mut sum_tt) = (0.0f64, 0.0f64);
        for (i, pair) in best.windows(2).enumerate() {
            let t = ((i + 2) as f64 / (i + 1) as f64).ln();
            let b = (f64::from(pair[0].p) / f64::from(pair[1].p)).ln();
            // Zero probabilities do not determine the slope.
            if b.is_finite() {
                sum_tb += t * b;
                sum_tt += t * t;
            }
        }
        let s = sum_tb / sum_tt;
        let epsilon = s - 1.0;
        let n = n_vocab as f64;
        // (1 − N^−ε) / ε tends to ln N where ε tends to 0.
        let scale = if epsilon.abs() < 1e-9 {
            n.ln()
        } else {
            (1.0 - n.powf(-epsilon)) / epsilon
        };
        let k = (f64::from(self.mu).exp2() / scale).powf(1.0 / s);
        // `max` turns the NaN of a single candidate into 1; the cast saturates.
        candidates.keep_best(k.max(1.0) as usize);
    }

    /// Version 2: keeps the candidates with surprise `−log2 p ≤ mu`, at least one.
    pub(super) fn truncate_v2(&self, candidates: &mut Candidates) {
        candidates.softmax();
        candidates.sort();
        let n = candidates
            .as_slice()
            .partition_point(|c| -c.p.log2() <= self.mu);
        candidates.keep_best(n.max(1));
    }

    /// `mu ← mu − eta · (−log2 p − tau)` for the probability of the token that was chosen.
    pub(super) fn learn(&mut self, p: f32) {
        let surprise = -p.max(f32::MIN_POSITIVE).log2();
        self.mu -= self.eta * (surprise - self.tau);
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::mirostat::*;

    #[test]
    fn version_2_cuts_by_surprise_and_learns() {
        // Surprises 1, 2, 3, 3 bits.
        let logits = [8f32.ln(), 4f32.ln(), 2f32.ln(), 2f32.ln()];
        for (mu, kept) in [
            (0.5, &[0][..]),
            (1.5, &[0]),
            (2.5, &[0, 1]),
            (3.5, &[0, 1, 2, 3]),
        ] {
            let mut c = candidates(&logits);
            Mirostat::new(mu / 2.0, 0.1).truncate_v2(&mut c);
            assert_eq!(ids(&c), kept, "mu = {mu}");
        }
        let mut m = Mirostat::new(5.0, 0.1);
        m.learn(0.125);
        assert_eq!(m.mu, 10.0 - 0.1 * (3.0 - 5.0));
        m.reset();
        assert_eq!(m.mu, 10.0);
    }

    #[test]
    fn version_1_recovers_zipf() {
        // p_i ∝ i^−s exactly: the estimate is s, and k follows from the formula.
        let (s, n, mu) = (1.5f64, 5000, 8.0f64);
        let logits: Vec<f32> = (1..=n).map(|i| (-s * f64::from(i).ln()) as f32).collect();
        let mut c = candidates(&logits);
        Mirostat::new(mu as f32 / 2.0, 0.1).truncate_v1(&mut c, n as usize);
        let e = s - 1.0;
        let k = (e * mu.exp2() / (1.0 - f64::from(n).powf(-e))).powf(1.0 / s);
        // 25.6…: far enough from an integer for the f32 logits not to matter.
        assert!((0.2..0.8).contains(&k.fract()), "{k}");
        assert_eq!(c.len(), k as usize);
    }

    #[test]
    fn version_1_survives_degenerate_inputs() {
        for logits in [
            &[1.0][..],
            &[0.0; 50],
            &[0.0, -500.0, -500.0],
            &[f32::INFINITY, 0.0],
        ] {
            let mut c = candidates(logits);
            Mirostat::new(5.0, 0.1).truncate_v1(&mut c, logits.len());
            assert!(!c.is_empty());
        }
    }
}
