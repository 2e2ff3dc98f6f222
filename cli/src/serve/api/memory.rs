//! What a caller has had remembered: seen, added, changed and forgotten.

use super::body::Body;
use crate::flags::{entry_json, verdict};
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::ids::Caller;
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm_learn::memory::{Memory, MemoryError, NewEntry, Verdict};
use serde_json::{Value, json};

/// Does something with the caller's memory, on a thread that may wait for the disk.
async fn with_memory(
    shared: Shared,
    caller: Caller,
    work: impl FnOnce(&mut Memory) -> Result<Value, MemoryError> + Send + 'static,
) -> Result<Response, ApiError> {
    let value = blocking(move || {
        let Some(mut memory) = shared.memories.of(&caller) else {
            let message = "nothing is remembered here: the server was started without --memory";
            return Err(ApiError::wrong(message));
        };
        work(&mut memory).map_err(|error| match error {
            MemoryError::NoSuchEntry { number } => {
                let message = format!("there is no entry {number}");
                ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
            }
            MemoryError::Empty | MemoryError::TooLong { .. } => ApiError::field("text", error),
            error => ApiError::internal(error.to_string()),
        })
    })
    .await?;
    Ok(json_response(StatusCode::OK, &value))
}

/// A verdict in a request, if there is one.
fn given(name: Option<String>) -> Result<Option<Verdict>, ApiError> {
    let given = name.map(|name| verdict(&name)).transpose();
    given.map_err(|error| ApiError::field("verdict", error))
}

/// `GET /memory`: all entries.
pub(super) async fn list(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    with_memory(shared, caller, |memory| {
        let entries = memory.entries().iter();
        let entries: Vec<Value> = entries.map(|entry| entry_json(memory, entry)).collect();
        Ok(json!({"entries": entries}))
    })
    .await
}

/// `POST /memory`: remembers a text; with `correction` in place of what is most like it.
pub(super) async fn add(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let new = NewEntry {
        text: fields.need("text")?,
        verdict: given(fields.take("verdict")?)?.unwrap_or_default(),
        session: fields.take("session")?.unwrap_or_default(),
        is_correction: fields.flag("correction")?,
    };
    fields.finish()?;
    with_memory(shared, caller, |memory| {
        let number = memory.remember(new, None)?;
        Ok(found(memory, number))
    })
    .await
}

/// `PATCH /memory/{number}`: another text or verdict.
pub(super) async fn change(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Path(number): Path<u64>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let text: Option<String> = fields.take("text")?;
    let verdict = given(fields.take("verdict")?)?;
    fields.finish()?;
    with_memory(shared, caller, move |memory| {
        let old = memory.entry(number);
        let old = old.ok_or(MemoryError::NoSuchEntry { number })?;
        let verdict = verdict.unwrap_or(old.verdict);
        let text = text.unwrap_or_else(|| old.text.clone());
        memory.edit(number, &text, verdict, None)?;
        Ok(found(memory, number))
    })
    .await
}

/// `DELETE /memory/{number}`: it is no longer in the file when the answer comes.
pub(super) async fn forget(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Path(number): Path<u64>,
) -> Result<Response, ApiError> {
    with_memory(shared, caller, move |memory| {
        memory.forget(number)?;
        Ok(json!({"forgotten": number}))
    })
    .await
}

fn found(memory: &Memory, number: u64) -> Value {
    let entry = memory.entry(number);
    entry.map_or(Value::Null, |entry| entry_json(memory, entry))
}
