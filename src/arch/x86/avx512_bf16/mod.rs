//! AVX-512 with BF16, where `vdpbf16ps` does twice the products of an `f32` multiply-add: Zen 4 and
//! later. Intel's cores issue it at a quarter of the rate of `f32` multiply-adds (measured on
//! Sapphire Rapids), so that the level below is the faster one there.

pub(super) mod gemm;
mod peak;

use super::avx512;
use crate::arch::table::Kernels;
use std::arch::x86_64::__cpuid;
use std::sync::OnceLock;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx512_bf16",
    supported,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    ..avx512::KERNELS
};

/// Whether the CPU has the instructions and is not Intel's. Decided by vendor, not by timing, so
/// that results do not depend on a clock; asked once, as a virtual machine traps `cpuid`.
fn supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| {
        #[allow(unused_unsafe)] // unsafe up to Rust 1.93
        // SAFETY: every x86-64 CPU has the instruction.
        let vendor = unsafe { __cpuid(0) };
        let vendor = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        (avx512::KERNELS.supported)()
            && is_x86_feature_detected!("avx512bf16")
            && vendor.as_flattened() != b"GenuineIntel"
    })
}
