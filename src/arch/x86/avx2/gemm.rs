//! Products with many activation rows: the packing, unpacking and register tiles of this level.
//!
//! Block-quantised weights are multiplied as integers. With activations rounded to 16 bits, without
//! a noticeable loss, `vpmaddwd` does twice the products of an `f32` multiply-add. K-quants take
//! 8-bit activations, which `vpmaddubsw` multiplies twice as fast again: with a scale per 32 of
//! them their error is three quarters of llama.cpp's, which has one per 256 for these formats. F32,
//! F16 and BF16 weights are multiplied as for decode rows.

use super::dot::{Dot, MultiplyAdd};
use super::elementwise::{F32x8, zero};
use super::matmul::plain_gemm;
use super::unpack::{Factors, Groups, knows, store256, wanted_groups, with_groups};
use crate::arch::acts::byte_scale;
use crate::arch::arrays;
use crate::arch::gemm::{
    BLOCK, Panels, RegisterTile, SmallBatch, TILE, UnpackRows, prefetch_line, table,
};
use crate::arch::generic::lanes::Lanes;
use crate::arch::generic::packing::{MAX_LANES, Transpose};
use crate::arch::generic::panels::{self, f32_panels, transposed_panel};
use crate::arch::scalar;
use crate::arch::table::{Gemm, PanelElement, Transposed};
use crate::arch::transposed::{TransposedPanels, transposed};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! integers {
        ($block:ident) => {
            const { table::<IntPanels<MultiplyAdd, 16, 32>>() }
        };
    }
    match dtype {
        DType::F32 => const { plain_gemm::<f32>() },
        DType::F16 => const { plain_gemm::<f16>() },
        DType::BF16 => const { plain_gemm::<bf16>() },
        DType::Q4_K => const { table::<IntPanels<MultiplyAdd, 4, 32>>() },
        DType::Q2_K | DType::Q3_K | DType::Q5_K => {
            const { table::<IntPanels<MultiplyAdd, 5, 16>>() }
        }
        DType::Q6_K => const { table::<IntPanels<MultiplyAdd, 6, 16>>() },
        DType::IQ1_M | DType::IQ2_XS | DType::IQ2_S | DType::NVFP4 => {
            const { table::<IntPanels<MultiplyAdd, 16, 16>>() }
        }
        _ => with_groups!(dtype, integers, (scalar::KERNELS.gemm)(dtype)),
    }
}

/// Scales run along rows, so that a column's weights share none: `f32` panels for all formats.
pub(super) fn transposed_for(dtype: DType) -> Transposed {
    if !knows(dtype) {
        return (scalar::KERNELS.transposed)(dtype);
    }
    const { transposed::<F32Panels>() }
}

/// Words per register.
const LANES: usize = 8;

f32_panels!("avx2,fma,f16c", F32x8, zero(), depth: BLOCK, rows: 4, rows_of_one: 8);
transposed_panel!("avx2,fma,f16c", zero());

impl Transpose for F32x8 {
    #[inline(always)]
    fn transpose([a, b, c, d, e, f, g, h, rest @ ..]: [F32x8; MAX_LANES]) -> [F32x8; MAX_LANES] {
        // SAFETY: a vector exists, so the CPU has the level's features.
        let [a, b, c, d, e, f, g, h] =
            unsafe { transpose([a.0, b.0, c.0, d.0, e.0, f.0, g.0, h.0]) };
        let [i, j, k, l, m, n, o, p] = rest;
        [
            F32x8(a),
            F32x8(b),
            F32x8(c),
            F32x8(d),
            F32x8(e),
            F32x8(f),
            F32x8(g),
            F32x8(h),
            i,
            j,
            k,
            l,
            m,
            n,
            o,
            p,
        ]
    }
}

