//! Products with many activation rows: the loops that all vector levels share.
//!
//! Activations are packed once: the rows of a register tile interleaved, so that a register holds
//! one value (or a few) of each row and a tile reads one stream. A task multiplies [`TILE`] weight
//! rows, [`BLOCK`] values of each at a time: it unpacks them to a panel that stays in the L1 and L2
//! caches, then goes over all activations with a register tile in which every word of the panel is
//! broadcast. Unpacking needs no transposition that way; only the finished sums are transposed when
//! they are stored.
//!
//! ```text
//! for each TILE of weight rows, for each SUMS activation rows
//!     for each BLOCK of k                      panel: TILE × BLOCK (at most 32 KiB)
//!         unpack the panel, prefetch the next one's blocks
//!         for each VECS · LANES activations    their block of k stays in L1
//!             for each few rows of the panel   register tile: sums += w · x
//!     transpose sums into y
//! ```
//!
//! Loop structure after Goto & van de Geijn, "Anatomy of high-performance matrix multiplication"
//! (2008). Each sum adds its products in the order of `k`, whatever the tile.

use super::generic::packing::MAX_LANES;
use super::table::{Gemm, PanelElement};
use super::view::{CacheLine, ColumnsMut};
use crate::quant::DType;
use std::ops::Range;

/// Weight rows of a panel.
pub(super) const TILE: usize = 32;
/// Words per panel row, and values per super-block.
pub(super) const BLOCK: usize = 256;
/// Maximum activation rows with sums kept at a time; with more rows, the weights are unpacked
/// again.
pub(super) const SUMS: usize = 528;

/// Multiplies a register tile: `sums[v][r][lane] (+)= Σ w[r]·x[v][lane]` over `k` values; `first`
/// starts from zero. Also prefetches from `ahead` on, the next activations.
///
/// # Safety
/// The CPU must have the level's features. `w` points into a panel whose rows have `k` values;
/// registers of `sums` lie [`TILE`] registers apart.
pub(super) type Multiply = unsafe fn(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
);

/// A shape of register tiles.
#[derive(Clone, Copy)]
pub(super) struct RegisterTile {
    /// Weight rows, a divisor of [`TILE`].
    pub(super) rows: usize,
    pub(super) multiply: Multiply,
}

/// Kernels for a small batch of activation rows, where the operands of the register tile change
/// roles: registers hold a word of [`Panels::LANES`] weight rows, and words of activations are
/// broadcast from where they are packed. So the time is proportional to the number of activation
/// rows, while [`Panels::TILES`] take the same time for 1 and for `LANES` rows. Each sum adds the
/// same products in the same order.
#[derive(Clone, Copy)]
pub(super) struct SmallBatch {
    /// Largest batch for which this is faster, at most `LANES`.
    pub(super) max_rows: usize,
    /// Expands at most [`BLOCK`] weights of `LANES` rows, those of row `j` from `rows[j]`, to a
    /// transposed panel: word `i` of row `j` becomes `transposed[i·LANES + j]`. `panel` has room
    /// for these rows, too.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    pub(super) fill: unsafe fn(
        dtype: DType,
        rows: &[&[u8]; MAX_LANES],
        panel: &mut [u32],
        transposed: &mut [u32],
    ),
    /// [`Multiply`] for 2, 4 … activation rows: `x` points to a transposed panel, `w` to
    /// activations: words are `LANES` apart, rows adjacent.
    pub(super) tiles: &'static [Multiply],
}

/// A level's panels of 32-bit words: one `f32` each, or two or four narrower values.
pub(super) trait Panels {
    /// Words per register.
    const LANES: usize;
    /// The register tiles with 1, 2 … registers of activations.
    const TILES: &[RegisterTile];
    /// The same for groups with rows in the lower half of their last register only; empty if they
    /// take as long.
    const HALVES: &[Multiply] = &[];
    /// Registers of activations in the largest register tile; `VECS · LANES` activation rows are a
    /// group.
    const VECS: usize = Self::TILES.len();
    /// Rows of a panel that lie interleaved word by word; a divisor of the rows of all tiles.
    const INTERLEAVED: usize = 1;
    /// Values that one register tile covers, so that its activations fit the L1 cache.
    const DEPTH: usize = BLOCK;

