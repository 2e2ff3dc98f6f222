//! Ollama's API: chat, continuation and vectors, told as lines of JSON, and which models are here.

mod models;
mod reply;
mod request;

use crate::serve::api::blocks::{values, whole};
use crate::serve::api::body::Body;
use crate::serve::api::embeddings;
use crate::serve::api::native::around;
use crate::serve::api::openai::prompts;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::{json_response, lines};
use crate::serve::ids::Caller;
use crate::serve::jobs::answer::Answer;
use crate::serve::jobs::params::{Format, Params};
use crate::serve::jobs::turn::{Job, Turn, top_logprobs};
use crate::serve::models::{Keep, Shared};
use axum::Extension;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{any, delete, get, post};
use reply::{Asked, Form, Reply, nanoseconds};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What clients compare their own with: the release of Ollama whose API this is.
const VERSION: &str = "0.12.0";

pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/api/version", get(version))
        .route("/api/tags", get(models::tags))
        .route("/api/ps", get(models::ps))
        .route("/api/show", post(models::show))
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/embed", post(embed))
        .route("/api/embeddings", post(embeddings_of_one))
        .route("/api/pull", post(elsewhere))
        .route("/api/push", post(elsewhere))
        .route("/api/create", post(elsewhere))
        .route("/api/copy", post(elsewhere))
        .route("/api/delete", delete(elsewhere))
        .route("/api/blobs/{digest}", any(elsewhere))
}

async fn version() -> Response {
    json_response(StatusCode::OK, &json!({"version": VERSION}))
}

/// A request causes no download, and changes no file of a model.
async fn elsewhere() -> ApiError {
    ApiError::new(
        StatusCode::NOT_IMPLEMENTED,
        "not_supported_error",
        "models come and go on the server's machine alone: `ruvllm pull`, `convert`, `quantize` and `rm`",
    )
}

impl Shared {
    /// The place of the model that a field names, as Ollama's clients do.
    fn ollama_place(&self, name: &str) -> Result<usize, ApiError> {
        self.models.find(name).ok_or_else(|| {
            // Clients look for these words.
            let message = format!("model {name:?} not found");
            ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
        })
    }

    /// Loads the model that a request names; with the fields in the words of chat completions.
    async fn asked(&self, fields: &mut Fields) -> Result<Asked, ApiError> {
        let begun = Instant::now();
        let name: String = fields.need("model")?;
        let keep = request::keep_alive(fields.take("keep_alive")?)?;
        let place = self.ollama_place(&name)?;
        let app = self.models.app(place).await?;
        if let Some(keep) = keep {
            self.models.keep(place, keep);
        }
        // A tag is none of the names of adapters.
        let plain = name.strip_suffix(":latest").unwrap_or(&name);
        fields.set("model", plain.into())?;
        Ok(Asked {
            app,
            name,
            begun,
            load: begun.elapsed(),
        })
    }

    /// A request without anything to answer loads a model, or unloads it (`keep_alive: 0`).
    async fn only_load(&self, mut fields: Fields, form: Form) -> Result<Response, ApiError> {
        let name: String = fields.need("model")?;
        let keep = request::keep_alive(fields.take("keep_alive")?)?;
        let place = self.ollama_place(&name)?;
        let reason = match keep {
            Some(Keep::For(Duration::ZERO)) => {
                self.models.unload(place)?;
                "unload"
            }
            _ => {
                drop(self.models.app(place).await?);
                keep.iter().for_each(|&keep| self.models.keep(place, keep));
                "load"
            }
        };
        Ok(json_response(StatusCode::OK, &form.empty(&name, reason)))
    }
}

async fn chat(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let has_none = |messages: &Value| messages.is_null() || *messages == json!([]);
    if fields.get("messages").is_none_or(has_none) {
        return shared.only_load(fields, Form::Chat).await;
    }
    let asked = shared.asked(&mut fields).await?;
    asked.app.has_room()?;
    request::common(&mut fields)?;
    request::messages(&mut fields)?;
    let turn = Turn::of(Arc::clone(&asked.app), caller, &mut fields)?;
    fields.finish()?;
    let (job, answers) = turn.submit().await?;
    drop(share);
    respond(asked, &job, answers, Form::Chat).await
}

