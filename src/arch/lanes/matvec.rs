//! Products with a few activation rows of the plain formats, F32, F16 and BF16.
//!
//! A product is split into interleaved sums that do not wait for each other; its result depends neither on the other
//! rows nor on how many rows are multiplied at a time.

use super::Lanes;
use super::attention::Widen;
use crate::arch::ColumnsMut;
use crate::arch::gemm::prefetch_line;
use half::bf16;

/// Weight rows that stay in the L2 cache while several activation rows are multiplied by them.
const ROWS: usize = 8;
/// How far ahead of their use weights are prefetched, in bytes, at least; tuned at the AVX-512 level, see
/// `avx512/planes.rs`.
const AHEAD: usize = 8192;
/// Prefetch distance per weight row, in bytes, where several are multiplied by one activation row: the CPU's own
/// prefetcher follows such streams. With 2 to 8 KiB F16 models decode 14 to 28 % slower, without prefetching 3 to 10 %
/// (Zen 4).
const AHEAD_ONE: usize = 512;

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
        unsafe { std::ptr::copy_nonoverlapping(p.cast::<u8>(), values.as_mut_ptr().cast(), n * size_of::<bf16>()) };
        // SAFETY: a vector's values.
        unsafe { z.read_bf16(values.as_ptr()) }
    }
}

/// How a level multiplies plain weights.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Shape {
    /// Longest activation row that is multiplied by one weight row at a time. A longer one, in `f32`, leaves the L1
    /// cache before the next weight row comes; with several weight rows at a time 8192 values take half as long (Zen
    /// 4), 2048 a fifth longer.
    pub(in crate::arch) short: usize,
    /// Whether to prefetch.
    pub(in crate::arch) prefetch: bool,
}

/// Products of weight rows of `T` with the activation rows `x`, of `n` values; see [`crate::arch::MatvecFn`]. Two
/// weight rows at a time are multiplied by `M` activation rows, or `R` by a single long one.
#[inline(always)]
pub(in crate::arch) fn plain<V: Lanes, T: Widen<V>, const SUMS: usize, const R: usize, const M: usize>(
    z: V,
    shape: Shape,
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &[f32],
    n: usize,
) {
    // Some weight rows stay in the L2 cache, some activation rows in L1.
    for (t, w) in w.chunks(ROWS * n * size_of::<T>()).enumerate() {
        for (c, x) in x.chunks(M * n).enumerate() {
            if x.len() == M * n {
                rows::<V, T, SUMS, 2, M>(z, shape, y, t * ROWS, w, c * M, x, n);
                continue;
            }
            for (i, x) in (c * M..).zip(x.chunks_exact(n)) {
                if n <= shape.short {
                    rows::<V, T, SUMS, 1, 1>(z, shape, y, t * ROWS, w, i, x, n);
                } else {
                    rows::<V, T, SUMS, R, 1>(z, shape, y, t * ROWS, w, i, x, n);
                }
            }
        }
    }
}

/// Products of weight rows, the first of them row `r`, with activation rows `i..i + M`; `R` weight rows at a time.
#[inline(always)]
fn rows<V: Lanes, T: Widen<V>, const SUMS: usize, const R: usize, const M: usize>(
    z: V,
    shape: Shape,
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[u8],
    i: usize,
    x: &[f32],
    n: usize,
) {
    let row_bytes = n * size_of::<T>();
    let mut r = r;
    let whole = w.chunks_exact(R * row_bytes);
    let rest = whole.remainder();
    for w in whole {
        tile::<V, T, SUMS, R, M>(z, shape, y, r, w, i, x, n);
        r += R;
    }
    for w in rest.chunks_exact(row_bytes) {
        tile::<V, T, SUMS, 1, M>(z, shape, y, r, w, i, x, n);
        r += 1;
    }
}