    /// Packs `x` (at most `VECS · LANES` rows of `k` values): `packed[i][v][lane]` becomes word `i`
    /// of row `v·LANES + lane`, for as many `v` as the rows fill.
    ///
    /// # Safety
    /// The CPU must have the level's features, and `packed` must have that length.
    const PACK: unsafe fn(x: &[f32], k: usize, packed: &mut [u32]);

    /// `y[i·stride + r] = sums[r][i]` for `cols` values of `r` and `rows ≤ LANES` of `i`.
    ///
    /// # Safety
    /// The CPU must have the level's features, and the pointers must be valid for these accesses.
    const STORE: unsafe fn(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize);

    /// Words that `k` values of an activation row take.
    fn words(k: usize) -> usize;

    /// Words that `k` values of a weight row take.
    fn panel_words(k: usize) -> usize {
        Self::words(k)
    }
}

/// Panels that are filled by rows.
pub(super) trait UnpackRows: Panels {
    /// Element type of the panel, and products of it per product of a weight.
    const ELEMENT: (PanelElement, u64);

    /// Expands at most [`BLOCK`] weights of a row, to every [`Panels::INTERLEAVED`]th word.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn unpack(dtype: DType, blocks: &[u8], out: &mut [u32]);

    const SMALL_BATCH: Option<SmallBatch> = None;
}

/// The [`Gemm`] table entry for panels `P`.
pub(super) const fn table<P: UnpackRows>() -> Gemm {
    Gemm {
        element: P::ELEMENT,
        tile: TILE,
        small_batch: if let Some(batch) = P::SMALL_BATCH {
            batch.max_rows
        } else {
            0
        },
        group: P::VECS * P::LANES,
        packed_len: packed_len::<P>,
        pack: pack::<P>,
        workspace: CacheLine::holding(TILE * BLOCK + TILE * SUMS),
        kernel: kernel::<P>,
        mixed: None,
    }
}

pub(super) fn packed_len<P: Panels>(m: usize, k: usize) -> usize {
    packed_bytes(m, P::LANES, P::words(k))
}

/// Bytes of `m` packed rows of `words` 32-bit words each, `m` rounded up to a multiple of `lanes`.
#[inline]
pub(super) fn packed_bytes(m: usize, lanes: usize, words: usize) -> usize {
    let rows = m.checked_next_multiple_of(lanes);
    let bytes = rows
        .and_then(|rows| rows.checked_mul(words))
        .and_then(|words| words.checked_mul(size_of::<u32>()));
    bytes.unwrap_or_else(|| panic!("{m} packed rows of {words} words"))
}

/// # Safety
/// That of [`Panels::PACK`].
pub(super) unsafe fn pack<P: Panels>(x: &[f32], _m: usize, k: usize, packed: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { (P::PACK)(x, k, bytemuck::cast_slice_mut(packed)) }
}

/// Working memory of a task of attention, on its stack.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
pub(super) struct Aligned<T>(pub(super) T);

/// Index of word `word` of row `r` in a panel: row-major, `INTERLEAVED` rows at a time.
#[inline]
pub(super) fn place<P: Panels>(panel_stride: usize, r: usize, word: usize) -> usize {
    let i = P::INTERLEAVED;
    r / i * i * panel_stride + word * i + r % i
}

