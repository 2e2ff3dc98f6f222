//! Products of weights with few activation rows.
//!
//! A block format only says how 256 of its weights become bytes, scales and offsets ([`Weights`]);
//! the product is the same for all formats and all Arm levels, which differ in how 16 bytes are
//! multiplied by 16 ([`Dot`]). Activations are 16-bit integers in two planes of bytes
//! ([`BlockQ16`]): the sums of the high plane are shifted and those of the low plane added to them,
//! so that a product costs twice the multiplications of 8-bit activations, and all else once.
//!
//! Two weight rows at a time share the loads of an activation row where registers allow. Up to four
//! activation rows share the unpacking of the weights; K-quants then have 8-bit ones ([`BlockQ8`]), as in
//! the panels of integers and in x86's strips.
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
//! | | Q8_0 | Q4_0 | Q4_K | Q6_K |
//! |---|---|---|---|---|
//! | here | 0.90, 0.81, 0.80 | 0.83, 0.79, 0.82 | 0.83, 0.47, 0.45 | 1.11, 0.65, 0.57 |
//! | `sdot` | 0.50, 0.41, 0.43 | 0.56, 0.45, 0.47 | 0.57, 0.35, 0.31 | 0.88, 0.61, 0.51 |
//!
//! A weight row per lane (`lanes/strip.rs`) was tried in their place: with registers of four lanes it takes
//! as many instructions (by `sdot` 0.56 and 0.41, 0.58 and 0.41, 0.36 and 0.31, 0.61 and 0.54 for two and four
//! rows), since a transposition serves four weight rows only; and from three or six rows on the panels take
//! fewer than either.
use super::elementwise::{widen_f16, widen_high_f16};
use super::gemm::{int_words, round};
use super::unpack::{Factors, Weights, with_weights};
use crate::arch::{ActForm, Acts, BlockQ8, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use std::arch::aarch64::*;

pub(super) fn matvec_for(dtype: DType, m: usize) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    match dtype {
        DType::F32 => f32(matvec_float::<F32, 64>),
        DType::F16 => f32(matvec_float::<F16, 32>),
        DType::BF16 => f32(matvec_float::<Bf16, 32>),
        _ => matvec_ints!(dtype, m, f32(matvec_any)),
    }
}

/// The product of a level for a block format, from its `matvec_q16` and `matvec_q8`, or `$other`.
macro_rules! matvec_ints {
    ($dtype:expr, $m:expr, $other:expr) => {{
        macro_rules! q16 {
            ($block:ident, $n:literal) => {
                Matvec { form: ActForm::Q16, kernel: matvec_q16::<$block, $n> }
            };
        }
        let q8 = |kernel: MatvecFn| Matvec { form: ActForm::Q8, kernel };
        match $dtype {
            DType::Q2_K if $m > 1 => q8(matvec_q8::<BlockQ2K, 1>),
            DType::Q3_K if $m > 1 => q8(matvec_q8::<BlockQ3K, 1>),
            DType::Q4_K if $m > 1 => q8(matvec_q8::<BlockQ4K, 1>),
            DType::Q5_K if $m > 1 => q8(matvec_q8::<BlockQ5K, 1>),
            DType::Q6_K if $m > 1 => q8(matvec_q8::<BlockQ6K, 1>),
            _ => with_weights!($dtype, q16, $other),
        }
    }};
}
pub(in crate::arch) use matvec_ints;

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
    let Acts::Q16 { x, n } = *x else { unreachable!("the form this level asks for") };
    // SAFETY: this function has the features.
    unsafe { matvec::<Smull, BlockQ16, B, N>(y, w, x, n) }
}

#[target_feature(enable = "neon")]
fn matvec_q8<B: Weights<N>, const N: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::Q8 { x, n } = *x else { unreachable!("the form this level asks for") };
    // SAFETY: this function has the features.
    unsafe { matvec::<Smull, BlockQ8, B, N>(y, w, x, n) }
}

/// 256 rounded activations.
pub(in crate::arch) trait Rounded {
    /// 32 of their integers.
    type Integers: Copy;

    /// The scales, and what an offset of the weights is multiplied by; of each 32 values in the first two
    /// registers, or of each 16.
    ///
    /// # Safety
    /// The CPU must have NEON.
    unsafe fn factors(&self, per_16: bool) -> [[float32x4_t; 4]; 2];

