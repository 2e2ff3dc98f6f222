//! Products of weights with decode rows.
//!
//! A format only says how 256 of its weights become unsigned bytes and 16 scales
//! ([`UnpackPlanes::unpack`]); the product is the same for all. Activations are 16-bit integers in
//! two planes of bytes ([`BlockP16`]): `vpdpbusd` multiplies as many weights by both planes as
//! `vpdpwssd` by words, but takes bytes as they are. The order of weights and activations
//! is such that a lane of 32 bits sums the products of 16 values that share a scale, so that one
//! conversion and one multiplication of scales serve 256 weights.
//!
//! Multiplications and multiply-adds have two ports, which the loop is limited by: for 256 weights
//! and a row 8 products of bytes and 2 for scales, or 3 where a format has a minimum. The zero
//! point of other formats is taken off the integers.

use super::common::{load_64, load_f32, store_64, store_f32};
use super::elementwise::{F32x16, zero};
use super::unpack::planes::{self, UnpackPlanes, Unpacked, starts};
use crate::arch::acts::{ActForm, Acts, BlockP16};
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::scalar;
use crate::arch::table::{Matvec, MatvecFn};
use crate::arch::view::ColumnsMut;
use crate::arch::x86::avx2::unpack::{Groups, with_groups};
use crate::arch::x86::avx2::{padded, prefetch};
use crate::quant::*;
use bytemuck::Zeroable;
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    macro_rules! p16 {
        ($block:ident) => {
            Matvec {
                form: ActForm::P16,
                kernel: matvec::<<$block as Groups>::Of256>,
            }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => with_groups!(dtype, p16, (scalar::KERNELS.matvec)(dtype)),
    }
}

plain_products!(
    "avx512f,avx512bw,avx512vl,avx512dq", zero(), F32x16,
    rows: 4, activation_rows: 6, rows_by_one: 8, OneRow { short: 2048, ahead: Some(512) }
);

/// Weight rows at a time: the steps of one row depend on each other. From L2 (Zen 4) two at a time
/// are 1.1 times as fast as one; four are little faster than two, and slower from memory with two
/// threads.
const TILE: usize = 2;

/// Bytes of the L1 cache, of all cores with this level at least. Where an activation row fits
/// together with one weight row but not with two, two at a time take 13 to 18 % longer from memory
/// (Q8_0 of 8192 values, Q4_0 of 9216); where it fits with none, one at a time takes 1.6 times as
/// long.
const L1: usize = 32 << 10;

/// Prefetch distance for weights, in bytes; without prefetching, decoding takes three times as long
/// where the CPU's own prefetcher is off, as in some virtual machines. From memory, rows of 1152
/// bytes reach 0.72 of the streaming bandwidth with 1 KiB, 0.84 with 4 KiB, 0.91 with 8 KiB, 0.88
/// with 16 KiB (Zen 5). Decoding on Zen 4 takes as long with 4 or 16 KiB, and a sixth longer with
/// 2.
const AHEAD: usize = 8192;

/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in L2
/// while all weight rows of a task go by.
const MANY: usize = 32;

/// Weight rows that are multiplied by many activation rows at a time: as many as there are
/// registers for. With two, 32 activation rows of Q8_0 take 7 % longer, with eight 6 %.
const FOUR: usize = 4;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn matvec<B: UnpackPlanes>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::P16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    let (format, blocks) = (dtype.float_format(), BlockP16::per_row(n));
    let row_bytes = n / format.block_elems * format.block_bytes;
    if x.len() > blocks {
        let (tiles, last) = w.split_at(w.len() / row_bytes / FOUR * FOUR * row_bytes);
        for (c, x) in x.chunks(MANY * blocks).enumerate() {
            many_rows::<B, FOUR>(y, 0, tiles, c * MANY, x, blocks, row_bytes);
            many_rows::<B, 1>(
                y,
                tiles.len() / row_bytes,
                last,
                c * MANY,
                x,
                blocks,
                row_bytes,
            );
        }
        return;
    }
    let fit = |rows: usize| size_of_val(x) + rows * row_bytes <= L1;
    let n_tiled = if fit(1) && !fit(TILE) {
        0
    } else {
        y.cols() / TILE * TILE
    };
    let (tiles, last) = y.row(0).split_at_mut(n_tiled);
    let (w, w_last) = w.split_at(n_tiled * row_bytes);
    let twice = match x.last() {
        Some(x) => first_half_twice(x),
        None => BlockP16::zeroed(),
    };
    let tiles = tiles.as_chunks_mut::<TILE>().0;
    for (t, w) in w.chunks_exact(TILE * row_bytes).enumerate() {
        tiles[t] = rows::<B, TILE>(w, x, &twice);
    }
    for (r, w) in w_last.chunks_exact(row_bytes).enumerate() {
        [last[r]] = rows::<B, 1>(w, x, &twice);
    }
}

