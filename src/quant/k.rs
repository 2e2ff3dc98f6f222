//! The K-quants: super-blocks of 256 values in 8 or 16 sub-blocks. Each sub-block has a small
//! integer scale (and minimum), and the super-block an f16 scale for those (after ggml).

use super::block::{Block, Pack, f16_value};
use super::fit::{self, AffineScales, AffineSuper, SymmetricSuper};
use bytemuck::{Pod, Zeroable};

/// Q2_K: 16 sub-blocks of 16; `x = d · sc · q − dmin · m`, `q` in 0..4. 2.625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// `scales[s] = sc[s] | m[s] << 4`.
    pub scales: [u8; 16],
    /// Value `128·h + 32·j + i` is bits `2j..2j+2` of `qs[32·h + i]` (`h` in 0..2, `j` in 0..4,
    /// `i` in 0..32).
    pub qs: [u8; 64],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
}

/// Q3_K: 16 sub-blocks of 16; `x = d · (sc − 32) · (q − 4)`, `q` in 0..8. 3.4375 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// Bit 2 of value `32·k + i` is bit `k` of `hmask[i]`.
    pub hmask: [u8; 32],
    /// Low two bits, as in [`BlockQ2K::qs`].
    pub qs: [u8; 64],
    /// Six-bit scales, see [`unpack_scales_q3_k`].
    pub scales: [u8; 12],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
}

/// Q4_K: 8 sub-blocks of 32; `x = d · sc · q − dmin · m`, `q` in 0..16. 4.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
    /// Six-bit scales and minima, see [`unpack_scales_mins`].
    pub scales: [u8; 12],
    /// Sub-blocks in pairs: `qs[32·p + i] = q[64·p + i] | q[64·p + 32 + i] << 4`.
    pub qs: [u8; 128],
}

/// Q5_K: as [`BlockQ4K`] with `q` in 0..32. 5.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
    /// Six-bit scales and minima, see [`unpack_scales_mins`].
    pub scales: [u8; 12],
    /// Bit 4 of value `32·s + i` is bit `s` of `qh[i]`.
    pub qh: [u8; 32],
    /// Low four bits, as in [`BlockQ4K::qs`].
    pub qs: [u8; 128],
}

/// Q6_K: 16 sub-blocks of 16; `x = d · sc · (q − 32)`, `q` in 0..64. 6.5625 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// Low four bits. Value `128·h + 32·j + i` is in `ql[64·h + 32·(j % 2) + i]`: its low nibble
    /// for `j` 0 and 1, its high nibble for `j` 2 and 3.
    pub ql: [u8; 128],
    /// High two bits, laid out as [`BlockQ2K::qs`].
    pub qh: [u8; 64],
    /// Scales of the sub-blocks.
    pub scales: [i8; 16],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
}

const _: () = assert!(size_of::<BlockQ2K>() == 84);
const _: () = assert!(size_of::<BlockQ3K>() == 110);
const _: () = assert!(size_of::<BlockQ4K>() == 144);
const _: () = assert!(size_of::<BlockQ5K>() == 176);
const _: () = assert!(size_of::<BlockQ6K>() == 210);

/// Unpacks the eight six-bit scales and minima of Q4_K and Q5_K: `(scales, minima)`.
///
/// ```text
/// byte  0..4   SSssssss   sc[j] low six bits;  SS = bits 4, 5 of sc[j + 4]
/// byte  4..8   MMmmmmmm   m[j]  low six bits;  MM = bits 4, 5 of m[j + 4]
/// byte  8..12  mmmmssss   low nibble sc[j + 4], high nibble m[j + 4], bits 0..4     (j in 0..4)
/// ```
#[inline]
pub fn unpack_scales_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut sc, mut m) = ([0; 8], [0; 8]);
    for j in 0..4 {
        sc[j] = packed[j] & 63;
        m[j] = packed[j + 4] & 63;
        sc[j + 4] = packed[j + 8] & 15 | packed[j] >> 6 << 4;
        m[j + 4] = packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4;
    }
    (sc, m)
}

