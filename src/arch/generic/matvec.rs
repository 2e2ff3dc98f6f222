//! Products of activations with the plain formats, F32, F16 and BF16, for decode and prefill rows
//! alike.
//!
//! Lane `l` of a sum adds up the columns `l`, `l + N`, `l + 2N` …; then the lanes are added. A
//! product has the same bits whichever rows are multiplied together with it, so prefill and decode
//! rows share this arithmetic.
//!
//! Some weight rows are multiplied by some activation rows at a time, and the next weight rows are
//! prefetched, each as the same columns of its predecessor are used: from memory, 2 to 6 activation
//! rows take hardly longer than reading, but up to 1.4 times as long with a distance of 8 KiB (Zen
//! 4, two threads, rows of 2,048 and 8,192 F16 values). Many activation rows reach 98 % of the peak
//! of multiply-adds, without copies of weights: widening F16 costs nothing there.

use super::lanes::{Lanes, Widen};
use crate::arch::gemm::{packed_bytes, prefetch_line};
use crate::arch::view::ColumnsMut;
use half::bf16;

/// Bytes of activation rows that stay in the L2 cache while the weight rows go by.
const L2_BYTES: usize = 256 << 10;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Values between packed rows. Rows with lengths of powers of two would share the ways of a cache
/// set: 10 such rows reach 85 % of the speed with this distance.
pub(in crate::arch) const GAP: usize = 16;

/// A level's kernel for a single activation row.
#[derive(Clone, Copy)]
pub(in crate::arch) struct OneRow {
    /// Longest row that is multiplied by one weight row at a time. A longer one, in `f32`, leaves
    /// the L1 cache before the next weight row comes; with several weight rows at a time 8192
    /// values take half as long (AVX-512 on Zen 4), 2048 a fifth longer.
    pub(in crate::arch) short: usize,
    /// Prefetch distance in bytes, instead of that to the next weight rows: the CPU's own
    /// prefetcher follows one stream or eight. With 2 to 8 KiB F16 models decode 14 to 28 %
    /// slower, without prefetching 3 to 10 % (AVX-512 on Zen 4).
    pub(in crate::arch) ahead: Option<usize>,
}

impl<V: Lanes> Widen<V> for bf16 {
    #[inline(always)]
    unsafe fn read(z: V, p: *const bf16) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_bf16(p) }
    }
    #[inline(always)]
    unsafe fn read_first(z: V, p: *const bf16, n: usize) -> V {
        let mut values = [bf16::ZERO; 16];
        // SAFETY: `n` values, which the caller promises; a vector has at most 16.
        unsafe {
            std::ptr::copy_nonoverlapping(
                p.cast::<u8>(),
                values.as_mut_ptr().cast(),
                n * size_of::<bf16>(),
            )
        };
        // SAFETY: a vector's values.
        unsafe { z.read_bf16(values.as_ptr()) }
    }
}

/// Products of weight rows of `T` with activation rows of `n` values, from `x[..n]` on, `stride`
/// values apart: `R` weight rows by up to `M` activation rows at a time, or `R1` by a single one.
#[inline(always)]
pub(in crate::arch) fn plain<
    V: Lanes,
    T: Widen<V>,
    const R: usize,
    const M: usize,
    const R1: usize,
