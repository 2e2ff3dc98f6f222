//! `f32` panels with consecutive rows, over [`Lanes`]; panels are defined in [`crate::arch::gemm`].

use super::lanes::{Lanes, Widen};
use super::packing::Transpose;
use crate::arch::gemm::{BLOCK, TILE, prefetch_line};
use crate::arch::transposed::COLUMNS;

/// See [`crate::arch::gemm::Multiply`]: `VECS` registers of activations times `ROWS` weight rows.
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn tile<V: Lanes, const VECS: usize, const ROWS: usize>(
    z: V,
    w: *const f32,
    x: *const f32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    let mut acc = [[z; VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { z.read(sums.wrapping_add((v * TILE + r) * V::N)) };
            }
        }
    }
    for i in 0..k {
        prefetch_line(ahead.wrapping_add(i * VECS * V::N).cast());
        let mut xs = [z; VECS];
        for v in 0..VECS {
            // SAFETY: value `i` of the rows in register `v`.
            xs[v] = unsafe { z.read(x.wrapping_add((i * VECS + v) * V::N)) };
        }
        for r in 0..ROWS {
            // SAFETY: value `i` of row `r`.
            let w = z.splat(unsafe { w.wrapping_add(r * BLOCK + i).read() });
            for v in 0..VECS {
                acc[r][v] = w.mul_add(xs[v], acc[r][v]);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { acc[r][v].write(sums.wrapping_add((v * TILE + r) * V::N)) };
        }
    }
}

/// Transposes `V::N` panel rows of `n` words, a multiple of `V::N`: word `i` of row `j` becomes
/// `transposed[i·N + j]`.
///
/// # Safety
/// The pointers must be valid for that.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in crate::arch) unsafe fn transpose_panel<V: Transpose>(
    z: V,
    panel: *const f32,
    n: usize,
    transposed: *mut f32,
) {
    for i in (0..n).step_by(V::N) {
        // SAFETY: words of `N` rows.
        let words = unsafe { z.read_transposed(panel.wrapping_add(i), n) };
        for j in 0..V::N {
            // SAFETY: word `i + j` of all rows.
            unsafe { words[j].write(transposed.wrapping_add((i + j) * V::N)) };
        }
    }
}

/// Rows that [`transpose_columns`] transposes at a time.
pub(in crate::arch) const TRANSPOSED_ROWS: usize = 32;

/// See [`crate::arch::transposed::TransposedPanels::TRANSPOSE`]: transposes columns of
/// [`TRANSPOSED_ROWS`] rows.
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn transpose_columns<V: Transpose>(
    z: V,
    values: *const f32,
    panel: *mut f32,
) {
    for part in 0..TRANSPOSED_ROWS / V::N {
        // SAFETY: a vector of `N` rows.
        let columns =
            unsafe { z.read_transposed(values.wrapping_add(part * V::N * COLUMNS), COLUMNS) };
        for c in 0..V::N {
            // SAFETY: panel rows have room for the values.
            unsafe { columns[c].write(panel.wrapping_add(c * BLOCK + part * V::N)) };
        }
    }
}

/// Widens values that are not in blocks; `out` has room for all.
#[inline(always)]
pub(in crate::arch) fn widen<V: Lanes, T: Widen<V>>(z: V, bytes: &[u8], out: &mut [f32]) {
    let out = &mut out[..bytes.len() / size_of::<T>()];
    for (i, out) in out.chunks_mut(V::N).enumerate() {
        let x = bytes.as_ptr().cast::<T>().wrapping_add(i * V::N);
        // SAFETY: `bytes` has as many values from `x` on as `out`.
        unsafe {
            if out.len() == V::N {
                T::read(z, x)
            } else {
                T::read_first(z, x, out.len())
            }
        }
        .store(out);
    }
}

/// `F32Panels` of one level: register tiles have up to three registers of activations and `rows`
/// weight rows, or `rows_of_one` with one register. `$zero` must be safe under `$features`,
/// `unpack` must expand the wanted values of a row's blocks, and `knows` lists its formats.
macro_rules! f32_panels {
    ($features:literal, $lanes:ty, $zero:expr, depth: $depth:expr, rows: $rows:literal, rows_of_one: $alone:literal) => {
        /// Panels of `f32`.
        pub(in crate::arch) enum F32Panels {}

        impl Panels for F32Panels {
            const LANES: usize = <$lanes>::N;
            const DEPTH: usize = $depth;
            const TILES: &[RegisterTile] = &[
                RegisterTile {
                    rows: $alone,
                    multiply: tile::<1, $alone>,
                },
                RegisterTile {
                    rows: $rows,
                    multiply: tile::<2, $rows>,
                },
                RegisterTile {
                    rows: $rows,
                    multiply: tile::<3, $rows>,
                },
            ];
            const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack;
            const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

            #[inline]
            fn words(k: usize) -> usize {
                k
            }
        }

        impl TransposedPanels for F32Panels {
            const KNOWS: fn(DType) -> bool = knows;
            const ROWS: usize = panels::TRANSPOSED_ROWS;
            const EXPAND: unsafe fn(DType, &[u8], Range<usize>, &mut [f32]) = unpack;
            const TRANSPOSE: unsafe fn(*const f32, *mut u32) = transpose_columns;
        }

        #[target_feature(enable = $features)]
        unsafe fn tile<const VECS: usize, const ROWS: usize>(
            w: *const u32,
            x: *const u32,
            k: usize,
            sums: *mut f32,
            first: bool,
            ahead: *const u32,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                panels::tile::<$lanes, VECS, ROWS>($zero, w.cast(), x.cast(), k, sums, first, ahead)
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn transpose_columns(values: *const f32, panel: *mut u32) {
            // SAFETY: the caller's promise.
            unsafe { panels::transpose_columns($zero, values, panel.cast()) }
        }

        $crate::arch::generic::packing::packing!($features, $zero);
    };
}

/// [`transpose_panel`] for one level; arguments as of [`f32_panels`].
#[cfg(target_arch = "x86_64")]
macro_rules! transposed_panel {
    ($features:literal, $zero:expr) => {
        /// See [`panels::transpose_panel`].
        #[target_feature(enable = $features)]
        pub(in crate::arch) unsafe fn transpose_panel(
            panel: *const u32,
            n: usize,
            transposed: *mut u32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { panels::transpose_panel($zero, panel.cast(), n, transposed.cast()) }
        }
    };
}

pub(in crate::arch) use f32_panels;
#[cfg(target_arch = "x86_64")]
pub(in crate::arch) use transposed_panel;
