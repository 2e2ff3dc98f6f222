//! The IQ formats. IQ4 looks up 4-bit values in a fixed non-linear table; the others store the
//! index of a group of 4 or 8 magnitudes in a fixed grid (a codebook), and the signs separately.
//!
//! Signs of a group of eight take eight bits, or seven where the format stores only groups with
//! an even number of negative values (`even_signs`).

use super::block::{Block, Pack, f16_value, to_f16};
use super::fit::{self, Iq4Super};
use super::iq_grids::{
    IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, IQ4_VALUES,
};
use super::scalar_fit::{ScalarFit, inverse};
use bytemuck::{Pod, Zeroable};

/// IQ4_NL: 32 values; `x = d · IQ4_VALUES[q]`. 4.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale, f16.
    pub d: [u8; 2],
    /// `qs[i] = q[i] | q[i + 16] << 4`.
    pub qs: [u8; 16],
}

/// IQ4_XS: 256 values in 8 sub-blocks of 32; `x = d · (sc − 32) · IQ4_VALUES[q]`. 4.25 bits per
/// value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Little-endian u16; bits `2s..2s+2` are bits 4 and 5 of `sc[s]`.
    pub scales_h: [u8; 2],
    /// Bits 0..4 of `sc`: even sub-blocks in low nibbles, odd ones in high nibbles.
    pub scales_l: [u8; 4],
    /// Per sub-block 16 bytes laid out as [`BlockIq4Nl::qs`].
    pub qs: [u8; 128],
}

/// IQ2_XXS: 256 values in 8 sub-blocks of 32; `x = ± d · (sc + ½)/4 · grid`. 2.0625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xxs {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Per sub-block eight bytes: four grid indices, then a little-endian u32 with four times
    /// seven bits of signs, and the scale in its top four bits.
    pub qs: [[u8; 8]; 8],
}

/// IQ2_XS: 256 values in 16 sub-blocks of 16; `x = ± d · (sc + ½)/4 · grid`. 2.3125 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2Xs {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Little-endian u16 per group of eight: nine bits of grid index, seven bits of signs.
    pub qs: [[u8; 2]; 32],
    /// Four-bit scales: even sub-blocks in low nibbles, odd ones in high nibbles.
    pub scales: [u8; 8],
}

/// IQ2_S: 256 values in 16 sub-blocks of 16; `x = ± d · (sc + ½)/4 · grid`. 2.5625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq2S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Low eight bits of the grid index of each group of eight.
    pub qs: [u8; 32],
    /// Signs of each group of eight; bit `i` set: value `i` is negative.
    pub signs: [u8; 32],
    /// Bits 8 and 9 of the grid indices, four groups per byte.
    pub qh: [u8; 8],
    /// Four-bit scales: even sub-blocks in low nibbles, odd ones in high nibbles.
    pub scales: [u8; 8],
}

/// IQ3_XXS: 256 values in 8 sub-blocks of 32; `x = ± d · (sc + ½)/2 · grid`. 3.0625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3Xxs {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Grid index of each group of four.
    pub qs: [u8; 64],
    /// Little-endian u32 per sub-block: four times seven bits of signs, and the scale in the top
    /// four bits.
    pub scales_and_signs: [[u8; 4]; 8],
}

/// IQ3_S: 256 values in 8 sub-blocks of 32; `x = ± d · (2·sc + 1) · grid`. 3.4375 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq3S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Low eight bits of the grid index of each group of four.
    pub qs: [u8; 64],
    /// Bit 8 of the grid indices, eight groups per byte.
    pub qh: [u8; 8],
    /// Signs of each group of eight; bit `i` set: value `i` is negative.
    pub signs: [u8; 32],
    /// Four-bit scales: even sub-blocks in low nibbles, odd ones in high nibbles.
    pub scales: [u8; 4],
}

/// IQ1_S: 256 values in 8 sub-blocks of 32; `x = d · (2·sc + 1) · (grid ± ⅛)`. 1.5625 bits per
/// value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Low eight bits of the grid index of each group of eight.
    pub qs: [u8; 32],
    /// Little-endian u16 per sub-block: four times bits 8..11 of the grid indices, three bits of
    /// scale, and the top bit set where the offset is −⅛.
    pub qh: [[u8; 2]; 8],
}

