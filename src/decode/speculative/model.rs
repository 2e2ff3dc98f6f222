//! Drafts by a smaller model of the same vocabulary.

use crate::compute::hook::TokenKind;
use crate::decode::speculative::{Draft, Drafter, N_CONFIDENCES};
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::SessionOptions;
use crate::engine::sequence::Sequence;
use crate::layers::draft::FEW;
use crate::model::Model;
use crate::tokenizer::Tokenizer;

/// Drafts, token by token, what a model thinks most probable. Its sequence follows the text: where
/// a draft was rejected it is rewound. Passes are computed for all texts that are drafted for
/// together.
///
/// A text that its context does not hold, or that it cannot compute, gets no drafts.
#[derive(Debug)]
pub struct ModelDrafter {
    engine: Engine,
    options: SessionOptions,
    text: Vec<u32>,
    /// Made for the first draft; of one that failed nothing is left.
    seq: Option<Sequence>,
    /// How many tokens of the text it holds at least.
    n_read: usize,
    /// What it guesses behind the text, once it holds that.
    guesses: Vec<Draft>,
    /// The last of them, which the next pass computes.
    last: [u32; 1],
    has_failed: bool,
}

impl ModelDrafter {
    /// Drafts by the engine's model for `target`. Of `options` the session's are used; its context
    /// may be shorter.
    ///
    /// # Errors
    /// If the two models' vocabularies differ.
    pub fn new(
        engine: &Engine,
        target: &Model,
        options: &SessionOptions,
    ) -> Result<ModelDrafter, SessionError> {
        check(engine.model(), target)?;
        Ok(ModelDrafter::on(engine.clone(), options.clone()))
    }

    fn on(engine: Engine, options: SessionOptions) -> ModelDrafter {
        ModelDrafter {
            engine,
            options,
            text: Vec::new(),
            seq: None,
            n_read: 0,
            guesses: Vec::new(),
            last: [0],
            has_failed: false,
        }
    }

    fn fail(&mut self) {
        (self.has_failed, self.seq) = (true, None);
        self.guesses.clear();
    }
}

/// Refuses a model whose tokens are not those of `target`.
fn check(model: &Model, target: &Model) -> Result<(), SessionError> {
    match (model.tokenizer(), target.tokenizer()) {
        (Some(own), Some(other)) => check_vocabulary(own, other),
        _ => Err(SessionError::NoTokenizer),
    }
}

/// Refuses a vocabulary whose tokens are not the `other`'s.
pub(crate) fn check_vocabulary(own: &Tokenizer, other: &Tokenizer) -> Result<(), SessionError> {
    let n = own.n_vocab().max(other.n_vocab()) as u32;
    let differs = |&token: &u32| own.token_text(token) != other.token_text(token);
    match (0..n).find(differs) {
        None => Ok(()),
        Some(token) => {
            let text =
                |text: Option<&[u8]>| text.map(|text| String::from_utf8_lossy(text).into_owned());
            let (found, expected) = (text(own.token_text(token)), text(other.token_text(token)));
            Err(SessionError::DraftVocabulary {
                token,
                found,
                expected,
            })
        }
    }
}

/// The most probable token, and how probable it is: a grade for each eighth.
pub(crate) fn best(logits: &[f32]) -> Draft {
    let better = |best: (usize, f32), (i, &logit): (usize, &f32)| {
        if logit > best.1 { (i, logit) } else { best }
    };
    let (token, max) = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), better);
    let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
    // Not a number where the logits are none: the last grade of those that are not sure.
    let p = 1.0 / sum;
    Draft {
        token: token as u32,
        confidence: (p * N_CONFIDENCES as f32).min(N_CONFIDENCES as f32 - 1.0) as u8,
    }
}

impl Drafter for ModelDrafter {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
        self.guesses.clear();
    }

    fn engine(&self) -> Option<&Engine> {
        Some(&self.engine)
    }

    fn next_pass<'a>(&'a mut self, n: usize, _: &'a [f32]) -> Option<Slot<'a>> {
        if self.has_failed || self.text.is_empty() || self.guesses.len() >= n {
            return None;
        }
        if self.seq.is_none() {
            match self.engine.sequence(&self.options) {
                Ok(seq) => self.seq = Some(seq),
                Err(_) => self.fail(),
            }
        }
        let seq = self
            .seq
            .as_mut()
            .filter(|seq| self.text.len() + n <= seq.n_ctx())?;
        if let Some(guess) = self.guesses.last() {
            self.last = [guess.token];
            return Some(Slot::new(seq, &self.last, TokenKind::Generated));
        }
        // Guesses that came true stay; the last token is computed again, for its logits.
        let n_same = seq.tokens()[self.n_read..]
            .iter()
            .zip(&self.text[self.n_read..])
            .take_while(|(a, b)| a == b)
            .count();
        self.n_read = (self.n_read + n_same).min(self.text.len() - 1);
        seq.truncate(self.n_read);
        let new = &self.text[self.n_read..];
        let kind = if new.len() > FEW {
            TokenKind::Prompt
        } else {
            TokenKind::Generated
        };
        let batch = &new[..new.len().min(self.options.n_batch)];
        Some(
            Slot::new(seq, batch, kind)
                .outputs_from(batch.len() - usize::from(batch.len() == new.len())),
        )
    }

    fn end_pass(&mut self, rows: Option<(&[f32], &[f32])>) {
        let (Some((logits, _)), Some(seq)) = (rows, &mut self.seq) else {
            return self.fail();
        };
        if self.guesses.is_empty() {
            self.n_read = seq.position();
            // To which it goes back.
            seq.kv.checkpoint();
        }
        if !logits.is_empty() {
            self.guesses.push(best(logits));
        }
    }

    fn release(&mut self) {
        self.seq = None;
        self.n_read = 0;
        self.guesses.clear();
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        draft.extend(self.guesses.drain(..).take(n));
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// With a sequence of its own.
impl Clone for ModelDrafter {
    fn clone(&self) -> ModelDrafter {
        let mut clone = ModelDrafter::on(self.engine.clone(), self.options.clone());
        (clone.text, clone.has_failed) = (self.text.clone(), self.has_failed);
        clone
    }
}
