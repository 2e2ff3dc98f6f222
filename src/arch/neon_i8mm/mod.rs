//! NEON with `smmla`: FEAT_I8MM, ARMv8.6, among them Neoverse V1 and Apple M2 and later.

mod gemm;
mod peak;

use super::{Kernels, neon_dotprod};

pub(crate) const KERNELS: Kernels =
    Kernels { name: "neon_i8mm", supported, gemm: gemm::gemm_for, peak: peak::peak, ..neon_dotprod::KERNELS };

fn supported() -> bool {
    (neon_dotprod::KERNELS.supported)() && std::arch::is_aarch64_feature_detected!("i8mm")
}
