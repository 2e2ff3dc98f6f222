//! Products with decode rows. Weights are words of 16 bits in two vectors, of the values with even
//! and with odd numbers: 16-bit shifts make them from bytes, and [`BlockQ16`] holds activations in
//! that order. Several rows share the unpacking.

use super::elementwise::{F32x4, array, evens, nearest_integers, odds, pair_sums, sum, zero};
use super::unpack::{Factors, UnpackBlocks, with_weights};
use crate::arch::acts::{ActForm, Acts, BlockQ16};
use crate::arch::arrays;
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::scalar;
use crate::arch::table::{Matvec, MatvecFn};
use crate::arch::view::ColumnsMut;
use crate::quant::*;
use half::{bf16, f16};
use std::arch::wasm32::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    macro_rules! q16 {
        ($block:ident) => {
            Matvec {
                form: ActForm::Q16,
                kernel: matvec_q16::<$block, { $block::PER_256 }>,
            }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => with_weights!(dtype, q16, (scalar::KERNELS.matvec)(dtype)),
    }
}

plain_products!(
    "simd128", zero(), F32x4,
    rows: 4, activation_rows: 2, rows_by_one: 8, OneRow { short: 0, ahead: None }
);

fn matvec_q16<B: UnpackBlocks<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    _: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::Q16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    let (w, blocks) = (bytemuck::cast_slice::<u8, B>(w), n * N / 256);
    let groups = n.div_ceil(256);
    // With factors per 16, or with four activation rows, a second row would leave too few registers.
    let rows = if B::FACTORS_PER_16 || y.rows() >= 4 {
        1
    } else {
        2
    };
    for (t, w) in w.chunks(rows * blocks).enumerate() {
        let mut i = 0;
        while let rest @ 1.. = y.rows() - i {
            let m = [1, 2, 2, 4][rest.min(4) - 1];
            let (r, x) = (t * rows, &x[i * groups..][..m * groups]);
            match (w.len() == 2 * blocks, m) {
                (true, 2) => tile::<B, N, 2, 2>(y, r, w, i, x),
                (true, _) => tile::<B, N, 2, 1>(y, r, w, i, x),
                (false, 4) => tile::<B, N, 1, 4>(y, r, w, i, x),
                (false, 2) => tile::<B, N, 1, 2>(y, r, w, i, x),
                (false, _) => tile::<B, N, 1, 1>(y, r, w, i, x),
            }
            i += m;
        }
    }
}

/// Products of `R` weight rows from `r` on with `M` activation rows from `i` on.
#[inline(always)]
fn tile<B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[B],
    i: usize,
    x: &[BlockQ16],
) {
    let mut totals = [[f32x4_splat(0.0); M]; R];
    let (blocks, groups) = (w.len() / R, x.len() / M);
    let (whole, rest) = (blocks / N, blocks % N);
    for g in 0..whole {
        // The blocks of group `g` of each row.
        let mut rows = [group_of(w, g * N); R];
        for r in 1..R {
            rows[r] = group_of(w, r * blocks + g * N);
        }
        let mut row_x = [&x[g]; M];
        for i in 1..M {
            row_x[i] = &x[i * groups + g];
        }
        accumulate(&mut totals, rows, row_x);
    }
    if rest > 0 {
        let mut rows = [[B::zeroed(); N]; R];
        for r in 0..R {
            rows[r][..rest].copy_from_slice(&w[r * blocks + whole * N..][..rest]);
        }
        let x = arrays::from_fn(|i| &x[i * groups + whole]);
        accumulate(&mut totals, rows.each_ref(), x);
    }
    for j in 0..M {
        for k in 0..R {
            y.row(i + j)[r + k] = sum(totals[k][j]);
        }
    }
}

/// `N` blocks from block `at` on.
#[inline(always)]
fn group_of<B, const N: usize>(w: &[B], at: usize) -> &[B; N] {
    w[at..].first_chunk().expect("whole groups of blocks")
}

