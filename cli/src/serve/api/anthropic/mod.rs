//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

mod message;
mod request;

use crate::serve::api::blocks::{stream, whole};
use crate::serve::api::body::Body;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::ids::Caller;
use crate::serve::jobs::turn::Turn;
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use message::Message;
use request::translate;
use serde_json::json;

pub(super) async fn messages(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    // The API has no default.
    let max_tokens: i64 = fields.need("max_tokens")?;
    if max_tokens < 1 {
        return Err(ApiError::field(
            "max_tokens",
            format!("expected 1 or more, found {max_tokens}"),
        ));
    }
    fields.set("max_tokens", max_tokens.into())?;
    translate(&mut fields)?;
    let turn = Turn::of(shared.app_with_room(&fields).await?, caller, &mut fields)?;
    fields.finish()?;
    let (job, answers) = turn.submit().await?;
    drop(share);
    let Some(answer) = answers.into_iter().next() else {
        return Err(ApiError::internal("there is no answer"));
    };
    let mut message = Message::new(&job, &answer);
    if job.params.stream {
        return Ok(stream(message, answer));
    }
    let answer = whole(&mut message, answer).await?;
    Ok(json_response(StatusCode::OK, &message.ended(&answer)))
}

pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    translate(&mut fields)?;
    let turn = Turn::of(shared.app_of(&fields).await?, caller, &mut fields)?;
    fields.finish()?;
    Ok(json_response(
        StatusCode::OK,
        &json!({"input_tokens": turn.count_tokens().await?}),
    ))
}
