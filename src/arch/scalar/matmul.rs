//! Products with weights: expand some values of a weight row, multiply every activation row by them.

use super::elementwise::{add_scaled, dot};
use crate::arch::{Acts, BlockP16, BlockQ16, CacheLine, ColumnsMut};
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

/// Bytes of `m` rows of `k` values.
pub(super) fn packed_len(m: usize, k: usize) -> usize {
    let bytes = m.checked_mul(k).and_then(|values| values.checked_mul(size_of::<f32>()));
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
        *block = BlockQ16::zeroed();
        round(x, BlockQ16::scale, |i, d, q| {
            block.set_integer(i, q);
            block.d[i / 16] = d;
            block.s[i / 16] += f32::from(q);
        });
        (0..16).for_each(|i| block.s[i] *= block.d[i]);
    }
}

pub(super) fn quantize_p16<const R: usize>(x: &[f32], blocks: &mut [BlockP16<R>]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::<R>::VALUES)) {
        *block = BlockP16::zeroed();
        round(x, BlockP16::<R>::scale, |i, d, q| {
            let lane = BlockP16::<R>::lane(i);
            block.set_integer(i, q);
            block.d[lane] = d;
            block.sums[lane] += i32::from(q);
        });
        (0..16).for_each(|i| block.s[i] = block.d[i] * block.sums[i] as f32);
    }
}

/// Rounds activations, given `(d, 1/d)` from the largest bits of the magnitudes of 32, and hands each on with its `d`;
/// the last 32 are padded with zeros.
fn round(x: &[f32], scale: fn(u32) -> (f32, f32), mut each: impl FnMut(usize, f32, i16)) {
    for (b, x) in x.chunks(32).enumerate() {
        let (d, inverse) = scale(x.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
        for j in 0..32 {
            let q = x.get(j).map_or(0, |x| (x * inverse).round_ties_even() as i32 as i16);
            each(32 * b + j, d, q);
        }
    }
}