>(
    z: V,
    one: OneRow,
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &[f32],
    n: usize,
    stride: usize,
) {
    const { assert!(M <= 6) };
    if n == 0 {
        return y.fill(0.0);
    }
    let row_bytes = n * size_of::<T>();
    if y.rows() == 1 {
        let ahead = |rows: usize| one.ahead.unwrap_or(rows * row_bytes);
        return if n <= one.short {
            rows::<V, T, 1, 1>(z, y, (0, 0), w, x, n, stride, ahead(1));
        } else {
            rows::<V, T, R1, 1>(z, y, (0, 0), w, x, n, stride, ahead(R1));
        };
    }
    let max_rows = (L2_BYTES / (stride * size_of::<f32>())).max(M) / M * M;
    for first in (0..y.rows()).step_by(max_rows) {
        let end = (first + max_rows).min(y.rows());
        for (t, w) in w.chunks(R * row_bytes).enumerate() {
            for i in (first..end).step_by(M) {
                let (x, at) = (&x[i * stride..], (i, t * R));
                // The other activation rows find the weights in the cache.
                let ahead = if i == first { R * row_bytes } else { 0 };
                match end - i {
                    1 => rows::<V, T, R, 1>(z, y, at, w, x, n, stride, ahead),
                    2 if M > 2 => rows::<V, T, R, 2>(z, y, at, w, x, n, stride, ahead),
                    3 if M > 3 => rows::<V, T, R, 3>(z, y, at, w, x, n, stride, ahead),
                    4 if M > 4 => rows::<V, T, R, 4>(z, y, at, w, x, n, stride, ahead),
                    5 if M > 5 => rows::<V, T, R, 5>(z, y, at, w, x, n, stride, ahead),
                    _ => rows::<V, T, R, M>(z, y, at, w, x, n, stride, ahead),
                }
            }
        }
    }
}

/// Products of weight rows, `R` at a time, with `M` activation rows; `at` is their first row and
/// column in `y`.
#[inline(always)]
fn rows<V: Lanes, T: Widen<V>, const R: usize, const M: usize>(
    z: V,
    y: &mut ColumnsMut<'_>,
    at: (usize, usize),
    w: &[u8],
    x: &[f32],
    n: usize,
    stride: usize,
    ahead: usize,
) {
    let row_bytes = n * size_of::<T>();
    let whole = w.chunks_exact(R * row_bytes);
    let (rest, n_whole) = (whole.remainder(), w.len() / (R * row_bytes));
    for (t, w) in whole.enumerate() {
        tile::<V, T, R, M>(z, y, (at.0, at.1 + t * R), w, x, n, stride, ahead);
    }
    for (r, w) in rest.chunks_exact(row_bytes).enumerate() {
        tile::<V, T, 1, M>(z, y, (at.0, at.1 + n_whole * R + r), w, x, n, stride, ahead);
    }
}

/// `R` weight rows times `M` activation rows; weights are prefetched `ahead` bytes before their
/// use, not at all if it is 0.
#[inline(always)]
fn tile<V: Lanes, T: Widen<V>, const R: usize, const M: usize>(
    z: V,
    y: &mut ColumnsMut<'_>,
    (i, r): (usize, usize),
    w: &[u8],
    x: &[f32],
    n: usize,
    stride: usize,
    ahead: usize,
) {
    assert!(w.len() == R * n * size_of::<T>() && x.len() >= (M - 1) * stride + n && stride >= n);
    let (w, x) = (w.as_ptr().cast::<T>(), x.as_ptr());
    let mut sums = [[z; M]; R];
    let line = LINE / size_of::<T>();
    let mut k = 0;
    while k + line <= n {
        if ahead > 0 {
            for r in 0..R {
                prefetch_line(w.wrapping_add(r * n + k).cast::<u8>().wrapping_add(ahead));
            }
        }
        let mut v = 0;
        while v < line {
            // SAFETY: a vector from there on is inside each row.
            unsafe {
                add(
                    z,
                    w.wrapping_add(k + v),
                    x.wrapping_add(k + v),
                    (n, stride),
                    V::N,
                    &mut sums,
                )
            };
            v += V::N;
        }
        k += line;
    }
    while k < n {
        let (w, x) = (w.wrapping_add(k), x.wrapping_add(k));
        // SAFETY: that many values are left in each row.
        unsafe { add(z, w, x, (n, stride), (n - k).min(V::N), &mut sums) };
        k += V::N;
    }
    for m in 0..M {
        for first in (0..R).step_by(4) {
            let mut four = [z; 4];
            for j in 0..(R - first).min(4) {
                four[j] = sums[first + j][m];
            }
            let n_rows = (R - first).min(4);
            y.row(i + m)[r + first..][..n_rows].copy_from_slice(&V::sum4(four)[..n_rows]);
        }
    }
}

