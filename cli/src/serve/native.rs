//! llama-server's own API, as far as it is here.

use super::error::ApiError;
use super::fields::Fields;
use super::http::json_response;
use super::{Shared, blocking};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

pub(super) async fn health(State(shared): State<Shared>) -> Result<Response, ApiError> {
    shared.app()?;
    Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
}

pub(super) async fn props(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let props = json!({
        "default_generation_settings": {"n_ctx": app.n_ctx},
        "total_slots": app.n_parallel,
        "model_alias": app.name,
        "model_path": app.path,
        "chat_template": app.model.chat_template(),
        "bos_token": app.bos,
        "eos_token": app.eos,
        "build_info": super::FINGERPRINT,
    });
    Ok(json_response(StatusCode::OK, &props))
}

pub(super) async fn tokenize(State(shared): State<Shared>, mut fields: Fields) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let text: String = fields.need("content")?;
    let (add_special, with_pieces) = (fields.flag("add_special")?, fields.flag("with_pieces")?);
    let parse_special = fields.take("parse_special")?.unwrap_or(true);
    fields.finish()?;
    let tokens = blocking(move || {
        let ids = app.tokenizer.encode(&text, add_special, parse_special);
        let token = |id| match with_pieces {
            false => json!(id),
            true => json!({"id": id, "piece": super::answer::token_text(&app, id)}),
        };
        Ok(ids.into_iter().map(token).collect::<Vec<Value>>())
    })
    .await?;
    Ok(json_response(StatusCode::OK, &json!({"tokens": tokens})))
}

pub(super) async fn detokenize(State(shared): State<Shared>, mut fields: Fields) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let tokens: Vec<u32> = fields.need("tokens")?;
    fields.finish()?;
    let text = app.tokenizer.decode_lossy(&tokens, true).map_err(|error| ApiError::field("tokens", error))?;
    Ok(json_response(StatusCode::OK, &json!({"content": text})))
}

pub(super) async fn apply_template(State(shared): State<Shared>, mut fields: Fields) -> Result<Response, ApiError> {
    let app = shared.app()?;
    app.check_model(&mut fields)?;
    let conversation = app.conversation(&mut fields)?;
    fields.finish()?;
    let prompt = blocking(move || conversation.render(&app)).await?;
    Ok(json_response(StatusCode::OK, &json!({"prompt": prompt})))
}

pub(super) async fn metrics(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let text = app.metrics.text().map_err(|error| ApiError::internal(error.to_string()))?;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
