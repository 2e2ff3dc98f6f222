//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 values share one f16 scale, and an f16 minimum in the `_1`
//! formats. Values of the 4-bit formats are split in halves: byte `i` of `qs` holds the low bits
//! of value `i` in its low nibble and those of value `i + 16` in its high nibble.

use super::block::{Block, Pack, f16_value, storable, to_f16};
use super::fit;
use super::scalar_fit::ScalarFit;
use bytemuck::{Pod, Zeroable};

/// Q4_0: `x = d · (q − 8)`, `q` in 0..16. 4.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// `qs[i] = q[i] | q[i + 16] << 4`.
    pub qs: [u8; 16],
}

/// Q4_1: `x = d · q + m`, `q` in 0..16. 5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Minimum, f16.
    pub m: [u8; 2],
    /// `qs[i] = q[i] | q[i + 16] << 4`.
    pub qs: [u8; 16],
}

/// Q5_0: `x = d · (q − 16)`, `q` in 0..32. 5.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Little-endian u32; bit `i` is bit 4 of `q[i]`.
    pub qh: [u8; 4],
    /// Low four bits, as in [`BlockQ4_0::qs`].
    pub qs: [u8; 16],
}

/// Q5_1: `x = d · q + m`, `q` in 0..32. 6 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Minimum, f16.
    pub m: [u8; 2],
    /// Little-endian u32; bit `i` is bit 4 of `q[i]`.
    pub qh: [u8; 4],
    /// Low four bits, as in [`BlockQ4_0::qs`].
    pub qs: [u8; 16],
}

/// Q8_0: `x = d · q`, `q` in −128..128. 8.5 bits per value.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// The values in order.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18);
const _: () = assert!(size_of::<BlockQ4_1>() == 20);
const _: () = assert!(size_of::<BlockQ5_0>() == 22);
const _: () = assert!(size_of::<BlockQ5_1>() == 24);
const _: () = assert!(size_of::<BlockQ8_0>() == 34);

impl Block for BlockQ4_0 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = f16_value(self.d);
        for i in 0..16 {
            out[i] = d * ((self.qs[i] & 15) as f32 - 8.0);
            out[i + 16] = d * ((self.qs[i] >> 4) as f32 - 8.0);
        }
    }
}

impl Block for BlockQ4_1 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let (d, m) = (f16_value(self.d), f16_value(self.m));
        for i in 0..16 {
            out[i] = d * (self.qs[i] & 15) as f32 + m;
            out[i + 16] = d * (self.qs[i] >> 4) as f32 + m;
        }
    }
}

/// The five-bit values of Q5_0 and Q5_1 in order.
fn unpack_5bit(qs: &[u8; 16], qh: [u8; 4]) -> [u8; 32] {
    let qh = u32::from_le_bytes(qh);
    std::array::from_fn(|i| {
        let low = qs[i % 16] >> (i / 16 * 4) & 15;
        let high = (qh >> i & 1) as u8;
        low | high << 4
    })
}

impl Block for BlockQ5_0 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = f16_value(self.d);
        for (y, q) in out.iter_mut().zip(unpack_5bit(&self.qs, self.qh)) {
            *y = d * (q as f32 - 16.0);
        }
    }
}

impl Block for BlockQ5_1 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let (d, m) = (f16_value(self.d), f16_value(self.m));
        for (y, q) in out.iter_mut().zip(unpack_5bit(&self.qs, self.qh)) {
            *y = d * q as f32 + m;
        }
    }
}

impl Block for BlockQ8_0 {
    type Values = [f32; 32];

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = f16_value(self.d);
        for (y, &q) in out.iter_mut().zip(&self.qs) {
            *y = d * q as f32;
        }
    }
}

/// `qs` and `qh` from 4- or 5-bit codes in order.
fn pack_halves(q: &[u8; 32]) -> ([u8; 16], [u8; 4]) {
    let qs = std::array::from_fn(|i| q[i] & 15 | q[i + 16] << 4);
    let qh = (0..32).fold(0u32, |bits, i| bits | u32::from(q[i] >> 4) << i);
    (qs, qh.to_le_bytes())
}

/// A scale, and codes of it.
type Symmetric = ScalarFit<32, [u8; 2]>;

/// Scale and minimum, and codes of them.
type Affine = ScalarFit<32, ([u8; 2], [u8; 2])>;

/// The grid `d · q`, `q` in `−n..n`.
fn fit_symmetric(x: &[f32; 32], weights: &[f32; 32], n: i8) -> Symmetric {
    let d = to_f16(fit::symmetric(x, weights, f32::from(n)));
    ScalarFit::one_grid(d, x, (f16_value(d), 0.0), (-n, n - 1))
}

/// The grid `d · q + m`, `q` in `0..=n`.
fn fit_affine(x: &[f32; 32], weights: &[f32; 32], n: i8) -> Affine {
    let (d, m) = fit::affine(x, weights, f32::from(n), f32::INFINITY);
    let (d, m) = (to_f16(d), to_f16(storable(m)));
    ScalarFit::one_grid((d, m), x, (f16_value(d), f16_value(m)), (0, n))
}

impl Pack for BlockQ4_0 {
    type Fit = Symmetric;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Symmetric {
        fit_symmetric(x, weights, 8)
    }

    fn store(fit: &Symmetric) -> Self {
        let (qs, _) = pack_halves(&fit.q);
        BlockQ4_0 { d: fit.fields, qs }
    }
}

impl Pack for BlockQ4_1 {
    type Fit = Affine;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Affine {
        fit_affine(x, weights, 15)
    }

    fn store(fit: &Affine) -> Self {
        let ((d, m), (qs, _)) = (fit.fields, pack_halves(&fit.q));
        BlockQ4_1 { d, m, qs }
    }
}

impl Pack for BlockQ5_0 {
    type Fit = Symmetric;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Symmetric {
        fit_symmetric(x, weights, 16)
    }

    fn store(fit: &Symmetric) -> Self {
        let (qs, qh) = pack_halves(&fit.q);
        let d = fit.fields;
        BlockQ5_0 { d, qh, qs }
    }
}

impl Pack for BlockQ5_1 {
    type Fit = Affine;

    fn fit(x: &[f32; 32], weights: &[f32; 32]) -> Affine {
        fit_affine(x, weights, 31)
    }

    fn store(fit: &Affine) -> Self {
        let ((d, m), (qs, qh)) = (fit.fields, pack_halves(&fit.q));
        BlockQ5_1 { d, m, qh, qs }
    }
}

impl Pack for BlockQ8_0 {
    type Fit = Symmetric;

    /// Plain rounding to −127..=127: a search would gain next to nothing at eight bits.
    fn fit(x: &[f32; 32], _weights: &[f32; 32]) -> Symmetric {
        let max = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let d = to_f16(max / 127.0);
        ScalarFit::one_grid(d, x, (f16_value(d), 0.0), (-127, 127))
    }

    fn store(fit: &Symmetric) -> Self {
        BlockQ8_0 {
            d: fit.fields,
            qs: fit.q.map(|q| (i16::from(q) - 127) as i8),
        }
    }
}
