//! Activation rows in the forms that product kernels read.

use super::ActForm;

/// Activation rows rounded to 16-bit integers, for products with block-quantised weights.
///
/// Within 32 values `x ≈ d·q` with `|q| ≤ 32512`, kept as two planes of bytes, `q = 256·hi + lo`,
/// because bytes are what the integer dot instructions of every CPU multiply. Two byte products per
/// weight cost little where memory is the limit, and leave a rounding error 256 times below that of
/// 8-bit activations: the product is exact to `f32` noise.
/// Neither plane ever holds −128, so a kernel may negate them.
#[derive(Clone, Copy, Debug)]
pub struct Q16<'a> {
    /// Values per row; a multiple of 32.
    pub n: usize,
    /// Rows.
    pub m: usize,
    /// High bytes, `(m, n)`.
    pub hi: &'a [i8],
    /// Low bytes, `(m, n)`.
    pub lo: &'a [i8],
    /// Scales, `(m, n/32)`.
    pub d: &'a [f32],
    /// `d·Σq` over each 16 values, `(m, n/16)`: what a constant offset on the weights contributes.
    pub s: &'a [f32],
}

/// Largest magnitude of a [`Q16`] value: `256·127`, so that `|hi| ≤ 127`.
const Q16_MAX: f32 = 32512.0;

/// Below this, 32 values count as zeros: the inverse of their scale would overflow.
const Q16_TINY: f32 = 1e-33;

impl<'a> Q16<'a> {
    /// The scale, and its inverse, of 32 values with largest magnitude `max`. NaN and ∞ give a scale
    /// that is not finite, so that they reach the product.
    pub(super) fn scale_of(max: f32) -> (f32, f32) {
        if max < Q16_TINY { (0.0, 0.0) } else { (max / Q16_MAX, Q16_MAX / max) }
    }

    /// Row `i` as `(hi, lo, d, s)`.
    pub fn row(&self, i: usize) -> (&'a [i8], &'a [i8], &'a [f32], &'a [f32]) {
        let n = self.n;
        (
            &self.hi[i * n..][..n],
            &self.lo[i * n..][..n],
            &self.d[i * (n / 32)..][..n / 32],
            &self.s[i * (n / 16)..][..n / 16],
        )
    }
}

/// Activation rows for [`super::Arch::matvec`].
#[derive(Clone, Copy, Debug)]
pub enum Acts<'a> {
    /// `(m, n)` row-major.
    F32 {
        /// The rows.
        x: &'a [f32],
        /// Values per row.
        n: usize,
    },
    /// Rounded rows.
    Q16(Q16<'a>),
}

impl Acts<'_> {
    /// Values per row.
    pub fn n(&self) -> usize {
        match *self {
            Acts::F32 { n, .. } => n,
            Acts::Q16(q) => q.n,
        }
    }

    /// Rows.
    pub fn m(&self) -> usize {
        match *self {
            Acts::F32 { x, n } => x.len() / n,
            Acts::Q16(q) => q.m,
        }
    }

    /// Which form this is.
    pub fn form(&self) -> ActForm {
        match self {
            Acts::F32 { .. } => ActForm::F32,
            Acts::Q16(_) => ActForm::Q16,
        }
    }
}
