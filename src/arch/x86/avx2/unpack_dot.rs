//! Block formats as 256 bytes, 16 scales and 16 offsets: what products with one row take.

use super::common::{halves_of, load_16, load_f32};
use super::unpack::Groups;
use crate::quant::*;
use bytemuck::Pod;
use std::arch::asm;
use std::arch::x86_64::*;

/// 256 weights, `scale·w + offset`, in two halves.
pub(in crate::arch::x86) struct Unpacked {
    /// Byte `j % 16` of lane `b % 4 / 2` of register `2·(b % 2) + j / 16` of half `b / 4` is value
    /// `j` of block `b` of 32.
    pub(in crate::arch::x86) w: [[__m256i; 4]; 2],
    /// Scale per 16 weights.
    pub(in crate::arch::x86) scale: [__m256; 2],
    /// Offset per 16 weights.
    pub(in crate::arch::x86) offset: [__m256; 2],
}

/// A format with 256 weights in `N` blocks.
pub(in crate::arch::x86) trait UnpackDot<const N: usize>: Pod {
    /// Whether each 16 weights have a scale of their own; otherwise each 32 share one.
    const SCALE_PER_16: bool = false;
    /// Whether the bytes are signed.
    const SIGNED: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: &[Self; N]) -> Unpacked;

    /// The same with the bytes of each half in the order of [`BlockP16`](crate::arch::BlockP16),
    /// and with a zero point of 128 if they are signed. Formats may leave bytes shifted left where
    /// their scale makes up for it: to mask them takes less than to mask and to shift.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes(blocks: &[Self; N]) -> Unpacked {
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
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
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
    unsafe fn unpack_planes(blocks: &[Self; 8]) -> Unpacked {
        let scale = combined_halves(each!(blocks.d));
        let offset = scaled_by(scale, -8.0);
        nibble_planes(each!(blocks.qs), scale, offset)
    }
}

impl UnpackDot<8> for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = nibbles(each!(blocks.qs));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: halves(each!(blocks.m)),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes(blocks: &[Self; 8]) -> Unpacked {
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
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        let scale = combined_halves(each!(blocks.d));
        let offset = scaled_by(scale, -16.0);
        Unpacked { w, scale, offset }
    }
}

