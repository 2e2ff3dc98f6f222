//! Products with many activation rows.
//!
//! Block formats are multiplied as words: a word of a panel has two weights, one of the packed
//! activations two of a row, rounded to 16 bits with a scale per 32. The tile multiplies 8
//! activation rows by 4 weight rows: 8 integer sums, two vectors of activations and one of weights,
//! since the hosts of most modules have 16 registers. Of 22 instructions for 64 products 16
//! multiply and add. F32, F16 and BF16 weights are multiplied as for decode rows
//! (`generic/matvec.rs`).

use super::elementwise::{F32x4, array, zero};
use super::matmul::{integers, lane_sum, largest_bits, plain_gemm, sixteen};
use super::unpack::{Factors, UnpackBlocks, knows, widened_signed, with_weights};
use crate::arch::acts::BlockQ16;
use crate::arch::arrays;
use crate::arch::gemm::{BLOCK, Panels, RegisterTile, TILE, UnpackRows, table};
use crate::arch::generic::lanes::Lanes;
use crate::arch::generic::packing::{MAX_LANES, Transpose};
use crate::arch::generic::panels::{self, f32_panels};
use crate::arch::scalar;
use crate::arch::table::{Gemm, PanelElement, Transposed};
use crate::arch::transposed::{TransposedPanels, transposed};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::wasm32::*;
use std::ops::Range;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! integers {
        ($block:ident) => {
            if <$block as UnpackBlocks<{ $block::PER_256 }>>::FACTORS_PER_16 {
                const { table::<IntPanels<16>>() }
            } else {
                const { table::<IntPanels<32>>() }
            }
        };
    }
    match dtype {
        DType::F32 => const { plain_gemm::<f32>() },
        DType::F16 => const { plain_gemm::<f16>() },
        DType::BF16 => const { plain_gemm::<bf16>() },
        _ => with_weights!(dtype, integers, (scalar::KERNELS.gemm)(dtype)),
    }
}

/// Scales run along rows, so that a column's weights share none: `f32` panels for all formats.
pub(super) fn transposed_for(dtype: DType) -> Transposed {
    if !knows(dtype) {
        return (scalar::KERNELS.transposed)(dtype);
    }
    const { transposed::<F32Panels>() }
}

/// Words per vector.
const LANES: usize = 4;
/// Weight rows of a tile.
const ROWS: usize = 4;
/// Words that hold the integers of a record, 32 values.
const INTEGERS: usize = 16;
/// Words per record: its integers, then four of factors. A weight row has its two scales and its
/// two offsets there, an activation row the scale `d` and `d·Σq` of the first half, of the second
/// half, and of both.
const RECORD: usize = INTEGERS + 4;
/// Words between rows of a panel.
const ROW: usize = BLOCK / 32 * RECORD;

f32_panels!("simd128", F32x4, zero(), depth: BLOCK, rows: 4, rows_of_one: 8);

impl Transpose for F32x4 {
    #[inline(always)]
    fn transpose(mut x: [F32x4; MAX_LANES]) -> [F32x4; MAX_LANES] {
        let [a, b, c, d] = [x[0].0, x[1].0, x[2].0, x[3].0];
        // a₀ b₀ a₁ b₁, c₀ d₀ c₁ d₁ and the same of values 2 and 3.
        let (ab, cd) = (
            i32x4_shuffle::<0, 4, 1, 5>(a, b),
            i32x4_shuffle::<0, 4, 1, 5>(c, d),
        );
        let (ab2, cd2) = (
            i32x4_shuffle::<2, 6, 3, 7>(a, b),
            i32x4_shuffle::<2, 6, 3, 7>(c, d),
        );
        x[0] = F32x4(i64x2_shuffle::<0, 2>(ab, cd));
        x[1] = F32x4(i64x2_shuffle::<1, 3>(ab, cd));
        x[2] = F32x4(i64x2_shuffle::<0, 2>(ab2, cd2));
        x[3] = F32x4(i64x2_shuffle::<1, 3>(ab2, cd2));
        x
    }
}

/// Expands the values `wanted` of a row's blocks.
fn unpack(dtype: DType, bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block, { $block::PER_256 }>(bytes, wanted, out)
        };
    }
    match dtype {
        DType::F32 => panels::widen::<F32x4, f32>(zero(), bytes, out),
        DType::F16 => panels::widen::<F32x4, f16>(zero(), bytes, out),
        DType::BF16 => panels::widen::<F32x4, bf16>(zero(), bytes, out),
        _ => with_weights!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        ),
    }
}

