//! Responses: JSON and events.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{Stream, StreamExt};
use serde_json::Value;
use std::convert::Infallible;
use std::time::Duration;

/// Time without text after which an event or a comment keeps a stream open.
pub(crate) const PING: Duration = Duration::from_secs(10);

pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = json_text(value.to_string());
    *response.status_mut() = status;
    response
}

/// A response that is JSON already.
pub(crate) fn json_text(text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

/// A list of values as JSON. Each is made when its turn comes: all of them would take many times
/// the memory of the text.
pub(crate) fn json_list(values: impl Iterator<Item = Value>) -> String {
    let mut list = String::from("[");
    for value in values {
        if list.len() > 1 {
            list.push(',');
        }
        list += &value.to_string();
    }
    list.push(']');
    list
}

/// JSON objects as events, with comments while none comes.
pub(crate) fn events(
    stream: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    let mut response = Sse::new(stream)
        .keep_alive(KeepAlive::new().interval(PING))
        .into_response();
    // Some proxies hold back what looks like a page.
    response
        .headers_mut()
        .insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// JSON objects as lines, each sent when it comes.
pub(crate) fn lines(values: impl Stream<Item = Value> + Send + 'static) -> Response {
    let lines = values.map(|value| Ok::<_, Infallible>(format!("{value}\n")));
    let mut response = Response::new(Body::from_stream(lines));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/x-ndjson");
    headers.insert(header::CONTENT_TYPE, kind);
    // Some proxies hold back what looks like a page.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

pub(crate) fn event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}
