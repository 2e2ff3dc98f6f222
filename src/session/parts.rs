//! Prompts of texts and images.

use crate::compute::hook::{Cut, TokenKind};
use crate::compute::probe::NoCallback;
use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::layers::spans::{Span, Spans};
use crate::session::session::Session;
use crate::vision::{Encoded, Image, ImageOptions, LayoutPart, Projector, VisionError};
use std::ops::Range;
use std::sync::Arc;

/// A part of a prompt.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Part<'a> {
    /// Text, whose special tokens are read as such: a rendered chat template.
    Text(&'a str),
    /// The same, but that special tokens in ranges of its bytes, in order, are plain text: what
    /// users wrote.
    Guarded(&'a str, &'a [Range<usize>]),
    /// Text of a user: special tokens written in it are plain text.
    Plain(&'a str),
    /// Tokens.
    Tokens(&'a [u32]),
    /// An image, with what the model's authors put around it.
    Image(&'a Image),
    /// An image with bounds of its own.
    ImageWith(&'a Image, ImageOptions),
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
    spans: Spans,
}

/// A prompt without images.
impl From<Vec<u32>> for EncodedPrompt {
    fn from(tokens: Vec<u32>) -> EncodedPrompt {
        EncodedPrompt {
            tokens,
            spans: Spans::default(),
        }
    }
}

impl EncodedPrompt {
    /// The tokens; placeholders stand where embeddings are.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adjacent positions that hold embeddings of one image.
    pub fn images(&self) -> impl Iterator<Item = Range<usize>> {
        self.spans
            .iter()
            .map(|span| span.start..span.start + span.n)
    }

    /// Whether there are images.
    pub fn has_images(&self) -> bool {
        !self.spans.is_empty()
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

    /// What is left behind the first `n` tokens, which end with no part of an image.
    #[must_use]
    pub fn skip(mut self, n: usize) -> EncodedPrompt {
        let moved = |span: &Span| Span {
            start: span.start - n,
            ..span.clone()
        };
        EncodedPrompt {
            spans: self
                .spans
                .iter()
                .filter(|span| span.start >= n)
                .map(moved)
                .collect(),
            tokens: self.tokens.split_off(n.min(self.tokens.len())),
        }
    }

    /// Positions of time, row and column of each token with M-RoPE, and three equal ones else.
    pub fn positions(&self) -> Vec<[usize; 3]> {
        (0..self.tokens.len())
            .map(|i| self.spans.turns(i))
            .collect()
    }

    /// Tokens and images, for a request of a scheduler.
    pub(crate) fn into_parts(self) -> (Vec<u32>, Spans) {
        (self.tokens, self.spans)
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

    /// Turns parts into a prompt that begins a text, as [`SessionImages::encode`] does in an empty
    /// session: for requests of a scheduler.
    ///
    /// # Errors
    /// As [`SessionImages::encode`].
    pub fn encode_parts(
        &self,
        (projector, options): (&Projector, ImageOptions),
        parts: &[Part<'_>],
        cancel: &CancelToken,
    ) -> Result<EncodedPrompt, PartsError> {
        let encoder = Encoder {
            engine: self,
            projector: Some((projector, options)),
            cancel,
            counts: false,
            room: None,
        };
        PromptWriter::begin(encoder, None, 0).write(parts)
    }

    /// Number of tokens of such a prompt. Encodes no image.
    ///
    /// # Errors
    /// As [`SessionImages::encode`].
    pub fn count_parts(
        &self,
        (projector, options): (&Projector, ImageOptions),
        parts: &[Part<'_>],
    ) -> Result<usize, PartsError> {
        let encoder = Encoder {
            engine: self,
            projector: Some((projector, options)),
            cancel: &CancelToken::default(),
            counts: true,
            room: None,
        };
        let prompt = PromptWriter::begin(encoder, None, 0).write(parts)?;
        Ok(prompt.tokens.len())
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
        let session = &*self.0;
        let encoder = Encoder {
            engine: session.engine(),
            projector: session
                .projector
                .as_ref()
                .map(|(of, options)| (of, *options)),
            cancel: &session.cancel_token(),
            counts: false,
            room: Some((session.seq.n_ctx(), session.position())),
        };
        let (last, n_images) = (session.tokens().last(), session.seq.spans.n_images());
        PromptWriter::begin(encoder, last.copied(), n_images).write(parts)
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
        if spans.is_empty() {
            return Ok(self.0.hooks().prefill_each(tokens, first, each)?);
        }
        self.0.engine.cpu_only("images")?;
        if spans.width() != Some(self.0.model().hparams().n_embd) {
            return Err(SessionError::OtherModel.into());
        }
        let begin = self.0.position();
        for span in spans.iter() {
            let mut span = span.clone();
            span.start += begin;
            self.0.seq.spans.push(span);
        }
        let reused = self.0.engine.check(&self.0.seq, tokens).and_then(|()| {
            let reusable = tokens.len().min(first.saturating_add(1));
            match begin {
                0 => Ok(self.0.cache().reuse(&tokens[..reusable])?.total()),
                _ => Ok(0),
            }
        });
        let n = match reused {
            Ok(n) => n,
            Err(error) => {
                self.0.seq.spans.truncate(begin);
                return Err(error.into());
            }
        };
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

    /// Keeps what the session has in common with the beginning of a prompt, images included, and
    /// drops the rest, as [`SessionCache::keep`](crate::session::SessionCache::keep) does for tokens; returns the number of tokens that are
    /// kept. [`EncodedPrompt::skip`] makes what is to be appended then.
    pub fn keep(&mut self, prompt: &EncodedPrompt) -> usize {
        let session = &mut *self.0;
        let spans = &session.seq.spans;
        let same = session
            .tokens()
            .iter()
            .zip(&prompt.tokens)
            .enumerate()
            .take_while(|&(i, (a, b))| a == b && spans.key(i) == prompt.spans.key(i))
            .count();
        let kept = same.min(prompt.tokens.len().saturating_sub(1));
        // No part of an image, of either.
        let kept = spans.whole_until(kept).min(prompt.spans.whole_until(kept));
        session.cut(kept, Cut::Rewound);
        kept
    }
}

/// What turns the images of parts into embeddings.
struct Encoder<'e> {
    engine: &'e Engine,
    projector: Option<(&'e Projector, ImageOptions)>,
    cancel: &'e CancelToken,
    /// Whether only their number is wanted.
    counts: bool,
    /// Size of the context, and tokens in it: no image is encoded behind its end.
    room: Option<(usize, usize)>,
}

/// Text that is not tokens yet, and the ranges of it whose special tokens are plain text.
#[derive(Default)]
struct PendingText {
    text: String,
    plain: Vec<Range<usize>>,
}

impl PendingText {
    fn push(&mut self, text: &str, plain: &[Range<usize>]) {
        let start = self.text.len();
        let moved = plain
            .iter()
            .map(|range| start + range.start..start + range.end);
        self.plain.extend(moved);
        self.text.push_str(text);
    }
}

/// Parts on the way to tokens.
struct PromptWriter<'e> {
    encoder: Encoder<'e>,
    /// The last token before the prompt.
    last: Option<u32>,
    n_images: usize,
    prompt: EncodedPrompt,
    /// That of an empty session begins with what a text begins with.
    text: Option<PendingText>,
}

impl<'e> PromptWriter<'e> {
    /// A prompt behind `last`, in a text that has so many images.
    fn begin(encoder: Encoder<'e>, last: Option<u32>, n_images: usize) -> PromptWriter<'e> {
        PromptWriter {
            encoder,
            last,
            n_images,
            prompt: EncodedPrompt::default(),
            text: last.is_none().then(PendingText::default),
        }
    }

    fn write(mut self, parts: &[Part<'_>]) -> Result<EncodedPrompt, PartsError> {
        for part in parts {
            match *part {
                Part::Text(text) => self.text.get_or_insert_default().push(text, &[]),
                Part::Guarded(text, plain) => {
                    self.text.get_or_insert_default().push(text, plain);
                }
                Part::Plain(text) => {
                    self.end_text()?;
                    let tokenizer = self.encoder.engine.model().tokenizer();
                    let tokenizer = tokenizer.ok_or(PartsError::NoTokenizer)?;
                    let tokens = tokenizer.encode_inside(text.as_bytes());
                    self.prompt.tokens.extend(tokens);
                }
                Part::Tokens(tokens) => {
                    self.end_text()?;
                    self.prompt.tokens.extend_from_slice(tokens);
                }
                Part::Image(image) => self.image(image, None)?,
                Part::ImageWith(image, options) => self.image(image, Some(options))?,
            }
        }
        self.end_text()?;
        Ok(self.prompt)
    }

    fn end_text(&mut self) -> Result<(), PartsError> {
        let Some(PendingText { text, plain }) = self.text.take() else {
            return Ok(());
        };
        let Some(tokenizer) = self.encoder.engine.model().tokenizer() else {
            return if text.is_empty() {
                Ok(())
            } else {
                Err(PartsError::NoTokenizer)
            };
        };
        let tokens = match self.prompt.tokens.last().copied().or(self.last) {
            Some(last) => tokenizer.encode_continuation_but(&text, &plain, last),
            None => tokenizer.encode_prompt_but(&text, &plain),
        };
        self.prompt.tokens.extend(tokens);
        Ok(())
    }

    fn image(&mut self, image: &Image, options: Option<ImageOptions>) -> Result<(), PartsError> {
        let Encoder {
            engine,
            projector,
            cancel,
            counts,
            room,
        } = self.encoder;
        let (projector, usual) = projector.ok_or(PartsError::NoProjector)?;
        let options = options.unwrap_or(usual);
        let index = self.n_images;
        self.n_images += 1;
        let encoded = match counts {
            true => None,
            false => Some(engine.encode_image(projector, image, options, cancel)?),
        };
        let pieces = match &encoded {
            Some(encoded) => projector.pieces(encoded, index),
            None => projector.pieces_of(image, options, index)?,
        };
        let mut row = 0;
        for piece in pieces {
            match piece {
                LayoutPart::Text(text) => self.text.get_or_insert_default().push(&text, &[]),
                LayoutPart::Embeddings(n) => {
                    self.end_text()?;
                    let start = self.prompt.tokens.len();
                    let span = |of: &Arc<Encoded>| projector.span(of, row..row + n, start);
                    encoded
                        .iter()
                        .for_each(|of| self.prompt.spans.push(span(of)));
                    row += n;
                    let places = std::iter::repeat_n(projector.placeholder(), n);
                    self.prompt.tokens.extend(places);
                }
            }
        }
        let n_new = self.prompt.tokens.len();
        match room {
            Some((n_ctx, n_past)) if n_past + n_new > n_ctx => {
                let full = SessionError::ContextFull {
                    n_ctx,
                    n_past,
                    n_new,
                };
                Err(full.into())
            }
            _ => Ok(()),
        }
    }
}
