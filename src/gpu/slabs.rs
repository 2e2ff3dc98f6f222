//! Memory of pages on a GPU that the CPU cannot access: parts of a few large buffers, the slabs,
//! as kernels in WGSL have no addresses. A page's address is the number of its slab in the lower
//! 32 bits, and in the upper ones its offset there in words of 4 bytes.

use crate::kv::{DeviceMemory, SeparateMemory};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most slabs: each is a binding of the kernels that access pages.
pub const MAX_SLABS: usize = 4;
/// Bytes of which offsets and sizes of pages are multiples: a line of common GPUs' caches.
const UNIT: u64 = 256;
/// Offset of the first page of a slab, as no address is 0.
const FIRST: u64 = UNIT;

/// Operations of a device on the buffers that are slabs.
pub trait SlabDevice: Send + Sync + 'static {
    /// A buffer.
    type Slab: Send + Sync;

    /// Makes a buffer of zeros; `None` if there is no memory.
    fn slab(&self, bytes: u64) -> Option<Self::Slab>;

    /// Reads from byte `at` on.
    ///
    /// # Errors
    /// A message if the device is lost.
    fn read(&self, slab: &Self::Slab, at: u64, bytes: &mut [u8]) -> Result<(), String>;

    /// Writes from byte `at` on.
    ///
    /// # Errors
    /// As [`SlabDevice::read`].
    fn write(&self, slab: &Self::Slab, at: u64, bytes: &[u8]) -> Result<(), String>;

    /// Copies `bytes` bytes between places that do not overlap, each a slab and a byte of it.
    ///
    /// # Errors
    /// As [`SlabDevice::read`].
    fn copy(
        &self,
        from: (&Self::Slab, u64),
        to: (&Self::Slab, u64),
        bytes: u64,
    ) -> Result<(), String>;
}

/// The slabs of a device. Clones are handles of the same ones.
pub struct Slabs<D: SlabDevice>(Arc<Inner<D>>);

impl<D: SlabDevice> Clone for Slabs<D> {
    fn clone(&self) -> Slabs<D> {
        Slabs(Arc::clone(&self.0))
    }
}

struct Inner<D: SlabDevice> {
    device: D,
    /// Most bytes of a slab, and most slabs.
    max: u64,
    count: usize,
    slabs: Mutex<[Option<Slab<D::Slab>>; MAX_SLABS]>,
}

struct Slab<B> {
    buffer: Arc<B>,
    bytes: u64,
    /// Free ranges: the first byte, and the number of bytes. None are adjacent.
    free: BTreeMap<u64, u64>,
}

impl<B> Slab<B> {
    fn new(buffer: B, bytes: u64) -> Slab<B> {
        Slab {
            buffer: Arc::new(buffer),
            bytes,
            free: BTreeMap::from([(FIRST, bytes - FIRST)]),
        }
    }

    /// Takes the first range that is large enough.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&at, &n) = self.free.iter().find(|(_, n)| **n >= bytes)?;
        self.free.remove(&at);
        if n > bytes {
            self.free.insert(at + bytes, n - bytes);
        }
        Some(at)
    }

    fn give_back(&mut self, mut at: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(at + bytes)) {
            bytes += after;
        }
        if let Some((&before, &n)) = self.free.range(..at).next_back()
            && before + n == at
        {
            (at, bytes) = (before, n + bytes);
        }
        self.free.insert(at, bytes);
    }

    fn is_empty(&self) -> bool {
        self.free.get(&FIRST) == Some(&(self.bytes - FIRST))
    }
}

impl<D: SlabDevice> Slabs<D> {
    /// No slabs yet; there will be at most `count`, and each has at most `max` bytes.
    pub fn new(device: D, max: u64, count: usize) -> Slabs<D> {
        Slabs(Arc::new(Inner {
            device,
            max: max / UNIT * UNIT,
            count: count.min(MAX_SLABS),
            slabs: Mutex::default(),
        }))
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.0.device
    }

