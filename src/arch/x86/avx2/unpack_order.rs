//! Bytes of blocks in the order in which products with one row take them.

use super::common::{halves_of, load_16, load_f32};
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

/// Eight groups of 32 bytes in the order of products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn in_order(scale: &[f32; 16], offset: &[f32; 16], q: [__m256i; 8]) -> Unpacked {
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
pub(super) fn bytes_in_order(q: [__m256i; 8]) -> [[__m256i; 4]; 2] {
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
pub(super) fn bytes(qs: [&[[u8; 16]; 2]; 8]) -> [[__m256i; 4]; 2] {
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
pub(super) fn nibbles(qs: [&[u8; 16]; 8]) -> [[__m256i; 4]; 2] {
    let [a, b] = split_nibbles(lanes(qs[0], qs[2]));
    let [c, d] = split_nibbles(lanes(qs[1], qs[3]));
    let [e, f] = split_nibbles(lanes(qs[4], qs[6]));
    let [g, h] = split_nibbles(lanes(qs[5], qs[7]));
    [[a, b, c, d], [e, f, g, h]]
}

/// Nibbles of pairs of blocks: the low halves of 32 bytes are one block, the high halves the next.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn nibble_pairs(qs: &[u8; 128]) -> [[__m256i; 4]; 2] {
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
pub(super) fn both_nibbles(qs: &[[u8; 16]; 4]) -> [__m256i; 4] {
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
pub(super) fn bit_pairs(qs: &[u8; 64]) -> [[__m256i; 4]; 2] {
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
pub(super) fn block_bits(qs: &[u8; 32]) -> [[__m256i; 4]; 2] {
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
pub(super) fn shifted(x: __m256i, by: __m256i, mask: __m256i) -> __m256i {
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
pub(super) fn pair_planes(qs: &[[u8; 16]; 4]) -> [__m256i; 4] {
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
pub(super) fn nibble_planes(
    qs: [&[u8; 16]; 8],
    scale: [__m256; 2],
    offset: [__m256; 2],
) -> Unpacked {
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
pub(super) fn with_fifth_bits(low: [[__m256i; 4]; 2], qh: [&[u8; 4]; 8]) -> [[__m256i; 4]; 2] {
    // Each byte gets the byte of `qh` that holds its bit.
    let first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
    ));
    let second = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    ));
    let bytes = [first, second];
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let mut w = low;
    for half in 0..2 {
        for odd in 0..2 {
            let b = 4 * half + odd;
            let qh = each_lane(i32::from_le_bytes(*qh[b]), i32::from_le_bytes(*qh[b + 2]));
            for i in 0..2 {
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(qh, bytes[i]), bit);
                let high = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(16));
                let w = &mut w[half][2 * odd + i];
                *w = _mm256_or_si256(*w, high);
            }
        }
    }
    w
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn look_up(values: &[i8; 16], codes: [[__m256i; 4]; 2]) -> [[__m256i; 4]; 2] {
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
pub(super) fn merge<const AT: i32>(
    low: [[__m256i; 4]; 2],
    high: [[__m256i; 4]; 2],
) -> [[__m256i; 4]; 2] {
    let mut w = low;
    for half in 0..2 {
        for i in 0..4 {
            let high = _mm256_slli_epi16::<AT>(high[half][i]);
            w[half][i] = _mm256_or_si256(w[half][i], high);
        }
    }
    w
}

/// A value for each 128-bit lane.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn each_lane(a: i32, b: i32) -> __m256i {
    _mm256_setr_epi32(a, a, a, a, b, b, b, b)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn lanes(a: &[u8; 16], b: &[u8; 16]) -> __m256i {
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load_16(a)), load_16(b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_twice(x: &[u8; 16]) -> __m256i {
    _mm256_broadcastsi128_si256(load_16(x))
}
