//! The vector type that the shared source is written over, and functions of numbers.

use half::{bf16, f16};
use std::ops::{Add, Div, Mul, Sub};

/// A vector of `f32`.
///
/// Everything here must be inlined (so no closures) into a function that is compiled for the
/// level's instruction set, and may run only where the CPU has it. Possession proves that: a level
/// makes its first vector inside such a function, and all others come from methods of one that
/// exists. By convention that first one is `z`, zero.
pub(in crate::arch) trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// Lanes of a vector.
    const N: usize;
    /// Vector registers of the level: bounds register tiles.
    const REGISTERS: usize;

    /// `a` in every lane.
    fn splat(self, a: f32) -> Self;

    /// Reads `N` values.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn read(self, p: *const f32) -> Self;

    /// Reads the first `n < N` lanes; the others are zero.
    ///
    /// # Safety
    /// `n` values must be readable.
    unsafe fn read_first(self, p: *const f32, n: usize) -> Self;

    /// Reads and widens `N` values.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn read_f16(self, p: *const f16) -> Self;

    /// Reads and widens the first `n < N` lanes; the others are zero.
    ///
    /// # Safety
    /// `n` values must be readable.
    unsafe fn read_f16_first(self, p: *const f16, n: usize) -> Self;

    /// Reads and widens `N` values.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn read_bf16(self, p: *const bf16) -> Self;

    /// Writes `N` values.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn write(self, p: *mut f32);

    /// Writes the first `n < N` lanes.
    ///
    /// # Safety
    /// `n` values must be writable.
    unsafe fn write_first(self, p: *mut f32, n: usize);

    /// Writes `N` values, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn write_f16(self, p: *mut f16);

    /// `self·a + b`, rounded once where the level has an instruction for it.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `self·a + b` without an error of the product: for what cancels.
    #[inline(always)]
    fn fused(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }
    /// The larger of both; `other` if either is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of both; `other` if either is NaN.
    fn min(self, other: Self) -> Self;
    /// The nearest integer, ties to even.
    fn round(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// `self` with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// Lane by lane, `yes` where `self < bound`, else `no`.
    fn if_less(self, bound: Self, yes: Self, no: Self) -> Self;
    /// `self·2ⁿ`, rounded once; `n` is an integer in `−160..=160`.
    fn scale2(self, n: Self) -> Self;
    /// Rotates `N` adjacent pairs, in two vectors, by the angles of `cos, sin`.
    fn rotate_pairs(x: [Self; 2], cos: Self, sin: Self) -> [Self; 2];

    /// Sum of the lanes.
    fn sum(self) -> f32;
    /// Largest lane; NaN lanes are ignored.
    fn max_lane(self) -> f32;
    /// Sums of the lanes of four vectors, each added in the same order whatever its place.
    fn sum4(x: [Self; 4]) -> [f32; 4];

    /// The first `N` values of `x`, or all that it has, then zeros.
    #[inline(always)]
    fn load(self, x: &[f32]) -> Self {
        if x.len() >= Self::N {
            // SAFETY: the slice is long enough.
            unsafe { self.read(x.as_ptr()) }
        } else {
            // SAFETY: as many as the slice has.
            unsafe { self.read_first(x.as_ptr(), x.len()) }
        }
    }

    /// Stores the first lanes, as many as `y` can hold.
    #[inline(always)]
    fn store(self, y: &mut [f32]) {
        if y.len() >= Self::N {
            // SAFETY: the slice is long enough.
            unsafe { self.write(y.as_mut_ptr()) }
        } else {
            // SAFETY: as many as the slice has.
            unsafe { self.write_first(y.as_mut_ptr(), y.len()) }
        }
    }
}

/// An element of a key or value row.
pub(in crate::arch) trait Widen<V: Lanes>: Copy {
    /// See [`Lanes::read`].
    unsafe fn read(z: V, p: *const Self) -> V;
    /// See [`Lanes::read_first`].
    unsafe fn read_first(z: V, p: *const Self, n: usize) -> V;
}

impl<V: Lanes> Widen<V> for f32 {
    #[inline(always)]
    unsafe fn read(z: V, p: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read(p) }
    }
    #[inline(always)]
    unsafe fn read_first(z: V, p: *const f32, n: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_first(p, n) }
    }
}

impl<V: Lanes> Widen<V> for f16 {
    #[inline(always)]
    unsafe fn read(z: V, p: *const f16) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_f16(p) }
    }
    #[inline(always)]
    unsafe fn read_first(z: V, p: *const f16, n: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { z.read_f16_first(p, n) }
    }
}

