//! Encoded images, by the hash of all that they depend on: those used last, within a budget, in
//! memory and, if there is a folder, on disk.

use crate::kv::FileCache;
use crate::vision::digest::Digest;
use crate::vision::encoded::Encoded;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Default limit on the bytes of embeddings in memory.
const BUDGET: u64 = 256 << 20;
/// Most bytes of a file that is read.
const MAX_FILE: u64 = 1 << 32;
const EXTENSION: &str = "image";

/// Encoded images.
#[derive(Default)]
pub(super) struct EncodedCache {
    entries: Mutex<Entries>,
    folder: OnceLock<FileCache>,
}

struct Entries {
    budget: u64,
    bytes: u64,
    /// The one used last at the end.
    all: Vec<(Digest, Arc<Encoded>)>,
}

impl Default for Entries {
    fn default() -> Entries {
        Entries {
            budget: BUDGET,
            bytes: 0,
            all: Vec::new(),
        }
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
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_budget(&self, bytes: u64) {
        let mut entries = self.lock();
        entries.budget = bytes;
        entries.shrink();
    }

    /// Keeps images in a folder, too; the first folder that is set stays.
    pub(super) fn set_folder(&self, path: &Path, budget: u64) -> io::Result<()> {
        let files = FileCache::open(path, budget, EXTENSION)?;
        let _ = self.folder.set(files);
        Ok(())
    }

    pub(super) fn get(&self, digest: &Digest) -> Option<Arc<Encoded>> {
        self.remembered(digest).or_else(|| {
            let bytes = self.folder.get()?.read(&digest.hex(), MAX_FILE)?;
            let encoded = Arc::new(Encoded::from_file(&bytes, digest)?);
            self.remember(digest.clone(), &encoded);
            Some(encoded)
        })
    }

    pub(super) fn put(&self, digest: Digest, encoded: &Arc<Encoded>) {
        if let Some(folder) = self.folder.get() {
            // What cannot be written is encoded again.
            let _ = folder.write(&digest.hex(), &[&encoded.to_file(&digest)]);
        }
        self.remember(digest, encoded);
    }

    fn remembered(&self, digest: &Digest) -> Option<Arc<Encoded>> {
        let mut entries = self.lock();
        let i = entries.all.iter().position(|(other, _)| other == digest)?;
        let entry = entries.all.remove(i);
        let encoded = Arc::clone(&entry.1);
        entries.all.push(entry);
        Some(encoded)
    }

    fn remember(&self, digest: Digest, encoded: &Arc<Encoded>) {
        let mut entries = self.lock();
        if entries.all.iter().all(|(other, _)| *other != digest) {
            entries.bytes += encoded.bytes();
            entries.all.push((digest, Arc::clone(encoded)));
            entries.shrink();
        }
    }
}
