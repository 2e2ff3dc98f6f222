//! NVFP4: 64 FP4 values (E2M1), of which each 16 share a scale in eight bits (E4M3 without its
//! sign). Files have one more factor per matrix, in a tensor of its own.

use super::block::{Block, Pack};
use super::fit;
use super::mxfp4::MXFP4_VALUES;
use super::scalar_fit::{Levels, ScalarFit};
use bytemuck::{Pod, Zeroable};

/// NVFP4: `x = scale(d[i / 16]) · MXFP4_VALUES[q] / 2`. 4.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockNvfp4 {
    /// The scales of 16 values each: four bits of exponent with a bias of 7, three of mantissa.
    pub d: [u8; 4],
    /// Of values `16s..16s + 16`: `qs[8s + i] = q[i] | q[i + 8] << 4`.
    pub qs: [u8; 32],
}

const _: () = assert!(size_of::<BlockNvfp4>() == 36);

impl BlockNvfp4 {
    /// Half of each scale: the factors of [`MXFP4_VALUES`].
    #[inline(always)]
    pub(crate) fn half_scales(&self) -> [f32; 4] {
        let [a, b, c, d] = self.d;
        [
            HALF_SCALES[a as usize],
            HALF_SCALES[b as usize],
            HALF_SCALES[c as usize],
            HALF_SCALES[d as usize],
        ]
    }

    /// The bytes of values `32g..32g + 32`.
    #[inline(always)]
    pub fn half(&self, g: usize) -> &[u8; 16] {
        let (halves, _) = self.qs.as_chunks();
        &halves[g]
    }
}

/// Half the value of each byte as a scale. As in ggml the sign is ignored, and `0x7F`, E4M3's NaN,
/// is zero.
static HALF_SCALES: [f32; 256] = {
    let mut scales = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        scales[byte] = match exponent {
            _ if byte == 0x7F => 0.0,
            0 => mantissa as f32 / 1024.0,
            _ => f32::from_bits((exponent + 127 - 8) << 23 | mantissa << 20),
        };
        byte += 1;
    }
    scales
};

impl Block for BlockNvfp4 {
    type Values = [f32; 64];

    fn dequantize(&self, out: &mut [f32; 64]) {
        for (s, d) in self.half_scales().into_iter().enumerate() {
            for i in 0..8 {
                let q = self.qs[8 * s + i];
                out[16 * s + i] = d * MXFP4_VALUES[(q & 15) as usize] as f32;
                out[16 * s + i + 8] = d * MXFP4_VALUES[(q >> 4) as usize] as f32;
            }
        }
    }
}

impl Pack for BlockNvfp4 {
    type Fit = ScalarFit<64, [u8; 4]>;

    fn fit(x: &[f32; 64], weights: &[f32; 64]) -> Self::Fit {
        let mut fit = Self::Fit::unset([0; 4], Levels::Table(&MXFP4_VALUES));
        let (xs, ws) = (x.as_chunks::<16>().0, weights.as_chunks::<16>().0);
        for (s, (x, w)) in xs.iter().zip(ws).enumerate() {
            let largest = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            // The scale with which the largest value is the largest code, and those around it.
            let above = HALF_SCALES[..0x7F].partition_point(|&half| 12.0 * half < largest);
            let bytes = above.saturating_sub(5)..(above + 2).min(0x7F);
            let half_scales = HALF_SCALES[bytes.clone()].iter().copied();
            let (scale, q) = fit::in_table(x, w, &MXFP4_VALUES, half_scales);
            let chosen = bytes.into_iter().find(|&byte| HALF_SCALES[byte] == scale);
            let byte = chosen.unwrap_or(0);
            let at = 16 * s..16 * s + 16;
            fit.fields[s] = byte as u8;
            fit.scales[at.clone()].fill(HALF_SCALES[byte]);
            fit.q[at].copy_from_slice(&q);
        }
        fit
    }

    fn store(fit: &Self::Fit) -> Self {
        let q = |b: usize| &fit.q[b / 8 * 16 + b % 8..];
        BlockNvfp4 {
            d: fit.fields,
            qs: std::array::from_fn(|b| q(b)[0] | q(b)[8] << 4),
        }
    }
}
