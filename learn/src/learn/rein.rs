//! What keeps an adapter that is trained near the model on control text.

/// Weight of the divergence on control text in the loss of the first step.
const FIRST_STRENGTH: f32 = 8.0;

/// That weight in the next step, after one in which `strength` times the divergence was `loss`: it
/// rises while the divergence is above its bound, and falls at the same rate while it is
/// not. If it rose faster, it would reach values at which nothing is learnt, long before the same
/// text comes again.
fn next_strength(strength: f32, loss: f64, bound: f64) -> f32 {
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
    /// `bound`: the factor on the adapter's products that leads back, 1 if it is within the bound, 0
    /// if there is no number for it.
    pub(crate) fn pull(&mut self, divergence: f64, bound: f64, share: f64) -> f32 {
        if !divergence.is_finite() {
            self.divergence = 0.0;
            self.shrunk(0.0);
            return 0.0;
        }
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