/// `R` weight rows times `M` activation rows.
#[inline(always)]
fn tile<V: Lanes, T: Widen<V>, const SUMS: usize, const R: usize, const M: usize>(
    z: V,
    shape: Shape,
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[u8],
    i: usize,
    x: &[f32],
    n: usize,
) {
    assert!(w.len() == R * n * size_of::<T>() && x.len() == M * n);
    let (w, x) = (w.as_ptr().cast::<T>(), x.as_ptr());
    let mut totals = [[[z; SUMS]; M]; R];
    let mut ahead = w.cast::<u8>().wrapping_add(AHEAD.max(R * n * size_of::<T>()));
    let step = SUMS * V::N;
    let mut k = 0;
    while k + step <= n {
        if shape.prefetch && M == 1 {
            for r in 0..R {
                prefetch_lines(w.wrapping_add(r * n + k).cast::<u8>().wrapping_add(AHEAD_ONE), step * size_of::<T>());
            }
        } else if shape.prefetch {
            prefetch_lines(ahead, R * step * size_of::<T>());
            ahead = ahead.wrapping_add(R * step * size_of::<T>());
        }
        for r in 0..R {
            for s in 0..SUMS {
                let at = k + s * V::N;
                // SAFETY: a vector from `at` on is inside weight row `r`.
                let w = unsafe { T::read(z, w.wrapping_add(r * n + at)) };
                for i in 0..M {
                    // SAFETY: as above, of activation row `i`.
                    let x = unsafe { z.read(x.wrapping_add(i * n + at)) };
                    totals[r][i][s] = w.mul_add(x, totals[r][i][s]);
                }
            }
        }
        k += step;
    }
    for s in 0..SUMS {
        let at = k + s * V::N;
        for r in 0..R {
            for i in 0..M {
                let (w, x) = (w.wrapping_add(r * n + at), x.wrapping_add(i * n + at));
                let (w, x) = match n.saturating_sub(at) {
                    0 => continue,
                    // SAFETY: that many values are left in both rows.
                    rest if rest < V::N => unsafe { (T::read_first(z, w, rest), z.read_first(x, rest)) },
                    // SAFETY: as above.
                    _ => unsafe { (T::read(z, w), z.read(x)) },
                };
                totals[r][i][s] = w.mul_add(x, totals[r][i][s]);
            }
        }
    }
    for j in 0..M {
        for k in 0..R {
            y.row(i + j)[r + k] = sum(totals[k][j]);
        }
    }
}

/// Prefetches `bytes` from `p` on into the L2 cache: L1 supports fewer outstanding misses (L2 is 1.5 times as fast for
/// F16 on Zen 4).
#[inline(always)]
fn prefetch_lines(p: *const u8, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        prefetch_line(p.wrapping_add(line));
        line += 64;
    }
}

/// Sum of the lanes of all vectors, whose number is a power of two; neighbours are added first.
#[inline(always)]
fn sum<V: Lanes, const SUMS: usize>(mut sums: [V; SUMS]) -> f32 {
    let mut n = SUMS;
    while n > 1 {
        n /= 2;
        for s in 0..n {
            sums[s] = sums[2 * s] + sums[2 * s + 1];
        }
    }
    sums[0].sum()
}

/// The product kernel of one level: `$zero` must be safe under `$features`; see [`plain`] for the rest.
macro_rules! matvec_kernels {
    (
        $features:literal, $zero:expr, $lanes:ty, $shape:expr,
        sums: $sums:literal, rows: $rows:literal, activation_rows: $m:literal
    ) => {
        #[target_feature(enable = $features)]
        fn matvec_plain<T: $crate::arch::lanes::attention::Widen<$lanes>>(
            y: &mut ColumnsMut<'_>,
            _: DType,
            w: &[u8],
            x: &Acts<'_>,
        ) {
            let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
            $crate::arch::lanes::matvec::plain::<_, T, $sums, $rows, $m>($zero, $shape, y, w, x, n);
        }
    };
}
pub(in crate::arch) use matvec_kernels;
