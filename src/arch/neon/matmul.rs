//! Products of weights with few activation rows.
//!
//! A block format only says how 256 of its weights become bytes, scales and offsets ([`Weights`]);
//! the product is the same for all formats and all Arm levels, which differ in how 16 bytes are
//! multiplied by 16 ([`Dot`]). Activations are 16-bit integers in two planes of bytes
//! ([`BlockQ16`]): the sums of the high plane are shifted and those of the low plane added to them,
//! so that a product costs twice the multiplications of 8-bit activations, and all else once.
//!
//! Two weight rows at a time share the loads of an activation row where registers allow.
//!
//! Instructions per weight, all counted (`tests/neon_instructions.py`), and the billions of weights
//! per second that four 128-bit pipes at 4.4 GHz (a core of Apple's M4) multiply at most if each of
//! them took one; in brackets GB/s of weights:
//!
//! | | Q8_0 | Q4_0 | Q4_K | Q6_K |
//! |---|---|---|---|---|
//! | here: `smull`, `smlal2`, `sadalp` for 16 weights and a plane | 0.84: 21 (22) | 0.78: 23 (13) | 0.79: 22 (13) | 1.00: 18 (14) |
//! | `sdot` for them | 0.43: 41 (44) | 0.49: 36 (20) | 0.52: 34 (19) | 0.79: 22 (18) |

use super::elementwise::{widen_f16, widen_high_f16};
use super::unpack::{Factors, Weights, with_weights};
use crate::arch::{ActForm, Acts, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use std::arch::aarch64::*;

pub(in crate::arch) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    macro_rules! q16 {
        ($block:ident, $n:literal) => {
            Matvec { form: ActForm::Q16, kernel: matvec_q16::<$block, $n> }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_float::<F32, 64>),
        DType::F16 => f32(matvec_float::<F16, 32>),
        DType::BF16 => f32(matvec_float::<Bf16, 32>),
        _ => with_weights!(dtype, q16, f32(matvec_any)),
    }
}

/// How a level multiplies signed bytes.
pub(in crate::arch) trait Dot {
    /// Adds the 16 products `w·x`, of which some go to each lane; the high bytes of activations come
    /// first, so that no 16-bit sum of two of them overflows unless `WHOLE_BYTES`, where `w` may be
    /// −128.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn dot<const WHOLE_BYTES: bool>(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t;
}

/// The multiply-adds of ARMv8.0.
enum Smull {}

