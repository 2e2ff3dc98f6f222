//! Panels of integers, for prefill rows and block formats.

use super::floats::{store_transposed, transpose_panel};
use crate::arch::arrays;
use crate::arch::gemm::{
    BLOCK, Multiply, Panels, RegisterTile, SmallBatch, UnpackRows, prefetch_line,
};
use crate::arch::table::PanelElement;
use crate::arch::x86::avx2::gemm::{int_blocks, int_words, record, round, round_halves};
use crate::arch::x86::avx2::unpack::{Factors, Groups, with_groups};
use crate::arch::x86::avx512::common::{
    LANES, interleave, load_sums, load_up_to_32, store_all, store_sums, transpose,
};
use crate::quant::*;
use std::arch::x86_64::*;

/// Panels of integers, as at the AVX2 level, multiplied by `vpdpbusd` and `vpdpwssd`. With
/// `ZERO_POINT`, weights are bytes with a zero point of 128, and activations those of
/// [`round_halves`]. Weights
/// have a scale (and an offset) per `SPAN`.
pub(in crate::arch) enum IntPanels<
    const BYTES: bool,
    const SPAN: usize,
    const ZERO_POINT: bool = false,
> {}

impl<const BYTES: bool, const SPAN: usize, const ZERO_POINT: bool> Panels
    for IntPanels<BYTES, SPAN, ZERO_POINT>
{
    const LANES: usize = LANES;
    // Joined products take as many registers as sums do, so that there are too few for three
    // registers of activations.
    const TILES: &[RegisterTile] = {
        let tiles = &[
            RegisterTile {
                rows: 8,
                multiply: int_tile::<BYTES, SPAN, ZERO_POINT, 1, 8, false, false>,
            },
            RegisterTile {
                rows: 4,
                multiply: int_tile::<BYTES, SPAN, ZERO_POINT, 2, 4, false, false>,
            },
            RegisterTile {
                rows: 4,
                multiply: int_tile::<BYTES, SPAN, ZERO_POINT, 3, 4, false, false>,
            },
        ];
        if joins(SPAN, ZERO_POINT) {
            tiles.split_at(2).0
        } else {
            tiles
        }
    };
    const HALVES: &[Multiply] = &[
        int_tile::<BYTES, SPAN, ZERO_POINT, 1, 8, false, true>,
        int_tile::<BYTES, SPAN, ZERO_POINT, 2, 4, false, true>,
        int_tile::<BYTES, SPAN, ZERO_POINT, 3, 4, false, true>,
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_ints::<BYTES, ZERO_POINT>;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    #[inline]
    fn words(k: usize) -> usize {
        k / 32 * record(BYTES)
    }
}

impl<const BYTES: bool, const SPAN: usize, const ZERO_POINT: bool> UnpackRows
    for IntPanels<BYTES, SPAN, ZERO_POINT>
{
    const ELEMENT: (PanelElement, u64) = (
        if BYTES {
            PanelElement::I8
        } else {
            PanelElement::I16
        },
        1,
    );

    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
        macro_rules! blocks {
            ($block:ident) => {
                // SAFETY: the caller's promise.
                unsafe { int_blocks::<$block, BYTES, ZERO_POINT>(bytes, out) }
            };
        }
        with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        )
    }

    const SMALL_BATCH: Option<SmallBatch> = Some(SmallBatch {
        max_rows: if ZERO_POINT { 12 } else { 10 },
        fill: fill_ints::<BYTES, ZERO_POINT>,
        tiles: &[
            int_tile::<BYTES, SPAN, ZERO_POINT, 1, 2, true, false>,
            int_tile::<BYTES, SPAN, ZERO_POINT, 1, 4, true, false>,
            int_tile::<BYTES, SPAN, ZERO_POINT, 1, 8, true, false>,
        ],
    });
}

/// See [`SmallBatch::fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn fill_ints<const BYTES: bool, const ZERO_POINT: bool>(
    dtype: DType,
    rows: &[&[u8]; LANES],
    panel: &mut [u32],
    transposed: &mut [u32],
) {
    macro_rules! blocks {
        ($block:ident) => {
            if <$block>::GROUPS == 1 && !BYTES {
                fill_words::<$block>(rows, transposed)
            } else {
                let stride = BLOCK / 32 * record(BYTES);
                for (row, panel) in rows.iter().zip(panel.chunks_exact_mut(stride)) {
                    int_blocks::<$block, BYTES, ZERO_POINT>(row, panel);
                }
                assert!(panel.len() >= LANES * stride && transposed.len() >= LANES * stride);
                // SAFETY: both have room for these words.
                unsafe { transpose_panel(panel.as_ptr(), stride, transposed.as_mut_ptr()) }
            }
        };
    }
    with_groups!(
        dtype,
        blocks,
        unreachable!("{dtype} runs the scalar kernels")
    )
}

