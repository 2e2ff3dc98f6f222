//! Encoded images, by the hash of all that they depend on: those used last, within a budget.

use crate::vision::digest::Digest;
use crate::vision::encoded::Encoded;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Default limit on the bytes of embeddings.
const BUDGET: u64 = 256 << 20;

/// Encoded images.
pub(super) struct EncodedCache(Mutex<Entries>);

struct Entries {
    budget: u64,
    bytes: u64,
    /// The one used last at the end.
    all: Vec<(Digest, Arc<Encoded>)>,
}

impl Default for EncodedCache {
    fn default() -> EncodedCache {
        EncodedCache(Mutex::new(Entries {
            budget: BUDGET,
            bytes: 0,
            all: Vec::new(),
        }))
    }
}

impl Entries {
    fn shrink(&mut self) {
        let mut n = 0;
        while self.bytes > self.budget && n < self.all.len() {
            self.bytes -= self.all[n].1.bytes();
            n += 1;
        }
        self.all.drain(..n);
    }
}

impl EncodedCache {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_budget(&self, bytes: u64) {
        let mut entries = self.lock();
        entries.budget = bytes;
        entries.shrink();
    }

    pub(super) fn get(&self, digest: &Digest) -> Option<Arc<Encoded>> {
        let mut entries = self.lock();
        let i = entries.all.iter().position(|(other, _)| other == digest)?;
        let entry = entries.all.remove(i);
        let encoded = Arc::clone(&entry.1);
        entries.all.push(entry);
        Some(encoded)
    }

    pub(super) fn put(&self, digest: Digest, encoded: &Arc<Encoded>) {
        let mut entries = self.lock();
        if entries.all.iter().all(|(other, _)| *other != digest) {
            entries.bytes += encoded.bytes();
            entries.all.push((digest, Arc::clone(encoded)));
            entries.shrink();
        }
    }
}
