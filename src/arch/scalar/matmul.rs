//! Products with weights: expand some values of a weight row, multiply every activation row by them.

use super::elementwise::{add_scaled, dot};
use crate::arch::{Acts, BlockP16, BlockQ8, BlockQ16, ColumnsMut};
use crate::quant::{DType, Format};
use bytemuck::Zeroable;

/// Values expanded at a time: one super-block, or several small blocks.
const CHUNK: usize = 256;

/// `y[i][r] = Σ_k W[r][k]·x[i][k]`, for any format.
fn product(y: &mut ColumnsMut<'_>, format: &Format, w: &[u8], x: &[f32], n: usize) {
    let row_bytes = w.len() / y.cols().max(1);
    let chunk_bytes = CHUNK / format.block_elems * format.block_bytes;
    let mut values = [0.0; CHUNK];
    for i in 0..y.rows() {
        y.row(i).fill(0.0);
    }
    for (r, row) in w.chunks_exact(row_bytes.max(1)).enumerate() {
        for (c, blocks) in row.chunks(chunk_bytes).enumerate() {
            let values = &mut values[..blocks.len() / format.block_bytes * format.block_elems];
            (format.dequantize)(blocks, values);
            for i in 0..y.rows() {
                y.row(i)[r] += dot(values, &x[i * n + c * CHUNK..][..values.len()]);
            }
        }
    }
}

pub(super) fn matvec(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    product(y, dtype.float_format(), w, x, n);
}

/// "Packs" activations: this level reads them as they are.
pub(super) fn pack(x: &[f32], _m: usize, _k: usize, packed: &mut [u8]) {
    packed.copy_from_slice(bytemuck::cast_slice(x));
}

/// The product on packed activations.
pub(super) fn gemm(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], packed: &[u8], k: usize) {
    product(y, dtype.float_format(), w, bytemuck::cast_slice(packed), k);
}

/// `x[i][c] = Σ_r W[r][c]·y[i][r]`, for any format.
pub(super) fn transposed(
    x: &mut ColumnsMut<'_>,
    first: usize,
    n_in: usize,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
) {
    let format = dtype.float_format();
    let y: &[f32] = bytemuck::cast_slice(packed);
    let bytes = |values: usize| values / format.block_elems * format.block_bytes;
    let mut values = [0.0; CHUNK];
    let values = &mut values[..x.cols()];
    for i in 0..x.rows() {
        x.row(i).fill(0.0);
    }
    for (r, row) in w.chunks_exact(bytes(n_in)).enumerate() {
        (format.dequantize)(&row[bytes(first)..bytes(first + values.len())], values);
        for i in 0..x.rows() {
            add_scaled(x.row(i), values, y[i * k + r]);
        }
    }
}

pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        *block = BlockQ16::zeroed();
        for (b, x) in x.chunks(32).enumerate() {
            let (d, inverse) = BlockQ16::scale(x.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
            block.d[2 * b..][..2].fill(d);
            for (h, x) in x.chunks(16).enumerate() {
                let mut sum = 0;
                for (i, x) in x.iter().enumerate() {
                    let q = (x * inverse).round_ties_even() as i32;
                    block.set_integer(32 * b + 16 * h + i, q as i16);
                    sum += q;
                }
                block.s[2 * b + h] = d * sum as f32;
            }
        }
    }
}

pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        *block = BlockP16::zeroed();
        for (b, x) in x.chunks(32).enumerate() {
            let (d, inverse) = BlockP16::scale(x.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
            block.d[2 * b..][..2].fill(d);
            for (h, x) in x.chunks(16).enumerate() {
                let mut sum = 0;
                for (i, x) in x.iter().enumerate() {
                    let q = (x * inverse).round_ties_even() as i32;
                    block.set_integer(32 * b + 16 * h + i, q as i16);
                    sum += q;
                }
                block.s[2 * b + h] = d * sum as f32;
            }
        }
    }
}

pub(super) fn quantize_q8(x: &[f32], blocks: &mut [BlockQ8]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ8::VALUES)) {
        *block = BlockQ8::zeroed();
        for (b, x) in x.chunks(32).enumerate() {
            let (d, inverse) = BlockQ8::scale(x.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
            let mut sums = [0; 2];
            for (i, x) in x.iter().enumerate() {
                let q = (x * inverse).round_ties_even() as i8;
                block.q[b][i] = q;
                sums[i / 16] += i32::from(q);
            }
            block.d[b] = d;
            block.s[b] = d * (sums[0] + sums[1]) as f32;
            block.s16[2 * b..][..2].copy_from_slice(&[d * sums[0] as f32, d * sums[1] as f32]);
        }
    }
}
