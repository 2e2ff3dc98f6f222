//! `f32` panels whose rows lie one after the other, over [`Lanes`]; [`crate::arch::gemm`] says what panels are.

use super::Lanes;
use super::attention::Widen;
use super::packing::{MAX_LANES, Transpose};
use crate::arch::gemm::{BLOCK, TILE, prefetch_line};
use crate::arch::transposed::COLUMNS;

/// See [`crate::arch::gemm::Multiply`]: `VECS` registers of activations times `ROWS` weight rows; with `TURNED`, of
/// weights times activation rows.
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn tile<V: Lanes, const VECS: usize, const ROWS: usize, const TURNED: bool>(
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
        if !TURNED {
            prefetch_line(ahead.wrapping_add(i * VECS * V::N).cast());
        }
        let mut xs = [z; VECS];
        for v in 0..VECS {
            // SAFETY: value `i` of the rows in register `v`.
            xs[v] = unsafe { z.read(x.wrapping_add((i * VECS + v) * V::N)) };
        }
        for r in 0..ROWS {
            let at = if TURNED { i * V::N + r } else { r * BLOCK + i };
            // SAFETY: value `i` of row `r`.
            let w = z.splat(unsafe { w.wrapping_add(at).read() });
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

/// See [`crate::arch::gemm::FewRows::fill`]: rows of values that are not in blocks.
#[inline(always)]
pub(in crate::arch) fn fill<V: Transpose, T: Widen<V>>(z: V, rows: &[&[u8]; MAX_LANES], turned: &mut [f32]) {
    let n = rows[0].len() / size_of::<T>();
    for (i, turned) in turned.chunks_exact_mut(V::N * V::N).enumerate().take(n.div_ceil(V::N)) {
        let first = i * V::N;
        let mut values = [z; MAX_LANES];
        for r in 0..V::N {
            let x = rows[r][first * size_of::<T>()..].as_ptr().cast::<T>();
            // SAFETY: row `r` has the rest of `n` values from `x` on, as all rows have the same length.
            values[r] = unsafe { if n - first < V::N { T::read_first(z, x, n - first) } else { T::read(z, x) } };
        }
        let values = V::transpose(values);
        for j in 0..V::N {
            values[j].store(&mut turned[j * V::N..][..V::N]);
        }
    }
}

/// Transposes `V::N` panel rows of `n` words, a multiple of `V::N`: word `i` of row `j` becomes `turned[i·N + j]`.
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn turn_panel<V: Transpose>(z: V, panel: *const f32, n: usize, turned: *mut f32) {
    for i in (0..n).step_by(V::N) {
        // SAFETY: words of `N` rows.
        let words = unsafe { z.read_transposed(panel.wrapping_add(i), n) };
        for j in 0..V::N {
            // SAFETY: word `i + j` of all rows.
            unsafe { words[j].write(turned.wrapping_add((i + j) * V::N)) };
        }
    }
}

/// Rows that [`turn`] transposes at a time.
pub(in crate::arch) const TURN_ROWS: usize = 32;

/// See [`crate::arch::transposed::Turn::TURN`]: transposes columns of [`TURN_ROWS`] rows.
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn turn<V: Transpose>(z: V, values: *const f32, panel: *mut f32) {
    for part in 0..TURN_ROWS / V::N {
        // SAFETY: a vector of `N` rows.
        let columns = unsafe { z.read_transposed(values.wrapping_add(part * V::N * COLUMNS), COLUMNS) };
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
        unsafe { if out.len() == V::N { T::read(z, x) } else { T::read_first(z, x, out.len()) } }.store(out);
    }
}

/// `F32Panels` of one level, whose register tiles have up to three registers of activations and `rows` weight rows, or
/// `rows_of_one` with one register; `$zero` must be safe under `$features`, and `unpack` must expand the wanted values
/// of a row's blocks.
macro_rules! f32_panels {
    ($features:literal, $lanes:ty, $zero:expr, depth: $depth:expr, rows: $rows:literal, rows_of_one: $alone:literal) => {
        /// Panels of `f32`.
        pub(super) enum F32Panels {}

        impl Panels for F32Panels {
            const LANES: usize = <$lanes>::N;
            const DEPTH: usize = $depth;
            const TILES: &[RegisterTile] = &[
                RegisterTile { rows: $alone, multiply: tile::<1, $alone, false> },
                RegisterTile { rows: $rows, multiply: tile::<2, $rows, false> },
                RegisterTile { rows: $rows, multiply: tile::<3, $rows, false> },
            ];
            const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack;
            const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

            fn words(k: usize) -> usize {
                k
            }
        }

        impl UnpackRows for F32Panels {
            const ELEMENT: (PanelElement, u64) = (PanelElement::F32, 1);

            unsafe fn unpack(dtype: DType, blocks: &[u8], out: &mut [u32]) {
                // SAFETY: the caller's promise.
                unsafe { unpack(dtype, blocks, 0..BLOCK, bytemuck::cast_slice_mut(out)) }
            }

            const FEW: Option<FewRows> =
                Some(FewRows { most: 8, fill, tiles: &[tile::<1, 2, true>, tile::<1, 4, true>, tile::<1, 8, true>] });
        }

        impl Turn for F32Panels {
            const ROWS: usize = panels::TURN_ROWS;
            const EXPAND: unsafe fn(DType, &[u8], Range<usize>, &mut [f32]) = unpack;
            const TURN: unsafe fn(*const f32, *mut u32) = turn;
        }

        #[target_feature(enable = $features)]
        unsafe fn tile<const VECS: usize, const ROWS: usize, const TURNED: bool>(
            w: *const u32,
            x: *const u32,
            k: usize,
            sums: *mut f32,
            first: bool,
            ahead: *const u32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { panels::tile::<$lanes, VECS, ROWS, TURNED>($zero, w.cast(), x.cast(), k, sums, first, ahead) }
        }

        #[target_feature(enable = $features)]
        fn fill(dtype: DType, rows: &[&[u8]; MAX_LANES], _: &mut [u32], turned: &mut [u32]) {
            let turned = bytemuck::cast_slice_mut(turned);
            match dtype {
                DType::F32 => panels::fill::<_, f32>($zero, rows, turned),
                DType::F16 => panels::fill::<_, f16>($zero, rows, turned),
                DType::BF16 => panels::fill::<_, bf16>($zero, rows, turned),
                _ => unreachable!("{dtype} is no plain format"),
            }
        }

        /// See [`panels::turn_panel`].
        #[target_feature(enable = $features)]
        unsafe fn turn_panel(panel: *const u32, n: usize, turned: *mut u32) {
            // SAFETY: the caller's promise.
            unsafe { panels::turn_panel($zero, panel.cast(), n, turned.cast()) }
        }

        #[target_feature(enable = $features)]
        unsafe fn turn(values: *const f32, panel: *mut u32) {
            // SAFETY: the caller's promise.
            unsafe { panels::turn($zero, values, panel.cast()) }
        }

        $crate::arch::lanes::packing::packing!($features, $zero);
    };
}

pub(in crate::arch) use f32_panels;