/// Products of weight rows from `first` on, `R` at a time, with at most [`MANY`] activation rows
/// from row `i` on: the same sums as [`rows`] computes, added in the same order.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn many_rows<B: UnpackPlanes, const R: usize>(
    y: &mut ColumnsMut<'_>,
    first: usize,
    w: &[u8],
    i: usize,
    x: &[BlockP16],
    blocks: usize,
    row_bytes: usize,
) {
    let mut totals = [[_mm512_setzero_ps(); R]; MANY];
    let totals = &mut totals[..x.len() / blocks];
    for (t, w) in w.chunks_exact(R * row_bytes).enumerate() {
        let mut ahead = w[(R - 1) * row_bytes..]
            .as_ptr()
            .cast::<i8>()
            .wrapping_add(AHEAD);
        totals.fill([_mm512_setzero_ps(); R]);
        let (w, ends) = rows_of::<B, R>(w);
        for k in 0..blocks {
            if i == 0 {
                ahead = prefetch(ahead, R * size_of::<B>());
            }
            let weights = if k < w[0].len() {
                unpacked(&w, k)
            } else {
                unpacked_ends::<B, R>(&ends)
            };
            for (j, totals) in totals.iter_mut().enumerate() {
                multiply::<B, R>(totals, &weights, &x[j * blocks + k]);
            }
        }
        for (j, totals) in totals.iter().enumerate() {
            let y = &mut y.row(i + j)[first + t * R..][..R];
            for r in 0..R {
                y[r] = _mm512_reduce_add_ps(totals[r]);
            }
        }
    }
}

/// Products of `R` weight rows with an activation row. A lane sums the products of every 16th group
/// of 16 columns, in the order of columns; the lanes are added at the end. `twice` has the last
/// activations in both halves.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn rows<B: UnpackPlanes, const R: usize>(w: &[u8], x: &[BlockP16], twice: &BlockP16) -> [f32; R] {
    let mut ahead = w[(R - 1) * (w.len() / R)..]
        .as_ptr()
        .cast::<i8>()
        .wrapping_add(AHEAD);
    let mut totals = [_mm512_setzero_ps(); R];
    let (w, ends) = rows_of::<B, R>(w);
    let n = w[0].len();
    let (x, x_end) = x.split_at(n);
    if B::UNPACKS_AHEAD && n > 0 {
        let mut weights = unpacked(&w, 0);
        for b in 1..n {
            ahead = prefetch(ahead, R * size_of::<B>());
            let next = unpacked(&w, b);
            multiply::<B, R>(&mut totals, &weights, &x[b - 1]);
            weights = next;
        }
        ahead = prefetch(ahead, R * size_of::<B>());
        multiply::<B, R>(&mut totals, &weights, &x[n - 1]);
    } else {
        for b in 0..n {
            ahead = prefetch(ahead, R * size_of::<B>());
            multiply::<B, R>(&mut totals, &unpacked(&w, b), &x[b]);
        }
    }
    if let [x] = x_end {
        prefetch(ahead, R * size_of::<B>());
        if R == 2 && ends[0].len() <= size_of::<B>() / 2 {
            add_two_ends::<B>(&mut totals, [ends[0], ends[R - 1]], twice);
        } else {
            multiply::<B, R>(&mut totals, &unpacked_ends::<B, R>(&ends), x);
        }
    }
    let mut y = [0.0; R];
    if R == 2 {
        [y[0], y[R - 1]] = two_sums(totals[0], totals[R - 1]);
    } else {
        for r in 0..R {
            y[r] = _mm512_reduce_add_ps(totals[r]);
        }
    }
    y
}