/// Value `i` of row `j` becomes value `j` of row `i`.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(a: [__m256; 8]) -> [__m256; 8] {
    let mut b = a;
    for i in (0..8).step_by(2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    // In each 128-bit half `l`, `c[4g + j]` has value `4l + j` of the rows `4g..4g + 4`.
    let mut c = b;
    for i in [0, 4] {
        c[i] = _mm256_shuffle_ps::<0b01_00_01_00>(b[i], b[i + 2]);
        c[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(b[i], b[i + 2]);
        c[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(b[i + 1], b[i + 3]);
        c[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(b[i + 1], b[i + 3]);
    }
    let mut d = c;
    for j in 0..4 {
        d[j] = _mm256_permute2f128_ps::<0x20>(c[j], c[4 + j]);
        d[4 + j] = _mm256_permute2f128_ps::<0x31>(c[j], c[4 + j]);
    }
    d
}

/// Expands the values `wanted` of a row's blocks; `out` has room for them, rounded up to 32.
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(dtype: DType, bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block>(bytes, wanted, out)
        };
    }
    match dtype {
        DType::F32 => panels::widen::<_, f32>(zero(), bytes, out),
        DType::F16 => panels::widen::<_, f16>(zero(), bytes, out),
        DType::BF16 => panels::widen::<_, bf16>(zero(), bytes, out),
        _ => with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        ),
    }
}

/// Expands blocks of signed bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn blocks<B: Groups>(bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    let out = out.as_chunks_mut::<32>().0;
    for (i, block) in bytemuck::cast_slice::<u8, B>(bytes).iter().enumerate() {
        // SAFETY: this level has AVX2 and F16C.
        let Factors { scale, offset } = unsafe { block.factors() };
        for g in wanted_groups::<B>(i, &wanted) {
            // SAFETY: as above.
            let q = unsafe { block.bytes(g) };
            let (low, high) = (_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q));
            let eights = [
                low,
                _mm_srli_si128::<8>(low),
                high,
                _mm_srli_si128::<8>(high),
            ];
            let out = out[i * B::GROUPS + g - wanted.start / 32].as_chunks_mut().0;
            for e in 0..4 {
                let factor = 2 * g + e / 2;
                let q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eights[e]));
                store(
                    &mut out[e],
                    _mm256_fmadd_ps(
                        _mm256_set1_ps(scale[factor]),
                        q,
                        _mm256_set1_ps(offset[factor]),
                    ),
                );
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(to: &mut [f32; 8], x: __m256) {
    // SAFETY: array and register have the same size.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: array and register have the same size.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

/// Panels of integers, multiplied by `D`: weights of up to `BITS`, as bytes for up to six bits, else
/// as 16-bit words, with factors for each `SPAN` of 16 or 32 weights.
///
/// Both operands consist of records of 32 values: words of four or two integers, then four words of
/// factors. A weight row has its two scales and its two offsets there, an activation row the scale
/// `d` and `d·Σq` of the first half, of the second half, and of both.
///
/// With `ZERO_POINT`, weights are bytes with a zero point of 128, and activations those of
/// [`round_halves`].
pub(in crate::arch::x86) struct IntPanels<
    D,
    const BITS: u32,
    const SPAN: usize,
    const ZERO_POINT: bool = false,
>(PhantomData<D>);

/// Words that hold the integers of a record.
#[inline]
pub(in crate::arch) const fn int_words(bytes: bool) -> usize {
    if bytes { 8 } else { 16 }
}

/// Words per record.
#[inline]
pub(in crate::arch) const fn record(bytes: bool) -> usize {
    int_words(bytes) + 4
}

/// Whether panels hold bytes.
#[inline]
const fn holds_bytes(bits: u32, zero_point: bool) -> bool {
    bits <= 6 || zero_point
}

impl<D, const BITS: u32, const SPAN: usize, const ZERO_POINT: bool>
    IntPanels<D, BITS, SPAN, ZERO_POINT>
{
    const BYTES: bool = holds_bytes(BITS, ZERO_POINT);
}

impl<D: Dot, const BITS: u32, const SPAN: usize, const ZERO_POINT: bool> Panels
    for IntPanels<D, BITS, SPAN, ZERO_POINT>
{
    const LANES: usize = LANES;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: 4,
            multiply: int_tile::<D, BITS, SPAN, ZERO_POINT, 1, 4, false>,
        },
        RegisterTile {
            rows: 4,
            multiply: int_tile::<D, BITS, SPAN, ZERO_POINT, 2, 4, false>,
        },
        RegisterTile {
            rows: 2,
            multiply: int_tile::<D, BITS, SPAN, ZERO_POINT, 3, 2, false>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = if ZERO_POINT {
        pack_ints::<true, true>
    } else if Self::BYTES {
        pack_ints::<true, false>
    } else {
        pack_ints::<false, false>
    };
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    #[inline]
    fn words(k: usize) -> usize {
        k / 32 * record(Self::BYTES)
    }
}

impl<D: Dot, const BITS: u32, const SPAN: usize, const ZERO_POINT: bool> UnpackRows
    for IntPanels<D, BITS, SPAN, ZERO_POINT>
{
    const ELEMENT: (PanelElement, u64) = (
        if Self::BYTES {
            PanelElement::I8
        } else {
            PanelElement::I16
        },
        1,
    );

    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
        macro_rules! blocks {
            ($block:ident) => {
                if Self::BYTES {
                    // SAFETY: the caller's promise.
                    unsafe { int_blocks::<$block, true, ZERO_POINT>(bytes, out) }
                } else {
                    // SAFETY: the caller's promise.
                    unsafe { int_blocks::<$block, false, false>(bytes, out) }
                }
            };
        }
        with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        )
    }

    const SMALL_BATCH: Option<SmallBatch> = Some(SmallBatch {
        max_rows: 4,
        fill: if Self::BYTES {
            fill_ints::<true, ZERO_POINT>
        } else {
            fill_ints::<false, false>
        },
        tiles: &[
            int_tile::<D, BITS, SPAN, ZERO_POINT, 1, 2, true>,
            int_tile::<D, BITS, SPAN, ZERO_POINT, 1, 4, true>,
        ],
    });
}

