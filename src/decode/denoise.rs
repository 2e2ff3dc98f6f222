//! Denoising: texts of models whose tokens all see each other (Dream, LLaDA, RND1). A text begins as
//! its prompt and mask tokens; each step computes the whole text and decides some of the masked
//! places (Nie et al., "Large Language Diffusion Models", arXiv 2502.09992; Ye et al., "Dream 7B",
//! arXiv 2508.15487).

use crate::compute::hook::TokenKind;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::kv::KvType;
use crate::layers::diffusion::DiffusionSpec;
use crate::layers::outputs::Outputs;
use crate::sample::rng::Rng;

/// Which masked places are decided first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// Those whose token has the largest probability.
    #[default]
    Confidence,
    /// Those where the two best tokens differ most in probability.
    Margin,
    /// Those whose probabilities have the least entropy.
    Entropy,
    /// Any.
    Random,
}

/// Options of a [`Denoiser`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DenoiseOptions {
    /// Steps, of which each computes the whole text. Default 128. A block has one at least, and none
    /// in which there is nothing to decide.
    pub n_steps: usize,
    /// Places of a block: blocks are decided one after the other. Default: all are one.
    pub block: Option<usize>,
    /// Which places are decided first.
    pub order: Order,
    /// Temperature of the choice of tokens; 0, the default: the most probable one.
    pub temperature: f32,
    /// Seed of what is random.
    pub seed: u64,
}

impl Default for DenoiseOptions {
    fn default() -> DenoiseOptions {
        DenoiseOptions {
            n_steps: 128,
            block: None,
            order: Order::Confidence,
            temperature: 0.0,
            seed: 0,
        }
    }
}

/// Makes texts by denoising.
#[derive(Clone, Debug)]
pub struct Denoiser {
    engine: Engine,
    spec: DiffusionSpec,
    mask: u32,
    cancel: CancelToken,
}

/// A place that could be decided: how sure the model is, the place, its token.
type Candidate = (f32, usize, u32);

impl Denoiser {
    /// A denoiser on this engine.
    ///
    /// # Errors
    /// [`SessionError::DoesNotDenoise`], [`SessionError::NoMask`], or [`SessionError::NotOnDevice`] if
    /// a device computes the engine's passes.
    pub fn new(engine: &Engine) -> Result<Denoiser, SessionError> {
        engine.cpu_only("denoising")?;
        let model = engine.model();
        let spec = model.hparams().diffusion;
        let spec = spec.ok_or(SessionError::DoesNotDenoise)?;
        let mask = model
            .gguf()
            .metadata()
            .opt_u32("tokenizer.ggml.mask_token_id");
        let mask = mask.ok().flatten().ok_or(SessionError::NoMask)?;
        let n_vocab = model.hparams().n_vocab;
        if mask as usize >= n_vocab {
            let token = mask;
            return Err(SessionError::TokenOutOfRange { token, n_vocab });
        }
        let (engine, cancel) = (engine.clone(), CancelToken::default());
        Ok(Denoiser {
            engine,
            spec,
            mask,
            cancel,
        })
    }

    /// The token at open places.
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// A token that cancels calls from another thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// The logits of `tokens[first..]`, `(n, n_vocab)`, in a pass over the whole text.
    ///
    /// # Errors
    /// If there are no tokens, more than the model has positions, or one outside the vocabulary; if
    /// the call is cancelled, or there is not enough memory.
    pub fn logits(&self, tokens: &[u32], first: usize) -> Result<Vec<f32>, SessionError> {
        let n_ctx = self.engine.model().hparams().n_ctx_train;
        if tokens.len() > n_ctx {
            return Err(SessionError::ContextFull {
                n_ctx,
                n_past: 0,
                n_new: tokens.len(),
            });
        }
        // Keys and values are temporary, so they can have full precision.
        let mut seq = self.engine.sequence(&SessionOptions {
            n_ctx: Some(tokens.len().max(1)),
            kv_type: KvType::F32,
            ..SessionOptions::default()
        })?;
        let slot = Slot::new(&mut seq, tokens, TokenKind::Prompt);
        let (slot, mut outputs) = (slot.outputs_from(first), Outputs::default());
        self.engine
            .logits_of(slot.keeping_kind(), &mut outputs, &self.cancel)?;
        Ok(outputs.logits(0).to_vec())
    }

