//! Dequantisation of keys and values, through which prompts read them, and rounding to the
//! precisions of tiers.

use crate::arch::arrays;
use crate::arch::attention::KV_BLOCK;
use crate::arch::kv;
use crate::arch::kv::KvType;
use std::arch::x86_64::*;

/// The shared source, compiled for this level.
pub(super) mod shared {
    crate::arch::kv::kv_kernels!("avx512f,avx512bw,avx512vl,avx512dq");
}

const GROUP: usize = 32;

/// See [`crate::arch::Arch::load_kv`]: the same values as the shared source, which handles the
/// other precisions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(in crate::arch) fn load_kv(kind: KvType, block: &[u8], dim: usize, rows: &mut [f32]) {
    if !dim.is_multiple_of(GROUP) {
        return kv::load(kind, block, dim, rows);
    }
    match kind {
        KvType::Q8 => dequantize(kind, block, dim, rows, |upper, lower, scale| {
            q8(upper, lower, scale)
        }),
        KvType::Q4 => dequantize(kind, block, dim, rows, |upper, _, scale| q4(upper, scale)),
        _ => kv::load(kind, block, dim, rows),
    }
}

/// Dequantises rows of whole groups; `values` computes a group from its planes and its scale.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn dequantize(
    kind: KvType,
    block: &[u8],
    dim: usize,
    rows: &mut [f32],
    values: impl Fn(__m128i, *const u8, __m512) -> [__m512; 2],
) {
    let [upper_row, lower_row, scale_row] = kind.row_bytes(dim);
    let (n_rows, n_groups) = (rows.len() / dim, dim / GROUP);
    assert!(
        n_rows <= KV_BLOCK && block.len() == kind.block_bytes(dim),
        "load_kv: {kind} block"
    );
    let (upper, lower) = (block.as_ptr(), block[KV_BLOCK * upper_row..].as_ptr());
    let scales = block[KV_BLOCK * (upper_row + lower_row)..].as_ptr();
    let (of_upper, of_lower, of_scale) = (
        upper_row / n_groups,
        lower_row / n_groups,
        scale_row / n_groups,
    );
    // Rows lie one after the other in every plane.
    for g in 0..n_rows * n_groups {
        // SAFETY: the planes have that many groups.
        let (upper, lower, scale) = unsafe {
            (
                upper.add(g * of_upper),
                lower.add(g * of_lower),
                scales.add(g * of_scale),
            )
        };
        // SAFETY: a group's upper bits, and its scale.
        let (codes, bits) = unsafe {
            (
                _mm_loadu_si128(upper.cast()),
                scale.cast::<u16>().read_unaligned(),
            )
        };
        let [a, b] = values(
            codes,
            lower,
            _mm512_set1_ps(f32::from_bits(u32::from(bits) << 16)),
        );
        let to = rows[g * GROUP..][..GROUP].as_mut_ptr();
        // SAFETY: room for a group.
        unsafe {
            _mm512_storeu_ps(to, a);
            _mm512_storeu_ps(to.add(GROUP / 2), b);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn q4(upper: __m128i, scale: __m512) -> [__m512; 2] {
    let middles = _mm512_setr_ps(
        -7.5, -6.5, -5.5, -4.5, -3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5,
    );
    let values = _mm512_mul_ps(middles, _mm512_mul_ps(scale, _mm512_set1_ps(16.0)));
    // A lookup reads the lower four bits of each index.
    let codes = _mm512_cvtepu8_epi32(upper);
    [
        _mm512_permutexvar_ps(codes, values),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), values),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn q8(upper: __m128i, lower: *const u8, scale: __m512) -> [__m512; 2] {
    // SAFETY: a group has as many lower bits as upper ones.
    let lower = unsafe { _mm_loadu_si128(lower.cast()) };
    let high = _mm_set1_epi8(0xf0u8 as i8);
    // Selects the second operand where `high` is set, else the third.
    let first = _mm_ternarylogic_epi32::<0xca>(high, _mm_slli_epi16::<4>(upper), lower);
    let second = _mm_ternarylogic_epi32::<0xca>(high, upper, _mm_srli_epi16::<4>(lower));
    let values = |codes: __m128i| {
        let codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
        _mm512_mul_ps(_mm512_sub_ps(codes, _mm512_set1_ps(127.5)), scale)
    };
    [values(first), values(second)]
}

/// See [`crate::arch::Arch::store_kv`]: the same bytes as the shared source, which handles the
/// other precisions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(in crate::arch) fn quantize_kv(kind: KvType, block: &mut [u8], i: usize, row: &[f32]) {
    if !row.len().is_multiple_of(GROUP) || !matches!(kind, KvType::Q8 | KvType::Q4) {
        return shared::quantize_kv(kind, block, i, row);
    }
    let [upper_row, lower_row, scale_row] = kind.row_bytes(row.len());
    let (upper, rest) = block.split_at_mut(KV_BLOCK * upper_row);
    let (lower, scales) = rest.split_at_mut(KV_BLOCK * lower_row);
    let upper = upper[i * upper_row..][..upper_row].chunks_exact_mut(GROUP / 2);
    let scales = scales[i * scale_row..][..scale_row].chunks_exact_mut(size_of::<u16>());
    let mut lower = lower[i * lower_row..][..lower_row].chunks_exact_mut(GROUP / 2);
    for ((values, upper), scale) in row.chunks_exact(GROUP).zip(upper).zip(scales) {
        // SAFETY: the halves of a group.
        let halves = unsafe {
            [
                _mm512_loadu_ps(values.as_ptr()),
                _mm512_loadu_ps(values[GROUP / 2..].as_ptr()),
            ]
        };
        // The bits of magnitudes have the order of these, and those of NaN are the largest.
        let [a, b] = arrays::map(halves, |x| _mm512_castps_si512(_mm512_abs_ps(x)));
        let bits = kv::scale_of(f32::from_bits(
            _mm512_reduce_max_epi32(_mm512_max_epi32(a, b)) as u32,
        ));
        let codes = match bits {
            0 | kv::NO_NUMBER => [_mm_set1_epi8(0x80u8 as i8); 2],
            _ => arrays::map(halves, |x| {
                let x = _mm512_mul_ps(x, _mm512_set1_ps(1.0 / kv::widen(bits)));
                let x = _mm512_min_ps(
                    _mm512_add_ps(x, _mm512_set1_ps(128.0)),
                    _mm512_set1_ps(255.0),
                );
                // No value is negative, so truncation rounds down.
                _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x))
            }),
        };
        scale.copy_from_slice(&bits.to_le_bytes());
        let (high, low) = (_mm_set1_epi8(0xf0u8 as i8), _mm_set1_epi8(15));
        let nibbles = |a, b| _mm_or_si128(_mm_and_si128(a, low), _mm_and_si128(b, high));
        // SAFETY: room for the group's upper bits.
        unsafe {
            _mm_storeu_si128(
                upper.as_mut_ptr().cast(),
                nibbles(_mm_srli_epi16::<4>(codes[0]), codes[1]),
            )
        };
        if let Some(lower) = lower.next() {
            // SAFETY: room for the group's lower bits.
            unsafe {
                _mm_storeu_si128(
                    lower.as_mut_ptr().cast(),
                    nibbles(codes[0], _mm_slli_epi16::<4>(codes[1])),
                )
            };
        }
    }
}