/// The sums of the lanes of two registers, added in the order of `_mm512_reduce_add_ps`.
#[inline]
#[target_feature(enable = "avx512f")]
fn two_sums(a: __m512, b: __m512) -> [f32; 2] {
    let x = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let x = _mm512_add_ps(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
    let x = _mm512_add_ps(x, _mm512_permute_ps::<0b01_00_11_10>(x));
    let x = _mm512_add_ps(x, _mm512_permute_ps::<0b10_11_00_01>(x));
    let second = _mm512_extractf32x4_ps::<2>(x);
    [_mm512_cvtss_f32(x), _mm_cvtss_f32(second)]
}

/// Adds the products of the ends of two rows, each at most half as long as 256 weights, which are
/// multiplied together: one in the low halves of registers, the other in the high ones. To the
/// other lanes of its row each would add zeros.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn add_two_ends<B: UnpackPlanes>(totals: &mut [__m512], ends: [&[u8]; 2], twice: &BlockP16) {
    let [first, second] = totals else {
        unreachable!("two rows")
    };
    let mut both = [_mm512_shuffle_f32x4::<0b01_00_01_00>(*first, *second)];
    // SAFETY: this function has the features.
    let weights = unsafe { B::unpack_ends(ends) };
    multiply::<B, 1>(&mut both, &[weights], twice);
    *first = _mm512_shuffle_f32x4::<0b11_10_01_00>(both[0], *first);
    *second = _mm512_shuffle_f32x4::<0b11_10_11_10>(both[0], *second);
}

/// The first 128 activations, and again.
#[inline]
#[target_feature(enable = "avx512f")]
fn first_half_twice(x: &BlockP16) -> BlockP16 {
    let mut twice = *x;
    for line in bytemuck::cast_mut::<_, [[u8; 64]; 11]>(&mut twice) {
        let low = load_64(line);
        store_64(line, _mm512_shuffle_i64x2::<0b01_00_01_00>(low, low));
    }
    twice
}

/// Splits `w` into the whole 256 weights of `R` rows, and their ends.
#[inline(always)]
fn rows_of<B: UnpackPlanes, const R: usize>(w: &[u8]) -> ([&[B]; R], [&[u8]; R]) {
    let bytes = w.len() / R;
    let n = bytes / size_of::<B>();
    let whole = n * size_of::<B>();
    // `from_fn` would leave its closure a call, as it is not compiled for this level.
    let (mut blocks, mut ends): ([&[B]; R], [&[u8]; R]) = ([&[]; R], [&[]; R]);
    for r in 0..R {
        let row = &w[r * bytes..][..bytes];
        blocks[r] = &bytemuck::cast_slice(&row[..whole])[..n];
        ends[r] = &row[whole..];
    }
    (blocks, ends)
}

/// Unpacks the ends of rows, each with less than 256 weights.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn unpacked_ends<B: UnpackPlanes, const R: usize>(ends: &[&[u8]; R]) -> [Unpacked; R] {
    let mut weights = [Unpacked::none(); R];
    for r in 0..R {
        let (first, second) = ends[r].split_at(ends[r].len().min(size_of::<B>() / 2));
        // SAFETY: this function has the features.
        weights[r] = unsafe { B::unpack_ends([first, second]) };
    }
    weights
}

/// Unpacks block `b` of each row.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn unpacked<B: UnpackPlanes, const R: usize>(w: &[&[B]; R], b: usize) -> [Unpacked; R] {
    let mut weights = [Unpacked::none(); R];
    // Not a loop: the compiler leaves long ones as they are, and then clears this array each time,
    // in memory.
    macro_rules! unpack {
        ($($r:literal)*) => {$(
            if $r < R {
                // SAFETY: this function has the features.
                weights[$r] = unsafe { w[$r][b].unpack() };
            }
        )*};
    }
    const { assert!(R <= 4) };
    unpack!(0 1 2 3);
    weights
}

