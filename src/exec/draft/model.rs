//! Drafts by a smaller model of the same vocabulary.

use super::{Drafter, Guess, N_GRADES};
use crate::error::SessionError;
use crate::exec::hook::TokenKind;
use crate::exec::probe::NoProbe;
use crate::exec::{Engine, Session, SessionOptions};
use crate::model::Model;

/// Most tokens that are read as generated ones: with few of them that takes less time than a prompt's panels.
pub(super) const FEW: usize = 32;

/// Drafts, token by token, what a model thinks most probable. Its session follows the text: where a draft was rejected
/// it is rewound.
///
/// A text that its context does not hold, or that it cannot compute, gets no drafts.
#[derive(Debug)]
pub struct ModelDrafter {
    engine: Engine,
    options: SessionOptions,
    /// Made for the first draft; of a session that failed nothing is left.
    session: Option<Session>,
    has_failed: bool,
    text: Vec<u32>,
}

impl ModelDrafter {
    /// Drafts by the engine's model for `target`. Of `options` the session's are used; its context may be shorter.
    ///
    /// # Errors
    /// If the two models' vocabularies differ.
    pub fn new(engine: &Engine, target: &Model, options: &SessionOptions) -> Result<ModelDrafter, SessionError> {
        check(engine.model(), target)?;
        let options = options.clone();
        Ok(ModelDrafter { engine: engine.clone(), options, session: None, has_failed: false, text: Vec::new() })
    }

    fn try_draft(&mut self, n: usize, draft: &mut Vec<Guess>) -> Result<(), SessionError> {
        let session = match &mut self.session {
            Some(session) => session,
            none => none.insert(self.engine.session_with(&self.options)?),
        };
        if n == 0 || self.text.is_empty() || self.text.len() + n > session.n_ctx() {
            return Ok(());
        }
        let new = &self.text[session.keep(&self.text)..];
        let kind = if new.len() > FEW { TokenKind::Prompt } else { TokenKind::Generated };
        session.run(kind, new, new.len() - 1, &mut NoProbe, &mut |_, _| ())?;
        for i in 0..n {
            let guess = best(session.logits());
            draft.push(guess);
            if i + 1 < n {
                session.decode(guess.token)?;
            }
        }
        Ok(())
    }
}

/// Refuses a model whose tokens are not those of `target`.
fn check(model: &Model, target: &Model) -> Result<(), SessionError> {
    let (Some(own), Some(other)) = (model.tokenizer(), target.tokenizer()) else {
        return Err(SessionError::NoTokenizer);
    };
    let n = own.n_vocab().max(other.n_vocab()) as u32;
    let differs = |&token: &u32| own.token_text(token) != other.token_text(token);
    match (0..n).find(differs) {
        None => Ok(()),
        Some(token) => {
            let text = |text: Option<&[u8]>| text.map(|text| String::from_utf8_lossy(text).into_owned());
            let (found, expected) = (text(own.token_text(token)), text(other.token_text(token)));
            Err(SessionError::DraftVocabulary { token, found, expected })
        }
    }
}

/// The most probable token, and how probable it is: a grade for each eighth.
pub(super) fn best(logits: &[f32]) -> Guess {
    let better = |best: (usize, f32), (i, &logit): (usize, &f32)| if logit > best.1 { (i, logit) } else { best };
    let (token, max) = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), better);
    let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
    // Not a number where the logits are none: the last grade of those that are not sure.
    let p = 1.0 / sum;
    Guess { token: token as u32, grade: (p * N_GRADES as f32).min(N_GRADES as f32 - 1.0) as u8 }
}

impl Drafter for ModelDrafter {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Guess>) {
        if !self.has_failed && self.try_draft(n, draft).is_err() {
            self.has_failed = true;
            self.session = None;
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        let ModelDrafter { engine, options, text, .. } = self;
        let (engine, options, text) = (engine.clone(), options.clone(), text.clone());
        Box::new(ModelDrafter { engine, options, session: None, has_failed: self.has_failed, text })
    }
}