/// See [`SmallBatch::fill`].
#[target_feature(enable = "avx2,f16c")]
fn fill_ints<const BYTES: bool, const ZERO_POINT: bool>(
    dtype: DType,
    rows: &[&[u8]; MAX_LANES],
    panel: &mut [u32],
    transposed: &mut [u32],
) {
    macro_rules! blocks {
        ($block:ident) => {
            if <$block>::GROUPS == 1 {
                fill_groups::<$block, BYTES, ZERO_POINT>(rows, transposed)
            } else {
                let stride = BLOCK / 32 * record(BYTES);
                for (row, panel) in rows.iter().zip(panel.chunks_exact_mut(stride)).take(LANES) {
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

/// Stores a register for each eight words.
#[inline]
#[target_feature(enable = "avx2")]
fn store_all(to: &mut [u32], x: [__m256; LANES]) {
    for i in 0..LANES {
        store256(&mut to[i * LANES..][..LANES], _mm256_castps_si256(x[i]));
    }
}

/// Writes the records of eight weight rows in blocks of 32, which have one scale and one offset.
/// (Blocks of 256 take less time row by row.)
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn fill_groups<B: Groups, const BYTES: bool, const ZERO_POINT: bool>(
    rows: &[&[u8]; MAX_LANES],
    transposed: &mut [u32],
) {
    let mut blocks: [&[B]; LANES] = [&[]; LANES];
    for r in 0..LANES {
        blocks[r] = bytemuck::cast_slice(rows[r]);
    }
    for (i, record) in transposed
        .chunks_exact_mut(record(BYTES) * LANES)
        .enumerate()
        .take(blocks[0].len())
    {
        let (words, factors) = record.split_at_mut(int_words(BYTES) * LANES);
        let (mut low, mut high) = ([_mm256_setzero_ps(); LANES], [_mm256_setzero_ps(); LANES]);
        for r in 0..LANES {
            let block = &blocks[r][i];
            // SAFETY: this level has AVX2 and F16C.
            let (Factors { scale, offset }, q) = unsafe { (block.factors(), block.bytes(0)) };
            for (f, factor) in [scale[0], scale[0], offset[0], offset[0]]
                .into_iter()
                .enumerate()
            {
                factors[f * LANES + r] = factor.to_bits();
            }
            if BYTES {
                low[r] = _mm256_castsi256_ps(with_zero_point::<B, ZERO_POINT>(q));
            } else {
                low[r] = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)));
                high[r] =
                    _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(q)));
            }
        }
        store_all(words, transpose(low));
        if !BYTES {
            store_all(&mut words[LANES * LANES..], transpose(high));
        }
    }
}

