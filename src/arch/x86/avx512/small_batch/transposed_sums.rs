//! Products of quantised weights with a small batch of prefill rows, alone or mixed with decode
//! rows: the integer sums are transposed.
//!
//! K-quants and blocks of 32 are multiplied by `transposed_weights`. Here are the others with
//! blocks of 256, and K-quants where decode rows share the unpacking. Weights stay in registers, as
//! `unpack` leaves them: a 32-bit lane has 16 values, so that four `vpdpbusd` give the 16 integer
//! sums of a block of 256. Not the weights but the sums of 16 weight rows are transposed; then a
//! lane is a weight row, and scales, offsets and `f32` sums follow in the order of the panels'
//! tiles, with the same bits. Formats of 256 without a minimum have a scale per 16 activations, as
//! in their panels.

use super::rounded::{Halves, Spans, VALUES, put_words, round_spans};
use super::transposed_weights::{self, Large};
use crate::arch::acts::BlockP16;
use crate::arch::arrays;
use crate::arch::gemm::{UnpackRows, prefetch_line};
use crate::arch::view::ColumnsMut;
use crate::arch::x86::avx2::gemm::round_halves;
use crate::arch::x86::avx512::common::{LANES, load_64, transpose, transpose_quarters};
use crate::arch::x86::avx512::matmul::{self, unpacked};
use crate::arch::x86::avx512::panels::integers::IntPanels;
use crate::arch::x86::avx512::unpack::planes::{self, UnpackPlanes};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// 256 activations rounded to bytes: the integers and scales of the panels in the order of
/// [`BlockP16`].
pub(in crate::arch) trait Rounded: Pod {
    /// The panels that have the same sums.
    type Panels: UnpackRows;
    /// Maximum number of activation rows for which [`Rounded::alone`] is faster than panels.
    const MAX_ROWS: usize;
    /// Maximum rows in a mixed batch.
    const MAX_MIXED_ROWS: usize = Self::MAX_ROWS;

    /// # Safety
    /// The CPU must have AVX2.
    unsafe fn round(x: &[f32; VALUES]) -> Self;

    /// Byte `i % 4` of lane `i / 16` of register [`BlockP16::register`]`(i)` is value `i`.
    fn bytes(&self) -> &[[[u8; 4]; 16]; 4];

    /// Initial value of the integer sum of each 16 products, given [`planes::starts`].
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn starts(&self, starts: __m512i) -> __m512i;

    /// Implements [`Gemm::kernel`] for up to `MAX_ROWS` rows.
    ///
    /// # Safety
    /// As above; lengths as there.
    unsafe fn alone(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &[Self]);

    /// Adds to the sums of each row, a lane per weight row, the products of a block; its integer
    /// sums, scales and offsets are `[weight row][16 columns]`.
    ///
    /// # Safety
    /// As above.
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    );
}

/// The largest [`Rounded::MAX_MIXED_ROWS`].
const MAX_ROWS: usize = 12;

/// Weight rows that share a load of activations; with four there are too few registers for Q6_K.
const TOGETHER: usize = 2;

/// Maximum decode rows that share the weights with prefill rows: their sums, 1 KiB each, stay in
/// L1.
pub(in crate::arch) const MAX_GENERATED_ROWS: usize = 16;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
pub(in crate::arch) fn small_batch<X: Rounded, const MIXED: bool>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    generated: &[BlockP16],
    x: &[X],
) {
    macro_rules! multiply {
        ($block:ty) => {
            multiply::<$block, X, MIXED>(y, bytemuck::cast_slice(w), generated, x)
        };
    }
    match dtype {
        DType::Q2_K => multiply!(BlockQ2K),
        DType::Q3_K => multiply!(BlockQ3K),
        DType::Q4_K => multiply!(BlockQ4K),
        DType::Q5_K => multiply!(BlockQ5K),
        DType::Q6_K => multiply!(BlockQ6K),
        DType::IQ4_XS => multiply!(BlockIq4Xs),
        DType::IQ1_S => multiply!(BlockIq1S),
        DType::IQ1_M => multiply!(BlockIq1M),
        DType::IQ2_XXS => multiply!(BlockIq2Xxs),
        DType::IQ2_XS => multiply!(BlockIq2Xs),
        DType::IQ2_S => multiply!(BlockIq2S),
        DType::IQ3_XXS => multiply!(BlockIq3Xxs),
        DType::IQ3_S => multiply!(BlockIq3S),
        DType::TQ1_0 => multiply!(BlockTq1_0),
        DType::TQ2_0 => multiply!(BlockTq2_0),
        _ => unreachable!("{dtype} has no kernel for small batches"),
    }
}

