//! `/v1/rerank`: documents in the order in which they answer a query.

use crate::serve::api::body::Body;
use crate::serve::api::embeddings::{MAX_TEXTS, Truncation};
use crate::serve::blocking::CancelOnDrop;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::models::Shared;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm::Reranker;
use ruvllm::SessionError;
use serde_json::{Value, json};

/// Documents that become tokens at once, each with the query: those of all could take much more
/// memory than the request.
const AT_ONCE: usize = 16;

/// A document: a text, or an object with one.
fn text_of(document: &Value) -> Result<String, ApiError> {
    let text = document.as_str().or_else(|| document.get("text")?.as_str());
    text.map(str::to_owned)
        .ok_or_else(|| ApiError::field("documents", "expected an array of texts"))
}

/// The tokens of a query and as much of a document as fits into `n` tokens, of its end if it is
/// shortened `from_start`; `None` where the query alone does not fit. What stands around them stays.
fn shortened(
    reranker: &Reranker,
    (query, document): (&str, &str),
    n: usize,
    from_start: bool,
) -> Result<Option<Vec<u32>>, SessionError> {
    let part = |len: usize| {
        let mut at = if from_start {
            document.len() - len
        } else {
            len
        };
        while !document.is_char_boundary(at) {
            at -= 1;
        }
        let (before, behind) = document.split_at(at);
        if from_start { behind } else { before }
    };
    let mut tokens = reranker.pair(query, part(0))?;
    if tokens.len() > n {
        return Ok(None);
    }
    // Steps grow until the part no longer fits, so that what is left out costs nothing; then halves
    // of what remains are tried.
    let (mut fits, mut too_long, mut step) = (0, document.len(), n);
    while too_long - fits > 1 {
        let len = fits + step.clamp(1, (too_long - fits) / 2);
        let longer = reranker.pair(query, part(len))?;
        if longer.len() <= n {
            (fits, tokens, step) = (len, longer, 2 * step);
        } else {
            too_long = len;
        }
    }
    Ok(Some(tokens))
}

pub(super) async fn rerank(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let query: String = fields.need("query")?;
    let documents: Vec<Value> = fields.need("documents")?;
    if documents.is_empty() || documents.len() > MAX_TEXTS {
        let message = format!(
            "expected 1 to {MAX_TEXTS} of them, found {}",
            documents.len()
        );
        return Err(ApiError::field("documents", message));
    }
    let documents: Vec<String> = documents.iter().map(text_of).collect::<Result<_, _>>()?;
    let top_n = fields.take::<usize>("top_n")?.unwrap_or(documents.len());
    let with_documents = fields.flag("return_documents")?;
    let truncation = Truncation::of(&app, &mut fields)?;
    fields.ignore(&["model", "user", "rid"]);
    fields.finish()?;
    let reranker = Reranker::new(&app.engine)?;
    let _cancel = CancelOnDrop(reranker.cancel_token());
    let pair = {
        let reranker = reranker.clone();
        move |i: usize, document: &str| {
            let tokens = reranker.pair(&query, document)?;
            let Some(n) = truncation.kept_of(tokens.len(), "documents", i)? else {
                return Ok(tokens);
            };
            let both = (&*query, document);
            shortened(&reranker, both, n, truncation.from_start)?.ok_or_else(|| {
                let message = format!("the query leaves no room for documents in {n} tokens");
                ApiError::field("query", message).with_code("context_length_exceeded")
            })
        }
    };
    let computed = app.pool(move || {
        let (mut n_tokens, mut scores) = (0, Vec::new());
        for some in documents.chunks(AT_ONCE) {
            let first = scores.len();
            let pairs = some
                .iter()
                .enumerate()
                .map(|(i, document)| pair(first + i, document))
                .collect::<Result<Vec<_>, ApiError>>()?;
            n_tokens += pairs.iter().map(Vec::len).sum::<usize>();
            scores.extend(reranker.rank_tokens(&pairs)?);
        }
        Ok((n_tokens, scores, documents))
    });
    let (n_tokens, scores, documents) = computed.await?;
    let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let results = ranked.into_iter().take(top_n).map(|(index, score)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if with_documents {
            result["document"] = json!({"text": documents[index]});
        }
        result
    });
    let answer = json!({
        "object": "list", "model": app.name, "results": results.collect::<Vec<_>>(),
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    });
    Ok(json_response(StatusCode::OK, &answer))
}
