//! Copy of a mapped file in huge pages of this process's memory.
//!
//! A mapped file lies in pages of a few KiB. Streaming through it costs a walk of the page tables
//! for each, which takes a fifth to a quarter of the bandwidth that pages of 2 MiB give (measured
//! with 4 KiB on Zen and on Sapphire Rapids). A copy can have such pages where the system grants
//! them. It is filled in order from the start, while readers use the part that exists and the map
//! for the rest.

use crate::system::SystemMemory;
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes copied at a time: a multiple of any page, and of the huge ones of most systems.
pub(super) const STEP: usize = 8 << 20;

pub(super) struct Resident {
    memory: memmap2::MmapRaw,
    /// Offset at which the copy begins.
    start: usize,
    /// Offset up to which it is complete.
    filled: AtomicUsize,
    /// Locked by the thread that copies.
    filling: Mutex<()>,
}

impl Resident {
    /// Reserves address space for `len` bytes; those from `start` on will be copied. Takes no
    /// memory yet.
    pub(super) fn reserve(start: usize, len: usize) -> io::Result<Resident> {
        let memory = memmap2::MmapOptions::new().len(len).map_anon()?;
        // Only a hint: without huge pages the copy is as good as the map.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(Resident {
            memory: memory.into(),
            start,
            filled: AtomicUsize::new(start),
            filling: Mutex::new(()),
        })
    }

    /// Bytes copied so far.
    pub(super) fn copied(&self) -> usize {
        self.filled.load(Ordering::Acquire) - self.start
    }

    /// The copy of `range`, once it is complete.
    #[allow(unsafe_code)] // memory that is filled while parts of it are read
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        if range.start < self.start
            || range.end < range.start
            || range.end > self.filled.load(Ordering::Acquire)
        {
            return None;
        }
        // SAFETY: `start..filled` lies in the mapping, was written before `filled` said so, and is
        // never written again.
        Some(unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().wrapping_add(range.start), range.len())
        })
    }

    /// Copies the next [`STEP`] of `source`; returns its range, empty if nothing was left.
    #[allow(unsafe_code)] // see `get`
    pub(super) fn copy_step(&self, source: &[u8]) -> Range<usize> {
        let _alone = self.filling.lock().unwrap_or_else(|e| e.into_inner());
        let start = self.filled.load(Ordering::Relaxed);
        let end = (start + STEP).min(source.len()).min(self.memory.len());
        // SAFETY: `start..end` lies in both, no thread reads beyond `filled`, and the lock makes
        // this thread the only writer.
        unsafe {
            std::ptr::copy_nonoverlapping(
                source[start..end].as_ptr(),
                self.memory.as_mut_ptr().wrapping_add(start),
                end - start,
            )
        };
        self.filled.store(end, Ordering::Release);
        start..end
    }
}

/// Whether a copy of `len` bytes leaves the same amount of memory free for other processes, and
/// gets huge pages.
pub(super) fn worth_it(len: u64) -> bool {
    let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    huge.is_ok_and(|s| !s.contains("[never]"))
        && SystemMemory::now().is_some_and(|memory| memory.available / 2 >= len)
}

#[cfg(test)]
mod tests {
    use crate::gguf::resident::*;

    #[test]
    fn serves_what_is_copied() {
        let source: Vec<u8> = (0..2 * STEP + 77).map(|i| (i / 3 * 7) as u8).collect();
        let copy = Resident::reserve(100, source.len()).unwrap();
        assert_eq!(copy.get(100..101), None);
        assert_eq!(copy.copy_step(&source), 100..100 + STEP);
        assert_eq!(copy.get(100..5000), Some(&source[100..5000]));
        assert_eq!(
            (copy.get(99..100), copy.get(STEP..STEP + 101)),
            (None, None)
        );
        assert_eq!(copy.copy_step(&source), 100 + STEP..2 * STEP + 77);
        assert_eq!(copy.copy_step(&source).len(), 0);
        assert_eq!(copy.get(100..source.len()), Some(&source[100..]));
        assert_eq!(copy.copied(), source.len() - 100);
    }
}
