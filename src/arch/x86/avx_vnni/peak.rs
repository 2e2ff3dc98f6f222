//! Peak rate of products of integers: enough accumulators to hide the instructions' latency,
//! operands in registers.

use super::dot::Vnni;
use crate::arch::table::PanelElement;
use crate::arch::x86::avx2;
use crate::arch::x86::avx2::dot::Dot;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Independent sums: two instructions per cycle of up to five cycles' latency.
const SUMS: usize = 12;

#[target_feature(enable = "avx2,fma")]
pub(super) fn peak(element: PanelElement, rounds: u64) -> u64 {
    let x = _mm256_set1_epi8(black_box(1));
    let mut sums = [x; SUMS];
    let per_lane = match element {
        PanelElement::I8 => {
            for _ in 0..rounds {
                for sum in &mut sums {
                    // SAFETY: this level has the instruction.
                    *sum = unsafe { Vnni::bytes(*sum, x, x) };
                }
            }
            4
        }
        PanelElement::I16 => {
            for _ in 0..rounds {
                for sum in &mut sums {
                    // SAFETY: as above.
                    *sum = unsafe { Vnni::words(*sum, x, x) };
                }
            }
            2
        }
        // SAFETY: this level includes that one.
        _ => return unsafe { (avx2::KERNELS.peak)(element, rounds) },
    };
    black_box(sums);
    rounds * SUMS as u64 * 8 * per_lane * 2
}
