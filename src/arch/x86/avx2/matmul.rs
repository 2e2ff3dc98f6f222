//! Products of weights with decode rows.
//!
//! A block format only says how 256 of its weights become bytes, 16 scales and 16 offsets
//! ([`UnpackDot::unpack`]); the product is the same for all. Its integers are 16-bit: `vpmaddwd`
//! takes signed weights and activations of any size without overflow, where bytes would need the
//! activations in two planes, two instructions for each and care with signs. The two 128-bit lanes
//! hold two blocks of 32, so that one conversion to `f32` and one multiply-add serve 64 weights.
//!
//! Measured by `benches/matvec.rs` on one Zen 5 core that reads 31–41 GB/s (rows of 2,048, GB/s of
//! weights from memory, in brackets from L2): Q4_K 19 (21), Q6_K 21 (21), Q8_0 28 (35), Q4_0 18
//! (19), F16 28 (41), F32 33 (81).

use super::common::{halves_of, load_f32, load_i16, store_i16};
use super::elementwise::{F32x8, zero};
use super::unpack::with_groups;
use super::unpack_dot::UnpackDot;
use super::unpack_order::Unpacked;
use crate::arch::acts::{ActForm, Acts, BlockQ16};
use crate::arch::arrays;
use crate::arch::gemm::prefetch_line;
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::scalar;
use crate::arch::table::{Matvec, MatvecFn};
use crate::arch::view::ColumnsMut;
use crate::quant::*;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The products of a level of 256 bits whose activations have form `F`.
pub(in crate::arch::x86) fn matvec_for<F: Form>(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    macro_rules! rounded {
        ($block:ident) => {
            Matvec {
                form: F::FORM,
                kernel: matvec::<F, $block, { $block::PER_256 }>,
            }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => with_groups!(dtype, rounded, (scalar::KERNELS.matvec)(dtype)),
    }
}

/// Minimum prefetch distance of weights, in bytes; tuned at the AVX-512 level.
const AHEAD: usize = 8192;

plain_products!(
    "avx2,fma,f16c", zero(), F32x8,
    rows: 4, activation_rows: 3, rows_by_one: 4, OneRow { short: 0, ahead: None }
);

/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in the
/// L2 cache while all weight rows of a task go by.
const MANY: usize = 16;

/// Form of rounded activations, and how a level of 256 bits multiplies them.
pub(in crate::arch::x86) trait Form {
    const FORM: ActForm;
    /// 256 activations.
    type Block;
    /// 128 weights, as they are multiplied.
    type Half;

    /// The blocks of rows, and values per row.
    fn rows<'a>(x: &Acts<'a>) -> (&'a [Self::Block], usize);

    /// The weights of blocks, halves first.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn unpack<B: UnpackDot<N>, const N: usize>(blocks: [&B; N]) -> [Self::Half; 2];

    /// Adds `Σ (scale·w + offset)·x` over half a block, spread over the lanes.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn add<B: UnpackDot<N>, const N: usize>(
        total: __m256,
        w: &Self::Half,
        x: &Self::Block,
        half: usize,
    ) -> __m256;
}

#[target_feature(enable = "avx2,fma,f16c")]
fn matvec<F: Form, B: UnpackDot<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    _: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let (x, n) = F::rows(x);
    let groups = n.div_ceil(VALUES);
    let blocks = n * N / VALUES;
    let w = bytemuck::cast_slice::<u8, B>(w);
    for (c, x) in x.chunks(MANY * groups).enumerate() {
        if x.len() > groups {
            many_rows::<F, B, N>(y, w, c * MANY, x, n);
            continue;
        }
        let y = y.row(c * MANY);
        for (r, row) in w.chunks_exact(blocks).enumerate() {
            let mut totals = [_mm256_setzero_ps()];
            let mut ahead = first_ahead(row);
            for (k, x) in x[..n / VALUES].iter().enumerate() {
                ahead = prefetch(ahead, N * size_of::<B>());
                add::<F, B, N, 2>(&mut totals, whole(row, k), std::slice::from_ref(x), 1);
            }
            if let Some(x) = x.get(n / VALUES) {
                prefetch(ahead, N * size_of::<B>());
                let end = &row[n / VALUES * N..];
                add_end::<F, B, N>(&mut totals, end, std::slice::from_ref(x), 1, n % VALUES);
            }
            y[r] = sum(totals[0]);
        }
    }
}

