//! Adapters that come, go and change while the server runs: llama-server's `/lora-adapters`, and
//! vLLM's paths for loading and unloading. A new one is a file of `--lora-dir`.

use crate::serve::api::body::{Body, List};
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::models::Shared;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Most bytes of an adapter's name.
const MAX_NAME: usize = 128;

pub(super) async fn list(State(shared): State<Shared>, uri: Uri) -> Result<Response, ApiError> {
    let app = shared.app_of_query(&uri).await?;
    let adapters = app.adapters();
    let adapters = adapters
        .iter()
        .enumerate()
        .map(|(i, adapter)| json!({"id": i, "path": adapter.path, "scale": adapter.scale()}));
    Ok(json_response(StatusCode::OK, &adapters.collect()))
}

/// Sets what adapters are multiplied by where a request says nothing; those that the list leaves
/// out by 0. Requests that run keep theirs.
pub(super) async fn scale(
    State(shared): State<Shared>,
    uri: Uri,
    List(list, _share): List,
) -> Result<Response, ApiError> {
    let app = shared.app_of_query(&uri).await?;
    let adapters = app.adapters();
    let mut scales = vec![0.0; adapters.len()];
    for entry in &list {
        let id = entry["id"]
            .as_u64()
            .and_then(|id| usize::try_from(id).ok())
            .filter(|&id| id < adapters.len());
        let scale = entry["scale"]
            .as_f64()
            .map(|scale| scale as f32)
            .filter(|scale| scale.is_finite());
        let (Some(id), Some(scale)) = (id, scale) else {
            let n = adapters.len();
            return Err(ApiError::wrong(format!(
                "expected an id below {n} and a scale, found {entry}"
            )));
        };
        scales[id] = scale;
    }
    for (adapter, scale) in adapters.iter().zip(scales) {
        adapter.set_scale(scale);
    }
    Ok(json_response(StatusCode::OK, &json!({"success": true})))
}

/// The name of an adapter in a request.
fn named(name: String) -> Result<String, ApiError> {
    let is_sound = !name.is_empty()
        && name.len() <= MAX_NAME
        && !name.contains(|c: char| c.is_control() || matches!(c, '/' | '\\' | ':' | ','));
    match is_sound {
        true => Ok(name),
        false => {
            let message =
                format!("expected 1 to {MAX_NAME} bytes without / \\ : , and control characters");
            Err(ApiError::field("lora_name", message))
        }
    }
}

/// `POST /v1/load_lora_adapter`: requests may name the adapter from now on, as `MODEL:NAME`.
pub(super) async fn load(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let name = named(fields.need("lora_name")?)?;
    let file: String = fields.need("lora_path")?;
    let replaces = fields.flag("load_inplace")?;
    fields.ignore(&["model", "base_model_name"]);
    fields.finish()?;
    let said = format!("Success: LoRA adapter '{name}' added successfully.");
    blocking(move || app.add_adapter(name, &file, replaces)).await?;
    Ok(said.into_response())
}

/// `POST /v1/unload_lora_adapter`: no new request finds it; those that run keep it.
pub(super) async fn unload(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let name: String = fields.need("lora_name")?;
    let _: Option<Value> = fields.take("lora_int_id")?;
    fields.ignore(&["model"]);
    fields.finish()?;
    app.remove_adapter(&name)?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully.").into_response())
}
