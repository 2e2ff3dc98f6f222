//! Panels of `f32`, for the transposed product with plain weights, and blocks expanded to `f32`.

use crate::arch::gemm::{Panels, RegisterTile};
use crate::arch::generic::lanes::Lanes;
use crate::arch::generic::packing::{MAX_LANES, Transpose};
use crate::arch::generic::panels::{self, f32_panels, transposed_panel};
use crate::arch::transposed::TransposedPanels;
use crate::arch::x86::avx2::unpack::{Factors, Groups, knows, wanted_groups, with_groups};
use crate::arch::x86::avx512::common::{read_transposed, transpose};
use crate::arch::x86::avx512::elementwise::{F32x16, zero};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

f32_panels!("avx512f,avx512bw,avx512vl,avx512dq", F32x16, zero(), depth: 128, rows: 8, rows_of_one: 16);
transposed_panel!("avx512f,avx512bw,avx512vl,avx512dq", zero());

impl Transpose for F32x16 {
    #[inline(always)]
    fn transpose(x: [F32x16; MAX_LANES]) -> [F32x16; MAX_LANES] {
        // SAFETY: a vector exists, so the CPU has the level's features; registers of the same bits.
        unsafe {
            std::mem::transmute(transpose(
                std::mem::transmute::<[F32x16; 16], [__m512i; 16]>(x),
            ))
        }
    }

    #[inline(always)]
    unsafe fn read_transposed(self, p: *const f32, stride: usize) -> [F32x16; MAX_LANES] {
        // SAFETY: as above; the caller's promise.
        unsafe {
            std::mem::transmute::<[__m512i; 16], [F32x16; 16]>(read_transposed(p.cast(), stride))
        }
    }
}

/// Expands the values `wanted` of a row's blocks; `out` has room for them, rounded up to 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(in crate::arch) fn unpack(dtype: DType, bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block>(bytes, wanted, out)
        };
    }
    match dtype {
        DType::F32 => panels::widen::<_, f32>(zero(), bytes, out),
        DType::F16 => panels::widen::<_, f16>(zero(), bytes, out),
        DType::BF16 => panels::widen::<_, bf16>(zero(), bytes, out),
        _ => with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        ),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [f32; 32], [low, high]: [__m512; 2]) {
    // SAFETY: the array has the size of both registers.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), low) };
    // SAFETY: as above.
    unsafe { _mm512_storeu_ps(to[16..].as_mut_ptr(), high) };
}

/// Expands blocks of signed bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn blocks<B: Groups>(bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    let out = out.as_chunks_mut().0;
    for (i, block) in bytemuck::cast_slice::<u8, B>(bytes).iter().enumerate() {
        // SAFETY: this level includes AVX2 and F16C.
        let factors = unsafe { block.factors() };
        for g in wanted_groups::<B>(i, &wanted) {
            store(
                &mut out[i * B::GROUPS + g - wanted.start / 32],
                group(block, &factors, g),
            );
        }
    }
}

/// Values of group `g` of `block`, with the given factors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(in crate::arch) fn group<B: Groups>(
    block: &B,
    Factors { scale, offset }: &Factors,
    g: usize,
) -> [__m512; 2] {
    // SAFETY: this level includes AVX2.
    let q = unsafe { block.bytes(g) };
    let value = |half: usize, q: __m128i| {
        let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
        _mm512_fmadd_ps(
            _mm512_set1_ps(scale[2 * g + half]),
            q,
            _mm512_set1_ps(offset[2 * g + half]),
        )
    };
    [
        value(0, _mm256_castsi256_si128(q)),
        value(1, _mm256_extracti128_si256::<1>(q)),
    ]
}
