//! Text from a session: encode, prefill, then sample and decode until something ends it.

use super::Session;
use crate::error::{Error, SessionError};
use crate::sample::Sampler;
use crate::tokenizer::{TextStream, Tokenizer};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model ended its text.
    EndOfGeneration,
    /// A stop string appeared; it is not part of the text.
    StopString,
    /// The limit of [`Generation::max_tokens`] was reached.
    MaxTokens,
    /// The context is full; the session does not hold the last token.
    ContextFull,
}

/// Text as it is generated, piece by piece; each piece is whole UTF-8. Nothing follows an error.
///
/// Whenever it ends, or is dropped, the session holds the prompt and the tokens of the text that was handed out; the
/// last of them is computed by the next call. So the next [`Session::generate`] goes on from there:
///
/// ```
/// # fn main() -> Result<(), ruvllm::Error> {
/// # let model = ruvllm::Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// # let (mut session, mut sampler) = (model.session()?, ruvllm::Sampler::builder().temperature(0.0).build()?);
/// let begun: String = session.generate("Ownership is", &mut sampler)?.max_tokens(4).collect::<Result<_, _>>()?;
/// let more: String = session.generate(" and borrowing", &mut sampler)?.max_tokens(4).collect::<Result<_, _>>()?;
/// # let text = model.tokenizer().unwrap().decode_lossy(session.tokens(), false);
/// # assert_eq!(text.unwrap().trim_start(), format!("Ownership is{begun} and borrowing{more}"));
/// # Ok(()) }
/// ```
///
/// Three exceptions: a token that ends the text ([`StopReason::EndOfGeneration`]) has none and is not held, so that the
/// prompt of the next turn brings it; of a full context the last token is missing; and where a stop string begins
/// inside a token, that token is not held, and [`Generation::rest`] tells which text is missing.
#[derive(Debug)]
pub struct Generation<'s, 'm> {
    session: &'s mut Session<'m>,
    sampler: &'s mut Sampler,
    stream: TextStream<'m>,
    stop: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    max_tokens: usize,
    /// Position of the first token generated.
    start: usize,
    /// Tokens generated.
    tokens: Vec<u32>,
    /// Length of their text after each of them; nothing inside a character.
    ends: Vec<Option<usize>>,
    /// Length of the text so far, what is held back included.
    len: usize,
    rest: String,
    /// Sampled, not yet in the session.
    pending: Option<u32>,
    reason: Option<StopReason>,
    failed: bool,
}

impl<'m> Session<'m> {
    /// Continues `prompt`. Special tokens written in the prompt count as such; a beginning-of-text
    /// token is added where the model wants one and the session is empty.
    ///
    /// # Errors
    /// If the file has no tokenizer, or as [`Session::prefill`].
    pub fn generate<'s>(&'s mut self, prompt: &str, sampler: &'s mut Sampler) -> Result<Generation<'s, 'm>, Error> {
        let tokenizer = self.model().tokenizer().ok_or(SessionError::NoTokenizer)?;
        let tokens = match self.position() {
            0 => tokenizer.encode_prompt(prompt),
            _ => tokenizer.encode(prompt, false, true),
        };
        self.generate_from(&tokens, sampler)
    }

    /// Continues `tokens`, which are appended to the session as they are.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn generate_from<'s>(
        &'s mut self,
        tokens: &[u32],
        sampler: &'s mut Sampler,
    ) -> Result<Generation<'s, 'm>, Error> {
        let tokenizer = self.model().tokenizer().ok_or(SessionError::NoTokenizer)?;
        self.prefill(tokens)?;
        let mut generation = Generation {
            start: self.position(),
            session: self,
            sampler,
            stream: TextStream::new(tokenizer, false),
            stop: Vec::new(),
            held: String::new(),
            max_tokens: usize::MAX,
            tokens: Vec::new(),
            ends: Vec::new(),
            len: 0,
            rest: String::new(),
            pending: None,
            reason: None,
            failed: false,
        };
        generation.sample()?;
        Ok(generation)
    }
}

