//! 64-bit Arm: ARMv8.0 with NEON, which all of them have. The levels above add instructions that
//! multiply bytes.

mod attention;
mod attention_codes;
mod elementwise;
pub(super) mod gemm;
pub(super) mod matmul;
pub(super) mod peak;
pub(super) mod unpack;

use crate::arch::scalar;
use crate::arch::table::{Kernels, PanelElement};
use crate::arch::transposed;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "neon",
    supported: || std::arch::is_aarch64_feature_detected!("neon"),
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
