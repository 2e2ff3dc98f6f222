//! Drafts measured on recorded answers: the answer's tokens are sampled whatever the logits are, so
//! that workloads can be measured on shapes whose weights are random. Every draft, mask and pass is
//! paid as if the model had written the answer.

use ruvllm::Engine;
use ruvllm::Error;
use ruvllm::Session;
use ruvllm::SessionError;
use ruvllm::SessionOptions;
use ruvllm::decode::{Draft, DraftStats, Drafter, Speculation};
use ruvllm::sample::{MaskError, SampleError, TokenMask};
use ruvllm::{Sampler, SamplerOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prompt that was computed, and the answer to be replayed behind it.
#[derive(Debug)]
pub struct Replay {
    /// Holds the prompt but its last token.
    session: Session,
    last: u32,
    answer: Arc<[u32]>,
}

/// What a replay took.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// Time of the whole answer, without the prompt.
    pub time: Duration,
    /// Passes that computed its tokens, and what became of all drafts.
    pub drafts: DraftStats,
    /// What became of each drafter's drafts.
    pub drafters: Vec<(&'static str, DraftStats)>,
}

impl Replay {
    /// Computes `prompt`. Of `options` the context is made large enough.
    ///
    /// # Errors
    /// If prompt or answer is empty, or the prompt cannot be computed.
    pub fn new(
        engine: &Engine,
        options: &SessionOptions,
        prompt: &[u32],
        answer: &[u32],
    ) -> Result<Replay, Error> {
        let (Some((&last, context)), false) = (prompt.split_last(), answer.is_empty()) else {
            return Err(SessionError::NoTokens.into());
        };
        let options = SessionOptions {
            n_ctx: Some(prompt.len() + answer.len()),
            ..options.clone()
        };
        let mut session = engine.session_with(&options)?;
        if !context.is_empty() {
            session.prefill(context)?;
        }
        engine.model().settle();
        Ok(Replay {
            session,
            last,
            answer: answer.into(),
        })
    }

    /// Tokens of the answer.
    pub fn n_tokens(&self) -> usize {
        self.answer.len()
    }

    /// Generates the answer, with drafts by `speculation` if given, by greedy sampling with a mask
    /// that allows only the answer's tokens.
    ///
    /// # Errors
    /// If a pass fails, or the answer contains a token that the model does not have or that ends a
    /// text.
    pub fn run(&self, speculation: Option<&Speculation>) -> Result<Replayed, Error> {
        let mut session = self.session.fork()?;
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })?;
        sampler.set_mask(Some(Box::new(Recorded::new(&self.answer))));
        let speculation = speculation.cloned();
        let start = Instant::now();
        let mut generation = session
            .generate(&[self.last], &mut sampler)?
            .max_tokens(self.answer.len());
        if let Some(speculation) = speculation {
            generation = generation.speculate(speculation);
        }
        for piece in generation.by_ref() {
            piece?;
        }
        let time = start.elapsed();
        let drafts = generation
            .finish()
            .map(|finish| finish.drafts)
            .unwrap_or_default();
        let n_tokens = generation.tokens().len();
        if let Some(&token) = self.answer.get(n_tokens) {
            return Err(SampleError::from(MaskError::Refused { token, n_tokens }).into());
        }
        Ok(Replayed {
            time,
            drafts,
            drafters: generation.drafters(),
        })
    }

    /// A drafter that knows the answer, and guesses each of its tokens right with probability
    /// `rate`.
    pub fn synthetic_drafter(&self, rate: f64) -> impl Drafter + 'static {
        let n_prompt = self.session.position() + 1;
        SyntheticDrafter {
            answer: Arc::clone(&self.answer),
            n_prompt,
            n_text: 0,
            rate,
            state: 1,
        }
    }
}

/// Allows the tokens of a recorded answer, one after the other. Forces none: they would be computed
/// in one pass.
#[derive(Clone, Debug)]
struct Recorded {
    answer: Arc<[u32]>,
    n: usize,
    mask: Vec<u32>,
}

impl Recorded {
    fn new(answer: &Arc<[u32]>) -> Recorded {
        let most = answer.iter().max().map_or(0, |&token| token as usize);
        Recorded {
            answer: Arc::clone(answer),
            n: 0,
            mask: vec![0; most / 32 + 1],
        }
    }
}

impl TokenMask for Recorded {
    fn mask(&mut self) -> Result<&[u32], MaskError> {
        self.mask.fill(0);
        let &token = self
            .answer
            .get(self.n)
            .ok_or(MaskError::NothingAllowed { n_tokens: self.n })?;
        self.mask[token as usize / 32] = 1 << (token % 32);
        Ok(&self.mask)
    }

    fn allows(&mut self, token: u32) -> Result<bool, MaskError> {
        Ok(self.answer.get(self.n) == Some(&token))
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        if !self.allows(token)? {
            return Err(MaskError::Refused {
                token,
                n_tokens: self.n,
            });
        }
        self.n += 1;
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), MaskError> {
        self.n = self.n.checked_sub(n).ok_or(MaskError::Rollback {
            n,
            n_tokens: self.n,
        })?;
        Ok(())
    }

    fn reset(&mut self) {
        self.n = 0;
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

/// See [`Replay::synthetic_drafter`].
#[derive(Clone, Debug)]
struct SyntheticDrafter {
    answer: Arc<[u32]>,
    /// Tokens of the prompt, and of the text so far.
    n_prompt: usize,
    n_text: usize,
    rate: f64,
    state: u64,
}

impl Drafter for SyntheticDrafter {
    fn name(&self) -> &'static str {
        "synthetic"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.n_text += tokens.len();
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        let Some(rest) = self
            .n_text
            .checked_sub(self.n_prompt)
            .and_then(|at| self.answer.get(at..))
        else {
            return;
        };
        draft.extend(rest.iter().take(n).map(|&token| {
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let is_right = ((self.state >> 11) as f64) < self.rate * (1u64 << 53) as f64;
            Draft {
                token: if is_right { token } else { token ^ 1 },
                confidence: 7,
            }
        }));
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}