/// The blocks of a row, at most 256 values, and zeros.
#[inline(always)]
fn padded<B: UnpackBlocks<N>, const N: usize>(bytes: &[u8]) -> ([B; N], usize) {
    let bytes = bytemuck::cast_slice::<u8, B>(bytes);
    let mut blocks = [B::zeroed(); N];
    blocks[..bytes.len()].copy_from_slice(bytes);
    (blocks, bytes.len() * 8 / N)
}

#[inline(always)]
fn blocks<B: UnpackBlocks<N>, const N: usize>(bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    let (blocks, groups) = padded::<B, N>(bytes);
    let (scale, offset) = factors::<B, N>(&blocks);
    let first = wanted.start / 32;
    for b in first..wanted.end.div_ceil(32).min(groups) {
        let out = &mut out[32 * (b - first)..][..32];
        let bytes = B::bytes(&blocks, b);
        for h in 0..2 {
            // Codes of formats with offsets are below 128.
            let q = widened_signed(bytes[h]);
            for e in 0..4 {
                // The product is exact.
                let value = f32x4_add(
                    f32x4_mul(q[e], f32x4_splat(scale[2 * b + h])),
                    f32x4_splat(offset[2 * b + h]),
                );
                F32x4(value).store(&mut out[16 * h + 4 * e..][..4]);
            }
        }
    }
}

/// Scales and offsets per 16 values.
#[inline(always)]
fn factors<B: UnpackBlocks<N>, const N: usize>(blocks: &[B; N]) -> ([f32; 16], [f32; 16]) {
    let Factors { scale, offset } = B::factors(blocks);
    let per_16 = |x: [v128; 4]| {
        let [a, b, ..] = x;
        let x = if B::FACTORS_PER_16 {
            x
        } else {
            [
                i32x4_shuffle::<0, 0, 1, 1>(a, a),
                i32x4_shuffle::<2, 2, 3, 3>(a, a),
                i32x4_shuffle::<0, 0, 1, 1>(b, b),
                i32x4_shuffle::<2, 2, 3, 3>(b, b),
            ]
        };
        bytemuck::cast::<[[f32; 4]; 4], [f32; 16]>([
            array(x[0]),
            array(x[1]),
            array(x[2]),
            array(x[3]),
        ])
    };
    (per_16(scale), per_16(offset))
}

/// Panels of words, with factors for each `SPAN` of 16 or 32 weights.
enum IntPanels<const SPAN: usize> {}

impl<const SPAN: usize> Panels for IntPanels<SPAN> {
    const LANES: usize = LANES;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: ROWS,
            multiply: tile_ints::<SPAN, 1>,
        },
        RegisterTile {
            rows: ROWS,
            multiply: tile_ints::<SPAN, 2>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_ints;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    #[inline]
    fn words(k: usize) -> usize {
        k / 32 * RECORD
    }
}

impl<const SPAN: usize> UnpackRows for IntPanels<SPAN> {
    const ELEMENT: (PanelElement, u64) = (PanelElement::I16, 1);

    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
        macro_rules! blocks {
            ($block:ident) => {
                int_blocks::<$block, { $block::PER_256 }>(bytes, out)
            };
        }
        with_weights!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        )
    }
}

/// Writes the records of a weight row.
#[inline(always)]
fn int_blocks<B: UnpackBlocks<N>, const N: usize>(bytes: &[u8], out: &mut [u32]) {
    let (blocks, groups) = padded::<B, N>(bytes);
    let (scale, offset) = factors::<B, N>(&blocks);
    for (b, record) in out.chunks_exact_mut(RECORD).take(groups).enumerate() {
        let bytes = B::bytes(&blocks, b);
        let (words, _) = record.as_chunks_mut::<4>();
        for h in 0..2 {
            let (low, high) = if B::OFFSETS {
                (
                    u16x8_extend_low_u8x16(bytes[h]),
                    u16x8_extend_high_u8x16(bytes[h]),
                )
            } else {
                (
                    i16x8_extend_low_i8x16(bytes[h]),
                    i16x8_extend_high_i8x16(bytes[h]),
                )
            };
            store(&mut words[2 * h], low);
            store(&mut words[2 * h + 1], high);
        }
        words[4] = [
            scale[2 * b],
            scale[2 * b + 1],
            offset[2 * b],
            offset[2 * b + 1],
        ]
        .map(f32::to_bits);
    }
}

#[inline(always)]
fn store(to: &mut [u32; 4], x: v128) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { v128_store(to.as_mut_ptr().cast(), x) }
}