impl Generation<'_, '_> {
    /// Ends after `n` tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Self {
        self.max_tokens = n;
        self
    }

    /// Ends before any of these strings.
    #[must_use]
    pub fn stop<S: Into<String>>(mut self, stop: impl IntoIterator<Item = S>) -> Self {
        self.stop = stop.into_iter().map(Into::into).filter(|s: &String| !s.is_empty()).collect();
        self
    }

    /// Tokens generated so far, those of a stop string included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Why it ended, once it has; nothing if that was by an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.reason
    }

    /// After [`StopReason::StopString`], the end of the text that the session does not hold, because the stop string
    /// begins inside its token; mostly empty. A next prompt begins with it.
    pub fn rest(&self) -> &str {
        &self.rest
    }

    fn sample(&mut self) -> Result<(), Error> {
        // Embedding tables are padded; rows behind the vocabulary are no tokens.
        let n_vocab = self.session.model().tokenizer().map_or(usize::MAX, Tokenizer::n_vocab);
        let logits = &self.session.logits;
        let token = self.sampler.sample(&logits[..n_vocab.min(logits.len())], &self.session.tokens)?;
        self.pending = Some(token);
        Ok(())
    }

    /// The next token, after computing the last one.
    fn advance(&mut self) -> Result<Option<u32>, Error> {
        if self.pending.is_none() {
            if !self.session.ahead {
                self.reason = Some(StopReason::ContextFull);
                return Ok(None);
            }
            self.session.catch_up()?;
            self.sample()?;
        }
        let Some(token) = self.pending.take() else { return Ok(None) };
        let Some(tokenizer) = self.session.model().tokenizer() else { return Ok(None) };
        if tokenizer.is_eog(token) {
            self.reason = Some(StopReason::EndOfGeneration);
            return Ok(None);
        }
        self.tokens.push(token);
        self.session.push_ahead(token);
        Ok(Some(token))
    }

    /// Takes out of the session the tokens that are not part of the first `len` bytes of text.
    fn cut(&mut self, len: usize) {
        let kept = self.ends.iter().rposition(|end| end.is_some_and(|end| end <= len)).map_or(0, |last| last + 1);
        let end = kept.checked_sub(1).and_then(|last| self.ends[last]).unwrap_or(0);
        self.session.cut_answer(self.start + kept);
        if let Some(tokenizer) = self.session.model().tokenizer() {
            let mut stream = TextStream::new(tokenizer, false);
            self.tokens[kept..].iter().for_each(|&token| self.rest.push_str(stream.push(token).unwrap_or_default()));
        }
        self.rest.truncate(len - end);
    }

    /// Adds `text` to what is held back and releases what cannot be part of a stop string.
    fn release(&mut self, text: &str) -> String {
        self.held.push_str(text);
        if let Some(at) = self.stop.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.cut(self.len - self.held.len() + at);
            self.held.truncate(at);
            self.reason = Some(StopReason::StopString);
            return std::mem::take(&mut self.held);
        }
        let is_beginning = |from: &usize| self.stop.iter().any(|s| s.starts_with(&self.held[*from..]));
        let keep = (0..self.held.len()).filter(|&i| self.held.is_char_boundary(i)).find(is_beginning);
        let held = self.held.split_off(keep.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, held)
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.reason.is_none() && !self.failed {
            if self.tokens.len() >= self.max_tokens {
                self.reason = Some(StopReason::MaxTokens);
                break;
            }
            match self.advance() {
                Ok(Some(token)) => {
                    let text = match self.stream.push(token) {
                        Ok(text) => text.to_owned(),
                        Err(e) => {
                            self.failed = true;
                            return Some(Err(e.into()));
                        }
                    };
                    self.len += text.len();
                    self.ends.push(self.stream.is_whole().then_some(self.len));
                    let text = self.release(&text);
                    if !text.is_empty() {
                        return Some(Ok(text));
                    }
                }
                Ok(None) => break,
                Err(e) => {
                    self.failed = true;
                    return Some(Err(e));
                }
            }
        }
        if self.failed {
            return None;
        }
        // The end releases what was held back, unless a stop string ended it.
        let mut rest = std::mem::take(&mut self.held);
        if self.reason != Some(StopReason::StopString) {
            rest.push_str(self.stream.finish());
        }
        (!rest.is_empty()).then_some(Ok(rest))
    }
}
