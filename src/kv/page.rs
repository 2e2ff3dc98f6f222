//! Pages of keys and values, and the accounting of their memory.

use crate::kv::{KvBytes, KvType};
use bytemuck::{Pod, Zeroable};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Pages of at least this size are mapped separately, so that the system can back them by huge
/// pages. Rounding up to 16 KiB wastes 1.6 %.
const MAPPED: usize = 1 << 20;

/// Bytes of free pages of one size that are kept for later use.
pub(super) const MAX_FREE: usize = 64 << 20;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// Memory of a page that a GPU can access, too.
pub trait PageMemory: Send + Sync + fmt::Debug {
    /// Contents of the page.
    fn bytes(&self) -> &[u8];
    /// Contents of the page, mutable.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Address on the GPU; never 0.
    fn address(&self) -> u64;
}

/// Allocates memory for a page of this many bytes; `None` if there is none.
pub(super) type PageSource = Box<dyn Fn(usize) -> Option<Box<dyn PageMemory>> + Send + Sync>;

/// Memory of a page, initially zeros.
#[derive(Debug)]
pub(super) enum Memory {
    Heap(Vec<Line>),
    Mapped(memmap2::MmapMut),
    Shared(Box<dyn PageMemory>),
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Option<Memory> {
        if bytes < MAPPED || !cfg!(any(unix, windows)) {
            return bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(size_of::<Line>()))
                .ok()
                .map(Memory::Heap);
        }
        let map = memmap2::MmapMut::map_anon(bytes).ok()?;
        // Only a hint: the page works without huge pages, too. Miri does not know the call.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Memory::Mapped(map))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes(),
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes_mut(),
        }
    }
}

pub(super) struct Ledger {
    pub(super) budget: u64,
    /// Allocator of pages, if not the system.
    pub(super) source: Option<PageSource>,
    pub(super) state: Mutex<State>,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("budget", &self.budget)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) used: u64,
    pub(super) by_type: KvBytes,
    pub(super) free: u64,
    pub(super) n_pages: usize,
    /// Bytes of the adapters of sequences.
    pub(super) adapters: u64,
    pub(super) reserved: u64,
    /// These adapters by their ids.
    pub(super) counted: Vec<(usize, Weak<Counted>)>,
    /// Free pages by their size.
    pub(super) free_lists: Vec<(usize, Vec<Memory>)>,
}

impl Ledger {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Counts are changed only after operations that may panic.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn mark(&self, percent: u64) -> u64 {
        (u128::from(self.budget) * u128::from(percent) / 100) as u64
    }
}

/// An adapter whose bytes count in a pool.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(super) bytes: u64,
    pub(super) pool: Arc<Ledger>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.adapters -= self.bytes;
        state
            .counted
            .retain(|(_, counted)| counted.strong_count() > 0);
    }
}

/// Part of a pool's budget that is not for pages.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(super) bytes: u64,
    pub(super) pool: Arc<Ledger>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.pool.state().reserved -= self.bytes;
    }
}

impl State {
    /// Bytes of pages in use and of adapters, and those that are reserved.
    pub(super) fn taken(&self) -> u64 {
        self.used + self.adapters + self.reserved
    }

    pub(super) fn take_free(&mut self, bytes: usize) -> Option<Memory> {
        let (_, list) = self
            .free_lists
            .iter_mut()
            .find(|(size, _)| *size == bytes)?;
        let memory = list.pop()?;
        self.free -= bytes as u64;
        Some(memory)
    }

    /// Removes free pages from the lists until `size` bytes more fit into the budget.
    pub(super) fn release(&mut self, size: u64, budget: u64) -> Vec<Memory> {
        let mut released = Vec::new();
        while self.taken().saturating_add(self.free).saturating_add(size) > budget {
            let Some((bytes, list)) = self
                .free_lists
                .iter_mut()
                .find(|(_, list)| !list.is_empty())
            else {
                break;
            };
            self.free -= *bytes as u64;
            released.extend(list.pop());
        }
        released
    }

    /// Keeps a free page, or returns it if there are enough of its size.
    pub(super) fn keep(&mut self, bytes: usize, memory: Memory) -> Option<Memory> {
        let i = self
            .free_lists
            .iter()
            .position(|(size, _)| *size == bytes)
            .unwrap_or(self.free_lists.len());
        if i == self.free_lists.len() {
            self.free_lists.push((bytes, Vec::new()));
        }
        let list = &mut self.free_lists[i].1;
        if (list.len() + 1).saturating_mul(bytes) > MAX_FREE {
            return Some(memory);
        }
        list.push(memory);
        self.free += bytes as u64;
        None
    }
}

/// Keys and values at 64 positions of the layers of one cache group. Returns to its pool when the
/// last reference is dropped.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) memory: Memory,
    pub(super) bytes: usize,
    pub(super) types: [(KvType, u64); 2],
    pub(super) pool: Arc<Ledger>,
}

impl Page {
    /// Address on the GPU; 0 if no GPU can access it.
    pub(super) fn address(&self) -> u64 {
        match &self.memory {
            Memory::Shared(memory) => memory.address(),
            Memory::Heap(_) | Memory::Mapped(_) => 0,
        }
    }

    pub(super) fn n_bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Bytes of its keys and of its values, with their precisions.
    pub(super) fn types(&self) -> [(KvType, u64); 2] {
        self.types
    }

    pub(super) fn values<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.memory.bytes())
    }

    pub(super) fn values_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.memory.bytes_mut())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Memory::Heap(Vec::new()));
        let mut state = self.pool.state();
        state.used -= self.bytes as u64;
        self.types
            .into_iter()
            .for_each(|(kind, bytes)| state.by_type.take(kind, bytes));
        state.n_pages -= 1;
        let released = if memory.bytes().is_empty() {
            None
        } else {
            state.keep(self.bytes, memory)
        };
        drop(state);
        drop(released);
    }
}

/// Pages of a group in one precision tier, by position divided by [`KV_BLOCK`].
pub(super) type BlockTable = Vec<Option<Arc<Page>>>;

/// Pages kept so that the sequence can be rewound to a position after its window has moved on.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) pos: usize,
    /// Whether it is the end of a message.
    pub(super) marked: bool,
    /// Pages, each with the index of its table and its number in it.
    pub(super) pages: Vec<(usize, usize, Arc<Page>)>,
}

impl Checkpoint {
    pub(super) fn pages(&self) -> impl Iterator<Item = &Arc<Page>> {
        self.pages.iter().map(|(_, _, page)| page)
    }
}
