//! The APIs: a file each, and what several of them share.

mod adapters;
mod anthropic;
mod blocks;
mod body;
mod content;
mod embeddings;
mod feedback;
mod memory;
mod models;
mod native;
mod ollama;
mod openai;
mod rerank;
mod responses;
mod slots;

use crate::serve::models::Shared;
use axum::Router;
use axum::routing::{get, patch, post};

/// Paths that need a key, if there are keys.
pub(super) fn protected() -> Router<Shared> {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat))
        .route("/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::completions))
        .route(
            "/v1/chat/completions/input_tokens",
            post(openai::count_tokens),
        )
        .route("/v1/responses", post(responses::responses))
        .route("/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::count_tokens))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/embeddings", post(embeddings::embedding))
        .route("/embedding", post(embeddings::embedding))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(models::models))
        .route("/v1/models/{*name}", get(models::model))
        .route("/models", get(models::models))
        .merge(ollama::routes())
        .route("/completion", post(native::completion))
        .route("/completions", post(native::completion))
        .route("/infill", post(native::infill))
        .route("/slots", get(native::slots))
        .route("/props", get(native::props))
        .route("/lora-adapters", get(adapters::list))
        .route("/tokenize", post(native::tokenize))
        .route("/detokenize", post(native::detokenize))
        .route("/apply-template", post(native::apply_template))
        .route("/metrics", get(native::metrics))
        .route("/feedback", post(feedback::feedback))
}

/// Paths that change what the server is or remembers, which need a key, too, and more (`http/guard.rs`).
pub(super) fn guarded() -> Router<Shared> {
    Router::new()
        .route("/slots/{id}", post(slots::act))
        .route("/memory", get(memory::list).post(memory::add))
        .route(
            "/memory/{number}",
            patch(memory::change).delete(memory::forget),
        )
        .route("/models/load", post(models::load))
        .route("/models/unload", post(models::unload))
        .route("/lora-adapters", post(adapters::scale))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
}

/// Paths that need none.
pub(super) fn public() -> Router<Shared> {
    Router::new()
        .route("/health", get(native::health))
        .route("/v1/health", get(native::health))
}