/// Activations, and weights, that are multiplied together.
const VALUES: usize = 256;

/// Products of weight rows of `n` values with at most [`MANY`] activation rows from row `i` on: the
/// same sums as [`matvec`] computes for each, added in the same order.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn many_rows<F: Form, B: UnpackDot<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    w: &[B],
    i: usize,
    x: &[F::Block],
    n: usize,
) {
    let (blocks, groups) = (n * N / VALUES, n.div_ceil(VALUES));
    let mut totals = [_mm256_setzero_ps(); MANY];
    let totals = &mut totals[..x.len() / groups];
    for (r, row) in w.chunks_exact(blocks).enumerate() {
        totals.fill(_mm256_setzero_ps());
        let mut ahead = first_ahead(row);
        for k in 0..groups {
            if i == 0 {
                ahead = prefetch(ahead, N * size_of::<B>());
            }
            if k < n / VALUES {
                add::<F, B, N, 2>(totals, whole(row, k), &x[k..], groups);
            } else {
                add_end::<F, B, N>(totals, &row[k * N..], &x[k..], groups, n % VALUES);
            }
        }
        for (j, total) in totals.iter().enumerate() {
            y.row(i + j)[r] = sum(*total);
        }
    }
}

/// Where to begin to prefetch behind `row`.
#[inline(always)]
fn first_ahead<B>(row: &[B]) -> *const i8 {
    row.as_ptr()
        .cast::<i8>()
        .wrapping_add(AHEAD.max(size_of_val(row)))
}

/// The `k`th 256 weights of a row.
#[inline(always)]
fn whole<B, const N: usize>(row: &[B], k: usize) -> [&B; N] {
    let blocks = row[k * N..].first_chunk::<N>().expect("256 weights");
    arrays::from_fn(|i| &blocks[i])
}

/// Adds the products of 256 weights, or of the first half of them, with each activation row; the
/// next row's begin `groups` behind one's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<F: Form, B: UnpackDot<N>, const N: usize, const HALVES: usize>(
    totals: &mut [__m256],
    blocks: [&B; N],
    x: &[F::Block],
    groups: usize,
) {
    // SAFETY: a level with this form has the features.
    let halves = unsafe { F::unpack(blocks) };
    for (j, total) in totals.iter_mut().enumerate() {
        for half in 0..HALVES {
            // SAFETY: as above.
            *total = unsafe { F::add::<B, N>(*total, &halves[half], &x[j * groups], half) };
        }
    }
}

/// As [`add`], of the end of a row, with `n` weights less than 256. Those that are missing would add
/// zeros, so that a half without weights need not be multiplied.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_end<F: Form, B: UnpackDot<N>, const N: usize>(
    totals: &mut [__m256],
    end: &[B],
    x: &[F::Block],
    groups: usize,
    n: usize,
) {
    let none = B::zeroed();
    if n > VALUES / 2 {
        add::<F, B, N, 2>(totals, or(end, &none), x, groups);
    } else {
        add::<F, B, N, 1>(totals, or(end, &none), x, groups);
    }
}

/// The blocks of `end`, then `none` for each that is missing. Blocks are not copied: they would be
/// read by other instructions than they were written with, and reading would wait.
#[inline(always)]
pub(in crate::arch::x86) fn or<'a, B, const N: usize>(end: &'a [B], none: &'a B) -> [&'a B; N] {
    arrays::from_fn(|b| end.get(b).unwrap_or(none))
}

/// [`BlockQ16`]: weights are widened to words.
pub(super) enum Words {}

/// Half of [`Unpacked`] weights, widened to words.
pub(super) struct Half {
    w: [[__m256i; 2]; 4],
    scale: __m256,
    offset: __m256,
}

