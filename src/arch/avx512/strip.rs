//! Products of weights with a few activation rows, sixteen weight rows at a time.

use super::elementwise::F32x16;
use crate::arch::lanes::strip::{Kernel, Rows, Strip, Words, product, strip_q8, strip_q16};
use crate::arch::{ActForm, Acts, BlockQ8, BlockQ16, ColumnsMut, Matvec};
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

macro_rules! strips {
    ($strips:ident, $strip:ident, $form:ident, $block:ident, $body:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
        fn $strips<B: Strip>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
            let Acts::$form { x, n } = *x else { unreachable!("the form this level asks for") };
            let kernels: (Kernel<U32x16, _, 2>, Kernel<U32x16, _, 4>, Kernel<U32x16, _, 8>) =
                ($strip::<B, 2>, $strip::<B, 4>, $strip::<B, 8>);
            // SAFETY: this function has the features, and the caller checked the shapes.
            unsafe { product::<_, B, _>(zero(), y, w, x, n, kernels) }
        }

        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
        unsafe fn $strip<B: Strip, const M: usize>(rows: Rows<'_>, x: &[$block], sums: &mut [F32x16; M]) {
            // SAFETY: the caller's promise.
            unsafe { $body::<U32x16, B, M>(zero(), rows, x, sums) }
        }
    };
}
strips!(strips_q8, kernel_q8, Q8, BlockQ8, strip_q8);
strips!(strips_q16, kernel_q16, Q16, BlockQ16, strip_q16);

macro_rules! q8 {
    ($block:ident) => {
        Matvec { form: ActForm::Q8, kernel: strips_q8::<$block> }
    };
}
macro_rules! q16 {
    ($block:ident) => {
        Matvec { form: ActForm::Q16, kernel: strips_q16::<$block> }
    };
}

/// The kernel for a few activation rows, where there is one: `None` leaves them to `matmul.rs`.
pub(super) fn strip_for(dtype: DType) -> Option<Matvec> {
    Some(match dtype {
        DType::Q4_0 => q16!(BlockQ4_0),
        DType::Q4_1 => q16!(BlockQ4_1),
        DType::Q5_0 => q16!(BlockQ5_0),
        DType::Q5_1 => q16!(BlockQ5_1),
        DType::Q8_0 => q16!(BlockQ8_0),
        DType::Q2_K => q8!(BlockQ2K),
        DType::Q3_K => q8!(BlockQ3K),
        DType::Q4_K => q8!(BlockQ4K),
        DType::Q5_K => q8!(BlockQ5K),
        DType::Q6_K => q8!(BlockQ6K),
        DType::IQ4_NL => q16!(BlockIq4Nl),
        DType::IQ4_XS => q16!(BlockIq4Xs),
        _ => return None,
    })
}

/// Methods that are one expression of intrinsics.
macro_rules! methods {
    ($($name:ident($self:ident $(, $arg:ident: $type:ty)*) -> $ret:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name($self $(, $arg: $type)*) -> $ret {
            #[allow(clippy::multiple_unsafe_ops_per_block)] // one expression
            // SAFETY: a register exists, so the CPU has the level's features.
            unsafe { $body }
        }
    )*};
}

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
