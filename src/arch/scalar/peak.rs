//! Peak rate of multiply-adds in plain code.

use crate::arch::table::PanelElement;
use std::hint::black_box;

/// Independent sums, in vectors as wide as the compiler likes.
const SUMS: usize = 48;

pub(super) fn peak(_element: PanelElement, rounds: u64) -> u64 {
    let x = black_box([1e-9f32; SUMS]);
    let mut sums = x;
    for _ in 0..rounds {
        for (sum, x) in sums.iter_mut().zip(&x) {
            *sum += *sum * x;
        }
    }
    black_box(sums);
    rounds * SUMS as u64 * 2
}
