//! Control text, from whose prediction by the model alone an adapter that is trained must not lead
//! far away.

use ruvllm::session::log_sum;

/// What the model alone predicts in a window of control text.
#[derive(Clone, Debug)]
pub(crate) struct ControlWindow {
    n_vocab: usize,
    /// `ln p` before each of the window's tokens but the first, `(n − 1, n_vocab)`.
    log_p: Vec<f32>,
}

impl ControlWindow {
    /// Without a token yet.
    pub(crate) fn new(n_vocab: usize) -> ControlWindow {
        ControlWindow {
            n_vocab,
            log_p: Vec::new(),
        }
    }

    /// Adds the model's logits before the next token.
    pub(crate) fn push(&mut self, logits: &[f32]) {
        let lse = log_sum(logits);
        self.log_p.extend(logits.iter().map(|l| l - lse));
    }

    /// `ln p` before token `i + 1`.
    fn log_p(&self, i: usize) -> &[f32] {
        &self.log_p[i * self.n_vocab..][..self.n_vocab]
    }

    /// `KL(base ‖ adapted)` before token `i + 1`, of which `row` are the adapted logits, in nats;
    /// uses up `row`.
    pub(crate) fn divergence(&self, i: usize, row: &mut [f32]) -> f64 {
        divergence(row, self.log_p(i), 1.0)
    }

    /// Objective of [`SessionTraining::gradient`](ruvllm::session::SessionTraining::gradient) from the window's
    /// first token on: `strength` times the mean divergence.
    pub(crate) fn objective(&self, strength: f32) -> impl Fn(usize, &mut [f32]) -> f64 + Sync + '_ {
        let weight = strength / (self.log_p.len() / self.n_vocab) as f32;
        move |i, logits| divergence(logits, self.log_p(i), weight)
    }
}

/// `weight·KL(p ‖ q)` in nats, given `ln p` of every token and the logits of `q`, which it replaces
/// by the gradient, `weight·(q − p)`.
fn divergence(logits: &mut [f32], log_p: &[f32], weight: f32) -> f64 {
    let lse = log_sum(logits);
    let mut sum = 0.0;
    for (logit, &log_p) in logits.iter_mut().zip(log_p) {
        let (p, log_q) = (log_p.exp(), *logit - lse);
        sum += f64::from(p * (log_p - log_q));
        *logit = weight * (log_q.exp() - p);
    }
    f64::from(weight) * sum
}

/// Weight of the divergence on control text in the loss of the first step.
pub(crate) const FIRST_STRENGTH: f32 = 8.0;

/// That weight in the next step, after one in which the [objective](ControlWindow::objective) was
/// `loss`: it rises while the divergence is above its bound, and falls at the same rate while it is
/// not. If it rose faster, it would reach values at which nothing is learnt, long before the same
/// text comes again.
pub(crate) fn next_strength(strength: f32, loss: f64, bound: f64) -> f32 {
    let excess = loss / f64::from(strength) / bound.max(1e-9) - 1.0;
    (strength * (0.15 * excess.clamp(-1.0, 1.0)).exp() as f32).clamp(1.0, 1000.0)
}

/// Weight of the latest window in the mean divergence of windows.
const LATEST: f64 = 0.5;
/// Factors on the steps after one that led out of the bound, at least, and after one that did not.
const SLOWER: f64 = 0.1;
const FASTER: f64 = 1.1;
/// Smallest factor on the steps.
const SLOWEST: f64 = 1e-3;

/// Keeps an adapter within a bound on its divergence from the model while it learns, whatever the
/// model: how long its steps can be follows from how far they have led.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rein {
    /// Weight of the divergence in the loss.
    pub(crate) strength: f32,
    /// Factor on the rate.
    pub(crate) pace: f64,
    /// Mean divergence of the latest windows, in nats per token.
    pub(crate) divergence: f64,
}

impl Rein {
    /// Before the first step.
    pub(crate) fn new() -> Rein {
        Rein {
            strength: FIRST_STRENGTH,
            pace: 1.0,
            divergence: 0.0,
        }
    }

    /// After the divergence on a window was `divergence`, which is to be less than `share` of
    /// `bound`: the factor on the adapter's products that leads back, 1 if it is within the bound.
    pub(crate) fn pull(&mut self, divergence: f64, bound: f64, share: f64) -> f32 {
        let loss = divergence * f64::from(self.strength);
        self.strength = next_strength(self.strength, loss, share * bound);
        // Sums are rounded: one of next to nothing can be less than nothing.
        self.divergence += LATEST * (divergence.max(0.0) - self.divergence);
        if self.divergence <= bound {
            self.pace = (FASTER * self.pace).min(1.0);
            return 1.0;
        }
        // The divergence grows with the square of the strength, as long as it is small.
        let factor = (share * bound / self.divergence).sqrt();
        self.shrunk(factor);
        factor as f32
    }

    /// After the adapter's products were multiplied by `factor` to keep the bound.
    pub(crate) fn shrunk(&mut self, factor: f64) {
        self.divergence *= factor * factor;
        self.pace = (self.pace * factor.max(SLOWER)).max(SLOWEST);
    }
}

#[cfg(test)]
mod tests {
    use super::Rein;

    /// Of an adapter whose every step leads as far as the pace allows, however curved the model is.
    #[test]
    fn a_rein_keeps_the_bound_whatever_the_curvature() {
        for curvature in [1e-4, 1.0, 1e4] {
            let (mut rein, mut size, bound) = (Rein::new(), 0.0f64, 0.0015);
            let mut most = 0.0f64;
            for step in 0..200 {
                let divergence = curvature * size * size;
                if step >= 20 {
                    most = most.max(divergence);
                }
                size *= f64::from(rein.pull(divergence, bound, 0.8));
                size += 0.1 * rein.pace;
            }
            // The mean lags behind the step that follows a pull: by these formulas up to 1.7 times
            // the bound, where the pace is at its least.
            assert!(most < 2.0 * bound, "{curvature}: {most}");
            assert!(size > 0.0);
        }
    }
}
