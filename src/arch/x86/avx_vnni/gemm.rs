//! Panels for each format, for many activation rows: bytes, as at the AVX-512 level, which
//! `avx512/gemm.rs` gives the reasons for.
//!
//! Formats with a minimum have a scale per 32 activations, the others one per 16 and a zero point.
//! Q4_1 and Q5_1 take 16-bit activations.

use super::dot::Vnni;
use crate::arch::gemm::table;
use crate::arch::table::Gemm;
use crate::arch::x86::avx2;
use crate::arch::x86::avx2::gemm::IntPanels;
use crate::arch::x86::avx2::unpack::{Groups, with_groups};
use crate::quant::*;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! bytes {
        ($block:ident) => {
            const {
                if <$block>::GROUPS == 1 {
                    table::<IntPanels<Vnni, 8, 32, true>>()
                } else {
                    table::<IntPanels<Vnni, 8, 16, true>>()
                }
            }
        };
    }
    match dtype {
        DType::Q4_K | DType::Q5_K => const { table::<IntPanels<Vnni, 6, 32>>() },
        DType::Q2_K => const { table::<IntPanels<Vnni, 6, 16>>() },
        DType::Q4_1 | DType::Q5_1 => const { table::<IntPanels<Vnni, 16, 32>>() },
        _ => with_groups!(dtype, bytes, (avx2::KERNELS.gemm)(dtype)),
    }
}
