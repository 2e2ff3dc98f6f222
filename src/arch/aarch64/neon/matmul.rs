//! Products of weights with a small batch of activation rows.
//!
//! A block format only says how 256 of its weights become bytes, scales and offsets
//! ([`UnpackBlocks`]); the product is the same for all formats and all Arm levels, which differ in
//! how 16 bytes are multiplied by 16 ([`Dot`]). Activations are 16-bit integers in two planes of
//! bytes ([`BlockQ16`]): the sums of the high plane are shifted and those of the low plane added to
//! them, so that a product takes twice the multiplications of 8-bit activations, and everything
//! else once.
//!
//! Two weight rows at a time share the loads of an activation row where registers allow. Up to four
//! activation rows share the unpacking of the weights.
//!
//! A row's result is summed in four lanes: each takes every fourth product, or pair of products, of
//! 32 columns, as `Dot` makes them (so that the levels' bits differ), in the order of columns; the
//! offsets of 256 columns come before their products; the lanes are added at the end. It does not
//! depend on how many rows share the unpacking.
//!
//! Instructions per weight, all counted (`tests/neon_instructions.py`), and the billions of weights
//! per second that four 128-bit pipes at 4.4 GHz (a core of Apple's M4) multiply at most if each of
//! them took one; in brackets GB/s of weights:
//!
//! | | Q8_0 | Q4_0 | Q4_K | Q6_K |
//! |---|---|---|---|---|
//! | here: `smull`, `smlal2`, `sadalp` for 16 weights and a plane | 0.84: 21 (22) | 0.77: 23 (13) | 0.78: 23 (13) | 1.05: 17 (14) |
//! | `sdot` for them | 0.43: 41 (44) | 0.50: 35 (20) | 0.53: 33 (19) | 0.81: 22 (18) |
//!
//! Instructions executed per product by 1, 2 and 4 activation rows, ends of rows of 1024 included:
//!
//! | | Q8_0 | Q4_0 |
//! |---|---|---|
//! | here | 0.91, 0.81, 0.80 | 0.83, 0.79, 0.82 |
//! | `sdot` | 0.50, 0.41, 0.43 | 0.56, 0.45, 0.46 |

use super::elementwise::{F32x4, zero};
use super::unpack::{Factors, UnpackBlocks, with_weights};
use crate::arch::acts::{ActForm, Acts, BlockQ16};
use crate::arch::arrays;
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::scalar;
use crate::arch::table::{Matvec, MatvecFn};
use crate::arch::view::ColumnsMut;
use crate::quant::*;
use half::{bf16, f16};
use std::arch::aarch64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => matvec_ints!(dtype, (scalar::KERNELS.matvec)(dtype)),
    }
}

/// The product of a level for a block format, from its `matvec_q16`, or `$other`.
macro_rules! matvec_ints {
    ($dtype:expr, $other:expr) => {{
        macro_rules! q16 {
            ($block:ident) => {
                Matvec {
                    form: ActForm::Q16,
                    kernel: matvec_q16::<$block, { $block::PER_256 }>,
                }
            };
        }
        with_weights!($dtype, q16, $other)
    }};
}
pub(in crate::arch) use matvec_ints;

/// A level's products of signed bytes.
pub(in crate::arch) trait Dot {
    /// Adds the 16 products `w·x`, distributed over the lanes; the high bytes of activations come
    /// first, so that no 16-bit sum of two of them overflows unless `WHOLE_BYTES`, where `w` may be
    /// −128.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn dot<const WHOLE_BYTES: bool>(acc: int32x4_t, w: int8x16_t, x: int8x16_t)
    -> int32x4_t;
}

/// The multiply-adds of ARMv8.0.
enum Smull {}

