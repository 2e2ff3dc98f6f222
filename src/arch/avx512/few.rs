//! Products of K-quants with few rows of prompts.
//!
//! With few activation rows most time goes into unpacking and transposing weights, which panels do once for many. Here
//! weights stay in registers, as `planes` unpacks them: a 32-bit lane has 16 values, so that four `vpdpbusd` give the
//! 16 integer sums of a block of 256. Not the weights but the sums of 16 weight rows are transposed; then a lane is a
//! weight row, and scales, offsets and `f32` sums follow in the order of the panels' tiles, with the same bits.
//!
//! Of 32 weights of Q4_K a thread reads 18 bytes, in 1.1 ns at 16 GB/s. Instructions for them: 4 to unpack and prefetch,
//! and for each activation row 0.5 to multiply, 0.4 to transpose sums, 0.3 for `f32` (Zen 4 has three ports for these,
//! half a register wide); panels take 20 and 0.8. Nanoseconds for 32 weights, one thread of Zen 4, from L2 (in brackets
//! from memory):
//!
//! | activation rows | 1 | 2 | 4 | 8 | 12 | 16 |
//! |---|---|---|---|---|---|---|
//! | Q4_K | 0.92 (1.01) | 1.13 (1.19) | 1.57 (1.66) | 2.6 (2.8) | 3.6 (4.0) | 4.6 (5.5) |
//! | Q4_K, panels | 2.20 (2.65) | 2.20 (2.48) | 2.56 (2.81) | 3.3 (4.5) | 4.5 (5.6) | 4.5 (5.7) |
//! | Q6_K | 1.28 (1.99) | 1.66 (2.42) | 2.39 (3.46) | 4.0 (5.1) | 5.5 | 7.1 |
//! | Q6_K, panels | 2.30 (2.73) | 2.30 (2.69) | 2.78 (3.23) | 3.7 (4.3) | 5.4 | 5.4 |

use super::gemm::{IntPanels, LANES, transpose, transpose_quarters};
use super::matmul::load_64;
use super::planes::{self, UnpackPlanes, Unpacked};
use crate::arch::avx2::gemm::round;
use crate::arch::gemm::{self, prefetch_line};
use crate::arch::{Acts, BlockP16, Both, CacheLine, ColumnsMut, Gemm};
use crate::quant::*;
use std::arch::x86_64::*;

/// Most activation rows for which this is faster than panels: fewer with a scale per 16 weights, where more sums are
/// transposed.
const fn most(span: usize) -> usize {
    if span == 32 { MOST } else { 3 }
}

/// The largest [`most`].
const MOST: usize = 12;

/// 256 activations rounded to bytes, with a scale per 32: the integers of the panels in the order of [`BlockP16`].
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block8 {
    /// Byte `i % 4` of lane `i / 16` of register [`BlockP16::register`]`(i)` is value `i`.
    q: [[[u8; 4]; 16]; 4],
    /// Scale per 32 values.
    d: [f32; 8],
    /// `d·Σq` per 32 values.
    sums: [f32; 8],
    /// `d·Σq` per 16 values.
    half_sums: [f32; 16],
}

/// Values per block.
const VALUES: usize = 256;
/// Weight rows that share a load of activations; with four there are too few registers for Q6_K.
const TOGETHER: usize = 2;

/// Most generated rows that share the weights with prompt rows: their sums, 1 KiB each, stay in L1.
const GENERATED: usize = 16;

/// The [`Gemm`] table entry for a K-quant with a scale per `SPAN` weights, 16 or 32.
pub(super) const fn table<const SPAN: usize>() -> Gemm {
    let panels = gemm::table::<IntPanels<true, SPAN>>();
    let few = if panels.few > most(SPAN) { panels.few } else { most(SPAN) };
    let both = Some(Both { most: (GENERATED, most(SPAN)), kernel: both::<SPAN> });
    Gemm { few, pack: pack::<SPAN>, kernel: kernel::<SPAN>, both, ..panels }
}

