//! Replay of control text: what the model is to stay good at.

use crate::learn::LearnError;
use crate::learn::rein::Rein;
use crate::train::Example;
use ruvllm::Session;
use ruvllm::engine::AdapterId;
use ruvllm::lora::Gradients;
use ruvllm::session::Reference;
use std::ops::Range;

/// Tokens of a window of control text.
const WINDOW: usize = 128;
/// Most windows that are replayed, at equal distances: what few windows keep is not kept elsewhere.
const REPLAYED: usize = 64;
/// Most windows of either half that an evaluation reads, at equal distances, at most as often as the
/// adapter's strength is reduced.
const WINDOWS: usize = 16;
/// Fraction of the bound that the divergence must stay below on text that is replayed: on other
/// text it is larger.
const SHARE: f64 = 0.7;
/// One in so many windows tells about how strong an adapter may be; all of them tell whether it is.
const FEW: usize = 4;

/// Control text, on which training must keep the base model's predictions.
pub(super) struct Replay {
    text: Vec<u32>,
    /// Windows that are replayed in turn, and windows that are only measured on.
    replayed: Vec<Range<usize>>,
    measured: Vec<Range<usize>>,
    /// What the model alone predicts in the windows that are replayed, and its loss on each of the
    /// others; as long as it is not known, empty.
    references: Vec<Reference>,
    losses: Vec<f64>,
    /// Tokens of the control text that no window has.
    pub(super) n_left_out: usize,
    pub(super) rein: Rein,
}

impl Replay {
    /// The first half of the text is replayed, the second half measured on. If the text begins with
    /// the model's token for that, every window does.
    pub(super) fn new(session: &Session, text: &[u32]) -> Replay {
        let bos = session.model().tokenizer().and_then(|t| t.bos());
        let bos = bos.filter(|bos| text.first() == Some(bos));
        let text = &text[usize::from(bos.is_some())..];
        let n = WINDOW.min(session.sequence().n_ctx()) - usize::from(bos.is_some());
        let (mut all, mut n_left_out) = (Vec::new(), 0);
        let mut windows = |part: &[u32], most: usize| -> Vec<Range<usize>> {
            let pieces: Vec<&[u32]> = part.chunks(n.max(1)).collect();
            let n_kept = pieces.len().min(most);
            let mut windows = Vec::new();
            n_left_out += part.len();
            for piece in (0..n_kept).map(|i| pieces[i * pieces.len() / n_kept]) {
                n_left_out -= piece.len();
                let start = all.len();
                all.extend(bos);
                all.extend_from_slice(piece);
                windows.push(start..all.len());
            }
            windows.retain(|window| window.len() > 1);
            windows
        };
        let (first, second) = text.split_at(text.len() / 2);
        let (replayed, measured) = (windows(first, REPLAYED), windows(second, WINDOWS));
        Replay {
            text: all,
            replayed,
            measured,
            references: Vec::new(),
            losses: Vec::new(),
            n_left_out,
            rein: Rein::new(),
        }
    }

    /// Tokens predicted in each of the windows that are measured on.
    pub(super) fn measured_tokens(&self) -> Vec<usize> {
        self.measured
            .iter()
            .map(|window| window.len() - 1)
            .collect()
    }

    /// Tokens that an evaluation reads.
    pub(super) fn evaluated_tokens(&self) -> usize {
        let replayed = self.some(WINDOWS).map(|turn| &self.replayed[turn]);
        replayed.chain(&self.measured).map(Range::len).sum()
    }

    /// At most `most` of the windows that are replayed, at equal distances.
    fn some(&self, most: usize) -> impl Iterator<Item = usize> {
        let (all, n) = (self.replayed.len(), most.min(self.replayed.len()));
        (0..n).map(move |i| i * all / n)
    }

