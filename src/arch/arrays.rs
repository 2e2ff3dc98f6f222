//! Arrays of what a function gives, for inner loops.
//!
//! The standard library's `array::map`, `array::from_fn`, `each_ref`, `Iterator::zip` and
//! `copy_from_slice` are no inline functions or call some: in a build that does not optimise across
//! codegen units (an incremental one, as `cargo build` makes by default, or one with `lto = "off"`),
//! they stay calls, which made kernels up to 2.6 times slower.

/// `[f(0), f(1), …]`. At least one element.
#[inline(always)]
pub(crate) fn from_fn<T: Copy, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut all = [f(0); N];
    for i in 1..N {
        all[i] = f(i);
    }
    all
}

/// `f` of each element.
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
#[inline(always)]
pub(crate) fn map<T: Copy, U: Copy, const N: usize>(
    x: [T; N],
    mut f: impl FnMut(T) -> U,
) -> [U; N] {
    from_fn(|i| f(x[i]))
}

/// Writes an array to the beginning of `to`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(clippy::manual_memcpy)] // `copy_from_slice` is a call, too
pub(crate) fn store<T: Copy, const N: usize>(x: [T; N], to: &mut [T]) {
    let to = &mut to[..N];
    for i in 0..N {
        to[i] = x[i];
    }
}