async fn generate(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let is_empty = |name: &str| {
        fields
            .get(name)
            .is_none_or(|text| text == "" || text.is_null())
    };
    if is_empty("prompt") && is_empty("suffix") {
        return shared.only_load(fields, Form::Generate).await;
    }
    let asked = shared.asked(&mut fields).await?;
    let app = &asked.app;
    app.has_room()?;
    request::common(&mut fields)?;
    request::refused_of_generate(&mut fields)?;
    let prompt: String = fields.take("prompt")?.unwrap_or_default();
    let suffix = fields.take::<String>("suffix")?;
    let suffix = suffix.filter(|suffix| !suffix.is_empty());
    let is_raw = fields.flag("raw")?;
    if let (false, None) = (is_raw, &suffix) {
        request::prompt_as_messages(&mut fields, prompt)?;
        let turn = Turn::of(Arc::clone(app), caller, &mut fields)?;
        fields.finish()?;
        let (job, answers) = turn.submit().await?;
        drop(share);
        return respond(asked, &job, answers, Form::Generate).await;
    }
    let tokens = match suffix {
        Some(suffix) => around(app, Vec::new(), prompt, String::new(), suffix).await?,
        None => prompts(app, prompt.into()).await?.pop().unwrap_or_default(),
    };
    // The text is taken as it is: nothing opens reasoning, and there is no system.
    fields.ignore(&["chat_template_kwargs", "reasoning_effort"]);
    if let Some(system) = fields
        .take::<String>("system")?
        .filter(|text| !text.is_empty())
    {
        let message = format!("a raw prompt has no system: {} bytes", system.len());
        return Err(ApiError::field("system", message));
    }
    let params = Params::of(app, &mut fields)?;
    let format = Format::of(&mut fields)?;
    let n_top = top_logprobs("top_logprobs", fields.take("top_logprobs")?)?;
    let logprobs = fields.flag("logprobs")?.then(|| n_top.unwrap_or(0));
    fields.finish()?;
    let job = Job {
        app: Arc::clone(app),
        caller,
        params,
        logprobs,
    };
    let (job, answers) = job.submit(vec![tokens], format, false).await?;
    drop(share);
    respond(asked, &job, answers, Form::Generate).await
}

/// The one answer, as it comes or at its end.
async fn respond(
    asked: Asked,
    job: &Job,
    answers: Vec<Answer>,
    form: Form,
) -> Result<Response, ApiError> {
    let Some(answer) = answers.into_iter().next() else {
        return Err(ApiError::internal("there is no answer"));
    };
    let mut reply = Reply::new(asked, form);
    if job.params.stream {
        return Ok(lines(values(reply, answer)));
    }
    let answer = whole(&mut reply, answer).await?;
    Ok(json_response(StatusCode::OK, &reply.whole(&answer)))
}

/// The vectors of one text or several, which are shortened unless the request says otherwise.
async fn embed(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let has_none = |input: &Value| input.as_array().is_some_and(Vec::is_empty);
    let is_empty = fields.get("input").is_none_or(has_none);
    let asked = shared.asked(&mut fields).await?;
    let (vectors, n_tokens) = if is_empty {
        (Vec::new(), 0)
    } else {
        vectors(&asked, &mut fields, "input").await?
    };
    let response = json!({
        "model": asked.name, "embeddings": vectors,
        "total_duration": nanoseconds(asked.begun.elapsed()), "load_duration": nanoseconds(asked.load),
        "prompt_eval_count": n_tokens,
    });
    Ok(json_response(StatusCode::OK, &response))
}

/// The older form, of one text.
async fn embeddings_of_one(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let is_empty = fields.get("prompt").is_none_or(|prompt| prompt == "");
    let asked = shared.asked(&mut fields).await?;
    let mut vectors = match is_empty {
        true => Vec::new(),
        false => vectors(&asked, &mut fields, "prompt").await?.0,
    };
    let vector = vectors.pop().unwrap_or_default();
    Ok(json_response(StatusCode::OK, &json!({"embedding": vector})))
}

async fn vectors(
    asked: &Asked,
    fields: &mut Fields,
    name: &'static str,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    // None of them is about vectors.
    fields.ignore(&["options"]);
    if fields.get("truncate").is_none_or(Value::is_null) {
        fields.set("truncate", true.into())?;
    }
    embeddings::vectors(&asked.app, fields, name).await
}
