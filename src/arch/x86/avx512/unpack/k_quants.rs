//! Blocks of 256 weights stored as bits, as planes: K-quants, IQ4_XS and TQ2_0.

use super::planes::{
    UnpackPlanes, Unpacked, by_lane, look_up, masked, plus, rotated, shifted, words, words_of,
    words_of_one,
};
use crate::arch::x86::avx512::common::{
    half, load_16, load_32, load_64, load_128, load_i32, negated,
};
use crate::quant::*;
use std::arch::x86_64::*;

impl UnpackPlanes for BlockQ2K {
    const SHIFT: Option<[i32; 16]> = Some(PAIR_SHIFT);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let scales = load_16(&self.scales);
        let nibble = _mm_set1_epi8(15);
        let scale = _mm512_cvtepu8_epi32(_mm_and_si128(scales, nibble));
        let offset = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(scales), nibble));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scale), half(self.d));
        let offset = _mm512_mul_ps(_mm512_cvtepi32_ps(offset), negated(half(self.dmin)));
        Unpacked::with_offset::<Self>(
            masked::<Self, 0x0303_0303>(bit_pairs(&self.qs)),
            scale,
            offset,
        )
    }
}

impl UnpackPlanes for BlockQ3K {
    const ZERO_POINT: i32 = 4;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let low = shifted(bit_pairs(&self.qs), &PAIR_SHIFT, 3);
        let w = merge(low, block_bits::<2>(&self.hmask), _mm512_set1_epi8(4));
        Unpacked::scaled::<Self>(w, signed_scales(&unpack_scales_q3_k(&self.scales), self.d))
    }
}

impl UnpackPlanes for BlockQ4K {
    const SHIFT: Option<[i32; 16]> = Some(NIBBLE_SHIFT);
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        // Scales of blocks in high halves of bytes have their shift.
        let [scale, offset] = scales_mins(self, 1.0 / 16.0);
        let w = masked::<Self, 0x0F0F_0F0F>(nibble_pairs(&self.qs));
        Unpacked { w, scale, offset }
    }
}

impl UnpackPlanes for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let [scale, offset] = scales_mins(self, 1.0);
        let w = merge(
            shifted(nibble_pairs(&self.qs), &NIBBLE_SHIFT, 15),
            block_bits::<4>(&self.qh),
            _mm512_set1_epi8(16),
        );
        Unpacked { w, scale, offset }
    }
}

impl UnpackPlanes for BlockQ6K {
    const ZERO_POINT: i32 = 32;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        // Of each four blocks, the first two are the low halves of the bytes that the others are
        // the high halves of.
        const WORDS: [[i32; 16]; 4] = words_of(4, [8, 0, 16]);
        const LOW: [i32; 16] = by_lane(0, [0, 4, 0]);
        const HIGH: [i32; 16] = plus(PAIR_SHIFT, -4);
        let low = shifted(words(load_128(&self.ql), &WORDS), &LOW, 15);
        let w = merge(
            low,
            rotated(bit_pairs(&self.qh), &HIGH),
            _mm512_set1_epi8(0x30),
        );
        Unpacked::scaled::<Self>(w, signed_scales(&self.scales, self.d))
    }
}

impl UnpackPlanes for BlockIq4Xs {
    const ZERO_POINT: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        const WORDS: [[i32; 16]; 4] = words_of(0, [4, 8, 16]);
        const SHIFT: [i32; 16] = by_lane(4, [0; 3]);
        const SCALES_LOW: [i32; 16] = by_lane(0, [4, 8, 16]);
        const SCALES_HIGH: [i32; 16] = by_lane(0, [2, 4, 8]);
        let low = _mm512_set1_epi32(i32::from_le_bytes(self.scales_l));
        let low = _mm512_and_si512(
            _mm512_srlv_epi32(low, load_i32(&SCALES_LOW)),
            _mm512_set1_epi32(15),
        );
        let high = _mm512_set1_epi32(u16::from_le_bytes(self.scales_h).into());
        let high = _mm512_and_si512(
            _mm512_srlv_epi32(high, load_i32(&SCALES_HIGH)),
            _mm512_set1_epi32(3),
        );
        let scales = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
        let scales = _mm512_sub_epi32(scales, _mm512_set1_epi32(32));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(self.d));
        let codes = shifted(words(load_128(&self.qs), &WORDS), &SHIFT, 15);
        Unpacked::scaled::<Self>(look_up(&IQ4_VALUES, codes), scale)
    }
}

