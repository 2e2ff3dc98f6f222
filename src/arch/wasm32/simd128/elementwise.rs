//! Four lanes of `f32`: this level's [`Lanes`] and its element-wise kernels.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::generic::instances::slice_kernels;
use crate::arch::generic::lanes::{Lanes, methods};
use half::{bf16, f16};
use std::arch::wasm32::*;
use std::ops::{Add, Div, Mul, Sub};

/// See [`Lanes`].
#[derive(Clone, Copy)]
pub(super) struct F32x4(pub(super) v128);

/// Zero, the first vector of a kernel.
#[inline(always)]
pub(super) fn zero() -> F32x4 {
    F32x4(f32x4_splat(0.0))
}

macro_rules! operators {
    ($($trait:ident $name:ident $intrinsic:ident;)*) => {$(
        impl $trait for F32x4 {
            type Output = F32x4;
            #[inline(always)]
            fn $name(self, other: F32x4) -> F32x4 {
                F32x4($intrinsic(self.0, other.0))
            }
        }
    )*};
}
operators! { Add add f32x4_add; Sub sub f32x4_sub; Mul mul f32x4_mul; Div div f32x4_div; }

impl Lanes for F32x4 {
    const N: usize = 4;
    const REGISTERS: usize = 16;

    methods! {
        splat(self, a: f32) -> F32x4 = F32x4(f32x4_splat(a));
        mul_add(self, a: F32x4, b: F32x4) -> F32x4 = self * a + b;
        fused(self, a: F32x4, b: F32x4) -> F32x4 = F32x4(fused(self.0, a.0, b.0));
        // The pseudo-maximum takes its first operand where a comparison with NaN is false.
        max(self, other: F32x4) -> F32x4 = F32x4(f32x4_pmax(other.0, self.0));
        min(self, other: F32x4) -> F32x4 = F32x4(f32x4_pmin(other.0, self.0));
        round(self) -> F32x4 = F32x4(f32x4_nearest(self.0));
        abs(self) -> F32x4 = F32x4(f32x4_abs(self.0));
        copysign(self, sign: F32x4) -> F32x4 =
            F32x4(v128_bitselect(sign.0, self.0, u32x4_splat(1 << 31)));
        if_less(self, bound: F32x4, yes: F32x4, no: F32x4) -> F32x4 =
            F32x4(v128_bitselect(yes.0, no.0, f32x4_lt(self.0, bound.0)));
        scale2(self, n: F32x4) -> F32x4 = F32x4(scale2(self.0, n.0));
        sum(self) -> f32 = sum(self.0);
        max_lane(self) -> f32 = max_lane(self.max(self.splat(f32::NEG_INFINITY)).0);
    }

    #[inline(always)]
    fn sum4([a, b, c, d]: [F32x4; 4]) -> [f32; 4] {
        array(pair_sums(pair_sums(a.0, b.0), pair_sums(c.0, d.0)))
    }

    #[inline(always)]
    fn rotate_pairs([a, b]: [F32x4; 2], cos: F32x4, sin: F32x4) -> [F32x4; 2] {
        let (even, odd) = (F32x4(evens(a.0, b.0)), F32x4(odds(a.0, b.0)));
        let first = even * cos - odd * sin;
        let second = odd * cos + even * sin;
        [
            F32x4(i32x4_shuffle::<0, 4, 1, 5>(first.0, second.0)),
            F32x4(i32x4_shuffle::<2, 6, 3, 7>(first.0, second.0)),
        ]
    }

