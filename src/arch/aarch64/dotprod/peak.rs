//! Peak rate of integer multiply-adds; `f32` as at the level below.

use super::matmul::sdot;
use crate::arch::aarch64::neon::peak::{self, SUMS};
use crate::arch::table::PanelElement;
use std::arch::aarch64::*;
use std::hint::black_box;

#[target_feature(enable = "neon,dotprod")]
pub(super) fn peak(element: PanelElement, rounds: u64) -> u64 {
    if matches!(element, PanelElement::F32 | PanelElement::Bf16) {
        return peak::peak(element, rounds);
    }
    let x = vdupq_n_s8(black_box(1));
    let mut sums = [vdupq_n_s32(0); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = sdot(*sum, x, x);
        }
    }
    black_box(sums);
    rounds * SUMS as u64 * 16 * 2
}
