//! Products with many activation rows: the packing, unpacking and register tile of `f32` panels.
//!
//! The tile multiplies 12 activation rows (three registers) by 8 weight rows: 24 sums that do not
//! wait for each other, where four pipes of four cycles need 16. Eight rows of a panel lie
//! interleaved, so that two registers hold a value of each, which `fmla` by element broadcasts. Of
//! 58 instructions for two values of all rows 48 multiply: 0.30 per product of a weight and an
//! activation. Four 128-bit pipes at 4.4 GHz bound it to 141 GFLOP/s per core.

use super::elementwise::{F32x4, widen_f16, zero};
use super::matmul::{load, plain_gemm};
use super::unpack::{Factors, UnpackBlocks, knows, widened_signed, with_weights};
use crate::arch::gemm::{BLOCK, Panels, RegisterTile, TILE, UnpackRows, table};
use crate::arch::generic::packing::{MAX_LANES, Transpose, packing};
use crate::arch::scalar;
use crate::arch::table::{Gemm, PanelElement, Transposed};
use crate::arch::transposed::{COLUMNS, TransposedPanels, transposed};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::ops::Range;

pub(in crate::arch) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::F32 => const { plain_gemm::<f32>() },
        DType::F16 => const { plain_gemm::<f16>() },
        DType::BF16 => const { plain_gemm::<bf16>() },
        _ if knows(dtype) => const { table::<F32Panels>() },
        _ => (scalar::KERNELS.gemm)(dtype),
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
pub(in crate::arch) const LANES: usize = 4;
/// Weight rows of a tile, and of a panel that are interleaved.
const ROWS: usize = 8;

/// Panels of `f32`.
pub(super) enum F32Panels {}

impl Panels for F32Panels {
    const LANES: usize = LANES;
    const INTERLEAVED: usize = ROWS;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: ROWS,
            multiply: tile_f32::<1>,
        },
        RegisterTile {
            rows: ROWS,
            multiply: tile_f32::<2>,
        },
        RegisterTile {
            rows: ROWS,
            multiply: tile_f32::<3>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    fn words(k: usize) -> usize {
        k
    }
}

impl UnpackRows for F32Panels {
    const ELEMENT: (PanelElement, u64) = (PanelElement::F32, 1);

    unsafe fn unpack(dtype: DType, blocks: &[u8], out: &mut [u32]) {
        // SAFETY: the caller's promise.
        unsafe { unpack::<ROWS>(dtype, blocks, 0..BLOCK, bytemuck::cast_slice_mut(out)) }
    }
}

impl TransposedPanels for F32Panels {
    const KNOWS: fn(DType) -> bool = knows;
    const ROWS: usize = 32;
    const EXPAND: unsafe fn(DType, &[u8], Range<usize>, &mut [f32]) = unpack::<1>;
    const TRANSPOSE: unsafe fn(*const f32, *mut u32) = transpose_columns;
}

/// Copies columns of 32 rows: panel rows lie interleaved, so that nothing has to be transposed.
#[target_feature(enable = "neon")]
unsafe fn transpose_columns(values: *const f32, panel: *mut u32) {
    let panel = panel.cast::<f32>();
    for r in 0..F32Panels::ROWS {
        // SAFETY: a register of a row, and of the panel's word `r`.
        unsafe {
            vst1q_f32(
                panel.wrapping_add(r * ROWS),
                vld1q_f32(values.wrapping_add(r * COLUMNS)),
            )
        };
    }
}

