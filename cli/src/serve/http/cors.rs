//! Requests that browsers send for pages of other origins (<https://fetch.spec.whatwg.org/#http-cors-protocol>): allowed
//! for those that `--cors-origins` names. The server knows no cookies, so pages never send a user's
//! rights along.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// An origin as browsers write it, or `*`.
pub(crate) fn origin(text: &str) -> Result<HeaderValue, String> {
    let text = text.trim().trim_end_matches('/');
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    if text != "*" && rest.is_none_or(|rest| rest.is_empty() || rest.contains('/')) {
        return Err(
            "expected * or an origin, as in https://example.com or http://localhost:3000".into(),
        );
    }
    HeaderValue::from_str(text).map_err(|error| error.to_string())
}

/// Answers the question of a browser whether it may ask, and tells it that its page may read the
/// answer.
pub(crate) async fn allow(
    State(origins): State<Arc<Vec<HeaderValue>>>,
    request: Request,
    next: Next,
) -> Response {
    if origins.is_empty() {
        return next.run(request).await;
    }
    let is_allowed = |origin: &&HeaderValue| {
        origins
            .iter()
            .any(|allowed| allowed == "*" || allowed == *origin)
    };
    let origin = request
        .headers()
        .get(header::ORIGIN)
        .filter(is_allowed)
        .cloned();
    let wanted = request
        .headers()
        .get(header::ACCESS_CONTROL_REQUEST_HEADERS)
        .cloned();
    let is_question = *request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if is_question {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    // Caches must not give one origin the answer of another.
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let exposed =
            HeaderValue::from_static("request-id, x-request-id, retry-after, x-ruvllm-ignored");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
        if is_question {
            question(headers, wanted);
        }
    }
    response
}

fn question(headers: &mut HeaderMap, wanted: Option<HeaderValue>) {
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, POST"),
    );
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("600"),
    );
    if let Some(wanted) = wanted {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        for (text, expected) in [
            ("*", "*"),
            ("https://a.example", "https://a.example"),
            (" http://b:1/ ", "http://b:1"),
        ] {
            assert_eq!(origin(text).unwrap(), expected);
        }
        for wrong in [
            "",
            "a.example",
            "https://",
            "https://a/b",
            "https://a\u{1}",
            "null",
        ] {
            assert!(origin(wrong).is_err(), "{wrong:?}");
        }
    }
}
