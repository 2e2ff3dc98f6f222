//! Ratings of answers.

use super::body::Body;
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::ids::Caller;
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

/// `POST /feedback`: rates the answer to a request of the same caller.
pub(super) async fn feedback(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let (request, score): (String, f32) = (fields.need("request_id")?, fields.need("score")?);
    fields.ignore(&["model"]);
    fields.finish()?;
    let Some(learner) = app.learner(&caller).cloned() else {
        return Err(ApiError::wrong(
            "nothing is recorded here: the server was started without --learn",
        ));
    };
    blocking(move || {
        learner
            .sona
            .rate(&request, score)
            .map_err(|error| ApiError::wrong(error.to_string()))
    })
    .await?;
    Ok(json_response(StatusCode::OK, &json!({"recorded": true})))
}
