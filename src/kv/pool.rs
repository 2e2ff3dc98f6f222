//! Pool of pages for the keys and values of sequences.

use crate::kv::folder::PrefixFolder;
use crate::kv::page::{
    Counted, DeviceMemory, Ledger, Lent, Memory, Page, PageSize, Reserved, State,
};
use crate::kv::prefix::{PrefixStats, PrefixTree};
use crate::kv::{KvBytes, KvError, KvType};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// High and low watermark of cached pages, in per cent of the budget: above the high one they are
/// released down to the low one, many at a time, so that a pool at its limit does not evict for
/// every page.
const HIGH: u64 = 85;
const LOW: u64 = 70;
/// Memory for keys and values, shared by any number of sessions. Clones are handles of the same
/// pool.
#[derive(Clone, Debug)]
pub struct KvPool {
    inner: Arc<Ledger>,
    /// Locked before `Ledger::state`, as it drops pages.
    prefixes: Arc<Mutex<PrefixTree>>,
    /// Second level below the tree.
    folder: Option<Arc<PrefixFolder>>,
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
    /// Bytes of the budget that are reserved for other uses: the buffers of a
    /// [`Schedule`](crate::scheduler::Schedule) with a memory limit.
    pub reserved: u64,
    /// Bytes of the budget that drafters take for texts under way, and with their weights, where
    /// the model has a memory limit.
    pub drafters: u64,
    /// Upper bound in bytes of pages in use, free pages, adapters and reservations together.
    pub budget: u64,
}

impl PoolStats {
    /// Bytes that are left for pages.
    pub fn left(&self) -> u64 {
        [self.used, self.adapters, self.reserved, self.drafters]
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
        KvPool::of(Ledger {
            budget,
            source: None,
            lost: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// A pool whose pages are allocated by `source`: whole ones if they are shared with the CPU,
    /// otherwise the parts that are a device's.
    pub(crate) fn with_source(
        budget: u64,
        is_shared: bool,
        source: impl Fn(usize) -> Option<DeviceMemory> + Send + Sync + 'static,
    ) -> KvPool {
        KvPool::of(Ledger {
            budget,
            source: Some((is_shared, Box::new(source))),
            lost: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    fn of(inner: Ledger) -> KvPool {
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
            lent,
            ..
        } = *self.inner.state();
        PoolStats {
            used,
            by_type,
            free,
            n_pages,
            adapters,
            reserved,
            drafters: lent,
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

    /// Sets the prefix cache's budget in bytes, within that of the pool. Pages beyond it are
    /// dropped at once, the least recently used first. Default 1 GiB.
    pub fn set_prefix_budget(&self, bytes: u64) {
        self.prefix_tree().set_budget(bytes);
    }

    /// Empties the prefix cache.
    pub fn clear_prefixes(&self) {
        self.prefix_tree().clear();
    }

    /// Gives up what a lost device held: free pages, and those of the prefix cache.
    pub(crate) fn lose_device(&self) {
        self.inner.lost.store(true, Ordering::Relaxed);
        self.clear_prefixes();
        let mut state = self.inner.state();
        let released = std::mem::take(&mut state.free_lists);
        state.free = 0;
        drop(state);
        drop(released);
    }

    /// Whether [`KvPool::lose_device`] was called.
    pub(super) fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    pub(super) fn prefix_tree(&self) -> MutexGuard<'_, PrefixTree> {
        self.prefixes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Drops cached pages that no sequence uses, the least recently used first, until `size` bytes
    /// more stay below the low watermark. Returns whether they do.
    pub(crate) fn give_back(&self, size: u64) -> bool {
        let is_low = || self.inner.state().taken().saturating_add(size) <= self.inner.mark(LOW);
        self.prefix_tree().evict_until(is_low)
    }

    /// Whether `size` bytes more are above the high watermark.
    pub(crate) fn is_high(&self, size: u64) -> bool {
        self.inner.state().taken().saturating_add(size) > self.inner.mark(HIGH)
    }

    /// Counts the `bytes` of an adapter, identified by `id`, until the returned value is dropped.
    /// The adapter is in memory in any case, so it is not refused: there is less room for pages.
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

    /// Reserves `bytes` of the budget until the returned value is dropped.
    pub(crate) fn reserve(&self, bytes: u64) -> Reserved {
        let mut state = self.inner.state();
        state.reserved += bytes;
        self.shrink(state);
        Reserved {
            bytes,
            pool: Arc::clone(&self.inner),
        }
    }

    /// Takes `bytes` of the budget, for which cached pages make room.
    pub(crate) fn lend(&self, bytes: u64) -> Result<Lent, KvError> {
        let mut state = self.with_room(bytes)?;
        let released = state.release(bytes, self.inner.budget);
        state.lent += bytes;
        drop(state);
        drop(released);
        let pool = Arc::clone(&self.inner);
        Ok(Lent { bytes, pool })
    }

    /// Releases free and cached pages beyond the budget.
    fn shrink(&self, mut state: MutexGuard<'_, State>) {
        let released = state.release(0, self.inner.budget);
        drop(state);
        drop(released);
        if self.is_high(0) {
            self.give_back(0);
        }
    }

    /// The state, with room for `size` bytes more. The prefix cache makes room: above the high
    /// watermark it releases pages down to the low one.
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

    /// Allocates a page, whose size is a multiple of 64, split into keys and values by `types`; it
    /// contains zeros or earlier contents. If the pool is full, the prefix cache drops pages.
    pub(super) fn page(
        &self,
        page_size: impl Into<PageSize>,
        types: [(KvType, u64); 2],
    ) -> Result<Arc<Page>, KvError> {
        let page_size = page_size.into();
        let size = page_size.bytes as u64;
        let mut state = self.with_room(size)?;
        let recycled = state.take_free(page_size);
        // Returned to the system after the lock is released.
        let released = state.release(size, self.inner.budget);
        state.used += size;
        types
            .into_iter()
            .for_each(|(kind, bytes)| state.by_type.add(kind, bytes));
        state.n_pages += 1;
        drop(state);
        drop(released);
        let memory = recycled.or_else(|| Memory::of(page_size, &self.inner));
        // Made even without memory: dropping it corrects the counts.
        let out_of_memory = memory.is_none();
        let page = Page {
            memory: memory.unwrap_or(Memory::Heap(Vec::new())),
            size: page_size,
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

#[cfg(test)]
mod tests {
    use crate::kv::page::MAX_FREE;
    use crate::kv::pool::*;

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
            drafters: 0,
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
