//! TQ1_0 and TQ2_0: values −1, 0 and 1 with one f16 scale per 256, for models trained that way
//! (BitNet, TriLM).

use super::block::{Block, Pack, f16_value, to_f16};
use super::fit;
use super::scalar_fit::ScalarFit;
use bytemuck::{Pod, Zeroable};

/// TQ1_0: `x = d · (t − 1)`, five trits `t` in a byte. 1.6875 bits per value.
///
/// A byte holds the fraction `0.t₀t₁t₂t₃t₄` in base 3, scaled to 0..256 and rounded up, so that
/// trit `n` is the integer part of `3 · frac(3ⁿ · byte / 256)`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq1_0 {
    /// Trit `n` of byte `i` is value `32·n + i` for the first 32 bytes, and value
    /// `160 + 16·n + (i − 32)` for the last 16.
    pub qs: [u8; 48],
    /// Trit `n` of byte `i` is value `240 + 4·n + i`, `n` in 0..4.
    pub qh: [u8; 4],
    /// Scale, f16.
    pub d: [u8; 2],
}

/// TQ2_0: `x = d · (q − 1)`, `q` in 0..3 (a stored 3 reads as 2). 2.0625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTq2_0 {
    /// Value `128·h + 32·j + i` is bits `2j..2j+2` of `qs[32·h + i]`, as in Q2_K.
    pub qs: [u8; 64],
    /// Scale, f16.
    pub d: [u8; 2],
}

const _: () = assert!(size_of::<BlockTq1_0>() == 54);
const _: () = assert!(size_of::<BlockTq2_0>() == 66);

impl Block for BlockTq1_0 {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        let (values, last) = out.split_at_mut(240);
        let (first, second) = values.split_at_mut(160);
        trits(d, &self.qs[..32], first);
        trits(d, &self.qs[32..], second);
        trits(d, &self.qh, last);
    }
}

/// Expands rows of trits: `out[bytes.len()·n + i]` is trit `n` of byte `i`.
fn trits(d: f32, bytes: &[u8], out: &mut [f32]) {
    let mut power = 1u8;
    for row in out.chunks_exact_mut(bytes.len()) {
        for (y, &b) in row.iter_mut().zip(bytes) {
            let fraction = b.wrapping_mul(power);
            *y = d * (((fraction as u16 * 3) >> 8) as f32 - 1.0);
        }
        power = power.wrapping_mul(3);
    }
}

impl Block for BlockTq2_0 {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for n in 0..256 {
            let q = self.qs[n / 128 * 32 + n % 32] >> (n / 32 % 4 * 2) & 3;
            out[n] = d * (q as f32 - 1.0);
        }
    }
}

/// The nearest scale, and trits `t` with `x ≈ d · (t − 1)`.
type Trits = ScalarFit<256, [u8; 2]>;

fn fitted(x: &[f32; 256], weights: &[f32; 256]) -> Trits {
    let d = to_f16(fit::ternary(x, weights));
    ScalarFit::one_grid(d, x, (f16_value(d), 0.0), (-1, 1))
}

impl Pack for BlockTq1_0 {
    type Fit = Trits;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Trits {
        fitted(x, weights)
    }

    fn store(fit: &Trits) -> Self {
        let t = &fit.q;
        // Trit `n` of byte `i` is that of value `first + stride·n + i`.
        let byte = |first: usize, stride: usize, i: usize, n: usize| {
            let number = (0..5).fold(0, |number, trit| {
                let t = if trit < n {
                    t[first + stride * trit + i]
                } else {
                    0
                };
                3 * number + u16::from(t)
            });
            // The fraction `number / 3⁵`, rounded up.
            (256 * number).div_ceil(243) as u8
        };
        BlockTq1_0 {
            qs: std::array::from_fn(|i| match i {
                ..32 => byte(0, 32, i, 5),
                _ => byte(160, 16, i - 32, 5),
            }),
            qh: std::array::from_fn(|i| byte(240, 4, i, 4)),
            d: fit.fields,
        }
    }
}

impl Pack for BlockTq2_0 {
    type Fit = Trits;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Trits {
        fitted(x, weights)
    }

    fn store(fit: &Trits) -> Self {
        BlockTq2_0 {
            qs: std::array::from_fn(|b| {
                let first = b / 32 * 128 + b % 32;
                (0..4).fold(0, |byte, j| byte | fit.q[first + 32 * j] << (2 * j))
            }),
            d: fit.fields,
        }
    }
}
