//! Prompts of texts and images.

use crate::compute::hook::TokenKind;
use crate::compute::probe::NoCallback;
use crate::engine::{CancelToken, Engine, SessionError};
use crate::layers::spans::Span;
use crate::session::session::Session;
use crate::vision::{Encoded, Image, ImageOptions, LayoutPart, Projector, VisionError};
use std::sync::Arc;

/// A part of a prompt.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Part<'a> {
    /// Text, whose special tokens are read as such: a rendered chat template.
    Text(&'a str),
    /// Text of a user: special tokens written in it are plain text.
    Plain(&'a str),
    /// Tokens.
    Tokens(&'a [u32]),
    /// An image, with what the model's authors put around it.
    Image(&'a Image),
}

/// Why a prompt with images was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// A pass failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// An image was refused.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// Nothing reads images.
    #[error(
        "the session has no projector for images; give it one with session.images().set_projector"
    )]
    NoProjector,
    /// The model's file has no vocabulary.
    #[error("the model has no tokenizer: give tokens, not texts")]
    NoTokenizer,
}

/// A prompt in tokens, with the embeddings of its images.
#[derive(Clone, Debug, Default)]
pub struct EncodedPrompt {
    tokens: Vec<u32>,
    /// Positions count from the start of the prompt.
    spans: Vec<Span>,
}

impl EncodedPrompt {
    /// The tokens; placeholders stand where embeddings are.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adjacent positions that hold embeddings of one image.
    pub fn images(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.spans
            .iter()
            .map(|span| span.start..span.start + span.n)
    }

    /// Number of tokens behind the last image.
    pub(crate) fn n_after(&self) -> usize {
        let end = self.images().last().map_or(0, |image| image.end);
        self.tokens.len() - end
    }

    /// What ends with the last image, and the tokens behind it.
    pub fn split(mut self) -> (EncodedPrompt, Vec<u32>) {
        let n_after = self.n_after();
        let after = self.tokens.split_off(self.tokens.len() - n_after);
        (self, after)
    }

    /// Positions of time, row and column of each token with M-RoPE, and three equal ones else.
    pub fn positions(&self) -> Vec<[usize; 3]> {
        let mut spans = crate::layers::spans::Spans::default();
        self.spans.iter().for_each(|span| spans.push(span.clone()));
        (0..self.tokens.len()).map(|i| spans.turns(i)).collect()
    }
}

impl Engine {
    /// Encodes an image, unless the projector has it in its cache.
    ///
    /// # Errors
    /// If the image is refused, the call is cancelled, or there is not enough memory.
    pub fn encode_image(
        &self,
        projector: &Projector,
        image: &Image,
        options: ImageOptions,
        cancel: &CancelToken,
    ) -> Result<Arc<Encoded>, PartsError> {
        if let Some(encoded) = projector.cached(image, options) {
            return Ok(encoded);
        }
        let encoded = self.enter(cancel, |threads, arena| {
            projector.encode(threads, arena, image, options)
        })?;
        Ok(encoded?)
    }
}

/// Prompts of texts and images of a session.
#[derive(Debug)]
pub struct SessionImages<'s>(&'s mut Session);

impl Session {
    /// Prompts of texts and images.
    pub fn images(&mut self) -> SessionImages<'_> {
        SessionImages(self)
    }
}

