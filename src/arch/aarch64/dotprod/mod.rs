//! NEON with `sdot`: ARMv8.2 with FEAT_DotProd, among them Cortex-A75 and later and all Apple M.

pub(super) mod gemm;
mod matmul;
mod peak;

use super::neon;
use crate::arch::table::Kernels;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "neon_dotprod",
    supported,
    matvec: matmul::matvec_for,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    ..neon::KERNELS
};

fn supported() -> bool {
    (neon::KERNELS.supported)() && std::arch::is_aarch64_feature_detected!("dotprod")
}
