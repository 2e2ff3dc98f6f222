//! The models that are here: `/v1/models`, in OpenAI's form or, for its callers, in Anthropic's.

use crate::serve::app::{App, Shared};
use crate::serve::http::dialect::is_anthropic;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use serde_json::{Value, json};

/// The model under one of its names.
fn model_json(app: &App, id: &str) -> Value {
    let hparams = app.model.hparams();
    json!({
        "id": id, "object": "model", "created": app.created, "owned_by": "ruvllm",
        // The size of the context, where clients of vLLM and of routers look for it.
        "max_model_len": app.n_ctx, "context_length": app.n_ctx,
        "meta": {
            "n_ctx": app.n_ctx, "n_ctx_train": hparams.n_ctx_train, "n_vocab": app.tokenizer.n_vocab(),
            "n_embd": hparams.n_embd, "n_params": app.model.n_params(),
        },
    })
}

/// The same, in Anthropic's form.
fn anthropic_json(app: &App, id: &str) -> Value {
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

/// The text that a part of a query stands for, in which `%` begins the two digits of a byte.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let digits = behind
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        rest = match byte.filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                &behind[2..]
            }
            None => {
                bytes.push(*first);
                behind
            }
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) async fn models(
    State(shared): State<Shared>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let names: Vec<_> = app.names().collect();
    let models = if is_anthropic(&headers) {
        let page = Page::parse(uri.query().unwrap_or_default())?;
        let (names, has_more) = page.of(&names)?;
        let models: Vec<_> = names.iter().map(|id| anthropic_json(&app, id)).collect();
        json!({"data": models, "has_more": has_more, "first_id": names.first(), "last_id": names.last()})
    } else {
        let models: Vec<_> = names.iter().map(|id| model_json(&app, id)).collect();
        json!({"object": "list", "data": models})
    };
    Ok(json_response(StatusCode::OK, &models))
}

pub(super) async fn model(
    State(shared): State<Shared>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let Path(name) = name.map_err(|error| ApiError::wrong(error.to_string()))?;
    if !app.names().any(|id| id == name) {
        let message = format!("no model is called {name:?} here; /v1/models lists them");
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "not_found_error",
            message,
        ));
    }
    let model = if is_anthropic(&headers) {
        anthropic_json(&app, &name)
    } else {
        model_json(&app, &name)
    };
    Ok(json_response(StatusCode::OK, &model))
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
