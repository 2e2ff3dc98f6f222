//! AVX-512 F/BW/VL/DQ with VNNI and BF16: Cooper Lake, Sapphire Rapids, Zen 4 and later.

mod matmul;

use super::{Kernels, avx2};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx512",
    supported,
    matvec: matmul::matvec_for,
    quantize_q16: matmul::quantize_q16,
    ..avx2::KERNELS
};

fn supported() -> bool {
    (avx2::KERNELS.supported)()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512bf16")
}
