//! Names of requests and answers, and who sent a request.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// What made an answer.
pub(super) const FINGERPRINT: &str = concat!("ruvllm-", env!("CARGO_PKG_VERSION"));

/// Whose request it is.
#[derive(Clone)]
pub(super) struct Caller {
    /// The request's name.
    pub(super) request: Arc<str>,
    pub(super) path: Arc<str>,
    /// Each key is a tenant of its own, who sees no other's cached prompts.
    pub(super) tenant: Arc<str>,
}

/// A new identifier.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}", random())
}

/// A new identifier of nine letters and digits, which is what Mistral's chat templates take as the
/// id of a call.
pub(super) fn short_id() -> String {
    let id = format!("c{:016x}", random());
    id[..9].to_owned()
}

/// Unpredictable 64-bit value.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
