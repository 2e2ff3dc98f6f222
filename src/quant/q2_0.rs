//! Q2_0: four values per weight, of which a model trained with three uses −1, 0 and 1, and one f16
//! scale per 64.

use super::block::{Block, Pack, f16_value, to_f16};
use super::fit;
use super::scalar_fit::ScalarFit;
use bytemuck::{Pod, Zeroable};

/// Q2_0: 64 values; `x = d · (q − 1)`, `q` in 0..4. 2.25 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Value `i` is bits `2(i % 4)..2(i % 4) + 2` of byte `i / 4`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ2_0>() == 18);

impl Block for BlockQ2_0 {
    type Values = [f32; 64];

    fn dequantize(&self, out: &mut [f32; 64]) {
        let d = f16_value(self.d);
        for (i, x) in out.iter_mut().enumerate() {
            let q = self.qs[i / 4] >> (i % 4 * 2) & 3;
            *x = d * (f32::from(q) - 1.0);
        }
    }
}

impl Pack for BlockQ2_0 {
    type Fit = ScalarFit<64, [u8; 2]>;

    fn fit(x: &[f32; 64], weights: &[f32; 64]) -> Self::Fit {
        // The grid of `fit` has the codes −2 to 1, of a scale with the other sign.
        let d = to_f16(-fit::symmetric(x, weights, 2.0));
        ScalarFit::one_grid(d, x, (f16_value(d), 0.0), (-1, 2))
    }

    fn store(fit: &Self::Fit) -> Self {
        let byte = |b: usize| (0..4).fold(0, |byte, i| byte | fit.q[4 * b + i] << (2 * i));
        BlockQ2_0 {
            d: fit.fields,
            qs: std::array::from_fn(byte),
        }
    }
}
