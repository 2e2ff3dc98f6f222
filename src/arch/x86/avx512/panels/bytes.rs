//! Panels of bytes, for the transposed product with block formats.

use super::floats::{store_transposed, unpack};
use crate::arch::acts::byte_scale;
use crate::arch::arrays;
use crate::arch::gemm::{BLOCK, Panels, RegisterTile, prefetch_line};
use crate::arch::transposed::{COLUMNS, TransposedPanels};
use crate::arch::x86::avx2::unpack::knows;
use crate::arch::x86::avx512::common::{
    LANES, interleave, load_sums, load_up_to_32, load512, store_sums, transpose,
};
use crate::quant::*;
use std::arch::x86_64::*;
use std::ops::Range;

/// Panels of the transposed product: of columns, and of gradients, as bytes with a scale for each
/// 64.
///
/// Both consist of records of 64 values: 16 words of bytes, the scale and, for gradients,
/// `−128·Σq`, the initial value of sums of products, as the bytes of weights have a zero point of
/// 128. `d·q` with `|q| ≤ 127` is off by at most half of `d`, a 127th of the record's largest
/// magnitude.
pub(in crate::arch) enum BytePanels {}

impl BytePanels {
    /// Values per record.
    const SPAN: usize = 64;
    /// Words of bytes in a record; the scale and the start of the sums follow.
    const WORDS: usize = Self::SPAN / 4;
    const RECORD: usize = Self::WORDS + 2;
}

impl Panels for BytePanels {
    const LANES: usize = LANES;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: 8,
            multiply: byte_tile::<1, 8>,
        },
        RegisterTile {
            rows: 4,
            multiply: byte_tile::<2, 4>,
        },
        RegisterTile {
            rows: 4,
            multiply: byte_tile::<3, 4>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_bytes;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    #[inline]
    fn words(k: usize) -> usize {
        k.div_ceil(Self::SPAN) * Self::RECORD
    }
}

impl TransposedPanels for BytePanels {
    const KNOWS: fn(DType) -> bool = knows;
    const ROWS: usize = Self::SPAN;
    const EXPAND: unsafe fn(DType, &[u8], Range<usize>, &mut [f32]) = unpack;
    const TRANSPOSE: unsafe fn(*const f32, *mut u32) = transpose_bytes;
}

/// `VECS` registers of gradients times `ROWS` columns.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn byte_tile<const VECS: usize, const ROWS: usize>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    // SAFETY: the caller's promise.
    let mut acc = unsafe { load_sums::<VECS, ROWS>(sums, first) };
    for i in 0..k.div_ceil(BytePanels::SPAN) {
        let start = i * BytePanels::RECORD * VECS * LANES;
        for line in 0..7 {
            prefetch_line(ahead.wrapping_add(start + line * 8 * LANES).cast());
        }
        let x = x.wrapping_add(start);
        // SAFETY: word `j` of the record, for the rows in register `v`.
        let x = |j: usize, v: usize| unsafe {
            _mm512_loadu_si512(x.wrapping_add((j * VECS + v) * LANES).cast())
        };
        // SAFETY: word `j` of the record of column `r`.
        let w = |j: usize, r: usize| unsafe {
            w.wrapping_add((r * (BLOCK / BytePanels::SPAN) + i) * BytePanels::RECORD + j)
                .read()
        };
        let mut int = [[_mm512_setzero_si512(); VECS]; ROWS];
        for r in 0..ROWS {
            for v in 0..VECS {
                int[r][v] = x(BytePanels::WORDS + 1, v);
            }
        }
        for j in 0..BytePanels::WORDS {
            let mut xs = [_mm512_setzero_si512(); VECS];
            for v in 0..VECS {
                xs[v] = x(j, v);
            }
            for r in 0..ROWS {
                let w = _mm512_set1_epi32(w(j, r) as i32);
                for v in 0..VECS {
                    int[r][v] = _mm512_dpbusd_epi32(int[r][v], w, xs[v]);
                }
            }
        }
        for r in 0..ROWS {
            let scale = _mm512_set1_ps(f32::from_bits(w(BytePanels::WORDS, r)));
            for v in 0..VECS {
                let product = _mm512_mul_ps(
                    _mm512_cvtepi32_ps(int[r][v]),
                    _mm512_castsi512_ps(x(BytePanels::WORDS, v)),
                );
                acc[r][v] = _mm512_fmadd_ps(product, scale, acc[r][v]);
            }
        }
    }
    // SAFETY: as above.
    unsafe { store_sums(sums, acc) };
}