/// `VECS` registers of activations times `ROWS` weight rows; with `TRANSPOSED`, of weights times
/// activation rows. (Its length: all of it is the inner loop, over registers that cannot be passed
/// to a call.)
#[target_feature(enable = "avx2,fma")]
unsafe fn int_tile<
    D: Dot,
    const BITS: u32,
    const SPAN: usize,
    const ZERO_POINT: bool,
    const VECS: usize,
    const ROWS: usize,
    const TRANSPOSED: bool,
>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    let bytes = holds_bytes(BITS, ZERO_POINT);
    // Sums of products of a record, and words of each.
    let parts = if ZERO_POINT { 2 } else { 32 / SPAN };
    let mut words = int_words(bytes) / parts;
    if !D::SUMS_BYTES {
        // Hidden from the compiler: it would unroll the inner loop and turn the sums into trees
        // that need more registers than there are.
        words = std::hint::black_box(words);
    }
    let mut acc = [[_mm256_setzero_ps(); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { _mm256_loadu_ps(sums.wrapping_add((v * TILE + r) * LANES)) };
            }
        }
    }
    let one = _mm256_set1_epi16(1);
    let factors = int_words(bytes);
    for i in 0..k / 32 {
        let lanes = x.wrapping_add(i * record(bytes) * VECS * LANES);
        let w = w.wrapping_add(i * record(bytes) * if TRANSPOSED { LANES } else { 1 });
        if !TRANSPOSED {
            for line in 0..4 {
                let ahead = ahead.wrapping_add((i * record(bytes) * VECS + line * 16) * LANES);
                prefetch_line(ahead.cast());
            }
        }
        // SAFETY: word `j` of the record, for the rows in register `v`.
        let lanes = |j: usize, v: usize| unsafe {
            _mm256_loadu_si256(lanes.wrapping_add((j * VECS + v) * LANES).cast())
        };
        let splat = |j: usize, r: usize| {
            let at = if TRANSPOSED {
                j * LANES + r
            } else {
                r * (BLOCK / 32) * record(bytes) + j
            };
            // SAFETY: word `j` of the record of row `r`, for all lanes.
            _mm256_set1_epi32(unsafe { w.wrapping_add(at).read() } as i32)
        };
        // The same of the weights and of the activations.
        let w = |j: usize, r: usize, v: usize| if TRANSPOSED { lanes(j, v) } else { splat(j, r) };
        let x = |j: usize, r: usize, v: usize| if TRANSPOSED { splat(j, r) } else { lanes(j, v) };
        // Without a loop over parts: addresses that are computed take the ports of the products.
        macro_rules! add {
            ($part:literal) => {
                let part = $part;
                let mut int = [[_mm256_setzero_si256(); VECS]; ROWS];
                if ZERO_POINT {
                    for r in 0..ROWS {
                        for v in 0..VECS {
                            int[r][v] = x(factors + 2 + part, r, v);
                        }
                    }
                }
                // With six bits, sums of 4 products below 64·127 fit 16 bits, and are widened at once.
                let in_pairs = BITS == 6 && !D::SUMS_BYTES;
                for j in (part * words..(part + 1) * words).step_by(if in_pairs { 2 } else { 1 }) {
                    for r in 0..ROWS {
                        for v in 0..VECS {
                            let product = |j: usize| _mm256_maddubs_epi16(w(j, r, v), x(j, r, v));
                            int[r][v] = match BITS {
                                // SAFETY: a level with such panels has the instructions of `D`.
                                _ if bytes && D::SUMS_BYTES => unsafe {
                                    D::bytes(int[r][v], w(j, r, v), x(j, r, v))
                                },
                                // Sums of 16 products below 16·127, or of 8 below 32·127: less than
                                // 2¹⁵.
                                ..6 => _mm256_add_epi16(int[r][v], product(j)),
                                6 => {
                                    let pair = _mm256_add_epi16(product(j), product(j + 1));
                                    _mm256_add_epi32(int[r][v], _mm256_madd_epi16(pair, one))
                                }
                                // Sums of at most 32 products of 2⁷ and 2¹⁴.
                                // SAFETY: as above.
                                _ => unsafe { D::words(int[r][v], w(j, r, v), x(j, r, v)) },
                            };
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
                        let int = if BITS < 6 && !D::SUMS_BYTES {
                            _mm256_madd_epi16(int[r][v], one)
                        } else {
                            int[r][v]
                        };
                        let d = _mm256_castsi256_ps(x(d_word, r, v));
                        let product = _mm256_mul_ps(_mm256_cvtepi32_ps(int), d);
                        acc[r][v] = _mm256_fmadd_ps(
                            product,
                            _mm256_castsi256_ps(w(factors + part, r, v)),
                            acc[r][v],
                        );
                        if !ZERO_POINT {
                            let sum = _mm256_castsi256_ps(x(sum_word, r, v));
                            let offset = _mm256_castsi256_ps(w(factors + 2 + part, r, v));
                            acc[r][v] = _mm256_fmadd_ps(offset, sum, acc[r][v]);
                        }
                    }
                }
            };
        }
        add!(0);
        if parts == 2 {
            add!(1);
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

#[target_feature(enable = "avx2")]
fn pack_ints<const BYTES: bool, const ZERO_POINT: bool>(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (i, packed) in packed
            .chunks_exact_mut(record(BYTES) * n_vecs * LANES)
            .enumerate()
        {
            let mut rows = [[[0.0; LANES]; 3]; LANES];
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
                let mut words = [_mm256_setzero_ps(); LANES];
                for i in 0..LANES {
                    words[i] = load(&rows[i][c]);
                }
                let words = transpose(words);
                for i in 0..packed.len() / (n_vecs * LANES) {
                    let out = &mut packed[(i * n_vecs + v) * LANES..][..LANES];
                    store256(out, _mm256_castps_si256(words[i]));
                }
            }
        }
    }
}

/// A record of 32 activations `x ≈ d·q`. With 16 bits `|q| ≤ 2¹⁴` and `d` is a power of two, so
/// that products with it are exact; with 8 bits, `|q| ≤ 127`.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch) fn round<const BYTES: bool>(x: &[f32; 32]) -> [[f32; LANES]; 3] {
    let x = x.as_chunks::<8>().0;
    let x = [load(&x[0]), load(&x[1]), load(&x[2]), load(&x[3])];
    let absolute = arrays::map(x, |x| {
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX))
    });
    // The bits of positive numbers sort as the numbers do, NaN last.
    let max = |a, b| _mm256_max_epi32(a, b);
    let largest = int_array(max(
        max(absolute[0], absolute[1]),
        max(absolute[2], absolute[3]),
    ));
    let largest = largest.into_iter().fold(0, i32::max) as u32;
    let exponent = largest >> 23;
    // Activations below 2⁻¹⁰⁰ count as 0.
    let (d, inverse) = match exponent {
        0..27 => (0.0, 0.0),
        255.. => (f32::NAN, 0.0),
        _ if BYTES => (
            f32::from_bits(largest) / 127.0,
            127.0 / f32::from_bits(largest),
        ),
        _ => (
            f32::from_bits((exponent - 13) << 23),
            f32::from_bits((267 - exponent) << 23),
        ),
    };
    // 0 also where infinity times 0 would be NaN.
    let finite = _mm256_castsi256_ps(_mm256_set1_epi32(if inverse == 0.0 { 0 } else { -1 }));
    let q = arrays::map(x, |x| {
        _mm256_cvtps_epi32(_mm256_mul_ps(
            _mm256_and_ps(x, finite),
            _mm256_set1_ps(inverse),
        ))
    });
    let halves = [_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])];
    let [first, second] = arrays::map(halves, |half| lane_sum(half));
    let sums = arrays::map([first, second, first + second], |sum| d * sum as f32);

    // Packing works in each 128-bit half.
    let (low, high) = (
        _mm256_packs_epi32(q[0], q[1]),
        _mm256_packs_epi32(q[2], q[3]),
    );
    let mut record = [0; 3 * LANES];
    if BYTES {
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let words = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        store256(&mut record[..8], words);
    } else {
        let words = [low, high];
        for i in 0..2 {
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words[i]);
            store256(&mut record[8 * i..][..8], words);
        }
    }
    let factors = arrays::map([d, sums[0], sums[1], sums[2]], f32::to_bits);
    arrays::store(factors, &mut record[int_words(BYTES)..]);
    bytemuck::cast(record)
}

