//! The models that are here: `/v1/models`, in OpenAI's form or, for its callers, in Anthropic's.

use crate::serve::app::{App, Shared};
use crate::serve::http::dialect::is_anthropic;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

/// The model under one of its names.
fn model_json(app: &App, id: &str) -> Value {
    let hparams = app.model.hparams();
    json!({
        "id": id, "object": "model", "created": app.created, "owned_by": "ruvllm",
        // The size of the context, where clients of vLLM and of routers look for it.
        "max_model_len": app.n_ctx, "context_length": app.n_ctx,
        "meta": {
            "n_ctx": app.n_ctx, "n_ctx_train": hparams.n_ctx_train, "n_vocab": app.tokenizer.n_vocab(),
            "n_embd": hparams.n_embd, "n_params": app.model.n_params(),
        },
    })
}

/// The same, in Anthropic's form.
fn anthropic_json(app: &App, id: &str) -> Value {
    let max_tokens = app.max_tokens.map_or(app.n_ctx, |n| n.min(app.n_ctx));
    json!({
        "type": "model", "id": id, "display_name": id, "created_at": app.created_at,
        "max_input_tokens": app.n_ctx, "max_tokens": max_tokens,
    })
}

pub(super) async fn models(
    State(shared): State<Shared>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let names: Vec<_> = app.names().collect();
    let models = if is_anthropic(&headers) {
        let models: Vec<_> = names.iter().map(|id| anthropic_json(&app, id)).collect();
        json!({"data": models, "has_more": false, "first_id": names.first(), "last_id": names.last()})
    } else {
        let models: Vec<_> = names.iter().map(|id| model_json(&app, id)).collect();
        json!({"object": "list", "data": models})
    };
    Ok(json_response(StatusCode::OK, &models))
}

pub(super) async fn model(
    State(shared): State<Shared>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let Path(name) = name.map_err(|error| ApiError::wrong(error.to_string()))?;
    if !app.names().any(|id| id == name) {
        let message = format!("no model is called {name:?} here; /v1/models lists them");
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "not_found_error",
            message,
        ));
    }
    let model = if is_anthropic(&headers) {
        anthropic_json(&app, &name)
    } else {
        model_json(&app, &name)
    };
    Ok(json_response(StatusCode::OK, &model))
}