    /// Buffers of the slabs by their numbers.
    pub fn buffers(&self) -> [Option<Arc<D::Slab>>; MAX_SLABS] {
        let slabs = self.slabs();
        std::array::from_fn(|i| slabs[i].as_ref().map(|slab| Arc::clone(&slab.buffer)))
    }

    /// Most bytes of all pages.
    pub fn limit(&self) -> u64 {
        (0..self.0.count).map(|i| self.bytes_of(i) - FIRST).sum()
    }

    /// Memory of a page; `None` if there is none left.
    pub fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        let all = (bytes as u64).max(1).next_multiple_of(UNIT);
        let mut slabs = self.slabs();
        let slab_count = slabs.iter().flatten().count();
        let found = slabs
            .iter_mut()
            .enumerate()
            .find_map(|(i, slab)| Some((i, slab.as_mut()?.take(all)?)));
        let (slab, at) = match found {
            Some(found) => found,
            None => {
                let i = slabs[..self.0.count].iter().position(Option::is_none)?;
                // Small at first. Where there is no memory for a large slab, a small one has to do.
                let mut size = self.bytes_of(slab_count).max(all + FIRST);
                let buffer = loop {
                    if size > self.0.max {
                        return None;
                    }
                    match self.0.device.slab(size) {
                        Some(buffer) => break buffer,
                        None if size / 2 >= all + FIRST => size = size / 2 / UNIT * UNIT,
                        None => return None,
                    }
                };
                let slab = slabs[i].insert(Slab::new(buffer, size));
                (i, slab.take(all)?)
            }
        };
        drop(slabs);
        Some(DeviceMemory::Separate(Box::new(Part {
            slabs: self.clone(),
            slab,
            at,
            bytes: bytes as u64,
        })))
    }

    /// Bytes of a slab that is made when there are `n` others.
    fn bytes_of(&self, n: usize) -> u64 {
        let share = [8, 2, 1, 1][n.min(MAX_SLABS - 1)];
        (self.0.max / share / UNIT * UNIT).max(2 * UNIT)
    }

    fn slabs(&self) -> MutexGuard<'_, [Option<Slab<D::Slab>>; MAX_SLABS]> {
        self.0.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffer(&self, slab: usize) -> Result<Arc<D::Slab>, String> {
        let slabs = self.slabs();
        let slab = slabs.get(slab).and_then(Option::as_ref);
        slab.map(|slab| Arc::clone(&slab.buffer))
            .ok_or_else(|| "there is no such slab".to_string())
    }
}

/// Part of a slab.
struct Part<D: SlabDevice> {
    slabs: Slabs<D>,
    slab: usize,
    at: u64,
    bytes: u64,
}

impl<D: SlabDevice> fmt::Debug for Part<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part {{ slab: {}, at: {:#x} }}", self.slab, self.at)
    }
}

impl<D: SlabDevice> SeparateMemory for Part<D> {
    fn address(&self) -> u64 {
        (self.at / 4) << 32 | self.slab as u64
    }