/// Unpacks the sixteen six-bit scales of Q3_K, less their offset of 32.
///
/// ```text
/// byte  0..8    hhhhllll   low nibble: bits 0..4 of sc[j], high nibble: of sc[j + 8]   (j in 0..8)
/// byte  8..12   ddccbbaa   bits 4, 5 of sc[j], sc[j + 4], sc[j + 8], sc[j + 12]        (j in 0..4)
/// ```
#[inline]
pub fn unpack_scales_q3_k(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|s| {
        let low = packed[s % 8] >> (s / 8 * 4) & 15;
        let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    })
}

impl Block for BlockQ2K {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_value(self.d), f16_value(self.dmin));
        for s in 0..16 {
            let (dl, ml) = (
                d * (self.scales[s] & 15) as f32,
                dmin * (self.scales[s] >> 4) as f32,
            );
            for n in 16 * s..16 * s + 16 {
                out[n] = dl * two_bits(&self.qs, n) as f32 - ml;
            }
        }
    }
}

impl Block for BlockQ3K {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        let scales = unpack_scales_q3_k(&self.scales);
        for s in 0..16 {
            let dl = d * scales[s] as f32;
            for n in 16 * s..16 * s + 16 {
                let high = self.hmask[n % 32] >> (n / 32) & 1;
                out[n] = dl * (two_bits(&self.qs, n) as f32 + 4.0 * high as f32 - 4.0);
            }
        }
    }
}

impl Block for BlockQ4K {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_value(self.d), f16_value(self.dmin));
        let (scales, mins) = unpack_scales_mins(&self.scales);
        for s in 0..8 {
            let (dl, ml) = (d * scales[s] as f32, dmin * mins[s] as f32);
            for i in 0..32 {
                let q = self.qs[s / 2 * 32 + i] >> (s % 2 * 4) & 15;
                out[32 * s + i] = dl * q as f32 - ml;
            }
        }
    }
}

impl Block for BlockQ5K {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_value(self.d), f16_value(self.dmin));
        let (scales, mins) = unpack_scales_mins(&self.scales);
        for s in 0..8 {
            let (dl, ml) = (d * scales[s] as f32, dmin * mins[s] as f32);
            for i in 0..32 {
                let low = self.qs[s / 2 * 32 + i] >> (s % 2 * 4) & 15;
                let high = self.qh[i] >> s & 1;
                out[32 * s + i] = dl * (low | high << 4) as f32 - ml;
            }
        }
    }
}

impl Block for BlockQ6K {
    type Values = [f32; 256];

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = f16_value(self.d);
        for s in 0..16 {
            let dl = d * self.scales[s] as f32;
            for n in 16 * s..16 * s + 16 {
                let (h, j) = (n / 128, n / 32 % 4);
                let low = self.ql[64 * h + 32 * (j % 2) + n % 32] >> (j / 2 * 4) & 15;
                let q = low | two_bits(&self.qh, n) << 4;
                out[n] = dl * (q as f32 - 32.0);
            }
        }
    }
}

/// Value `n` of the two-bit layout that Q2_K, Q3_K and Q6_K share, see [`BlockQ2K::qs`].
#[inline]
fn two_bits(qs: &[u8; 64], n: usize) -> u8 {
    qs[n / 128 * 32 + n % 32] >> (n / 32 % 4 * 2) & 3
}

/// Inverse of [`two_bits`] for the low two bits of `q`.
fn pack_two_bits(q: &[u8; 256]) -> [u8; 64] {
    std::array::from_fn(|b| {
        (0..4).fold(0, |byte, j| {
            byte | (q[b / 32 * 128 + 32 * j + b % 32] & 3) << (2 * j)
        })
    })
}

