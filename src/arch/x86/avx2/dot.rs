//! Products of integers, added to sums of 32 bits: what differs between the levels of 256 bits.

use std::arch::x86_64::*;

/// Instructions that multiply integers and add the products.
pub(in crate::arch::x86) trait Dot {
    /// Whether there is [`Dot::bytes`].
    const SUMS_BYTES: bool;

    /// Adds to each lane the products of its four bytes, unsigned ones of `w` and signed ones of
    /// `x`.
    ///
    /// # Safety
    /// The CPU must have the instruction.
    unsafe fn bytes(sum: __m256i, w: __m256i, x: __m256i) -> __m256i;

    /// Adds to each lane the products of its two words.
    ///
    /// # Safety
    /// The CPU must have the instruction.
    unsafe fn words(sum: __m256i, w: __m256i, x: __m256i) -> __m256i;
}

/// The instructions of AVX2: `vpmaddwd`, and an addition of its own. Of bytes it adds two products
/// to sums of 16 bits, which only narrow weights allow.
pub(in crate::arch::x86) enum MultiplyAdd {}

impl Dot for MultiplyAdd {
    const SUMS_BYTES: bool = false;

    unsafe fn bytes(_: __m256i, _: __m256i, _: __m256i) -> __m256i {
        unreachable!("not asked for without `SUMS_BYTES`")
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn words(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        _mm256_add_epi32(sum, _mm256_madd_epi16(w, x))
    }
}
