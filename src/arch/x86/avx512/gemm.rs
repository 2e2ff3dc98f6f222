//! Panels for each format, for many activation rows.
//!
//! K-quants are multiplied as integers, with 8-bit activations, by `vpdpbusd`: it does four times
//! the products of an `f32` multiply-add. With a scale per 32 activations the error of the logits
//! is two thirds of llama.cpp's, which has a scale per 256.
//!
//! The others are integers, too. For formats of 32 values llama.cpp has a scale per 32 activations.
//! Here they get one per 16, and no minimum to subtract, as sums of products start with the
//! correction for a zero point of 128 in the weights' bytes; the error of the logits is at most 0.9
//! of llama.cpp's, and 1.2 to 1.5 times as many products are done as with bf16 (Zen 4).
//!
//! Q4_1 and Q5_1 take 16-bit activations and `vpdpwssd`, which does twice the products of an `f32`
//! multiply-add.
//!
//! F32, F16 and BF16 weights are multiplied as for decode rows.

use super::matmul::plain_gemm;
use super::panels::bytes::BytePanels;
use super::panels::floats::F32Panels;
use super::panels::integers::IntPanels;
use super::small_batch;
use crate::arch::gemm::table;
use crate::arch::scalar;
use crate::arch::table::{Gemm, Transposed};
use crate::arch::transposed::transposed;
use crate::arch::x86::avx2::unpack::{Groups, knows, with_groups};
use crate::quant::*;
use half::{bf16, f16};

pub(in crate::arch) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! bytes {
        ($block:ident) => {
            const {
                match <$block>::GROUPS {
                    8 => small_batch::halves(),
                    1 => small_batch::blocks_of_32(),
                    _ => table::<IntPanels<true, 16, true>>(),
                }
            }
        };
    }
    match dtype {
        DType::F32 => const { plain_gemm::<f32>() },
        DType::F16 => const { plain_gemm::<f16>() },
        DType::BF16 => const { plain_gemm::<bf16>() },
        DType::Q4_K | DType::Q5_K => const { small_batch::spans::<32>() },
        DType::Q2_K | DType::Q3_K | DType::Q6_K => const { small_batch::spans::<16>() },
        DType::Q4_1 | DType::Q5_1 => const { table::<IntPanels<false, 32>>() },
        _ => with_groups!(dtype, bytes, (scalar::KERNELS.gemm)(dtype)),
    }
}

/// Scales run along rows, so that columns are rounded again: to bytes with a scale for each 64
/// rows, like gradients, which is more than twice as fast as bf16. Both are then off by six tenths
/// of a per cent of their typical size (the largest of 64 normally distributed values is 2.6 times
/// that; half a step of a 127th of it, over √3), where bf16 has a third of that error.
pub(super) fn transposed_for(dtype: DType) -> Transposed {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => const { transposed::<F32Panels>() },
        _ if knows(dtype) => const { transposed::<BytePanels>() },
        _ => (scalar::KERNELS.transposed)(dtype),
    }
}
