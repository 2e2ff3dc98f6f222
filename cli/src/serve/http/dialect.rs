//! Errors and names of requests in the form of Anthropic's API, or of Ollama's, for its callers:
//! whatever refused the request, a handler, the router or the check of keys.

use crate::serve::http::error::ApiError;
use crate::serve::ids::Caller;
use axum::Extension;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;

/// Whether a caller of a path that several APIs have expects Anthropic's answer.
pub(crate) fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// Puts an error into the caller's form, and names the request as the caller's API does.
pub(crate) async fn translate(
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if path.starts_with("/api/") {
        let mut response = next.run(request).await;
        if let Some(error) = response.extensions_mut().remove::<ApiError>() {
            *response.body_mut() = Body::from(error.ollama_json().to_string());
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
        return response;
    }
    let is_messages = path == "/v1/messages" || path.starts_with("/v1/messages/");
    if !is_messages && !is_anthropic(request.headers()) {
        return next.run(request).await;
    }
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let mut json = error.anthropic_json();
        json["request_id"] = (&*caller.request).into();
        *response.status_mut() = error.anthropic_status();
        *response.body_mut() = Body::from(json.to_string());
    }
    if let Ok(name) = HeaderValue::from_str(&caller.request) {
        response.headers_mut().insert("request-id", name);
    }
    response
}