impl Dot for Smull {
    #[inline(always)]
    unsafe fn dot<const WHOLE_BYTES: bool>(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe {
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            if WHOLE_BYTES {
                // 2·128·128 is no 16-bit number.
                vpadalq_s16(vpadalq_s16(acc, low), vmull_high_s8(w, x))
            } else {
                vpadalq_s16(acc, vmlal_high_s8(low, w, x))
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn matvec_q16<B: Weights<N>, const N: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    // SAFETY: this function has the features.
    unsafe { matvec::<Smull, B, N>(y, w, x) }
}

/// The product, to be inlined into a function that has the features of `D`.
///
/// # Safety
/// The CPU must have them.
#[inline(always)]
pub(in crate::arch) unsafe fn matvec<D: Dot, B: Weights<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::Q16 { x, n } = *x else { unreachable!("the form this level asks for") };
    let (w, blocks) = (bytemuck::cast_slice::<u8, B>(w), n * N / BlockQ16::VALUES);
    // The sixteen factors of two rows would not leave registers enough.
    let rows = if B::FACTORS_PER_16 { 1 } else { 2 };
    for (t, w) in w.chunks(rows * blocks).enumerate() {
        for (i, x) in x.chunks_exact(BlockQ16::per_row(n)).enumerate() {
            let y = &mut y.row(i)[t * rows..];
            if w.len() == 2 * blocks {
                // SAFETY: the caller's promise.
                y[..2].copy_from_slice(&unsafe { dots::<D, B, N, 2>(w, x) });
            } else {
                // SAFETY: as above.
                y[..1].copy_from_slice(&unsafe { dots::<D, B, N, 1>(w, x) });
            }
        }
    }
}

/// The products of `R` weight rows with one activation row.
#[inline(always)]
unsafe fn dots<D: Dot, B: Weights<N>, const N: usize, const R: usize>(w: &[B], x: &[BlockQ16]) -> [f32; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [vdupq_n_f32(0.0); R];
        let blocks = w.len() / R;
        let (whole, rest) = (blocks / N, blocks % N);
        for (g, x) in x[..whole].iter().enumerate() {
            // The blocks `g·N..` of each row.
            let rows = std::array::from_fn(|r| &*w.as_ptr().add(r * blocks + g * N).cast::<[B; N]>());
            accumulate::<D, B, N, R>(&mut totals, rows, x);
        }
        if rest > 0 {
            let mut rows = [[B::zeroed(); N]; R];
            for r in 0..R {
                rows[r][..rest].copy_from_slice(&w[r * blocks + whole * N..][..rest]);
            }
            accumulate::<D, B, N, R>(&mut totals, rows.each_ref(), &x[whole]);
        }
        let mut sums = [0.0; R];
        for r in 0..R {
            sums[r] = vaddvq_f32(totals[r]);
        }
        sums
    }
}

/// Adds the products of 256 weights of each row.
#[inline(always)]
unsafe fn accumulate<D: Dot, B: Weights<N>, const N: usize, const R: usize>(
    totals: &mut [float32x4_t; R],
    w: [&[B; N]; R],
    x: &BlockQ16,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (d, s) = if B::FACTORS_PER_16 { (sixteen(&x.d), sixteen(&x.s)) } else { (firsts(&x.d), pair_sums(&x.s)) };
        let registers = if B::FACTORS_PER_16 { 4 } else { 2 };
        let mut scales = [[vdupq_n_f32(0.0); 4]; R];
        for r in 0..R {
            let Factors { scale, offset } = B::factors(w[r]);
            for i in 0..registers {
                scales[r][i] = vmulq_f32(scale[i], d[i]);
                if B::OFFSETS {
                    totals[r] = vfmaq_f32(totals[r], offset[i], s[i]);
                }
            }
        }
        // Written out, since each takes other lanes of the scales.
        group::<D, B, N, R>(totals, w, &scales, x, 0);
        group::<D, B, N, R>(totals, w, &scales, x, 1);
        group::<D, B, N, R>(totals, w, &scales, x, 2);
        group::<D, B, N, R>(totals, w, &scales, x, 3);
        group::<D, B, N, R>(totals, w, &scales, x, 4);
        group::<D, B, N, R>(totals, w, &scales, x, 5);
        group::<D, B, N, R>(totals, w, &scales, x, 6);
        group::<D, B, N, R>(totals, w, &scales, x, 7);
    }
}

/// Adds the products of group `b` of 32 weights of each row.
#[inline(always)]
unsafe fn group<D: Dot, B: Weights<N>, const N: usize, const R: usize>(
    totals: &mut [float32x4_t; R],
    w: [&[B; N]; R],
    scales: &[[float32x4_t; 4]; R],
    x: &BlockQ16,
    b: usize,
) {
    // SAFETY: the caller's promise; the bytes read are those of group `b`.
    unsafe {
        let (high, low) = (x.high.as_ptr().add(32 * b), x.low.as_ptr().add(32 * b));
        let (high, low) = ([vld1q_s8(high), vld1q_s8(high.add(16))], [vld1q_s8(low), vld1q_s8(low.add(16))]);
        let zero = vdupq_n_s32(0);
        for r in 0..R {
            let w = B::bytes(w[r], b);
            // Up to eight products of 2⁷ and 2¹⁵ in a lane.
            if B::FACTORS_PER_16 {
                for h in 0..2 {
                    let sum = vshlq_n_s32::<8>(dot::<D, B, N>(zero, w[h], high[h]));
                    let sum = dot::<D, B, N>(sum, w[h], low[h]);
                    totals[r] = add_scaled(totals[r], sum, scales[r][b / 2], 2 * (b % 2) + h);
                }
            } else {
                let sum = dot::<D, B, N>(dot::<D, B, N>(zero, w[0], high[0]), w[1], high[1]);
                let sum = vshlq_n_s32::<8>(sum);
                let sum = dot::<D, B, N>(dot::<D, B, N>(sum, w[0], low[0]), w[1], low[1]);
                totals[r] = add_scaled(totals[r], sum, scales[r][b / 4], b % 4);
            }
        }
    }
}

