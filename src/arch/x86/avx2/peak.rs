//! Peak rate of multiply-adds: enough accumulators to hide the instructions' latency, operands in
//! registers.

use crate::arch::table::PanelElement;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Independent sums: two instructions per cycle of up to five cycles' latency.
const SUMS: usize = 12;

#[target_feature(enable = "avx2,fma")]
pub(super) fn peak(element: PanelElement, rounds: u64) -> u64 {
    match element {
        PanelElement::F32 | PanelElement::Bf16 => {
            let x = _mm256_set1_ps(black_box(1e-9));
            let mut sums = [x; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(x, x, *sum);
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 8 * 2
        }
        PanelElement::I16 => {
            let x = _mm256_set1_epi16(black_box(1));
            let mut sums = [x; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*sum, x));
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 16 * 2
        }
        PanelElement::I8 => {
            let x = _mm256_set1_epi8(black_box(1));
            let mut sums = [x; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(*sum, x));
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 32 * 2
        }
    }
}
