//! 64-bit Arm: ARMv8.0 with NEON, which all of them have. The levels above add instructions that
//! multiply bytes.

mod attention;
mod elementwise;
pub(super) mod gemm;
pub(super) mod matmul;
pub(super) mod peak;
pub(super) mod unpack;

use super::{Element, Kernels, scalar, transposed};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "neon",
    supported: || std::arch::is_aarch64_feature_detected!("neon"),
    matvec: matmul::matvec_for,
    quantize_q16: matmul::quantize_q16,
    quantize_p16: scalar::KERNELS.quantize_p16,
    quantize_q8: matmul::quantize_q8,
    gemm: gemm::gemm_for,
    transposed: gemm::transposed_for,
    dequantize: transposed::dequantize::<gemm::F32>,
    peak: peak::peak,
    dot: elementwise::dot,
    add: elementwise::add,
    add_scaled: elementwise::add_scaled,
    add_product: elementwise::add_product,
    rms_norm: elementwise::rms_norm,
    layer_norm: elementwise::layer_norm,
    rms_norm_backward: elementwise::rms_norm_backward,
    layer_norm_backward: elementwise::layer_norm_backward,
    softmax: elementwise::softmax,
    rope_angles: elementwise::rope_angles,
    rope_norm: elementwise::rope_norm,
    rope_neox: elementwise::rope_neox,
    silu_mul: elementwise::silu_mul,
    gelu_mul: elementwise::gelu_mul,
    gelu: elementwise::gelu,
    silu_mul_backward: elementwise::silu_mul_backward,
    gelu_mul_backward: elementwise::gelu_mul_backward,
    gelu_backward: elementwise::gelu_backward,
    f32_to_f16: elementwise::f32_to_f16,
    f16_to_f32: elementwise::f16_to_f32,
    attention_queries: attention::attention_queries,
    attention_keys: attention::attention_keys,
    attention_f32: attention::attention_f32,
    attention_f16: attention::attention_f16,
    attention_element: (Element::F32, 1),
};
