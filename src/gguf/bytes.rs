//! The bytes a file is read from: a map of the file, or memory.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Deref;

/// Every tensor begins at a multiple of this in memory as well: the file's alignment is a multiple
/// of it, maps begin at pages, and [`Bytes::in_memory`] sees to the rest.
pub(super) const MEMORY_ALIGN: usize = 8;

pub(super) enum Bytes {
    Mapped(memmap2::Mmap),
    Memory(Cow<'static, [u8]>),
    /// A copy of memory that was not aligned: whole words, of which the first `len` bytes count.
    Copied {
        words: Vec<u64>,
        len: usize,
    },
}

impl Bytes {
    #[allow(unsafe_code)] // mapping a file is the point of this module
    pub(super) fn map(file: &File) -> io::Result<Bytes> {
        // SAFETY: the map is read-only and private to this process. What no program can rule out is
        // that another one changes or truncates the file meanwhile; the module documentation of
        // `gguf` tells callers what follows. All bytes are valid values of the types read from them.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(Bytes::Mapped(map))
    }

    pub(super) fn in_memory(bytes: Cow<'static, [u8]>) -> Bytes {
        if bytes.as_ptr().addr().is_multiple_of(MEMORY_ALIGN) {
            return Bytes::Memory(bytes);
        }
        let len = bytes.len();
        let mut words = vec![0u64; len.div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..len].copy_from_slice(&bytes);
        Bytes::Copied { words, len }
    }

    /// Asks the system to read the whole file ahead. Only a hint: failures do not matter.
    pub(super) fn prefetch(&self) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = self {
            let _ = map.advise(memmap2::Advice::WillNeed);
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Memory(bytes) => bytes,
            Bytes::Copied { words, len } => &bytemuck::cast_slice(words)[..*len],
        }
    }
}
