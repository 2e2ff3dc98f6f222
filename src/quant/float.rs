//! F32, F16 and BF16: no blocks, each value stands for itself (little endian).

use super::block::{storable, to_f16};
use half::{bf16, f16};

pub(super) fn dequantize_f32(bytes: &[u8], out: &mut [f32]) {
    let values = bytes.as_chunks::<4>().0;
    assert_eq!(bytes.len(), out.len() * 4);
    for (y, &b) in out.iter_mut().zip(values) {
        *y = f32::from_le_bytes(b);
    }
}

pub(super) fn dequantize_f16(bytes: &[u8], out: &mut [f32]) {
    let values = bytes.as_chunks::<2>().0;
    assert_eq!(bytes.len(), out.len() * 2);
    for (y, &b) in out.iter_mut().zip(values) {
        *y = f16::from_le_bytes(b).to_f32();
    }
}

pub(super) fn dequantize_bf16(bytes: &[u8], out: &mut [f32]) {
    let values = bytes.as_chunks::<2>().0;
    assert_eq!(bytes.len(), out.len() * 2);
    for (y, &b) in out.iter_mut().zip(values) {
        *y = bf16::from_le_bytes(b).to_f32();
    }
}

pub(super) fn quantize_f32(x: &[f32], _importance: Option<&[f32]>, bytes: &mut [u8]) {
    assert_eq!(bytes.len(), x.len() * 4);
    for (b, x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(x) {
        *b = x.to_le_bytes();
    }
}

/// Rounds to nearest even; finite values beyond ±65504 saturate, as an infinity in a weight would
/// spoil every product it takes part in.
pub(super) fn quantize_f16(x: &[f32], _importance: Option<&[f32]>, bytes: &mut [u8]) {
    assert_eq!(bytes.len(), x.len() * 2);
    for (b, &x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(x) {
        *b = to_f16(storable(x));
    }
}

/// Rounds to nearest even.
pub(super) fn quantize_bf16(x: &[f32], _importance: Option<&[f32]>, bytes: &mut [u8]) {
    assert_eq!(bytes.len(), x.len() * 2);
    for (b, &x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(x) {
        *b = bf16::from_f32(x).to_le_bytes();
    }
}
