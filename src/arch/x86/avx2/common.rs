//! Loads and stores that files of this level share.

use std::arch::x86_64::*;

#[inline]
#[target_feature(enable = "sse2")]
pub(in crate::arch::x86) fn load_16(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch::x86) fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch::x86) fn load_i16(x: &[i16; 16]) -> __m256i {
    load_32(bytemuck::cast_ref(x))
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch::x86) fn load_f32(x: &[f32; 8]) -> __m256 {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "sse2")]
pub(in crate::arch::x86) fn store_i16(to: &mut [i16; 8], x: __m128i) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) }
}

#[inline]
pub(in crate::arch::x86) fn halves_of(x: &[f32; 16]) -> &[[f32; 8]; 2] {
    bytemuck::cast_ref(x)
}