impl Form for Words {
    const FORM: ActForm = ActForm::Q16;
    type Block = BlockQ16;
    type Half = Half;

    #[inline]
    fn rows<'a>(x: &Acts<'a>) -> (&'a [BlockQ16], usize) {
        let Acts::Q16 { x, n } = *x else {
            unreachable!("the form this level asks for")
        };
        (x, n)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack<B: UnpackDot<N>, const N: usize>(blocks: [&B; N]) -> [Half; 2] {
        // SAFETY: this function has the features.
        let weights = unsafe { B::unpack(blocks) };
        [
            widened_half::<B, N>(&weights, 0),
            widened_half::<B, N>(&weights, 1),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add<B: UnpackDot<N>, const N: usize>(
        total: __m256,
        w: &Half,
        x: &BlockQ16,
        half: usize,
    ) -> __m256 {
        _mm256_add_ps(total, product::<B, N>(w, x, half))
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widened_half<B: UnpackDot<N>, const N: usize>(weights: &Unpacked, half: usize) -> Half {
    let [a, b, c, d] = weights.w[half];
    let w = if B::SIGNED {
        [
            signed_words(a),
            signed_words(b),
            signed_words(c),
            signed_words(d),
        ]
    } else {
        [words(a), words(b), words(c), words(d)]
    };
    Half {
        w,
        scale: weights.scale[half],
        offset: weights.offset[half],
    }
}

/// Prefetches `bytes` from `p` on into the L2 cache; returns where they end. L1 supports fewer
/// outstanding misses: L2 is 1.5 times as fast for Q8_0 and F16 on Zen 4.
#[inline(always)]
pub(in crate::arch) fn prefetch(p: *const i8, bytes: usize) -> *const i8 {
    for line in 0..bytes.div_ceil(64) {
        prefetch_line(p.wrapping_add(line * 64).cast());
    }
    p.wrapping_add(bytes)
}

/// `Σ (scale·w + offset)·x` of half a block of activations, the sum spread over the lanes: each
/// 128-bit lane takes every second block of 32 columns, and adds the products of its two registers
/// of words in the order of columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn product<B: UnpackDot<N>, const N: usize>(
    Half { w, scale, offset }: &Half,
    x: &BlockQ16,
    half: usize,
) -> __m256 {
    let (d, s) = (&halves_of(&x.d)[half], &halves_of(&x.s)[half]);
    let sums = [
        dot_words::<0>(&w[0], x, half),
        dot_words::<1>(&w[1], x, half),
        dot_words::<2>(&w[2], x, half),
        dot_words::<3>(&w[3], x, half),
    ];
    let scale = _mm256_mul_ps(*scale, load_f32(d));
    let total = _mm256_mul_ps(*offset, load_f32(s));
    if B::SCALE_PER_16 {
        let total = scaled::<0b00_00_00_00>(total, sums[0], scale);
        let total = scaled::<0b01_01_01_01>(total, sums[1], scale);
        let total = scaled::<0b10_10_10_10>(total, sums[2], scale);
        scaled::<0b11_11_11_11>(total, sums[3], scale)
    } else {
        let total = scaled::<0b00_00_00_00>(total, _mm256_add_epi32(sums[0], sums[1]), scale);
        scaled::<0b10_10_10_10>(total, _mm256_add_epi32(sums[2], sums[3]), scale)
    }
}

/// `Σ w·x` over the four words of each lane, with half of `x.q[2J]` and `x.q[2J + 1]`.
///
/// |w| ≤ 128 and |x| ≤ 32767: two such sums stay below 2²⁵.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_words<const J: usize>(w: &[__m256i; 2], x: &BlockQ16, half: usize) -> __m256i {
    let even: &[[i16; 16]; 2] = bytemuck::cast_ref(&x.q[2 * J]);
    let odd: &[[i16; 16]; 2] = bytemuck::cast_ref(&x.q[2 * J + 1]);
    _mm256_add_epi32(
        _mm256_madd_epi16(w[0], load_i16(&even[half])),
        _mm256_madd_epi16(w[1], load_i16(&odd[half])),
    )
}

/// `total + sum·scale`, where `WHICH` is a permutation that broadcasts one scale within each
/// 128-bit lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scaled<const WHICH: i32>(total: __m256, sum: __m256i, scale: __m256) -> __m256 {
    _mm256_fmadd_ps(
        _mm256_cvtepi32_ps(sum),
        _mm256_permute_ps::<WHICH>(scale),
        total,
    )
}

/// The sum of all lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch::x86) fn sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// Bytes 0, 2, 4… and bytes 1, 3, 5… as words.
#[inline]
#[target_feature(enable = "avx2")]
fn words(bytes: __m256i) -> [__m256i; 2] {
    [
        _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)),
        _mm256_srli_epi16::<8>(bytes),
    ]
}

