//! OpenAI's Responses: `/v1/responses`. Nothing is stored: a conversation is sent whole each time.

mod grammar;
mod input;
mod output;
mod tools;

use crate::serve::api::blocks::{stream, whole};
use crate::serve::api::body::Body;
use crate::serve::api::openai::input_tokens;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::json_response;
use crate::serve::ids::Caller;
use crate::serve::jobs::params::schema_format;
use crate::serve::jobs::turn::Turn;
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response as HttpResponse;
use input::Messages;
use output::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tools::Tools;

pub(super) async fn responses(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<HttpResponse, ApiError> {
    let app = shared.app_with_room(&fields).await?;
    let about = repeated(&fields);
    let mut tools = translate(&mut fields)?;
    let mut turn = Turn::of(app, caller, &mut fields)?;
    fields.finish()?;
    for (name, parameters) in tools.take_narrowed() {
        turn.narrow(&name, parameters);
    }
    let (job, answers) = turn.submit().await?;
    let Some(answer) = answers.into_iter().next() else {
        return Err(ApiError::internal("there is no answer"));
    };
    let mut response = Response::new(Arc::clone(&job.app), about, tools, share);
    if job.params.stream {
        return Ok(stream(response, answer));
    }
    let answer = whole(&mut response, answer).await?;
    Ok(json_response(StatusCode::OK, &response.ended(&answer)))
}

pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<HttpResponse, ApiError> {
    translate(&mut fields)?;
    let turn = Turn::of(shared.app_of(&fields).await?, caller, &mut fields)?;
    fields.finish()?;
    Ok(input_tokens(turn.count_tokens().await?))
}

/// What a response repeats of its request, or the values of what the request does not say.
fn repeated(fields: &Fields) -> Map<String, Value> {
    let repeated = [
        ("background", json!(false)),
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("reasoning", Value::Null),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("top_p", Value::Null),
        ("truncation", json!("disabled")),
    ];
    let said = |name| fields.get(name).filter(|value| !value.is_null()).cloned();
    let repeated =
        repeated.map(|(name, otherwise)| (name.to_owned(), said(name).unwrap_or(otherwise)));
    repeated.into_iter().collect()
}

/// Puts a request into the words of chat completions.
fn translate(fields: &mut Fields) -> Result<Tools, ApiError> {
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.take::<Value>(name)?.is_some() {
            return Err(ApiError::field(
                name,
                "nothing is stored here (`store: false`): send the conversation whole",
            ));
        }
    }
    if fields.flag("background")? {
        return Err(ApiError::field("background", "nothing is stored here"));
    }
    // What is too long is an error in any case.
    if fields.get("truncation") == Some(&json!("auto")) {
        fields.without_effect(&["truncation"]);
    }
    fields.only("truncation", "disabled")?;
    fields.only("n", 1)?;
    let mut tools = Tools::default();
    let ignored = fields.ignored().clone();
    if let Some(list) = fields.take::<Vec<Value>>("tools")? {
        tools.add_all("tools", &list, &ignored)?;
    }
    let mut messages = Messages {
        messages: Vec::new(),
        tools: &mut tools,
        ignored: &ignored,
    };
    if let Some(instructions) = fields.take::<String>("instructions")? {
        messages.push("system", instructions);
    }
    match fields.need("input")? {
        Value::String(text) => messages.push("user", text),
        Value::Array(items) => messages.add_all(&items)?,
        _ => return Err(ApiError::field("input", "expected a text or items")),
    }
    fields.set("messages", messages.messages.into())?;
    if let Some(choice) = fields.take::<Value>("tool_choice")? {
        fields.set("tool_choice", tools.choice(choice)?)?;
    }
    fields.set("tools", tools.take_functions().into())?;
    fields.rename("max_output_tokens", "max_tokens")?;
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(effort) = reasoning.take::<String>("effort")? {
            fields.set("reasoning_effort", effort.into())?;
        }
        // The reasoning itself is told.
        reasoning.ignore(&["summary", "generate_summary"]);
        reasoning.without_effect(&["context", "mode"]);
        reasoning.finish()?;
    }
    if let Some(mut text) = fields.object("text")? {
        if let Some(format) = text.take::<Map<String, Value>>("format")? {
            fields.set("response_format", schema_format(format))?;
        }
        text.without_effect(&["verbosity"]);
        text.finish()?;
    }
    include(fields)?;
    fields.without_effect(&[
        "access_programs",
        "background_options",
        "client_metadata",
        "context_management",
        "image",
        "moderation",
        "prompt_cache_options",
    ]);
    fields.ignore(&["prompt_cache_retention"]);
    Ok(tools)
}

/// What the response has to have besides.
fn include(fields: &mut Fields) -> Result<(), ApiError> {
    let mut with_logprobs = fields
        .get("top_logprobs")
        .and_then(Value::as_u64)
        .is_some_and(|n| n > 0);
    let wanted: Vec<String> = fields.take("include")?.unwrap_or_default();
    for (i, name) in wanted.iter().enumerate() {
        match &name[..] {
            "message.output_text.logprobs" => with_logprobs = true,
            _ => fields.ignored().add(&format!("include[{i}]")),
        }
    }
    if with_logprobs {
        fields.set("logprobs", true.into())?;
    }
    Ok(())
}
