//! A grammar that holds after the reasoning that a prompt has begun.

use crate::chat::tools::{ToolFormat, ends_in_reasoning};
use crate::grammar::TokenTrie;
use crate::sample::{MaskError, TokenMask};
use std::sync::Arc;

/// Maximum bytes of white space after reasoning.
const MAX_WHITE: usize = 20;

/// A [`TokenMask`] that leaves reasoning free and applies another mask after it. Reasoning cannot
/// end the answer, and is closed after a number of tokens, so that room for the answer is left.
#[derive(Clone, Debug)]
pub struct AfterReasoning {
    shared: Arc<Shared>,
    inner: Box<dyn TokenMask>,
    phase: Phase,
    /// All accepted tokens.
    tokens: Vec<u32>,
    words: Vec<u32>,
}

#[derive(Debug)]
struct Shared {
    trie: TokenTrie,
    close: &'static str,
    /// Tokens that extend beyond the end of reasoning.
    overrun: Vec<u32>,
    /// Tokens of white space alone.
    white: Vec<u32>,
    /// Tokens that end reasoning, forced when the limit is reached.
    closing: Vec<u32>,
    max_reasoning: usize,
}

#[derive(Clone, Debug)]
enum Phase {
    /// Reasoning: its last bytes, and its tokens so far.
    Reasoning { tail: Vec<u8>, n_tokens: usize },
    /// Its forced end; `n_tokens` of it are written.
    Closing { n_tokens: usize },
    /// Behind it: bytes of white space.
    Between { n_white: usize },
    /// Text of the other mask; `n_tokens` were accepted one by one.
    Text { n_tokens: usize },
}

impl AfterReasoning {
    /// `mask` for the answer to `prompt`, after the reasoning that this may have begun, of at most
    /// `max_reasoning` tokens.
    pub fn wrap(
        mask: Box<dyn TokenMask>,
        trie: &TokenTrie,
        format: ToolFormat,
        prompt: &str,
        max_reasoning: usize,
    ) -> Box<dyn TokenMask> {
        let reasoning = format.0.reasoning;
        if !ends_in_reasoning(prompt, reasoning) {
            return mask;
        }
        let close = reasoning.1.as_bytes();
        let extends = |text: &[u8]| {
            let completes =
                |n: usize| text.len() > n && text.starts_with(&close[close.len() - n..]);
            (1..close.len()).any(completes)
                || find(text, close).is_some_and(|at| at + close.len() < text.len())
        };
        let ids = 0..trie.n_vocab() as u32;
        let is_white = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_whitespace);
        let shared = Shared {
            close: reasoning.1,
            overrun: ids.clone().filter(|&id| extends(trie.text(id))).collect(),
            white: ids.filter(|&id| is_white(trie.text(id))).collect(),
            closing: match trie.special(reasoning.1) {
                Some(id) => vec![id],
                None => trie.cut(close),
            },
            max_reasoning,
            trie: trie.clone(),
        };
        Box::new(Self {
            shared: Arc::new(shared),
            inner: mask,
            phase: Phase::START,
            tokens: Vec::new(),
            words: Vec::new(),
        })
    }

    /// The phase after `token`, and the tokens of its text that are the other mask's; `None` if it
    /// is forbidden. In [`Phase::Text`] the other mask decides.
    fn next(&self, token: u32) -> Option<(Phase, Vec<u32>)> {
        let shared = &*self.shared;
        let text = shared.trie.text(token);
        let (text, n_white) = match &self.phase {
            Phase::Closing { n_tokens } => {
                if shared.closing.get(*n_tokens) != Some(&token) {
                    return None;
                }
                let n_tokens = n_tokens + 1;
                let phase = if n_tokens == shared.closing.len() {
                    Phase::Between { n_white: 0 }
                } else {
                    Phase::Closing { n_tokens }
                };
                return Some((phase, Vec::new()));
            }
            Phase::Reasoning { tail, n_tokens } => {
                if shared.trie.is_eog(token) {
                    return None;
                }
                let mut tail = [&tail[..], text].concat();
                let close = shared.close.as_bytes();
                let Some(at) = find(&tail, close) else {
                    let kept = tail.len() - tail.len().min(close.len() - 1);
                    tail.drain(..kept);
                    let n_tokens = n_tokens + 1;
                    let phase = if n_tokens < shared.max_reasoning {
                        Phase::Reasoning { tail, n_tokens }
                    } else {
                        Phase::Closing { n_tokens: 0 }
                    };
                    return Some((phase, Vec::new()));
                };
                (tail.split_off(at + close.len()), 0)
            }
            Phase::Between { .. } if text.is_empty() && !shared.trie.is_eog(token) => return None,
            Phase::Between { n_white } => (text.to_vec(), *n_white),
            Phase::Text { .. } => return None,
        };
        let more = text.iter().take_while(|b| b.is_ascii_whitespace()).count();
        if more == text.len() && !shared.trie.is_eog(token) {
            let n_white = n_white + more;
            return (n_white <= MAX_WHITE).then_some((Phase::Between { n_white }, Vec::new()));
        }
        let tokens = match (&self.phase, more) {
            // The token itself, which may be special.
            (Phase::Between { .. }, 0) => vec![token],
            // White space is a token by itself, so that few tokens have to be tried for a mask.
            (Phase::Between { .. }, _) => return None,
            _ => shared.trie.cut(&text[more..]),
        };
        Some((Phase::Text { n_tokens: 0 }, tokens))
    }

    /// Whether the other mask takes these tokens at its start.
    fn takes(&mut self, tokens: &[u32]) -> bool {
        let taken = tokens.iter().all(|&token| self.inner.accept(token).is_ok());
        self.inner.reset();
        taken
    }
}