impl SessionImages<'_> {
    /// Sets what encodes images, and bounds of their tokens.
    ///
    /// # Errors
    /// If it is for another model.
    pub fn set_projector(
        &mut self,
        projector: &Projector,
        options: ImageOptions,
    ) -> Result<(), VisionError> {
        if !projector.is_for(self.0.model().hparams()) {
            let what = format!("it is not for {}", self.0.model().hparams().arch);
            return Err(VisionError::OtherModel { what });
        }
        self.0.projector = Some((projector.clone(), options));
        Ok(())
    }

    /// What encodes images.
    pub fn projector(&self) -> Option<&Projector> {
        self.0.projector.as_ref().map(|(projector, _)| projector)
    }

    /// Turns parts into a prompt that continues this session: encodes images that are not in the
    /// projector's cache.
    ///
    /// # Errors
    /// If the session has no projector, an image is refused, or there is no memory to encode it.
    pub fn encode(&self, parts: &[Part<'_>]) -> Result<EncodedPrompt, PartsError> {
        let mut writer = PromptWriter {
            session: self.0,
            prompt: EncodedPrompt::default(),
            text: Some(String::new()).filter(|_| self.0.position() == 0),
        };
        let mut n_images = self.0.seq.spans.n_images();
        for part in parts {
            match *part {
                Part::Text(text) => writer.text.get_or_insert_default().push_str(text),
                Part::Plain(text) => {
                    writer.end_text()?;
                    let tokenizer = self.0.model().tokenizer().ok_or(PartsError::NoTokenizer)?;
                    let tokens = tokenizer.encode_inside(text.as_bytes());
                    writer.prompt.tokens.extend(tokens);
                }
                Part::Tokens(tokens) => {
                    writer.end_text()?;
                    writer.prompt.tokens.extend_from_slice(tokens);
                }
                Part::Image(image) => {
                    writer.image(image, n_images)?;
                    n_images += 1;
                }
            }
        }
        writer.end_text()?;
        Ok(writer.prompt)
    }

    /// Appends texts and images; [`Session::logits`] are then those after the last token. Images
    /// that were encoded before are not encoded again.
    ///
    /// # Errors
    /// As [`encode`](Self::encode) and [`Session::prefill`].
    pub fn prefill(&mut self, parts: &[Part<'_>]) -> Result<(), PartsError> {
        self.0.catch_up()?;
        let prompt = self.encode(parts)?;
        let last = prompt.tokens.len().saturating_sub(1);
        self.prefill_encoded(&prompt, last, |_, _| ())
    }

    /// Appends a prompt, and calls `each` with the logits after each of its tokens from `first` on,
    /// as `(index, logits)`.
    ///
    /// # Errors
    /// As [`Session::prefill`]. The prompt has to have been encoded at this position.
    pub fn prefill_encoded(
        &mut self,
        prompt: &EncodedPrompt,
        first: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), PartsError> {
        self.0.catch_up()?;
        let EncodedPrompt { tokens, spans } = prompt;
        let Some(first_image) = spans.first().map(|span| span.start) else {
            return Ok(self.0.prefill_each(tokens, first, each)?);
        };
        if self.0.seq.hook.is_some() {
            return Err(SessionError::HasImages {
                what: "learning from a text while it is read",
                instead: "; detach the learner",
            }
            .into());
        }
        self.0.engine.cpu_only("images")?;
        self.0.engine.check(&self.0.seq, tokens)?;
        let reusable = first_image.min(first.saturating_add(1));
        let n = if reusable > 1 && self.0.position() == 0 {
            self.0.cache().reuse(&tokens[..reusable])?.total()
        } else {
            0
        };
        let begin = self.0.position() - n;
        for span in spans {
            let mut span = span.clone();
            span.start += begin;
            self.0.seq.spans.push(span);
        }
        let outcome = self.0.run(
            TokenKind::Prompt,
            &tokens[n..],
            first.saturating_sub(n),
            &mut NoCallback,
            &mut |i, logits| each(n + i, logits),
        );
        if outcome.is_err() {
            // What is left is whole: no part of an image, and no span without its tokens.
            let end = self.0.position();
            let whole = self.0.seq.spans.whole_until(end);
            self.0.seq.truncate(whole);
            self.0.forget_outputs();
        }
        Ok(outcome?)
    }
}

/// Parts on the way to tokens.
struct PromptWriter<'s> {
    session: &'s Session,
    prompt: EncodedPrompt,
    /// Text that is not tokens yet; that of an empty session begins with what a text begins with.
    text: Option<String>,
}

impl PromptWriter<'_> {
    fn end_text(&mut self) -> Result<(), PartsError> {
        let Some(text) = self.text.take() else {
            return Ok(());
        };
        let Some(tokenizer) = self.session.model().tokenizer() else {
            return if text.is_empty() {
                Ok(())
            } else {
                Err(PartsError::NoTokenizer)
            };
        };
        let is_first = self.prompt.tokens.is_empty() && self.session.position() == 0;
        let last = self.prompt.tokens.last().or(self.session.tokens().last());
        let tokens = match (is_first, last) {
            (false, Some(&last)) => tokenizer.encode_continuation(&text, last),
            _ => tokenizer.encode_prompt(&text),
        };
        self.prompt.tokens.extend(tokens);
        Ok(())
    }

    fn image(&mut self, image: &Image, index: usize) -> Result<(), PartsError> {
        let session = self.session;
        let (projector, options) = session.projector.as_ref().ok_or(PartsError::NoProjector)?;
        let cancel = session.cancel_token();
        let encoded = session
            .engine()
            .encode_image(projector, image, *options, &cancel)?;
        let mut row = 0;
        for piece in projector.pieces(&encoded, index) {
            match piece {
                LayoutPart::Text(text) => self.text.get_or_insert_default().push_str(&text),
                LayoutPart::Embeddings(n) => {
                    self.end_text()?;
                    let start = self.prompt.tokens.len();
                    let span = projector.span(&encoded, row..row + n, start);
                    self.prompt.spans.push(span);
                    row += n;
                    let places = std::iter::repeat_n(projector.placeholder(), n);
                    self.prompt.tokens.extend(places);
                }
            }
        }
        Ok(())
    }
}
