//! 256 weights as bytes in the order of [`BlockP16`], with 16 scales and 16 offsets: all that a
//! format says of itself ([`UnpackPlanes`]), and the shuffles that bring bytes into that order.

use crate::arch::acts::BlockP16;
use crate::arch::x86::avx512::common::{load_16, load_f32, load_i32};
use bytemuck::Pod;
use std::arch::x86_64::*;

/// 256 weights: `scale·w + offset`.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Unpacked {
    /// Bytes in the order of [`BlockP16`].
    pub(in crate::arch) w: [__m512i; 4],
    /// Scale per 16 weights.
    pub(in crate::arch) scale: __m512,
    /// Offset per 16 weights.
    pub(in crate::arch) offset: __m512,
}

impl Unpacked {
    /// Zeros.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::arch) fn none() -> Unpacked {
        let none = _mm512_setzero_ps();
        Unpacked {
            w: [_mm512_setzero_si512(); 4],
            scale: none,
            offset: none,
        }
    }

    /// Weights of `B`, which has no minimum.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::arch) fn scaled<B: UnpackPlanes>(w: [__m512i; 4], scale: __m512) -> Unpacked {
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-(B::ZERO_POINT as f32)));
        Unpacked::with_offset::<B>(w, scale, offset)
    }

    /// Weights of `B`; `B::SHIFT` says whether their bytes are shifted.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::arch) fn with_offset<B: UnpackPlanes>(
        w: [__m512i; 4],
        scale: __m512,
        offset: __m512,
    ) -> Unpacked {
        let scale = match B::SHIFT {
            Some(_) => _mm512_mul_ps(scale, load_f32(const { &inverse_powers(B::SHIFT) })),
            None => scale,
        };
        Unpacked { w, scale, offset }
    }
}

/// 256 weights: a block, or several small ones.
pub(in crate::arch) trait UnpackPlanes: Pod {
    /// Zero point of the bytes: `offset = −ZERO_POINT·scale`; 0 for formats with a minimum.
    const ZERO_POINT: i32 = 0;
    /// Bits by which the bytes of each lane are shifted left, and their zero point with them; its
    /// scale makes up for it. To mask bytes takes less than to mask and to shift them.
    const SHIFT: Option<[i32; 16]> = None;
    /// Whether a decode row's next blocks are unpacked before these are multiplied: where steps
    /// wait long for one another, and registers are enough.
    const UNPACKS_AHEAD: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(&self) -> Unpacked;

    /// The ends of two rows, or both parts of one, each of at most 128 weights, with zeros behind
    /// them.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack_ends([first, second]: [&[u8]; 2]) -> Unpacked {
        let mut weights = Self::zeroed();
        let bytes = bytemuck::bytes_of_mut(&mut weights);
        bytes[..first.len()].copy_from_slice(first);
        bytes[size_of::<Self>() / 2..][..second.len()].copy_from_slice(second);
        // SAFETY: this function has the features.
        unsafe { weights.unpack() }
    }
}

/// The zero point of the bytes in each lane, negated.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn starts<B: UnpackPlanes>() -> __m512i {
    // One number where it can be, which the compiler then knows: it does not look into arrays of
    // this size.
    match B::SHIFT {
        Some(_) if B::ZERO_POINT > 0 => {
            load_i32(const { &shifted_numbers(-B::ZERO_POINT, B::SHIFT) })
        }
        _ => _mm512_set1_epi32(-B::ZERO_POINT),
    }
}

/// The values of four-bit codes plus 128.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(in crate::arch) fn look_up(values: &[i8; 16], codes: [__m512i; 4]) -> [__m512i; 4] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    let values = _mm512_xor_si512(values, _mm512_set1_epi8(-128));
    let mut w = codes;
    for w in &mut w {
        *w = _mm512_shuffle_epi8(values, *w);
    }
    w
}

/// Bytes in the order of [`BlockP16`]; the 128 bits `l` of register `q` are the 16 bytes from `64·l
/// + 16·q` on.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn in_order([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // Words 0 and 1, and 2 and 3, of an even block of 32 bytes, and of an odd one, where registers
    // change places in twos.
    let (even_01, even_23) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (odd_01, odd_23) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        join::<0b10_10_10_10>(even_01, odd_01),
        join::<0b01_01_01_01>(even_01, odd_01),
        join::<0b10_10_10_10>(even_23, odd_23),
        join::<0b01_01_01_01>(even_23, odd_23),
    ]
}

/// In each 128-bit lane a word of 64 bits of `a`, and one of `b`: the upper ones where the bits of
/// `WHICH` are set.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn join<const WHICH: i32>(a: __m512i, b: __m512i) -> __m512i {
    _mm512_castpd_si512(_mm512_shuffle_pd::<WHICH>(
        _mm512_castsi512_pd(a),
        _mm512_castsi512_pd(b),
    ))
}