/// `VECS` registers of activations times 8 weight rows.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn tile_f32<const VECS: usize>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    _ahead: *const u32,
) {
    let (w, x) = (w.cast::<f32>(), x.cast::<f32>());
    let mut acc = [[vdupq_n_f32(0.0); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { vld1q_f32(sums.wrapping_add((v * TILE + r) * LANES)) };
            }
        }
    }
    let mut i = 0;
    while i + 2 <= k {
        // SAFETY: words `i` and `i + 1` of all rows.
        unsafe {
            word(
                &mut acc,
                w.wrapping_add(i * ROWS),
                x.wrapping_add(i * VECS * LANES),
            );
            word(
                &mut acc,
                w.wrapping_add((i + 1) * ROWS),
                x.wrapping_add((i + 1) * VECS * LANES),
            );
        }
        i += 2;
    }
    if i < k {
        // SAFETY: word `i` of all rows.
        unsafe {
            word(
                &mut acc,
                w.wrapping_add(i * ROWS),
                x.wrapping_add(i * VECS * LANES),
            )
        };
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { vst1q_f32(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

/// Adds the products of one value of each row.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn word<const VECS: usize>(
    acc: &mut [[float32x4_t; VECS]; ROWS],
    w: *const f32,
    x: *const f32,
) {
    // SAFETY: the caller's promise.
    let w = unsafe { [vld1q_f32(w), vld1q_f32(w.wrapping_add(LANES))] };
    for v in 0..VECS {
        // SAFETY: the caller's promise.
        let x = unsafe { vld1q_f32(x.wrapping_add(v * LANES)) };
        for h in 0..2 {
            acc[4 * h][v] = vfmaq_laneq_f32::<0>(acc[4 * h][v], x, w[h]);
            acc[4 * h + 1][v] = vfmaq_laneq_f32::<1>(acc[4 * h + 1][v], x, w[h]);
            acc[4 * h + 2][v] = vfmaq_laneq_f32::<2>(acc[4 * h + 2][v], x, w[h]);
            acc[4 * h + 3][v] = vfmaq_laneq_f32::<3>(acc[4 * h + 3][v], x, w[h]);
        }
    }
}

packing!("neon", zero());

impl Transpose for F32x4 {
    #[inline(always)]
    fn transpose(mut x: [F32x4; MAX_LANES]) -> [F32x4; MAX_LANES] {
        // SAFETY: a vector exists, so the CPU has NEON.
        let [a, b, c, d] = unsafe { transpose([x[0].0, x[1].0, x[2].0, x[3].0]) };
        (x[0], x[1], x[2], x[3]) = (F32x4(a), F32x4(b), F32x4(c), F32x4(d));
        x
    }
}

/// Value `i` of row `j` becomes value `j` of row `i`.
#[inline]
#[target_feature(enable = "neon")]
fn transpose([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // a₀ c₀ a₁ c₁, b₀ d₀ b₁ d₁ and the same of values 2 and 3.
    let (ac, bd) = (vzip1q_f32(a, c), vzip1q_f32(b, d));
    let (ac2, bd2) = (vzip2q_f32(a, c), vzip2q_f32(b, d));
    [
        vzip1q_f32(ac, bd),
        vzip2q_f32(ac, bd),
        vzip1q_f32(ac2, bd2),
        vzip2q_f32(ac2, bd2),
    ]
}

/// Expands the values `wanted` of a row's blocks, to every `STRIDE`th word of `out`.
#[target_feature(enable = "neon")]
fn unpack<const STRIDE: usize>(dtype: DType, bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block, { $block::PER_256 }, STRIDE>(bytes, wanted, out)
        };
    }
    match dtype {
        DType::F32 => {
            let (whole, rest) = bytes.as_chunks::<16>();
            for (i, x) in whole.iter().enumerate() {
                let x = load(bytemuck::cast_ref::<_, [f32; 4]>(&bytemuck::cast::<
                    _,
                    [u32; 4],
                >(*x)));
                spread::<STRIDE>(x, &mut out[4 * i * STRIDE..]);
            }
            dequantized_rest::<STRIDE>(dtype, rest, 4 * whole.len(), out);
        }
        DType::F16 | DType::BF16 => {
            let (whole, rest) = bytes.as_chunks::<8>();
            for (i, x) in whole.iter().enumerate() {
                let x = vcreate_u16(u64::from_le_bytes(*x));
                let x = if dtype == DType::F16 {
                    widen_f16(x)
                } else {
                    vreinterpretq_f32_u32(vshll_n_u16::<16>(x))
                };
                spread::<STRIDE>(x, &mut out[4 * i * STRIDE..]);
            }
            dequantized_rest::<STRIDE>(dtype, rest, 4 * whole.len(), out);
        }
        _ => with_weights!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        ),
    }
}

/// Expands blocks of signed bytes.
#[inline]
#[target_feature(enable = "neon")]
fn blocks<B: UnpackBlocks<N>, const N: usize, const STRIDE: usize>(
    bytes: &[u8],
    wanted: Range<usize>,
    out: &mut [f32],
) {
    let bytes = bytemuck::cast_slice::<u8, B>(bytes);
    let groups = bytes.len() * 8 / N;
    let first = wanted.start / 32;
    let mut blocks = [B::zeroed(); N];
    blocks[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: this level has NEON.
    let Factors { scale, offset } = unsafe { B::factors(&blocks) };
    let (scale, offset) = (factors::<B, N>(scale), factors::<B, N>(offset));
    for b in first..wanted.end.div_ceil(32).min(groups) {
        let out = &mut out[32 * (b - first) * STRIDE..][..31 * STRIDE + 1];
        for h in 0..2 {
            // SAFETY: as above.
            let q = widened_signed(unsafe { B::bytes(&blocks, b) }[h]);
            for e in 0..4 {
                let value = vfmaq_n_f32(vdupq_n_f32(offset[2 * b + h]), q[e], scale[2 * b + h]);
                spread::<STRIDE>(value, &mut out[(16 * h + 4 * e) * STRIDE..]);
            }
        }
    }
}

/// Factors per 16 values.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn factors<B: UnpackBlocks<N>, const N: usize>(
    [a, b, c, d]: [float32x4_t; 4],
) -> [f32; 16] {
    bytemuck::cast(if B::FACTORS_PER_16 {
        [array(a), array(b), array(c), array(d)]
    } else {
        [
            array(vzip1q_f32(a, a)),
            array(vzip2q_f32(a, a)),
            array(vzip1q_f32(b, b)),
            array(vzip2q_f32(b, b)),
        ]
    })
}

