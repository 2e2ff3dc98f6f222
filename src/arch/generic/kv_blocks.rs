//! Keys and values as kernels of attention take them: block by block, in place or widened, the next
//! ones prefetched.

use super::lanes::{Lanes, Widen};
use crate::arch::attention::{AttnParams, KV_BLOCK, KvBlock, KvSpan, MAX_HEAD_DIM};
use crate::arch::gemm::{prefetch, prefetch_line};
use crate::arch::kv::KvStored;
use crate::arch::table::LoadKvFn;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Keys of a block: 32 costs up to a tenth; 128 gains for half precision what it loses for `f32`,
/// as its block then exceeds the first-level cache (Zen 5).
pub(in crate::arch) const BLOCK: usize = KV_BLOCK;

/// Bytes that a prefetch runs ahead of the rows in use: keys and values alternate block by block,
/// which the hardware's prefetcher does not see through. From memory, one query row on half
/// precision runs at 49 GB/s with it, 21 without; in the cache it costs up to a tenth (Zen 5, where
/// `dot` reads 37 GB/s). At most a block, as only the next one is known. Into the L2 cache: the L1
/// cache waits for so few lines at a time that a core of Zen 4 reads 12 GB/s that way, 22 this way.
const AHEAD: usize = 8192;

/// Rows of queries, or the keys or values of a block.
#[derive(Clone, Copy)]
pub(in crate::arch) struct RowPtr<T> {
    pub(in crate::arch) first: *const T,
    pub(in crate::arch) dim: usize,
    /// First row of the next block, or null.
    pub(super) next: *const T,
}

/// Keys and values of block `i` of a span; blocks before `end` will be read, too, and can be
/// prefetched.
#[inline(always)]
pub(in crate::arch) fn block_rows<T>(
    span: KvSpan<'_, T>,
    i: usize,
    end: usize,
    p: &AttnParams,
) -> (RowPtr<T>, RowPtr<T>) {
    let block = &span.blocks[i];
    let (mut k, mut v) = (std::ptr::null(), std::ptr::null());
    if i + 1 < end {
        (k, v) = (span.blocks[i + 1].k.as_ptr(), span.blocks[i + 1].v.as_ptr());
    }
    let k = RowPtr {
        first: block.k.as_ptr(),
        dim: p.head_dim,
        next: k,
    };
    (
        k,
        RowPtr {
            first: block.v.as_ptr(),
            dim: p.head_dim_v,
            next: v,
        },
    )
}

impl<T> RowPtr<T> {
    #[inline(always)]
    pub(super) fn new(first: *const T, dim: usize) -> RowPtr<T> {
        RowPtr {
            first,
            dim,
            next: std::ptr::null(),
        }
    }

    /// # Safety
    /// Row `i` must exist.
    #[inline(always)]
    pub(in crate::arch) unsafe fn row(self, i: usize) -> *const T {
        // SAFETY: the caller's promise.
        unsafe { self.first.add(i * self.dim) }
    }

    /// Prefetches `bytes` from `p` on.
    #[inline(always)]
    fn prefetch_bytes(p: *const u8, bytes: usize) {
        let mut line = 0;
        while line < bytes {
            prefetch_line(p.wrapping_add(line));
            line += 64;
        }
    }

    /// Prefetches what lies [`AHEAD`] bytes after the `n` rows from row `i` of the block on.
    #[inline(always)]
    pub(super) fn prefetch(self, i: usize, n: usize) {
        let row = size_of::<T>() * self.dim;
        let block = BLOCK * row;
        let from = i * row + AHEAD.min(block);
        if from < block {
            Self::prefetch_bytes(self.first.cast::<u8>().wrapping_add(from), n * row);
        } else if !self.next.is_null() {
            Self::prefetch_bytes(self.next.cast::<u8>().wrapping_add(from - block), n * row);
        }
    }

    /// Prefetches the start of the first block, which no block before it has prefetched.
    #[inline(always)]
    pub(super) fn prefetch_first(self) {
        let block = BLOCK * size_of::<T>() * self.dim;
        Self::prefetch_bytes(self.first.cast(), AHEAD.min(block));
    }
}

/// Part of `block` that a row sees, relative to the block's start.
#[inline(always)]
pub(in crate::arch) fn visible(range: (u32, u32), block: &Range<usize>) -> Range<usize> {
    let start = (range.0 as usize).clamp(block.start, block.end);
    let end = (range.1 as usize).clamp(start, block.end);
    start - block.start..end - block.start
}

/// Source of the keys and values of a span.
pub(in crate::arch) trait Blocks<V: Lanes> {
    type Element: Widen<V>;

    /// Position of the first key.
    fn first(&self) -> usize;

    /// See [`KvSpan::seen`].
    fn seen(&self, ranges: &[(u32, u32)]) -> Range<usize>;

    /// The first `n` rows of keys and values of block `i`; the blocks before `end` come next.
    fn rows(
        &mut self,
        i: usize,
        end: usize,
        n: usize,
        p: &AttnParams,
    ) -> (RowPtr<Self::Element>, RowPtr<Self::Element>);
}