/// Writes the records of 16 weight rows in blocks of 32, which have one scale and one offset.
/// (Blocks of 256 take less time row by row.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn fill_words<B: Groups>(rows: &[&[u8]; LANES], transposed: &mut [u32]) {
    let mut blocks: [&[B]; LANES] = [&[]; LANES];
    for r in 0..LANES {
        blocks[r] = bytemuck::cast_slice(rows[r]);
    }
    for (i, record) in transposed
        .chunks_exact_mut(record(false) * LANES)
        .enumerate()
        .take(blocks[0].len())
    {
        let (words, factors) = record
            .as_chunks_mut::<LANES>()
            .0
            .split_at_mut(int_words(false));
        let mut q = [_mm512_setzero_si512(); LANES];
        for r in 0..LANES {
            // SAFETY: this level includes AVX2 and F16C.
            let Factors { scale, offset } = unsafe { blocks[r][i].factors() };
            factors[0][r] = scale[0].to_bits();
            factors[2][r] = offset[0].to_bits();
            // SAFETY: as above.
            q[r] = _mm512_cvtepi8_epi16(unsafe { blocks[r][i].bytes(0) });
        }
        factors[1] = factors[0];
        factors[3] = factors[2];
        store_all(words.first_chunk_mut().expect("16 words"), transpose(q));
    }
}

/// Whether 32 weights have one scale and their activations two: then the products with those are
/// added before they are multiplied by that.
#[inline]
const fn joins(span: usize, zero_point: bool) -> bool {
    zero_point && span == 32
}

/// `VECS` registers of activations times `ROWS` weight rows; with `TRANSPOSED`, of weights times
/// activation rows. With `HALF`, the last register of activations has rows in its lower half only,
/// which takes half the time on cores that execute 512-bit instructions in two steps. (Its length:
/// all of it is the inner loop, over registers that cannot be passed to a call.)
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
unsafe fn int_tile<
    const BYTES: bool,
    const SPAN: usize,
    const ZERO_POINT: bool,
    const VECS: usize,
    const ROWS: usize,
    const TRANSPOSED: bool,
    const HALF: bool,
