//! Four lanes of `f32`: this level's [`Lanes`] and its element-wise kernels.
//!
//! Instructions per value: `dot` 0.63 and the sum of squares of a norm 0.5, in eight sums that do
//! not wait for each other; sums and conversions 2, which only caches bound; exponentials of
//! softmax 9, SiLU and GELU with their gate 12 and 13: 17.6 billion instructions per second on four
//! pipes at 4.4 GHz are 1.4 billion activations. A sigmoid gate takes 11, clamped SwiGLU 14, GELU
//! by the error function 19.
//!
//! Executed instructions per value of a recurrent layer's state: Mamba 2 1.3, Mamba 1 10.8 (with an
//! exponential), delta rule 3.7, RWKV 6 6.3, RWKV 7 8.8; a convolution takes 9.1 per product, as it
//! checks lengths for each vector.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::generic::instances::slice_kernels;
use crate::arch::generic::lanes::{Lanes, methods};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::ops::{Add, Div, Mul, Sub};

/// See [`Lanes`].
#[derive(Clone, Copy)]
pub(in crate::arch) struct F32x4(pub(super) float32x4_t);

/// Zero, the first vector of a kernel.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn zero() -> F32x4 {
    F32x4(vdupq_n_f32(0.0))
}

macro_rules! operators {
    ($($trait:ident $name:ident $intrinsic:ident;)*) => {$(
        impl $trait for F32x4 {
            type Output = F32x4;
            methods! { $name(self, other: F32x4) -> F32x4 = F32x4($intrinsic(self.0, other.0)); }
        }
    )*};
}
operators! { Add add vaddq_f32; Sub sub vsubq_f32; Mul mul vmulq_f32; Div div vdivq_f32; }

impl Lanes for F32x4 {
    const N: usize = 4;
    const REGISTERS: usize = 32;

    methods! {
        splat(self, a: f32) -> F32x4 = F32x4(vdupq_n_f32(a));
        mul_add(self, a: F32x4, b: F32x4) -> F32x4 = F32x4(vfmaq_f32(b.0, self.0, a.0));
        // Comparisons with NaN are false, which selects `other`.
        max(self, other: F32x4) -> F32x4 = F32x4(vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0));
        min(self, other: F32x4) -> F32x4 = F32x4(vbslq_f32(vcltq_f32(self.0, other.0), self.0, other.0));
        round(self) -> F32x4 = F32x4(vrndnq_f32(self.0));
        abs(self) -> F32x4 = F32x4(vabsq_f32(self.0));
        copysign(self, sign: F32x4) -> F32x4 = F32x4(vbslq_f32(vdupq_n_u32(1 << 31), sign.0, self.0));
        if_less(self, bound: F32x4, yes: F32x4, no: F32x4) -> F32x4 =
            F32x4(vbslq_f32(vcltq_f32(self.0, bound.0), yes.0, no.0));
        scale2(self, n: F32x4) -> F32x4 = F32x4(scale2(self.0, n.0));
        sum(self) -> f32 = vaddvq_f32(self.0);
        max_lane(self) -> f32 = vmaxvq_f32(self.max(self.splat(f32::NEG_INFINITY)).0);
    }

    #[inline(always)]
    fn sum4([a, b, c, d]: [F32x4; 4]) -> [f32; 4] {
        // SAFETY: a vector exists, so the CPU has NEON.
        bytemuck::cast(array(unsafe {
            vpaddq_f32(vpaddq_f32(a.0, b.0), vpaddq_f32(c.0, d.0))
        }))
    }

    #[inline(always)]
    fn rotate_pairs([a, b]: [F32x4; 2], cos: F32x4, sin: F32x4) -> [F32x4; 2] {
        // SAFETY: a vector exists, so the CPU has NEON.
        let [a, b] = unsafe { rotate_pairs(a.0, b.0, cos.0, sin.0) };
        [F32x4(a), F32x4(b)]
    }

    #[inline(always)]
    unsafe fn read(self, p: *const f32) -> F32x4 {
        // SAFETY: the caller's promise; a vector exists.
        F32x4(unsafe { vld1q_f32(p) })
    }

    #[inline(always)]
    unsafe fn read_first(self, p: *const f32, n: usize) -> F32x4 {
        let mut values = [0.0; 4];
        // SAFETY: `n < 4` values, which the caller promises; as bytes, since they need not be
        // aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(
                p.cast::<u8>(),
                values.as_mut_ptr().cast(),
                n * size_of::<f32>(),
            )
        };
        // SAFETY: four values.
        unsafe { self.read(values.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn read_f16(self, p: *const f16) -> F32x4 {
        // SAFETY: the caller's promise.
        let bits = unsafe { vld1_u16(p.cast()) };
        // SAFETY: a vector exists.
        F32x4(unsafe { widen_f16(bits) })
    }

    #[inline(always)]
    unsafe fn read_f16_first(self, p: *const f16, n: usize) -> F32x4 {
        let mut values = [f16::ZERO; 4];
        // SAFETY: `n < 4` values, which the caller promises; as bytes, since they need not be
        // aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(
                p.cast::<u8>(),
                values.as_mut_ptr().cast(),
                n * size_of::<f16>(),
            )
        };
        // SAFETY: four values.
        unsafe { self.read_f16(values.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn read_bf16(self, p: *const bf16) -> F32x4 {
        // SAFETY: the caller's promise.
        let bits = unsafe { vld1_u16(p.cast()) };
        // SAFETY: a vector exists.
        F32x4(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(bits)) })
    }

    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        // SAFETY: the caller's promise; a vector exists.
        unsafe { vst1q_f32(p, self.0) }
    }

    #[inline(always)]
    unsafe fn write_first(self, p: *mut f32, n: usize) {
        let values = array(self.0);
        // SAFETY: `n < 4` values, which the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), p, n) };
    }

    #[inline(always)]
    unsafe fn write_f16(self, p: *mut f16) {
        // SAFETY: a vector exists.
        let bits = unsafe { narrow_f16(self.0) };
        // SAFETY: the caller's promise.
        unsafe { vst1_u16(p.cast(), bits) };
    }
}