impl UnpackDot<8> for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
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
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        Unpacked {
            w: bytes(each!(blocks.qs).map(bytemuck::cast_ref)),
            scale: halves(each!(blocks.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<8> for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
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
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block, 1.0);
        Unpacked {
            w: nibble_pairs(&block.qs),
            scale,
            offset,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack_planes([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
            unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
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
    unsafe fn unpack([a, b, c, d]: &[Self; 4]) -> Unpacked {
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
    unsafe fn unpack([a, b]: &[Self; 2]) -> Unpacked {
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
    unsafe fn unpack([a, b, c, d]: &[Self; 4]) -> Unpacked {
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

/// Eight groups of 32 bytes in the order of products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_order(scale: &[f32; 16], offset: &[f32; 16], q: [__m256i; 8]) -> Unpacked {
    let floats = |x: &[f32; 16]| [load_f32(&halves_of(x)[0]), load_f32(&halves_of(x)[1])];
    Unpacked {
        w: bytes_in_order(q),
        scale: floats(scale),
        offset: floats(offset),
    }
}

/// See [`Unpacked::w`].
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_in_order(q: [__m256i; 8]) -> [[__m256i; 4]; 2] {
    let mut w = [[_mm256_setzero_si256(); 4]; 2];
    for half in 0..2 {
        for odd in 0..2 {
            let (first, second) = (q[4 * half + odd], q[4 * half + odd + 2]);
            w[half][2 * odd] = _mm256_permute2x128_si256::<0x20>(first, second);
            w[half][2 * odd + 1] = _mm256_permute2x128_si256::<0x31>(first, second);
        }
    }
    w
}

/// The bytes of eight blocks; two times 16 each.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes(qs: [&[[u8; 16]; 2]; 8]) -> [[__m256i; 4]; 2] {
    [
        [
            lanes(&qs[0][0], &qs[2][0]),
            lanes(&qs[0][1], &qs[2][1]),
            lanes(&qs[1][0], &qs[3][0]),
            lanes(&qs[1][1], &qs[3][1]),
        ],
        [
            lanes(&qs[4][0], &qs[6][0]),
            lanes(&qs[4][1], &qs[6][1]),
            lanes(&qs[5][0], &qs[7][0]),
            lanes(&qs[5][1], &qs[7][1]),
        ],
    ]
}

/// Nibbles of blocks that hold value `j` in the low half of byte `j` and value `j + 16` in its high
/// half.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(qs: [&[u8; 16]; 8]) -> [[__m256i; 4]; 2] {
    let [a, b] = split_nibbles(lanes(qs[0], qs[2]));
    let [c, d] = split_nibbles(lanes(qs[1], qs[3]));
    let [e, f] = split_nibbles(lanes(qs[4], qs[6]));
    let [g, h] = split_nibbles(lanes(qs[5], qs[7]));
    [[a, b, c, d], [e, f, g, h]]
}

/// Nibbles of pairs of blocks: the low halves of 32 bytes are one block, the high halves the next.
#[inline]
#[target_feature(enable = "avx2")]
fn nibble_pairs(qs: &[u8; 128]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(qs);
    let [a, c] = split_nibbles(lanes(&qs[0], &qs[2]));
    let [b, d] = split_nibbles(lanes(&qs[1], &qs[3]));
    let [e, g] = split_nibbles(lanes(&qs[4], &qs[6]));
    let [f, h] = split_nibbles(lanes(&qs[5], &qs[7]));
    [[a, b, c, d], [e, f, g, h]]
}

/// Low and high nibbles.
#[inline]
#[target_feature(enable = "avx2")]
fn split_nibbles(x: __m256i) -> [__m256i; 2] {
    let nibble = _mm256_set1_epi8(15);
    [
        _mm256_and_si256(x, nibble),
        _mm256_and_si256(_mm256_srli_epi16::<4>(x), nibble),
    ]
}

/// The low nibbles of each 16 bytes in the low lane, the high ones in the high lane.
#[inline]
#[target_feature(enable = "avx2")]
fn both_nibbles(qs: &[[u8; 16]; 4]) -> [__m256i; 4] {
    let (by, nibble) = (each_lane(0, 4), _mm256_set1_epi8(15));
    [
        shifted(load_twice(&qs[0]), by, nibble),
        shifted(load_twice(&qs[1]), by, nibble),
        shifted(load_twice(&qs[2]), by, nibble),
        shifted(load_twice(&qs[3]), by, nibble),
    ]
}

/// Bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`.
#[inline]
#[target_feature(enable = "avx2")]
fn bit_pairs(qs: &[u8; 64]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 4] = bytemuck::cast_ref(qs);
    let (even, odd, mask) = (each_lane(0, 4), each_lane(2, 6), _mm256_set1_epi8(3));
    let [a, b, c, d] = [
        load_twice(&qs[0]),
        load_twice(&qs[1]),
        load_twice(&qs[2]),
        load_twice(&qs[3]),
    ];
    [
        [
            shifted(a, even, mask),
            shifted(b, even, mask),
            shifted(a, odd, mask),
            shifted(b, odd, mask),
        ],
        [
            shifted(c, even, mask),
            shifted(d, even, mask),
            shifted(c, odd, mask),
            shifted(d, odd, mask),
        ],
    ]
}

/// Bit `b` of byte `i` for value `i` of block `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn block_bits(qs: &[u8; 32]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 2] = bytemuck::cast_ref(qs);
    let [a, b] = [load_twice(&qs[0]), load_twice(&qs[1])];
    let by = [
        each_lane(0, 2),
        each_lane(1, 3),
        each_lane(4, 6),
        each_lane(5, 7),
    ];
    let bit = _mm256_set1_epi8(1);
    [
        [
            shifted(a, by[0], bit),
            shifted(b, by[0], bit),
            shifted(a, by[1], bit),
            shifted(b, by[1], bit),
        ],
        [
            shifted(a, by[2], bit),
            shifted(b, by[2], bit),
            shifted(a, by[3], bit),
            shifted(b, by[3], bit),
        ],
    ]
}

/// `x >> by & mask`.
#[inline]
#[target_feature(enable = "avx2")]
fn shifted(x: __m256i, by: __m256i, mask: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srlv_epi32(x, by), mask)
}

/// Bytes in the order of [`BlockP16`](crate::arch::BlockP16); the 128 bits `l` of register `q` are
/// the 16 bytes from `64·l + 16·q` on.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch::x86) fn planes_in_order([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    // Words 0 and 1, and 2 and 3, of an even block of 32 bytes, and of an odd one, where registers
    // change places in twos.
    let (even_01, even_23) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (odd_01, odd_23) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    [
        join::<0b1010>(even_01, odd_01),
        join::<0b0101>(even_01, odd_01),
        join::<0b1010>(even_23, odd_23),
        join::<0b0101>(even_23, odd_23),
    ]
}

/// In each 128-bit lane a word of 64 bits of `a`, and one of `b`: the upper ones where the bits of
/// `WHICH` are set.
#[inline]
#[target_feature(enable = "avx2")]
fn join<const WHICH: i32>(a: __m256i, b: __m256i) -> __m256i {
    _mm256_castpd_si256(_mm256_shuffle_pd::<WHICH>(
        _mm256_castsi256_pd(a),
        _mm256_castsi256_pd(b),
    ))
}

/// [`nibble_pairs`] of half a block in the order of [`planes_in_order`]; the values of odd blocks
/// stay in the high halves of bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn pair_planes(qs: &[[u8; 16]; 4]) -> [__m256i; 4] {
    let nibbles = _mm256_set1_epi64x(0x0F0F_0F0F_0F0F_0F0F);
    let nibbles = _mm256_unpacklo_epi64(nibbles, _mm256_slli_epi64::<4>(nibbles));
    let (first, second) = (lanes(&qs[0], &qs[2]), lanes(&qs[1], &qs[3]));
    let (a, b) = (
        _mm256_unpacklo_epi32(first, second),
        _mm256_unpackhi_epi32(first, second),
    );
    [
        _mm256_and_si256(a, nibbles),
        _mm256_and_si256(_mm256_shuffle_epi32::<0b01_00_11_10>(a), nibbles),
        _mm256_and_si256(b, nibbles),
        _mm256_and_si256(_mm256_shuffle_epi32::<0b01_00_11_10>(b), nibbles),
    ]
}

