//! `/v1/embeddings`: vectors of texts.

use crate::serve::api::body::Body;
use crate::serve::api::openai::texts;
use crate::serve::app::{App, Shared};
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::{json_list, json_text};
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ruvllm::SessionError;
use ruvllm::embed::Embedder;
use ruvllm::engine::CancelToken;
use serde_json::json;

/// Most texts of a request, as in OpenAI's API.
pub(super) const MAX_TEXTS: usize = 2048;

/// Cancels when dropped, with the handler whose client went away.
pub(super) struct CancelOnDrop(pub(super) CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

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

    /// Refuses texts that are longer than a context: each takes one pass, whose memory grows with
    /// its tokens.
    pub(super) fn fit(&self, texts: &[Vec<u32>]) -> Result<(), ApiError> {
        match texts.iter().map(Vec::len).max() {
            Some(n_new) if n_new > self.n_ctx => Err(SessionError::ContextFull {
                n_ctx: self.n_ctx,
                n_past: 0,
                n_new,
            }
            .into()),
            _ => Ok(()),
        }
    }
}

/// The vectors of the texts in field `name`, and how many tokens they have.
async fn vectors(
    app: &App,
    fields: &mut Fields,
    name: &'static str,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let embedder = Embedder::new(&app.engine)?;
    let encoder = embedder.clone();
    let texts = texts(name, fields.need(name)?, MAX_TEXTS, move |text| {
        encoder.tokens(text)
    })
    .await?;
    app.fit(&texts)?;
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
    let app = shared.app()?;
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
    let app = shared.app()?;
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
