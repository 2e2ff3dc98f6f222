//! Control text, from whose prediction by the model alone an adapter that is trained must not lead
//! far away.

use ruvllm::session::{divergence, log_sum};

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

    pub(crate) fn clear(&mut self) {
        self.log_p.clear();
    }

    /// Adds the model's logits before the next token.
    pub(crate) fn push(&mut self, logits: &[f32]) {
        let lse = log_sum(logits);
        self.log_p.extend(logits.iter().map(|l| l - lse));
    }

    /// `ln p` before token `i + 1`.
    pub(crate) fn log_p(&self, i: usize) -> &[f32] {
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