/// Packs groups of activation rows.
fn pack_ints(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (i, packed) in packed.chunks_exact_mut(RECORD * n_vecs * LANES).enumerate() {
        for row in 0..n_vecs * LANES {
            let words = match x.get(row * k + 32 * i..) {
                Some(x) if !x.is_empty() => round(x.first_chunk().expect("rows of whole records")),
                _ => [0; RECORD],
            };
            let place = packed[row / LANES * LANES + row % LANES..].iter_mut();
            for (to, word) in place.step_by(n_vecs * LANES).zip(words) {
                *to = word;
            }
        }
    }
}

/// A record of 32 activations `x ≈ d·q`.
#[inline(always)]
fn round(x: &[f32; 32]) -> [u32; RECORD] {
    let x: &[[f32; 16]; 2] = bytemuck::cast_ref(x);
    let x = [sixteen(&x[0]), sixteen(&x[1])];
    // NaN in `d` reaches all sums.
    let (d, inverse) = BlockQ16::scale(largest_bits(&x));
    let (mut record, mut sums) = ([0; RECORD], [0; 2]);
    let (words, _) = record.as_chunks_mut::<4>();
    for h in 0..2 {
        let q = arrays::map(x[h], |x| integers(f32x4_mul(x, f32x4_splat(inverse))));
        store(&mut words[2 * h], i16x8_narrow_i32x4(q[0], q[1]));
        store(&mut words[2 * h + 1], i16x8_narrow_i32x4(q[2], q[3]));
        sums[h] = lane_sum(i32x4_add(i32x4_add(q[0], q[1]), i32x4_add(q[2], q[3])));
    }
    words[4] = [
        d,
        d * sums[0] as f32,
        d * sums[1] as f32,
        d * (sums[0] + sums[1]) as f32,
    ]
    .map(f32::to_bits);
    record
}

/// `VECS` vectors of activations times 4 weight rows.
#[inline(never)]
unsafe fn tile_ints<const SPAN: usize, const VECS: usize>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    _ahead: *const u32,
) {
    let mut acc = [[f32x4_splat(0.0); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of vector `v` and row `r`.
                acc[r][v] = unsafe { v128_load(sums.wrapping_add((v * TILE + r) * LANES).cast()) };
            }
        }
    }
    for i in 0..k / 32 {
        let w = w.wrapping_add(i * RECORD);
        let x = x.wrapping_add(i * RECORD * VECS * LANES);
        // SAFETY: the records `i` of all rows.
        unsafe {
            if SPAN == 32 {
                add_span::<VECS, INTEGERS>(&mut acc, w, x, 0);
            } else {
                add_span::<VECS, { INTEGERS / 2 }>(&mut acc, w, x, 0);
                add_span::<VECS, { INTEGERS / 2 }>(&mut acc, w, x, 1);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { v128_store(sums.wrapping_add((v * TILE + r) * LANES).cast(), acc[r][v]) };
        }
    }
}

/// Adds the products of `N` words from word `N·span` of a record on.
///
/// # Safety
/// The records of all rows must be readable.
#[inline(always)]
unsafe fn add_span<const VECS: usize, const N: usize>(
    acc: &mut [[v128; VECS]; ROWS],
    w: *const u32,
    x: *const u32,
    span: usize,
) {
    // SAFETY: the caller's promise; all offsets are inside the records.
    let load = |p: *const u32| unsafe { v128_load(p.cast()) };
    // SAFETY: as above.
    let splat = |p: *const u32| unsafe { v128_load32_splat(p) };
    let word = |j: usize, v: usize| x.wrapping_add((j * VECS + v) * LANES);
    let mut int = [[i32x4_splat(0); VECS]; ROWS];
    for j in N * span..N * span + N {
        let mut xs = [i32x4_splat(0); VECS];
        for v in 0..VECS {
            xs[v] = load(word(j, v));
        }
        for r in 0..ROWS {
            let w = splat(w.wrapping_add(r * ROW + j));
            for v in 0..VECS {
                // At most 32 products of 2⁷ and 2¹⁵ in a lane.
                int[r][v] = i32x4_add(int[r][v], i32x4_dot_i16x8(xs[v], w));
            }
        }
    }
    for v in 0..VECS {
        let d = load(word(INTEGERS, v));
        let x_sum = load(word(INTEGERS + if N == INTEGERS { 3 } else { 1 + span }, v));
        for r in 0..ROWS {
            let factors = w.wrapping_add(r * ROW + INTEGERS + span);
            let (scale, offset) = (splat(factors), splat(factors.wrapping_add(2)));
            let product = f32x4_mul(f32x4_convert_i32x4(int[r][v]), d);
            let sum = f32x4_add(f32x4_mul(product, scale), f32x4_mul(x_sum, offset));
            acc[r][v] = f32x4_add(acc[r][v], sum);
        }
    }
}
