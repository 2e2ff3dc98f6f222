//! What clients of Ollama ask first: `/api/tags`, the list of models.

use crate::serve::app::{App, Shared};
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm::chat::LocalTime;
use ruvllm::quant::FileType;
use serde_json::{Value, json};
use std::time::{Duration, UNIX_EPOCH};

pub(super) async fn tags(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let models: Vec<Value> = app.names().map(|name| model(&app, &name)).collect();
    Ok(json_response(StatusCode::OK, &json!({"models": models})))
}

/// The model under one of its names.
fn model(app: &App, name: &str) -> Value {
    let gguf = app.model.gguf();
    let arch = &app.model.hparams().arch;
    let file_type = gguf.metadata().opt_u32("general.file_type").ok().flatten();
    let file_type = file_type.and_then(FileType::from_id);
    // The built-in model has no file.
    let modified = std::fs::metadata(&app.path).and_then(|file| file.modified());
    let modified = modified.unwrap_or(UNIX_EPOCH + Duration::from_secs(app.created));
    json!({
        "name": name, "model": name, "size": gguf.file_size(), "digest": "",
        "modified_at": LocalTime::utc(modified).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "details": {
            "parent_model": "", "format": "gguf", "family": arch, "families": [arch],
            "parameter_size": parameters(app.model.n_params()),
            "quantization_level": file_type.map_or("unknown".to_owned(), |kind| kind.to_string()),
        },
    })
}

/// A number of parameters as Ollama writes it.
fn parameters(n: u64) -> String {
    let n = n as f64;
    match n {
        _ if n >= 1e9 => format!("{:.1}B", n / 1e9),
        _ if n >= 1e6 => format!("{:.1}M", n / 1e6),
        _ => format!("{:.1}K", n / 1e3),
    }
}