/// Scales of records and their inverses, given their largest magnitudes: NaN if one is not finite,
/// and 0 for all magnitudes below 2⁻¹⁰⁰.
#[inline]
#[target_feature(enable = "avx512f")]
fn byte_scales(largest: __m512i) -> (__m512, __m512) {
    let values = _mm512_castsi512_ps(largest);
    let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(values, _mm512_set1_ps(f32::INFINITY));
    let some =
        _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(finite, values, _mm512_set1_ps(2f32.powi(-100)));
    let scale = _mm512_maskz_div_ps(some, values, _mm512_set1_ps(127.0));
    let inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0), values);
    (
        _mm512_mask_mov_ps(_mm512_set1_ps(f32::NAN), finite, scale),
        inverse,
    )
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn pack_bytes(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (i, packed) in packed
            .chunks_exact_mut(BytePanels::RECORD * n_vecs * LANES)
            .enumerate()
        {
            let (mut words, mut scales) = ([_mm512_setzero_si512(); LANES], [0.0f32; LANES]);
            for (row, x) in x.chunks_exact(k).enumerate() {
                let x = &x[i * BytePanels::SPAN..k.min((i + 1) * BytePanels::SPAN)];
                (words[row], scales[row]) = round_bytes(x);
            }
            let words = transpose(words);
            let mut start = _mm512_setzero_si512();
            for word in words {
                start = _mm512_dpbusd_epi32(start, _mm512_set1_epi8(-128), word);
            }
            let start = _mm512_sub_epi32(_mm512_setzero_si512(), start);
            let record = words.into_iter().chain([load512(&scales), start]);
            interleave(record, packed, v, n_vecs);
        }
    }
}

/// Rounds at most 64 values to bytes, padded with zeros, and returns their scale, too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_bytes(x: &[f32]) -> (__m512i, f32) {
    let (first, second) = x.split_at(x.len().min(32));
    let ([a, b], [c, d]) = (load_up_to_32(first), load_up_to_32(second));
    let mut largest = _mm512_setzero_si512();
    let x = [a, b, c, d];
    for i in 0..4 {
        // The bits of positive numbers sort as the numbers do, NaN last.
        largest = _mm512_max_epu32(
            largest,
            _mm512_and_si512(_mm512_castps_si512(x[i]), _mm512_set1_epi32(i32::MAX)),
        );
    }
    let (scale, inverse) = byte_scale(_mm512_reduce_max_epu32(largest));
    let inverse = _mm512_set1_ps(inverse);
    let bytes = arrays::map(x, |x| {
        _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)))
    });
    // SAFETY: array and register have the same size.
    (
        unsafe { std::mem::transmute::<[__m128i; 4], __m512i>(bytes) },
        scale,
    )
}

/// Transposes columns of 64 rows to records of bytes.
#[target_feature(enable = "avx512f")]
unsafe fn transpose_bytes(values: *const f32, panel: *mut u32) {
    // SAFETY: a register of a row.
    let row = |r: usize| unsafe { _mm512_loadu_ps(values.wrapping_add(r * COLUMNS)) };
    let mut largest = _mm512_setzero_si512();
    for r in 0..BytePanels::SPAN {
        // The bits of positive numbers sort as the numbers do, NaN last.
        let bits = _mm512_and_si512(_mm512_castps_si512(row(r)), _mm512_set1_epi32(i32::MAX));
        largest = _mm512_max_epu32(largest, bits);
    }
    let (scale, inverse) = byte_scales(largest);
    // Adding this leaves an integer in the low byte, rounded to nearest even, with a zero point of
    // 128.
    let shifted_by = _mm512_set1_ps((3 << 22 | 128) as f32);
    let bits = |r: usize| _mm512_castps_si512(_mm512_fmadd_ps(row(r), inverse, shifted_by));
    let select = |mask: i32, a: __m512i, b: __m512i| {
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(mask), a, b)
    };
    let mut words = [_mm512_setzero_si512(); LANES];
    for (i, word) in words.iter_mut().enumerate() {
        let low = select(0xff, bits(4 * i), _mm512_slli_epi32::<8>(bits(4 * i + 1)));
        let high = _mm512_slli_epi32::<24>(bits(4 * i + 3));
        *word = select(
            0xffff,
            low,
            select(0xff_ffff, _mm512_slli_epi32::<16>(bits(4 * i + 2)), high),
        );
    }
    let mut scales = [0.0f32; LANES];
    // SAFETY: array and register have the same size.
    unsafe { _mm512_storeu_ps(scales.as_mut_ptr(), scale) };
    for (c, words) in transpose(words).into_iter().enumerate() {
        let out = panel.wrapping_add(c * (BLOCK / BytePanels::SPAN) * BytePanels::RECORD);
        // SAFETY: panel rows have room for a record.
        unsafe { _mm512_storeu_si512(out.cast(), words) };
        // SAFETY: as above.
        unsafe {
            out.wrapping_add(BytePanels::WORDS)
                .write(scales[c].to_bits())
        };
    }
}
