//! Peak rate of multiply-adds: enough accumulators to hide the instructions' latency, operands in
//! registers.

use crate::arch::table::PanelElement;
use std::arch::aarch64::*;
use std::hint::black_box;

/// Independent sums: four instructions per cycle of up to four cycles' latency, and some more.
pub(in crate::arch) const SUMS: usize = 24;

/// In `f32`, the element of all panels of this level.
#[target_feature(enable = "neon")]
pub(in crate::arch) fn peak(_: PanelElement, rounds: u64) -> u64 {
    let x = vdupq_n_f32(black_box(1e-9));
    let mut sums = [x; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = vfmaq_f32(*sum, x, x);
        }
    }
    black_box(sums);
    rounds * SUMS as u64 * 4 * 2
}