    /// Tokens of a window that is replayed.
    pub(super) fn window_tokens(&self) -> usize {
        self.replayed.first().map_or(0, Range::len)
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

    /// Reads the windows without the adapter, once.
    pub(super) fn refer(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        none: &mut Gradients,
    ) -> Result<(), LearnError> {
        if !self.losses.is_empty() {
            return Ok(());
        }
        session.clear();
        session.adapters().set_scale(id, 0.0)?;
        let referred = self.read(session, id, none);
        session.clear();
        session.adapters().set_scale(id, 1.0)?;
        referred
    }

    fn read(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        none: &mut Gradients,
    ) -> Result<(), LearnError> {
        while let Some(window) = self.replayed.get(self.references.len()) {
            session.clear();
            let tokens = &self.text[window.start..window.end - 1];
            self.references.push(session.training().reference(tokens)?);
        }
        self.losses = self.measured_losses(session, id, none)?;
        Ok(())
    }

    /// Sum of the loss of each window that is measured on.
    fn measured_losses(
        &self,
        session: &mut Session,
        id: AdapterId,
        none: &mut Gradients,
    ) -> Result<Vec<f64>, LearnError> {
        let texts = self.measured.iter();
        let texts: Vec<Example> = texts
            .map(|window| Example::text(&self.text[window.clone()]))
            .collect();
        let texts: Vec<_> = texts.iter().map(|text| (text, 1.0)).collect();
        Example::nll_gradients(session, id, &texts, none)
    }

    /// Adds the gradient of the divergence per token on window `turn`, by its weight in the loss.
    /// Returns the factor on the adapter that keeps the bound after the step.
    pub(super) fn gradient(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        turn: usize,
        max_divergence: f64,
        gradients: &mut Gradients,
    ) -> Result<f32, LearnError> {
        let turn = turn % self.replayed.len();
        let strength = self.rein.strength;
        let loss = self.divergence_on(turn, session, id, strength, gradients)?;
        let divergence = loss / f64::from(strength);
        Ok(self.rein.pull(divergence, max_divergence, SHARE))
    }

    /// `weight` times the mean divergence on a window; adds its gradient.
    fn divergence_on(
        &self,
        turn: usize,
        session: &mut Session,
        id: AdapterId,
        weight: f32,
        gradients: &mut Gradients,
    ) -> Result<f64, LearnError> {
        let window = self.replayed[turn].clone();
        let tokens = &self.text[window.start..window.end - 1];
        let weight = weight / tokens.len() as f32;
        session.clear();
        Ok(session.training().divergence_gradient(
            id,
            tokens,
            &self.references[turn],
            weight,
            gradients,
            None,
        )?)
    }

    /// Mean divergence per token on at most `most` of the windows that are replayed.
    fn divergence(
        &self,
        most: usize,
        session: &mut Session,
        id: AdapterId,
        none: &mut Gradients,
    ) -> Result<f64, LearnError> {
        let (mut sum, mut n) = (0.0, 0);
        for turn in self.some(most) {
            let n_tokens = self.replayed[turn].len() - 1;
            sum += self.divergence_on(turn, session, id, n_tokens as f32, none)?;
            n += n_tokens;
        }
        Ok(sum / n as f64)
    }

    /// Reduces the adapter's strength, in the session, until its divergence is within the bound;
    /// returns the strength and the divergence.
    pub(super) fn limit(
        &self,
        session: &mut Session,
        id: AdapterId,
        max_divergence: f64,
        none: &mut Gradients,
    ) -> Result<(f32, f64), LearnError> {
        let (mut scale, mut divergence) = (1.0f32, 0.0);
        for most in [WINDOWS / FEW, WINDOWS] {
            loop {
                divergence = self.divergence(most, session, id, none)?;
                let excess = divergence / max_divergence.max(1e-12);
                if excess <= 1.0 || scale == 0.0 {
                    break;
                }
                // The divergence grows with the square of the strength, as long as it is small.
                scale = if scale < 1e-3 || excess.is_nan() {
                    0.0
                } else {
                    scale * (0.98 / excess.sqrt()).max(0.1) as f32
                };
                session.clear();
                session.adapters().set_scale(id, scale)?;
            }
        }
        Ok((scale, divergence))
    }

    /// Sum of the rise of the loss on each window that is measured on, in nats.
    pub(super) fn rises(
        &self,
        session: &mut Session,
        id: AdapterId,
        none: &mut Gradients,
    ) -> Result<Vec<f64>, LearnError> {
        let losses = self.measured_losses(session, id, none)?;
        let rises = losses.iter().zip(&self.losses);
        Ok(rises.map(|(with, without)| with - without).collect())
    }

    /// No rise on any of these windows.
    pub(super) fn no_rises(&self) -> Vec<f64> {
        vec![0.0; self.measured.len()]
    }
}
