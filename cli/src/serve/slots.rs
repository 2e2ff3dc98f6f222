//! Texts of slots: what the last request that named a slot had read and written, for whoever saves
//! it. A slot holds no place in the scheduler; keys and values are in the prefix cache.

use ruvllm::SessionOptions;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens by tenant and slot.
type Texts = Arc<Mutex<HashMap<(Arc<str>, usize), Vec<u32>>>>;

/// The slots of a model.
pub(crate) struct Slots {
    /// Where they are saved.
    pub(crate) folder: PathBuf,
    /// Of sessions that are saved and restored.
    pub(crate) options: SessionOptions,
    texts: Texts,
}

impl Slots {
    pub(crate) fn new(folder: PathBuf, options: SessionOptions) -> Slots {
        Slots {
            folder,
            options,
            texts: Arc::default(),
        }
    }

    /// The tokens in a tenant's slot.
    pub(crate) fn get(&self, tenant: &Arc<str>, id: usize) -> Option<Vec<u32>> {
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.get(&(Arc::clone(tenant), id)).cloned()
    }

    /// Puts tokens into a tenant's slot.
    pub(crate) fn set(&self, tenant: &Arc<str>, id: usize, tokens: Vec<u32>) {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.insert((Arc::clone(tenant), id), tokens);
    }

    /// Empties a tenant's slot; how many tokens were in it.
    pub(crate) fn erase(&self, tenant: &Arc<str>, id: usize) -> usize {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts
            .remove(&(Arc::clone(tenant), id))
            .map_or(0, |tokens| tokens.len())
    }

    /// A text that will be in a slot when its answer ends.
    pub(crate) fn text(&self, tenant: &Arc<str>, id: usize, prompt: &[u32]) -> SlotText {
        SlotText {
            texts: Arc::clone(&self.texts),
            key: (Arc::clone(tenant), id),
            tokens: prompt.to_vec(),
        }
    }
}

/// A text that is in its slot when this is dropped, as far as it came.
pub(crate) struct SlotText {
    texts: Texts,
    key: (Arc<str>, usize),
    tokens: Vec<u32>,
}

impl SlotText {
    /// Another token of the answer.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }
}

impl Drop for SlotText {
    fn drop(&mut self) {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.insert(self.key.clone(), std::mem::take(&mut self.tokens));
    }
}