/// The nibbles of [`BlockQ4K::qs`] from the low four bits of `q`.
fn pack_nibbles(q: &[u8; 256]) -> [u8; 128] {
    std::array::from_fn(|b| {
        let n = b / 32 * 64 + b % 32;
        q[n] & 15 | q[n + 32] << 4
    })
}

/// Bit `bit` of each value, laid out as [`BlockQ5K::qh`].
fn pack_bit(q: &[u8; 256], bit: u32) -> [u8; 32] {
    std::array::from_fn(|i| (0..8).fold(0, |byte, s| byte | (q[32 * s + i] >> bit & 1) << s))
}

/// Inverse of [`unpack_scales_mins`].
fn pack_scales_mins(sc: &[u8; 8], m: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = sc[j] | sc[j + 4] >> 4 << 6;
        packed[j + 4] = m[j] | m[j + 4] >> 4 << 6;
        packed[j + 8] = sc[j + 4] & 15 | m[j + 4] << 4;
    }
    packed
}

/// Inverse of [`unpack_scales_q3_k`].
fn pack_scales_q3_k(sc: &[i8; 16]) -> [u8; 12] {
    let sc = sc.map(|sc| (sc + 32) as u8);
    std::array::from_fn(|b| match b {
        0..8 => sc[b] & 15 | sc[b + 8] << 4,
        _ => (0..4).fold(0, |byte, k| byte | sc[4 * k + b - 8] >> 4 << (2 * k)),
    })
}

impl Pack for BlockQ2K {
    type Fit = AffineSuper<16>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        fit::affine_super::<16, 16>(x, weights, 3, 15.0)
    }

    fn store(fit: &Self::Fit) -> Self {
        let AffineScales { d, dmin, sc, m } = fit.fields;
        BlockQ2K {
            scales: std::array::from_fn(|s| sc[s] | m[s] << 4),
            qs: pack_two_bits(&fit.q),
            d,
            dmin,
        }
    }
}

impl Pack for BlockQ3K {
    type Fit = SymmetricSuper;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        fit::symmetric_super(x, weights, 4, 32.0)
    }

    fn store(fit: &Self::Fit) -> Self {
        let (d, sc) = fit.fields;
        BlockQ3K {
            hmask: pack_bit(&fit.q, 2),
            qs: pack_two_bits(&fit.q),
            scales: pack_scales_q3_k(&sc),
            d,
        }
    }
}

impl Pack for BlockQ4K {
    type Fit = AffineSuper<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        fit::affine_super::<8, 32>(x, weights, 15, 63.0)
    }

    fn store(fit: &Self::Fit) -> Self {
        let AffineScales { d, dmin, sc, m } = fit.fields;
        BlockQ4K {
            d,
            dmin,
            scales: pack_scales_mins(&sc, &m),
            qs: pack_nibbles(&fit.q),
        }
    }
}

impl Pack for BlockQ5K {
    type Fit = AffineSuper<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        fit::affine_super::<8, 32>(x, weights, 31, 63.0)
    }

    fn store(fit: &Self::Fit) -> Self {
        let AffineScales { d, dmin, sc, m } = fit.fields;
        BlockQ5K {
            d,
            dmin,
            scales: pack_scales_mins(&sc, &m),
            qh: pack_bit(&fit.q, 4),
            qs: pack_nibbles(&fit.q),
        }
    }
}

impl Pack for BlockQ6K {
    type Fit = SymmetricSuper;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        fit::symmetric_super(x, weights, 32, 128.0)
    }

    fn store(fit: &Self::Fit) -> Self {
        let ((d, scales), q) = (fit.fields, &fit.q);
        BlockQ6K {
            ql: std::array::from_fn(|b| {
                let n = b / 64 * 128 + b % 64;
                q[n] & 15 | q[n + 64] << 4
            }),
            qh: pack_two_bits(&q.map(|q| q >> 4)),
            scales,
            d,
        }
    }
}