/// `eˣ`, within 1 unit in the last place; 0, ∞ and NaN where they belong.
///
/// With `n = round(x·log₂e)`, `eˣ = 2ⁿ·e^r` and `|r| ≤ ln2/2`; the polynomial is the minimax one of
/// degree 6, off by 3·10⁻⁹.
#[inline(always)]
pub(in crate::arch) fn exp<V: Lanes>(x: V) -> V {
    // e⁻¹⁰⁴ is below half the smallest denormal, e⁸⁹ above the largest number. NaN passes.
    let x = x.splat(89.0).min(x.splat(-104.0).max(x));
    let n = (x * x.splat(std::f32::consts::LOG2_E)).round();
    let r = n.fused(x.splat(-std::f32::consts::LN_2), x); // ln 2 in two parts
    let r = n.mul_add(x.splat(1.904_654_2e-9), r);
    let p = x.splat(1.382_066_2e-3);
    let p = p.mul_add(r, x.splat(8.368_675e-3));
    let p = p.mul_add(r, x.splat(4.166_826_6e-2));
    let p = p.mul_add(r, x.splat(0.166_665_21));
    let p = p.mul_add(r, x.splat(0.499_999_94));
    let p = p.mul_add(r, x.splat(1.0));
    let p = p.mul_add(r, x.splat(1.0));
    p.scale2(n)
}

/// `2ᵗ` as [`exp`], from which the polynomial is; `t − n` is exact. Several vectors at a time, as
/// each operation waits for the one before it.
#[inline(always)]
pub(in crate::arch) fn exp2<V: Lanes, const C: usize>(z: V, mut t: [V; C]) -> [V; C] {
    let (mut n, mut p) = ([z; C], [z.splat(1.532_786_3e-4); C]);
    for i in 0..C {
        t[i] = z.splat(129.0).min(z.splat(-150.0).max(t[i]));
        n[i] = t[i].round();
        t[i] = t[i] - n[i];
    }
    for c in [
        1.339_010_6e-3,
        9.618_498e-3,
        5.550_362_5e-2,
        0.240_226_48,
        std::f32::consts::LN_2,
        1.0,
    ] {
        for i in 0..C {
            p[i] = p[i].mul_add(t[i], z.splat(c));
        }
    }
    for i in 0..C {
        p[i] = p[i].scale2(n[i]);
    }
    p
}

/// `tanh x`, within 2 units in the last place.
#[inline(always)]
pub(in crate::arch) fn tanh<V: Lanes>(x: V) -> V {
    let (a, one) = (x.abs(), x.splat(1.0));
    // Near zero 1 − 2/(e²ˣ + 1) would cancel: a minimax polynomial, off by 4·10⁻⁹.
    let s = x * x;
    let p = x.splat(-5.715_287e-3);
    let p = p.mul_add(s, x.splat(2.064_897_7e-2));
    let p = p.mul_add(s, x.splat(-5.374_298_6e-2));
    let p = p.mul_add(s, x.splat(0.133_314_85));
    let p = p.mul_add(s, x.splat(-0.333_332_84));
    let near = (p * s).mul_add(a, a);
    let far = one - x.splat(2.0) / (exp(a + a) + one);
    a.if_less(x.splat(0.625), near, far).copysign(x)
}

/// `x·σ(t) = x/(1 + e⁻ᵗ)`, for `t` of the sign of `x` and at most as far from zero as makes the
/// product vanish: 0 for `x = t = −∞`.
#[inline(always)]
pub(in crate::arch) fn times_sigmoid<V: Lanes>(x: V, t: V) -> V {
    let one = x.splat(1.0);
    // x·eᵗ/(1 + eᵗ) for negative t: e⁻ᵗ would overflow while the product is still a normal number.
    let e = exp(t.splat(0.0) - t.abs());
    // Where e is 0, so is the product, even for x = −∞.
    let lower = x.splat(f32::MIN).max(x) * e;
    t.if_less(x.splat(0.0), lower, x) / (one + e)
}

/// Bound on the argument of [`cos_sin`].
pub(in crate::arch) const COS_SIN_LIMIT: f32 = 1_048_576.0;