/// See [`Dot::dot`].
#[inline(always)]
unsafe fn dot<D: Dot, B: Weights<N>, const N: usize>(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's promise.
    unsafe { if B::WHOLE_BYTES { D::dot::<true>(acc, w, x) } else { D::dot::<false>(acc, w, x) } }
}

/// `total + sum·scale[lane]`.
#[inline(always)]
unsafe fn add_scaled(total: float32x4_t, sum: int32x4_t, scale: float32x4_t, lane: usize) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = vcvtq_f32_s32(sum);
        // The lane is known where this is inlined; the instruction wants it in its code.
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

/// A plain format: `BYTES` bytes hold 16 weights.
trait Floats<const BYTES: usize> {
    /// # Safety
    /// The CPU must have NEON.
    unsafe fn widen(bytes: &[u8; BYTES]) -> [float32x4_t; 4];
}

struct F32;
struct F16;
struct Bf16;

impl Floats<64> for F32 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn widen(bytes: &[u8; 64]) -> [float32x4_t; 4] {
        let [a, b, c, d]: &[[u8; 16]; 4] = bytemuck::cast_ref(bytes);
        [
            vreinterpretq_f32_u8(load_16(a)),
            vreinterpretq_f32_u8(load_16(b)),
            vreinterpretq_f32_u8(load_16(c)),
            vreinterpretq_f32_u8(load_16(d)),
        ]
    }
}

impl Floats<32> for F16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn widen(bytes: &[u8; 32]) -> [float32x4_t; 4] {
        let [a, b]: &[[u8; 16]; 2] = bytemuck::cast_ref(bytes);
        let (a, b) = (vreinterpretq_u16_u8(load_16(a)), vreinterpretq_u16_u8(load_16(b)));
        [widen_f16(vget_low_u16(a)), widen_high_f16(a), widen_f16(vget_low_u16(b)), widen_high_f16(b)]
    }
}

impl Floats<32> for Bf16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn widen(bytes: &[u8; 32]) -> [float32x4_t; 4] {
        let [a, b]: &[[u8; 16]; 2] = bytemuck::cast_ref(bytes);
        let (a, b) = (vreinterpretq_u16_u8(load_16(a)), vreinterpretq_u16_u8(load_16(b)));
        [
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(a))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(a)),
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(b))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(b)),
        ]
    }
}

#[target_feature(enable = "neon")]
fn matvec_float<F: Floats<BYTES>, const BYTES: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    let row_bytes = n * BYTES / 16;
    for (t, w) in w.chunks(2 * row_bytes).enumerate() {
        for (c, x) in x.chunks(2 * n).enumerate() {
            match (w.len() == 2 * row_bytes, x.len() == 2 * n) {
                (true, true) => tile_float::<F, BYTES, 2, 2>(y, 2 * t, w, 2 * c, x),
                (true, false) => tile_float::<F, BYTES, 2, 1>(y, 2 * t, w, 2 * c, x),
                (false, true) => tile_float::<F, BYTES, 1, 2>(y, 2 * t, w, 2 * c, x),
                (false, false) => tile_float::<F, BYTES, 1, 1>(y, 2 * t, w, 2 * c, x),
            }
        }
    }
}

