//! Keys of clients.

use super::args::ServerArgs;
use super::http::error::ApiError;
use super::ids::Caller;
use crate::io::{Failure, read_text};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The keys of --api-key and --api-key-file.
pub(super) fn keys(args: &ServerArgs) -> Result<Vec<String>, Failure> {
    let of_file = args
        .api_key_file
        .as_deref()
        .map(read_text)
        .transpose()?
        .unwrap_or_default();
    let lines = of_file.lines().filter(|line| !line.starts_with('#'));
    let keys = args
        .api_key
        .iter()
        .map(String::as_str)
        .chain(lines)
        .map(str::trim);
    let mut all = Vec::new();
    for key in keys.filter(|key| !key.is_empty()) {
        // Twice the same key is one user.
        if !all.iter().any(|other| other == key) {
            all.push(key.to_owned());
        }
    }
    if all.is_empty() && args.api_key_file.is_some() {
        return Err(Failure::Usage(
            "--api-key-file: there is no key in it".into(),
        ));
    }
    Ok(all)
}

/// The name of a key's folder: it stays when other keys come or go, and does not tell the key.
pub(super) fn name_of(key: &str) -> String {
    let digest = Sha256::digest(key);
    digest
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Lets requests with a key pass, if there are keys.
pub(super) async fn authorize(
    State(keys): State<Arc<Vec<String>>>,
    mut request: Request,
    next: Next,
) -> Response {
    let key = key_of(request.headers(), &keys);
    if key.is_none() && !keys.is_empty() {
        let message =
            "the key is missing or wrong: expected the header \"Authorization: Bearer KEY\"";
        return ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
            .into_response();
    }
    if let (Some(key), Some(caller)) = (key, request.extensions_mut().get_mut::<Caller>()) {
        caller.tenant = key.to_string().into();
    }
    next.run(request).await
}

/// Which of `keys` is there. All of them are compared, each in a time that tells nothing of where
/// they differ.
fn key_of(headers: &HeaderMap, keys: &[String]) -> Option<usize> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .map(HeaderValue::as_bytes);
    let bearer = bearer.and_then(|value| value.split_at_checked("Bearer ".len()));
    let bearer = bearer
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
        .map(|(_, key)| key);
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))?;
    let is_it = |key: &String| bool::from(key.as_bytes().ct_eq(given));
    keys.iter().enumerate().fold(
        None,
        |found, (i, key)| if is_it(key) { Some(i) } else { found },
    )
}
