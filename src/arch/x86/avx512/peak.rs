//! Peak rate of multiply-adds: enough accumulators to hide the instructions' latency, operands in
//! registers.

use crate::arch::table::PanelElement;
use std::arch::x86_64::*;
use std::hint::black_box;

/// Independent sums: two instructions per cycle of up to five cycles' latency.
pub(in crate::arch) const SUMS: usize = 12;

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(in crate::arch) fn peak(element: PanelElement, rounds: u64) -> u64 {
    let zero = _mm512_setzero_si512();
    let x = _mm512_set1_epi32(black_box(0));
    match element {
        PanelElement::F32 | PanelElement::Bf16 => {
            let x = _mm512_castsi512_ps(x);
            let mut sums = [x; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(x, x, *sum);
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 16 * 2
        }
        PanelElement::I16 => {
            let mut sums = [zero; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_dpwssd_epi32(*sum, x, x);
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 32 * 2
        }
        PanelElement::I8 => {
            let mut sums = [zero; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, x, x);
                }
            }
            black_box(sums);
            rounds * SUMS as u64 * 64 * 2
        }
    }
}
