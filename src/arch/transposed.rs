//! The transposed product, which carries gradients back through a matrix: the loops of
//! [`super::gemm`] with panels of weight *columns*. Some rows are expanded to `f32`, then
//! transposed to panel rows, in the words of the level's register tile.

use super::gemm::{
    BLOCK, Panels, SUMS, TILE, multiply_panel, pack, packed_len, place, prefetch, store_sums,
};
use super::table::Transposed;
use super::view::{CacheLine, ColumnsMut};
use crate::quant::DType;
use std::ops::Range;

/// Weight columns per task: with their sums, they fill half of an L2 cache of 1 MiB.
pub(super) const COLUMNS: usize = 128;
/// Maximum number of rows that are transposed at a time.
const MAX_ROWS: usize = 64;

/// Panels that are filled by columns.
pub(super) trait TransposedPanels: Panels {
    /// Weight rows that are expanded, then transposed, at a time: a divisor of [`BLOCK`], at most
    /// 64.
    const ROWS: usize;

    /// Whether the level has kernels for a format; the others are left to the scalar level.
    const KNOWS: fn(DType) -> bool;

    /// Expands the values `wanted` of at most [`BLOCK`] weights of a row. The range begins at a
    /// multiple of [`COLUMNS`], and `out` has room for its length rounded up to 32.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    const EXPAND: unsafe fn(dtype: DType, blocks: &[u8], wanted: Range<usize>, out: &mut [f32]);

    /// Transposes `LANES` columns of [`TransposedPanels::ROWS`] expanded rows to as many panel
    /// rows.
    ///
    /// # Safety
    /// The CPU must have the level's features. Rows of `values` lie [`COLUMNS`] apart, those of
    /// `panel` `panel_words(`[`BLOCK`]`)`, or as [`Panels::INTERLEAVED`] says.
    const TRANSPOSE: unsafe fn(values: *const f32, panel: *mut u32);
}

/// The transposed product on panels of `P`.
pub(super) const fn transposed<P: TransposedPanels>() -> Transposed {
    Transposed {
        tile: COLUMNS,
        group: P::VECS * P::LANES,
        packed_len: packed_len::<P>,
        pack: pack::<P>,
        workspace: CacheLine::holding(MAX_ROWS * COLUMNS + COLUMNS * BLOCK + COLUMNS * SUMS),
        kernel: transposed_kernel::<P>,
    }
}

/// Expands blocks with [`TransposedPanels::EXPAND`], but those of a format that the level does not
/// know, and a rest that is no multiple of 32 values, with the format's own function.
pub(super) unsafe fn dequantize<P: TransposedPanels>(dtype: DType, blocks: &[u8], x: &mut [f32]) {
    let (format, known) = (dtype.float_format(), (P::KNOWS)(dtype));
    for (blocks, x) in blocks
        .chunks(BLOCK / format.block_elems * format.block_bytes)
        .zip(x.chunks_mut(BLOCK))
    {
        if known && x.len().is_multiple_of(32) {
            // SAFETY: the caller's promise.
            unsafe { (P::EXPAND)(dtype, blocks, 0..x.len(), x) };
        } else {
            (format.dequantize)(blocks, x);
        }
    }
}

unsafe fn transposed_kernel<P: TransposedPanels>(
    x: &mut ColumnsMut<'_>,
    first: usize,
    n_in: usize,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    let format = dtype.float_format();
    let bytes = |values: usize| values / format.block_elems * format.block_bytes;
    let start = first / format.block_elems * format.block_elems;
    let end = (first + x.cols()).next_multiple_of(format.block_elems);
    assert!(
        end - start <= BLOCK && x.cols() <= COLUMNS,
        "columns {first}+{} in blocks",
        x.cols()
    );
    // Bytes of row `r` that hold these columns.
    let blocks = |r: usize| &w[r * bytes(n_in)..][bytes(start)..bytes(end)];
    let wanted = first - start..first - start + x.cols();
    let y: &[u32] = bytemuck::cast_slice(packed);
    let vec_words = P::words(k) * P::LANES;
    let panel_stride = P::panel_words(BLOCK);
    let n_vecs = x.rows().div_ceil(P::LANES);
    let n_cols = x.cols();

    const { assert!(P::ROWS <= MAX_ROWS && BLOCK.is_multiple_of(P::ROWS)) };
    // Expanded rows, `COLUMNS` values each; columns past the end hold what the last task left.
    let (values, rest) =
        bytemuck::cast_slice_mut::<_, u32>(workspace).split_at_mut(MAX_ROWS * COLUMNS);
    let values: &mut [f32] = bytemuck::cast_slice_mut(values);
    let (panel, sums) = rest.split_at_mut(COLUMNS * BLOCK);
    let panel = panel.as_mut_ptr();
    // `[tile of columns][register of activations][column][lane]`
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[..COLUMNS * SUMS]);
    let sums = sums.as_mut_ptr();

    for first_vec in (0..n_vecs).step_by(SUMS / P::LANES) {
        let vecs = first_vec..(first_vec + SUMS / P::LANES).min(n_vecs);
        for k0 in (0..k).step_by(BLOCK) {
            let n = (k - k0).min(BLOCK);
            for k1 in (0..n).step_by(P::ROWS) {
                for (r, row) in values.chunks_exact_mut(COLUMNS).enumerate().take(P::ROWS) {
                    if k1 + r < n {
                        // SAFETY: the caller's promise.
                        unsafe { (P::EXPAND)(dtype, blocks(k0 + k1 + r), wanted.clone(), row) };
                    } else {
                        row.fill(0.0);
                    }
                }
                // Register tiles are multiplied whole; results for columns past the end are not
                // stored.
                for c in (0..n_cols.next_multiple_of(P::TILES[0].rows)).step_by(P::LANES) {
                    let panel = panel.wrapping_add(place::<P>(panel_stride, c, P::panel_words(k1)));
                    // SAFETY: the expanded rows have these columns, and panel rows have room for
                    // the words.
                    unsafe { (P::TRANSPOSE)(values[c..].as_ptr(), panel) };
                }
            }
            for r in k0 + n..(k0 + n + BLOCK).min(k) {
                prefetch(blocks(r));
            }
            for c0 in (0..n_cols).step_by(TILE) {
                let panel = panel.wrapping_add(place::<P>(panel_stride, c0, 0));
                let (sums, n_rows) = (sums.wrapping_add(c0 * SUMS), (n_cols - c0).min(TILE));
                // SAFETY: the panel has these rows and values, and there is room for their sums.
                unsafe {
                    multiply_panel::<P>(
                        panel,
                        n_rows,
                        y,
                        vec_words,
                        (vecs.clone(), x.rows()),
                        k0..k0 + n,
                        sums,
                    )
                };
            }
        }
        for c0 in (0..n_cols).step_by(TILE) {
            // SAFETY: all sums were computed.
            unsafe {
                store_sums::<P>(
                    sums.wrapping_add(c0 * SUMS),
                    vecs.clone(),
                    x,
                    c0,
                    (n_cols - c0).min(TILE),
                )
            };
        }
    }
}
