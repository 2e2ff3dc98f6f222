//! Vectors of 128 bits, which all browsers have had since 2023 and Node since 16.
//!
//! There is no fused multiply-add and no product of bytes, but `i32x4.dot_i16x8`, which multiplies
//! words and adds pairs: 8 products, where an `f32` multiplication and an addition make 4. So block
//! formats are multiplied as words with activations rounded to 16 bits, for decode rows and for
//! prompts alike.

mod attention;
mod attention_codes;
mod elementwise;
mod gemm;
mod matmul;
mod peak;
mod unpack;

use crate::arch::scalar;
use crate::arch::table::{Kernels, PanelElement};
use crate::arch::transposed;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "simd128",
    supported: || true,
    matvec: matmul::matvec_for,
    quantize_q16: matmul::quantize_q16,
    quantize_p16: scalar::KERNELS.quantize_p16,
    gemm: gemm::gemm_for,
    transposed: gemm::transposed_for,
    dequantize: transposed::dequantize::<gemm::F32Panels>,
    peak: peak::peak,
    slices: elementwise::TABLE,
    attention_queries: attention::attention_queries,
    attention_keys: attention::attention_keys,
    attention_f32: attention::attention_f32,
    attention_f16: attention::attention_f16,
    attention_stored: attention_codes::attention_stored,
    hadamard: attention::hadamard,
    quantize_kv: attention::quantize_kv,
    load_kv: attention::load_kv,
    attention_merge: attention::attention_merge,
    attention_finish: attention::attention_finish,
    attention_element: (PanelElement::F32, 1),
};