/// [`nibbles`] in the order of [`planes_in_order`], with their factors; the last 16 values of a
/// block stay in the high halves of bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibble_planes(qs: [&[u8; 16]; 8], scale: [__m256; 2], offset: [__m256; 2]) -> Unpacked {
    let nibbles = _mm256_set1_epi64x(0xF0F0_F0F0_0F0F_0F0F_u64.cast_signed());
    let factors = _mm256_setr_ps(1.0, 0.0625, 1.0, 0.0625, 1.0, 0.0625, 1.0, 0.0625);
    let mut w = [[_mm256_setzero_si256(); 4]; 2];
    for (half, w) in w.iter_mut().enumerate() {
        let even = lanes(qs[4 * half], qs[4 * half + 2]);
        let odd = lanes(qs[4 * half + 1], qs[4 * half + 3]);
        // Of each block one word twice, for its two lanes.
        *w = [
            _mm256_and_si256(shuffled::<0b01_01_00_00>(even, odd), nibbles),
            _mm256_and_si256(shuffled::<0b00_00_01_01>(even, odd), nibbles),
            _mm256_and_si256(shuffled::<0b11_11_10_10>(even, odd), nibbles),
            _mm256_and_si256(shuffled::<0b10_10_11_11>(even, odd), nibbles),
        ];
    }
    Unpacked {
        w,
        scale: [
            _mm256_mul_ps(scale[0], factors),
            _mm256_mul_ps(scale[1], factors),
        ],
        offset,
    }
}

