//! The pool of pages in which sequences keep their keys and values.

use super::folder::PrefixFolder;
use super::prefix::{PrefixStats, PrefixTree};
use super::{KvBytes, KvType};
use crate::cache::KvError;
use bytemuck::{Pod, Zeroable};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Pages of at least this size are mapped separately, so that the system can back them by huge
/// pages. Rounding up to 16 KiB wastes 1.6 %.
const MAPPED: usize = 1 << 20;
/// Per cent of the budget above which cached pages are given back, and down to which: many at a
/// time, so that a pool at its limit does not look for one with every page that it hands out.
const HIGH: u64 = 85;
const LOW: u64 = 70;
/// Bytes of free pages of one size that are kept for later use.
const MAX_FREE: usize = 64 << 20;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

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
type PageSource = Box<dyn Fn(usize) -> Option<Box<dyn PageMemory>> + Send + Sync>;

/// Memory of a page, initially zeros.
#[derive(Debug)]
enum Memory {
    Heap(Vec<Line>),
    Mapped(memmap2::MmapMut),
    Shared(Box<dyn PageMemory>),
}

impl Memory {
    fn new(bytes: usize) -> Option<Memory> {
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

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes_mut(),
        }
    }
}

/// Memory for keys and values, shared by any number of sessions. Clones are handles of the same
/// pool.
#[derive(Clone, Debug)]
pub struct KvPool {
    inner: Arc<Inner>,
    /// Locked before `Inner::state`, as it drops pages.
    prefixes: Arc<Mutex<PrefixTree>>,
    /// Second level below the tree.
    folder: Option<Arc<PrefixFolder>>,
}

struct Inner {
    budget: u64,
    /// Allocator of pages, if not the system.
    source: Option<PageSource>,
    state: Mutex<State>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("budget", &self.budget)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    by_type: KvBytes,
    free: u64,
    n_pages: usize,
    /// Bytes of the adapters of sequences.
    adapters: u64,
    reserved: u64,
    /// These adapters by what identifies them.
    counted: Vec<(usize, Weak<Counted>)>,
    /// Free pages by their size.
    free_lists: Vec<(usize, Vec<Memory>)>,
}

/// Contents of a [`KvPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes of the pages in use, by sequences or the prefix cache.
    pub used: u64,
    /// These bytes by precision.
    pub by_type: KvBytes,
    /// Bytes of free pages that are kept for later use.
    pub free: u64,
    /// Pages in use.
    pub n_pages: usize,
    /// Bytes of the adapters that are attached to sequences, each once.
    pub adapters: u64,
    /// Bytes of the budget that are left to others: to the buffers of a
    /// [`Schedule`](crate::exec::Schedule) whose model has a memory limit.
    pub reserved: u64,
    /// Upper bound in bytes of pages in use, free pages, adapters and what is reserved together.
    pub budget: u64,
}

impl PoolStats {
    /// Bytes that are left for pages.
    pub fn left(&self) -> u64 {
        [self.used, self.adapters, self.reserved]
            .into_iter()
            .fold(self.budget, u64::saturating_sub)
    }
}

impl Default for KvPool {
    fn default() -> KvPool {
        KvPool::new(u64::MAX)
    }
}

impl KvPool {
    /// A pool of at most `budget` bytes; it takes no memory yet.
    pub fn new(budget: u64) -> KvPool {
        KvPool::of(Inner {
            budget,
            source: None,
            state: Mutex::default(),
        })
    }

    /// A pool whose pages are allocated by `source`.
    pub(crate) fn with_source(
        budget: u64,
        source: impl Fn(usize) -> Option<Box<dyn PageMemory>> + Send + Sync + 'static,
    ) -> KvPool {
        KvPool::of(Inner {
            budget,
            source: Some(Box::new(source)),
            state: Mutex::default(),
        })
    }

    fn of(inner: Inner) -> KvPool {
        KvPool {
            inner: Arc::new(inner),
            prefixes: Arc::default(),
            folder: None,
        }
    }

    /// Adds a folder below the prefix cache.
    pub(crate) fn with_folder(self, folder: PrefixFolder) -> KvPool {
        KvPool {
            folder: Some(Arc::new(folder)),
            ..self
        }
    }

    pub(super) fn folder(&self) -> Option<&PrefixFolder> {
        self.folder.as_deref()
    }

    /// Current contents of the pool.
    pub fn stats(&self) -> PoolStats {
        let State {
            used,
            by_type,
            free,
            n_pages,
            adapters,
            reserved,
            ..
        } = *self.inner.state();
        PoolStats {
            used,
            by_type,
            free,
            n_pages,
            adapters,
            reserved,
            budget: self.inner.budget,
        }
    }

    /// Current contents and counters of the prefix cache.
    pub fn prefixes(&self) -> PrefixStats {
        let [tokens_loaded, damaged_blocks, failed_blocks] =
            self.folder().map_or([0; 3], PrefixFolder::counts);
        PrefixStats {
            tokens_loaded,
            damaged_blocks,
            failed_blocks,
            ..self.prefix_tree().stats()
        }
    }

