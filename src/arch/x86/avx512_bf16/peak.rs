//! Peak rate of bf16 multiply-adds; other elements as at the level below.

use crate::arch::table::PanelElement;
use crate::arch::x86::avx512::peak::{self, SUMS};
use std::arch::x86_64::*;
use std::hint::black_box;

#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512bf16")]
pub(super) fn peak(element: PanelElement, rounds: u64) -> u64 {
    if element != PanelElement::Bf16 {
        return peak::peak(element, rounds);
    }
    // SAFETY: the same bits.
    let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(black_box(0))) };
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    black_box(sums);
    rounds * SUMS as u64 * 32 * 2
}