    /// Those of group `b`.
    ///
    /// # Safety
    /// The CPU must have NEON.
    unsafe fn integers(&self, b: usize) -> Self::Integers;

    /// The sums of the products of `w` with 32 integers; with only 16 of both if `only` says which.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn dot<D: Dot, const WHOLE_BYTES: bool>(
        w: [int8x16_t; 2],
        x: Self::Integers,
        only: Option<usize>,
    ) -> int32x4_t;
}

impl Rounded for BlockQ16 {
    /// The high bytes, then the low ones.
    type Integers = [[int8x16_t; 2]; 2];

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn factors(&self, per_16: bool) -> [[float32x4_t; 4]; 2] {
        if per_16 { [sixteen(&self.d), sixteen(&self.s)] } else { [firsts(&self.d), pair_sums(&self.s)] }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn integers(&self, b: usize) -> Self::Integers {
        let (high, low): (&[[i8; 32]; 8], &[[i8; 32]; 8]) =
            (bytemuck::cast_ref(&self.high), bytemuck::cast_ref(&self.low));
        [two(&high[b]), two(&low[b])]
    }

    #[inline(always)]
    unsafe fn dot<D: Dot, const WHOLE_BYTES: bool>(
        w: [int8x16_t; 2],
        [high, low]: Self::Integers,
        only: Option<usize>,
    ) -> int32x4_t {
        // SAFETY: the caller's promise. Up to eight products of 2⁷ and 2¹⁵ in a lane.
        unsafe {
            let high = vshlq_n_s32::<8>(dot::<D, WHOLE_BYTES>(vdupq_n_s32(0), w, high, only));
            dot::<D, WHOLE_BYTES>(high, w, low, only)
        }
    }
}

impl Rounded for BlockQ8 {
    type Integers = [int8x16_t; 2];

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn factors(&self, per_16: bool) -> [[float32x4_t; 4]; 2] {
        let ([a, b], [s, t]): (&[[f32; 4]; 2], &[[f32; 4]; 2]) =
            (bytemuck::cast_ref(&self.d), bytemuck::cast_ref(&self.s));
        let (a, b, s, t) = (load(a), load(b), load(s), load(t));
        if per_16 {
            [[vzip1q_f32(a, a), vzip2q_f32(a, a), vzip1q_f32(b, b), vzip2q_f32(b, b)], sixteen(&self.s16)]
        } else {
            [[a, b, a, b], [s, t, s, t]]
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn integers(&self, b: usize) -> Self::Integers {
        two(&self.q[b])
    }

    #[inline(always)]
    unsafe fn dot<D: Dot, const WHOLE_BYTES: bool>(
        w: [int8x16_t; 2],
        x: Self::Integers,
        only: Option<usize>,
    ) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { dot::<D, WHOLE_BYTES>(vdupq_n_s32(0), w, x, only) }
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
pub(in crate::arch) unsafe fn matvec<D: Dot, X: Rounded, B: Weights<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &[X],
    n: usize,
) {
    let (w, blocks) = (bytemuck::cast_slice::<u8, B>(w), n * N / 256);
    let groups = n.div_ceil(256);
    // The factors of more would not leave registers enough.
    let rows = if B::FACTORS_PER_16 || y.rows() >= 4 { 1 } else { 2 };
    for (t, w) in w.chunks(rows * blocks).enumerate() {
        let mut i = 0;
        while let rest @ 1.. = y.rows() - i {
            let m = [1, 2, 2, 4][rest.min(4) - 1];
            let (r, x) = (t * rows, &x[i * groups..][..m * groups]);
            // SAFETY: the caller's promise.
            unsafe {
                match (w.len() == 2 * blocks, m) {
                    (true, 2) => tile::<D, X, B, N, 2, 2>(y, r, w, i, x),
                    (true, _) => tile::<D, X, B, N, 2, 1>(y, r, w, i, x),
                    (false, 4) => tile::<D, X, B, N, 1, 4>(y, r, w, i, x),
                    (false, 2) => tile::<D, X, B, N, 1, 2>(y, r, w, i, x),
                    (false, _) => tile::<D, X, B, N, 1, 1>(y, r, w, i, x),
                }
            }
            i += m;
        }
    }
}

/// The products of `R` weight rows, the first of them row `r`, with `M` activation rows from `i` on.
#[inline(always)]
unsafe fn tile<D: Dot, X: Rounded, B: Weights<N>, const N: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[B],
    i: usize,
    x: &[X],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [[vdupq_n_f32(0.0); M]; R];
        let (blocks, groups) = (w.len() / R, x.len() / M);
        let (whole, rest) = (blocks / N, blocks % N);
        for g in 0..whole {
            // The blocks `g·N..` of each row.
            let rows = std::array::from_fn(|r| &*w.as_ptr().add(r * blocks + g * N).cast::<[B; N]>());
            accumulate::<D, X, B, N, R, M>(&mut totals, rows, std::array::from_fn(|i| &x[i * groups + g]));
        }
        if rest > 0 {
            let mut rows = [[B::zeroed(); N]; R];
            for r in 0..R {
                rows[r][..rest].copy_from_slice(&w[r * blocks + whole * N..][..rest]);
            }
            let x = std::array::from_fn(|i| &x[i * groups + whole]);
            accumulate::<D, X, B, N, R, M>(&mut totals, rows.each_ref(), x);
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
unsafe fn accumulate<D: Dot, X: Rounded, B: Weights<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[float32x4_t; M]; R],
    w: [&[B; N]; R],
    x: [&X; M],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let registers = if B::FACTORS_PER_16 { 4 } else { 2 };
        let mut scales = [[[vdupq_n_f32(0.0); 4]; M]; R];
        for r in 0..R {
            let Factors { scale, offset } = B::factors(w[r]);
            for i in 0..M {
                let [d, s] = x[i].factors(B::FACTORS_PER_16);
                for j in 0..registers {
                    scales[r][i][j] = vmulq_f32(scale[j], d[j]);
                    if B::OFFSETS {
                        totals[r][i] = vfmaq_f32(totals[r][i], offset[j], s[j]);
                    }
                }
            }
        }
        // Written out, since each takes other lanes of the scales.
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 0);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 1);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 2);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 3);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 4);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 5);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 6);
        group::<D, X, B, N, R, M>(totals, w, &scales, x, 7);
    }
}