/// IQ1_M: 256 values in 16 sub-blocks of 16; `x = d · (2·sc + 1) · (grid ± ⅛)`. 1.75 bits per
/// value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq1M {
    /// Low eight bits of the grid index of each group of eight.
    pub qs: [u8; 32],
    /// A nibble per group of eight, low nibble first: bits 8..11 of the grid index, and bit 3 set
    /// where the offset is −⅛.
    pub qh: [u8; 16],
    /// Four little-endian u16, each with three-bit scales of four sub-blocks; their top nibbles
    /// are the f16 scale `d`, lowest nibble first.
    pub scales: [[u8; 2]; 4],
}

const _: () = assert!(size_of::<BlockIq4Nl>() == 18);
const _: () = assert!(size_of::<BlockIq4Xs>() == 136);
const _: () = assert!(size_of::<BlockIq2Xxs>() == 66);
const _: () = assert!(size_of::<BlockIq2Xs>() == 74);
const _: () = assert!(size_of::<BlockIq2S>() == 82);
const _: () = assert!(size_of::<BlockIq3Xxs>() == 98);
const _: () = assert!(size_of::<BlockIq3S>() == 110);
const _: () = assert!(size_of::<BlockIq1S>() == 50);
const _: () = assert!(size_of::<BlockIq1M>() == 56);

impl Block for BlockIq4Nl {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = f16_value(self.d);
        for i in 0..16 {
            out[i] = d * IQ4_VALUES[(self.qs[i] & 15) as usize] as f32;
            out[i + 16] = d * IQ4_VALUES[(self.qs[i] >> 4) as usize] as f32;
        }
    }
}

impl Pack for BlockIq4Nl {
    type Fit = ScalarFit<32, [u8; 2]>;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Self::Fit {
        let d = to_f16(fit::iq4(x, weights));
        let scale = f16_value(d);
        let q = fit::iq4_codes(x, inverse(scale));
        ScalarFit::of_table(d, [scale; 32], &IQ4_VALUES, q)
    }

    fn store(fit: &Self::Fit) -> Self {
        BlockIq4Nl {
            d: fit.fields,
            qs: std::array::from_fn(|i| fit.q[i] | fit.q[i + 16] << 4),
        }
    }
}

impl Pack for BlockIq4Xs {
    type Fit = Iq4Super;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Iq4Super {
        fit::iq4_super(x, weights)
    }

    fn store(fit: &Iq4Super) -> Self {
        let (d, sc) = fit.fields;
        let sc = sc.map(|sc| (i16::from(sc) + 32) as u16);
        let high = (0..8).fold(0, |bits, s| bits | sc[s] >> 4 << (2 * s));
        BlockIq4Xs {
            d,
            scales_h: high.to_le_bytes(),
            scales_l: std::array::from_fn(|i| (sc[2 * i] & 15 | (sc[2 * i + 1] & 15) << 4) as u8),
            qs: std::array::from_fn(|b| {
                let n = b / 16 * 32 + b % 16;
                fit.q[n] | fit.q[n + 16] << 4
            }),
        }
    }
}

impl BlockIq4Xs {
    /// The scales of the eight sub-blocks, less their offset of 32.
    #[inline]
    pub(crate) fn sub_scales(&self) -> [i8; 8] {
        let high = u16::from_le_bytes(self.scales_h);
        std::array::from_fn(|s| {
            let low = nibble(&self.scales_l, s);
            (low | ((high >> (2 * s) & 3) as u8) << 4) as i8 - 32
        })
    }
}

impl Block for BlockIq4Xs {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        let scales = self.sub_scales();
        for s in 0..8 {
            let dl = d * scales[s] as f32;
            for i in 0..16 {
                let q = self.qs[16 * s + i];
                out[32 * s + i] = dl * IQ4_VALUES[(q & 15) as usize] as f32;
                out[32 * s + i + 16] = dl * IQ4_VALUES[(q >> 4) as usize] as f32;
            }
        }
    }
}

impl Block for BlockIq2Xxs {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for (qs, out) in self.qs.iter().zip(out.as_chunks_mut::<32>().0) {
            let [g0, g1, g2, g3, s0, s1, s2, s3] = *qs;
            let bits = u32::from_le_bytes([s0, s1, s2, s3]);
            let dl = d * ((bits >> 28) as f32 + 0.5) * 0.25;
            for (l, g) in [g0, g1, g2, g3].into_iter().enumerate() {
                let grid = &IQ2_XXS_GRID[g as usize];
                signed(dl, grid, even_signs(bits >> (7 * l)), &mut out[8 * l..]);
            }
        }
    }
}