/// Implements [`Gemm::kernel`].
///
/// # Safety
/// The CPU must have the level's features; lengths as for [`Gemm::kernel`].
pub(super) unsafe fn kernel<P: UnpackRows>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    if let Some(batch) = P::SMALL_BATCH.filter(|batch| y.rows() <= batch.max_rows) {
        // SAFETY: the caller's promise.
        return unsafe { small_batch::<P>(batch, y, dtype, w, packed, k, workspace) };
    }
    let format = dtype.float_format();
    let row_bytes = k / format.block_elems * format.block_bytes;
    let block_bytes = BLOCK / format.block_elems * format.block_bytes;
    let x: &[u32] = bytemuck::cast_slice(packed);
    let vec_words = P::words(k) * P::LANES;
    let panel_stride = P::panel_words(BLOCK);
    let n_vecs = y.rows().div_ceil(P::LANES);
    // A multiple of whole groups, since rows are packed in groups.
    let max_vecs = SUMS / P::LANES / P::VECS * P::VECS;
    assert!(panel_stride <= BLOCK, "a panel row of {panel_stride} words");

    let (panel, sums) = bytemuck::cast_slice_mut::<_, u32>(workspace).split_at_mut(TILE * BLOCK);
    // `[register of activations][weight row][lane]`
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[..TILE * SUMS]);
    let sums = sums.as_mut_ptr();

    for (t, w) in w.chunks(TILE * row_bytes.max(1)).enumerate() {
        let n_rows = w.len() / row_bytes;
        // Blocks of row `r` of `w` that make the panel for the values from `k0` on.
        let blocks = |r: usize, k0: usize| {
            let row = &w[r * row_bytes..][..row_bytes];
            let start = k0 / BLOCK * block_bytes;
            &row[start..(start + block_bytes).min(row_bytes)]
        };
        for first_vec in (0..n_vecs).step_by(max_vecs) {
            let vecs = first_vec..(first_vec + max_vecs).min(n_vecs);
            (0..n_rows).for_each(|r| prefetch(blocks(r, 0)));
            for k0 in (0..k).step_by(BLOCK) {
                let n = (k - k0).min(BLOCK);
                for r in 0..n_rows {
                    // SAFETY: the caller's promise.
                    unsafe {
                        P::unpack(
                            dtype,
                            blocks(r, k0),
                            &mut panel[place::<P>(panel_stride, r, 0)..],
                        )
                    };
                }
                // Register tiles are multiplied whole: missing rows are zero.
                for r in n_rows..n_rows.next_multiple_of(P::TILES[0].rows) {
                    for word in 0..P::panel_words(n) {
                        panel[place::<P>(panel_stride, r, word)] = 0;
                    }
                }
                if k0 + BLOCK < k {
                    (0..n_rows).for_each(|r| prefetch(blocks(r, k0 + BLOCK)));
                }
                // SAFETY: the panel has these rows and values, and there is room for their sums.
                unsafe {
                    multiply_panel::<P>(
                        panel.as_ptr(),
                        n_rows,
                        x,
                        vec_words,
                        (vecs.clone(), y.rows()),
                        k0..k0 + n,
                        sums,
                    )
                };
            }
            // SAFETY: all sums were computed.
            unsafe { store_sums::<P>(sums, vecs, y, t * TILE, n_rows) };
        }
    }
}

/// Adds to `sums`, `[register of activations][panel row][lane]`, the products of `n_rows` panel
/// rows, at most [`TILE`], of the values `k`, with the activations in registers `vecs` of those of
/// `m` rows; those of values from 0 on start from zero. A register has `vec_words` words of all
/// values.
///
/// # Safety
/// The CPU must have the level's features. The panel must have these rows, up to a multiple of the
/// rows of all tiles, and the sums room for as many.
pub(super) unsafe fn multiply_panel<P: Panels>(
    panel: *const u32,
    n_rows: usize,
    x: &[u32],
    vec_words: usize,
    (vecs, m): (Range<usize>, usize),
    k: Range<usize>,
    sums: *mut f32,
) {
    for k1 in k.clone().step_by(P::DEPTH) {
        let depth = (k.end - k1).min(P::DEPTH);
        for v in vecs.clone().step_by(P::VECS) {
            let n_vecs = (vecs.end - v).min(P::VECS);
            let x = &x[v * vec_words + P::words(k1) * n_vecs * P::LANES..];
            let x = &x[..P::words(depth) * n_vecs * P::LANES];
            let tile = &P::TILES[n_vecs - 1];
            // Rows of the last register.
            let n_last = m - (v + n_vecs - 1) * P::LANES;
            let multiply = P::HALVES
                .get(n_vecs - 1)
                .filter(|_| n_last <= P::LANES / 2)
                .unwrap_or(&tile.multiply);
            for (i, r) in (0..n_rows).step_by(tile.rows).enumerate() {
                let ahead = x.as_ptr().wrapping_add(P::VECS * vec_words + i * P::LANES);
                let w = panel.wrapping_add(place::<P>(
                    P::panel_words(BLOCK),
                    r,
                    P::panel_words(k1 - k.start),
                ));
                let sums = sums.wrapping_add(((v - vecs.start) * TILE + r) * P::LANES);
                // SAFETY: the tile lies inside the panel, the activations and the sums.
                unsafe { multiply(w, x.as_ptr(), depth, sums, k1 == 0, ahead) };
            }
        }
    }
}

