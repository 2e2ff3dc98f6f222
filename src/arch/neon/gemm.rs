//! Products with many activation rows: the packing, unpacking and register tile of `f32` panels.
//!
//! The tile multiplies 12 activation rows (three registers) by 8 weight rows: 24 sums that do not
//! wait for each other, where four pipes of four cycles need 16. Eight rows of a panel lie
//! interleaved, so that two registers hold a value of each, which `fmla` by element broadcasts. Of 58
//! instructions for two values of all rows 48 multiply: 0.30 per product of a weight and an activation.
//! Four 128-bit pipes at 4.4 GHz bound it to 141 GFLOP/s per core.

use super::elementwise::widen_f16;
use super::matmul::load;
use super::unpack::{Factors, Weights, widened_signed, with_weights};
use crate::arch::gemm::{BLOCK, Panels, TILE, table};
use crate::arch::{Element, Gemm};
use crate::quant::*;
use std::arch::aarch64::*;

/// The numbers are the activation rows from which on panels take fewer instructions than `matmul.rs`.
pub(in crate::arch) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::F32 => const { table::<F32>(14) },
        DType::F16 | DType::BF16 => const { table::<F32>(24) },
        _ => const { table::<F32>(6) },
    }
}

/// Words of a register.
pub(in crate::arch) const LANES: usize = 4;
/// Weight rows of a tile, and of a panel that are interleaved.
const ROWS: usize = 8;

/// Panels of `f32`.
enum F32 {}

impl Panels for F32 {
    const ELEMENT: (Element, u64) = (Element::F32, 1);
    const LANES: usize = LANES;
    const VECS: usize = 3;
    const DEPTH: usize = BLOCK;
    const INTERLEAVED: usize = ROWS;

    fn words(k: usize) -> usize {
        k
    }

    fn rows(_: usize) -> usize {
        ROWS
    }

    unsafe fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
        // SAFETY: the caller's promise.
        unsafe { pack(x, k, bytemuck::cast_slice_mut(packed)) }
    }

    unsafe fn unpack(dtype: DType, blocks: &[u8], out: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { unpack(dtype, blocks, out.cast()) }
    }

    unsafe fn tile(vecs: usize, w: *const u32, x: *const u32, k: usize, sums: *mut f32, first: bool, _: *const u32) {
        let tile = match vecs {
            1 => tile_f32::<1>,
            2 => tile_f32::<2>,
            _ => tile_f32::<3>,
        };
        // SAFETY: the caller's promise.
        unsafe { tile(w.cast(), x.cast(), k, sums, first) }
    }

    unsafe fn transpose(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
        // SAFETY: the caller's promise.
        unsafe { store_transposed(sums, y, stride, rows, cols) }
    }
}