impl Phase {
    const START: Phase = Phase::Reasoning {
        tail: Vec::new(),
        n_tokens: 0,
    };
}

/// The first position of `text` in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

impl TokenMask for AfterReasoning {
    fn mask(&mut self) -> Result<&[u32], MaskError> {
        if matches!(self.phase, Phase::Text { .. }) {
            return self.inner.mask();
        }
        let shared = Arc::clone(&self.shared);
        let n_words = shared.trie.n_vocab().div_ceil(32);
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        let set = |words: &mut [u32], id: u32, allowed: bool| {
            let bit = 1 << (id % 32);
            let word = &mut words[id as usize / 32];
            *word = if allowed { *word | bit } else { *word & !bit };
        };
        match self.phase {
            Phase::Between { .. } => {
                words.extend_from_slice(self.inner.mask()?);
                words.resize(n_words, 0);
                for &id in &shared.white {
                    let allowed = self.next(id).is_some();
                    set(&mut words, id, allowed);
                }
            }
            Phase::Closing { n_tokens } => {
                words.resize(n_words, 0);
                set(&mut words, shared.closing[n_tokens], true);
            }
            _ => {
                words.resize(n_words, u32::MAX);
                for &id in &shared.overrun {
                    let allowed = self.allows(id)?;
                    set(&mut words, id, allowed);
                }
                shared
                    .trie
                    .eog()
                    .iter()
                    .for_each(|&id| set(&mut words, id, false));
            }
        }
        self.words = words;
        Ok(&self.words)
    }

    fn allows(&mut self, token: u32) -> Result<bool, MaskError> {
        if matches!(self.phase, Phase::Text { .. }) {
            return self.inner.allows(token);
        }
        if token as usize >= self.shared.trie.n_vocab() {
            return Ok(false);
        }
        Ok(self
            .next(token)
            .is_some_and(|(_, tokens)| self.takes(&tokens)))
    }

    fn forced(&mut self, encode: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        match self.phase {
            Phase::Text { .. } => self.inner.forced(encode),
            Phase::Closing { n_tokens } => self.shared.closing[n_tokens..].to_vec(),
            _ => Vec::new(),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        if let Phase::Text { n_tokens } = &mut self.phase {
            self.inner.accept(token)?;
            *n_tokens += 1;
        } else {
            let refused = MaskError::Refused {
                token,
                n_tokens: self.tokens.len(),
            };
            if !self.allows(token)? {
                return Err(refused);
            }
            let (phase, tokens) = self.next(token).ok_or(refused)?;
            tokens
                .iter()
                .try_for_each(|&token| self.inner.accept(token))?;
            self.phase = phase;
        }
        self.tokens.push(token);
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), MaskError> {
        let n_accepted = self.tokens.len();
        let kept = n_accepted.checked_sub(n).ok_or(MaskError::Rollback {
            n,
            n_tokens: n_accepted,
        })?;
        match &mut self.phase {
            Phase::Text { n_tokens } if *n_tokens >= n => {
                self.inner.rollback(n)?;
                *n_tokens -= n;
                self.tokens.truncate(kept);
                Ok(())
            }
            // It crosses a boundary: starts again from the beginning.
            _ => {
                let tokens = std::mem::take(&mut self.tokens);
                self.reset();
                tokens[..kept]
                    .iter()
                    .try_for_each(|&token| self.accept(token))
            }
        }
    }

    fn reset(&mut self) {
        self.inner.reset();
        self.phase = Phase::START;
        self.tokens.clear();
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}