/// Adds the products of 256 weights of each row with as many of each activation row.
#[inline(always)]
fn accumulate<B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[v128; M]; R],
    w: [&[B; N]; R],
    x: [&BlockQ16; M],
) {
    let vectors = if B::FACTORS_PER_16 { 4 } else { 2 };
    let mut scales = [[[f32x4_splat(0.0); 4]; M]; R];
    for r in 0..R {
        let Factors { scale, offset } = B::factors(w[r]);
        for i in 0..M {
            let [d, s] = factors(x[i], B::FACTORS_PER_16);
            for j in 0..vectors {
                scales[r][i][j] = f32x4_mul(scale[j], d[j]);
                if B::OFFSETS {
                    totals[r][i] = f32x4_add(totals[r][i], f32x4_mul(offset[j], s[j]));
                }
            }
        }
    }
    // Written out, since each takes other lanes of the scales.
    group(totals, w, &scales, x, 0);
    group(totals, w, &scales, x, 1);
    group(totals, w, &scales, x, 2);
    group(totals, w, &scales, x, 3);
    group(totals, w, &scales, x, 4);
    group(totals, w, &scales, x, 5);
    group(totals, w, &scales, x, 6);
    group(totals, w, &scales, x, 7);
}

/// Adds the products of group `b` of 32 weights of each row.
#[inline(always)]
fn group<B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[v128; M]; R],
    w: [&[B; N]; R],
    scales: &[[[v128; 4]; M]; R],
    x: [&BlockQ16; M],
    b: usize,
) {
    let mut words = [[[f32x4_splat(0.0); 2]; 2]; R];
    for r in 0..R {
        let [first, second] = B::bytes(w[r], b);
        words[r] = [
            alternating(first, !B::OFFSETS),
            alternating(second, !B::OFFSETS),
        ];
    }
    for i in 0..M {
        let first = dots::<R>(&words, x[i], b, 0);
        let second = dots::<R>(&words, x[i], b, 1);
        for r in 0..R {
            let (scales, total) = (&scales[r][i], &mut totals[r][i]);
            if B::FACTORS_PER_16 {
                let lane = 2 * (b % 2);
                *total = add_scaled(*total, first[r], scales[b / 2], lane);
                *total = add_scaled(*total, second[r], scales[b / 2], lane + 1);
            } else {
                // Eight products of 2⁸ and 2¹⁵ in a lane.
                let sum = i32x4_add(first[r], second[r]);
                *total = add_scaled(*total, sum, scales[b / 4], b % 4);
            }
        }
    }
}

/// Sums of products of half `h` of group `b` with each weight row.
#[inline(always)]
fn dots<const R: usize>(
    words: &[[[v128; 2]; 2]; R],
    x: &BlockQ16,
    b: usize,
    h: usize,
) -> [v128; R] {
    let eight = |odd: usize| {
        let row = &x.q[b % 2 * 4 + h * 2 + odd][b / 2 * 8..][..8];
        // SAFETY: eight words; the load asks for no alignment.
        unsafe { v128_load(row.as_ptr().cast()) }
    };
    let (even, odd) = (eight(0), eight(1));
    let mut sums = [even; R];
    for r in 0..R {
        sums[r] = i32x4_add(
            i32x4_dot_i16x8(words[r][h][0], even),
            i32x4_dot_i16x8(words[r][h][1], odd),
        );
    }
    sums
}

/// Bytes with even numbers, and those with odd ones, as words.
#[inline(always)]
fn alternating(bytes: v128, signed: bool) -> [v128; 2] {
    if signed {
        [i16x8_shr(i16x8_shl(bytes, 8), 8), i16x8_shr(bytes, 8)]
    } else {
        [v128_and(bytes, u16x8_splat(0xFF)), u16x8_shr(bytes, 8)]
    }
}