>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    // SAFETY: the caller's promise.
    let mut acc = unsafe { load_sums::<VECS, ROWS>(sums, first) };
    let factors = int_words(BYTES);
    // Integer sums of 32 products.
    let (parts, joins) = (
        if ZERO_POINT { 2 } else { 32 / SPAN },
        joins(SPAN, ZERO_POINT),
    );
    for i in 0..k / 32 {
        let lanes = x.wrapping_add(i * record(BYTES) * VECS * LANES);
        let w = w.wrapping_add(i * record(BYTES) * if TRANSPOSED { LANES } else { 1 });
        if !TRANSPOSED {
            for line in 0..5 {
                let ahead = ahead.wrapping_add((i * record(BYTES) * VECS + line * 8) * LANES);
                prefetch_line(ahead.cast());
            }
        }
        // Word `j` of the record, for the rows in register `v`.
        // SAFETY: it is there.
        let lanes = |j: usize, v: usize| unsafe {
            _mm512_loadu_si512(lanes.wrapping_add((j * VECS + v) * LANES).cast())
        };
        // Word `j` of the record of row `r`, in all lanes.
        let splat = |j: usize, r: usize| {
            let at = if TRANSPOSED {
                j * LANES + r
            } else {
                r * (BLOCK / 32) * record(BYTES) + j
            };
            // SAFETY: it is there.
            _mm512_set1_epi32(unsafe { w.wrapping_add(at).read() } as i32)
        };
        // The same of the weights and of the activations.
        let w = |j: usize, r: usize, v: usize| if TRANSPOSED { lanes(j, v) } else { splat(j, r) };
        let x = |j: usize, r: usize, v: usize| if TRANSPOSED { splat(j, r) } else { lanes(j, v) };
        let half = |v: usize| HALF && v == VECS - 1;
        let mut joined = [[_mm512_setzero_ps(); VECS]; ROWS];
        for part in 0..parts {
            let mut int = [[_mm512_setzero_si512(); VECS]; ROWS];
            if ZERO_POINT {
                for r in 0..ROWS {
                    for v in 0..VECS {
                        int[r][v] = x(factors + 2 + part, r, v);
                    }
                }
            }
            for j in part * factors / parts..(part + 1) * factors / parts {
                for r in 0..ROWS {
                    for v in 0..VECS {
                        int[r][v] =
                            add_products::<BYTES>(int[r][v], w(j, r, v), x(j, r, v), half(v));
                    }
                }
            }
            let (d_word, sum_word) = match (ZERO_POINT, SPAN) {
                (true, _) => (factors + part, 0),
                (false, 32) => (factors, factors + 3),
                (false, _) => (factors, factors + 1 + part),
            };
            for r in 0..ROWS {
                for v in 0..VECS {
                    let (sum, d) = (
                        to_floats(int[r][v], half(v)),
                        _mm512_castsi512_ps(x(d_word, r, v)),
                    );
                    if joins && part > 0 {
                        joined[r][v] = mul_add(sum, d, joined[r][v], half(v));
                    } else {
                        joined[r][v] = mul(sum, d, half(v));
                    }
                    if !joins || part > 0 {
                        let scale = _mm512_castsi512_ps(w(factors + part, r, v));
                        acc[r][v] = mul_add(joined[r][v], scale, acc[r][v], half(v));
                    }
                    if !ZERO_POINT {
                        let offset = _mm512_castsi512_ps(w(factors + 2 + part, r, v));
                        let sum = _mm512_castsi512_ps(x(sum_word, r, v));
                        acc[r][v] = mul_add(offset, sum, acc[r][v], half(v));
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { store_sums(sums, acc) };
}

/// Adds the products of four bytes or two 16-bit integers to each lane of `sum`; with `half`, to
/// each of the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
fn add_products<const BYTES: bool>(sum: __m512i, w: __m512i, x: __m512i, half: bool) -> __m512i {
    if half {
        let [sum, w, x] = arrays::map([sum, w, x], |x| _mm512_castsi512_si256(x));
        let sum = if BYTES {
            _mm256_dpbusd_epi32(sum, w, x)
        } else {
            _mm256_dpwssd_epi32(sum, w, x)
        };
        return _mm512_castsi256_si512(sum);
    }
    if BYTES {
        _mm512_dpbusd_epi32(sum, w, x)
    } else {
        _mm512_dpwssd_epi32(sum, w, x)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn to_floats(x: __m512i, half: bool) -> __m512 {
    if half {
        _mm512_castps256_ps512(_mm256_cvtepi32_ps(_mm512_castsi512_si256(x)))
    } else {
        _mm512_cvtepi32_ps(x)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn mul(a: __m512, b: __m512, half: bool) -> __m512 {
    if half {
        let [a, b] = arrays::map([a, b], |x| _mm512_castps512_ps256(x));
        return _mm512_castps256_ps512(_mm256_mul_ps(a, b));
    }
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn mul_add(a: __m512, b: __m512, c: __m512, half: bool) -> __m512 {
    if half {
        let [a, b, c] = arrays::map([a, b, c], |x| _mm512_castps512_ps256(x));
        return _mm512_castps256_ps512(_mm256_fmadd_ps(a, b, c));
    }
    _mm512_fmadd_ps(a, b, c)
}

#[target_feature(enable = "avx512f,avx512bw")]
fn pack_ints<const BYTES: bool, const ZERO_POINT: bool>(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (i, packed) in packed
            .chunks_exact_mut(record(BYTES) * n_vecs * LANES)
            .enumerate()
        {
            let mut rows = [[[0.0; 8]; 3]; LANES];
            for r in 0..x.len() / k {
                if let Some(x) = x[r * k..][..k][32 * i..].first_chunk() {
                    rows[r] = if ZERO_POINT {
                        round_halves(x)
                    } else {
                        round::<BYTES>(x)
                    };
                }
            }
            for (c, packed) in packed.chunks_mut(LANES * n_vecs * LANES).enumerate() {
                let mut words = [_mm512_setzero_si512(); LANES];
                for i in 0..LANES {
                    let row = &rows[i].as_flattened()[c * LANES..];
                    words[i] = _mm512_castps_si512(load_up_to_32(row)[0]);
                }
                interleave(transpose(words), packed, v, n_vecs);
            }
        }
    }
}