/// The products of `R` weight rows, the first of them row `r`, with `M` activation rows from `i` on.
#[target_feature(enable = "neon")]
fn tile_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[u8],
    i: usize,
    x: &[f32],
) {
    let (row_bytes, n) = (w.len() / R, x.len() / M);
    // Not `from_fn`: its closures are not compiled for this level.
    let (mut w_rows, mut x_rows) = ([(&[][..], &[][..]); R], [(&[][..], &[][..]); M]);
    for r in 0..R {
        w_rows[r] = w[r * row_bytes..][..row_bytes].as_chunks::<BYTES>();
    }
    for i in 0..M {
        x_rows[i] = x[i * n..][..n].as_chunks::<16>();
    }
    // Four sums each: an addition takes as many cycles.
    let mut totals = [[[vdupq_n_f32(0.0); 4]; M]; R];
    for k in 0..n / 16 {
        let (mut w, mut x) = ([&[0; BYTES]; R], [&[0.0; 16]; M]);
        for r in 0..R {
            w[r] = &w_rows[r].0[k];
        }
        for i in 0..M {
            x[i] = &x_rows[i].0[k];
        }
        accumulate_float::<F, BYTES, R, M>(&mut totals, w, x);
    }
    if !n.is_multiple_of(16) {
        let w: [_; R] = std::array::from_fn(|r| padded(w_rows[r].1));
        let x: [_; M] = std::array::from_fn(|i| padded(x_rows[i].1));
        accumulate_float::<F, BYTES, R, M>(&mut totals, w.each_ref(), x.each_ref());
    }
    for j in 0..M {
        for k in 0..R {
            let [a, b, c, d] = totals[k][j];
            y.row(i + j)[r + k] = vaddvq_f32(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)));
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn accumulate_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    totals: &mut [[[float32x4_t; 4]; M]; R],
    w: [&[u8; BYTES]; R],
    x: [&[f32; 16]; M],
) {
    for r in 0..R {
        // SAFETY: this function has the features.
        let w = unsafe { F::widen(w[r]) };
        for i in 0..M {
            let x = sixteen(x[i]);
            for c in 0..4 {
                totals[r][i][c] = vfmaq_f32(totals[r][i][c], w[c], x[c]);
            }
        }
    }
}

/// The values, then zeros.
fn padded<T: Copy + Default, const N: usize>(values: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Activation rows of [`matvec_any`] at a time.
const COLUMNS: usize = 16;

/// Any format: expands 256 weights at a time.
#[target_feature(enable = "neon")]
fn matvec_any(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    let format = dtype.float_format();
    let row_bytes = n / format.block_elems * format.block_bytes;
    let mut values = [0.0; 256];
    for (r, row) in w.chunks_exact(row_bytes).enumerate() {
        for (c, x) in x.chunks(COLUMNS * n).enumerate() {
            let mut totals = [[vdupq_n_f32(0.0); 4]; COLUMNS];
            for (k, blocks) in row.chunks(256 / format.block_elems * format.block_bytes).enumerate() {
                let values = &mut values[..blocks.len() / format.block_bytes * format.block_elems];
                (format.dequantize)(blocks, values);
                for (x, totals) in x.chunks_exact(n).zip(&mut totals) {
                    for (w, x) in values.as_chunks().0.iter().zip(x[256 * k..].as_chunks().0) {
                        let (w, x) = (sixteen(w), sixteen(x));
                        for i in 0..4 {
                            totals[i] = vfmaq_f32(totals[i], w[i], x[i]);
                        }
                    }
                }
            }
            for (i, [a, b, c, d]) in (c * COLUMNS..y.rows()).zip(totals) {
                y.row(i)[r] = vaddvq_f32(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)));
            }
        }
    }
}

/// Rounds a row of activations, with the very results of the scalar level.
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
            let words = [vmovn_high_s32(vmovn_s32(q[0]), q[1]), vmovn_high_s32(vmovn_s32(q[2]), q[3])];
            store(low, vmovn_high_s16(vmovn_s16(words[0]), words[1]));
            // Rounded, because the low bytes are signed.
            store(high, vrshrn_high_n_s16::<8>(vrshrn_n_s16::<8>(words[0]), words[1]));
            let sum = vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
            block.d[i] = d;
            block.s[i] = d * sum as f32;
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_16(x: &[u8; 16]) -> uint8x16_t {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { vld1q_u8(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [i8; 16], x: int8x16_t) {
    // SAFETY: 16 writable bytes.
    unsafe { vst1q_s8(to.as_mut_ptr(), x) }
}
