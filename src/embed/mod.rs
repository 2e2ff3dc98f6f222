//! Vectors of texts, and scores of pairs of texts.

mod embedder;
mod reranker;

pub use embedder::Embedder;
pub use reranker::Reranker;