impl Block for BlockIq2Xs {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for (g, qs) in self.qs.iter().enumerate() {
            let qs = u16::from_le_bytes(*qs);
            let dl = d * (nibble(&self.scales, g / 2) as f32 + 0.5) * 0.25;
            let grid = &IQ2_XS_GRID[(qs & 511) as usize];
            signed(dl, grid, even_signs((qs >> 9) as u32), &mut out[8 * g..]);
        }
    }
}

impl Block for BlockIq2S {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for g in 0..32 {
            let dl = d * (nibble(&self.scales, g / 2) as f32 + 0.5) * 0.25;
            let high = self.qh[g / 4] >> (2 * (g % 4)) & 3;
            let grid = &IQ2_S_GRID[self.qs[g] as usize | (high as usize) << 8];
            signed(dl, grid, self.signs[g], &mut out[8 * g..]);
        }
    }
}

impl Block for BlockIq3Xxs {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for s in 0..8 {
            let bits = u32::from_le_bytes(self.scales_and_signs[s]);
            let dl = d * ((bits >> 28) as f32 + 0.5) * 0.5;
            for l in 0..4 {
                let (g, signs) = (4 * s + l, even_signs(bits >> (7 * l)));
                signed(
                    dl,
                    &IQ3_XXS_GRID[self.qs[2 * g] as usize],
                    signs,
                    &mut out[8 * g..],
                );
                let grid = &IQ3_XXS_GRID[self.qs[2 * g + 1] as usize];
                signed(dl, grid, signs >> 4, &mut out[8 * g + 4..]);
            }
        }
    }
}

impl Block for BlockIq3S {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for g in 0..64 {
            let dl = d * (2 * nibble(&self.scales, g / 8) + 1) as f32;
            let high = self.qh[g / 8] >> (g % 8) & 1;
            let grid = &IQ3_S_GRID[self.qs[g] as usize | (high as usize) << 8];
            signed(
                dl,
                grid,
                self.signs[g / 2] >> (g % 2 * 4),
                &mut out[4 * g..],
            );
        }
    }
}

impl Block for BlockIq1S {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for g in 0..32 {
            let qh = u16::from_le_bytes(self.qh[g / 4]);
            let dl = d * (2 * (qh >> 12 & 7) + 1) as f32;
            let delta = if qh >> 15 == 0 { 0.125 } else { -0.125 };
            let high = qh >> (3 * (g % 4)) & 7;
            let grid = &IQ1_GRID[self.qs[g] as usize | (high as usize) << 8];
            for i in 0..8 {
                out[8 * g + i] = dl * (grid[i] as f32 + delta);
            }
        }
    }
}

impl Block for BlockIq1M {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let scales = self.scales.map(u16::from_le_bytes);
        let d = (0..4).fold(0, |d, j| d | scales[j] >> 12 << (4 * j));
        let d = f16_value(d.to_le_bytes());
        for g in 0..32 {
            let s = g / 2;
            let dl = d * (2 * (scales[s / 4] >> (3 * (s % 4)) & 7) + 1) as f32;
            let qh = nibble(&self.qh, g);
            let delta = if qh & 8 == 0 { 0.125 } else { -0.125 };
            let grid = &IQ1_GRID[self.qs[g] as usize | ((qh & 7) as usize) << 8];
            for i in 0..8 {
                out[8 * g + i] = dl * (grid[i] as f32 + delta);
            }
        }
    }
}

/// Nibble `i`, the low one of each byte first.
#[inline]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// Completes seven sign bits (the low ones of `bits`) so that the number of set bits is even.
#[inline]
fn even_signs(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// `out[i] = ± dl · grid[i]`, negative where bit `i` of `signs` is set.
#[inline]
fn signed<const N: usize>(dl: f32, grid: &[i8; N], signs: u8, out: &mut [f32]) {
    for i in 0..N {
        let x = dl * grid[i] as f32;
        out[i] = if signs >> i & 1 == 0 { x } else { -x };
    }
}
