//! Requests that change what a server is: models and adapters come and go, slots are written.
//!
//! A browser sends what any page asks for to a server on its user's machine, as long as it looks
//! like a form. So such a request has to be JSON by its type, which no form is and which browsers
//! ask about first (<https://fetch.spec.whatwg.org/#cors-safelisted-request-header>); its `Origin`
//! has to be the server's own or one of `--cors-origins`; and where there are no keys its `Host` an
//! address or `localhost`, as a foreign page can give its own name this machine's address.

use crate::serve::http::error::ApiError;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use std::net::IpAddr;

/// Refuses a request of another's page, with the origins that may ask.
pub(crate) fn check(
    method: &Method,
    headers: &HeaderMap,
    origins: &[HeaderValue],
    has_no_keys: bool,
) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    if has_no_keys && !is_local(host) {
        let message = format!(
            "the host {host:?} is no address and not localhost; with --api-key any name may be used"
        );
        return Err(forbidden(message));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let is_own = origin
            .to_str()
            .ok()
            .and_then(|origin| origin.split_once("://"))
            .is_some_and(|(_, of)| of.eq_ignore_ascii_case(host));
        let is_allowed = origins
            .iter()
            .any(|allowed| allowed == "*" || allowed == origin);
        if !is_own && !is_allowed {
            let message = format!("pages of {origin:?} may not ask for this: see --cors-origins");
            return Err(forbidden(message));
        }
    }
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    // No form deletes anything, so browsers ask about that, too.
    let needs_kind = ![Method::GET, Method::DELETE].contains(method);
    if needs_kind && !kind.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "this path wants the header \"content-type: application/json\"",
        ));
    }
    Ok(())
}

fn forbidden(message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
}

/// Whether a host is an address, or this machine by the one name that is nobody else's.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_the_server_and_of_those_that_are_named() {
        let status = |pairs: &[(&str, &str)], has_no_keys| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                let name = axum::http::HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
            let origins = [HeaderValue::from_static("https://a.example")];
            match check(&Method::POST, &headers, &origins, has_no_keys) {
                Ok(()) => 200,
                Err(error) => error.json()["error"]["code"].as_u64().unwrap(),
            }
        };
        let json = ("content-type", "application/json; charset=utf-8");
        for host in [
            "127.0.0.1:8080",
            "[::1]:8080",
            "localhost",
            "LOCALHOST:1",
            "10.0.0.1",
        ] {
            assert_eq!(status(&[("host", host), json], true), 200, "{host}");
        }
        for host in [
            "evil.example:8080",
            "",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
        ] {
            assert_eq!(status(&[("host", host), json], true), 403, "{host}");
            assert_eq!(status(&[("host", host), json], false), 200, "{host}");
        }
        let host = ("host", "127.0.0.1:8080");
        for (origin, expected) in [
            ("http://127.0.0.1:8080", 200),
            ("https://a.example", 200),
            ("http://127.0.0.1:8081", 403),
            ("https://evil.example", 403),
            ("null", 403),
        ] {
            assert_eq!(status(&[host, json, ("origin", origin)], true), expected);
        }
        assert_eq!(status(&[host, ("content-type", "text/plain")], true), 415);
        assert_eq!(status(&[host], true), 415);
    }
}
