//! Replay of control text: what the model is to stay good at.

use crate::learn::LearnError;
use crate::learn::control_window::{ControlWindow, FIRST_STRENGTH, next_strength};
use ruvllm::Session;
use ruvllm::engine::AdapterId;
use ruvllm::lora::Gradients;
use ruvllm::session::cross_entropy;
use std::ops::Range;

/// Tokens of a window of control text.
const WINDOW: usize = 128;
/// Fraction of the bound that the divergence must stay below on text that is replayed: on other
/// text it is larger.
const SHARE: f64 = 0.7;

/// Control text, on which training must keep the base model's predictions.
pub(super) struct Replay {
    text: Vec<u32>,
    /// Windows that are replayed in turn, and windows that are only measured on.
    replayed: Vec<Range<usize>>,
    measured: Vec<Range<usize>>,
    /// A session without the adapter.
    base: Session,
    /// Weight of the divergence.
    pub(super) strength: f32,
    /// The window that was read last.
    window: ControlWindow,
}

impl Replay {
    /// The first half of the text is replayed, the second half measured on. If the text begins with
    /// the model's token for that, every window does.
    pub(super) fn new(base: Session, text: &[u32]) -> Replay {
        let bos = base.model().tokenizer().and_then(|t| t.bos());
        let bos = bos.filter(|bos| text.first() == Some(bos));
        let text = &text[usize::from(bos.is_some())..];
        let n = WINDOW.min(base.sequence().n_ctx()) - usize::from(bos.is_some());
        let mut all = Vec::new();
        let mut windows = |part: &[u32]| -> Vec<Range<usize>> {
            let mut windows = Vec::new();
            for piece in part.chunks(n.max(1)) {
                let start = all.len();
                all.extend(bos);
                all.extend_from_slice(piece);
                windows.push(start..all.len());
            }
            windows.retain(|window| window.len() > 1);
            windows
        };
        let (first, second) = text.split_at(text.len() / 2);
        let (replayed, measured) = (windows(first), windows(second));
        let window = ControlWindow::new(base.model().hparams().n_vocab);
        Replay {
            text: all,
            replayed,
            measured,
            base,
            strength: FIRST_STRENGTH,
            window,
        }
    }

    /// Tokens predicted in each of the windows that are measured on.
    pub(super) fn measured_tokens(&self) -> Vec<usize> {
        self.measured
            .iter()
            .map(|window| window.len() - 1)
            .collect()
    }

    /// The windows that are replayed.
    pub(super) fn replayed(&self) -> impl Iterator<Item = &[u32]> {
        self.replayed
            .iter()
            .map(|window| &self.text[window.clone()])
    }

    pub(super) fn is_empty(&self) -> bool {
        self.replayed.is_empty() || self.measured.is_empty()
    }

    fn read(&mut self, window: &Range<usize>) -> Result<(), LearnError> {
        let text = &self.text[window.start..window.end - 1];
        self.window.clear();
        self.base.clear();
        Ok(self
            .base
            .hooks()
            .prefill_each(text, 0, |_, logits| self.window.push(logits))?)
    }

    /// Adds the gradient of `strength·KL(base ‖ adapted)` per token on window `turn`, and adapts
    /// the strength.
    pub(super) fn gradient(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        turn: usize,
        max_divergence: f64,
        gradients: &mut Gradients,
    ) -> Result<(), LearnError> {
        let window = self.replayed[turn % self.replayed.len()].clone();
        self.read(&window)?;
        session.clear();
        let tokens = &self.text[window.start..window.end - 1];
        let loss = session.training().gradient(
            id,
            tokens,
            0,
            &self.window.objective(self.strength),
            gradients,
        )?;
        self.strength = next_strength(self.strength, loss, SHARE * max_divergence);
        Ok(())
    }

    /// Mean `KL(base ‖ adapted)` on the replayed half, and the sum of the rise of the loss on each
    /// window of the other half; in nats.
    pub(super) fn measure(&mut self, session: &mut Session) -> Result<(f64, Vec<f64>), LearnError> {
        let arch = session.model().arch();
        let (mut apart, mut n, mut rises) = (0.0, 0, Vec::new());
        let windows = self
            .replayed
            .iter()
            .map(|w| (w, true))
            .chain(self.measured.iter().map(|w| (w, false)));
        let windows: Vec<(Range<usize>, bool)> =
            windows.map(|(w, replayed)| (w.clone(), replayed)).collect();
        let mut row = Vec::new();
        for (window, is_replayed) in windows {
            self.read(&window)?;
            let (base, text) = (&self.window, &self.text[window.clone()]);
            let mut rise = 0.0;
            session.clear();
            session
                .hooks()
                .prefill_each(&text[..text.len() - 1], 0, |i, logits| {
                    row.clear();
                    row.extend_from_slice(logits);
                    if is_replayed {
                        apart += base.divergence(i, &mut row);
                    } else {
                        let next = text[i + 1];
                        rise += cross_entropy(arch, &mut row, next, 1.0)
                            + f64::from(base.log_p(i)[next as usize]);
                    }
                })?;
            if is_replayed {
                n += window.len() - 1;
            } else {
                rises.push(rise);
            }
        }
        Ok((apart / n as f64, rises))
    }
}