impl Dot for Smull {
    #[inline(always)]
    unsafe fn dot<const WHOLE_BYTES: bool>(
        acc: int32x4_t,
        w: int8x16_t,
        x: int8x16_t,
    ) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe {
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            if WHOLE_BYTES {
                // 2·128·128 does not fit 16 bits.
                vpadalq_s16(vpadalq_s16(acc, low), vmull_high_s8(w, x))
            } else {
                vpadalq_s16(acc, vmlal_high_s8(low, w, x))
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn matvec_q16<B: UnpackBlocks<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    _: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::Q16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    // SAFETY: this function has the features.
    unsafe { matvec::<Smull, B, N>(y, w, x, n) }
}

/// 32 activations as integers: their high bytes, then the low ones.
type Integers = [[int8x16_t; 2]; 2];

/// The scales of activations, and the factors on the weights' offsets: per 32 values in the first
/// two registers, or per 16.
#[inline]
#[target_feature(enable = "neon")]
fn factors(x: &BlockQ16, per_16: bool) -> [[float32x4_t; 4]; 2] {
    if per_16 {
        [sixteen(&x.d), sixteen(&x.s)]
    } else {
        [firsts(&x.d), pair_sums(&x.s)]
    }
}

/// The integers of group `b`.
#[inline]
#[target_feature(enable = "neon")]
fn integers(x: &BlockQ16, b: usize) -> Integers {
    let (high, low): (&[[i8; 32]; 8], &[[i8; 32]; 8]) =
        (bytemuck::cast_ref(&x.high), bytemuck::cast_ref(&x.low));
    [two(&high[b]), two(&low[b])]
}

/// Sums of the products of `w` with 32 integers, or with the half of both that `only` names.
///
/// # Safety
/// The CPU must have the level's features.
#[inline(always)]
unsafe fn dot_planes<D: Dot, const WHOLE_BYTES: bool>(
    w: [int8x16_t; 2],
    [high, low]: Integers,
    only: Option<usize>,
) -> int32x4_t {
    // SAFETY: the caller's promise. Up to eight products of 2⁷ and 2¹⁵ in a lane.
    unsafe {
        let high = vshlq_n_s32::<8>(dot::<D, WHOLE_BYTES>(vdupq_n_s32(0), w, high, only));
        dot::<D, WHOLE_BYTES>(high, w, low, only)
    }
}

/// Adds the products of 32 bytes, or of 16 of them.
#[inline(always)]
unsafe fn dot<D: Dot, const WHOLE_BYTES: bool>(
    acc: int32x4_t,
    w: [int8x16_t; 2],
    x: [int8x16_t; 2],
    only: Option<usize>,
) -> int32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        match only {
            Some(h) => D::dot::<WHOLE_BYTES>(acc, w[h], x[h]),
            None => D::dot::<WHOLE_BYTES>(D::dot::<WHOLE_BYTES>(acc, w[0], x[0]), w[1], x[1]),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn two(x: &[i8; 32]) -> [int8x16_t; 2] {
    // SAFETY: 32 readable bytes; the loads ask for no alignment.
    unsafe { [vld1q_s8(x.as_ptr()), vld1q_s8(x.as_ptr().add(16))] }
}

/// The product, to be inlined into a function that has the features of `D`.
///
/// # Safety
/// The CPU must have them.
#[inline(always)]
pub(in crate::arch) unsafe fn matvec<D: Dot, B: UnpackBlocks<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &[BlockQ16],
    n: usize,
) {
    let (w, blocks) = (bytemuck::cast_slice::<u8, B>(w), n * N / 256);
    let groups = n.div_ceil(256);
    // With factors per 16, a second row would leave too few registers.
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
            // SAFETY: the caller's promise.
            unsafe {
                match (w.len() == 2 * blocks, m) {
                    (true, 2) => tile::<D, B, N, 2, 2>(y, r, w, i, x),
                    (true, _) => tile::<D, B, N, 2, 1>(y, r, w, i, x),
                    (false, 4) => tile::<D, B, N, 1, 4>(y, r, w, i, x),
                    (false, 2) => tile::<D, B, N, 1, 2>(y, r, w, i, x),
                    (false, _) => tile::<D, B, N, 1, 1>(y, r, w, i, x),
                }
            }
            i += m;
        }
    }
}