/// A number for each 16-value lane of [`BlockP16`]: `half` if it is the second half of a block of
/// 32, plus `block[i]` for each set bit `i` of the block's index.
pub(in crate::arch) const fn by_lane(half: i32, block: [i32; 3]) -> [i32; 16] {
    let mut numbers = [0; 16];
    let mut i = 0;
    while i < 16 {
        let (b, h) = (i as i32 / 2, i as i32 % 2);
        numbers[i] = half * h + block[0] * (b & 1) + block[1] * (b >> 1 & 1) + block[2] * (b >> 2);
        i += 1;
    }
    numbers
}

pub(in crate::arch) const fn plus(numbers: [i32; 16], more: i32) -> [i32; 16] {
    let mut numbers = numbers;
    let mut i = 0;
    while i < 16 {
        numbers[i] += more;
        i += 1;
    }
    numbers
}

/// Indices of the 32-bit words that the registers of [`BlockP16`] take; each 16 values begin at the
/// word that [`by_lane`] gives.
pub(in crate::arch) const fn words_of(half: i32, block: [i32; 3]) -> [[i32; 16]; 4] {
    let mut at = [by_lane(half, block); 4];
    let mut i = 0;
    while i < 64 {
        at[BlockP16::register(4 * i)][i / 4] += i as i32 % 4;
        i += 1;
    }
    at
}

/// The words of two registers that the indices `at` select.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn words(q: [__m512i; 2], at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        w[i] = _mm512_permutex2var_epi32(q[0], load_i32(&at[i]), q[1]);
    }
    w
}

/// As [`words`], of one register.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn words_of_one(q: __m512i, at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        w[i] = _mm512_permutexvar_epi32(load_i32(&at[i]), q);
    }
    w
}

/// `n·2^shift` of each lane.
pub(in crate::arch) const fn shifted_numbers(n: i32, shift: Option<[i32; 16]>) -> [i32; 16] {
    let mut numbers = [n; 16];
    if let Some(shift) = shift {
        let mut i = 0;
        while i < 16 {
            numbers[i] <<= shift[i];
            i += 1;
        }
    }
    numbers
}

/// `2^-shift` of each lane.
pub(in crate::arch) const fn inverse_powers(shift: Option<[i32; 16]>) -> [f32; 16] {
    let powers = shifted_numbers(1, shift);
    let mut inverse = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        inverse[i] = 1.0 / powers[i] as f32;
        i += 1;
    }
    inverse
}

/// `w & BITS`, the bits shifted as the bytes of `B` are.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn masked<B: UnpackPlanes, const BITS: i32>(w: [__m512i; 4]) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_and_si512(*w, load_i32(const { &shifted_numbers(BITS, B::SHIFT) }));
    }
    w
}

/// `w >> by & mask`; the mask must drop the bits that a byte gets from the next one.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(in crate::arch) fn shifted(w: [__m512i; 4], by: &[i32; 16], mask: i8) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_and_si512(_mm512_srlv_epi32(*w, load_i32(by)), _mm512_set1_epi8(mask));
    }
    w
}

/// Rotates words right.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn rotated(w: [__m512i; 4], by: &[i32; 16]) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_rorv_epi32(*w, load_i32(by));
    }
    w
}

/// For each byte of register `r`, 0 or 1, which of the first eight values of its lane it is, as a
/// bit.
pub(in crate::arch) const fn bits_of_bytes(r: usize) -> [i32; 16] {
    let mut bits = swapped(r, 4);
    let mut i = 0;
    while i < 16 {
        bits[i] = 0x0804_0201 << bits[i];
        i += 1;
    }
    bits
}

/// A bit for each byte of the four registers, given 16 bits for the 16 values of each lane.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(in crate::arch) fn registers_of_bits(bits: __m512i) -> [__mmask64; 4] {
    // Of each 16 bits the first eight, or the others, in all bytes of their lane.
    let byte = |i: i32| _mm512_set4_epi32(0x0C0C_0C0C + i, 0x0808_0808 + i, 0x0404_0404 + i, i);
    registers_of_bytes([
        _mm512_shuffle_epi8(bits, byte(0)),
        _mm512_shuffle_epi8(bits, byte(0x0101_0101)),
    ])
}

/// As [`registers_of_bits`]; each lane's first eight bits, and its second, are in all its bytes.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(in crate::arch) fn registers_of_bytes([first, second]: [__m512i; 2]) -> [__mmask64; 4] {
    let (even, odd) = (
        load_i32(const { &bits_of_bytes(0) }),
        load_i32(const { &bits_of_bytes(1) }),
    );
    [
        _mm512_test_epi8_mask(first, even),
        _mm512_test_epi8_mask(first, odd),
        _mm512_test_epi8_mask(second, even),
        _mm512_test_epi8_mask(second, odd),
    ]
}

/// 0 for registers 0 and 2, 1 for 1 and 3, the other way round for every second 32 values; times
/// `n`.
pub(in crate::arch) const fn swapped(r: usize, n: i32) -> [i32; 16] {
    if r.is_multiple_of(2) {
        by_lane(0, [n, 0, 0])
    } else {
        plus(by_lane(0, [-n, 0, 0]), n)
    }
}
