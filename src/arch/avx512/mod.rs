//! AVX-512 F/BW/VL/DQ with VNNI: Cascade Lake, Ice Lake, Rocket Lake, Zen 4 and later.

pub(super) mod attention;
mod attention_i16;
pub(super) mod elementwise;
pub(super) mod gemm;
mod matmul;
pub(super) mod peak;
mod planes;
mod strip;

use super::{Element, Kernels, avx2, transposed};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx512",
    supported,
    matvec: matmul::matvec_for,
    quantize_q16: matmul::quantize_q16,
    quantize_p16: matmul::quantize_p16,
    quantize_q8: avx2::strip::quantize_q8,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    transposed: gemm::transposed_for,
    dequantize: transposed::dequantize::<gemm::F32>,
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
    attention_f16: attention_i16::attention_f16,
    attention_element: (Element::I16, 1),
};

fn supported() -> bool {
    (avx2::KERNELS.supported)()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}
