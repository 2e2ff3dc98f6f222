//! Products of weights with a few activation rows, sixteen weight rows at a time.

use super::elementwise::F32x16;
use crate::arch::lanes::methods;
use crate::arch::lanes::strip::{Kernel, Rows, Strip, Words, product, strip_kernels, strip_q8, strip_q16};
use crate::arch::{ActForm, Acts, BlockQ8, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use std::arch::asm;
use std::arch::x86_64::*;

/// See [`Words`].
#[derive(Clone, Copy)]
struct U32x16(__m512i);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn zero() -> U32x16 {
    U32x16(_mm512_setzero_si512())
}

strip_kernels!("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni", U32x16, zero());

impl Words for U32x16 {
    type F = F32x16;

    methods! {
        prefetch(self, p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        splat(self, x: u32) -> U32x16 = U32x16(_mm512_set1_epi32(x.cast_signed()));
        floats(self) -> F32x16 = F32x16(_mm512_setzero_ps());
        and(self, other: U32x16) -> U32x16 = U32x16(_mm512_and_si512(self.0, other.0));
        or(self, other: U32x16) -> U32x16 = U32x16(_mm512_or_si512(self.0, other.0));
        sub_bytes(self, other: U32x16) -> U32x16 = U32x16(_mm512_sub_epi8(self.0, other.0));
        shl(self, bits: u32) -> U32x16 = U32x16(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        shr(self, bits: u32) -> U32x16 = U32x16(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        sar(self, bits: u32) -> U32x16 = U32x16(_mm512_sra_epi32(self.0, _mm_cvtsi32_si128(bits.cast_signed())));
        spread(self, i: u32) -> U32x16 = {
            let first = _mm512_set4_epi32(0x0C0C_0C0C, 0x0808_0808, 0x0404_0404, 0);
            U32x16(_mm512_shuffle_epi8(self.0, _mm512_add_epi8(first, _mm512_set1_epi8(i as i8))))
        };
        look_up(self, table: &[i8; 16]) -> U32x16 = {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            U32x16(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), self.0))
        };
        to_f32(self) -> F32x16 = F32x16(_mm512_cvtepi32_ps(self.0));
        f16(self) -> F32x16 = F32x16(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(self.0)));
    }

    #[inline(always)]
    fn halves(self, signed: bool) -> [U32x16; 2] {
        // SAFETY: a register exists, so the CPU has the level's features.
        let [even, odd] = unsafe { halves(self.0, signed) };
        [U32x16(even), U32x16(odd)]
    }

    #[inline(always)]
    unsafe fn transposed(self, p: *const u8, stride: usize) -> [U32x16; 4] {
        // SAFETY: the caller's promise; a register exists.
        let [a, b, c, d] = unsafe { transposed(p, stride) };
        [U32x16(a), U32x16(b), U32x16(c), U32x16(d)]
    }

    #[inline(always)]
    unsafe fn dot_bytes(self, _bits: u32, [a, b, c, d]: [U32x16; 4], x: *const i8) -> U32x16 {
        // SAFETY: the caller's promise; a register exists.
        U32x16(unsafe { dot_bytes(self.0, [a.0, b.0, c.0, d.0], x.cast()) })
    }

    #[inline(always)]
    unsafe fn dot_halves(self, [a, b, c, d]: [U32x16; 4], x: *const i16) -> U32x16 {
        // SAFETY: the caller's promise; a register exists.
        U32x16(unsafe { dot_halves(self.0, [a.0, b.0, c.0, d.0], x.cast()) })
    }
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn halves(bytes: __m512i, signed: bool) -> [__m512i; 2] {
    if signed {
        [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes)), _mm512_srai_epi16::<8>(bytes)]
    } else {
        [_mm512_and_si512(bytes, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16::<8>(bytes)]
    }
}

/// See [`Words::transposed`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transposed(p: *const u8, stride: usize) -> [__m512i; 4] {
    // 16 bytes of every fourth row, then the 4 × 4 words in each 128-bit lane.
    let mut rows = [_mm512_setzero_si512(); 4];
    for r in 0..4 {
        let row = p.wrapping_add(r * stride);
        // SAFETY: the caller's promise.
        let first = unsafe { _mm_loadu_si128(row.cast()) };
        // SAFETY: the caller's promise.
        let second = unsafe { _mm_loadu_si128(row.wrapping_add(4 * stride).cast()) };
        // SAFETY: the caller's promise.
        let third = unsafe { _mm_loadu_si128(row.wrapping_add(8 * stride).cast()) };
        // SAFETY: the caller's promise.
        let fourth = unsafe { _mm_loadu_si128(row.wrapping_add(12 * stride).cast()) };
        let (low, high) = (_mm256_set_m128i(second, first), _mm256_set_m128i(fourth, third));
        rows[r] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    let (a, b) = (_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
    let (c, d) = (_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
    [_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_bytes(sum: __m512i, w: [__m512i; 4], x: *const i32) -> __m512i {
    let mut sum = sum;
    for t in 0..4 {
        // SAFETY: the caller's promise.
        let x = unsafe { x.wrapping_add(t).read_unaligned() };
        sum = _mm512_dpbusd_epi32(sum, w[t], _mm512_set1_epi32(x));
    }
    sum
}

/// In assembly, because LLVM takes the intrinsic apart into a multiplication and an addition.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_halves(sum: __m512i, w: [__m512i; 4], x: *const i32) -> __m512i {
    let mut sum = sum;
    // SAFETY: the caller's promise; the CPU has the instruction.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpwssd {sum}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpwssd {sum}, {c}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpwssd {sum}, {d}, dword ptr [{x} + 12]{{1to16}}",
            sum = inout(zmm_reg) sum, a = in(zmm_reg) w[0], b = in(zmm_reg) w[1], c = in(zmm_reg) w[2],
            d = in(zmm_reg) w[3], x = in(reg) x, options(pure, readonly, nostack, preserves_flags),
        );
    }
    sum
}
