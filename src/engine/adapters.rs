//! Adapters of a session.

use crate::kv::Counted;
use crate::lora::{AdapterError, Attached};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies an adapter that is attached to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId(pub(super) u64);

/// A process-unique id, never 0.
pub(super) fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// The adapters of a session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Adapters {
    pub(crate) attached: Vec<Attached>,
    pub(super) ids: Vec<AdapterId>,
    /// Their bytes in the pool's budget.
    pub(super) counted: Vec<Arc<Counted>>,
    pub(super) generation: u64,
}

impl Adapters {
    pub(crate) fn index(&self, id: AdapterId) -> Result<usize, AdapterError> {
        self.ids
            .iter()
            .position(|&i| i == id)
            .ok_or(AdapterError::NotAttached)
    }
}
