//! Products with many activation rows on bf16 tiles.
//!
//! A panel row is 32 weights to 16 words, as a tile of weights wants them, and the packed activations
//! are the words of 16 rows side by side, as a tile of the other operand does: tiles are loaded from
//! both without any more shuffling, and the tile of sums comes out as the shared loops keep it.
//! A register tile is 2 × 2 tiles of sums: four products for four loads, 64 cycles of the multiplier
//! for 32 of the load ports (Intel's optimisation manual, chapter on AMX). The weights of a panel
//! stay in the L1 cache; the activations stream through it from L2, at a quarter of the bytes per
//! cycle that L2 can give.
//!
//! Block formats are rounded to bf16, which makes 0.4 of the error of 8-bit activations. F16 and BF16
//! weights are to stay exact: each factor is two bf16 numbers, `x = hi + lo`, and the four products go
//! into the same sum. What activations lose is at most 2⁻¹⁸ of them, weights nothing. That is a quarter
//! of the rate, and still several times that of `f32` multiply-adds.
//! F32 weights have more bits than that, and use the `f32` panels of AVX-512.
//!
//! The level was written without such a CPU at hand and checked against an emulation of the tile
//! instructions (feature `emulate-amx`); its numbers of rows and prefetch distances are reasoned, not
//! measured.

use super::tiles::{Tiles, tile_dpbf16ps, tile_loadd, tile_stored, tile_zero};
use crate::arch::avx512::{gemm as avx512, peak};
use crate::arch::gemm::{BLOCK, Panels, TILE, kernel, table};
use crate::arch::{ColumnsMut, Element, Gemm};
use crate::quant::*;
use std::arch::x86_64::*;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::F32 => avx512::gemm_for(dtype),
        DType::F16 | DType::BF16 => const { on_tiles::<Bf16<true>>(16) },
        _ => const { on_tiles::<Bf16<false>>(8) },
    }
}

const fn on_tiles<P: Panels>(min_rows: usize) -> Gemm {
    Gemm { kernel: with_tiles::<P>, ..table::<P>(min_rows) }
}

unsafe fn with_tiles<P: Panels>(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], packed: &[u8], k: usize) {
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    // SAFETY: the caller's promise.
    unsafe { kernel::<P>(y, dtype, w, packed, k) }
}

/// Four independent tiles of sums, as in [`tile`], without loads.
pub(super) unsafe fn peak(element: Element, rounds: u64) -> u64 {
    if element != Element::Bf16 {
        // SAFETY: this level includes AVX-512.
        return unsafe { peak::peak(element, rounds) };
    }
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    for _ in 0..rounds {
        // SAFETY: a configuration is loaded, which leaves all tiles zero.
        unsafe { multiply::<2>() };
    }
    rounds * 4 * 2 * (LANES * LANES * GROUP) as u64
}

/// Panels of bf16 pairs; `SPLIT`: of `hi` and, 16 words on, of `lo`.
enum Bf16<const SPLIT: bool> {}

/// Values of a row of a tile.
const GROUP: usize = 32;
/// Words of such a row, and rows of a tile.
const LANES: usize = 16;

impl<const SPLIT: bool> Panels for Bf16<SPLIT> {
    const ELEMENT: (Element, u64) = (Element::Bf16, if SPLIT { 4 } else { 1 });
    const LANES: usize = LANES;
    const VECS: usize = 2;
    const BLOCK: usize = if SPLIT { BLOCK } else { 2 * BLOCK };
    const DEPTH: usize = Self::BLOCK;

    fn words(k: usize) -> usize {
        k.div_ceil(GROUP) * words_per_group(SPLIT)
    }

    fn rows(_vecs: usize) -> usize {
        TILE
    }

    unsafe fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
        // SAFETY: the caller's promise.
        unsafe { pack::<SPLIT>(x, k, packed) }
    }

    unsafe fn unpack(dtype: DType, bytes: &[u8], out: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { if SPLIT { unpack_split(dtype, bytes, out) } else { unpack(dtype, bytes, out) } }
    }

    unsafe fn tile(
        vecs: usize,
        w: *const u32,
        x: *const u32,
        k: usize,
        sums: *mut f32,
        first: bool,
        ahead: *const u32,
    ) {
        let tile = if vecs == 1 { tile::<SPLIT, 1> } else { tile::<SPLIT, 2> };
        // SAFETY: the caller's promise; `with_tiles` has loaded a configuration.
        unsafe { tile(w, x, k.div_ceil(GROUP), sums, first, ahead) }
    }

    unsafe fn transpose(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
        // SAFETY: the caller's promise.
        unsafe { avx512::store_transposed(sums, y, stride, rows, cols) }
    }
}

const fn words_per_group(split: bool) -> usize {
    if split { 2 * LANES } else { LANES }
}

/// Groups of activations that are asked for before they are needed: L2 takes some 15 cycles, and a
/// group 64.
const AHEAD: usize = 2;