    fn read(&self, bytes: &mut [u8]) -> Result<(), String> {
        let buffer = self.slabs.buffer(self.slab)?;
        self.slabs.device().read(&buffer, self.at, bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let buffer = self.slabs.buffer(self.slab)?;
        self.slabs.device().write(&buffer, self.at, bytes)
    }

    fn copy(&mut self, from: u64) -> Result<(), String> {
        let of = self.slabs.buffer((from & u64::from(u32::MAX)) as usize)?;
        let to = self.slabs.buffer(self.slab)?;
        let at = (from >> 32) * 4;
        self.slabs
            .device()
            .copy((&of, at), (&to, self.at), self.bytes)
    }
}

impl<D: SlabDevice> Drop for Part<D> {
    fn drop(&mut self) {
        let mut slabs = self.slabs.slabs();
        let Some(slab) = slabs[self.slab].as_mut() else {
            return;
        };
        slab.give_back(self.at, self.bytes.max(1).next_multiple_of(UNIT));
        // The first slab stays, so that sessions that come and go make no buffers.
        let released = if slab.is_empty() && self.slab > 0 {
            slabs[self.slab].take()
        } else {
            None
        };
        drop(slabs);
        drop(released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A device whose slabs are vectors; its memory is limited.
    struct Vectors {
        left: AtomicUsize,
    }

    impl SlabDevice for Vectors {
        type Slab = Mutex<Vec<u8>>;

        fn slab(&self, bytes: u64) -> Option<Mutex<Vec<u8>>> {
            let bytes = bytes as usize;
            let left = self.left.load(Ordering::Relaxed);
            (bytes <= left).then(|| {
                self.left.store(left - bytes, Ordering::Relaxed);
                Mutex::new(vec![0; bytes])
            })
        }

        fn read(&self, slab: &Mutex<Vec<u8>>, at: u64, bytes: &mut [u8]) -> Result<(), String> {
            bytes.copy_from_slice(&slab.lock().unwrap()[at as usize..][..bytes.len()]);
            Ok(())
        }

        fn write(&self, slab: &Mutex<Vec<u8>>, at: u64, bytes: &[u8]) -> Result<(), String> {
            slab.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn copy(
            &self,
            (from, at): (&Mutex<Vec<u8>>, u64),
            (to, to_at): (&Mutex<Vec<u8>>, u64),
            bytes: u64,
        ) -> Result<(), String> {
            let bytes = from.lock().unwrap()[at as usize..][..bytes as usize].to_vec();
            self.write(to, to_at, &bytes)
        }
    }

    fn slabs(max: u64, left: usize) -> Slabs<Vectors> {
        let left = AtomicUsize::new(left);
        Slabs::new(Vectors { left }, max, MAX_SLABS)
    }

    fn page(slabs: &Slabs<Vectors>, bytes: usize) -> Option<Box<dyn SeparateMemory>> {
        match slabs.page(bytes)? {
            DeviceMemory::Separate(memory) => Some(memory),
            DeviceMemory::Shared(_) => panic!("shared"),
        }
    }

    /// Pages of many sizes keep what was written to them while others come and go, and all memory
    /// can be used again.
    #[test]
    fn pages_do_not_overlap() {
        let slabs = slabs(1 << 16, usize::MAX);
        let mut pages = Vec::new();
        let mut state = 7u32;
        for i in 0..4000u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let bytes = [64, 320, 1024, 5000][(state >> 20) as usize % 4];
            match page(&slabs, bytes) {
                Some(mut memory) if state >> 31 == 0 => {
                    assert_ne!(memory.address(), 0);
                    memory.write(&vec![i as u8; bytes]).unwrap();
                    pages.push((memory, bytes, i as u8));
                }
                _ if pages.len() > 1 => {
                    let (memory, bytes, value) =
                        pages.swap_remove((state >> 8) as usize % pages.len());
                    let mut read = vec![0; bytes];
                    memory.read(&mut read).unwrap();
                    assert!(read.iter().all(|&b| b == value));
                    // A copy has its contents.
                    if let Some(mut copy) = page(&slabs, bytes) {
                        copy.copy(memory.address()).unwrap();
                        drop(memory);
                        copy.read(&mut read).unwrap();
                        assert!(read.iter().all(|&b| b == value));
                    }
                }
                _ => {}
            }
        }
        drop(pages);
        assert_eq!(slabs.buffers().iter().flatten().count(), 1);
        let whole = 1 << 16;
        let all: Vec<_> = std::iter::from_fn(|| page(&slabs, whole / 8 - 256)).collect();
        assert!(all.len() >= 2 * 8 + 4, "{}", all.len());
        assert!(page(&slabs, whole).is_none());
    }

    #[test]
    fn a_device_with_little_memory_has_smaller_slabs() {
        let slabs = slabs(1 << 20, 200 << 10);
        assert_eq!(slabs.limit(), (1 << 17) + (1 << 19) + (2 << 20) - 4 * FIRST);
        let pages: Vec<_> = std::iter::from_fn(|| page(&slabs, 4096)).collect();
        assert!(pages.len() >= 40, "{}", pages.len());
    }
}