/// `VECS` registers of activations times 8 weight rows.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn tile_f32<const VECS: usize>(w: *const f32, x: *const f32, words: usize, sums: *mut f32, first: bool) {
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
    while i + 2 <= words {
        // SAFETY: words `i` and `i + 1` of all rows.
        unsafe {
            word(&mut acc, w.wrapping_add(i * ROWS), x.wrapping_add(i * VECS * LANES));
            word(&mut acc, w.wrapping_add((i + 1) * ROWS), x.wrapping_add((i + 1) * VECS * LANES));
        }
        i += 2;
    }
    if i < words {
        // SAFETY: word `i` of all rows.
        unsafe { word(&mut acc, w.wrapping_add(i * ROWS), x.wrapping_add(i * VECS * LANES)) };
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
unsafe fn word<const VECS: usize>(acc: &mut [[float32x4_t; VECS]; ROWS], w: *const f32, x: *const f32) {
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

#[target_feature(enable = "neon")]
fn pack(x: &[f32], k: usize, packed: &mut [f32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (c, packed) in packed.chunks_mut(LANES * n_vecs * LANES).enumerate() {
            let mut rows = [vdupq_n_f32(0.0); LANES];
            for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
                let start = c * LANES;
                let mut values = [0.0; LANES];
                let x = &x[start..(start + LANES).min(k)];
                values[..x.len()].copy_from_slice(x);
                *row = load(&values);
            }
            for (word, out) in transpose(rows).into_iter().zip(packed.chunks_exact_mut(n_vecs * LANES)) {
                out[v * LANES..][..LANES].copy_from_slice(&array(word));
            }
        }
    }
}

#[target_feature(enable = "neon")]
pub(in crate::arch) unsafe fn store_transposed(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
    let mut tile = [vdupq_n_f32(0.0); LANES];
    for (r, row) in tile.iter_mut().enumerate().take(cols) {
        // SAFETY: a row of the sums.
        *row = unsafe { vld1q_f32(sums.wrapping_add(r * LANES)) };
    }
    for (i, row) in transpose(tile).into_iter().enumerate().take(rows) {
        // SAFETY: `cols` values of row `i`.
        let y = unsafe { std::slice::from_raw_parts_mut(y.wrapping_add(i * stride), cols) };
        y.copy_from_slice(&array(row)[..cols]);
    }
}

/// Value `i` of row `j` becomes value `j` of row `i`.
#[inline]
#[target_feature(enable = "neon")]
fn transpose([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // a₀ c₀ a₁ c₁, b₀ d₀ b₁ d₁ and the same of values 2 and 3.
    let (ac, bd) = (vzip1q_f32(a, c), vzip1q_f32(b, d));
    let (ac2, bd2) = (vzip2q_f32(a, c), vzip2q_f32(b, d));
    [vzip1q_f32(ac, bd), vzip2q_f32(ac, bd), vzip1q_f32(ac2, bd2), vzip2q_f32(ac2, bd2)]
}

/// Expands a row's blocks, to every eighth word.
#[target_feature(enable = "neon")]
fn unpack(dtype: DType, bytes: &[u8], out: *mut f32) {
    macro_rules! blocks {
        ($block:ident, $n:literal) => {
            blocks::<$block, $n>(bytes, out)
        };
    }
    match dtype {
        DType::F32 => {
            let (whole, rest) = bytes.as_chunks::<16>();
            for (i, x) in whole.iter().enumerate() {
                // SAFETY: the panel has room for the values that are unpacked.
                unsafe {
                    spread(load(bytemuck::cast_ref::<_, [f32; 4]>(&bytemuck::cast::<_, [u32; 4]>(*x))), out, 4 * i)
                };
            }
            dequantized(dtype, rest, out, 4 * whole.len());
        }
        DType::F16 | DType::BF16 => {
            let (whole, rest) = bytes.as_chunks::<8>();
            for (i, x) in whole.iter().enumerate() {
                let x = vcreate_u16(u64::from_le_bytes(*x));
                let x = if dtype == DType::F16 { widen_f16(x) } else { vreinterpretq_f32_u32(vshll_n_u16::<16>(x)) };
                // SAFETY: as above.
                unsafe { spread(x, out, 4 * i) };
            }
            dequantized(dtype, rest, out, 4 * whole.len());
        }
        _ => with_weights!(dtype, blocks, dequantized(dtype, bytes, out, 0)),
    }
}

/// Blocks of signed bytes.
#[inline]
#[target_feature(enable = "neon")]
fn blocks<B: Weights<N>, const N: usize>(bytes: &[u8], out: *mut f32) {
    let bytes = bytemuck::cast_slice::<u8, B>(bytes);
    let groups = bytes.len() * 8 / N;
    let mut blocks = [B::zeroed(); N];
    blocks[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: this level has NEON.
    let Factors { scale, offset } = unsafe { B::factors(&blocks) };
    let (scale, offset) = (factors::<B, N>(scale), factors::<B, N>(offset));
    for b in 0..groups {
        for h in 0..2 {
            // SAFETY: as above.
            let q = widened_signed(unsafe { B::bytes(&blocks, b) }[h]);
            for e in 0..4 {
                let value = vfmaq_n_f32(vdupq_n_f32(offset[2 * b + h]), q[e], scale[2 * b + h]);
                // SAFETY: the panel has room for the blocks that are unpacked.
                unsafe { spread(value, out, 32 * b + 16 * h + 4 * e) };
            }
        }
    }
}

/// A factor for each 16 values.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn factors<B: Weights<N>, const N: usize>([a, b, c, d]: [float32x4_t; 4]) -> [f32; 16] {
    bytemuck::cast(if B::FACTORS_PER_16 {
        [array(a), array(b), array(c), array(d)]
    } else {
        [array(vzip1q_f32(a, a)), array(vzip2q_f32(a, a)), array(vzip1q_f32(b, b)), array(vzip2q_f32(b, b))]
    })
}

/// Writes values `i..i + 4` of a panel's row.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn spread(x: float32x4_t, out: *mut f32, i: usize) {
    let out = out.wrapping_add(i * ROWS);
    // SAFETY: the caller's promise, here and below.
    unsafe { vst1q_lane_f32::<0>(out, x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<1>(out.wrapping_add(ROWS), x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<2>(out.wrapping_add(2 * ROWS), x) };
    // SAFETY: as above.
    unsafe { vst1q_lane_f32::<3>(out.wrapping_add(3 * ROWS), x) };
}

/// Any format, slowly; from value `start` on.
fn dequantized(dtype: DType, bytes: &[u8], out: *mut f32, start: usize) {
    let format = dtype.float_format();
    let mut values = [0.0; BLOCK];
    let values = &mut values[..bytes.len() / format.block_bytes * format.block_elems];
    (format.dequantize)(bytes, values);
    for (i, value) in values.iter().enumerate() {
        // SAFETY: the panel has room for the values that are unpacked.
        unsafe { out.wrapping_add((start + i) * ROWS).write(*value) };
    }
}

#[inline(always)]
pub(in crate::arch) fn array(x: float32x4_t) -> [f32; 4] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}
