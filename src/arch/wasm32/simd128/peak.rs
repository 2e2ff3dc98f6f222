//! Peak rate of products: enough sums to hide the instructions' latency, operands in registers.

use crate::arch::table::PanelElement;
use std::arch::wasm32::*;
use std::hint::black_box;

/// Independent sums; the hosts' CPUs have 16 registers or more.
const SUMS: usize = 12;

/// Multiplications and additions of `f32`, or products of words.
#[target_feature(enable = "simd128")]
pub(super) fn peak(element: PanelElement, rounds: u64) -> u64 {
    if element == PanelElement::I16 {
        let x = i16x8_splat(black_box(1));
        let mut sums = [x; SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = i32x4_add(*sum, i32x4_dot_i16x8(*sum, x));
            }
        }
        black_box(sums);
        return rounds * SUMS as u64 * 8 * 2;
    }
    let x = f32x4_splat(black_box(1e-9));
    let mut sums = [x; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = f32x4_add(f32x4_mul(*sum, x), x);
        }
    }
    black_box(sums);
    rounds * SUMS as u64 * 4 * 2
}