/// As [`words`], signed.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_words(bytes: __m256i) -> [__m256i; 2] {
    [
        _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)),
        _mm256_srai_epi16::<8>(bytes),
    ]
}

/// The values, padded with zeros.
#[inline]
pub(in crate::arch) fn padded<T: Copy + Default, const N: usize>(values: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_256(x, block),
            None => quantize_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_256(x: &[f32; 256], block: &mut BlockQ16) {
    // Evens, then odds, of each 128-bit lane's words.
    let evens_odds = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
    ));
    let x: &[[[f32; 8]; 4]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [
            load_f32(&x[0]),
            load_f32(&x[1]),
            load_f32(&x[2]),
            load_f32(&x[3]),
        ];
        let (d, inverse) = BlockQ16::scale(largest_bits(x));
        for (h, x) in [[x[0], x[1]], [x[2], x[3]]].into_iter().enumerate() {
            let (low, high) = (rounded(x[0], inverse), rounded(x[1], inverse));
            // Words of the low and high eight values, in lanes (low 4, high 4 | low 4, high 4).
            let words = _mm256_shuffle_epi8(_mm256_packs_epi32(low, high), evens_odds);
            // Quarters of words: (0 2, 8 10, 1 3, 9 11 | 4 6, 12 14, 5 7, 13 15).
            let words =
                _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            let (row, column) = BlockQ16::position(32 * b + 16 * h);
            store_i16(
                block.q[row][column..].first_chunk_mut().expect("8 of 32"),
                _mm256_castsi256_si128(words),
            );
            store_i16(
                block.q[row + 1][column..]
                    .first_chunk_mut()
                    .expect("8 of 32"),
                _mm256_extracti128_si256::<1>(words),
            );
            let sum = _mm256_add_epi32(low, high);
            let sum = _mm_add_epi32(
                _mm256_castsi256_si128(sum),
                _mm256_extracti128_si256::<1>(sum),
            );
            let sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<1>(sum));
            block.d[2 * b + h] = d;
            block.s[2 * b + h] = d * _mm_cvtsi128_si32(sum) as f32;
        }
    }
}

/// `x·inverse` to the nearest integer; NaN becomes 0.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch::x86) fn rounded(x: __m256, inverse: f32) -> __m256i {
    let x = _mm256_mul_ps(x, _mm256_set1_ps(inverse));
    let is_number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(x, x));
    _mm256_and_si256(_mm256_cvtps_epi32(x), is_number)
}

/// The largest bits of magnitudes: as integers, NaN is the largest.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch::x86) fn largest_bits(x: [__m256; 4]) -> u32 {
    let magnitude = _mm256_set1_epi32(i32::MAX);
    let mut max = _mm256_setzero_si256();
    for x in x {
        max = _mm256_max_epu32(max, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
    }
    let max = _mm_max_epu32(
        _mm256_castsi256_si128(max),
        _mm256_extracti128_si256::<1>(max),
    );
    let max = _mm_max_epu32(max, _mm_unpackhi_epi64(max, max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<1>(max));
    _mm_cvtsi128_si32(max).cast_unsigned()
}