/// Adds the products of 256 weights of each row with as many activations.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn multiply<B: UnpackPlanes, const R: usize>(
    totals: &mut [__m512; R],
    weights: &[Unpacked; R],
    x: &BlockP16,
) {
    // 16 products of w ≤ 255 and |x| ≤ 2¹⁵ in a lane, and its start: below 2²⁸. Two sums, though
    // one chain would do: the CPU's scheduler cannot hold that many waiting instructions.
    let start = _mm512_mullo_epi32(load_64(bytemuck::cast_ref(&x.sums)), starts::<B>());
    let (mut high, mut low) = ([_mm512_setzero_si512(); R], [start; R]);
    for j in 0..4 {
        let x_high = load_64(bytemuck::cast_ref(&x.high[j]));
        let x_low = load_64(bytemuck::cast_ref(&x.low[j]));
        for r in 0..R {
            high[r] = _mm512_dpbusd_epi32(high[r], weights[r].w[j], x_high);
            low[r] = _mm512_dpbusd_epi32(low[r], weights[r].w[j], x_low);
        }
    }
    let (d, s) = (load_f32(&x.d), load_f32(&x.s));
    for r in 0..R {
        let Unpacked { scale, offset, .. } = weights[r];
        if B::ZERO_POINT == 0 {
            totals[r] = _mm512_fmadd_ps(offset, s, totals[r]);
        }
        let sums = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high[r]), low[r]));
        totals[r] = _mm512_fmadd_ps(sums, _mm512_mul_ps(scale, d), totals[r]);
    }
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        match x.first_chunk() {
            Some(x) => planes_256(x, block),
            None => planes_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn planes_256(x: &[f32; 256], block: &mut BlockP16) {
    let x: &[[f32; 16]; 16] = bytemuck::cast_ref(x);
    let (d, inverse) = scales(x, BlockP16::MAX);
    let (mut high, mut low) = ([_mm_setzero_si128(); 16], [_mm_setzero_si128(); 16]);
    for i in 0..16 {
        let q = rounded(load_f32(&x[i]), inverse[i]);
        low[i] = _mm512_cvtepi32_epi8(q);
        high[i] = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(
            q,
            _mm512_set1_epi32(128),
        )));
    }
    let (high, low) = (
        planes::in_order(fourths(high)),
        planes::in_order(fourths(low)),
    );
    let (mut high_sum, mut low_sum) = (_mm512_setzero_si512(), _mm512_setzero_si512());
    for r in 0..4 {
        store_64(bytemuck::cast_mut(&mut block.high[r]), high[r]);
        store_64(bytemuck::cast_mut(&mut block.low[r]), low[r]);
        high_sum = _mm512_dpbusd_epi32(high_sum, _mm512_set1_epi8(1), high[r]);
        low_sum = _mm512_dpbusd_epi32(low_sum, _mm512_set1_epi8(1), low[r]);
    }
    let sums = _mm512_add_epi32(_mm512_slli_epi32::<8>(high_sum), low_sum);
    store_f32(&mut block.d, d);
    store_f32(&mut block.s, _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums)));
    store_64(bytemuck::cast_mut(&mut block.sums), sums);
}

/// `BlockQ16::scale` of each 32 values, for both of their halves, and the inverses.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales(x: &[[f32; 16]; 16], largest_integer: i16) -> (__m512, [f32; 16]) {
    let magnitude = |i: usize| {
        _mm512_and_si512(
            _mm512_castps_si512(load_f32(&x[i])),
            _mm512_set1_epi32(i32::MAX),
        )
    };
    // Bits of magnitudes sort as integers do, NaN last. Of eight registers: the largest lane of
    // each.
    let max = |a, b| _mm512_max_epu32(a, b);
    let mut largest = [_mm512_setzero_si512(); 8];
    for b in 0..8 {
        largest[b] = max(magnitude(2 * b), magnitude(2 * b + 1));
    }
    let mut twos = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        let (a, b) = (largest[2 * i], largest[2 * i + 1]);
        twos[i] = max(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    let mut fours = [_mm512_setzero_si512(); 2];
    for i in 0..2 {
        let (a, b) = (twos[2 * i], twos[2 * i + 1]);
        fours[i] = max(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    let eight = max(
        _mm512_shuffle_i64x2::<0b01_00_01_00>(fours[0], fours[1]),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(fours[0], fours[1]),
    );
    let eight = max(eight, _mm512_shuffle_i64x2::<0b10_11_00_01>(eight, eight));
    let each_twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9, 10, 10, 11, 11);
    let largest = _mm512_castsi512_ps(_mm512_permutexvar_epi32(each_twice, eight));

    let most = _mm512_set1_ps(f32::from(largest_integer));
    let d = _mm512_div_ps(largest, most);
    // As there, NaN is not small.
    let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(d, _mm512_set1_ps(f32::MIN_POSITIVE));
    let mut inverse = [0.0; 16];
    store_f32(&mut inverse, _mm512_maskz_div_ps(some, most, largest));
    (_mm512_maskz_mov_ps(some, d), inverse)
}

/// Four registers: the 128 bits `l` of register `q` are those of `x[4l + q]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn fourths(x: [__m128i; 16]) -> [__m512i; 4] {
    let mut fourths = [_mm512_setzero_si512(); 4];
    for q in 0..4 {
        let (low, high) = (
            _mm256_set_m128i(x[4 + q], x[q]),
            _mm256_set_m128i(x[12 + q], x[8 + q]),
        );
        fourths[q] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    fourths
}

/// `x·inverse` to the nearest integer; NaN becomes 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512, inverse: f32) -> __m512i {
    let x = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
    _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x)
}
