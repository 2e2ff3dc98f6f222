//! llama-server's `/slots/ID?action=save|restore|erase`: the text of a slot in a session file of
//! `--slot-save-path`. Each key has slots, and a folder, of its own.

use crate::serve::api::body::Body;
use crate::serve::auth::name_of;
use crate::serve::blocking::CancelOnDrop;
use crate::serve::folder;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::ids::Caller;
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, Path as UrlPath, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm::session::StateError;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Most files of a tenant.
const MAX_FILES: usize = 1024;

pub(super) async fn act(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    id: Result<UrlPath<usize>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let UrlPath(id) = id.map_err(|error| ApiError::wrong(error.to_string()))?;
    let app = shared.app_of_query(request.uri()).await?;
    let query = request.uri().query().unwrap_or_default().to_owned();
    let action = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("action="));
    let Some(slots) = &app.slots else {
        let message = "slots are saved into a folder, and the server has no --slot-save-path";
        return Err(ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            "not_supported_error",
            message,
        ));
    };
    if id >= app.n_parallel {
        let n = app.n_parallel;
        return Err(ApiError::wrong(format!("there are {n} slots, and no {id}")));
    }
    let tenant = Arc::clone(&caller.tenant);
    if action == Some("erase") {
        let n_erased = slots.erase(&tenant, id);
        let erased = json!({"id_slot": id, "n_erased": n_erased});
        return Ok(json_response(StatusCode::OK, &erased));
    }
    let folder = folder_of(&shared, &caller, &slots.folder);
    let Body(mut fields, _share) = Body::from_request(request, &shared).await?;
    let name: String = fields.need("filename")?;
    fields.finish()?;
    let mut options = slots.options.clone();
    options.prefix.salt = tenant.to_string();
    let mut session = app.engine.session_with(&options)?;
    let _cancel = CancelOnDrop(session.cancel_token());
    let begun = Instant::now();
    let answer = match action {
        Some("save") => {
            let Some(tokens) = slots.get(&tenant, id) else {
                let message = format!("slot {id} has no text: a request names it with id_slot");
                return Err(ApiError::wrong(message));
            };
            if slots.options.context_shift.is_some() && tokens.len() > app.n_ctx {
                let message = format!(
                    "slot {id} has lost a part of its text to a context shift, and is not saved"
                );
                return Err(ApiError::wrong(message));
            }
            let path = folder::place(&folder, "filename", &name)?;
            let save = move || {
                has_room(&folder, &path)?;
                session.cache().reuse(&tokens)?;
                let n_cached = session.position();
                session.prefill(&tokens[n_cached..])?;
                session.state().save(&path).map_err(of_state)?;
                let n_bytes = std::fs::metadata(&path).map_or(0, |file| file.len());
                Ok((tokens.len(), n_bytes))
            };
            let (n, n_bytes) = app.pool(save).await?;
            let ms = crate::io::milliseconds(begun.elapsed());
            json!({"id_slot": id, "filename": name, "n_saved": n, "n_written": n_bytes, "timings": {"save_ms": ms}})
        }
        Some("restore") => {
            let path = folder::existing(&folder, "filename", &name)?;
            let load = move || {
                session.cache().load(&path).map_err(of_state)?;
                let n_bytes = std::fs::metadata(&path).map_or(0, |file| file.len());
                // Its keys and values go to the prefix cache with it.
                Ok((session.tokens().to_vec(), n_bytes))
            };
            let (tokens, n_bytes) = app.pool(load).await?;
            let n = tokens.len();
            slots.set(&tenant, id, tokens);
            let ms = crate::io::milliseconds(begun.elapsed());
            json!({"id_slot": id, "filename": name, "n_restored": n, "n_read": n_bytes, "timings": {"restore_ms": ms}})
        }
        _ => {
            let message = "expected action=save, action=restore or action=erase";
            return Err(ApiError::field("action", message));
        }
    };
    Ok(json_response(StatusCode::OK, &answer))
}

/// A file that is no session, or one of another model.
fn of_state(error: StateError) -> ApiError {
    match error {
        StateError::Session(error) => error.into(),
        error => ApiError::field("filename", error),
    }
}

/// The folder of a caller's files: each key has its own, which does not tell the key.
fn folder_of(shared: &Shared, caller: &Caller, all: &Path) -> PathBuf {
    let key = caller
        .tenant
        .parse()
        .ok()
        .and_then(|i: usize| shared.keys.get(i));
    key.map_or_else(|| all.to_owned(), |key| all.join(name_of(key)))
}

/// Makes the folder; refuses one more file where there are too many.
fn has_room(folder: &Path, path: &Path) -> Result<(), ApiError> {
    let wrong = |error: std::io::Error| ApiError::internal(format!("the folder of slots: {error}"));
    std::fs::create_dir_all(folder).map_err(wrong)?;
    if !path.exists() && std::fs::read_dir(folder).map_err(wrong)?.count() >= MAX_FILES {
        let message = format!("there are {MAX_FILES} saved slots: save over one of them");
        return Err(ApiError::field("filename", message));
    }
    Ok(())
}
