//! Q1_0: a sign per weight, and one f16 scale per 128.

use super::block::{Block, Pack, f16_value, to_f16};
use super::scalar_fit::ScalarFit;
use bytemuck::{Pod, Zeroable};

/// Q1_0: 128 values; `x = ±d`. 1.125 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ1_0 {
    /// Magnitude, f16.
    pub d: [u8; 2],
    /// Value `i` is positive where bit `i % 8` of byte `i / 8` is set.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ1_0>() == 18);

impl Block for BlockQ1_0 {
    type Values = [f32; 128];

    fn dequantize(&self, out: &mut [f32; 128]) {
        let d = f16_value(self.d);
        for (i, x) in out.iter_mut().enumerate() {
            *x = if self.qs[i / 8] >> (i % 8) & 1 == 1 {
                d
            } else {
                -d
            };
        }
    }
}

impl Pack for BlockQ1_0 {
    type Fit = ScalarFit<128, [u8; 2]>;

    /// Signs are given, and the best magnitude is the weighted mean of those of the values. Large
    /// values weigh no more than others here: they would raise the magnitude of all.
    fn fit(x: &[f32; 128], weights: &[f32; 128]) -> Self::Fit {
        let mean_square = x.iter().map(|x| x * x).sum::<f32>() / 128.0;
        let even = |(x, w): (&f32, &f32)| w / (2.0 + x * x / mean_square.max(1e-30)).sqrt();
        let weights: Vec<f32> = x.iter().zip(weights).map(even).collect();
        let total: f32 = weights.iter().sum();
        let sum: f32 = x.iter().zip(&weights).map(|(x, w)| w * x.abs()).sum();
        let d = to_f16(if total > 0.0 { sum / total } else { 0.0 });
        ScalarFit::of_table(
            d,
            [f16_value(d); 128],
            &[-1, 1],
            x.map(|x| u8::from(x >= 0.0)),
        )
    }

    fn store(fit: &Self::Fit) -> Self {
        BlockQ1_0 {
            d: fit.fields,
            qs: std::array::from_fn(|b| (0..8).fold(0, |byte, i| byte | fit.q[8 * b + i] << i)),
        }
    }
}