#[inline(always)]
fn array(x: float32x4_t) -> [f32; 4] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}

/// Widens half precision; exact.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::arch) fn widen_f16(bits: uint16x4_t) -> float32x4_t {
    let x: float32x4_t;
    // SAFETY: computes on registers. From Rust 1.94 on: `vcvt_f32_f16`.
    unsafe {
        std::arch::asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) x, in(vreg) bits, options(pure, nomem, nostack, preserves_flags));
    }
    x
}

/// Rounds to half precision, ties to even.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    let bits: uint16x4_t;
    // SAFETY: computes on registers. From Rust 1.94 on: `vcvt_f16_f32`.
    unsafe {
        std::arch::asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) bits, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    bits
}

/// In two factors, since neither `2⁻¹⁵⁰` nor `2¹²⁸` is an `f32`; the first product is exact.
#[inline]
#[target_feature(enable = "neon")]
fn scale2(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    let n = vcvtnq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
}

/// `2ⁿ`, where that is a normal number.
#[inline]
#[target_feature(enable = "neon")]
fn power(n: int32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
}

#[inline]
#[target_feature(enable = "neon")]
fn rotate_pairs(
    a: float32x4_t,
    b: float32x4_t,
    cos: float32x4_t,
    sin: float32x4_t,
) -> [float32x4_t; 2] {
    let (even, odd) = (vuzp1q_f32(a, b), vuzp2q_f32(a, b));
    let first = vfmaq_f32(vnegq_f32(vmulq_f32(odd, sin)), even, cos);
    let second = vfmaq_f32(vmulq_f32(odd, cos), even, sin);
    [vzip1q_f32(first, second), vzip2q_f32(first, second)]
}

for_each_slice_kernel!(slice_kernels ["neon", zero()]);

#[cfg(test)]
mod tests {
    use super::zero;
    use crate::arch::generic::instances::instantiate;
    use crate::arch::generic::lanes::tests::check;

    instantiate! { "neon", zero(), tests: exp(x: &mut [f32]); tanh(x: &mut [f32]); }

    #[test]
    fn exp_and_tanh_are_within_their_bounds() {
        check(exp, tanh);
    }
}
