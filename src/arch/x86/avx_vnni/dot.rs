//! `vpdpbusd` and `vpdpwssd`, which multiply and add in one instruction.
//!
//! As inline assembly, so that one source serves this level and AVX2: a function with the
//! instruction's own target feature could not be inlined into one that lacks it. CPUs with AVX-512
//! alone have the same instructions in another encoding, which `--cfg ruvllm_evex_vnni` takes to
//! test this level there.

use crate::arch::acts::BlockP16;
use crate::arch::x86::avx2::dot::Dot;
use std::arch::asm;
use std::arch::x86_64::__m256i;
use std::mem::offset_of;

/// The instructions of AVX-VNNI.
pub(super) enum Vnni {}

#[cfg(not(ruvllm_evex_vnni))]
macro_rules! encoding {
    () => {
        "{{vex}} "
    };
}
#[cfg(ruvllm_evex_vnni)]
macro_rules! encoding {
    () => {
        "{{evex}} "
    };
}

impl Dot for Vnni {
    const SUMS_BYTES: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn bytes(mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller's promise; only the register changes.
        unsafe {
            asm!(
                concat!(encoding!(), "vpdpbusd {}, {}, {}"),
                inout(ymm_reg) sum,
                in(ymm_reg) w,
                in(ymm_reg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn words(mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe {
            asm!(
                concat!(encoding!(), "vpdpwssd {}, {}, {}"),
                inout(ymm_reg) sum,
                in(ymm_reg) w,
                in(ymm_reg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

/// Adds to each lane the products of 16 weights with both planes of activations, those of half a
/// block. One statement, which reads activations from memory as it multiplies them: apart, 16
/// loads would be a sixth of the instructions of a row's products.
///
/// # Safety
/// The CPU must have the instruction.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_planes(
    high: &mut __m256i,
    low: &mut __m256i,
    w: &[__m256i; 4],
    x: &BlockP16,
    half: usize,
) {
    /// Bytes from a plane to the next.
    const LOW: usize = offset_of!(BlockP16, low) - offset_of!(BlockP16, high);
    let first = &raw const x.high[0][8 * half];
    // SAFETY: the caller's promise; from there on, each register has 8 lanes of the half.
    unsafe {
        asm!(
            concat!(encoding!(), "vpdpbusd {high}, {w0}, ymmword ptr [{x}]"),
            concat!(encoding!(), "vpdpbusd {low}, {w0}, ymmword ptr [{x} + {low_at}]"),
            concat!(encoding!(), "vpdpbusd {high}, {w1}, ymmword ptr [{x} + 64]"),
            concat!(encoding!(), "vpdpbusd {low}, {w1}, ymmword ptr [{x} + {low_at} + 64]"),
            concat!(encoding!(), "vpdpbusd {high}, {w2}, ymmword ptr [{x} + 128]"),
            concat!(encoding!(), "vpdpbusd {low}, {w2}, ymmword ptr [{x} + {low_at} + 128]"),
            concat!(encoding!(), "vpdpbusd {high}, {w3}, ymmword ptr [{x} + 192]"),
            concat!(encoding!(), "vpdpbusd {low}, {w3}, ymmword ptr [{x} + {low_at} + 192]"),
            high = inout(ymm_reg) *high,
            low = inout(ymm_reg) *low,
            w0 = in(ymm_reg) w[0],
            w1 = in(ymm_reg) w[1],
            w2 = in(ymm_reg) w[2],
            w3 = in(ymm_reg) w[3],
            x = in(reg) first,
            low_at = const LOW,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
}

/// Whether the CPU has the instructions, in the encoding that is used.
pub(super) fn supported() -> bool {
    if cfg!(ruvllm_evex_vnni) {
        is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl")
    } else {
        is_x86_feature_detected!("avxvnni")
    }
}