    /// Sets the most bytes of pages that the prefix cache may hold, within the pool's own budget.
    /// Any excess is dropped at once, the least recently used first. Default 1 GiB.
    pub fn set_prefix_budget(&self, bytes: u64) {
        self.prefix_tree().set_budget(bytes);
    }

    /// Empties the prefix cache.
    pub fn clear_prefixes(&self) {
        self.prefix_tree().clear();
    }

    pub(super) fn prefix_tree(&self) -> MutexGuard<'_, PrefixTree> {
        self.prefixes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Drops cached pages that no sequence uses, the least recently used first, until `size` bytes
    /// more stay below the low mark. Returns whether they do.
    pub(crate) fn give_back(&self, size: u64) -> bool {
        let is_low = || self.inner.state().taken().saturating_add(size) <= self.inner.mark(LOW);
        self.prefix_tree().evict_until(is_low)
    }

    /// Whether `size` bytes more are above the high mark.
    pub(crate) fn is_high(&self, size: u64) -> bool {
        self.inner.state().taken().saturating_add(size) > self.inner.mark(HIGH)
    }

    /// Counts the `bytes` of an adapter, identified by `id`, as long as somebody holds what is
    /// returned. It is in memory in any case, and so is not refused: there is less room for
    /// pages.
    pub(crate) fn count(&self, id: usize, bytes: u64) -> Arc<Counted> {
        let mut state = self.inner.state();
        if let Some(counted) = state
            .counted
            .iter()
            .find(|c| c.0 == id)
            .and_then(|c| c.1.upgrade())
        {
            return counted;
        }
        let counted = Arc::new(Counted {
            bytes,
            pool: Arc::clone(&self.inner),
        });
        state.counted.push((id, Arc::downgrade(&counted)));
        state.adapters += bytes;
        self.shrink(state);
        counted
    }

    /// Takes `bytes` of the budget from pages, as long as somebody holds what is returned.
    pub(crate) fn reserve(&self, bytes: u64) -> Reserved {
        let mut state = self.inner.state();
        state.reserved += bytes;
        self.shrink(state);
        Reserved {
            bytes,
            pool: Arc::clone(&self.inner),
        }
    }

    /// Gives back free and cached pages for which there is no room any more.
    fn shrink(&self, mut state: MutexGuard<'_, State>) {
        let released = state.release(0, self.inner.budget);
        drop(state);
        drop(released);
        if self.is_high(0) {
            self.give_back(0);
        }
    }

    /// The state, in which there is room for `size` bytes more. The prefix cache makes it: above
    /// the high mark it gives pages back down to the low one.
    fn with_room(&self, size: u64) -> Result<MutexGuard<'_, State>, KvError> {
        if self.is_high(size) {
            self.give_back(size);
        }
        let budget = self.inner.budget;
        loop {
            let state = self.inner.state();
            let used = state.taken();
            if size <= budget.saturating_sub(used) {
                return Ok(state);
            }
            drop(state);
            if !self.prefix_tree().evict(false) {
                return Err(KvError::PoolFull {
                    need: size,
                    used,
                    budget,
                });
            }
        }
    }

    /// Allocates a page of `bytes`, a multiple of 64, of which keys and values take those of
    /// `types`; it contains zeros or what its last user left. If the pool is full, the prefix
    /// cache drops pages.
    pub(super) fn page(
        &self,
        bytes: usize,
        types: [(KvType, u64); 2],
    ) -> Result<Arc<Page>, KvError> {
        let size = bytes as u64;
        let mut state = self.with_room(size)?;
        let recycled = state.take_free(bytes);
        // To the system after the lock.
        let released = state.release(size, self.inner.budget);
        state.used += size;
        types
            .into_iter()
            .for_each(|(kind, bytes)| state.by_type.add(kind, bytes));
        state.n_pages += 1;
        drop(state);
        drop(released);
        let memory = recycled.or_else(|| match &self.inner.source {
            Some(source) => source(bytes).map(Memory::Shared),
            None => Memory::new(bytes),
        });
        // Made even without memory: dropping it corrects the counts.
        let out_of_memory = memory.is_none();
        let page = Page {
            memory: memory.unwrap_or(Memory::Heap(Vec::new())),
            bytes,
            types,
            pool: Arc::clone(&self.inner),
        };
        if out_of_memory {
            return Err(KvError::OutOfMemory {
                what: "a page of keys and values",
                bytes: size,
            });
        }
        Ok(Arc::new(page))
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // Counts are changed only after operations that may panic.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn mark(&self, percent: u64) -> u64 {
        (u128::from(self.budget) * u128::from(percent) / 100) as u64
    }
}

/// An adapter whose bytes count in a pool.
#[derive(Debug)]
pub(crate) struct Counted {
    bytes: u64,
    pool: Arc<Inner>,
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
    bytes: u64,
    pool: Arc<Inner>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.pool.state().reserved -= self.bytes;
    }
}