/// Products of all rows of `w` with those of `x`, which has a block of each row, then the next of
/// each. If `MIXED`, the first rows of `y` are those of `generated`, which has all blocks of a row,
/// then those of the next.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply<B: UnpackPlanes, X: Rounded, const MIXED: bool>(
    y: &mut ColumnsMut<'_>,
    w: &[B],
    generated: &[BlockP16],
    x: &[X],
) {
    let row_blocks = (generated.len() + x.len()) / y.rows();
    let (n_generated, m) = (generated.len() / row_blocks, x.len() / row_blocks);
    // Integer sums of blocks: `[activation row][weight row][16 columns]`.
    let mut ints = [[_mm512_setzero_si512(); LANES]; MAX_ROWS];
    let ints = &mut ints[..m];
    let mut starts = [_mm512_setzero_si512(); MAX_ROWS];
    // Of blocks of 16 weight rows, `[weight row][16 columns]`.
    let (mut scales, mut offsets) = (
        [_mm512_setzero_si512(); LANES],
        [_mm512_setzero_si512(); LANES],
    );
    // Of decode rows, `[activation row][weight row]`.
    let mut generated_totals = [[_mm512_setzero_ps(); LANES]; MAX_GENERATED_ROWS];
    let generated_totals = &mut generated_totals[..if MIXED { n_generated } else { 0 }];
    for (t, w) in w.chunks(LANES * row_blocks).enumerate() {
        let n_rows = w.len() / row_blocks;
        let mut totals = [_mm512_setzero_ps(); MAX_ROWS];
        generated_totals.fill([_mm512_setzero_ps(); LANES]);
        for (k, x) in x.chunks_exact(m).enumerate() {
            for i in 0..m {
                // SAFETY: this function has the features.
                starts[i] = unsafe { x[i].starts(planes::starts::<B>()) };
            }
            // The following weight rows are read in one stream.
            let ahead = w.as_ptr().wrapping_add(w.len() + k * n_rows).cast::<u8>();
            for line in (0..n_rows * size_of::<B>()).step_by(64) {
                prefetch_line(ahead.wrapping_add(line));
            }
            for r in (0..LANES).step_by(TOGETHER) {
                let mut blocks: [&[B]; TOGETHER] = [&[]; TOGETHER];
                for i in 0..TOGETHER {
                    // Lanes of missing rows hold the last one.
                    blocks[i] = &w[(r + i).min(n_rows - 1) * row_blocks + k..];
                }
                let weights = unpacked(&blocks, 0);
                for i in 0..TOGETHER {
                    scales[r + i] = _mm512_castps_si512(weights[i].scale);
                    offsets[r + i] = _mm512_castps_si512(weights[i].offset);
                }
                for l in 0..m {
                    let mut sums = [starts[l]; TOGETHER];
                    for j in 0..4 {
                        let x = load_64(bytemuck::cast_ref(&x[l].bytes()[j]));
                        for i in 0..TOGETHER {
                            sums[i] = _mm512_dpbusd_epi32(sums[i], weights[i].w[j], x);
                        }
                    }
                    arrays::store(sums, &mut ints[l][r..]);
                }
                for (totals, x) in generated_totals
                    .iter_mut()
                    .zip(generated.chunks_exact(row_blocks))
                {
                    let totals: &mut [_; TOGETHER] =
                        totals[r..].first_chunk_mut().expect("a divisor of LANES");
                    matmul::multiply::<B, TOGETHER>(totals, &weights, &x[k]);
                }
            }
            // SAFETY: this function has the features.
            unsafe { X::add(&mut totals[..m], ints, scales, offsets, x) };
        }
        for (i, totals) in generated_totals.iter().enumerate() {
            let y = &mut y.row(i)[t * LANES..][..n_rows];
            for r in 0..n_rows {
                y[r] = _mm512_reduce_add_ps(totals[r]);
            }
        }
        for (i, total) in totals[..m].iter().enumerate() {
            let mut sums = [0.0f32; LANES];
            // SAFETY: array and register have the same size.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), *total) };
            y.row(n_generated + i)[t * LANES..][..n_rows].copy_from_slice(&sums[..n_rows]);
        }
    }
}

impl Rounded for Spans<32> {
    type Panels = IntPanels<true, 32>;
    const MAX_ROWS: usize = transposed_weights::MAX_ROWS;
    const MAX_MIXED_ROWS: usize = 12;

    #[inline]
    unsafe fn round(x: &[f32; VALUES]) -> Self {
        // SAFETY: the caller's promise.
        unsafe { round_spans(x) }
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn alone(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &[Self]) {
        match dtype {
            DType::Q4_K => transposed_weights::multiply::<Large<BlockQ4K, 32>>(y, w, x),
            DType::Q5_K => transposed_weights::multiply::<Large<BlockQ5K, 32>>(y, w, x),
            _ => unreachable!("{dtype} has no scale per 32"),
        }
    }

    #[inline]
    fn bytes(&self) -> &[[[u8; 4]; 16]; 4] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, _starts: __m512i) -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        // Both halves of 32 weights have the same scale and the same offset.
        let mut factors = scales;
        for r in 0..LANES {
            factors[r] = _mm512_mask_blend_epi32(0xaaaa, scales[r], offsets[r]);
        }
        let factors = transpose(factors);
        for i in 0..totals.len() {
            let (total, x) = (&mut totals[i], &x[i]);
            let ints = pair_sums(&ints[i]);
            for g in 0..8 {
                *total = add(
                    *total,
                    ints[g],
                    x.d[g],
                    factors[2 * g],
                    x.sums[g],
                    factors[2 * g + 1],
                );
            }
        }
    }
}

