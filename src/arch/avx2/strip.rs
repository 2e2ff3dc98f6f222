//! Products of weights with a few activation rows, eight weight rows at a time.

use super::elementwise::F32x8;
use super::gemm::{int_words, round};
use super::matmul::padded;
use crate::arch::lanes::methods;
use crate::arch::lanes::strip::{Kernel, Rows, Strip, Words, product, strip_kernels, strip_q8, strip_q16};
use crate::arch::{ActForm, Acts, BlockQ8, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use std::arch::x86_64::*;

/// See [`Words`].
#[derive(Clone, Copy)]
struct U32x8(__m256i);

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn zero() -> U32x8 {
    U32x8(_mm256_setzero_si256())
}

strip_kernels!("avx2,fma,f16c", U32x8, zero());

impl Words for U32x8 {
    type F = F32x8;

    methods! {
        prefetch(self, p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        splat(self, x: u32) -> U32x8 = U32x8(_mm256_set1_epi32(x.cast_signed()));
        floats(self) -> F32x8 = F32x8(_mm256_setzero_ps());
        and(self, other: U32x8) -> U32x8 = U32x8(_mm256_and_si256(self.0, other.0));
        or(self, other: U32x8) -> U32x8 = U32x8(_mm256_or_si256(self.0, other.0));
        sub_bytes(self, other: U32x8) -> U32x8 = U32x8(_mm256_sub_epi8(self.0, other.0));
        shl(self, bits: u32) -> U32x8 = U32x8(_mm256_sll_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        shr(self, bits: u32) -> U32x8 = U32x8(_mm256_srl_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        sar(self, bits: u32) -> U32x8 = U32x8(_mm256_sra_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        spread(self, i: u32) -> U32x8 = {
            let first = _mm256_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C, 0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C);
            U32x8(_mm256_shuffle_epi8(self.0, _mm256_add_epi8(first, _mm256_set1_epi8(i as i8))))
        };
        look_up(self, table: &[i8; 16]) -> U32x8 = {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            U32x8(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), self.0))
        };
        to_f32(self) -> F32x8 = F32x8(_mm256_cvtepi32_ps(self.0));
        f16(self) -> F32x8 = {
            let low = _mm256_and_si256(self.0, _mm256_set1_epi32(0xFFFF));
            let (a, b) = (_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            F32x8(_mm256_cvtph_ps(_mm_packus_epi32(a, b)))
        };
    }

    #[inline(always)]
    fn halves(self, signed: bool) -> [U32x8; 2] {
        // SAFETY: a register exists, so the CPU has the level's features.
        let [even, odd] = unsafe { halves(self.0, signed) };
        [U32x8(even), U32x8(odd)]
    }

    #[inline(always)]
    unsafe fn transposed(self, p: *const u8, stride: usize) -> [U32x8; 4] {
        // SAFETY: the caller's promise; a register exists.
        let [a, b, c, d] = unsafe { transposed(p, stride) };
        [U32x8(a), U32x8(b), U32x8(c), U32x8(d)]
    }

    #[inline(always)]
    unsafe fn dot_bytes(self, bits: u32, [a, b, c, d]: [U32x8; 4], x: *const i8) -> U32x8 {
        // SAFETY: the caller's promise; a register exists.
        U32x8(unsafe { dot_bytes(self.0, bits, [a.0, b.0, c.0, d.0], x.cast()) })
    }

    #[inline(always)]
    unsafe fn dot_halves(self, [a, b, c, d]: [U32x8; 4], x: *const i16) -> U32x8 {
        // SAFETY: the caller's promise; a register exists.
        U32x8(unsafe { dot_halves(self.0, [a.0, b.0, c.0, d.0], x.cast()) })
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves(bytes: __m256i, signed: bool) -> [__m256i; 2] {
    if signed {
        [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)), _mm256_srai_epi16::<8>(bytes)]
    } else {
        [_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16::<8>(bytes)]
    }
}

/// See [`Words::transposed`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transposed(p: *const u8, stride: usize) -> [__m256i; 4] {
    // 16 bytes of every fourth row, then the 4 × 4 words in each 128-bit lane.
    let mut rows = [_mm256_setzero_si256(); 4];
    for r in 0..4 {
        let row = p.wrapping_add(r * stride);
        // SAFETY: the caller's promise.
        let first = unsafe { _mm_loadu_si128(row.cast()) };
        // SAFETY: the caller's promise.
        let second = unsafe { _mm_loadu_si128(row.wrapping_add(4 * stride).cast()) };
        rows[r] = _mm256_set_m128i(second, first);
    }
    let (a, b) = (_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[0], rows[1]));
    let (c, d) = (_mm256_unpacklo_epi32(rows[2], rows[3]), _mm256_unpackhi_epi32(rows[2], rows[3]));
    [_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)]
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dot_bytes(sum: __m256i, bits: u32, w: [__m256i; 4], x: *const i32) -> __m256i {
    let mut products = [_mm256_setzero_si256(); 4];
    for t in 0..4 {
        // SAFETY: the caller's promise.
        let x = unsafe { x.wrapping_add(t).read_unaligned() };
        products[t] = _mm256_maddubs_epi16(w[t], _mm256_set1_epi32(x));
    }
    let one = _mm256_set1_epi16(1);
    let (a, b) = (_mm256_add_epi16(products[0], products[1]), _mm256_add_epi16(products[2], products[3]));
    if bits <= 5 {
        // Sums of 8 products below 2⁵·127: less than 2¹⁵.
        _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(a, b), one))
    } else {
        // Sums of 4 products below 2⁶·127.
        _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(a, one)), _mm256_madd_epi16(b, one))
    }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dot_halves(sum: __m256i, w: [__m256i; 4], x: *const i32) -> __m256i {
    let mut sum = sum;
    for t in 0..4 {
        // SAFETY: the caller's promise.
        let x = unsafe { x.wrapping_add(t).read_unaligned() };
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w[t], _mm256_set1_epi32(x)));
    }
    sum
}

/// Rounds a row of activations, with the very results of the scalar level.
#[target_feature(enable = "avx2")]
pub(in crate::arch) fn quantize_q8(x: &[f32], blocks: &mut [BlockQ8]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ8::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_256(x, block),
            None => quantize_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn quantize_256(x: &[f32; 256], block: &mut BlockQ8) {
    let x: &[[f32; 32]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let record: [[f32; 8]; 3] = round::<true>(x);
        block.q[b] = bytemuck::cast(record[0]);
        let factors = &record.as_flattened()[int_words(true)..];
        block.d[b] = factors[0];
        block.s16[2 * b..][..2].copy_from_slice(&factors[1..3]);
        block.s[b] = factors[3];
    }
}
