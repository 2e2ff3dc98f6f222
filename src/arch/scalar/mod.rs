//! The portable level: every kernel in its plainest form. It is the reference that all other levels
//! are tested against, and what a CPU without any known extension runs.

mod attention;
mod elementwise;
mod matmul;
mod peak;

use super::{ActForm, Element, Gemm, Kernels, Matvec, Transposed};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "scalar",
    supported: || true,
    matvec: |_, _| Matvec { form: ActForm::F32, kernel: matmul::matvec },
    gemm: |_| Gemm {
        // Panels buy nothing here: `matvec` already unpacks each row once for all activations.
        min_rows: usize::MAX,
        element: (Element::F32, 1),
        tile: 32,
        group: 16,
        packed_len: |m, k| m * k * size_of::<f32>(),
        pack: matmul::pack,
        kernel: matmul::gemm,
    },
    transposed: |_| Transposed {
        tile: 256,
        group: 16,
        packed_len: |m, k| m * k * size_of::<f32>(),
        pack: matmul::pack,
        kernel: matmul::transposed,
    },
    dequantize: |dtype, blocks, x| (dtype.float_format().dequantize)(blocks, x),
    quantize_q16: matmul::quantize_q16,
    quantize_p16: matmul::quantize_p16,
    quantize_q8: matmul::quantize_q8,
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
    attention_f32: attention::attention,
    attention_f16: attention::attention,
    attention_element: (Element::F32, 1),
};
