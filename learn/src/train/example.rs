//! Examples to train on.

use crate::learn::LearnError;
use crate::train::Loss;
use ruvllm::Session;
use ruvllm::engine::AdapterId;
use ruvllm::kv::hash::mix;
use ruvllm::lora::Gradients;
use ruvllm::session::Task;

/// Most tokens of texts that share a pass: as many as fill the panels of products, and as a default
/// batch of a prompt has.
const PASS_ROWS: usize = 512;

/// A text to train on: its tokens, and which of them the model is to learn to predict; for a
/// preference, what is known of them besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    tokens: Vec<u32>,
    /// One entry per token; the first is never predicted.
    learnt: Vec<bool>,
    judgement: Judgement,
}

/// What is known of a completion besides its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It is to be imitated.
    Imitated,
    /// It was chosen, this one rejected.
    Chosen(Box<Example>),
    /// Somebody found it desirable, or did not.
    Labelled(bool),
}

impl Example {
    /// Tokens, with for each of them whether it is to be learnt; the first has nothing before it
    /// that could predict it.
    ///
    /// # Panics
    /// If there are not as many flags as tokens.
    pub fn new(tokens: Vec<u32>, mut learnt: Vec<bool>) -> Example {
        assert_eq!(tokens.len(), learnt.len(), "a flag per token");
        if let Some(first) = learnt.first_mut() {
            *first = false;
        }
        Example {
            tokens,
            learnt,
            judgement: Judgement::Imitated,
        }
    }

    /// A text of which every token is to be learnt.
    pub fn text(tokens: &[u32]) -> Example {
        Example::new(tokens.to_vec(), vec![true; tokens.len()])
    }

    /// A text cut into examples of at most `n` tokens. If it begins with `bos`, the token that texts of
    /// the model begin with, every example does; otherwise each begins with the last token of the one
    /// before. Either way every token but the first is learnt once.
    ///
    /// # Panics
    /// If `n` is less than 2.
    pub fn pieces(tokens: &[u32], bos: Option<u32>, n: usize) -> Vec<Example> {
        assert!(
            n >= 2,
            "an example needs a token to predict from and one to predict"
        );
        if let Some((first, text)) = tokens.split_first()
            && Some(*first) == bos
        {
            let pieces = text.chunks(n - 1);
            return pieces
                .map(|piece| Example::text(&[&[*first], piece].concat()))
                .collect();
        }
        let starts = (0..tokens.len().saturating_sub(1)).step_by(n - 1);
        starts
            .map(|start| Example::text(&tokens[start..(start + n).min(tokens.len())]))
            .collect()
    }

    /// A prompt that is given and a completion to learn.
    pub fn completion(prompt: &[u32], completion: &[u32]) -> Example {
        let learnt = (0..prompt.len() + completion.len())
            .map(|i| i >= prompt.len())
            .collect();
        Example::new([prompt, completion].concat(), learnt)
    }

    /// A pair for [`Loss::Dpo`]: two texts with the same prompt, of which one was chosen.
    #[must_use]
    pub fn preference(chosen: Example, rejected: Example) -> Example {
        Example {
            judgement: Judgement::Chosen(Box::new(rejected)),
            ..chosen
        }
    }

    /// A text for [`Loss::Kto`], whose completion is desirable or not.
    #[must_use]
    pub fn labelled(text: Example, is_desirable: bool) -> Example {
        Example {
            judgement: Judgement::Labelled(is_desirable),
            ..text
        }
    }

    /// The loss that it is an example for.
    pub fn loss(&self) -> Loss {
        match self.judgement {
            Judgement::Imitated => Loss::Sft,
            Judgement::Chosen(_) => Loss::Dpo,
            Judgement::Labelled(_) => Loss::Kto,
        }
    }

    pub(super) fn judgement(&self) -> &Judgement {
        &self.judgement
    }

    /// Its own tokens before the first one to be learnt, then those of `other` from there on; at
    /// most `n` in all.
    pub(super) fn with_completion_of(&self, other: &Example, n: usize) -> Example {
        let begin =
            |example: &Example| example.learnt.iter().take_while(|learnt| !**learnt).count();
        let (prompt, completion) = (begin(self), begin(other));
        let tokens = self.tokens[..prompt]
            .iter()
            .chain(&other.tokens[completion..])
            .take(n);
        let learnt = self.learnt[..prompt]
            .iter()
            .chain(&other.learnt[completion..])
            .take(n);
        Example::new(tokens.copied().collect(), learnt.copied().collect())
    }

    /// The tokens; of a preference those of the chosen text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether each token is to be learnt.
    pub fn learnt(&self) -> &[bool] {
        &self.learnt
    }

    /// `hash` with all that is in it.
    pub(super) fn hash(&self, hash: u64) -> u64 {
        let learnt: Vec<u8> = self.learnt.iter().map(|&learnt| u8::from(learnt)).collect();
        let hash = mix(mix(hash, bytemuck::cast_slice(&self.tokens)), &learnt);
        match &self.judgement {
            Judgement::Imitated => hash,
            Judgement::Chosen(rejected) => rejected.hash(hash),
            Judgement::Labelled(is_desirable) => mix(hash, &[u8::from(*is_desirable)]),
        }
    }

    /// For each of `texts`, its weight times the sum of the negative log-likelihoods of its tokens
    /// to be learnt, in nats; adds the gradient of all. Empties the session. Short texts share
    /// passes.
    pub(super) fn nll_gradients(
        session: &mut Session,
        id: AdapterId,
        texts: &[(&Example, f32)],
        gradients: &mut Gradients,
    ) -> Result<Vec<f64>, LearnError> {
        session.clear();
        let (mut losses, mut rest) = (Vec::with_capacity(texts.len()), texts);
        while !rest.is_empty() {
            let mut n_rows = 0;
            let fits = |(example, _): &&(&Example, f32)| {
                n_rows += example.tokens.len() - 1;
                n_rows <= PASS_ROWS
            };
            let (pass, tail) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = tail;
            let weights = pass.iter().map(|(example, weight)| {
                example.learnt[1..]
                    .iter()
                    .map(|&learnt| if learnt { *weight } else { 0.0 })
                    .collect()
            });
            let weights: Vec<Vec<f32>> = weights.collect();
            let tasks = pass.iter().zip(&weights).map(|((example, _), weights)| {
                let (tokens, targets) = (&example.tokens[..weights.len()], &example.tokens[1..]);
                Task {
                    tokens,
                    targets,
                    weights,
                }
            });
            losses.extend(session.training().nll_gradients(
                id,
                &tasks.collect::<Vec<_>>(),
                gradients,
            )?);
        }
        Ok(losses)
    }

    /// Number of tokens to be learnt.
    pub fn n_learnt(&self) -> usize {
        self.learnt.iter().filter(|learnt| **learnt).count()
    }
}
