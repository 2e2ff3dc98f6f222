//! AVX2 + FMA + F16C: x86-64 since Haswell (2013) and Zen (2017).

mod gemm;
pub(super) mod unpack;

use super::{Kernels, scalar};

pub(crate) const KERNELS: Kernels = Kernels { name: "avx2", supported, gemm: gemm::gemm_for, ..scalar::KERNELS };

fn supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}
