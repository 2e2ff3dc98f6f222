//! Bodies of requests: how large one may be, and how long it may take to come.

use crate::serve::blocking::blocking;
use crate::serve::http::budget::{Share, too_large};
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::ignored::Ignored;
use crate::serve::models::Shared;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use futures_util::stream::StreamExt;
use serde_json::Value;
use std::time::Duration;

/// Most bytes of a body.
const MAX_BODY: usize = 32 << 20;
/// Most bytes behind those that are thrown away before the answer: a client that still sends when
/// the connection is closed would not see why.
const MAX_REST: usize = 8 << 20;
/// Most time that a body may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Most bytes of a body that is parsed on the thread that answers other connections too.
const QUICK: usize = 64 << 10;

/// Most bytes that a JSON text's values take besides its strings, for a list or object and for a
/// value in one.
///
/// Lists have room for four values when they get their first, later for up to twice as many as they
/// have; entries of objects have a name and a hash, too.
const LIST: usize = 8 * size_of::<Value>();
const ENTRY: usize = 2 * size_of::<Value>();

/// Most bytes that the values of a JSON text take once it is parsed, besides its strings.
fn parsed_size(json: &[u8]) -> usize {
    let (mut n_bytes, mut is_text) = (0, false);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match (is_text, byte) {
            (true, b'\\') => drop(bytes.next()),
            (_, b'"') => is_text = !is_text,
            (false, b'[' | b'{') => n_bytes += LIST,
            (false, b',' | b':') => n_bytes += ENTRY,
            _ => {}
        }
    }
    n_bytes
}

/// The bytes of a body. The share has three times their number: a list that grows has room for
/// twice as many, and texts are copied from it.
async fn read(request: Request, share: Share) -> Result<(Vec<u8>, Share), ApiError> {
    let larger = || too_large(format!("the body has more than {} MiB", MAX_BODY >> 20));
    let length = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > MAX_BODY as u64) {
        return Err(larger());
    }
    if let Some(encoding) = request
        .headers()
        .get(header::CONTENT_ENCODING)
        .filter(|&encoding| encoding != "identity")
    {
        let message =
            format!("bodies are JSON without a compression, and this one has {encoding:?}");
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            message,
        ));
    }
    let (mut chunks, mut n) = (request.into_body().into_data_stream(), 0);
    let mut found = Ok((Vec::new(), share));
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            ApiError::wrong(format!("the body did not come to its end: {error}"))
        })?;
        n += chunk.len();
        match &mut found {
            Ok((bytes, share)) => match if n > MAX_BODY {
                Err(larger())
            } else {
                share.grow(3 * chunk.len())
            } {
                Ok(()) => bytes.extend_from_slice(&chunk),
                // Gives back what there is of it.
                Err(error) => found = Err(error),
            },
            Err(_) if n > MAX_BODY + MAX_REST => break,
            Err(_) => {}
        }
    }
    found
}

/// The fields of a body, and what they take of the budget: to be kept as long as they, or most of
/// them, are.
pub(crate) struct Body(pub(crate) Fields, pub(crate) Share);

impl FromRequest<Shared> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, shared: &Shared) -> Result<Body, ApiError> {
        let ignored = request
            .extensions()
            .get::<Ignored>()
            .cloned()
            .unwrap_or_default();
        let (fields, share) =
            parsed(request, shared, |bytes| Fields::parse(bytes, ignored)).await?;
        Ok(Body(fields, share))
    }
}

/// The same of a body that is a list.
pub(crate) struct List(pub(crate) Vec<Value>, pub(crate) Share);

impl FromRequest<Shared> for List {
    type Rejection = ApiError;

    async fn from_request(request: Request, shared: &Shared) -> Result<List, ApiError> {
        let parse = |bytes: &[u8]| {
            serde_json::from_slice(bytes)
                .map_err(|error| ApiError::wrong(format!("the body is no JSON list: {error}")))
        };
        let (list, share) = parsed(request, shared, parse).await?;
        Ok(List(list, share))
    }
}

/// What `parse` makes of the bytes of a body.
async fn parsed<T: Send + 'static>(
    request: Request,
    shared: &Shared,
    parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Share), ApiError> {
    let body = read(request, Share::of(&shared.bodies));
    let Ok(body) = tokio::time::timeout(BODY_TIMEOUT, body).await else {
        let message = format!("the body did not come within {} s", BODY_TIMEOUT.as_secs());
        return Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            message,
        ));
    };
    let (bytes, mut share) = body?;
    let is_quick = bytes.len() <= QUICK;
    let parse = move || {
        share.grow(parsed_size(&bytes))?;
        Ok((parse(&bytes)?, share))
    };
    if is_quick {
        parse()
    } else {
        blocking(parse).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_outside_of_texts() {
        for (json, lists, entries) in [
            ("1", 0, 0),
            ("[]", 1, 0),
            ("[1,2,3]", 1, 2),
            (r#"{"a": 1, "b": [{}]}"#, 3, 3),
            (r#"{"a,[": "\"[{,:\\", "b": "\\\""}"#, 1, 3),
            (r#""\"#, 0, 0),
        ] {
            assert_eq!(
                parsed_size(json.as_bytes()),
                lists * LIST + entries * ENTRY,
                "{json}"
            );
        }
    }
}