/// Writes four values, to every `STRIDE`th word.
#[inline]
#[target_feature(enable = "neon")]
fn spread<const STRIDE: usize>(x: float32x4_t, out: &mut [f32]) {
    let out = &mut out[..3 * STRIDE + 1];
    if STRIDE == 1 {
        // SAFETY: four values.
        unsafe { vst1q_f32(out.as_mut_ptr(), x) };
        return;
    }
    // SAFETY: a value, here and below.
    unsafe { vst1q_lane_f32::<0>(&mut out[0], x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<1>(&mut out[STRIDE], x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<2>(&mut out[2 * STRIDE], x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<3>(&mut out[3 * STRIDE], x) };
}

/// Expands the values after the first `done`, less than a register, of a format without blocks.
fn dequantized_rest<const STRIDE: usize>(dtype: DType, bytes: &[u8], done: usize, out: &mut [f32]) {
    let mut values = [0.0; LANES];
    let values = &mut values[..bytes.len() / dtype.float_format().block_bytes];
    (dtype.float_format().dequantize)(bytes, values);
    for (i, value) in values.iter().enumerate() {
        out[(done + i) * STRIDE] = *value;
    }
}

#[inline(always)]
pub(in crate::arch) fn array(x: float32x4_t) -> [f32; 4] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}

/// Words that hold the integers of a record.
pub(in crate::arch) const fn int_words(planes: usize) -> usize {
    8 * planes
}

/// Words per record.
pub(in crate::arch) const fn record(planes: usize) -> usize {
    int_words(planes) + 4
}

/// A record of 32 activations `x ≈ d·q`. In one plane, `|q| ≤ 127`; in two, the high bytes first,
/// `|q| ≤ 2¹⁴`, and `d` is a power of two, so that products with it are exact.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn round<const PLANES: usize>(x: &[f32; 32]) -> [u32; record(2)] {
    let mut largest = vdupq_n_u32(0);
    let x: &[[f32; 4]; 8] = bytemuck::cast_ref(x);
    for x in x {
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(load(x))));
    }
    // The bits of positive numbers sort as the numbers do, NaN last.
    let largest = vmaxvq_u32(largest);
    let exponent = largest >> 23;
    // Activations below 2⁻¹⁰⁰ count as 0.
    let (d, inverse) = match exponent {
        0..27 => (0.0, 0.0),
        255.. => (f32::NAN, 0.0),
        _ if PLANES == 1 => (
            f32::from_bits(largest) / 127.0,
            127.0 / f32::from_bits(largest),
        ),
        _ => (
            f32::from_bits((exponent - 13) << 23),
            f32::from_bits((267 - exponent) << 23),
        ),
    };
    let mut words = [vdupq_n_s16(0); 4];
    let mut sums = [0; 2];
    for (h, x) in x.as_chunks::<4>().0.iter().enumerate() {
        let mut q = [vdupq_n_s32(0); 4];
        for (q, x) in q.iter_mut().zip(x) {
            // NaN, which infinity times 0 is, becomes 0.
            *q = vcvtnq_s32_f32(vmulq_n_f32(load(x), inverse));
        }
        words[2 * h] = vmovn_high_s32(vmovn_s32(q[0]), q[1]);
        words[2 * h + 1] = vmovn_high_s32(vmovn_s32(q[2]), q[3]);
        sums[h] = vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
    }
    let mut record = [0; record(2)];
    let (planes, _) = record.as_chunks_mut::<4>();
    for h in 0..2 {
        let [a, b] = [words[2 * h], words[2 * h + 1]];
        store_bytes(
            &mut planes[2 * (PLANES - 1) + h],
            vmovn_high_s16(vmovn_s16(a), b),
        );
        if PLANES == 2 {
            store_bytes(
                &mut planes[h],
                vrshrn_high_n_s16::<8>(vrshrn_n_s16::<8>(a), b),
            );
        }
    }
    let factors = [
        d,
        d * sums[0] as f32,
        d * sums[1] as f32,
        d * (sums[0] + sums[1]) as f32,
    ];
    record[int_words(PLANES)..][..4].copy_from_slice(&factors.map(f32::to_bits));
    record
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn store_bytes(to: &mut [u32; 4], x: int8x16_t) {
    // SAFETY: 16 writable bytes.
    unsafe { vst1q_s8(to.as_mut_ptr().cast(), x) }
}
