//! AVX2 + FMA + F16C: x86-64 since Haswell (2013) and Zen (2017).

mod matmul;

use super::{Kernels, scalar};
pub(super) use matmul::{each, joined, padded, prefetch};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx2",
    supported,
    matvec: matmul::matvec_for,
    quantize_q16: matmul::quantize_q16,
    ..scalar::KERNELS
};

fn supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}
