//! The models that are here, as Ollama tells them: all of them, those that are loaded, and one.

use crate::serve::api::body::Body;
use crate::serve::app::App;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::models::{Listed, Shared};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm::chat::LocalTime;
use ruvllm::gguf::{Array, Value as MetadataValue};
use ruvllm::quant::FileType;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What stands for ever in a list.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub(super) async fn tags(State(shared): State<Shared>) -> Result<Response, ApiError> {
    if !shared.models.are_several() && shared.models.are_starting() {
        return Err(ApiError::loading());
    }
    let list = shared.models.list();
    let models: Vec<Value> = list
        .iter()
        .flat_map(|of| names(of).into_iter().map(|name| model(of, &name)))
        .collect();
    Ok(json_response(StatusCode::OK, &json!({"models": models})))
}

pub(super) async fn ps(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let list = shared.models.list();
    let mut models = Vec::new();
    for of in &list {
        let (Some(app), Some(name)) = (&of.app, of.entry.name()) else {
            continue;
        };
        let mut loaded = model(of, name);
        let left = of.expires.unwrap_or(FOR_EVER).min(FOR_EVER);
        loaded["expires_at"] = time(SystemTime::now() + left).into();
        loaded["size_vram"] = 0.into();
        loaded["context_length"] = app.n_ctx.into();
        models.push(loaded);
    }
    Ok(json_response(StatusCode::OK, &json!({"models": models})))
}

/// All that is known of a model, which is loaded for it. Long lists are told if `verbose` asks for
/// them.
pub(super) async fn show(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    fields.rename("name", "model")?;
    let name: String = fields.need("model")?;
    let is_verbose = fields.flag("verbose")?;
    // What others would have changed of it.
    fields.without_effect(&["system", "template", "options"]);
    fields.finish()?;
    let place = shared.ollama_place(&name)?;
    let app = shared.models.app(place).await?;
    let list = shared.models.list();
    let described = model(&list[place], &name);
    let mut info = Map::new();
    for (key, value) in app.model.gguf().metadata().iter() {
        // Templates have a field of their own.
        if !key.starts_with("tokenizer.chat_template") {
            info.insert(key.to_owned(), metadata(value, is_verbose));
        }
    }
    info.insert(
        "general.parameter_count".into(),
        app.model.n_params().into(),
    );
    let mut shown = json!({
        "modelfile": format!("FROM {name}\n"), "parameters": format!("num_ctx {}", app.n_ctx),
        "template": app.template.source(), "details": described["details"],
        "model_info": info, "capabilities": capabilities(&app),
        "modified_at": described["modified_at"],
    });
    let license = app.model.gguf().metadata().opt_str("general.license");
    if let Ok(Some(license)) = license {
        shown["license"] = license.into();
    }
    Ok(json_response(StatusCode::OK, &shown))
}

/// What a client may ask of a model.
fn capabilities(app: &App) -> Vec<&'static str> {
    if app.model.hparams().attention().any(|attn| !attn.causal) {
        return vec!["embedding"];
    }
    let template = app.template.source();
    let has = |name, is_there: bool| is_there.then_some(name);
    let all = [
        has("completion", true),
        has("tools", template.contains("tools")),
        has("vision", app.images.is_some()),
        has("insert", app.tokenizer.fill_in_the_middle().is_some()),
        has(
            "thinking",
            template.contains("enable_thinking") || template.contains("<think>"),
        ),
    ];
    all.into_iter().flatten().collect()
}

fn names(of: &Listed<'_>) -> Vec<String> {
    match &of.app {
        Some(app) => app.names().collect(),
        None => of.entry.name().into_iter().map(str::to_owned).collect(),
    }
}

/// A model under one of its names.
fn model(of: &Listed<'_>, name: &str) -> Value {
    let file = of
        .entry
        .path
        .as_ref()
        .and_then(|path| std::fs::metadata(path).ok());
    let mut details = json!({
        "parent_model": "", "format": "gguf", "family": "", "families": [],
        "parameter_size": "", "quantization_level": "unknown",
    });
    let mut size = file.as_ref().map_or(0, |file| file.len());
    if let Some(app) = &of.app {
        let gguf = app.model.gguf();
        let arch = &app.model.hparams().arch;
        let file_type = gguf.metadata().opt_u32("general.file_type").ok().flatten();
        size = gguf.file_size();
        details["family"] = arch.clone().into();
        details["families"] = json!([arch]);
        details["parameter_size"] = parameters(app.model.n_params()).into();
        if let Some(kind) = file_type.and_then(FileType::from_id) {
            details["quantization_level"] = kind.to_string().into();
        }
    }
    // The built-in model has no file.
    let modified = file.and_then(|file| file.modified().ok());
    let created = of.app.as_ref().map_or(0, |app| app.created);
    let modified = modified.unwrap_or(UNIX_EPOCH + Duration::from_secs(created));
    // Of what tells files apart without reading them.
    let identity = format!("{name}\n{size}\n{}", time(modified));
    let digest = Sha256::digest(identity);
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "name": name, "model": name, "size": size, "digest": digest,
        "modified_at": time(modified), "details": details,
    })
}

fn time(time: SystemTime) -> String {
    LocalTime::utc(time).strftime("%Y-%m-%dT%H:%M:%SZ")
}

/// A value of the file; `null` for a list, unless lists are wanted.
fn metadata(value: &MetadataValue, with_lists: bool) -> Value {
    match value {
        MetadataValue::U8(x) => json!(x),
        MetadataValue::I8(x) => json!(x),
        MetadataValue::U16(x) => json!(x),
        MetadataValue::I16(x) => json!(x),
        MetadataValue::U32(x) => json!(x),
        MetadataValue::I32(x) => json!(x),
        MetadataValue::U64(x) => json!(x),
        MetadataValue::I64(x) => json!(x),
        MetadataValue::F32(x) => json!(x),
        MetadataValue::F64(x) => json!(x),
        MetadataValue::Bool(x) => json!(x),
        MetadataValue::String(x) => json!(x),
        MetadataValue::Bytes(x) => json!(String::from_utf8_lossy(x)),
        MetadataValue::Array(list) if with_lists => match list {
            Array::Strings(texts) => texts
                .iter()
                .map(|text| String::from_utf8_lossy(text).into_owned())
                .collect(),
            Array::F32(values) => json!(values),
            Array::I32(values) => json!(values),
            Array::U32(values) => json!(values),
            // Others are short, and none of a tokenizer's.
            _ => Value::Null,
        },
        MetadataValue::Array(_) => Value::Null,
    }
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
