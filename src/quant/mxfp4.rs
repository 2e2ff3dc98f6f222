//! MXFP4 of the OCP Microscaling Formats specification 1.0: 32 FP4 values (E2M1) share a
//! power-of-two scale (E8M0).

use super::block::{Block, Pack};
use super::fit;
use super::scalar_fit::ScalarFit;
use bytemuck::{Pod, Zeroable};

/// Twice the value of each E2M1 code (sign, two bits of exponent, one of mantissa), so that all
/// are integers.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// MXFP4: `x = 2^(e − 127) · MXFP4_VALUES[q] / 2`. 4.25 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMxfp4 {
    /// Biased exponent of the scale.
    pub e: u8,
    /// `qs[i] = q[i] | q[i + 16] << 4`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockMxfp4>() == 17);

impl BlockMxfp4 {
    /// Half the scale, `2^(e − 128)`: the factor of [`MXFP4_VALUES`]. The specification's NaN,
    /// `e = 255`, reads as `2^127`, as in ggml.
    #[inline]
    pub(crate) fn half_scale(&self) -> f32 {
        // Two exponents lie below f32's normal range.
        f32::from_bits(match self.e {
            0 => 0x0020_0000,
            1 => 0x0040_0000,
            e => (e as u32 - 1) << 23,
        })
    }
}

impl Block for BlockMxfp4 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.half_scale();
        for i in 0..16 {
            out[i] = d * MXFP4_VALUES[(self.qs[i] & 15) as usize] as f32;
            out[i + 16] = d * MXFP4_VALUES[(self.qs[i] >> 4) as usize] as f32;
        }
    }
}

impl Pack for BlockMxfp4 {
    type Fit = ScalarFit<32, u8>;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Self::Fit {
        let largest = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        // The exponent with which the largest value is at most 6 times the scale, and those below.
        let exponent = 128.0 + (largest / 12.0).log2().ceil();
        let exponent = exponent.clamp(0.0, 254.0) as u8;
        let block = |e| BlockMxfp4 { e, qs: [0; 16] };
        let exponents = [
            exponent,
            exponent.saturating_sub(1),
            exponent.saturating_sub(2),
        ];
        let scales = exponents.map(|e| block(e).half_scale());
        let (scale, q) = fit::in_table(x, weights, &MXFP4_VALUES, scales);
        let chosen = exponents.iter().zip(scales).find(|(_, s)| *s == scale);
        let e = chosen.map_or(exponent, |(e, _)| *e);
        ScalarFit::of_table(e, [block(e).half_scale(); 32], &MXFP4_VALUES, q)
    }

    fn store(fit: &Self::Fit) -> Self {
        BlockMxfp4 {
            e: fit.fields,
            qs: std::array::from_fn(|i| fit.q[i] | fit.q[i + 16] << 4),
        }
    }
}
