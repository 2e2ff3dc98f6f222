//! Eight lanes of `f32`: this level's [`Lanes`] and its element-wise kernels.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::generic::instances::slice_kernels;
use crate::arch::generic::lanes::{Lanes, methods};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

/// See [`Lanes`].
#[derive(Clone, Copy)]
pub(in crate::arch::x86) struct F32x8(pub(super) __m256);

/// Zero, the first vector of a kernel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn zero() -> F32x8 {
    F32x8(_mm256_setzero_ps())
}

macro_rules! operators {
    ($($trait:ident $name:ident $intrinsic:ident;)*) => {$(
        impl $trait for F32x8 {
            type Output = F32x8;
            methods! { $name(self, other: F32x8) -> F32x8 = F32x8($intrinsic(self.0, other.0)); }
        }
    )*};
}
operators! { Add add _mm256_add_ps; Sub sub _mm256_sub_ps; Mul mul _mm256_mul_ps; Div div _mm256_div_ps; }

impl Lanes for F32x8 {
    const N: usize = 8;
    const REGISTERS: usize = 16;

    methods! {
        splat(self, a: f32) -> F32x8 = F32x8(_mm256_set1_ps(a));
        mul_add(self, a: F32x8, b: F32x8) -> F32x8 = F32x8(_mm256_fmadd_ps(self.0, a.0, b.0));
        max(self, other: F32x8) -> F32x8 = F32x8(_mm256_max_ps(self.0, other.0));
        min(self, other: F32x8) -> F32x8 = F32x8(_mm256_min_ps(self.0, other.0));
        round(self) -> F32x8 = F32x8(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0));
        abs(self) -> F32x8 = F32x8(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0));
        copysign(self, sign: F32x8) -> F32x8 = F32x8(copysign(self.0, sign.0));
        if_less(self, bound: F32x8, yes: F32x8, no: F32x8) -> F32x8 =
            F32x8(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0)));
        scale2(self, n: F32x8) -> F32x8 = F32x8(scale2(self.0, n.0));
        sum(self) -> f32 = sum(self.0);
        max_lane(self) -> f32 = max_lane(self.0);
    }

    #[inline(always)]
    fn sum4([a, b, c, d]: [F32x8; 4]) -> [f32; 4] {
        // SAFETY: a vector exists, so the CPU has the level's features.
        unsafe { sum4(a.0, b.0, c.0, d.0) }
    }

    #[inline(always)]
    fn rotate_pairs([a, b]: [F32x8; 2], cos: F32x8, sin: F32x8) -> [F32x8; 2] {
        // SAFETY: a vector exists, so the CPU has the level's features.
        let [a, b] = unsafe { rotate_pairs(a.0, b.0, cos.0, sin.0) };
        [F32x8(a), F32x8(b)]
    }

    #[inline(always)]
    unsafe fn read(self, p: *const f32) -> F32x8 {
        // SAFETY: the caller's promise; a vector exists.
        F32x8(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn read_first(self, p: *const f32, n: usize) -> F32x8 {
        // SAFETY: a vector exists.
        let mask = unsafe { first(n) };
        // SAFETY: only lanes that the caller promises are read.
        F32x8(unsafe { _mm256_maskload_ps(p, mask) })
    }

    #[inline(always)]
    unsafe fn read_f16(self, p: *const f16) -> F32x8 {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<__m128i>().read_unaligned() };
        // SAFETY: a vector exists.
        F32x8(unsafe { _mm256_cvtph_ps(bits) })
    }

    #[inline(always)]
    unsafe fn read_f16_first(self, p: *const f16, n: usize) -> F32x8 {
        let mut values = [f16::ZERO; 8];
        // SAFETY: `n < 8` values, which the caller promises; as bytes, since they need not be
        // aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(
                p.cast::<u8>(),
                values.as_mut_ptr().cast(),
                n * size_of::<f16>(),
            )
        };
        // SAFETY: eight values.
        unsafe { self.read_f16(values.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn read_bf16(self, p: *const bf16) -> F32x8 {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<__m128i>().read_unaligned() };
        // SAFETY: a vector exists.
        F32x8(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits))) })
    }

    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        // SAFETY: the caller's promise; a vector exists.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn write_first(self, p: *mut f32, n: usize) {
        // SAFETY: a vector exists.
        let mask = unsafe { first(n) };
        // SAFETY: only lanes that the caller promises are written.
        unsafe { _mm256_maskstore_ps(p, mask, self.0) }
    }

    #[inline(always)]
    unsafe fn write_f16(self, p: *mut f16) {
        // SAFETY: a vector exists.
        let bits = unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) };
        // SAFETY: the caller's promise.
        unsafe { p.cast::<__m128i>().write_unaligned(bits) }
    }
}

/// All bits set in the first `n` lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn first(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(
        _mm256_set1_epi32(n as i32),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
    )
}

#[inline]
#[target_feature(enable = "avx2")]
fn copysign(x: __m256, sign: __m256) -> __m256 {
    let bit = _mm256_set1_ps(-0.0);
    _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign))
}

/// In two factors, since neither `2⁻¹⁵⁰` nor `2¹²⁸` is an `f32`; the first product is exact.
#[inline]
#[target_feature(enable = "avx2")]
fn scale2(x: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n| {
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
            n,
            _mm256_set1_epi32(127),
        )))
    };
    _mm256_mul_ps(
        _mm256_mul_ps(x, power(half)),
        power(_mm256_sub_epi32(n, half)),
    )
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn max_lane(x: __m256) -> f32 {
    // `_mm256_max_ps` returns its right operand if either is NaN: this leaves numbers only.
    let x = _mm256_max_ps(x, _mm256_set1_ps(f32::NEG_INFINITY));
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
}

/// Transposes while it adds: lane pairs, then pairs of pairs, then halves.
#[inline]
#[target_feature(enable = "avx2")]
fn sum4(a: __m256, b: __m256, c: __m256, d: __m256) -> [f32; 4] {
    let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    let (low, high) = (_mm256_unpacklo_pd(ab, cd), _mm256_unpackhi_pd(ab, cd));
    let x = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    bytemuck::cast(x)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn rotate_pairs(a: __m256, b: __m256, cos: __m256, sin: __m256) -> [__m256; 2] {
    let low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    let high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    let rotate = |x, lanes| {
        let (cos, sin) = (
            _mm256_permutevar8x32_ps(cos, lanes),
            _mm256_permutevar8x32_ps(sin, lanes),
        );
        let swapped = _mm256_permute_ps::<0b10_11_00_01>(x);
        _mm256_fmaddsub_ps(x, cos, _mm256_mul_ps(swapped, sin))
    };
    [rotate(a, low), rotate(b, high)]
}

for_each_slice_kernel!(slice_kernels ["avx2,fma,f16c", zero()]);

#[cfg(test)]
mod tests {
    use super::zero;
    use crate::arch::generic::instances::instantiate;
    use crate::arch::generic::lanes::tests::check;

    instantiate! { "avx2,fma,f16c", zero(), tests: exp(x: &mut [f32]); tanh(x: &mut [f32]); }

    #[test]
    fn exp_and_tanh_are_within_their_bounds() {
        if (crate::arch::x86::avx2::KERNELS.supported)() {
            check(exp, tanh);
        } else {
            eprintln!("skipped: this CPU has no avx2");
        }
    }
}
