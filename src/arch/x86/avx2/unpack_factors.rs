//! Scales and offsets of blocks as registers of floating-point numbers.

use super::common::load_16;
use super::unpack_order::shifted;
use crate::arch::arrays;
use bytemuck::Pod;
use std::arch::asm;
use std::arch::x86_64::*;

/// The scales of IQ4_XS for the blocks in `b`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn six_bits(low: __m256i, high: __m256i, b: __m256i) -> __m256i {
    let low = shifted(low, _mm256_slli_epi32::<2>(b), _mm256_set1_epi32(15));
    let high = shifted(high, _mm256_slli_epi32::<1>(b), _mm256_set1_epi32(3));
    _mm256_sub_epi32(
        _mm256_or_si256(low, _mm256_slli_epi32::<4>(high)),
        _mm256_set1_epi32(32),
    )
}

/// [`BlockMxfp4::half_scale`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn half_scale(e: __m256i) -> __m256 {
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
}

/// Scales, times `odd` for every second block, and offsets of Q4_K and Q5_K, as
/// [`unpack_scales_mins`] describes them; both begin with the same 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scales_mins<B: Pod>(block: &B, odd: f32) -> ([__m256; 2], [__m256; 2]) {
    // `d` and `dmin`, then the words a, b, c: the low six bits of `a` are the first scales, those
    // of `b` the first minima; the last scales and minima are half a byte of `c`, and two bits
    // of `a` or `b`.
    let begin = load_16(bytemuck::bytes_of(block).first_chunk().expect("16 bytes"));
    let low = _mm_srlv_epi32(
        _mm_shuffle_epi32::<0b11_10_11_01>(begin),
        _mm_setr_epi32(0, 0, 0, 4),
    );
    let low = _mm_and_si128(
        low,
        _mm_setr_epi32(0x3F3F_3F3F, 0x0F0F_0F0F, 0x3F3F_3F3F, 0x0F0F_0F0F),
    );
    let high = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_10_01_01>(begin));
    let high = _mm_and_si128(high, _mm_setr_epi32(0, 0x3030_3030, 0, 0x3030_3030));
    let both = _mm_or_si128(low, high);
    let factors = _mm_cvtph_ps(begin);
    let d = _mm256_broadcastss_ps(factors);
    let dmin = _mm256_broadcastss_ps(_mm_movehdup_ps(factors));
    let d = _mm256_mul_ps(d, _mm256_setr_ps(1.0, odd, 1.0, odd, 1.0, odd, 1.0, odd));
    let scale = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both)), d);
    let min = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(both, both));
    let min = _mm256_mul_ps(_mm256_cvtepi32_ps(min), negated(dmin));
    (each_twice(scale), each_twice(min))
}

/// Each number twice.
#[inline]
#[target_feature(enable = "avx2")]
fn each_twice(x: __m256) -> [__m256; 2] {
    [
        _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
        _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)),
    ]
}

/// Each byte twice.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn twice(x: u64) -> __m128i {
    let x = _mm_cvtsi64_si128(x.cast_signed());
    _mm_unpacklo_epi8(x, x)
}

/// Eight bytes in one word. `from_le_bytes` would go through memory here, and stall.
#[inline(always)]
pub(in crate::arch) fn joined(x: [&u8; 8]) -> u64 {
    let [a, b, c, d, e, f, g, h] = x;
    let low = u32::from(*a) | u32::from(*b) << 8 | u32::from(*c) << 16 | u32::from(*d) << 24;
    let high = u32::from(*e) | u32::from(*f) << 8 | u32::from(*g) << 16 | u32::from(*h) << 24;
    u64::from(low) | u64::from(high) << 32
}

/// Four words of 16 bits, the first one lowest, in a general register.
#[inline(always)]
pub(in crate::arch) fn four([a, b, c, d]: [[u8; 2]; 4]) -> u64 {
    let word = |x| u64::from(u16::from_le_bytes(x));
    let mut words = word(a) | word(b) << 16 | word(c) << 32 | word(d) << 48;
    // The compiler would insert each word into a vector: on Intel's CPUs, 15 instructions for the
    // one port that shuffles.
    // SAFETY: no instruction.
    unsafe { asm!("/* {} */", inout(reg) words, options(pure, nomem, nostack, preserves_flags)) };
    words
}

/// Unsigned bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn widened(x: __m128i) -> [__m256i; 2] {
    [
        _mm256_cvtepu8_epi32(x),
        _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

/// Signed bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn widened_signed(x: &[i8; 16]) -> [__m256i; 2] {
    let x = load_16(bytemuck::cast_ref(x));
    [
        _mm256_cvtepi8_epi32(x),
        _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn times(x: [__m256i; 2], factor: __m256) -> [__m256; 2] {
    [
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[0]), factor),
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[1]), factor),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn scaled_by(x: [__m256; 2], factor: f32) -> [__m256; 2] {
    [
        _mm256_mul_ps(x[0], _mm256_set1_ps(factor)),
        _mm256_mul_ps(x[1], _mm256_set1_ps(factor)),
    ]
}

/// Each f16 twice.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn halves(x: [&[u8; 2]; 8]) -> [__m256; 2] {
    each_half_twice(load_16(bytemuck::cast_ref(&arrays::map(x, |x| *x))))
}

/// [`halves`], combined in general registers. On Sapphire Rapids one row of Q4_0, Q5_0 and IQ4_NL
/// takes 8 to 25 % less, one of Q8_0 and Q5_1 20 to 30 % longer, as other ports are full there.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn combined_halves([a, b, c, d, e, f, g, h]: [&[u8; 2]; 8]) -> [__m256; 2] {
    each_half_twice(_mm_set_epi64x(
        four([*e, *f, *g, *h]).cast_signed(),
        four([*a, *b, *c, *d]).cast_signed(),
    ))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn each_half_twice(x: __m128i) -> [__m256; 2] {
    [
        _mm256_cvtph_ps(_mm_unpacklo_epi16(x, x)),
        _mm256_cvtph_ps(_mm_unpackhi_epi16(x, x)),
    ]
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn half(x: [u8; 2]) -> __m256 {
    _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(x).into(),
    )))
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn negated(x: __m256) -> __m256 {
    _mm256_sub_ps(_mm256_setzero_ps(), x)
}