/// Adds the products of group `b` of 32 weights of each row.
#[inline(always)]
unsafe fn group<D: Dot, X: Rounded, B: Weights<N>, const N: usize, const R: usize, const M: usize>(
    totals: &mut [[float32x4_t; M]; R],
    w: [&[B; N]; R],
    scales: &[[[float32x4_t; 4]; M]; R],
    x: [&X; M],
    b: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut bytes = [[vdupq_n_s8(0); 2]; R];
        for r in 0..R {
            bytes[r] = B::bytes(w[r], b);
        }
        for i in 0..M {
            let x = x[i].integers(b);
            for r in 0..R {
                let (w, scales) = (bytes[r], &scales[r][i]);
                if B::FACTORS_PER_16 {
                    for h in 0..2 {
                        let sum = dot_32::<D, X, B, N>(w, x, Some(h));
                        totals[r][i] = add_scaled(totals[r][i], sum, scales[b / 2], 2 * (b % 2) + h);
                    }
                } else {
                    let sum = dot_32::<D, X, B, N>(w, x, None);
                    totals[r][i] = add_scaled(totals[r][i], sum, scales[b / 4], b % 4);
                }
            }
        }
    }
}

/// See [`Rounded::dot`].
#[inline(always)]
unsafe fn dot_32<D: Dot, X: Rounded, B: Weights<N>, const N: usize>(
    w: [int8x16_t; 2],
    x: X::Integers,
    only: Option<usize>,
) -> int32x4_t {
    // SAFETY: the caller's promise.
    unsafe { if B::WHOLE_BYTES { X::dot::<D, true>(w, x, only) } else { X::dot::<D, false>(w, x, only) } }
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

/// As [`quantize_q16`], in 8 bits.
#[target_feature(enable = "neon")]
pub(super) fn quantize_q8(x: &[f32], blocks: &mut [BlockQ8]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ8::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_q8_256(x, block),
            None => quantize_q8_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn quantize_q8_256(x: &[f32; 256], block: &mut BlockQ8) {
    let x: &[[f32; 32]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let record = round::<1>(x);
        let (integers, factors) = record.split_at(int_words(1));
        block.q[b].copy_from_slice(bytemuck::cast_slice(integers));
        let factors: &[f32] = bytemuck::cast_slice(factors);
        block.d[b] = factors[0];
        block.s16[2 * b..][..2].copy_from_slice(&factors[1..3]);
        block.s[b] = factors[3];
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
