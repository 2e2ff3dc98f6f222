//! `/v1/embeddings`: vectors of texts.

use super::error::ApiError;
use super::fields::Fields;
use super::http::json_response;
use super::openai::prompts;
use super::{Shared, blocking};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ruvllm::exec::{CancelToken, Embedder};
use serde_json::{Value, json};

/// Most texts of a request, as in OpenAI's API.
pub(super) const MAX_TEXTS: usize = 2048;

/// Cancels when dropped, with the handler whose client went away.
pub(super) struct CancelOnDrop(pub(super) CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

pub(super) async fn embeddings(State(shared): State<Shared>, mut fields: Fields) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let texts = prompts(&app, "input", fields.need("input")?, MAX_TEXTS).await?;
    let as_base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(ApiError::field("encoding_format", format!("{other:?} is neither \"float\" nor \"base64\"")));
        }
    };
    let embedder = Embedder::new(&app.engine)?;
    if let Some(n) = fields.take::<usize>("dimensions")?.filter(|&n| n != embedder.n_embd()) {
        return Err(ApiError::field(
            "dimensions",
            format!("vectors of this model have {}, not {n}", embedder.n_embd()),
        ));
    }
    fields.ignore(&["model", "user"]);
    fields.finish()?;
    let _cancel = CancelOnDrop(embedder.cancel_token());
    let n_tokens: usize = texts.iter().map(Vec::len).sum();
    let vectors = blocking(move || Ok(embedder.embed_tokens(&texts)?)).await?;
    let value = |vector: Vec<f32>| match as_base64 {
        false => json!(vector),
        true => json!(BASE64_STANDARD.encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())),
    };
    let data = vectors.into_iter().enumerate();
    let data = data.map(|(i, vector)| json!({"object": "embedding", "index": i, "embedding": value(vector)}));
    let answer = json!({
        "object": "list", "model": app.name, "data": data.collect::<Vec<Value>>(),
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    });
    Ok(json_response(StatusCode::OK, &answer))
}
