//! What a request says that this server neither knows nor needs: taken, and named in the answer's
//! header and in the log; refused with `--strict`.
//!
//! What would change the answer is known to the server, and is either done or refused by name.

use crate::serve::observe::log::HTTP;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use std::sync::{Arc, Mutex, PoisonError};

/// Header with the names, separated by commas.
const HEADER: &str = "x-ruvllm-ignored";
/// Most names of a request that are told.
const MAX_NAMES: usize = 32;
/// Most characters of a name that are told.
const MAX_LEN: usize = 64;

/// The names of fields that were ignored in one request. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ignored(Arc<Mutex<Vec<String>>>);

impl Ignored {
    /// Adds a name; only visible ASCII of it can be in a header.
    pub(crate) fn add(&self, name: &str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = name.chars().take(MAX_LEN).map(|c| {
            if c.is_ascii_graphic() && c != ',' {
                c
            } else {
                '?'
            }
        });
        let name: String = name.collect();
        if names.len() < MAX_NAMES && !names.contains(&name) {
            names.push(name);
        }
    }

    pub(super) fn list(&self) -> String {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .join(", ")
    }
}

/// Lets a request say more than this server knows, unless `strict`, and names it in the answer.
pub(crate) async fn allow(
    State(strict): State<bool>,
    mut request: Request,
    next: Next,
) -> Response {
    if strict {
        return next.run(request).await;
    }
    let ignored = Ignored::default();
    let path = request.uri().path().to_owned();
    request.extensions_mut().insert(ignored.clone());
    let mut response = next.run(request).await;
    let names = ignored.list();
    if !names.is_empty()
        && let Ok(value) = HeaderValue::from_str(&names)
    {
        tracing::info!(target: HTTP, path, ignored = names, "fields that this server does not know");
        response.headers_mut().insert(HEADER, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_a_header() {
        let ignored = Ignored::default();
        for name in [
            "client_metadata",
            "a,b\r\nset-cookie: x",
            "é",
            "client_metadata",
        ] {
            ignored.add(name);
        }
        assert_eq!(ignored.list(), "client_metadata, a?b??set-cookie:?x, ?");
        (0..100).for_each(|i| ignored.add(&format!("{i}{}", "x".repeat(1000))));
        assert!(ignored.list().len() <= MAX_NAMES * (MAX_LEN + 2));
        assert!(HeaderValue::from_str(&ignored.list()).is_ok());
    }
}
