//! Pages of keys and values, and the accounting of their memory.

use crate::kv::{KvBytes, KvError, KvType};
use bytemuck::{Pod, Zeroable};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Part of a page in the memory of a device that the CPU cannot access. Operations happen in the
/// order in which they are called, passes among them.
pub trait SeparateMemory: Send + Sync + fmt::Debug {
    /// Address on the device; never 0.
    fn address(&self) -> u64;

    /// Reads the contents into `bytes`, which has their length.
    ///
    /// # Errors
    /// A message if the device is lost.
    fn read(&self, bytes: &mut [u8]) -> Result<(), String>;

    /// Replaces the contents.
    ///
    /// # Errors
    /// As [`SeparateMemory::read`].
    fn write(&mut self, bytes: &[u8]) -> Result<(), String>;

    /// Copies the contents of the memory at another address, of the same size and device, without
    /// the CPU.
    ///
    /// # Errors
    /// As [`SeparateMemory::read`].
    fn copy(&mut self, from: u64) -> Result<(), String>;
}

/// Memory of a page that a device allocates.
#[derive(Debug)]
pub enum DeviceMemory {
    /// Of the CPU and the GPU.
    Shared(Box<dyn PageMemory>),
    /// Of the GPU alone.
    Separate(Box<dyn SeparateMemory>),
}

/// Allocates memory for this many bytes of a page; `None` if there is none.
pub(super) type PageSource = Box<dyn Fn(usize) -> Option<DeviceMemory> + Send + Sync>;

/// Bytes of a page, and how many of them, at its start, the CPU has where a GPU computes the last
/// layers in memory of its own: all of them without such a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageSize {
    pub(super) bytes: usize,
    pub(super) on_host: usize,
}

impl From<usize> for PageSize {
    fn from(bytes: usize) -> PageSize {
        PageSize {
            bytes,
            on_host: bytes,
        }
    }
}

/// Memory of a page, initially zeros.
#[derive(Debug)]
pub(super) enum Memory {
    Heap(Vec<Line>),
    Mapped(memmap2::MmapMut),
    Shared(Box<dyn PageMemory>),
    /// The first bytes are the CPU's, the others a device's.
    Split(Vec<Line>, Box<dyn SeparateMemory>),
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

    /// Memory of a page, from the source if it is not the CPU's alone.
    pub(super) fn of(size: PageSize, ledger: &Ledger) -> Option<Memory> {
        let on_device = size.bytes - size.on_host;
        let source = match &ledger.source {
            Some((is_shared, source)) if *is_shared || on_device > 0 => source,
            _ => return Memory::new(size.bytes),
        };
        if on_device == 0 {
            return match source(size.bytes)? {
                DeviceMemory::Shared(memory) => Some(Memory::Shared(memory)),
                DeviceMemory::Separate(_) => None, // not from such a source
            };
        }
        let lines = size.on_host.div_ceil(size_of::<Line>());
        let host = bytemuck::allocation::try_zeroed_vec(lines).ok()?;
        match source(on_device)? {
            DeviceMemory::Separate(device) => Some(Memory::Split(host, device)),
            DeviceMemory::Shared(_) => None, // such a source makes whole pages
        }
    }

    /// Whether there is none.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Memory::Heap(lines) if lines.is_empty())
    }

    /// The bytes that the CPU can access.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Memory::Split(lines, _) => bytemuck::cast_slice(lines),
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes(),
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Split(lines, _) => bytemuck::cast_slice_mut(lines),
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Mapped(map) => map,
            Memory::Shared(memory) => memory.bytes_mut(),
        }
    }
}

pub(super) struct Ledger {
    pub(super) budget: u64,
    /// Allocator of pages, if not the system, and whether it makes whole ones, which the CPU
    /// accesses, too.
    pub(super) source: Option<(bool, PageSource)>,
    /// Whether the device of the source is lost, with all that its memory held.
    pub(super) lost: AtomicBool,
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
    pub(super) lent: u64,
    /// These adapters by their ids.
    pub(super) counted: Vec<(usize, Weak<Counted>)>,
    /// Free pages by their size.
    pub(super) free_lists: Vec<(PageSize, Vec<Memory>)>,
}

impl Ledger {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Counts are changed only after operations that may panic.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether the pages' device is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
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

/// Part of a pool's budget that something takes for a while.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(super) bytes: u64,
    pub(super) pool: Arc<Ledger>,
}

impl Clone for Lent {
    fn clone(&self) -> Lent {
        self.pool.state().lent += self.bytes;
        Lent {
            bytes: self.bytes,
            pool: Arc::clone(&self.pool),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.state().lent -= self.bytes;
    }
}

impl State {
    /// Bytes of pages in use and of adapters, and those that are reserved or lent.
    pub(super) fn taken(&self) -> u64 {
        self.used + self.adapters + self.reserved + self.lent
    }

