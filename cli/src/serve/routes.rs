//! The paths of the server, and what every request passes through.

use super::app::{App, Purpose, Shared};
use super::args::AppArgs;
use super::http::budget::Budget;
use super::http::error::ApiError;
use super::http::{cors, dialect, ignored, page};
use super::observe::log;
use super::{api, auth};
use crate::io::Failure;
use axum::Router;
use axum::http::{Method, StatusCode};
use axum::middleware::{from_fn, from_fn_with_state};
use ruvllm::engine::Reuse;
use std::sync::Arc;
use std::time::Duration;

/// A server without a socket: its requests come from this process, which limits their number.
pub(crate) fn local(args: &AppArgs) -> Result<Router, Failure> {
    let purpose = Purpose {
        alias: None,
        learns: false,
        // An answer does not depend on those before.
        reuse: Reuse::Prompt,
        max_requests: usize::MAX,
        max_itl: None,
        watchdog: Duration::MAX,
        audit_log: None,
        isolates_templates: true,
    };
    let app = Arc::new(Arc::new(App::open(args, purpose)?).into());
    Ok(router(Shared {
        app,
        keys: Arc::default(),
        bodies: Budget::new(usize::MAX),
        origins: Arc::default(),
        // In a file of requests a typing mistake would cost a night.
        strict: true,
    }))
}

pub(super) fn router(shared: Shared) -> Router {
    let protected = api::protected()
        .fallback(async || {
            ApiError::new(
                StatusCode::NOT_FOUND,
                "not_found_error",
                "there is nothing at this path",
            )
        })
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(shared.keys.clone(), auth::authorize));
    let all = api::public()
        .merge(page::routes())
        .method_not_allowed_fallback(not_allowed)
        .merge(protected);
    all.layer(from_fn(dialect::translate))
        .layer(from_fn_with_state(shared.strict, ignored::allow))
        .layer(from_fn_with_state(shared.origins.clone(), cors::allow))
        .layer(from_fn(log::name_and_log))
        .with_state(shared)
}

async fn not_allowed(method: Method) -> ApiError {
    let message = format!("this path takes no {method}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        message,
    )
}