/// Products of `R` weight rows from `r` on with `M` activation rows from `i` on.
#[inline(always)]
unsafe fn tile<D: Dot, B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[B],
    i: usize,
    x: &[BlockQ16],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [[vdupq_n_f32(0.0); M]; R];
        let (blocks, groups) = (w.len() / R, x.len() / M);
        let (whole, rest) = (blocks / N, blocks % N);
        for g in 0..whole {
            // The blocks of group `g` of each row.
            let rows = arrays::from_fn(|r| &*w.as_ptr().add(r * blocks + g * N).cast::<[B; N]>());
            accumulate::<D, B, N, R, M>(&mut totals, rows, arrays::from_fn(|i| &x[i * groups + g]));
        }
        if rest > 0 {
            let mut rows = [[B::zeroed(); N]; R];
            for r in 0..R {
                rows[r][..rest].copy_from_slice(&w[r * blocks + whole * N..][..rest]);
            }
            let x = arrays::from_fn(|i| &x[i * groups + whole]);
            accumulate::<D, B, N, R, M>(&mut totals, rows.each_ref(), x);
        }
        for j in 0..M {
            for k in 0..R {
                y.row(i + j)[r + k] = vaddvq_f32(totals[k][j]);
            }
        }
    }
}

/// Adds the products of 256 weights of each row with as many of each activation row.
#[inline(always)]
unsafe fn accumulate<D: Dot, B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[float32x4_t; M]; R],
    w: [&[B; N]; R],
    x: [&BlockQ16; M],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let registers = if B::FACTORS_PER_16 { 4 } else { 2 };
        let mut scales = [[[vdupq_n_f32(0.0); 4]; M]; R];
        for r in 0..R {
            let Factors { scale, offset } = B::factors(w[r]);
            for i in 0..M {
                let [d, s] = factors(x[i], B::FACTORS_PER_16);
                for j in 0..registers {
                    scales[r][i][j] = vmulq_f32(scale[j], d[j]);
                    if B::OFFSETS {
                        totals[r][i] = vfmaq_f32(totals[r][i], offset[j], s[j]);
                    }
                }
            }
        }
        // Written out, since each takes other lanes of the scales.
        group::<D, B, N, R, M>(totals, w, &scales, x, 0);
        group::<D, B, N, R, M>(totals, w, &scales, x, 1);
        group::<D, B, N, R, M>(totals, w, &scales, x, 2);
        group::<D, B, N, R, M>(totals, w, &scales, x, 3);
        group::<D, B, N, R, M>(totals, w, &scales, x, 4);
        group::<D, B, N, R, M>(totals, w, &scales, x, 5);
        group::<D, B, N, R, M>(totals, w, &scales, x, 6);
        group::<D, B, N, R, M>(totals, w, &scales, x, 7);
    }
}

/// Adds the products of group `b` of 32 weights of each row.
#[inline(always)]
unsafe fn group<D: Dot, B: UnpackBlocks<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[float32x4_t; M]; R],
    w: [&[B; N]; R],
    scales: &[[[float32x4_t; 4]; M]; R],
    x: [&BlockQ16; M],
    b: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut bytes = [[vdupq_n_s8(0); 2]; R];
        for r in 0..R {
            bytes[r] = B::bytes(w[r], b);
        }
        for i in 0..M {
            let x = integers(x[i], b);
            for r in 0..R {
                let (w, scales) = (bytes[r], &scales[r][i]);
                if B::FACTORS_PER_16 {
                    for h in 0..2 {
                        let sum = dot_32::<D, B, N>(w, x, Some(h));
                        totals[r][i] =
                            add_scaled(totals[r][i], sum, scales[b / 2], 2 * (b % 2) + h);
                    }
                } else {
                    let sum = dot_32::<D, B, N>(w, x, None);
                    totals[r][i] = add_scaled(totals[r][i], sum, scales[b / 4], b % 4);
                }
            }
        }
    }
}

/// See [`dot_planes`].
#[inline(always)]
unsafe fn dot_32<D: Dot, B: UnpackBlocks<N>, const N: usize>(
    w: [int8x16_t; 2],
    x: Integers,
    only: Option<usize>,
) -> int32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        if B::WHOLE_BYTES {
            dot_planes::<D, true>(w, x, only)
        } else {
            dot_planes::<D, false>(w, x, only)
        }
    }
}