    pub(super) fn take_free(&mut self, page: PageSize) -> Option<Memory> {
        let (_, list) = self.free_lists.iter_mut().find(|(size, _)| *size == page)?;
        let memory = list.pop()?;
        self.free -= page.bytes as u64;
        Some(memory)
    }

    /// Removes free pages from the lists until `size` bytes more fit into the budget.
    pub(super) fn release(&mut self, size: u64, budget: u64) -> Vec<Memory> {
        let mut released = Vec::new();
        while self.taken().saturating_add(self.free).saturating_add(size) > budget {
            let Some((page, list)) = self
                .free_lists
                .iter_mut()
                .find(|(_, list)| !list.is_empty())
            else {
                break;
            };
            self.free -= page.bytes as u64;
            released.extend(list.pop());
        }
        released
    }

    /// Keeps a free page, or returns it if there are enough of its size.
    pub(super) fn keep(&mut self, page: PageSize, memory: Memory) -> Option<Memory> {
        let i = self
            .free_lists
            .iter()
            .position(|(size, _)| *size == page)
            .unwrap_or(self.free_lists.len());
        if i == self.free_lists.len() {
            self.free_lists.push((page, Vec::new()));
        }
        let list = &mut self.free_lists[i].1;
        if (list.len() + 1).saturating_mul(page.bytes) > MAX_FREE {
            return Some(memory);
        }
        list.push(memory);
        self.free += page.bytes as u64;
        None
    }
}

/// Keys and values at 64 positions of the layers of one cache group. Returns to its pool when the
/// last reference is dropped.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) memory: Memory,
    pub(super) size: PageSize,
    pub(super) types: [(KvType, u64); 2],
    pub(super) pool: Arc<Ledger>,
}

impl Page {
    /// Address on the GPU; 0 if no GPU can access it.
    pub(super) fn address(&self) -> u64 {
        match &self.memory {
            Memory::Shared(memory) => memory.address(),
            Memory::Split(_, memory) => memory.address(),
            Memory::Heap(_) | Memory::Mapped(_) => 0,
        }
    }

    pub(super) fn n_bytes(&self) -> u64 {
        self.size.bytes as u64
    }

    /// Bytes of its keys and of its values, with their precisions.
    pub(super) fn types(&self) -> [(KvType, u64); 2] {
        self.types
    }

    /// All contents, those on a device, too.
    pub(super) fn contents(&self) -> Result<Cow<'_, [u8]>, KvError> {
        let Memory::Split(lines, device) = &self.memory else {
            return Ok(Cow::Borrowed(self.memory.bytes()));
        };
        let mut bytes = bytemuck::allocation::try_zeroed_vec(self.size.bytes).map_err(|()| {
            KvError::OutOfMemory {
                what: "a page of keys and values",
                bytes: self.n_bytes(),
            }
        })?;
        bytes[..self.size.on_host]
            .copy_from_slice(&bytemuck::cast_slice(lines)[..self.size.on_host]);
        device
            .read(&mut bytes[self.size.on_host..])
            .map_err(|message| KvError::Device { message })?;
        Ok(Cow::Owned(bytes))
    }

    /// Replaces all contents; `bytes` are as many.
    pub(super) fn fill(&mut self, bytes: &[u8]) -> Result<(), KvError> {
        let on_host = self.size.on_host;
        match &mut self.memory {
            Memory::Split(lines, device) => {
                let (host, rest) = bytes.split_at(on_host);
                bytemuck::cast_slice_mut(lines)[..on_host].copy_from_slice(host);
                device
                    .write(rest)
                    .map_err(|message| KvError::Device { message })
            }
            memory => {
                memory.bytes_mut().copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Copies what another page of the same size has on a device.
    pub(super) fn copy_on_device(&mut self, from: &Page) -> Result<(), KvError> {
        match &mut self.memory {
            Memory::Split(_, device) => device
                .copy(from.address())
                .map_err(|message| KvError::Device { message }),
            _ => Ok(()),
        }
    }

    /// The values that the CPU can access.
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
        state.used -= self.n_bytes();
        self.types
            .into_iter()
            .for_each(|(kind, bytes)| state.by_type.take(kind, bytes));
        state.n_pages -= 1;
        let is_lost = matches!(memory, Memory::Split(..)) && self.pool.is_lost();
        let released = if memory.is_none() || is_lost {
            Some(memory)
        } else {
            state.keep(self.size, memory)
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
