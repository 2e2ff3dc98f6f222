//! Adapters that know what is remembered: which is in effect, and the one before it.

use crate::learn::LearnError;
use crate::memory::{Entry, MemoryError, Verdict};
use crate::sona::SonaError;
use crate::sona::folder::remove;
use ruvllm::gguf::{Array, Gguf, GgufError, Metadata, Value, Writer};
use ruvllm::kv::hash::{SEED, mix};
use ruvllm::lora::Adapter;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const STATE: &str = "memory-versions.gguf";
pub(super) const QUESTIONS: &str = "memory-questions.gguf";
const CHECKPOINT: &str = "memory-training.gguf";
const TYPE: &str = "memory";
/// Incremented when a file of the new form could be misread as one of the old.
const VERSION: u32 = 1;
/// Versions that are kept: the one in effect, and the one before it.
const KEPT: usize = 2;

/// An adapter that was trained on what is remembered.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Version {
    /// Its number, from 1.
    pub number: u64,
    /// Questions that it was judged by, which it was not trained on.
    pub n_asked: usize,
    /// Of them, those that it answers without notes.
    pub n_said: usize,
    /// Hashes of the texts that it was trained on.
    pub(super) texts: BTreeSet<u64>,
}

impl Version {
    /// Entries that it was trained on.
    pub fn n_entries(&self) -> usize {
        self.texts.len()
    }
}

/// What a folder keeps beside its entries.
#[derive(Debug, Default)]
pub(super) struct Versions {
    /// Fingerprint of the model that they are for.
    pub(super) model: u64,
    /// Number of the next.
    next: u64,
    /// The last is in effect.
    pub(super) all: Vec<Version>,
    /// Hashes of the texts of the latest attempt, whether it was kept or not.
    pub(super) tried: BTreeSet<u64>,
    /// The adapter in effect, once it was asked for.
    pub(super) adapter: Option<Arc<Adapter>>,
}

/// What tells a text from others.
pub(super) fn text_hash(text: &str) -> u64 {
    mix(SEED, text.as_bytes())
}

/// Hashes of the texts of entries.
pub(super) fn hashes<'a>(entries: impl Iterator<Item = &'a Entry>) -> BTreeSet<u64> {
    entries.map(|entry| text_hash(&entry.text)).collect()
}

pub(super) fn numbers(metadata: &Metadata, key: &str) -> Result<Vec<u64>, GgufError> {
    match metadata.get(key) {
        Some(Value::Array(Array::U64(values))) => Ok(values.to_vec()),
        _ => Err(GgufError::MissingKey { key: key.into() }),
    }
}

pub(super) fn put_numbers(w: &mut Writer<'static>, key: String, values: impl Iterator<Item = u64>) {
    w.metadata(key, Value::Array(Array::U64(values.collect())));
}

/// A file of this kind, if there is one.
pub(super) fn read(path: &Path) -> Result<Option<Gguf>, MemoryError> {
    if !path.exists() {
        return Ok(None);
    }
    let gguf = Gguf::open(path)
        .map_err(LearnError::Gguf)
        .map_err(SonaError::from)?;
    Ok(Some(gguf))
}

pub(super) fn begun() -> Writer<'static> {
    let mut w = Writer::new();
    // It contains text of the owner.
    w.overwrite().private();
    w.metadata("general.type", TYPE);
    w.metadata("memory.version", VERSION);
    w
}

pub(super) fn damaged(path: &Path, error: GgufError) -> MemoryError {
    let (path, what) = (path.to_owned(), error.to_string());
    SonaError::Damaged {
        path,
        offset: 0,
        what,
    }
    .into()
}

pub(super) fn written(w: Writer<'static>, path: &Path) -> Result<(), MemoryError> {
    let written = w.write(path).map_err(LearnError::Gguf);
    Ok(written.map_err(SonaError::from)?)
}

impl Versions {
    /// What `path` has; texts that are no longer remembered are in none of it afterwards. `is_clean` is
    /// false if a process ended while it forgot.
    pub(super) fn open(
        path: &Path,
        entries: &[Entry],
        is_clean: bool,
    ) -> Result<Versions, MemoryError> {
        let state = path.join(STATE);
        let mut versions = match read(&state)? {
            None => Versions::default(),
            Some(gguf) => Versions::of(gguf.metadata()).map_err(|error| damaged(&state, error))?,
        };
        if !is_clean {
            versions.end_training(path)?;
        }
        versions.drop_unknown(path, entries)?;
        Ok(versions)
    }

