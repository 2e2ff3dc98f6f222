//! Adapters by name, as many in memory as a budget allows.

use crate::gguf::Gguf;
use crate::lora::site::{Base, TargetModule};
use crate::lora::{Adapter, AdapterError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Adapters of one model by name. A file is read when its adapter is first asked for; when the
/// adapters in memory take more than the budget, the least recently used ones are dropped, and read
/// again when they are asked for.
///
/// A returned adapter stays valid: a request ends with the adapter that it began with, even if the
/// name has another file by then or the adapter was dropped. The budget counts the registry's own
/// references.
///
/// ```
/// use ruvllm::{Model, lora::{Adapter, AdapterRegistry}};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// # let folder = std::env::temp_dir().join(format!("ruvllm-registry-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("poems.gguf");
/// Adapter::zeros(&model, 2, 1, |site| site.part() == "attn_q")?.save(&path)?;
/// let registry = AdapterRegistry::new(&model, 64 << 20);
/// registry.set("poems", &path);
/// let adapter = registry.get("poems")?;
/// assert_eq!(adapter.max_rank(), 2);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct AdapterRegistry {
    arch: String,
    sites: Arc<[TargetModule]>,
    budget: u64,
    /// The most recently used last.
    entries: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    path: PathBuf,
    adapter: Option<Arc<Adapter>>,
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.adapter.as_ref().map_or(0, |adapter| adapter.bytes())
    }
}

impl AdapterRegistry {
    /// An empty registry of adapters of `base`.
    pub(crate) fn of(base: Base<'_>, budget: u64) -> AdapterRegistry {
        AdapterRegistry {
            arch: base.arch.to_owned(),
            sites: Arc::clone(base.sites),
            budget,
            entries: Mutex::default(),
        }
    }

    /// Gives the adapter in a file this name, in place of an earlier one. Nothing is read yet.
    pub fn set(&self, name: impl Into<String>, path: impl AsRef<Path>) {
        let (name, path) = (name.into(), path.as_ref().to_owned());
        let mut entries = self.lock();
        entries.retain(|entry| entry.name != name);
        entries.push(Entry {
            name,
            path,
            adapter: None,
        });
    }

    /// Forgets a name; whether it was known.
    pub fn remove(&self, name: &str) -> bool {
        let mut entries = self.lock();
        let n = entries.len();
        entries.retain(|entry| entry.name != name);
        entries.len() < n
    }

    /// The adapter with this name. Waits while another one is read.
    ///
    /// # Errors
    /// [`AdapterError::UnknownName`]; [`AdapterError::OverBudget`] if it is larger than the whole
    /// budget; or as [`Adapter::open`].
    pub fn get(&self, name: &str) -> Result<Arc<Adapter>, AdapterError> {
        let mut entries = self.lock();
        let Some(i) = entries.iter().position(|entry| entry.name == name) else {
            return Err(AdapterError::UnknownName {
                name: name.to_owned(),
            });
        };
        let adapter = match &entries[i].adapter {
            Some(adapter) => Arc::clone(adapter),
            None => Arc::new(self.read(&entries[i].path)?),
        };
        let (bytes, budget) = (adapter.bytes(), self.budget);
        if bytes > budget {
            return Err(AdapterError::OverBudget {
                name: name.to_owned(),
                bytes,
                budget,
            });
        }
        let mut entry = entries.remove(i);
        entry.adapter = Some(Arc::clone(&adapter));
        entries.push(entry);
        let mut held: u64 = entries.iter().map(Entry::bytes).sum();
        for entry in entries.iter_mut() {
            if held <= budget {
                break;
            }
            held -= entry.bytes();
            entry.adapter = None;
        }
        Ok(adapter)
    }

    fn read(&self, path: &Path) -> Result<Adapter, AdapterError> {
        let base = Base {
            arch: &self.arch,
            sites: &self.sites,
        };
        Adapter::read(&Gguf::open(path)?, base)
    }

    /// Bytes of the adapters that it holds.
    pub fn bytes(&self) -> u64 {
        self.lock().iter().map(Entry::bytes).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