/// Implements [`Gemm::pack`]; few rows become `[block][row]` of [`Block8`].
///
/// # Safety
/// As for [`Gemm::pack`].
unsafe fn pack<const SPAN: usize>(x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
    if m > most(SPAN) {
        // SAFETY: the caller's promise.
        return unsafe { gemm::pack::<IntPanels<true, SPAN>>(x, m, k, packed) };
    }
    let blocks = bytemuck::cast_slice_mut::<_, Block8>(&mut packed[..m * (k / VALUES) * size_of::<Block8>()]);
    for (i, x) in x.chunks_exact(k).enumerate() {
        for (x, blocks) in x.as_chunks::<VALUES>().0.iter().zip(blocks.chunks_exact_mut(m)) {
            // SAFETY: this level includes AVX2.
            unsafe { pack_block(x, &mut blocks[i]) };
        }
    }
}

#[target_feature(enable = "avx2")]
fn pack_block(x: &[f32; VALUES], block: &mut Block8) {
    for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
        let [words, [d, first, second, both, ..], _] = round::<true>(x);
        for (i, word) in words.into_iter().enumerate() {
            block.q[BlockP16::register(32 * b + 4 * i)][2 * b + i / 4] = word.to_bits().to_le_bytes();
        }
        block.d[b] = d;
        block.sums[b] = both;
        block.half_sums[2 * b] = first;
        block.half_sums[2 * b + 1] = second;
    }
}

/// Implements [`Gemm::kernel`].
///
/// # Safety
/// As for [`Gemm::kernel`].
unsafe fn kernel<const SPAN: usize>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    if y.rows() > most(SPAN) {
        // SAFETY: the caller's promise.
        return unsafe { gemm::kernel::<IntPanels<true, SPAN>>(y, dtype, w, packed, k, workspace) };
    }
    // SAFETY: the CPU has this level's features.
    unsafe { few_rows::<false>(y, dtype, w, &[], packed_blocks(packed, y.rows(), k)) }
}

/// Implements [`Both::kernel`].
///
/// # Safety
/// As for [`Both::kernel`].
unsafe fn both<const SPAN: usize>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    generated: &Acts<'_>,
    packed: &[u8],
    k: usize,
) {
    let Acts::P16 { x, .. } = *generated else { unreachable!("the form this level asks for") };
    let packed = packed_blocks(packed, y.rows() - generated.m(), k);
    // SAFETY: the CPU has this level's features.
    unsafe { few_rows::<true>(y, dtype, w, x, packed) }
}

/// What [`pack`] wrote for `m` rows.
fn packed_blocks(packed: &[u8], m: usize, k: usize) -> &[Block8] {
    bytemuck::cast_slice(&packed[..m * (k / VALUES) * size_of::<Block8>()])
}

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
fn few_rows<const BOTH: bool>(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], generated: &[BlockP16], x: &[Block8]) {
    match dtype {
        DType::Q2_K => multiply::<BlockQ2K, 16, BOTH>(y, bytemuck::cast_slice(w), generated, x),
        DType::Q3_K => multiply::<BlockQ3K, 16, BOTH>(y, bytemuck::cast_slice(w), generated, x),
        DType::Q4_K => multiply::<BlockQ4K, 32, BOTH>(y, bytemuck::cast_slice(w), generated, x),
        DType::Q5_K => multiply::<BlockQ5K, 32, BOTH>(y, bytemuck::cast_slice(w), generated, x),
        DType::Q6_K => multiply::<BlockQ6K, 16, BOTH>(y, bytemuck::cast_slice(w), generated, x),
        _ => unreachable!("{dtype} is no K-quant"),
    }
}