    /// `n` tokens behind `prompt`. `each` is called with all of them after every step, mask tokens
    /// where nothing is decided; `false` ends the text as it is.
    ///
    /// # Errors
    /// As [`Denoiser::logits`].
    pub fn denoise(
        &self,
        prompt: &[u32],
        n: usize,
        options: &DenoiseOptions,
        each: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<Vec<u32>, SessionError> {
        let start = prompt.len();
        let mut tokens = prompt.to_vec();
        tokens.resize(start.saturating_add(n), self.mask);
        let size = options.block.unwrap_or(n).max(1);
        let n_blocks = n.div_ceil(size);
        let mut rng = Rng::new(options.seed);
        for block in 0..n_blocks {
            let places = start + block * size..start + n.min((block + 1) * size);
            let steps_until = |block: usize| block * options.n_steps / n_blocks;
            let n_steps = (steps_until(block + 1) - steps_until(block)).max(1);
            for step in 0..n_steps {
                let open: Vec<usize> = places
                    .clone()
                    .filter(|&place| tokens[place] == self.mask)
                    .collect();
                let Some(&first) = open.first() else { break };
                let mut candidates = self.candidates(&tokens, (first, &open), options, &mut rng)?;
                candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
                // What is left is shared equally among the steps that are left.
                let n_now = open.len().div_ceil(n_steps - step);
                for &(_, place, token) in &candidates[..n_now] {
                    tokens[place] = token;
                }
                if !each(&tokens[start..]) {
                    return Ok(tokens.split_off(start));
                }
            }
        }
        Ok(tokens.split_off(start))
    }

    /// A token for each of the places `open`, of which `first` is the first, in their order.
    fn candidates(
        &self,
        tokens: &[u32],
        (first, open): (usize, &[usize]),
        options: &DenoiseOptions,
        rng: &mut Rng,
    ) -> Result<Vec<Candidate>, SessionError> {
        let n_vocab = self.engine.model().hparams().n_vocab;
        // Before the first place there is nothing that could decide it.
        let before = usize::from(self.spec.shifted);
        let of_place = |place: usize| place.saturating_sub(before);
        let mut logits = self.logits(tokens, of_place(first))?;
        let candidate = |&place: &usize| {
            let row = of_place(place) - of_place(first);
            let logits = &mut logits[row * n_vocab..][..n_vocab];
            // The mask decides nothing. A row is read twice where the second place of a text is open,
            // too.
            logits[self.mask as usize] = f32::NEG_INFINITY;
            let (token, sure) = choose(logits, options, rng);
            (sure, place, token)
        };
        Ok(open.iter().map(candidate).collect())
    }
}

/// A token by its logits, and how sure the model is of it.
fn choose(logits: &[f32], options: &DenoiseOptions, rng: &mut Rng) -> (u32, f32) {
    // NaN is less than any number.
    let better = |a: f32, b: f32| a > b || (b.is_nan() && !a.is_nan());
    let (mut best, mut second) = (0, f32::NEG_INFINITY);
    for (i, &logit) in logits.iter().enumerate().skip(1) {
        if better(logit, logits[best]) {
            second = logits[best];
            best = i;
        } else if better(logit, second) {
            second = logit;
        }
    }
    let max = logits[best];
    let weight = |logit: f32| f64::from(logit - max).exp();
    let sum: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let token = if options.temperature > 0.0 {
        draw(logits, max, options.temperature, rng)
    } else {
        best
    };
    let sure = match options.order {
        Order::Confidence => weight(logits[token]) / sum,
        Order::Margin => (1.0 - weight(second)) / sum,
        Order::Entropy => logits
            .iter()
            .map(|&logit| weight(logit) / sum)
            .filter(|&p| p > 0.0)
            .map(|p| p * p.ln())
            .sum(),
        Order::Random => rng.uniform(),
    };
    (token as u32, sure as f32)
}

/// A token by its probability at this temperature; `max` is the largest logit.
fn draw(logits: &[f32], max: f32, temperature: f32, rng: &mut Rng) -> usize {
    let weight = |&logit: &f32| {
        let weight = f64::from((logit - max) / temperature).exp();
        if weight.is_nan() { 0.0 } else { weight }
    };
    let mut left = rng.uniform() * logits.iter().map(weight).sum::<f64>();
    let mut last = 0;
    for (i, weight) in logits.iter().map(weight).enumerate() {
        if weight > 0.0 {
            last = i;
            left -= weight;
        }
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(order: Order, logits: &[f32]) -> (u32, f32) {
        let options = DenoiseOptions {
            order,
            ..DenoiseOptions::default()
        };
        choose(logits, &options, &mut Rng::new(1))
    }

    #[test]
    fn sureness_of_a_token() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 0.0];
        assert_eq!(chosen(Order::Confidence, &logits), (1, 0.5));
        assert_eq!(chosen(Order::Margin, &logits), (1, 0.25));
        let entropy = 0.5 * 0.5f32.ln() + 0.5 * 0.25f32.ln();
        let (token, sure) = chosen(Order::Entropy, &logits);
        assert!(token == 1 && (sure - entropy).abs() < 1e-6);
        assert_eq!(chosen(Order::Confidence, &[f32::NAN, 1.0]).0, 1);
    }

    #[test]
    fn tokens_are_drawn_by_their_probability() {
        let options = DenoiseOptions {
            temperature: 1.0,
            ..DenoiseOptions::default()
        };
        let logits = [3f32.ln(), f32::NEG_INFINITY, 0.0];
        let mut rng = Rng::new(7);
        let mut n = [0; 3];
        for _ in 0..4000 {
            n[choose(&logits, &options, &mut rng).0 as usize] += 1;
        }
        // Three standard deviations of 4000 draws with probability 3/4 are 82.
        assert!(n[1] == 0 && (2918..=3082).contains(&n[0]), "{n:?}");
    }
}
