//! AVX2 + FMA + F16C: x86-64 since Haswell (2013) and Zen (2017).

mod attention;
pub(super) mod attention_codes;
pub(super) mod common;
pub(super) mod dot;
mod elementwise;
pub(super) mod gemm;
pub(super) mod matmul;
mod peak;
pub(super) mod unpack;
pub(super) mod unpack_dot;
mod unpack_factors;
pub(super) mod unpack_order;

use crate::arch::scalar;
use crate::arch::table::{Kernels, PanelElement};
use crate::arch::transposed;
pub(super) use matmul::{padded, prefetch};
pub(super) use unpack_dot::each;
pub(super) use unpack_factors::{four, joined};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx2",
    supported,
    matvec: matmul::matvec_for::<matmul::Words>,
    quantize_q16: matmul::quantize_q16,
    quantize_p16: scalar::KERNELS.quantize_p16,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    slices: elementwise::TABLE,
    transposed: gemm::transposed_for,
    dequantize: transposed::dequantize::<gemm::F32Panels>,
    attention_queries: attention::attention_queries,
    attention_keys: attention::attention_keys,
    attention_f32: attention::attention_f32,
    attention_f16: attention::attention_f16,
    attention_stored: attention_codes::attention_stored::<dot::MultiplyAdd>,
    hadamard: attention::hadamard,
    quantize_kv: attention::quantize_kv,
    load_kv: attention::load_kv,
    attention_merge: attention::attention_merge,
    attention_finish: attention::attention_finish,
    attention_element: (PanelElement::F32, 1),
};

fn supported() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}