/// `(cos x, sin x)` for `|x| ≤ COS_SIN_LIMIT`, each off by less than 2⁻²³.
///
/// With `n = round(x·2/π)`, the rest `|r| ≤ π/4` comes from π/2 in three parts: the first
/// difference is exact, since both sides are multiples of 2⁻²⁴ and cancel to less than 1. Then
/// minimax polynomials, off by 4·10⁻⁹, and the quadrant `n mod 4`.
#[inline(always)]
pub(in crate::arch) fn cos_sin<V: Lanes>(x: V) -> (V, V) {
    let (one, half) = (x.splat(1.0), x.splat(0.5));
    let n = (x * x.splat(std::f32::consts::FRAC_2_PI)).round();
    let r = n.fused(x.splat(-1.570_796_4), x);
    let r = n.fused(x.splat(4.371_139e-8), r);
    let r = n.mul_add(x.splat(1.715_124_5e-15), r);
    let s = r * r;
    let p = x.splat(-1.951_840_8e-4);
    let p = p.mul_add(s, x.splat(8.332_19e-3));
    let p = p.mul_add(s, x.splat(-0.166_666_55));
    let sin = (p * s).mul_add(r, r);
    let p = x.splat(2.443_066_1e-5);
    let p = p.mul_add(s, x.splat(-1.388_730_1e-3));
    let p = p.mul_add(s, x.splat(4.166_664_6e-2));
    let cos = (p * s - half).mul_add(s, one);
    // Quarter turns −2..=2: an odd number exchanges the two, and each is negative in two quadrants.
    let quarters = n - (n * x.splat(0.25)).round() * x.splat(4.0);
    let odd = (quarters.abs() - one).abs();
    let (c, s) = (odd.if_less(half, sin, cos), odd.if_less(half, cos, sin));
    let c_sign = one.copysign(one - (quarters + half).abs());
    let s_sign = one.copysign(one - (quarters - half).abs());
    (c * c_sign, s * s_sign)
}

/// Methods of a vector or register type that are one expression of intrinsics.
macro_rules! methods {
    ($($name:ident($self:ident $(, $arg:ident: $type:ty)*) -> $ret:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name($self $(, $arg: $type)*) -> $ret {
            #[allow(clippy::multiple_unsafe_ops_per_block)] // one expression
            #[cfg_attr(target_arch = "wasm32", allow(unused_unsafe))] // its intrinsics are safe
            // SAFETY: a value of the type exists, so the CPU has the level's features.
            unsafe { $body }
        }
    )*};
}
pub(in crate::arch) use methods;

#[cfg(test)]
pub(in crate::arch) mod tests {
    //! Checks that each level runs on its own instances.

    use super::Lanes;

    #[inline(always)]
    pub(in crate::arch) fn exp<V: Lanes>(z: V, x: &mut [f32]) {
        for x in x.chunks_mut(V::N) {
            super::exp(z.load(x)).store(x);
        }
    }

    #[inline(always)]
    pub(in crate::arch) fn tanh<V: Lanes>(z: V, x: &mut [f32]) {
        for x in x.chunks_mut(V::N) {
            super::tanh(z.load(x)).store(x);
        }
    }

    /// Every 1021st number: a prime, so that all exponents meet all kinds of mantissas.
    fn numbers() -> Vec<f32> {
        (0..=u32::MAX)
            .step_by(1021)
            .map(f32::from_bits)
            .chain([0.0, -0.0])
            .collect()
    }

    /// The largest error of `f` in units of the last place.
    fn largest_error(f: unsafe fn(&mut [f32]), truth: fn(f64) -> f64) -> (f64, f32) {
        let x = numbers();
        let mut y = x.clone();
        // SAFETY: the caller checked that the CPU has the level.
        unsafe { f(&mut y) };
        let mut worst = (0.0, 0.0);
        for (&x, &y) in x.iter().zip(&y) {
            let truth = truth(f64::from(x));
            if (truth as f32).is_finite() && y.is_finite() {
                // The last place of a number in [2ᵉ, 2ᵉ⁺¹) is 2ᵉ⁻²³, and 2⁻¹⁴⁹ below 2⁻¹²⁶.
                let place = 2f64.powi(truth.abs().log2().floor().clamp(-126.0, 127.0) as i32 - 23);
                let error = (f64::from(y) - truth).abs() / place;
                if error > worst.0 {
                    worst = (error, x);
                }
            } else {
                assert!(
                    y.is_nan() && truth.is_nan() || y == truth as f32,
                    "f({x:e}) = {y:e}, not {truth:e}"
                );
            }
        }
        worst
    }

    pub(in crate::arch) fn check(exp: unsafe fn(&mut [f32]), tanh: unsafe fn(&mut [f32])) {
        let (error, x) = largest_error(exp, f64::exp);
        eprintln!("exp: {error} at {x:e}");
        assert!(error <= 1.0, "exp({x:e}) is off by {error} places");
        let (error, x) = largest_error(tanh, f64::tanh);
        eprintln!("tanh: {error} at {x:e}");
        assert!(error <= 2.0, "tanh({x:e}) is off by {error} places");
    }
}
