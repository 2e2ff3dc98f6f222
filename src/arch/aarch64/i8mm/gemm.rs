//! Products with many activation rows: the integer panels of [`crate::arch::aarch64::dotprod`], two
//! rows by two rows at a time. Instruction counts are given there.

use crate::arch::aarch64::dotprod::gemm::{
    Products, ROWS, int_blocks, int_gemm_for, int_panels, int_tile, pack_ints,
};
use crate::arch::aarch64::neon::gemm::{self, LANES, record};
use crate::arch::aarch64::neon::unpack::with_weights;
use crate::arch::gemm::{Panels, RegisterTile, UnpackRows, table};
use crate::arch::table::{Gemm, PanelElement};
use crate::quant::*;
use std::arch::aarch64::*;

int_panels!(IntPanels, "neon,i8mm", Smmla);
int_gemm_for!(IntPanels);

/// Register `2p + q` of a tile has the products of weight rows `2p, 2p + 1` with the activation
/// rows `2q, 2q + 1`, those of an activation row side by side.
enum Smmla {}

impl Products for Smmla {
    const PAIRS: bool = true;

    #[inline(always)]
    unsafe fn add<const VECS: usize>(
        int: &mut [[int32x4_t; VECS]; ROWS],
        w: [int8x16_t; ROWS],
        x: *const u32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            for p in 0..2 {
                let (a, b) = (
                    vreinterpretq_s64_s8(w[2 * p]),
                    vreinterpretq_s64_s8(w[2 * p + 1]),
                );
                let eights = [
                    vreinterpretq_s8_s64(vzip1q_s64(a, b)),
                    vreinterpretq_s8_s64(vzip2q_s64(a, b)),
                ];
                for (c, w) in eights.into_iter().enumerate() {
                    for v in 0..VECS {
                        for q in 0..2 {
                            let x =
                                vld1q_s8(x.wrapping_add(((2 * c + q) * VECS + v) * LANES).cast());
                            int[2 * p + q][v] = smmla(int[2 * p + q][v], x, w);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const VECS: usize>(
        int: &[[int32x4_t; VECS]; ROWS],
        r: usize,
        v: usize,
    ) -> int32x4_t {
        let (a, b) = (int[r / 2 * 2][v], int[r / 2 * 2 + 1][v]);
        // SAFETY: the caller's promise.
        unsafe {
            if r.is_multiple_of(2) {
                vuzp1q_s32(a, b)
            } else {
                vuzp2q_s32(a, b)
            }
        }
    }
}

/// `acc[2i + j] + Σ a[8i + l]·b[8j + l]`.
#[inline]
#[target_feature(enable = "i8mm")]
pub(super) fn smmla(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut acc = acc;
    // SAFETY: computes on registers. Once it is stable: `vmmlaq_s32`.
    unsafe {
        std::arch::asm!("smmla {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) acc, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}