/// In each 128-bit lane two words of `a`, then two of `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn shuffled<const WHICH: i32>(a: __m256i, b: __m256i) -> __m256i {
    _mm256_castps_si256(_mm256_shuffle_ps::<WHICH>(
        _mm256_castsi256_ps(a),
        _mm256_castsi256_ps(b),
    ))
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx2")]
fn with_fifth_bits(low: [[__m256i; 4]; 2], qh: [&[u8; 4]; 8]) -> [[__m256i; 4]; 2] {
    // Each byte gets the byte of `qh` that holds its bit.
    let first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
    ));
    let second = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    ));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let mut w = low;
    for half in 0..2 {
        for odd in 0..2 {
            let b = 4 * half + odd;
            let qh = each_lane(i32::from_le_bytes(*qh[b]), i32::from_le_bytes(*qh[b + 2]));
            for (w, bytes) in w[half][2 * odd..][..2].iter_mut().zip([first, second]) {
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(qh, bytes), bit);
                let high = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(16));
                *w = _mm256_or_si256(*w, high);
            }
        }
    }
    w
}

#[inline]
#[target_feature(enable = "avx2")]
fn look_up(values: &[i8; 16], codes: [[__m256i; 4]; 2]) -> [[__m256i; 4]; 2] {
    let values = load_twice(bytemuck::cast_ref(values));
    let mut w = codes;
    for w in w.as_flattened_mut() {
        *w = _mm256_shuffle_epi8(values, *w);
    }
    w
}

/// `low | high << AT`, byte by byte; `high` must be small enough not to spill into the next byte.
#[inline]
#[target_feature(enable = "avx2")]
fn merge<const AT: i32>(low: [[__m256i; 4]; 2], high: [[__m256i; 4]; 2]) -> [[__m256i; 4]; 2] {
    let mut w = low;
    for (w, high) in w.as_flattened_mut().iter_mut().zip(high.as_flattened()) {
        *w = _mm256_or_si256(*w, _mm256_slli_epi16::<AT>(*high));
    }
    w
}

/// The scales of IQ4_XS for the blocks in `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn six_bits(low: __m256i, high: __m256i, b: __m256i) -> __m256i {
    let low = shifted(low, _mm256_slli_epi32::<2>(b), _mm256_set1_epi32(15));
    let high = shifted(high, _mm256_slli_epi32::<1>(b), _mm256_set1_epi32(3));
    _mm256_sub_epi32(
        _mm256_or_si256(low, _mm256_slli_epi32::<4>(high)),
        _mm256_set1_epi32(32),
    )
}

/// [`BlockMxfp4::half_scale`].
#[inline]
#[target_feature(enable = "avx2")]
fn half_scale(e: __m256i) -> __m256 {
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
}

/// Scales, times `odd` for every second block, and offsets of Q4_K and Q5_K, as
/// [`unpack_scales_mins`] describes them; both begin with the same 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales_mins<B: Pod>(block: &B, odd: f32) -> ([__m256; 2], [__m256; 2]) {
    // `d` and `dmin`, then the words a, b, c: the low six bits of `a` are the first scales, those
    // of `b` the first minima; the last scales and minima are half a byte of `c`, and two bits
    // of `a` or `b`.
    let begin = load_16(bytemuck::bytes_of(block).first_chunk().expect("16 bytes"));
    let low = _mm_srlv_epi32(
        _mm_shuffle_epi32::<0b11_10_11_01>(begin),
        _mm_setr_epi32(0, 0, 0, 4),
    );
    let low = _mm_and_si128(
        low,
        _mm_setr_epi32(0x3F3F_3F3F, 0x0F0F_0F0F, 0x3F3F_3F3F, 0x0F0F_0F0F),
    );
    let high = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_10_01_01>(begin));
    let high = _mm_and_si128(high, _mm_setr_epi32(0, 0x3030_3030, 0, 0x3030_3030));
    let both = _mm_or_si128(low, high);
    let factors = _mm_cvtph_ps(begin);
    let d = _mm256_broadcastss_ps(factors);
    let dmin = _mm256_broadcastss_ps(_mm_movehdup_ps(factors));
    let d = _mm256_mul_ps(d, _mm256_setr_ps(1.0, odd, 1.0, odd, 1.0, odd, 1.0, odd));
    let scale = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both)), d);
    let min = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(both, both));
    let min = _mm256_mul_ps(_mm256_cvtepi32_ps(min), negated(dmin));
    (each_twice(scale), each_twice(min))
}

