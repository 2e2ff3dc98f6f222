//! Whether this build can run a model, as far as its header tells.

use ruvllm::Tokenizer;
use ruvllm::gguf::Header;
use ruvllm::model::Hparams;
use std::fmt::Display;

/// Why this build cannot run a model with this header and what it tells, as far as that shows.
pub(crate) fn obstacle<E: Display, F: Display>(
    header: &Header,
    hparams: &Result<Hparams, E>,
    tokenizer: &Result<Option<Tokenizer>, F>,
) -> Option<String> {
    match (hparams, tokenizer, header.unsupported_weight()) {
        (Err(error), ..) => Some(error.to_string()),
        (_, Err(error), _) => Some(error.to_string()),
        (.., Some(t)) => Some(format!(
            "tensor {} is of type {}, which is not supported",
            t.name, t.dtype
        )),
        _ => None,
    }
}