    fn of(metadata: &Metadata) -> Result<Versions, GgufError> {
        if metadata.str("general.type")? != TYPE || metadata.u32("memory.version")? != VERSION {
            return Err(GgufError::MissingKey {
                key: "memory.version".into(),
            });
        }
        let mut all = Vec::new();
        for number in numbers(metadata, "memory.numbers")? {
            all.push(Version {
                number,
                n_asked: metadata.u32(&format!("memory.{number}.asked"))? as usize,
                n_said: metadata.u32(&format!("memory.{number}.said"))? as usize,
                texts: numbers(metadata, &format!("memory.{number}.texts"))?
                    .into_iter()
                    .collect(),
            });
        }
        Ok(Versions {
            model: metadata.u64("memory.model")?,
            next: metadata.u64("memory.next")?,
            tried: numbers(metadata, "memory.tried")?.into_iter().collect(),
            all,
            adapter: None,
        })
    }

    pub(super) fn save(&self, path: &Path) -> Result<(), MemoryError> {
        let mut w = begun();
        w.metadata("memory.model", self.model);
        w.metadata("memory.next", self.next);
        put_numbers(&mut w, "memory.tried".into(), self.tried.iter().copied());
        put_numbers(
            &mut w,
            "memory.numbers".into(),
            self.all.iter().map(|of| of.number),
        );
        for version in &self.all {
            let number = version.number;
            w.metadata(format!("memory.{number}.asked"), version.n_asked as u32);
            w.metadata(format!("memory.{number}.said"), version.n_said as u32);
            let texts = version.texts.iter().copied();
            put_numbers(&mut w, format!("memory.{number}.texts"), texts);
        }
        written(w, &path.join(STATE))
    }

    /// Some of `entries` were forgotten or changed: what is of them goes.
    pub(super) fn forget(&mut self, path: &Path, entries: &[Entry]) -> Result<(), MemoryError> {
        self.end_training(path)?;
        self.drop_unknown(path, entries)
    }

    /// Drops versions of texts that are not among `entries`, or turned out not to be right.
    fn drop_unknown(&mut self, path: &Path, entries: &[Entry]) -> Result<(), MemoryError> {
        let right = entries
            .iter()
            .filter(|entry| entry.verdict == Verdict::Success);
        let known = hashes(right);
        let n = (self.all.len(), self.tried.len());
        let is_known = |version: &Version| version.texts.is_subset(&known);
        for version in self.all.iter().filter(|version| !is_known(version)) {
            remove(&adapter_path(path, version.number))?;
        }
        self.all.retain(is_known);
        self.tried.retain(|hash| known.contains(hash));
        if (self.all.len(), self.tried.len()) == n {
            return Ok(());
        }
        self.adapter = None;
        self.save(path)
    }

    /// Removes what is left of a training.
    pub(super) fn end_training(&self, path: &Path) -> Result<(), MemoryError> {
        remove(&checkpoint(path))?;
        Ok(remove(&path.join(QUESTIONS))?)
    }

    /// A new version, or only that its texts were tried.
    pub(super) fn conclude(
        &mut self,
        path: &Path,
        model: u64,
        (version, adapter): (Version, Option<&Adapter>),
    ) -> Result<Option<u64>, MemoryError> {
        let mut old = Vec::new();
        if self.model != model {
            self.model = model;
            old.append(&mut self.all);
        }
        self.tried.clone_from(&version.texts);
        let mut kept = None;
        if let Some(adapter) = adapter {
            let number = self.next.max(1);
            let file = adapter_path(path, number);
            // What an interrupted attempt may have left.
            remove(&file)?;
            adapter.save(&file).map_err(SonaError::from)?;
            self.all.push(Version { number, ..version });
            self.next = number.saturating_add(1);
            old.extend(self.all.drain(..self.all.len().saturating_sub(KEPT)));
            self.adapter = None;
            kept = Some(number);
        }
        self.save(path)?;
        old.iter()
            .try_for_each(|of| remove(&adapter_path(path, of.number)))?;
        // Questions are kept: what does not change is not asked about again.
        remove(&checkpoint(path))?;
        Ok(kept)
    }
}

pub(super) fn adapter_path(path: &Path, number: u64) -> PathBuf {
    path.join(format!("memory-adapter-{number}.gguf"))
}

pub(super) fn checkpoint(path: &Path) -> PathBuf {
    path.join(CHECKPOINT)
}