/// Each number twice.
#[inline]
#[target_feature(enable = "avx2")]
fn each_twice(x: __m256) -> [__m256; 2] {
    [
        _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
        _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)),
    ]
}

/// Each byte twice.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(x: u64) -> __m128i {
    let x = _mm_cvtsi64_si128(x.cast_signed());
    _mm_unpacklo_epi8(x, x)
}

/// Eight bytes in one word. `from_le_bytes` would go through memory here, and stall.
#[inline(always)]
pub(in crate::arch) fn joined(x: [&u8; 8]) -> u64 {
    let [a, b, c, d, e, f, g, h] = x;
    let low = u32::from(*a) | u32::from(*b) << 8 | u32::from(*c) << 16 | u32::from(*d) << 24;
    let high = u32::from(*e) | u32::from(*f) << 8 | u32::from(*g) << 16 | u32::from(*h) << 24;
    u64::from(low) | u64::from(high) << 32
}

/// Four words of 16 bits, the first one lowest, in a general register.
#[inline(always)]
pub(in crate::arch) fn four([a, b, c, d]: [[u8; 2]; 4]) -> u64 {
    let word = |x| u64::from(u16::from_le_bytes(x));
    let mut words = word(a) | word(b) << 16 | word(c) << 32 | word(d) << 48;
    // The compiler would insert each word into a vector: on Intel's CPUs, 15 instructions for the
    // one port that shuffles.
    // SAFETY: no instruction.
    unsafe { asm!("/* {} */", inout(reg) words, options(pure, nomem, nostack, preserves_flags)) };
    words
}

/// Unsigned bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widened(x: __m128i) -> [__m256i; 2] {
    [
        _mm256_cvtepu8_epi32(x),
        _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

/// Signed bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widened_signed(x: &[i8; 16]) -> [__m256i; 2] {
    let x = load_16(bytemuck::cast_ref(x));
    [
        _mm256_cvtepi8_epi32(x),
        _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn times(x: [__m256i; 2], factor: __m256) -> [__m256; 2] {
    [
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[0]), factor),
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[1]), factor),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn scaled_by(x: [__m256; 2], factor: f32) -> [__m256; 2] {
    [
        _mm256_mul_ps(x[0], _mm256_set1_ps(factor)),
        _mm256_mul_ps(x[1], _mm256_set1_ps(factor)),
    ]
}

/// Each f16 twice.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves(x: [&[u8; 2]; 8]) -> [__m256; 2] {
    each_half_twice(load_16(bytemuck::cast_ref(&x.map(|x| *x))))
}

/// [`halves`], combined in general registers. On Sapphire Rapids one row of Q4_0, Q5_0 and IQ4_NL
/// takes 8 to 25 % less, one of Q8_0 and Q5_1 20 to 30 % longer, as other ports are full there.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn combined_halves([a, b, c, d, e, f, g, h]: [&[u8; 2]; 8]) -> [__m256; 2] {
    each_half_twice(_mm_set_epi64x(
        four([*e, *f, *g, *h]).cast_signed(),
        four([*a, *b, *c, *d]).cast_signed(),
    ))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn each_half_twice(x: __m128i) -> [__m256; 2] {
    [
        _mm256_cvtph_ps(_mm_unpacklo_epi16(x, x)),
        _mm256_cvtph_ps(_mm_unpackhi_epi16(x, x)),
    ]
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half(x: [u8; 2]) -> __m256 {
    _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(x).into(),
    )))
}

#[inline]
#[target_feature(enable = "avx2")]
fn negated(x: __m256) -> __m256 {
    _mm256_sub_ps(_mm256_setzero_ps(), x)
}

/// A value for each 128-bit lane.
#[inline]
#[target_feature(enable = "avx2")]
fn each_lane(a: i32, b: i32) -> __m256i {
    _mm256_setr_epi32(a, a, a, a, b, b, b, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn lanes(a: &[u8; 16], b: &[u8; 16]) -> __m256i {
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load_16(a)), load_16(b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_twice(x: &[u8; 16]) -> __m256i {
    _mm256_broadcastsi128_si256(load_16(x))
}
