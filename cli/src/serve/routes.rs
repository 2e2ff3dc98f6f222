//! The paths of the server, and what every request passes through.

use super::app::{App, Purpose};
use super::args::AppArgs;
use super::http::budget::Budget;
use super::http::error::ApiError;
use super::http::{cors, dialect, guard, ignored, page};
use super::models::{Models, Shared};
use super::observe::log;
use super::observe::metrics::Metrics;
use super::{api, auth};
use crate::io::Failure;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use ruvllm::engine::Reuse;
use std::sync::Arc;
use std::time::Duration;

/// A server without a socket: its requests come from this process, which limits their number.
pub(crate) fn local(args: &AppArgs) -> Result<Router, Failure> {
    let purpose = Purpose {
        model: &args.model,
        alias: None,
        threads: None,
        n_models: 1,
        is_beside_others: false,
        has_room: &mut |_| Ok(()),
        learns: false,
        // An answer does not depend on those before.
        reuse: Reuse::Prompt,
        max_requests: usize::MAX,
        max_itl: None,
        watchdog: Duration::MAX,
        audit_log: None,
        metrics: Metrics::default(),
        isolates_templates: true,
    };
    let models = Models::fixed(App::open(args, purpose)?);
    Ok(router(Shared {
        models,
        keys: Arc::default(),
        memories: Arc::default(),
        bodies: Budget::new(usize::MAX),
        origins: Arc::default(),
        // In a file of requests a typing mistake would cost a night.
        strict: true,
    }))
}

pub(super) fn router(shared: Shared) -> Router {
    let guarded = api::guarded().layer(from_fn_with_state(shared.clone(), guarded));
    let protected = api::protected()
        .merge(guarded)
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

/// Refuses what a page of somebody else's has a browser send (`http/guard.rs`).
async fn guarded(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    match guard::check(
        request.method(),
        request.headers(),
        &shared.origins,
        shared.keys.is_empty(),
    ) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn not_allowed(method: Method) -> ApiError {
    let message = format!("this path takes no {method}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        message,
    )
}
