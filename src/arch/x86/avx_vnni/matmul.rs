//! Products of weights with rows of generated tokens.
//!
//! Activations are 16-bit integers in two planes of bytes ([`BlockP16`]), as at the AVX-512 level,
//! so that weights stay bytes: `vpdpbusd` multiplies as many of them by both planes as `vpdpwssd`
//! by words, to which they would have to be widened first. A lane of 32 bits sums the products of
//! 16 values that share a scale: one conversion and one multiplication of scales serve 128 weights.

use super::dot::add_planes;
use crate::arch::acts::{ActForm, Acts, BlockP16};
use crate::arch::x86::avx2::common::{halves_of, load_32, load_f32};
use crate::arch::x86::avx2::matmul::{Form, largest_bits, rounded};
use crate::arch::x86::avx2::padded;
use crate::arch::x86::avx2::unpack_dot::UnpackDot;
use crate::arch::x86::avx2::unpack_order::planes_in_order;
use std::arch::x86_64::*;

/// [`BlockP16`]: weights are bytes, the 16 that share a scale in a lane.
pub(super) enum Planes {}

/// Half of the unpacked weights.
pub(super) struct Half {
    /// Bytes in the order of [`BlockP16`].
    w: [__m256i; 4],
    scale: __m256,
    offset: __m256,
}

impl Form for Planes {
    const FORM: ActForm = ActForm::P16;
    type Block = BlockP16;
    type Half = Half;

    #[inline]
    fn rows<'a>(x: &Acts<'a>) -> (&'a [BlockP16], usize) {
        let Acts::P16 { x, n } = *x else {
            unreachable!("the form this level asks for")
        };
        (x, n)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack<B: UnpackDot<N>, const N: usize>(blocks: [&B; N]) -> [Half; 2] {
        // SAFETY: this function has the features.
        let weights = unsafe { B::unpack_planes(blocks) };
        let ([a, b], [c, d], [e, f]) = (weights.w, weights.scale, weights.offset);
        let half = |w, scale, offset| Half { w, scale, offset };
        [half(a, c, e), half(b, d, f)]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add<B: UnpackDot<N>, const N: usize>(
        total: __m256,
        Half { w, scale, offset }: &Half,
        x: &BlockP16,
        half: usize,
    ) -> __m256 {
        let (d, s) = (
            load_f32(&halves_of(&x.d)[half]),
            load_f32(&halves_of(&x.s)[half]),
        );
        // 16 products of w ≤ 255 and |x| ≤ 2¹⁵ in a lane, and its start: below 2²⁸. Two sums, so
        // that products wait for fewer others.
        let zero = _mm256_setzero_si256();
        let (mut high, mut low) = (zero, zero);
        if B::SIGNED {
            // What the zero point of 128 makes too much.
            let sums: &[[u8; 32]; 2] = bytemuck::cast_ref(&x.sums);
            low = _mm256_sub_epi32(zero, _mm256_slli_epi32::<7>(load_32(&sums[half])));
        }
        // SAFETY: this level has the instructions.
        unsafe { add_planes(&mut high, &mut low, w, x, half) };
        let total = if B::SIGNED {
            total
        } else {
            _mm256_fmadd_ps(*offset, s, total)
        };
        let sums = _mm256_add_epi32(_mm256_slli_epi32::<8>(high), low);
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(*scale, d), total)
    }
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        match x.first_chunk() {
            Some(x) => planes_256(x, block),
            None => planes_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn planes_256(x: &[f32; 256], block: &mut BlockP16) {
    // Bytes of the two planes, `[half][plane][q][l]` as `planes_in_order` takes them.
    let mut bytes = [[[[_mm_setzero_si128(); 2]; 4]; 2]; 2];
    let x: &[[[f32; 8]; 4]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [
            load_f32(&x[0]),
            load_f32(&x[1]),
            load_f32(&x[2]),
            load_f32(&x[3]),
        ];
        let (d, inverse) = BlockP16::scale(largest_bits(x));
        for h in 0..2 {
            let (low, high) = (rounded(x[2 * h], inverse), rounded(x[2 * h + 1], inverse));
            // Packing works in each 128-bit lane.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let upper = _mm256_srai_epi16::<8>(_mm256_add_epi16(words, _mm256_set1_epi16(128)));
            let lower = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(words));
            let planes =
                _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(upper, lower));
            let (half, l, q) = (b / 4, b / 2 % 2, b % 2 * 2 + h);
            bytes[half][0][q][l] = _mm256_castsi256_si128(planes);
            bytes[half][1][q][l] = _mm256_extracti128_si256::<1>(planes);
            let sums = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
            let sums = _mm_add_epi32(
                _mm256_castsi256_si128(sums),
                _mm256_extracti128_si256::<1>(sums),
            );
            let sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
            let sum = _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32::<1>(sums)));
            block.d[2 * b + h] = d;
            block.s[2 * b + h] = d * sum as f32;
            block.sums[2 * b + h] = sum;
        }
    }
    for half in 0..2 {
        for (plane, to) in [&mut block.high, &mut block.low].into_iter().enumerate() {
            let [a, b, c, d] = bytes[half][plane];
            let pair = |[low, high]: [__m128i; 2]| _mm256_set_m128i(high, low);
            for (w, to) in planes_in_order([pair(a), pair(b), pair(c), pair(d)])
                .into_iter()
                .zip(to)
            {
                let to: &mut [[u8; 32]; 2] = bytemuck::cast_mut(to);
                to[half] = bytemuck::cast(w);
            }
        }
    }
}