impl<V: Lanes, T: Widen<V>> Blocks<V> for KvSpan<'_, T> {
    type Element = T;

    #[inline(always)]
    fn first(&self) -> usize {
        self.first
    }

    #[inline(always)]
    fn seen(&self, ranges: &[(u32, u32)]) -> Range<usize> {
        KvSpan::seen(self, ranges)
    }

    #[inline(always)]
    fn rows(&mut self, i: usize, end: usize, _: usize, p: &AttnParams) -> (RowPtr<T>, RowPtr<T>) {
        block_rows(*self, i, end, p)
    }
}

/// Stored blocks, which are widened to `f32` one at a time.
pub(in crate::arch) struct Widened<'a> {
    stored: KvStored<'a>,
    load: LoadKvFn,
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// Room for the keys, or the values, of a block.
pub(in crate::arch) type Tile = MaybeUninit<[f32; BLOCK * MAX_HEAD_DIM]>;

impl<'a> Widened<'a> {
    #[inline(always)]
    /// # Safety
    /// The CPU must have the level of `load`.
    pub(in crate::arch) unsafe fn new(
        stored: KvStored<'a>,
        tiles: &'a mut [Tile; 2],
        load: LoadKvFn,
        p: &AttnParams,
    ) -> Widened<'a> {
        let [k, v] = tiles;
        let [k, v] = [(k, p.head_dim), (v, p.head_dim_v)].map(|(tile, dim)| {
            let to = tile.as_mut_ptr().cast::<f32>();
            // SAFETY: the tile has room for a block.
            unsafe { to.write_bytes(0, BLOCK * dim) };
            // SAFETY: as above, and they are zeros now.
            unsafe { std::slice::from_raw_parts_mut(to, BLOCK * dim) }
        });
        Widened { stored, load, k, v }
    }
}

impl<V: Lanes> Blocks<V> for Widened<'_> {
    type Element = f32;

    #[inline(always)]
    fn first(&self) -> usize {
        self.stored.span.first
    }

    #[inline(always)]
    fn seen(&self, ranges: &[(u32, u32)]) -> Range<usize> {
        self.stored.span.seen(ranges)
    }

    #[inline(always)]
    fn rows(
        &mut self,
        i: usize,
        end: usize,
        n: usize,
        p: &AttnParams,
    ) -> (RowPtr<f32>, RowPtr<f32>) {
        let (KvStored { k, v, span }, load) = (self.stored, self.load);
        let block = &span.blocks[i];
        // Keys and values alternate, which the hardware's prefetcher does not see through.
        if i + 1 < end {
            prefetch(span.blocks[i + 1].k);
            prefetch(span.blocks[i + 1].v);
        }
        // SAFETY: `new` was promised the level; the blocks are whole, and have that many rows.
        unsafe {
            load(k, block.k, p.head_dim, &mut self.k[..n * p.head_dim]);
            load(v, block.v, p.head_dim_v, &mut self.v[..n * p.head_dim_v]);
        }
        (
            RowPtr::new(self.k.as_ptr(), p.head_dim),
            RowPtr::new(self.v.as_ptr(), p.head_dim_v),
        )
    }
}

/// Bytes of the next block, prefetched a few at a time at many points of the work on this one: a
/// memory system takes a limited number of requests.
pub(in crate::arch) struct Ahead<'a> {
    parts: [&'a [u8]; 2],
    /// Bytes prefetched.
    done: usize,
    /// Cache lines per point.
    lines: usize,
}

impl<'a> Ahead<'a> {
    /// Bytes of `block`, if there is one, for work with `n_points` points.
    #[inline(always)]
    pub(in crate::arch) fn new(block: Option<&KvBlock<'a, u8>>, n_points: usize) -> Ahead<'a> {
        let parts = block.map_or([&[][..]; 2], |block| [block.k, block.v]);
        Ahead {
            parts,
            done: 0,
            lines: (parts[0].len() + parts[1].len()).div_ceil(64 * n_points),
        }
    }

    /// Prefetches the next ones.
    #[inline(always)]
    pub(in crate::arch) fn point(&mut self) {
        let [k, v] = self.parts;
        for _ in 0..self.lines {
            if self.done >= k.len() + v.len() {
                return;
            }
            let p = match self.done.checked_sub(k.len()) {
                None => k.as_ptr().wrapping_add(self.done),
                Some(at) => v.as_ptr().wrapping_add(at),
            };
            prefetch_line(p);
            self.done += 64;
        }
    }
}

/// Number of keys, in the block at position `first`, up to the last that any row sees.
#[inline(always)]
pub(in crate::arch) fn wanted(ranges: &[(u32, u32)], first: usize) -> usize {
    let end = ranges.iter().map(|r| r.1 as usize).max().unwrap_or(0);
    end.saturating_sub(first).min(BLOCK)
}