/// Products of all rows of `w` with those of `x`, which has a block of each row, then the next of each. If `BOTH`, the
/// first rows of `y` are those of `generated`, which has all blocks of a row, then those of the next.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply<B: UnpackPlanes, const SPAN: usize, const BOTH: bool>(
    y: &mut ColumnsMut<'_>,
    w: &[B],
    generated: &[BlockP16],
    x: &[Block8],
) {
    let row_blocks = (generated.len() + x.len()) / y.rows();
    let (n_generated, m) = (generated.len() / row_blocks, x.len() / row_blocks);
    // Integer sums of blocks: `[activation row][weight row][16 columns]`.
    let mut ints = [[_mm512_setzero_si512(); LANES]; MOST];
    let ints = &mut ints[..m];
    // Of blocks of 16 weight rows, `[weight row][16 columns]`.
    let (mut scales, mut offsets) = ([_mm512_setzero_si512(); LANES], [_mm512_setzero_si512(); LANES]);
    // Of generated rows, `[activation row][weight row]`.
    let mut generated_totals = [[_mm512_setzero_ps(); LANES]; GENERATED];
    let generated_totals = &mut generated_totals[..if BOTH { n_generated } else { 0 }];
    for (t, w) in w.chunks(LANES * row_blocks).enumerate() {
        let n_rows = w.len() / row_blocks;
        let mut totals = [_mm512_setzero_ps(); MOST];
        generated_totals.fill([_mm512_setzero_ps(); LANES]);
        for (k, x) in x.chunks_exact(m).enumerate() {
            // The next weight rows, which lie behind these, are read in one stream.
            let ahead = w.as_ptr().wrapping_add(w.len() + k * n_rows).cast::<u8>();
            for line in (0..n_rows * size_of::<B>()).step_by(64) {
                prefetch_line(ahead.wrapping_add(line));
            }
            for r in (0..LANES).step_by(TOGETHER) {
                let (zero, none) = (_mm512_setzero_si512(), _mm512_setzero_ps());
                let mut weights = [Unpacked { w: [zero; 4], scale: none, offset: none }; TOGETHER];
                for i in 0..TOGETHER {
                    // Lanes of missing rows hold the last one.
                    let block = &w[(r + i).min(n_rows - 1) * row_blocks + k];
                    // SAFETY: this function has the features.
                    weights[i] = unsafe { block.unpack() };
                    scales[r + i] = _mm512_castps_si512(weights[i].scale);
                    offsets[r + i] = _mm512_castps_si512(weights[i].offset);
                }
                for (ints, x) in ints.iter_mut().zip(x) {
                    let mut sums = [_mm512_setzero_si512(); TOGETHER];
                    for j in 0..4 {
                        let x = load_64(bytemuck::cast_ref(&x.q[j]));
                        for i in 0..TOGETHER {
                            sums[i] = _mm512_dpbusd_epi32(sums[i], weights[i].w[j], x);
                        }
                    }
                    ints[r..r + TOGETHER].copy_from_slice(&sums);
                }
                for (totals, x) in generated_totals.iter_mut().zip(generated.chunks_exact(row_blocks)) {
                    let totals: &mut [_; TOGETHER] = totals[r..].first_chunk_mut().expect("a divisor of LANES");
                    planes::multiply(totals, &weights, &x[k]);
                }
            }
            if SPAN == 32 {
                // Both halves of 32 weights have the same scale and the same offset.
                let mut factors = scales;
                for r in 0..LANES {
                    factors[r] = _mm512_mask_blend_epi32(0xaaaa, scales[r], offsets[r]);
                }
                let factors = transpose(factors);
                for ((total, ints), x) in totals.iter_mut().zip(&*ints).zip(x) {
                    let ints = pair_sums(ints);
                    for g in 0..8 {
                        *total = add(*total, ints[g], x.d[g], factors[2 * g], x.sums[g], factors[2 * g + 1]);
                    }
                }
            } else {
                let (scales, offsets) = (transpose(scales), transpose(offsets));
                for ((total, ints), x) in totals.iter_mut().zip(&*ints).zip(x) {
                    let ints = transpose(*ints);
                    for g in 0..16 {
                        *total = add(*total, ints[g], x.d[g / 2], scales[g], x.half_sums[g], offsets[g]);
                    }
                }
            }
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

/// `total + int·d·scale + sum·offset`, rounded as the panels' tiles do.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(total: __m512, int: __m512i, d: f32, scale: __m512i, sum: f32, offset: __m512i) -> __m512 {
    let product = _mm512_mul_ps(_mm512_cvtepi32_ps(int), _mm512_set1_ps(d));
    let total = _mm512_fmadd_ps(product, _mm512_castsi512_ps(scale), total);
    _mm512_fmadd_ps(_mm512_castsi512_ps(offset), _mm512_set1_ps(sum), total)
}

/// Adds neighbouring words of 16 rows and transposes: lane `r` of register `g` is the sum of words `2g` and `2g + 1` of
/// row `r`.
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
    [first[0], second[0], first[1], second[1], first[2], second[2], first[3], second[3]]
}