/// `total + sum·scale[lane]`.
#[inline(always)]
unsafe fn add_scaled(
    total: float32x4_t,
    sum: int32x4_t,
    scale: float32x4_t,
    lane: usize,
) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = vcvtq_f32_s32(sum);
        // The lane is a constant once this is inlined; the instruction takes an immediate.
        match lane {
            0 => vfmaq_laneq_f32::<0>(total, sum, scale),
            1 => vfmaq_laneq_f32::<1>(total, sum, scale),
            2 => vfmaq_laneq_f32::<2>(total, sum, scale),
            _ => vfmaq_laneq_f32::<3>(total, sum, scale),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn sixteen(x: &[f32; 16]) -> [float32x4_t; 4] {
    let [a, b, c, d]: &[[f32; 4]; 4] = bytemuck::cast_ref(x);
    [load(a), load(b), load(c), load(d)]
}

/// The first of each two.
#[inline]
#[target_feature(enable = "neon")]
fn firsts(x: &[f32; 16]) -> [float32x4_t; 4] {
    let [a, b, c, d] = sixteen(x);
    [vuzp1q_f32(a, b), vuzp1q_f32(c, d), a, a]
}

/// The sum of each two.
#[inline]
#[target_feature(enable = "neon")]
fn pair_sums(x: &[f32; 16]) -> [float32x4_t; 4] {
    let [a, b, c, d] = sixteen(x);
    [vpaddq_f32(a, b), vpaddq_f32(c, d), a, a]
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn load(x: &[f32; 4]) -> float32x4_t {
    // SAFETY: 16 readable bytes.
    unsafe { vld1q_f32(x.as_ptr()) }
}

// Six activation rows by four weight rows need more than 32 registers: 0.56 instructions per
// product of F32 and 0.82 of BF16, instead of 0.43 and 0.46; F16 takes 0.56 instead of 0.58.
plain_products!(
    "neon", zero(), F32x4,
    rows: 4, activation_rows: 4, rows_by_one: 8, OneRow { short: 0, ahead: None }
);

/// The values, padded with zeros.
fn padded<T: Copy + Default, const N: usize>(values: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "neon")]
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_256(x, block),
            None => quantize_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn quantize_256(x: &[f32; 256], block: &mut BlockQ16) {
    let x: &[[[f32; 16]; 2]; 8] = bytemuck::cast_ref(x);
    let high: &mut [[i8; 16]; 16] = bytemuck::cast_mut(&mut block.high);
    let low: &mut [[i8; 16]; 16] = bytemuck::cast_mut(&mut block.low);
    for (b, x) in x.iter().enumerate() {
        let x = [sixteen(&x[0]), sixteen(&x[1])];
        let mut max = vdupq_n_u32(0);
        for x in x.as_flattened() {
            max = vmaxq_u32(max, vreinterpretq_u32_f32(vabsq_f32(*x)));
        }
        let (d, inverse) = BlockQ16::scale(vmaxvq_u32(max));
        for (h, x) in x.iter().enumerate() {
            let mut q = [vdupq_n_s32(0); 4];
            for (q, x) in q.iter_mut().zip(x) {
                // To nearest, ties to even; NaN becomes 0.
                *q = vcvtnq_s32_f32(vmulq_n_f32(*x, inverse));
            }
            let (i, [low, high]) = (2 * b + h, [&mut low[2 * b + h], &mut high[2 * b + h]]);
            let words = [
                vmovn_high_s32(vmovn_s32(q[0]), q[1]),
                vmovn_high_s32(vmovn_s32(q[2]), q[3]),
            ];
            store(low, vmovn_high_s16(vmovn_s16(words[0]), words[1]));
            // Rounded, because the low bytes are signed.
            store(
                high,
                vrshrn_high_n_s16::<8>(vrshrn_n_s16::<8>(words[0]), words[1]),
            );
            let sum = vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
            block.d[i] = d;
            block.s[i] = d * sum as f32;
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [i8; 16], x: int8x16_t) {
    // SAFETY: 16 writable bytes.
    unsafe { vst1q_s8(to.as_mut_ptr(), x) }
}