/// Adds the products of `len` columns, one in each lane.
///
/// # Safety
/// `len` values must be readable in each row; the first rows begin at `w` and `x`.
#[inline(always)]
unsafe fn add<V: Lanes, T: Widen<V>, const R: usize, const M: usize>(
    z: V,
    w: *const T,
    x: *const f32,
    (n, stride): (usize, usize),
    len: usize,
    sums: &mut [[V; M]; R],
) {
    let mut xs = [z; M];
    for m in 0..M {
        let x = x.wrapping_add(m * stride);
        // SAFETY: the caller's promise.
        xs[m] = unsafe {
            if len == V::N {
                z.read(x)
            } else {
                z.read_first(x, len)
            }
        };
    }
    for r in 0..R {
        let w = w.wrapping_add(r * n);
        // SAFETY: as above.
        let w = unsafe {
            if len == V::N {
                T::read(z, w)
            } else {
                T::read_first(z, w, len)
            }
        };
        for m in 0..M {
            sums[r][m] = w.mul_add(xs[m], sums[r][m]);
        }
    }
}

/// Bytes of `m` packed rows of `k` values.
pub(in crate::arch) fn packed_len(m: usize, k: usize) -> usize {
    packed_bytes(m, 1, if k > 0 { k.saturating_add(GAP) } else { 0 })
}

/// Copies rows of `k` values, [`GAP`] apart.
pub(in crate::arch) fn pack(x: &[f32], _m: usize, k: usize, packed: &mut [u8]) {
    let packed: &mut [f32] = bytemuck::cast_slice_mut(packed);
    for (x, packed) in x.chunks_exact(k).zip(packed.chunks_exact_mut(k + GAP)) {
        packed[..k].copy_from_slice(x);
    }
}

/// The products of one level with plain weights, see [`plain`]: `$zero` must be safe under
/// `$features`.
macro_rules! plain_products {
    (
        $features:literal, $zero:expr, $lanes:ty,
        rows: $rows:literal, activation_rows: $m:literal, rows_by_one: $rows_by_one:literal, $one:expr
    ) => {
        /// Products of prefill rows with weights of `T`: the same as those of decode rows.
        pub(in crate::arch) const fn plain_gemm<T: $crate::arch::generic::lanes::Widen<$lanes>>()
        -> $crate::arch::table::Gemm {
            $crate::arch::table::Gemm {
                element: ($crate::arch::PanelElement::F32, 1),
                tile: 128,
                small_batch: usize::MAX,
                group: 16,
                packed_len: $crate::arch::generic::matvec::packed_len,
                pack: $crate::arch::generic::matvec::pack,
                workspace: 0,
                kernel: gemm_plain::<T>,
                mixed: None,
            }
        }

        #[target_feature(enable = $features)]
        fn plain<T: $crate::arch::generic::lanes::Widen<$lanes>>(
            y: &mut ColumnsMut<'_>,
            w: &[u8],
            x: &[f32],
            n: usize,
            stride: usize,
        ) {
            $crate::arch::generic::matvec::plain::<_, T, $rows, $m, $rows_by_one>(
                $zero, $one, y, w, x, n, stride,
            );
        }

        #[target_feature(enable = $features)]
        fn matvec_plain<T: $crate::arch::generic::lanes::Widen<$lanes>>(
            y: &mut ColumnsMut<'_>,
            _: DType,
            w: &[u8],
            x: &Acts<'_>,
        ) {
            let Acts::F32 { x, n } = *x else {
                unreachable!("the form this level asks for")
            };
            plain::<T>(y, w, x, n, n);
        }

        #[target_feature(enable = $features)]
        fn gemm_plain<T: $crate::arch::generic::lanes::Widen<$lanes>>(
            y: &mut ColumnsMut<'_>,
            _: DType,
            w: &[u8],
            packed: &[u8],
            k: usize,
            _: &mut [$crate::arch::view::CacheLine],
        ) {
            plain::<T>(
                y,
                w,
                bytemuck::cast_slice(packed),
                k,
                k + $crate::arch::generic::matvec::GAP,
            );
        }
    };
}
pub(in crate::arch) use plain_products;