/// A record of 32 activations `x ≈ d·q` with `|q| ≤ 127` and a `d` for each half, for weights
/// stored with zero point 128: instead of `d·Σq` it has the correction for the zero point,
/// `−128·Σq` of each half, as an integer.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch) fn round_halves(x: &[f32; 32]) -> [[f32; LANES]; 3] {
    let mut record = [0; 3 * LANES];
    for (h, x) in x.as_chunks::<16>().0.iter().enumerate() {
        let x = [
            load(x.first_chunk().expect("8 of 16")),
            load(x.last_chunk().expect("8 of 16")),
        ];
        let magnitude = _mm256_set1_epi32(i32::MAX);
        let first = _mm256_and_si256(_mm256_castps_si256(x[0]), magnitude);
        let second = _mm256_and_si256(_mm256_castps_si256(x[1]), magnitude);
        let largest = int_array(_mm256_max_epi32(first, second))
            .into_iter()
            .fold(0, i32::max) as u32;
        let (d, inverse) = byte_scale(largest);
        // 0 also where infinity times 0 would be NaN.
        let finite = _mm256_castsi256_ps(_mm256_set1_epi32(if inverse == 0.0 { 0 } else { -1 }));
        let inverse = _mm256_set1_ps(inverse);
        let first = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_and_ps(x[0], finite), inverse));
        let second = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_and_ps(x[1], finite), inverse));
        let sum = lane_sum(_mm256_add_epi32(first, second));
        // Packing works in each 128-bit half: words 0, 2, 1, 3 of bytes.
        let words = int_array(_mm256_packs_epi16(
            _mm256_packs_epi32(first, second),
            _mm256_setzero_si256(),
        ));
        let words = [words[0], words[4], words[1], words[5]];
        arrays::store(arrays::map(words, i32::cast_unsigned), &mut record[4 * h..]);
        record[int_words(true) + h] = d.to_bits();
        record[int_words(true) + 2 + h] = (-128 * sum).cast_unsigned();
    }
    bytemuck::cast(record)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn lane_sum(x: __m256i) -> i32 {
    let (x, mut sum) = (int_array(x), 0);
    for x in x {
        sum += x;
    }
    sum
}

