//! Products with weights: expand some values of a weight row, multiply every activation row by them.

use super::elementwise::dot;
use crate::arch::{Acts, ColumnsMut, MatvecFn};
use crate::quant::{DType, Format};

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

/// Instances of [`product`] for each format: a kernel is a plain function.
macro_rules! matvecs {
    ($($dtype:ident)*) => {
        pub(super) fn matvec_for(dtype: DType) -> MatvecFn {
            match dtype {
                $(DType::$dtype => {
                    fn kernel(y: &mut ColumnsMut<'_>, w: &[u8], x: &Acts<'_>) {
                        let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
                        product(y, DType::$dtype.float_format(), w, x, n);
                    }
                    kernel
                })*
                _ => unreachable!("{dtype:?} is no weight format"),
            }
        }
    };
}
matvecs!(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 TQ1_0 TQ2_0
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S);

/// "Packs" activations: this level reads them as they are.
pub(super) fn pack(x: &[f32], _m: usize, _k: usize, packed: &mut [u8]) {
    packed.copy_from_slice(bytemuck::cast_slice(x));
}

/// The product on packed activations.
pub(super) fn gemm(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], packed: &[u8], k: usize) {
    product(y, dtype.float_format(), w, bytemuck::cast_slice(packed), k);
}