/// 32 weight rows times `VECS` registers of activations: tiles 0 to 3 are the sums (`2·row + vec`), 4 and
/// 5 weights, 6 and 7 activations.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const SPLIT: bool, const VECS: usize>(
    w: *const u32,
    x: *const u32,
    groups: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    let group = words_per_group(SPLIT);
    let (w_stride, x_stride) = (Bf16::<SPLIT>::panel_words(Bf16::<SPLIT>::BLOCK) * 4, VECS * LANES * 4);
    let w = [w, w.wrapping_add(LANES * w_stride / 4)];
    let sums_at = |r: usize, v: usize| sums.wrapping_add((v * TILE + r * LANES) * LANES);
    // SAFETY: the caller has a configuration loaded, and the tiles lie among the sums.
    unsafe {
        if first {
            tile_zero::<0>();
            tile_zero::<2>();
            if VECS == 2 {
                tile_zero::<1>();
                tile_zero::<3>();
            }
        } else {
            tile_loadd::<0>(sums_at(0, 0).cast(), LANES * 4);
            tile_loadd::<2>(sums_at(1, 0).cast(), LANES * 4);
            if VECS == 2 {
                tile_loadd::<1>(sums_at(0, 1).cast(), LANES * 4);
                tile_loadd::<3>(sums_at(1, 1).cast(), LANES * 4);
            }
        }
    }
    for g in 0..groups {
        let next = match g + AHEAD < groups {
            true => x.wrapping_add((g + AHEAD) * group * VECS * LANES),
            false => ahead.wrapping_add((g + AHEAD - groups) * group * VECS * LANES),
        };
        for line in 0..group * VECS {
            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line * LANES).cast());
        }
        let x = x.wrapping_add(g * group * VECS * LANES);
        let w = [w[0].wrapping_add(g * group), w[1].wrapping_add(g * group)];
        // SAFETY: as above; tiles of weights lie in the panel, those of activations in `x`.
        unsafe {
            weights(w, w_stride);
            activations::<VECS>(x, x_stride);
            multiply::<VECS>();
            if SPLIT {
                // hi·lo, lo·lo, lo·hi: each time only one operand has to be loaded.
                activations::<VECS>(x.wrapping_add(LANES * VECS * LANES), x_stride);
                multiply::<VECS>();
                weights([w[0].wrapping_add(LANES), w[1].wrapping_add(LANES)], w_stride);
                multiply::<VECS>();
                activations::<VECS>(x, x_stride);
                multiply::<VECS>();
            }
        }
    }
    // SAFETY: as above.
    unsafe {
        tile_stored::<0>(sums_at(0, 0), LANES * 4);
        tile_stored::<2>(sums_at(1, 0), LANES * 4);
        if VECS == 2 {
            tile_stored::<1>(sums_at(0, 1), LANES * 4);
            tile_stored::<3>(sums_at(1, 1), LANES * 4);
        }
    }
}

#[inline(always)]
unsafe fn weights(w: [*const u32; 2], stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_loadd::<4>(w[0], stride);
        tile_loadd::<5>(w[1], stride);
    }
}

#[inline(always)]
unsafe fn activations<const VECS: usize>(x: *const u32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_loadd::<6>(x, stride);
        if VECS == 2 {
            tile_loadd::<7>(x.wrapping_add(LANES), stride);
        }
    }
}

#[inline(always)]
unsafe fn multiply<const VECS: usize>() {
    // SAFETY: the caller's promise.
    unsafe {
        tile_dpbf16ps::<0, 4, 6>();
        tile_dpbf16ps::<2, 5, 6>();
        if VECS == 2 {
            tile_dpbf16ps::<1, 4, 7>();
            tile_dpbf16ps::<3, 5, 7>();
        }
    }
}

/// 32 values as `hi` and `lo`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn split([low, high]: [__m512; 2]) -> [__m512i; 2] {
    let hi = avx512::bf16_pairs(low, high);
    let widened = [_mm512_castsi512_si256(hi), _mm512_extracti64x4_epi64::<1>(hi)];
    let mut rest = [low, high];
    for i in 0..2 {
        let hi = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(widened[i])));
        rest[i] = _mm512_sub_ps(rest[i], hi);
    }
    [hi, avx512::bf16_pairs(rest[0], rest[1])]
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack<const SPLIT: bool>(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (g, packed) in packed.chunks_mut(words_per_group(SPLIT) * n_vecs * LANES).enumerate() {
            let mut parts = [[_mm512_setzero_si512(); LANES]; 2];
            for (row, x) in x.chunks_exact(k).enumerate() {
                let x = avx512::load_f32(&x[g * GROUP..((g + 1) * GROUP).min(k)]);
                [parts[0][row], parts[1][row]] = split(x);
            }
            for (part, packed) in parts.into_iter().zip(packed.chunks_exact_mut(LANES * n_vecs * LANES)) {
                let words = avx512::transpose(part).into_iter();
                for (word, out) in words.zip(packed.chunks_exact_mut(n_vecs * LANES)) {
                    let out: &mut [u32] = &mut out[v * LANES..][..LANES];
                    // SAFETY: as many bytes.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), word) };
                }
            }
        }
    }
}

/// Expands a row's blocks, up to `Bf16::BLOCK` values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
unsafe fn unpack(dtype: DType, bytes: &[u8], out: *mut u32) {
    let f = dtype.float_format();
    for (i, bytes) in bytes.chunks(BLOCK / f.block_elems * f.block_bytes).enumerate() {
        avx512::unpack::<true>(dtype, bytes, out.wrapping_add(i * BLOCK / 2));
    }
}

/// Expands at most [`BLOCK`] values, zeros behind them up to a whole group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
unsafe fn unpack_split(dtype: DType, bytes: &[u8], out: *mut u32) {
    let mut values = [0.0f32; BLOCK];
    let n = bytes.len() / dtype.float_format().block_bytes;
    avx512::unpack::<false>(dtype, bytes, values.as_mut_ptr().cast());
    for (g, values) in values[..n.next_multiple_of(GROUP)].as_chunks::<GROUP>().0.iter().enumerate() {
        let out = out.wrapping_add(g * 2 * LANES);
        for (i, part) in split(avx512::load_f32(values)).into_iter().enumerate() {
            // SAFETY: the panel has room for the group.
            unsafe { _mm512_storeu_si512(out.wrapping_add(i * LANES).cast(), part) };
        }
    }
}
