//! The web page at `/`: a chat. It is part of the program and loads nothing from elsewhere. Who asks
//! for no page there is a client of Ollama that looks for a server.

use axum::Router;
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Scripts, styles and connections of this server alone, and no page around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Its parts, which need no key: the script asks for one.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(root))
        .route(
            "/page.css",
            get(async || part("text/css; charset=utf-8", include_str!("page/page.css"))),
        )
        .route(
            "/page.js",
            get(async || script(include_str!("page/page.js"))),
        )
        .route(
            "/markdown.js",
            get(async || script(include_str!("page/markdown.js"))),
        )
        .route(
            "/chats.js",
            get(async || script(include_str!("page/chats.js"))),
        )
}

/// The page, or what Ollama says.
async fn root(headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT);
    let wants_page = accepted.is_some_and(|kinds| {
        let kinds = kinds.to_str().unwrap_or_default();
        kinds.contains("text/html")
    });
    if wants_page {
        part("text/html; charset=utf-8", include_str!("page/index.html")).into_response()
    } else {
        "Ollama is running".into_response()
    }
}

fn script(text: &'static str) -> impl IntoResponse {
    part("text/javascript; charset=utf-8", text)
}

fn part(kind: &'static str, text: &'static str) -> impl IntoResponse {
    const HEADERS: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // A newer program brings a newer page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    ([(header::CONTENT_TYPE, kind)], HEADERS, text)
}
