//! Block formats as 256 bytes, 16 scales and 16 offsets: what products with one row take.

use super::common::load_16;
use super::unpack::Groups;
use super::unpack_factors::{
    combined_halves, half, half_scale, halves, joined, negated, scaled_by, scales_mins, six_bits,
    times, twice, widened, widened_signed,
};
use super::unpack_order::{
    Unpacked, bit_pairs, block_bits, both_nibbles, bytes, bytes_in_order, in_order, look_up, merge,
    nibble_pairs, nibble_planes, nibbles, pair_planes, planes_in_order, with_fifth_bits,
};
use crate::arch::arrays;
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// A format with 256 weights in `N` blocks.
pub(in crate::arch::x86) trait UnpackDot<const N: usize>: Pod {
    /// Whether each 16 weights have a scale of their own; otherwise each 32 share one.
    const SCALE_PER_16: bool = false;
    /// Whether the bytes are signed.
    const SIGNED: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: [&Self; N]) -> Unpacked;

    /// The same with the bytes of each half in the order of [`BlockP16`](crate::arch::BlockP16),
    /// and with a zero point of 128 if they are signed. Formats may leave bytes shifted left where
    /// their scale makes up for it: to mask them takes less than to mask and to shift.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes(blocks: [&Self; N]) -> Unpacked {
        // SAFETY: the caller's promise.
        let mut weights = unsafe { Self::unpack(blocks) };
        for w in &mut weights.w {
            if Self::SIGNED {
                for w in w.iter_mut() {
                    *w = _mm256_xor_si256(*w, _mm256_set1_epi8(-128));
                }
            }
            *w = planes_in_order(*w);
        }
        weights
    }
}

/// References to a field of each of eight blocks. Not `map`: its closures would stay calls, because
/// `map` is not compiled for this level.
macro_rules! each {
    ($blocks:ident.$field:ident) => {
        [
            &$blocks[0].$field,
            &$blocks[1].$field,
            &$blocks[2].$field,
            &$blocks[3].$field,
            &$blocks[4].$field,
            &$blocks[5].$field,
            &$blocks[6].$field,
            &$blocks[7].$field,
        ]
    };
}

pub(in crate::arch) use each;

impl UnpackDot<8> for BlockQ4_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let scale = combined_halves(each!(blocks.d));
        let offset = scaled_by(scale, -8.0);
        Unpacked {
            w: nibbles(each!(blocks.qs)),
            scale,
            offset,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes(blocks: [&Self; 8]) -> Unpacked {
        let scale = combined_halves(each!(blocks.d));
        let offset = scaled_by(scale, -8.0);
        nibble_planes(each!(blocks.qs), scale, offset)
    }
}

impl UnpackDot<8> for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = nibbles(each!(blocks.qs));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: halves(each!(blocks.m)),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes(blocks: [&Self; 8]) -> Unpacked {
        let (scale, offset) = (
            combined_halves(each!(blocks.d)),
            combined_halves(each!(blocks.m)),
        );
        nibble_planes(each!(blocks.qs), scale, offset)
    }
}

impl UnpackDot<8> for BlockQ5_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        let scale = combined_halves(each!(blocks.d));
        let offset = scaled_by(scale, -16.0);
        Unpacked { w, scale, offset }
    }
}

impl UnpackDot<8> for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: halves(each!(blocks.m)),
        }
    }
}

impl UnpackDot<8> for BlockQ8_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        Unpacked {
            w: bytes(arrays::map(each!(blocks.qs), bytemuck::cast_ref)),
            scale: halves(each!(blocks.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<8> for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = look_up(&IQ4_VALUES, nibbles(each!(blocks.qs)));
        Unpacked {
            w,
            scale: combined_halves(each!(blocks.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<8> for BlockMxfp4 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = look_up(&MXFP4_VALUES, nibbles(each!(blocks.qs)));
        let [e0, e1] = widened(twice(joined(each!(blocks.e))));
        Unpacked {
            w,
            scale: [half_scale(e0), half_scale(e1)],
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<1> for BlockQ2K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let scales = load_16(&block.scales);
        let nibble = _mm_set1_epi8(15);
        let mins = _mm_and_si128(_mm_srli_epi16::<4>(scales), nibble);
        Unpacked {
            w: bit_pairs(&block.qs),
            scale: times(widened(_mm_and_si128(scales, nibble)), half(block.d)),
            offset: times(widened(mins), negated(half(block.dmin))),
        }
    }
}

impl UnpackDot<1> for BlockQ3K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let scales = unpack_scales_q3_k(&block.scales);
        let scale = times(widened_signed(&scales), half(block.d));
        let (low, high) = (bit_pairs(&block.qs), block_bits(&block.hmask));
        Unpacked {
            w: merge::<2>(low, high),
            scale,
            offset: scaled_by(scale, -4.0),
        }
    }
}

impl UnpackDot<1> for BlockQ4K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block, 1.0);
        Unpacked {
            w: nibble_pairs(&block.qs),
            scale,
            offset,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes([block]: [&Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block, 1.0 / 16.0);
        let qs: &[[[u8; 16]; 4]; 2] = bytemuck::cast_ref(&block.qs);
        Unpacked {
            w: [pair_planes(&qs[0]), pair_planes(&qs[1])],
            scale,
            offset,
        }
    }
}

impl UnpackDot<1> for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block, 1.0);
        Unpacked {
            w: merge::<4>(nibble_pairs(&block.qs), block_bits(&block.qh)),
            scale,
            offset,
        }
    }
}