impl UnpackPlanes for BlockTq2_0 {
    const ZERO_POINT: i32 = 1;
    const SHIFT: Option<[i32; 16]> = Some(PAIR_SHIFT);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = masked::<Self, 0x0303_0303>(bit_pairs(&self.qs));
        Unpacked::scaled::<Self>(w, half(self.d))
    }
}

/// Positions of the nibbles in the bytes of [`nibble_pairs`].
const NIBBLE_SHIFT: [i32; 16] = by_lane(0, [4, 0, 0]);

/// The bytes that hold nibbles of pairs of blocks: the low halves of 32 bytes are one block, the
/// high halves the next.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibble_pairs(qs: &[u8; 128]) -> [__m512i; 4] {
    // Half the bytes have values 0 to 16 of blocks, the others 16 to 32. Shuffles within 128-bit
    // lanes use no port that multiplications need, unlike those of two registers.
    let [q0, q1] = load_128(qs);
    let first = _mm512_shuffle_i64x2::<0b10_00_10_00>(q0, q1);
    let second = _mm512_shuffle_i64x2::<0b11_01_11_01>(q0, q1);
    let (a, b) = (
        _mm512_unpacklo_epi32(first, second),
        _mm512_unpackhi_epi32(first, second),
    );
    let (c, d) = (
        _mm512_shuffle_epi32::<0b01_00_11_10>(a),
        _mm512_shuffle_epi32::<0b01_00_11_10>(b),
    );
    [a, c, b, d]
}

/// Positions of the bits in the words of [`bit_pairs`].
const PAIR_SHIFT: [i32; 16] = by_lane(0, [2, 4, 0]);

/// Words of bytes: bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`.
#[inline]
#[target_feature(enable = "avx512f")]
fn bit_pairs(qs: &[u8; 64]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = words_of(4, [0, 0, 8]);
    words_of_one(load_64(qs), &WORDS)
}

/// Bit `b` of byte `i` for value `i` of block `b`, at bit `AT` of a byte; the other bits are
/// arbitrary.
#[inline]
#[target_feature(enable = "avx512f")]
fn block_bits<const AT: i32>(qs: &[u8; 32]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = words_of(4, [0; 3]);
    let by = const { plus(by_lane(0, [1, 2, 4]), -AT) };
    rotated(
        words_of_one(_mm512_castsi256_si512(load_32(qs)), &WORDS),
        &by,
    )
}

/// `low | high & mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn merge(low: [__m512i; 4], high: [__m512i; 4], mask: __m512i) -> [__m512i; 4] {
    let mut w = low;
    for i in 0..4 {
        w[i] = _mm512_ternarylogic_epi32::<0b1111_1000>(w[i], high[i], mask);
    }
    w
}

/// Scales, times `odd` for every second block, and offsets of Q4_K and Q5_K, as
/// [`unpack_scales_mins`] describes them; both begin with the same 16 bytes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn scales_mins<B: UnpackPlanes>(block: &B, odd: f32) -> [__m512; 2] {
    const EACH_TWICE: [i32; 16] = by_lane(0, [1, 2, 4]);
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
    let both = _mm_ternarylogic_epi32::<0b1111_1000>(
        low,
        high,
        _mm_setr_epi32(0, 0x3030_3030, 0, 0x3030_3030),
    );
    let both = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both));
    let factors = _mm_mul_ps(
        _mm_cvtph_ps(_mm_shufflelo_epi16::<0b00_00_01_00>(begin)),
        _mm_setr_ps(1.0, -1.0, odd, 0.0),
    );
    let factor = _mm512_setr_epi32(0, 2, 0, 2, 0, 2, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1);
    let both = _mm512_mul_ps(
        both,
        _mm512_permutexvar_ps(factor, _mm512_castps128_ps512(factors)),
    );
    [
        _mm512_permutexvar_ps(load_i32(&EACH_TWICE), both),
        _mm512_permutexvar_ps(load_i32(const { &plus(EACH_TWICE, 8) }), both),
    ]
}

/// Scale per 16 weights.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn signed_scales(scales: &[i8; 16], d: [u8; 2]) -> __m512 {
    let scales = _mm512_cvtepi8_epi32(load_16(bytemuck::cast_ref(scales)));
    _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(d))
}
