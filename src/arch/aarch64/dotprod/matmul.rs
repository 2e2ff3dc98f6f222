//! Products of weights with few activation rows, by `sdot`. Instruction counts and their bounds are
//! given in [`crate::arch::aarch64::neon::matmul`].

use crate::arch::aarch64::neon;
use crate::arch::aarch64::neon::matmul::{Dot, matvec, matvec_ints};
use crate::arch::aarch64::neon::unpack::{UnpackBlocks, with_weights};
use crate::arch::acts::{ActForm, Acts};
use crate::arch::table::Matvec;
use crate::arch::view::ColumnsMut;
use crate::quant::*;
use std::arch::aarch64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    matvec_ints!(dtype, (neon::KERNELS.matvec)(dtype))
}

/// One instruction for 16 products.
enum Sdot {}

impl Dot for Sdot {
    #[inline(always)]
    unsafe fn dot<const WHOLE_BYTES: bool>(
        acc: int32x4_t,
        w: int8x16_t,
        x: int8x16_t,
    ) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { sdot(acc, w, x) }
    }
}

/// `acc[i] + Σ w[4i + j]·x[4i + j]`.
#[inline]
#[target_feature(enable = "dotprod")]
pub(super) fn sdot(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut acc = acc;
    // SAFETY: computes on registers. Once it is stable: `vdotq_s32`.
    unsafe {
        std::arch::asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) acc, in(vreg) w, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

#[target_feature(enable = "neon,dotprod")]
fn matvec_q16<B: UnpackBlocks<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    _: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::Q16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    // SAFETY: this function has the features.
    unsafe { matvec::<Sdot, B, N>(y, w, x, n) }
}