#[inline]
#[target_feature(enable = "avx2")]
fn int_array(x: __m256i) -> [i32; 8] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}

/// Bytes of a group; with `ZERO_POINT`, 128 larger than the weights.
#[inline]
#[target_feature(enable = "avx2")]
fn with_zero_point<B: Groups, const ZERO_POINT: bool>(q: __m256i) -> __m256i {
    if ZERO_POINT {
        _mm256_add_epi8(q, _mm256_set1_epi8((128 - B::ZERO_POINT).cast_signed()))
    } else {
        q
    }
}

/// Writes the records of a weight row. With `ZERO_POINT`, bytes are 128 larger than the weights.
#[inline(never)]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::arch) fn int_blocks<B: Groups, const BYTES: bool, const ZERO_POINT: bool>(
    bytes: &[u8],
    out: &mut [u32],
) {
    let blocks = bytemuck::cast_slice::<u8, B>(bytes);
    assert!(out.len() >= blocks.len() * B::GROUPS * record(BYTES));
    for (i, block) in blocks.iter().enumerate() {
        // SAFETY: this level has AVX2 and F16C.
        let Factors { scale, offset } = unsafe { block.factors() };
        for g in 0..B::GROUPS {
            let out = &mut out[(i * B::GROUPS + g) * record(BYTES)..][..record(BYTES)];
            // SAFETY: as above.
            let q = unsafe { block.bytes(g) };
            let q = with_zero_point::<B, ZERO_POINT>(q);
            if BYTES {
                store256(&mut out[..8], q);
            } else {
                store256(
                    &mut out[..8],
                    _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)),
                );
                store256(
                    &mut out[8..16],
                    _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(q)),
                );
            }
            let factors = [
                scale[2 * g],
                scale[2 * g + 1],
                offset[2 * g],
                offset[2 * g + 1],
            ];
            let factors = arrays::map(factors, f32::to_bits);
            arrays::store(factors, &mut out[int_words(BYTES)..]);
        }
    }
}
