//! The models that are here: `/v1/models`, in OpenAI's form or, for its callers, in Anthropic's; and
//! which of them are loaded.

use crate::io::unix_time;
use crate::serve::api::body::Body;
use crate::serve::http::dialect::is_anthropic;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::models::{Listed, Shared, decoded};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use serde_json::{Value, json};

/// A model by one of its names.
struct Named<'a> {
    id: String,
    of: &'a Listed<'a>,
}

/// All names by which requests ask for models.
fn names<'a>(list: &'a [Listed<'a>]) -> Vec<Named<'a>> {
    let names = |of: &'a Listed<'a>| {
        let ids: Vec<String> = match &of.app {
            Some(app) => app.names().collect(),
            None => of.entry.name().into_iter().map(str::to_owned).collect(),
        };
        ids.into_iter().map(move |id| Named { id, of })
    };
    list.iter().flat_map(names).collect()
}

/// As OpenAI's API has it, with what llama-server's router says of a model's state.
fn model_json(Named { id, of }: &Named<'_>) -> Value {
    let mut status = json!({"value": of.state});
    if let Some(failure) = &of.failure {
        status["failed"] = true.into();
        status["error"] = failure.clone().into();
    }
    let Some(app) = &of.app else {
        let path = of.entry.path.as_ref();
        return json!({
            "id": id, "object": "model", "created": unix_time(), "owned_by": "ruvllm",
            "path": path.map(|path| path.display().to_string()), "status": status,
        });
    };
    let hparams = app.model.hparams();
    json!({
        "id": id, "object": "model", "created": app.created, "owned_by": "ruvllm",
        "path": app.path, "status": status,
        // The size of the context, where clients of vLLM and of routers look for it.
        "max_model_len": app.n_ctx, "context_length": app.n_ctx,
        "meta": {
            "n_ctx": app.n_ctx, "n_ctx_train": hparams.n_ctx_train, "n_vocab": app.tokenizer.n_vocab(),
            "n_embd": hparams.n_embd, "n_params": app.model.n_params(),
        },
    })
}

/// The same, in Anthropic's form.
fn anthropic_json(Named { id, of }: &Named<'_>) -> Value {
    let Some(app) = &of.app else {
        return json!({"type": "model", "id": id, "display_name": id});
    };
    let max_tokens = app.max_tokens.map_or(app.n_ctx, |n| n.min(app.n_ctx));
    json!({
        "type": "model", "id": id, "display_name": id, "created_at": app.created_at,
        "max_input_tokens": app.n_ctx, "max_tokens": max_tokens,
    })
}

/// Which models of the list Anthropic's callers want: those after or before one, and how many.
#[derive(Default)]
struct Page {
    after: Option<String>,
    before: Option<String>,
    limit: Option<usize>,
}

impl Page {
    /// As a query says: `after_id=a&limit=20`.
    fn parse(query: &str) -> Result<Page, ApiError> {
        let mut page = Page::default();
        for (name, value) in query.split('&').filter_map(|field| field.split_once('=')) {
            match name {
                "after_id" => page.after = Some(decoded(value)),
                "before_id" => page.before = Some(decoded(value)),
                "limit" => match value.parse() {
                    Ok(limit) if limit > 0 => page.limit = Some(limit),
                    _ => return Err(ApiError::field("limit", "expected a number from 1 on")),
                },
                _ => {}
            }
        }
        Ok(page)
    }

    /// The names on the page, and whether there are more in its direction.
    fn of<'a>(&self, names: &'a [String]) -> Result<(&'a [String], bool), ApiError> {
        let place = |id: &String| {
            let found = names.iter().position(|name| name == id);
            found.ok_or_else(|| ApiError::wrong(format!("no model is called {id:?} here")))
        };
        let after = self.after.as_ref().map(place).transpose()?;
        let before = self.before.as_ref().map(place).transpose()?;
        let limit = self.limit.unwrap_or(usize::MAX);
        Ok(match before {
            Some(at) => {
                let n = at.min(limit);
                (&names[at - n..at], n < at)
            }
            None => {
                let rest = &names[after.map_or(0, |at| at + 1)..];
                (&rest[..rest.len().min(limit)], limit < rest.len())
            }
        })
    }
}

pub(super) async fn models(
    State(shared): State<Shared>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, ApiError> {
    let list = shared.models.list();
    if !shared.models.are_several() && shared.models.are_starting() {
        return Err(ApiError::loading());
    }
    let all = names(&list);
    let models = if is_anthropic(&headers) {
        let page = Page::parse(uri.query().unwrap_or_default())?;
        let ids: Vec<_> = all.iter().map(|named| named.id.clone()).collect();
        let (ids, has_more) = page.of(&ids)?;
        let models = all.iter().filter(|named| ids.contains(&named.id));
        let models: Vec<_> = models.map(anthropic_json).collect();
        json!({"data": models, "has_more": has_more, "first_id": ids.first(), "last_id": ids.last()})
    } else {
        let models: Vec<_> = all.iter().map(model_json).collect();
        json!({"object": "list", "data": models})
    };
    Ok(json_response(StatusCode::OK, &models))
}

pub(super) async fn model(
    State(shared): State<Shared>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::wrong(error.to_string()))?;
    let list = shared.models.list();
    if !shared.models.are_several() && shared.models.are_starting() {
        return Err(ApiError::loading());
    }
    let all = names(&list);
    let Some(named) = all.iter().find(|named| named.id == name) else {
        let message = format!("no model is called {name:?} here; /v1/models lists them");
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "not_found_error",
            message,
        ));
    };
    let model = if is_anthropic(&headers) {
        anthropic_json(named)
    } else {
        model_json(named)
    };
    Ok(json_response(StatusCode::OK, &model))
}

/// `POST /models/load`, as llama-server's router: loads a model by hand.
pub(super) async fn load(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let name: String = fields.need("model")?;
    fields.finish()?;
    shared.models.app(shared.place(&name)?).await?;
    Ok(json_response(StatusCode::OK, &json!({"success": true})))
}

/// `POST /models/unload`: it answers what it was asked, and goes.
pub(super) async fn unload(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let name: String = fields.need("model")?;
    fields.finish()?;
    if !shared.models.unload(shared.place(&name)?)? {
        return Err(ApiError::wrong(format!("{name:?} is not loaded")));
    }
    Ok(json_response(StatusCode::OK, &json!({"success": true})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_parts_of_the_list() {
        let names = ["a", "b c", "d:e", "f"].map(str::to_owned);
        for (query, expected, has_more) in [
            ("", &names[..], false),
            ("beta=true&limit=1000", &names, false),
            ("limit=3", &names[..3], true),
            ("limit=4", &names, false),
            ("after_id=b%20c", &names[2..], false),
            ("after_id=d%3Ae&limit=1", &names[3..], false),
            ("after_id=a&limit=2", &names[1..3], true),
            ("after_id=f", &[], false),
            ("before_id=d:e", &names[..2], false),
            ("before_id=f&limit=2", &names[1..3], true),
        ] {
            let page = Page::parse(query).unwrap();
            assert_eq!(page.of(&names).unwrap(), (expected, has_more), "{query}");
        }
        assert!(Page::parse("limit=0").is_err() && Page::parse("limit=x").is_err());
        assert!(Page::parse("after_id=%zz%").unwrap().of(&names).is_err());
    }
}