    #[inline(always)]
    unsafe fn read(self, p: *const f32) -> F32x4 {
        // SAFETY: the caller's promise.
        F32x4(unsafe { v128_load(p.cast()) })
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
        F32x4(widen_f16(unsafe { u32x4_load_extend_u16x4(p.cast()) }))
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
        F32x4(i32x4_shl(unsafe { u32x4_load_extend_u16x4(p.cast()) }, 16))
    }

    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { v128_store(p.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn write_first(self, p: *mut f32, n: usize) {
        let values = array(self.0);
        // SAFETY: `n < 4` values, which the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), p, n) };
    }

    #[inline(always)]
    unsafe fn write_f16(self, p: *mut f16) {
        let bits = narrow_f16(self.0);
        // SAFETY: the caller's promise: eight bytes.
        unsafe { v128_store64_lane::<0>(u16x8_narrow_i32x4(bits, bits), p.cast()) };
    }
}

#[inline(always)]
pub(super) fn array(x: v128) -> [f32; 4] {
    [
        f32x4_extract_lane::<0>(x),
        f32x4_extract_lane::<1>(x),
        f32x4_extract_lane::<2>(x),
        f32x4_extract_lane::<3>(x),
    ]
}

/// The first of each two.
#[inline(always)]
pub(super) fn evens(a: v128, b: v128) -> v128 {
    i32x4_shuffle::<0, 2, 4, 6>(a, b)
}

/// The second of each two.
#[inline(always)]
pub(super) fn odds(a: v128, b: v128) -> v128 {
    i32x4_shuffle::<1, 3, 5, 7>(a, b)
}

/// The sum of each two.
#[inline(always)]
pub(super) fn pair_sums(a: v128, b: v128) -> v128 {
    f32x4_add(evens(a, b), odds(a, b))
}

/// Sum of the lanes.
#[inline(always)]
pub(super) fn sum(x: v128) -> f32 {
    f32x4_extract_lane::<0>(pair_sums(pair_sums(x, x), x))
}

#[inline(always)]
fn max_lane(x: v128) -> f32 {
    let x = f32x4_pmax(x, i32x4_shuffle::<2, 3, 0, 1>(x, x));
    f32x4_extract_lane::<0>(f32x4_pmax(x, i32x4_shuffle::<1, 0, 3, 2>(x, x)))
}

/// `a·b + c` by numbers of 64 bits: the product is exact there.
#[inline(always)]
fn fused(a: v128, b: v128, c: v128) -> v128 {
    let upper = |x| i32x4_shuffle::<2, 3, 2, 3>(x, x);
    let two = |a, b, c| {
        let product = f64x2_mul(f64x2_promote_low_f32x4(a), f64x2_promote_low_f32x4(b));
        f32x4_demote_f64x2_zero(f64x2_add(product, f64x2_promote_low_f32x4(c)))
    };
    i32x4_shuffle::<0, 1, 4, 5>(two(a, b, c), two(upper(a), upper(b), upper(c)))
}

/// Half precision, in the lower halves of the lanes, widened; exact.
#[inline(always)]
pub(super) fn widen_f16(bits: v128) -> v128 {
    // What the exponents of both formats have in common moves to its place; then 15 is added to
    // 112 for 127. Numbers below the normal ones are the rest of 2⁻¹⁴ + x.
    let magnitude = i32x4_shl(v128_and(bits, u32x4_splat(0x7FFF)), 13);
    let sign = i32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16);
    let normal = i32x4_add(magnitude, i32x4_splat(112 << 23));
    let small = f32x4_sub(
        i32x4_add(magnitude, i32x4_splat(113 << 23)),
        f32x4_splat(f32::from_bits(113 << 23)),
    );
    // Infinity and NaN have the largest exponent here, too.
    let unbounded = v128_and(
        i32x4_gt(magnitude, i32x4_splat((31 << 23) - 1)),
        i32x4_splat(112 << 23),
    );
    let x = v128_bitselect(small, normal, i32x4_lt(magnitude, i32x4_splat(1 << 23)));
    v128_or(i32x4_add(x, unbounded), sign)
}

/// Half precision, ties to even, in the lower halves of the lanes.
#[inline(always)]
fn narrow_f16(x: v128) -> v128 {
    let magnitude = v128_and(x, u32x4_splat(0x7FFF_FFFF));
    let sign = u32x4_shr(v128_and(x, u32x4_splat(1 << 31)), 16);
    // Rounded where 13 bits are cut; a carry may end in the exponent, where it belongs.
    let odd = v128_and(u32x4_shr(magnitude, 13), i32x4_splat(1));
    let rounded = i32x4_add(i32x4_add(magnitude, odd), i32x4_splat(0xFFF - (112 << 23)));
    let normal = u32x4_shr(rounded, 13);
    // Adding 1/2 rounds to multiples of 2⁻²⁴, the step of numbers below the normal ones.
    let half = f32x4_splat(0.5);
    let small = i32x4_sub(f32x4_add(magnitude, half), half);
    let number = v128_bitselect(small, normal, i32x4_lt(magnitude, i32x4_splat(113 << 23)));
    let nan = v128_or(
        u32x4_shr(v128_and(magnitude, u32x4_splat(0x007F_FFFF)), 13),
        u32x4_splat(0x7E00),
    );
    let large = v128_bitselect(
        nan,
        u32x4_splat(0x7C00),
        i32x4_gt(magnitude, i32x4_splat(255 << 23)),
    );
    let too_large = i32x4_gt(magnitude, i32x4_splat((143 << 23) - 1));
    v128_or(v128_bitselect(large, number, too_large), sign)
}

/// In two factors, since neither `2⁻¹⁵⁰` nor `2¹²⁸` is an `f32`; the first product is exact.
#[inline(always)]
fn scale2(x: v128, n: v128) -> v128 {
    let n = nearest_integers(n);
    let half = i32x4_shr(n, 1);
    f32x4_mul(f32x4_mul(x, power(half)), power(i32x4_sub(n, half)))
}

/// The nearest integers to numbers below 2²², ties to even: in the lowest bits of the sum with
/// 1.5·2²³. (`i32x4.trunc_sat` takes x86 eight instructions.)
#[inline(always)]
pub(super) fn nearest_integers(x: v128) -> v128 {
    let base = f32x4_splat(12_582_912.0);
    i32x4_sub(f32x4_add(x, base), base)
}

/// `2ⁿ`, where that is a normal number.
#[inline(always)]
fn power(n: v128) -> v128 {
    i32x4_shl(i32x4_add(n, i32x4_splat(127)), 23)
}

for_each_slice_kernel!(slice_kernels ["simd128", zero()]);

#[cfg(test)]
mod tests {
    use super::zero;
    use crate::arch::generic::instances::instantiate;
    use crate::arch::generic::lanes::tests::check;

    instantiate! { "simd128", zero(), tests: exp(x: &mut [f32]); tanh(x: &mut [f32]); }

    #[test]
    fn exp_and_tanh_are_within_their_bounds() {
        check(exp, tanh);
    }
}
