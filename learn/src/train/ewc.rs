//! Elastic weight consolidation (Kirkpatrick et al., arXiv 1612.00796): values that control text
//! depends on are held back.

use crate::learn::LearnError;
use crate::train::Example;
use crate::train::flat::flat;
use crate::train::replay::Replay;
use ruvllm::Session;
use ruvllm::engine::AdapterId;
use ruvllm::lora::{Adapter, Gradients};

/// The penalty `λ/2·Σ F·(θ − θ₀)²` on an adapter's values `θ`.
///
/// `F` is the diagonal of the empirical Fisher information at `θ₀`: squares of the gradient of a
/// window's log-likelihood, summed over windows and divided by their tokens. Where `B` is zero at
/// first, `A` has no gradient, and only `B` is held.
pub(super) struct Ewc {
    lambda: f32,
    /// `θ₀`, in the order of [`flat`].
    anchor: Vec<f32>,
    /// `F`; empty until it was measured.
    pub(super) fisher: Vec<f32>,
}

impl Ewc {
    pub(super) fn new(lambda: f32, anchor: Vec<f32>) -> Ewc {
        Ewc {
            lambda,
            anchor,
            fisher: Vec::new(),
        }
    }

    /// Measures `F` on the windows that are replayed, with the adapter at `θ₀`, unless it is known.
    /// Overwrites `gradients`.
    pub(super) fn measure(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        replay: &Replay,
        gradients: &mut Gradients,
    ) -> Result<(), LearnError> {
        if !self.fisher.is_empty() {
            return Ok(());
        }
        let (mut fisher, mut n) = (vec![0.0; self.anchor.len()], 0);
        for window in replay.replayed() {
            gradients.clear();
            Example::nll_gradients(session, id, &[(&Example::text(window), 1.0)], gradients)?;
            fisher
                .iter_mut()
                .zip(gradients.values())
                .for_each(|(f, g)| *f += g * g);
            n += window.len() - 1;
        }
        fisher.iter_mut().for_each(|f| *f /= n as f32);
        self.fisher = fisher;
        Ok(())
    }

    /// Adds the gradient of the penalty.
    pub(super) fn gradient(&self, adapter: &Adapter, gradients: &mut Gradients) {
        let known = self.fisher.iter().zip(&self.anchor);
        for ((g, value), (f, anchor)) in gradients.values_mut().zip(flat(adapter)).zip(known) {
            *g += self.lambda * f * (value - anchor);
        }
    }
}
