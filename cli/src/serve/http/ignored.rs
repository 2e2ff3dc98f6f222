//! What a request says that has no effect here: taken, and named in the answer's header and in the
//! log. What neither an API nor this server knows is refused with `--strict`.
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
/// Most bytes of the header.
const MAX_HEADER: usize = 1024;
/// Most bytes of a name that are told.
const MAX_NAME: usize = 64;
/// What stands for the rest of a name or of the list.
const CUT: &str = "...";

/// The names of what was ignored in one request. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ignored {
    list: Arc<Mutex<String>>,
    is_strict: bool,
}

impl Ignored {
    /// Of a request in which what nobody knows is an error.
    pub(crate) fn strict() -> Ignored {
        Ignored {
            is_strict: true,
            ..Ignored::default()
        }
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.is_strict
    }

    /// Adds a name. Only visible ASCII can be in a header: other bytes are told as in URLs.
    pub(crate) fn add(&self, name: &str) {
        let mut told = String::new();
        for byte in name.bytes() {
            if told.len() + "%00".len() + CUT.len() > MAX_NAME {
                told.push_str(CUT);
                break;
            }
            match byte {
                b',' | b'%' => told += &format!("%{byte:02X}"),
                _ if byte.is_ascii_graphic() => told.push(char::from(byte)),
                _ => told += &format!("%{byte:02X}"),
            }
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.split(", ").any(|other| other == told || other == CUT) {
            return;
        }
        if !list.is_empty() {
            list.push_str(", ");
        }
        let has_room = list.len() + told.len() + ", ".len() + CUT.len() <= MAX_HEADER;
        list.push_str(if has_room { &told } else { CUT });
    }

    pub(super) fn list(&self) -> String {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Lets a request say more than this server knows, unless `strict`, and names what had no effect in
/// the answer.
pub(crate) async fn allow(
    State(strict): State<bool>,
    mut request: Request,
    next: Next,
) -> Response {
    let ignored = if strict {
        Ignored::strict()
    } else {
        Ignored::default()
    };
    let path = request.uri().path().to_owned();
    request.extensions_mut().insert(ignored.clone());
    let mut response = next.run(request).await;
    let names = ignored.list();
    if !names.is_empty()
        && let Ok(value) = HeaderValue::from_str(&names)
    {
        tracing::info!(target: HTTP, path, ignored = names, "parts of a request without an effect");
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
            "100%",
            "client_metadata",
        ] {
            ignored.add(name);
        }
        assert_eq!(
            ignored.list(),
            "client_metadata, a%2Cb%0D%0Aset-cookie:%20x, %C3%A9, 100%25"
        );
        ignored.add(&"x".repeat(1000));
        let last = ignored.list().split(", ").last().unwrap().to_owned();
        assert!(last.len() <= MAX_NAME && last.ends_with("xx..."), "{last}");
        (0..1000).for_each(|i| ignored.add(&format!("tools[{i}]")));
        let list = ignored.list();
        assert!(
            list.len() <= MAX_HEADER && list.ends_with("], ..."),
            "{list}"
        );
        assert!(list.len() > MAX_HEADER - 2 * MAX_NAME, "{}", list.len());
        assert!(HeaderValue::from_str(&list).is_ok());
    }
}
