//! AVX-512 F/BW/VL/DQ with VNNI: Cascade Lake, Ice Lake, Rocket Lake, Zen 4 and later.

pub(super) mod attention;
mod attention_i16;
mod attention_i8;
pub(super) mod common;
pub(super) mod elementwise;
pub(super) mod gemm;
mod kv;
mod matmul;
pub(super) mod panels;
pub(super) mod peak;
mod small_batch;
mod unpack;

use super::avx2;
use crate::arch::table::{Kernels, PanelElement};
use crate::arch::transposed;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx512",
    supported,
    matvec: matmul::matvec_for,
    quantize_q16: avx2::KERNELS.quantize_q16,
    quantize_p16: matmul::quantize_p16,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    slices: elementwise::TABLE,
    transposed: gemm::transposed_for,
    dequantize: transposed::dequantize::<panels::floats::F32Panels>,
    attention_queries: attention::attention_queries,
    attention_keys: attention::attention_keys,
    attention_f32: attention::attention_f32,
    attention_f16: attention_i16::attention_f16,
    attention_stored: attention_i16::attention_stored,
    hadamard: kv::shared::hadamard,
    quantize_kv: kv::quantize_kv,
    load_kv: kv::load_kv,
    attention_merge: attention::attention_merge,
    attention_finish: attention::attention_finish,
    attention_element: (PanelElement::I16, 1),
};

fn supported() -> bool {
    (avx2::KERNELS.supported)()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}
