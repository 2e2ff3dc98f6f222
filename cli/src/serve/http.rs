//! Bodies in, JSON and events out, with limits on size and time.

use super::error::ApiError;
use super::fields::Fields;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::Stream;
use serde_json::Value;
use std::convert::Infallible;
use std::time::Duration;

/// Most bytes of a body.
const MAX_BODY: usize = 32 << 20;
/// Most time that a body may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time without text after which a comment keeps a stream open.
const PING: Duration = Duration::from_secs(10);

/// The whole body of a request.
pub(super) struct Whole(pub(super) Bytes);

impl<S: Sync> FromRequest<S> for Whole {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Whole, ApiError> {
        let too_large = || {
            let message = format!("the body has more than {} MiB", MAX_BODY >> 20);
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        };
        let length =
            request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > MAX_BODY as u64) {
            return Err(too_large());
        }
        match tokio::time::timeout(BODY_TIMEOUT, to_bytes(request.into_body(), MAX_BODY)).await {
            Ok(Ok(bytes)) => Ok(Whole(bytes)),
            Ok(Err(_)) => Err(too_large()),
            Err(_) => {
                let message = format!("the body did not come within {} s", BODY_TIMEOUT.as_secs());
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message))
            }
        }
    }
}

impl<S: Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Fields, ApiError> {
        Fields::parse(&Whole::from_request(request, state).await?.0)
    }
}

pub(super) fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// JSON objects as events, with comments while none comes.
pub(super) fn events(stream: impl Stream<Item = Result<Event, Infallible>> + Send + 'static) -> Response {
    let mut response = Sse::new(stream).keep_alive(KeepAlive::new().interval(PING)).into_response();
    // Some proxies hold back what looks like a page.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

pub(super) fn event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}
