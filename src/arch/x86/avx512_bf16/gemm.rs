//! Products with many activation rows: bf16 panels for Q4_1 and Q5_1, as fast as the 16-bit
//! integers of the AVX-512 level.

use crate::arch::gemm::{
    BLOCK, Panels, RegisterTile, SmallBatch, UnpackRows, prefetch_line, table,
};
use crate::arch::table::{Gemm, PanelElement};
use crate::arch::x86::avx2::unpack::{Groups, with_groups};
use crate::arch::x86::avx512::common::{
    LANES, interleave, load_sums, load_up_to_32, store_all, store_sums, transpose,
};
use crate::arch::x86::avx512::gemm as avx512;
use crate::arch::x86::avx512::panels::floats::{group, store_transposed};
use crate::quant::*;
use std::arch::x86_64::*;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::Q4_1 | DType::Q5_1 => const { table::<Bf16Panels>() },
        _ => avx512::gemm_for(dtype),
    }
}

/// Panels of bf16 pairs.
enum Bf16Panels {}

impl Panels for Bf16Panels {
    const LANES: usize = LANES;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: 16,
            multiply: tile::<1, 16, false>,
        },
        RegisterTile {
            rows: 8,
            multiply: tile::<2, 8, false>,
        },
        RegisterTile {
            rows: 8,
            multiply: tile::<3, 8, false>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    fn words(k: usize) -> usize {
        k / 2
    }
}

impl UnpackRows for Bf16Panels {
    const ELEMENT: (PanelElement, u64) = (PanelElement::Bf16, 1);

    unsafe fn unpack(dtype: DType, blocks: &[u8], out: &mut [u32]) {
        // SAFETY: the caller's promise.
        unsafe { unpack(dtype, blocks, out) }
    }

    const SMALL_BATCH: Option<SmallBatch> = Some(SmallBatch {
        max_rows: 10,
        fill,
        tiles: &[tile::<1, 2, true>, tile::<1, 4, true>, tile::<1, 8, true>],
    });
}

/// `VECS` registers of activations times `ROWS` weight rows; with `TRANSPOSED`, of weights times
/// activation rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const VECS: usize, const ROWS: usize, const TRANSPOSED: bool>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    // SAFETY: the caller's promise.
    let mut acc = unsafe { load_sums::<VECS, ROWS>(sums, first) };
    for i in 0..k / 2 {
        if !TRANSPOSED {
            prefetch_line(ahead.wrapping_add(i * VECS * LANES).cast());
        }
        let mut xs = [_mm512_setzero_si512(); VECS];
        for v in 0..VECS {
            // SAFETY: word `i` of the rows in register `v`.
            xs[v] = unsafe { _mm512_loadu_si512(x.wrapping_add((i * VECS + v) * LANES).cast()) };
        }
        for r in 0..ROWS {
            let at = if TRANSPOSED {
                i * LANES + r
            } else {
                r * BLOCK / 2 + i
            };
            // SAFETY: word `i` of row `r`.
            let w = _mm512_set1_epi32(unsafe { w.wrapping_add(at).read() } as i32);
            for v in 0..VECS {
                acc[r][v] = _mm512_dpbf16_ps(acc[r][v], bf16(w), bf16(xs[v]));
            }
        }
    }
    // SAFETY: as above.
    unsafe { store_sums(sums, acc) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16(x: __m512i) -> __m512bh {
    // SAFETY: the same bits.
    unsafe { std::mem::transmute(x) }
}

/// Packs pairs of values; a row of a block format has a multiple of 32 of them.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (g, packed) in packed.chunks_exact_mut(LANES * n_vecs * LANES).enumerate() {
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
                *row = bf16_pairs(load_up_to_32(&x[32 * g..][..32]));
            }
            interleave(transpose(rows), packed, v, n_vecs);
        }
    }
}

/// Rounds to nearest even.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::arch) fn bf16_pairs([low, high]: [__m512; 2]) -> __m512i {
    let pairs = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: the same bits.
    unsafe { std::mem::transmute(pairs) }
}

/// Expands a row's blocks; `out` has room for the words of their values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
pub(in crate::arch) fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
    let out = out.as_chunks_mut().0;
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block>(bytes, out)
        };
    }
    with_groups!(
        dtype,
        blocks,
        unreachable!("{dtype} runs the scalar kernels")
    )
}

/// See [`SmallBatch::fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn fill(dtype: DType, rows: &[&[u8]; LANES], _: &mut [u32], transposed: &mut [u32]) {
    let transposed = transposed.as_chunks_mut().0.as_chunks_mut().0;
    macro_rules! blocks {
        ($block:ident) => {
            fill_blocks::<$block>(rows, transposed)
        };
    }
    with_groups!(
        dtype,
        blocks,
        unreachable!("{dtype} runs the scalar kernels")
    )
}

/// Expands blocks of 16 rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn fill_blocks<B: Groups>(rows: &[&[u8]; LANES], transposed: &mut [[[u32; LANES]; LANES]]) {
    let mut blocks: [&[B]; LANES] = [&[]; LANES];
    for r in 0..LANES {
        blocks[r] = bytemuck::cast_slice(rows[r]);
    }
    for i in 0..blocks[0].len() {
        for g in 0..B::GROUPS {
            let mut pairs = [_mm512_setzero_si512(); LANES];
            for r in 0..LANES {
                // SAFETY: this level includes AVX2 and F16C.
                let factors = unsafe { blocks[r][i].factors() };
                pairs[r] = bf16_pairs(group(&blocks[r][i], &factors, g));
            }
            store_all(&mut transposed[i * B::GROUPS + g], transpose(pairs));
        }
    }
}

/// Writes a group of a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn store(to: &mut [u32; LANES], values: [__m512; 2]) {
    // SAFETY: array and register have the same size.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bf16_pairs(values)) };
}

/// Expands blocks of signed bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn blocks<B: Groups>(bytes: &[u8], out: &mut [[u32; LANES]]) {
    for (i, block) in bytemuck::cast_slice::<u8, B>(bytes).iter().enumerate() {
        // SAFETY: this level includes AVX2 and F16C.
        let factors = unsafe { block.factors() };
        for g in 0..B::GROUPS {
            store(&mut out[i * B::GROUPS + g], group(block, &factors, g));
        }
    }
}
