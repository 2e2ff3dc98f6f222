//! The bytes of a file: mapped, or in memory.

use crate::gguf::resident::Resident;
use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::sync::OnceLock;

/// Alignment of every tensor in memory: the file's alignment is a multiple of it, maps begin at
/// pages, and [`Bytes::in_memory`] copies bytes that are not aligned.
pub(super) const MEMORY_ALIGN: usize = 8;

pub(super) struct Bytes {
    source: Source,
    /// Copy in huge pages, if one was asked for.
    copy: OnceLock<Resident>,
}

enum Source {
    Mapped(memmap2::Mmap),
    /// Memory in huge pages where the system has them.
    Anonymous(memmap2::Mmap),
    Memory(Cow<'static, [u8]>),
    /// A copy of memory that was not aligned: whole words, of which the first `len` bytes count.
    Copied {
        words: Vec<u64>,
        len: usize,
    },
}

impl Bytes {
    fn of(source: Source) -> Bytes {
        Bytes {
            source,
            copy: OnceLock::new(),
        }
    }

    #[allow(unsafe_code)] // mapping a file is the point of this module
    pub(super) fn map(file: &File) -> io::Result<Bytes> {
        // SAFETY: the map is read-only and private to this process. No program can rule out that
        // another one changes or truncates the file meanwhile; the documentation of `gguf`
        // tells callers the consequences. All bytes are valid values of the types read from
        // them.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(Bytes::of(Source::Mapped(map)))
    }

    /// `len` bytes that `fill` writes: in huge pages where the system has them.
    ///
    /// # Errors
    /// Of `fill`, or as a failure of the system if there is no memory.
    pub(super) fn filled<E: From<io::Error>>(
        len: usize,
        fill: impl FnOnce(&mut dyn io::Write) -> Result<(), E>,
    ) -> Result<Bytes, E> {
        let mut memory = memmap2::MmapMut::map_anon(len.max(1))?;
        // Only a hint: without huge pages the memory is as good.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = memory.advise(memmap2::Advice::HugePage);
        fill(&mut &mut memory[..len])?;
        Ok(Bytes::of(Source::Anonymous(memory.make_read_only()?)))
    }

    pub(super) fn in_memory(bytes: Cow<'static, [u8]>) -> Bytes {
        if bytes.as_ptr().addr().is_multiple_of(MEMORY_ALIGN) {
            return Bytes::of(Source::Memory(bytes));
        }
        let len = bytes.len();
        let mut words = vec![0u64; len.div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..len].copy_from_slice(&bytes);
        Bytes::of(Source::Copied { words, len })
    }

    /// Whether they come from a mapped file, copied or not.
    pub(super) fn is_map(&self) -> bool {
        matches!(self.source, Source::Mapped(_))
    }

    /// Whether they are in huge pages as they are.
    pub(super) fn is_anonymous(&self) -> bool {
        matches!(self.source, Source::Anonymous(_))
    }

    /// A range of the bytes, from the copy if that has it.
    pub(super) fn part(&self, range: Range<usize>) -> &[u8] {
        match self.copy.get().and_then(|copy| copy.get(range.clone())) {
            Some(part) => part,
            None => &self[range],
        }
    }

    /// Number of bytes copied to huge pages.
    pub(super) fn copied(&self) -> u64 {
        self.copy.get().map_or(0, |copy| copy.copied() as u64)
    }

    /// Copies the next part to huge pages, beginning at byte `start` of the file. Returns whether
    /// any was left.
    #[allow(unsafe_code)] // releasing pages of the map
    pub(super) fn copy_step(&self, start: usize) -> io::Result<bool> {
        if self.is_anonymous() {
            return Ok(false);
        }
        let copy = match self.copy.get() {
            Some(copy) => copy,
            None => {
                let reserved = Resident::reserve(start, self.len())?;
                self.copy.get_or_init(|| reserved)
            }
        };
        let done = copy.copy_step(self);
        #[cfg(unix)]
        if let Source::Mapped(map) = &self.source
            && !done.is_empty()
        {
            // The process should not hold these pages twice. Readers that began before the copy had
            // them have touched some again: the last step gives all back.
            let first = match done.end == self.len() {
                true => start,
                false => done.start,
            };
            // SAFETY: the map is of a file and never written: pages that are touched again come
            // back with the same bytes.
            let _ = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    first,
                    done.end - first,
                )
            };
        }
        Ok(!done.is_empty())
    }

    /// Whether this is a mapped file without a copy.
    #[cfg(all(feature = "metal", target_vendor = "apple"))]
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.source, Source::Mapped(_)) && self.copy.get().is_none()
    }

    /// Asks the system to read the whole file ahead. Only a hint, so errors are ignored.
    pub(super) fn prefetch(&self) {
        #[cfg(unix)]
        if let Source::Mapped(map) = &self.source {
            let _ = map.advise(memmap2::Advice::WillNeed);
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.source {
            Source::Mapped(map) | Source::Anonymous(map) => map,
            Source::Memory(bytes) => bytes,
            Source::Copied { words, len } => &bytemuck::cast_slice(words)[..*len],
        }
    }
}
