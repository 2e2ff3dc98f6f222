//! A format that no vector level has kernels for, as one has that is new. Only tests have it.

use super::block::{Block, f16_value};
use bytemuck::{Pod, Zeroable};

/// Bytes with one scale per 64: `x = d·q`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockUnaccelerated {
    d: [u8; 2],
    q: [i8; 64],
}

impl Block for BlockUnaccelerated {
    type Values = [f32; 64];

    fn dequantize(&self, out: &mut [f32; 64]) {
        for (x, q) in out.iter_mut().zip(self.q) {
            *x = f16_value(self.d) * f32::from(q);
        }
    }
}
