//! What a server reads images with.

use super::args::AppArgs;
use super::http::error::ApiError;
use super::http::images::ImageSources;
use super::http::remote::ImageHosts;
use crate::flags::ModelArgs;
use crate::flags::template::{ImageTemplate, Renderer, parts};
use crate::io::Failure;
use ruvllm::Model;
use ruvllm::SessionError;
use ruvllm::session::{EncodedPrompt, Part, PartsError};
use ruvllm::vision::ImageOptions;
use ruvllm::{CancelToken, Engine};
use std::ops::Range;

/// Most tokens of an image of which few are enough (`"detail": "low"`).
const LOW: usize = 256;

/// What reads the images of requests.
pub(crate) struct ImageReader {
    pub(crate) template: ImageTemplate,
    hosts: ImageHosts,
}

impl ImageReader {
    /// What the flags name, or what lies beside the model.
    pub(super) fn open(
        args: &AppArgs,
        model_args: &ModelArgs,
        model: &Model,
        template: &Renderer,
    ) -> Result<Option<ImageReader>, Failure> {
        let found = args.projector.find(model_args, &args.session, model)?;
        Ok(found.map(|projector| ImageReader {
            template: ImageTemplate::new(projector, args.projector.options(), template),
            hosts: ImageHosts::new(&args.allow_image_urls),
        }))
    }

    /// Does `work` with the parts of a rendered conversation, whose images are decoded for it.
    fn with_parts<T>(
        &self,
        (prompt, plain): (&str, &[Range<usize>]),
        sources: &ImageSources,
        work: impl FnOnce(&[Part<'_>]) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let texts = self.template.texts(prompt, plain, sources.0.len());
        let texts = texts.map_err(|why| ApiError::field("messages", why))?;
        let images = sources.decode(&self.hosts)?;
        let options = sources
            .0
            .iter()
            .map(|source| self.options_of(source.is_low));
        work(&parts(&texts, images.iter().zip(options)))
    }

    /// Bounds of the tokens of an image.
    fn options_of(&self, is_low: bool) -> ImageOptions {
        let usual = self.template.options;
        if !is_low || !self.has_details() {
            return usual;
        }
        let most = usual.max_tokens.unwrap_or(LOW).min(LOW);
        ImageOptions {
            min_tokens: usual.min_tokens.map(|least| least.min(most)),
            max_tokens: Some(most),
        }
    }

    /// Whether images vary in their number of tokens, as a request may ask (`detail`).
    pub(crate) fn has_details(&self) -> bool {
        self.template.projector.is_bounded()
    }

    /// Number of tokens of a rendered conversation with images. Encodes none.
    pub(crate) fn count(
        &self,
        engine: &Engine,
        rendered: (&str, &[Range<usize>]),
        sources: &ImageSources,
    ) -> Result<usize, ApiError> {
        let reader = (&self.template.projector, self.template.options);
        self.with_parts(rendered, sources, |parts| {
            engine.count_parts(reader, parts).map_err(of_parts)
        })
    }

    /// A rendered conversation with images as a prompt, if it fits into a context of `n_ctx`.
    pub(crate) fn encode(
        &self,
        engine: &Engine,
        n_ctx: usize,
        rendered: (&str, &[Range<usize>]),
        sources: &ImageSources,
        cancel: &CancelToken,
    ) -> Result<EncodedPrompt, ApiError> {
        let reader = (&self.template.projector, self.template.options);
        self.with_parts(rendered, sources, |parts| {
            // Known before anything is encoded.
            let n_new = engine.count_parts(reader, parts).map_err(of_parts)?;
            if n_new > n_ctx {
                let n_past = 0;
                return Err(SessionError::ContextFull {
                    n_ctx,
                    n_past,
                    n_new,
                }
                .into());
            }
            engine.encode_parts(reader, parts, cancel).map_err(of_parts)
        })
    }
}

/// An image that is refused is the client's.
fn of_parts(error: PartsError) -> ApiError {
    match error {
        PartsError::Session(error) => error.into(),
        PartsError::Vision(error) => ApiError::field("messages", error),
        error => ApiError::internal(error.to_string()),
    }
}