impl Rounded for Spans<16> {
    type Panels = IntPanels<true, 16>;
    const MAX_ROWS: usize = transposed_weights::MAX_ROWS;
    /// More sums are transposed.
    const MAX_MIXED_ROWS: usize = 3;

    #[inline]
    unsafe fn round(x: &[f32; VALUES]) -> Self {
        // SAFETY: the caller's promise.
        unsafe { round_spans(x) }
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn alone(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &[Self]) {
        match dtype {
            DType::Q2_K => transposed_weights::multiply::<Large<BlockQ2K, 16>>(y, w, x),
            DType::Q3_K => transposed_weights::multiply::<Large<BlockQ3K, 16>>(y, w, x),
            DType::Q6_K => transposed_weights::multiply::<Large<BlockQ6K, 16>>(y, w, x),
            _ => unreachable!("{dtype} has no scale per 16"),
        }
    }

    #[inline]
    fn bytes(&self) -> &[[[u8; 4]; 16]; 4] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, _starts: __m512i) -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        let (scales, offsets) = (transpose(scales), transpose(offsets));
        for i in 0..totals.len() {
            let (total, x) = (&mut totals[i], &x[i]);
            let ints = transpose(ints[i]);
            for g in 0..16 {
                *total = add(
                    *total,
                    ints[g],
                    x.d[g / 2],
                    scales[g],
                    x.half_sums[g],
                    offsets[g],
                );
            }
        }
    }
}

impl Rounded for Halves {
    type Panels = IntPanels<true, 16, true>;
    const MAX_ROWS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn round(x: &[f32; VALUES]) -> Self {
        let mut block: Self = bytemuck::Zeroable::zeroed();
        for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let [words, [d, e, starts @ ..], _] = round_halves(x);
            put_words(&mut block.q, b, words);
            arrays::store([d, e], &mut block.d[2 * b..]);
            for h in 0..2 {
                block.sums[2 * b + h] = starts[h].to_bits().cast_signed() / -128;
            }
        }
        block
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn alone(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &[Self]) {
        small_batch::<Self, false>(y, dtype, w, &[], x);
    }

    #[inline]
    fn bytes(&self) -> &[[[u8; 4]; 16]; 4] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, starts: __m512i) -> __m512i {
        _mm512_mullo_epi32(load_64(bytemuck::cast_ref(&self.sums)), starts)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        _offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        let scales = transpose(scales);
        for i in 0..totals.len() {
            let (total, x) = (&mut totals[i], &x[i]);
            let ints = transpose(ints[i]);
            for g in 0..16 {
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(ints[g]), _mm512_set1_ps(x.d[g]));
                *total = _mm512_fmadd_ps(product, _mm512_castsi512_ps(scales[g]), *total);
            }
        }
    }
}

/// `total + int·d·scale + sum·offset`, rounded as the panels' tiles do.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(total: __m512, int: __m512i, d: f32, scale: __m512i, sum: f32, offset: __m512i) -> __m512 {
    let product = _mm512_mul_ps(_mm512_cvtepi32_ps(int), _mm512_set1_ps(d));
    let total = _mm512_fmadd_ps(product, _mm512_castsi512_ps(scale), total);
    _mm512_fmadd_ps(_mm512_castsi512_ps(offset), _mm512_set1_ps(sum), total)
}

/// Adds neighbouring words of 16 rows and transposes: lane `r` of register `g` is the sum of words
/// `2g` and `2g + 1` of row `r`.
#[inline]
#[target_feature(enable = "avx512f")]
fn pair_sums(rows: &[__m512i; LANES]) -> [__m512i; 8] {
    let zip = |a: __m512i, b: __m512i| {
        let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a, b);
        [_mm512_castps_si512(even), _mm512_castps_si512(odd)]
    };
    // In each 128-bit lane `l` two sums of row `2i`, then those of row `2i + 1`.
    let mut pairs = [_mm512_setzero_si512(); 8];
    for i in 0..8 {
        let [even, odd] = zip(rows[2 * i], rows[2 * i + 1]);
        pairs[i] = _mm512_add_epi32(even, odd);
    }
    // In lane `l` sum `2l` or `2l + 1` of four rows.
    let (mut first, mut second) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
    for i in 0..4 {
        [first[i], second[i]] = zip(pairs[2 * i], pairs[2 * i + 1]);
    }
    let (first, second) = (transpose_quarters(first), transpose_quarters(second));
    [
        first[0], second[0], first[1], second[1], first[2], second[2], first[3], second[3],
    ]
}