impl UnpackDot<1> for BlockQ6K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let scale = times(widened_signed(&block.scales), half(block.d));
        let [ql0, ql1]: &[[[u8; 16]; 4]; 2] = bytemuck::cast_ref(&block.ql);
        let low = [both_nibbles(ql0), both_nibbles(ql1)];
        Unpacked {
            w: merge::<4>(low, bit_pairs(&block.qh)),
            scale,
            offset: scaled_by(scale, -32.0),
        }
    }
}

impl UnpackDot<1> for BlockIq4Xs {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
        let low = _mm256_set1_epi32(i32::from_le_bytes(block.scales_l));
        let high = _mm256_set1_epi32(u16::from_le_bytes(block.scales_h).into());
        let scales = [
            six_bits(low, high, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            six_bits(low, high, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)),
        ];
        let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(&block.qs);
        Unpacked {
            w: look_up(&IQ4_VALUES, nibbles(qs.each_ref())),
            scale: times(scales, half(block.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

/// Formats that the panels unpack, too.
macro_rules! as_panels {
    ($($block:ident)*) => {$(
        impl UnpackDot<1> for $block {
            const SCALE_PER_16: bool = true;
            const SIGNED: bool = true;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn unpack([block]: [&Self; 1]) -> Unpacked {
                grouped(block)
            }
        }
    )*};
}

as_panels!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S BlockTq1_0 BlockTq2_0);

impl UnpackDot<4> for BlockNvfp4 {
    const SCALE_PER_16: bool = true;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([a, b, c, d]: [&Self; 4]) -> Unpacked {
        let scales = [
            a.half_scales(),
            b.half_scales(),
            c.half_scales(),
            d.half_scales(),
        ];
        // SAFETY: this function has the features.
        let q = unsafe {
            [
                a.bytes(0),
                a.bytes(1),
                b.bytes(0),
                b.bytes(1),
                c.bytes(0),
                c.bytes(1),
                d.bytes(0),
                d.bytes(1),
            ]
        };
        in_order(bytemuck::cast_ref(&scales), &[0.0; 16], q)
    }
}

impl UnpackDot<2> for BlockQ1_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([a, b]: [&Self; 2]) -> Unpacked {
        let scale = [half(a.d), half(b.d)];
        // SAFETY: this function has the features.
        let q = unsafe {
            [
                a.bytes(0),
                a.bytes(1),
                a.bytes(2),
                a.bytes(3),
                b.bytes(0),
                b.bytes(1),
                b.bytes(2),
                b.bytes(3),
            ]
        };
        Unpacked {
            w: bytes_in_order(q),
            scale,
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<4> for BlockQ2_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([a, b, c, d]: [&Self; 4]) -> Unpacked {
        let each_lane = |a, b| _mm256_blend_ps::<0b1111_0000>(half(a), half(b));
        let scale = [each_lane(a.d, b.d), each_lane(c.d, d.d)];
        // SAFETY: this function has the features.
        let q = unsafe {
            [
                a.bytes(0),
                a.bytes(1),
                b.bytes(0),
                b.bytes(1),
                c.bytes(0),
                c.bytes(1),
                d.bytes(0),
                d.bytes(1),
            ]
        };
        Unpacked {
            w: bytes_in_order(q),
            scale,
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

/// The groups of a block in the order of products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn grouped<B: Groups>(block: &B) -> Unpacked {
    // SAFETY: this function has the features.
    let (factors, q) = unsafe {
        let [a, b, c, d] = [
            block.bytes(0),
            block.bytes(1),
            block.bytes(2),
            block.bytes(3),
        ];
        let [e, f, g, h] = [
            block.bytes(4),
            block.bytes(5),
            block.bytes(6),
            block.bytes(7),
        ];
        (block.factors(), [a, b, c, d, e, f, g, h])
    };
    in_order(&factors.scale, &factors.offset, q)
}