/// Stores the sums that [`multiply_panel`] computed as columns `first..first + n_cols` of `y`.
///
/// # Safety
/// The CPU must have the level's features, and there must be sums of so many panel rows and of
/// `vecs`.
pub(super) unsafe fn store_sums<P: Panels>(
    sums: *const f32,
    vecs: Range<usize>,
    y: &mut ColumnsMut<'_>,
    first: usize,
    n_cols: usize,
) {
    assert!(
        first + n_cols <= y.cols(),
        "columns {first}+{n_cols} of {}",
        y.cols()
    );
    for v in vecs.clone() {
        let row = v * P::LANES;
        let (n, stride) = ((y.rows() - row).min(P::LANES), y.stride());
        for c in (0..n_cols).step_by(P::LANES) {
            let sums = sums.wrapping_add(((v - vecs.start) * TILE + c) * P::LANES);
            let y = y.as_mut_ptr().wrapping_add(row * stride + first + c);
            // SAFETY: the caller's promise; rows `row..row + n` and these columns are in `y`.
            unsafe { (P::STORE)(sums, y, stride, n, (n_cols - c).min(P::LANES)) };
        }
    }
}

/// [`kernel`] by [`SmallBatch`].
///
/// # Safety
/// As for [`kernel`].
unsafe fn small_batch<P: UnpackRows>(
    batch: SmallBatch,
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    let format = dtype.float_format();
    let row_bytes = k / format.block_elems * format.block_bytes;
    let block_bytes = BLOCK / format.block_elems * format.block_bytes;
    let x: &[u32] = bytemuck::cast_slice(packed);
    assert!(
        y.rows() <= P::LANES && x.len() == P::words(k) * P::LANES,
        "{} rows are no small batch",
        y.rows()
    );

    let (panel, rest) =
        bytemuck::cast_slice_mut::<_, u32>(workspace).split_at_mut(P::LANES * BLOCK);
    let (transposed, sums) = rest.split_at_mut(P::LANES * BLOCK);
    // `[activation row][lane]`
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[..P::LANES * P::LANES]);
    for (t, w) in w.chunks(P::LANES * row_bytes).enumerate() {
        let n_rows = w.len() / row_bytes;
        for k0 in (0..k).step_by(BLOCK) {
            let n = (k - k0).min(BLOCK);
            // The following weight rows are read in one stream.
            for line in (w.len() * k0 / k..w.len() * (k0 + n) / k).step_by(64) {
                prefetch_line(w.as_ptr().wrapping_add(w.len() + line));
            }
            let start = k0 / BLOCK * block_bytes;
            let end = (start + block_bytes).min(row_bytes);
            // Lanes of missing rows hold the last one.
            let mut rows = [w; MAX_LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = &w[r.min(n_rows - 1) * row_bytes..][start..end];
            }
            // SAFETY: the caller's promise.
            unsafe { (batch.fill)(dtype, &rows, panel, transposed) };
            let x = &x[P::words(k0) * P::LANES..][..P::words(n) * P::LANES];
            let mut row = 0;
            while row < y.rows() {
                // One row more than there are takes less time than another tile; it is zero.
                let i = ((y.rows() - row + 1).ilog2() as usize - 1).min(batch.tiles.len() - 1);
                let (x, sums) = (x[row..].as_ptr(), sums[row * P::LANES..].as_mut_ptr());
                // SAFETY: the rows are inside the packed activations and the sums.
                unsafe { (batch.tiles[i])(x, transposed.as_ptr(), n, sums, k0 == 0, x) };
                row += 2 << i;
            }
        }
        for i in 0..y.rows() {
            y.row(i)[t * P::LANES..][..n_rows].copy_from_slice(&sums[i * P::LANES..][..n_rows]);
        }
    }
}

/// Prefetches `bytes` into the L2 cache.
#[inline]
pub(super) fn prefetch(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        prefetch_line(line.as_ptr());
    }
}

/// Prefetches the cache line of `p`, which need not be valid, into the L2 cache; WebAssembly has no
/// instruction for it.
#[inline(always)]
#[cfg_attr(target_arch = "wasm32", expect(unused_variables))]
pub(super) fn prefetch_line(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching has no effect on memory, and this instruction is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above; `prfm` is part of 64-bit Arm. `_prefetch` of std::arch is not stable.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags));
    }
}