impl State {
    /// Bytes of pages in use and of adapters, and those that are reserved.
    fn taken(&self) -> u64 {
        self.used + self.adapters + self.reserved
    }

    fn take_free(&mut self, bytes: usize) -> Option<Memory> {
        let (_, list) = self
            .free_lists
            .iter_mut()
            .find(|(size, _)| *size == bytes)?;
        let memory = list.pop()?;
        self.free -= bytes as u64;
        Some(memory)
    }

    /// Removes free pages from the lists until `size` bytes more fit into the budget.
    fn release(&mut self, size: u64, budget: u64) -> Vec<Memory> {
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
    fn keep(&mut self, bytes: usize, memory: Memory) -> Option<Memory> {
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
/// last sequence that holds it drops it.
#[derive(Debug)]
pub(super) struct Page {
    memory: Memory,
    bytes: usize,
    types: [(KvType, u64); 2],
    pool: Arc<Inner>,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A page whose bytes are half keys.
    fn page(pool: &KvPool, bytes: usize) -> Result<Arc<Page>, KvError> {
        pool.page(
            bytes,
            [
                (KvType::F16, bytes as u64 / 2),
                (KvType::Q8, bytes as u64 / 2),
            ],
        )
    }

    fn stats(used: u64, free: u64, n_pages: usize, budget: u64) -> PoolStats {
        let mut by_type = KvBytes::default();
        [KvType::F16, KvType::Q8]
            .into_iter()
            .for_each(|kind| by_type.add(kind, used / 2));
        PoolStats {
            used,
            by_type,
            free,
            n_pages,
            adapters: 0,
            reserved: 0,
            budget,
        }
    }

    #[test]
    fn a_budget_is_kept_and_free_pages_of_other_sizes_make_room() {
        let pool = KvPool::new(1 << 20);
        let small: Vec<_> = (0..16).map(|_| page(&pool, 1 << 16).unwrap()).collect();
        assert_eq!(pool.stats(), self::stats(1 << 20, 0, 16, 1 << 20));
        let full = page(&pool, 64).unwrap_err();
        assert!(matches!(full, KvError::PoolFull { need: 64, used, budget } if used == budget));
        drop(small);
        assert_eq!(pool.stats(), self::stats(0, 1 << 20, 0, 1 << 20));
        // Any size fits again, including the largest, whatever is on the free lists.
        for bytes in [64, 192, 1 << 15, 3 << 18, 1 << 20, 1 << 16] {
            let page = self::page(&pool, bytes).unwrap();
            let stats = pool.stats();
            assert_eq!((stats.used, stats.n_pages), (bytes as u64, 1));
            assert!(stats.used + stats.free <= 1 << 20, "{stats:?}");
            assert_eq!(page.values::<u8>().len(), bytes);
        }
    }

    #[test]
    fn free_lists_are_bounded() {
        let pool = KvPool::default();
        let pages: Vec<_> = (0..40).map(|_| page(&pool, 2 << 20).unwrap()).collect();
        drop(pages);
        assert_eq!(pool.stats().free, MAX_FREE as u64);
    }

    /// Free pages of one size never prevent another size from being allocated: all of the budget
    /// can be used except less than a page.
    #[test]
    fn fragmentation_is_less_than_a_page() {
        let budget = 8 << 20;
        let pool = KvPool::new(budget);
        let sizes = [4096, 64 << 10, 20 << 10, 1 << 20, 128 << 10];
        let mut pages = Vec::new();
        let mut state = 7u32;
        for _ in 0..if cfg!(miri) { 50 } else { 2000 } {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let size = sizes[(state >> 16) as usize % sizes.len()];
            let used = pool.stats().used;
            match page(&pool, size) {
                Ok(page) => pages.push(page),
                Err(_) => {
                    assert!(
                        used + size as u64 > budget,
                        "{size} bytes refused with {used} in use"
                    );
                    pages.swap_remove((state >> 8) as usize % pages.len());
                }
            }
        }
        // Small pages fill the rest.
        while let Ok(page) = page(&pool, 4096) {
            pages.push(page);
        }
        assert!(
            pool.stats().used as f64 >= 0.98 * budget as f64,
            "{:?}",
            pool.stats()
        );
    }

    #[test]
    fn pages_are_aligned_and_recycled() {
        let pool = KvPool::default();
        for bytes in [64, 4096 + 64, 2 << 20] {
            let mut page = self::page(&pool, bytes).unwrap();
            assert_eq!(page.values::<u8>().as_ptr() as usize % 64, 0);
            Arc::get_mut(&mut page).unwrap().values_mut::<u8>().fill(7);
            drop(page);
            assert_eq!(pool.stats().free, bytes as u64);
            let page = self::page(&pool, bytes).unwrap();
            assert_eq!((pool.stats().free, page.values::<u8>()[bytes - 1]), (0, 7));
            drop(page);
            let other = self::page(&pool, bytes + 64).unwrap();
            drop(other);
            // Emptied for the next size.
            pool.inner.state().free_lists.clear();
            pool.inner.state().free = 0;
        }
    }
}
