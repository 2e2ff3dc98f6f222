//! AMX tiles of bf16 on top of AVX-512: Sapphire Rapids and later.

mod attention;
#[cfg(all(ruvllm_emulate_amx, target_os = "linux"))]
mod emulate;
mod gemm;
mod tiles;
mod unpack;

use super::avx512;
use crate::arch::table::{Kernels, PanelElement};
use std::sync::OnceLock;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "amx",
    supported,
    gemm: gemm::gemm_for,
    peak: gemm::peak,
    attention_f16: attention::attention_f16,
    attention_element: (PanelElement::Bf16, 4),
    ..avx512::KERNELS
};

/// Whether the CPU has tiles and the kernel lets this process use them. Asked once: the permission
/// is the process's, and a virtual machine traps `cpuid`.
fn supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| {
        (avx512::KERNELS.supported)()
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi")
            && ((has_tiles() && permitted()) || emulated())
    })
}

fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Of `edx` in leaf 7: AMX-BF16, AMX-TILE.
    const BITS: u32 = 1 << 22 | 1 << 24;
    #[allow(unused_unsafe)] // unsafe up to Rust 1.93
    // SAFETY: every x86-64 CPU has the instruction.
    unsafe {
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BITS == BITS
    }
}

/// Asks Linux for room for the tiles in this process's saved state; threads made later inherit it.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the system call touches no memory of the process.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Other systems have other calls for this; none could be tried.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

#[cfg(all(ruvllm_emulate_amx, target_os = "linux"))]
fn emulated() -> bool {
    emulate::install()
}

#[cfg(not(all(ruvllm_emulate_amx, target_os = "linux")))]
fn emulated() -> bool {
    false
}
