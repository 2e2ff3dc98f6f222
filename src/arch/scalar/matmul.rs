//! Products with weights: expand some values of a weight row, multiply every activation row by
//! them.

use super::elementwise::{add_scaled, dot};
use crate::arch::acts::{Acts, BlockP16, BlockQ16};
use crate::arch::view::{CacheLine, ColumnsMut};
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
    let Acts::F32 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    product(y, dtype.float_format(), w, x, n);
}

/// Bytes of `m` rows of `k` values.
pub(super) fn packed_len(m: usize, k: usize) -> usize {
    let bytes = m
        .checked_mul(k)
        .and_then(|values| values.checked_mul(size_of::<f32>()));
    bytes.unwrap_or_else(|| panic!("{m} packed rows of {k} values"))
}

/// "Packs" activations: this level reads them as they are.
pub(super) fn pack(x: &[f32], _m: usize, _k: usize, packed: &mut [u8]) {
    packed.copy_from_slice(bytemuck::cast_slice(x));
}

/// The product on packed activations.
pub(super) fn gemm(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    _workspace: &mut [CacheLine],
) {
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
    _workspace: &mut [CacheLine],
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
        let Rounded { q, d, s, .. } = round(x, BlockQ16::scale);
        *block = BlockQ16 {
            d,
            s,
            ..BlockQ16::zeroed()
        };
        q.into_iter()
            .enumerate()
            .for_each(|(i, q)| block.set_integer(i, q));
    }
}

pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        let Rounded { q, d, s, sums } = round(x, BlockP16::scale);
        *block = BlockP16 {
            d,
            s,
            sums,
            ..BlockP16::zeroed()
        };
        q.into_iter()
            .enumerate()
            .for_each(|(i, q)| block.set_integer(i, q));
    }
}

/// 256 activations as [`BlockP16`] describes them, the integers in order.
struct Rounded {
    q: [i16; 256],
    d: [f32; 16],
    s: [f32; 16],
    sums: [i32; 16],
}

/// Rounds up to 256 activations, given `(d, 1/d)` from the largest bits of their magnitudes.
fn round(x: &[f32], scale: fn(u32) -> (f32, f32)) -> Rounded {
    let mut rounded = Rounded {
        q: [0; 256],
        d: [0.0; 16],
        s: [0.0; 16],
        sums: [0; 16],
    };
    for (b, x) in x.chunks(32).enumerate() {
        let (d, inverse) = scale(x.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
        rounded.d[2 * b..][..2].fill(d);
        for (h, x) in x.chunks(16).enumerate() {
            for (q, x) in rounded.q[32 * b + 16 * h..].iter_mut().zip(x) {
                let integer = (x * inverse).round_ties_even() as i32;
                *q = integer as i16;
                rounded.sums[2 * b + h] += integer;
            }
            rounded.s[2 * b + h] = d * rounded.sums[2 * b + h] as f32;
        }
    }
    rounded
}