/// `total + sum·scale[lane]`.
#[inline(always)]
fn add_scaled(total: v128, sum: v128, scale: v128, lane: usize) -> v128 {
    // The lane is a constant once this is inlined; the instruction takes an immediate.
    let scale = match lane {
        0 => i32x4_shuffle::<0, 0, 0, 0>(scale, scale),
        1 => i32x4_shuffle::<1, 1, 1, 1>(scale, scale),
        2 => i32x4_shuffle::<2, 2, 2, 2>(scale, scale),
        _ => i32x4_shuffle::<3, 3, 3, 3>(scale, scale),
    };
    f32x4_add(total, f32x4_mul(f32x4_convert_i32x4(sum), scale))
}

/// The scales of activations, and the factors on the weights' offsets: per 32 values in the first
/// two vectors, or per 16.
#[inline(always)]
fn factors(x: &BlockQ16, per_16: bool) -> [[v128; 4]; 2] {
    let ([a, b, c, d], s) = (sixteen(&x.d), sixteen(&x.s));
    if per_16 {
        [[a, b, c, d], s]
    } else {
        [
            [evens(a, b), evens(c, d), a, a],
            [pair_sums(s[0], s[1]), pair_sums(s[2], s[3]), a, a],
        ]
    }
}

#[inline(always)]
pub(super) fn sixteen(x: &[f32; 16]) -> [v128; 4] {
    let four: &[[f32; 4]; 4] = bytemuck::cast_ref(x);
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    let load = |x: &[f32; 4]| unsafe { v128_load(x.as_ptr().cast()) };
    [
        load(&four[0]),
        load(&four[1]),
        load(&four[2]),
        load(&four[3]),
    ]
}

/// The largest bits of the magnitudes of 32 values: the bits of positive numbers sort as the
/// numbers do, NaN last.
#[inline(always)]
pub(super) fn largest_bits(x: &[[v128; 4]; 2]) -> u32 {
    let mut max = u32x4_splat(0);
    for x in x.as_flattened() {
        max = u32x4_max(max, f32x4_abs(*x));
    }
    array(max).map(f32::to_bits).into_iter().fold(0, u32::max)
}

/// Rounds a row of activations, with exactly the results of the scalar level.
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        let mut values = [0.0; 256];
        values[..x.len()].copy_from_slice(x);
        quantize_256(&values, block);
    }
}

fn quantize_256(x: &[f32; 256], block: &mut BlockQ16) {
    let x: &[[[f32; 16]; 2]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [sixteen(&x[0]), sixteen(&x[1])];
        let (d, inverse) = BlockQ16::scale(largest_bits(&x));
        for (h, x) in x.iter().enumerate() {
            // NaN becomes 0.
            let q = arrays::map(*x, |x| integers(f32x4_mul(x, f32x4_splat(inverse))));
            let (row, column) = (b % 2 * 4 + 2 * h, b / 2 * 8);
            let low = i16x8_narrow_i32x4(evens(q[0], q[1]), evens(q[2], q[3]));
            let high = i16x8_narrow_i32x4(odds(q[0], q[1]), odds(q[2], q[3]));
            for (row, words) in [(row, low), (row + 1, high)] {
                let to = &mut block.q[row][column..][..8];
                // SAFETY: room for eight words; the store asks for no alignment.
                unsafe { v128_store(to.as_mut_ptr().cast(), words) };
            }
            let i = 2 * b + h;
            block.d[i] = d;
            block.s[i] =
                d * lane_sum(i32x4_add(i32x4_add(q[0], q[1]), i32x4_add(q[2], q[3]))) as f32;
        }
    }
}

/// The nearest integers to numbers below 2²², ties to even, and 0 for NaN.
#[inline(always)]
pub(super) fn integers(x: v128) -> v128 {
    v128_and(nearest_integers(x), f32x4_eq(x, x))
}

/// Sum of integer lanes.
#[inline(always)]
pub(super) fn lane_sum(x: v128) -> i32 {
    let x = i32x4_add(x, i32x4_shuffle::<2, 3, 0, 1>(x, x));
    i32x4_extract_lane::<0>(i32x4_add(x, i32x4_shuffle::<1, 0, 3, 2>(x, x)))
}
