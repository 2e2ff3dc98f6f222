//! Sixteen lanes of `f32`: this level's [`Lanes`] and its element-wise kernels.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::generic::instances::slice_kernels;
use crate::arch::generic::lanes::{Lanes, methods};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

/// See [`Lanes`].
#[derive(Clone, Copy)]
pub(in crate::arch) struct F32x16(pub(super) __m512);

/// Zero, the first vector of a kernel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(in crate::arch) fn zero() -> F32x16 {
    F32x16(_mm512_setzero_ps())
}

macro_rules! operators {
    ($($trait:ident $name:ident $intrinsic:ident;)*) => {$(
        impl $trait for F32x16 {
            type Output = F32x16;
            methods! { $name(self, other: F32x16) -> F32x16 = F32x16($intrinsic(self.0, other.0)); }
        }
    )*};
}
operators! { Add add _mm512_add_ps; Sub sub _mm512_sub_ps; Mul mul _mm512_mul_ps; Div div _mm512_div_ps; }

impl Lanes for F32x16 {
    const N: usize = 16;
    const REGISTERS: usize = 32;

    methods! {
        splat(self, a: f32) -> F32x16 = F32x16(_mm512_set1_ps(a));
        mul_add(self, a: F32x16, b: F32x16) -> F32x16 = F32x16(_mm512_fmadd_ps(self.0, a.0, b.0));
        max(self, other: F32x16) -> F32x16 = F32x16(_mm512_max_ps(self.0, other.0));
        min(self, other: F32x16) -> F32x16 = F32x16(_mm512_min_ps(self.0, other.0));
        round(self) -> F32x16 =
            F32x16(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0));
        abs(self) -> F32x16 = F32x16(_mm512_abs_ps(self.0));
        copysign(self, sign: F32x16) -> F32x16 = F32x16(copysign(self.0, sign.0));
        if_less(self, bound: F32x16, yes: F32x16, no: F32x16) -> F32x16 =
            F32x16(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0), no.0, yes.0));
        scale2(self, n: F32x16) -> F32x16 = F32x16(_mm512_scalef_ps(self.0, n.0));
        sum(self) -> f32 = sum(self.0);
        max_lane(self) -> f32 = _mm512_reduce_max_ps(_mm512_max_ps(self.0, _mm512_set1_ps(f32::NEG_INFINITY)));
    }

    #[inline(always)]
    fn sum4([a, b, c, d]: [F32x16; 4]) -> [f32; 4] {
        // SAFETY: a vector exists, so the CPU has the level's features.
        unsafe { sum4(a.0, b.0, c.0, d.0) }
    }

    #[inline(always)]
    fn rotate_pairs([a, b]: [F32x16; 2], cos: F32x16, sin: F32x16) -> [F32x16; 2] {
        // SAFETY: a vector exists, so the CPU has the level's features.
        let [a, b] = unsafe { rotate_pairs(a.0, b.0, cos.0, sin.0) };
        [F32x16(a), F32x16(b)]
    }

    #[inline(always)]
    unsafe fn read(self, p: *const f32) -> F32x16 {
        // SAFETY: the caller's promise; a vector exists.
        F32x16(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn read_first(self, p: *const f32, n: usize) -> F32x16 {
        // SAFETY: only lanes that the caller promises are read; a vector exists.
        F32x16(unsafe { _mm512_maskz_loadu_ps(first(n), p) })
    }

    #[inline(always)]
    unsafe fn read_f16(self, p: *const f16) -> F32x16 {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<__m256i>().read_unaligned() };
        // SAFETY: a vector exists.
        F32x16(unsafe { _mm512_cvtph_ps(bits) })
    }

    #[inline(always)]
    unsafe fn read_f16_first(self, p: *const f16, n: usize) -> F32x16 {
        // SAFETY: only lanes that the caller promises are read; a vector exists.
        let bits = unsafe { _mm256_maskz_loadu_epi16(first(n), p.cast()) };
        // SAFETY: a vector exists.
        F32x16(unsafe { _mm512_cvtph_ps(bits) })
    }

    #[inline(always)]
    unsafe fn read_bf16(self, p: *const bf16) -> F32x16 {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<__m256i>().read_unaligned() };
        // SAFETY: a vector exists.
        F32x16(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))) })
    }

    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        // SAFETY: the caller's promise; a vector exists.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn write_first(self, p: *mut f32, n: usize) {
        // SAFETY: only lanes that the caller promises are written; a vector exists.
        unsafe { _mm512_mask_storeu_ps(p, first(n), self.0) }
    }

    #[inline(always)]
    unsafe fn write_f16(self, p: *mut f16) {
        // SAFETY: a vector exists.
        let bits = unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) };
        // SAFETY: the caller's promise.
        unsafe { p.cast::<__m256i>().write_unaligned(bits) }
    }
}

/// The first `n < 16` lanes.
#[inline]
fn first(n: usize) -> __mmask16 {
    (1 << n) - 1
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn copysign(x: __m512, sign: __m512) -> __m512 {
    _mm512_or_ps(_mm512_abs_ps(x), _mm512_and_ps(_mm512_set1_ps(-0.0), sign))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn sum(x: __m512) -> f32 {
    let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// Transposes while it adds: lane pairs, then pairs of pairs, then halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn sum4(a: __m512, b: __m512, c: __m512, d: __m512) -> [f32; 4] {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let x = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    bytemuck::cast(x)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn rotate_pairs(a: __m512, b: __m512, cos: __m512, sin: __m512) -> [__m512; 2] {
    let low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    let high = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    let rotate = |x, lanes| {
        let (cos, sin) = (
            _mm512_permutexvar_ps(lanes, cos),
            _mm512_permutexvar_ps(lanes, sin),
        );
        let swapped = _mm512_permute_ps::<0b10_11_00_01>(x);
        _mm512_fmaddsub_ps(x, cos, _mm512_mul_ps(swapped, sin))
    };
    [rotate(a, low), rotate(b, high)]
}

for_each_slice_kernel!(slice_kernels ["avx512f,avx512bw,avx512vl,avx512dq", zero()]);

/// `eˣ` for `x ≤ 0`, off by less than 2⁻¹⁸ of itself besides the rounding of `x·log₂e`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn short_exp(x: F32x16) -> F32x16 {
    let x = x * x.splat(std::f32::consts::LOG2_E);
    // How far `x` is above the integer below it, in 0..=1: the minimax polynomial of 2ʳ, off by
    // 2.7·10⁻⁶.
    let r = F32x16(_mm512_reduce_ps::<
        { _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC },
    >(x.0));
    let p = x.splat(1.353_416_8e-2);
    let p = p.mul_add(r, x.splat(5.201_146e-2));
    let p = p.mul_add(r, x.splat(0.241_442_76));
    let p = p.mul_add(r, x.splat(0.693_003_83));
    let p = p.mul_add(r, x.splat(1.000_002_6));
    p.scale2(x)
}

#[cfg(test)]
mod tests {
    use super::zero;
    use crate::arch::generic::instances::instantiate;
    use crate::arch::generic::lanes::tests::check;

    instantiate! { "avx512f,avx512bw,avx512vl,avx512dq", zero(), tests: exp(x: &mut [f32]); tanh(x: &mut [f32]); }

    #[test]
    fn exp_and_tanh_are_within_their_bounds() {
        if (crate::arch::x86::avx512::KERNELS.supported)() {
            check(exp, tanh);
        } else {
            eprintln!("skipped: this CPU has no avx512");
        }
    }
}
