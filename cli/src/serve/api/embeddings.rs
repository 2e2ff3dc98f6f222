//! `/v1/embeddings`: vectors of texts.

use crate::serve::api::body::Body;
use crate::serve::api::openai::texts;
use crate::serve::app::App;
use crate::serve::blocking::{CancelOnDrop, blocking};
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::{json_list, json_text};
use crate::serve::models::Shared;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ruvllm::Embedder;
use ruvllm::Tokenizer;
use serde_json::{Value, json};

/// Most texts of a request, as in OpenAI's API.
pub(super) const MAX_TEXTS: usize = 2048;

impl App {
    /// Computes vectors or scores. Few requests at a time, so that there are threads for everything
    /// else.
    pub(super) async fn pool<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self.pooling.acquire().await;
        blocking(work).await
    }
}

/// What becomes of a text with more tokens than the model takes.
pub(super) struct Truncation {
    /// Most tokens that the model takes.
    limit: usize,
    /// How many are kept; `None`, such a text is refused.
    n_kept: Option<usize>,
    /// Whether the first ones are left out, instead of the last.
    pub(super) from_start: bool,
}

impl Truncation {
    /// As `truncate` says, a flag or `NONE`, `START` or `END`; `truncate_prompt_tokens`, how many
    /// tokens are kept, -1 as many as the model takes; and `truncation_direction` or
    /// `truncation_side`, `left` or `right`.
    pub(super) fn of(app: &App, fields: &mut Fields) -> Result<Truncation, ApiError> {
        let limit = app.n_ctx.min(app.model.hparams().n_ctx_train);
        let (mut truncates, mut from_start) = (app.embd_truncate, false);
        match fields.take::<Value>("truncate")? {
            None => {}
            Some(Value::Bool(flag)) => truncates = flag,
            Some(Value::String(end)) => {
                (truncates, from_start) = match &end.to_ascii_lowercase()[..] {
                    "none" => (false, false),
                    "start" | "left" => (true, true),
                    "end" | "right" => (true, false),
                    _ => {
                        let message = format!("{end:?} is none of NONE, START and END");
                        return Err(ApiError::field("truncate", message));
                    }
                }
            }
            Some(other) => {
                let message = format!("expected true, false or an end, found {other}");
                return Err(ApiError::field("truncate", message));
            }
        }
        for name in ["truncation_direction", "truncation_side"] {
            if let Some(side) = fields.take::<String>(name)? {
                from_start = match &side.to_ascii_lowercase()[..] {
                    "left" => true,
                    "right" => false,
                    _ => {
                        let message = format!("{side:?} is neither \"left\" nor \"right\"");
                        return Err(ApiError::field(name, message));
                    }
                };
            }
        }
        let n_kept = match fields.take::<i64>("truncate_prompt_tokens")? {
            None => truncates.then_some(limit),
            Some(-1) => Some(limit),
            Some(n) if n >= 1 => Some(limit.min(usize::try_from(n).unwrap_or(limit))),
            Some(n) => {
                let message = format!("expected -1 or more than 0, found {n}");
                return Err(ApiError::field("truncate_prompt_tokens", message));
            }
        };
        Ok(Truncation {
            limit,
            n_kept,
            from_start,
        })
    }

    /// How many tokens are kept of text `i` of field `name`, which has `n`, if not all.
    pub(super) fn kept_of(
        &self,
        n: usize,
        name: &str,
        i: usize,
    ) -> Result<Option<usize>, ApiError> {
        if self.n_kept.is_some() || n <= self.limit {
            return Ok(self.n_kept.filter(|&n_kept| n_kept < n));
        }
        let message = format!(
            "text {i} has {n} tokens, and the model takes at most {}; \
             \"truncate\": true leaves out what is too much",
            self.limit
        );
        Err(ApiError::field(name, message).with_code("context_length_exceeded"))
    }

    /// Shortens the texts of field `name`, or refuses those that are too long. The special tokens
    /// at the ends of a text stay.
    pub(super) fn apply(
        &self,
        tokenizer: &Tokenizer,
        name: &str,
        texts: &mut [Vec<u32>],
    ) -> Result<(), ApiError> {
        for (i, tokens) in texts.iter_mut().enumerate() {
            let n = tokens.len();
            let Some(n_kept) = self.kept_of(n, name, i)? else {
                continue;
            };
            let n_cut = n - n_kept;
            let is_end = |token: Option<&u32>, special: Option<u32>| {
                usize::from(special.is_some() && token.copied() == special)
            };
            let at = if self.from_start {
                is_end(tokens.first(), tokenizer.bos())
            } else {
                n - n_cut - is_end(tokens.last(), tokenizer.eos()).min(n_kept)
            };
            tokens.drain(at..(at + n_cut).min(n));
        }
        Ok(())
    }
}

/// The vectors of the texts in field `name`, and how many tokens they have.
pub(super) async fn vectors(
    app: &App,
    fields: &mut Fields,
    name: &'static str,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let embedder = Embedder::new(&app.engine)?;
    let encoder = embedder.clone();
    let truncation = Truncation::of(app, fields)?;
    let mut texts = texts(name, fields.need(name)?, MAX_TEXTS, move |text| {
        encoder.tokens(text)
    })
    .await?;
    truncation.apply(&app.tokenizer, name, &mut texts)?;
    if let Some(n) = fields
        .take::<usize>("dimensions")?
        .filter(|&n| n != embedder.n_embd())
    {
        return Err(ApiError::field(
            "dimensions",
            format!("vectors of this model have {}, not {n}", embedder.n_embd()),
        ));
    }
    fields.ignore(&["model", "user"]);
    std::mem::take(fields).finish()?;
    let _cancel = CancelOnDrop(embedder.cancel_token());
    let n_tokens = texts.iter().map(Vec::len).sum();
    Ok((
        app.pool(move || Ok(embedder.embed_tokens(&texts)?)).await?,
        n_tokens,
    ))
}

/// As OpenAI's API has them.
pub(super) async fn embeddings(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let as_base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(ApiError::field(
                "encoding_format",
                format!("{other:?} is neither \"float\" nor \"base64\""),
            ));
        }
    };
    let (vectors, n_tokens) = vectors(&app, &mut fields, "input").await?;
    let value = |vector: Vec<f32>| match as_base64 {
        false => json!(vector),
        true => json!(
            BASE64_STANDARD.encode(
                vector
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect::<Vec<_>>()
            )
        ),
    };
    let data = vectors.into_iter().enumerate();
    let data = data
        .map(|(i, vector)| json!({"object": "embedding", "index": i, "embedding": value(vector)}));
    let (model, usage) = (
        json!(app.name),
        json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens}),
    );
    let data = json_list(data);
    Ok(json_text(format!(
        r#"{{"object":"list","model":{model},"data":{data},"usage":{usage}}}"#
    )))
}

/// As llama-server's own `/embedding` has them: each in a list of its own, as there could be one
/// for each token.
pub(super) async fn embedding(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let name = if fields.get("content").is_some() {
        "content"
    } else {
        "input"
    };
    // The length of a vector: Euclid's, which is 1.
    fields.only("embd_normalize", 2)?;
    fields.only("encoding_format", "float")?;
    let (vectors, _) = vectors(&app, &mut fields, name).await?;
    let all = vectors
        .into_iter()
        .enumerate()
        .map(|(i, vector)| json!({"index": i, "embedding": [vector]}));
    Ok(json_text(json_list(all)))
}
