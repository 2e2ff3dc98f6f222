//! Coded formats as planes.
//!
//! A grid has few different bytes, so it fits into registers as codes of them: two bits for each of
//! eight values, or four bits for each of four, in a 16-bit word per entry. Two-register
//! permutations then look up 32 entries at a time, and the words are where the 32-bit lanes of
//! [`BlockP16`] have these values: shifts and masks turn the codes into bytes, one shuffle per
//! register turns these into values. Grids of more than 512 entries would take more permutations
//! than loads; they are read from memory.
//!
//! Cycles for 256 weights of a decode row, from L2, on Emerald Rapids (in brackets with bytes of
//! all grids in memory): IQ2_XXS 44 (94), IQ2_XS 50 (85), IQ3_XXS 53 (127), IQ3_S 75 (117); from
//! memory IQ1_S 73, IQ1_M 74, IQ2_S 69.
//!
//! [`BlockP16`]: crate::arch::BlockP16

use super::planes::{UnpackPlanes, Unpacked, by_lane, in_order, registers_of_bits, swapped};
use crate::arch::x86::avx2::unpack::{Groups, odd_numbers};
use crate::arch::x86::avx512::common::{half, load_16, load_32, load_64, load_i32, pair};
use crate::quant::iq_grids::*;
use crate::quant::*;
use std::arch::asm;
use std::arch::x86_64::*;

/// Fields of a block of 256 values that this level reads. Lane `l` of 32 bits concerns values
/// `16·l..16·l + 16`.
trait CodedPlanes: Coded {
    /// The values of the grid plus [`Coded::LARGEST`], or `8·value + 1` plus that, in the order of
    /// [`BlockP16`](crate::arch::BlockP16).
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn grid_bytes(&self) -> [__m512i; 4];

    /// Bit `i` of a lane is the sign of its value `i`, or stands for `− 1` in place of `+ 1`.
    ///
    /// # Safety
    /// As above.
    unsafe fn sign_bits(&self) -> __m512i;

    /// The odd numbers of [`CodedScales`].
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn odd_scales(&self) -> __m512i {
        _mm512_cvtepi8_epi32(odd_numbers(self.scales().nibbles))
    }
}

macro_rules! unpack_coded {
    ($($block:ident $ahead:literal,)*) => {$(
        impl UnpackPlanes for $block {
            const ZERO_POINT: i32 = Self::LARGEST as i32;
            const UNPACKS_AHEAD: bool = $ahead;

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
            unsafe fn unpack(&self) -> Unpacked {
                // SAFETY: this function has the features.
                unsafe { unpack(self) }
            }
        }
    )*};
}

unpack_coded!(
    BlockIq1S true, BlockIq1M false, BlockIq2Xxs false, BlockIq2Xs false, BlockIq2S false, BlockIq3Xxs false, BlockIq3S false,
);

/// Integers of a block, with the largest one as zero point.
///
/// # Safety
/// The CPU must have this level's features.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
unsafe fn unpack<B: CodedPlanes + UnpackPlanes>(block: &B) -> Unpacked {
    // SAFETY: the caller's promise.
    let (mut w, bits, odd) = unsafe { (block.grid_bytes(), block.sign_bits(), block.odd_scales()) };
    let negative = registers_of_bits(bits);
    for r in 0..4 {
        w[r] = if B::EIGHTHS {
            _mm512_mask_sub_epi8(w[r], negative[r], w[r], _mm512_set1_epi8(2))
        } else {
            _mm512_mask_sub_epi8(w[r], negative[r], _mm512_set1_epi8(2 * B::LARGEST), w[r])
        };
    }
    scaled(block, w, odd)
}

/// With the scales of a block, given their odd numbers.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn scaled<B: Coded + UnpackPlanes>(block: &B, w: [__m512i; 4], odd: __m512i) -> Unpacked {
    let d = _mm512_mul_ps(half(block.scales().d), _mm512_set1_ps(B::UNIT));
    let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(odd), d);
    Unpacked::scaled::<B>(w, scale)
}

/// The words of a grid that registers hold: the code of value `i` at bit `8·(i % 2) + bits·(i % 4 /
/// 2) + 4·(i / 4)`.
const fn words<const N: usize>(codes: &[u16; N], bits: usize) -> [u16; N] {
    let mut words = [0; N];
    let mut g = 0;
    while g < N {
        let mut i = 0;
        while i < 16 / bits {
            let code = codes[g] >> (bits * i) & ((1 << bits) - 1);
            words[g] |= code << (8 * (i % 2) + bits * (i % 4 / 2) + 4 * (i / 4));
            i += 1;
        }
        g += 1;
    }
    words
}

static IQ2_XXS_WORDS: [u16; 256] = words(&IQ2_XXS_CODES, 2);

static IQ2_XS_WORDS: [u16; 512] = words(&IQ2_XS_CODES, 2);

static IQ3_XXS_WORDS: [u16; 256] = words(&IQ3_XXS_CODES, 4);

static IQ3_S_WORDS: [u16; 512] = words(&IQ3_S_CODES, 4);

/// `words[i]` for each 16-bit lane `i` of `at`; bits above those that an index needs are ignored.
#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up<const N: usize>(words: &[u16; N], at: __m512i) -> __m512i {
    let (words, _) = words.as_chunks::<32>();
    let load = |i: usize| load_64(bytemuck::cast_ref(&words[i]));
    let mut found = [_mm512_setzero_si512(); 8];
    for i in 0..N / 64 {
        found[i] = _mm512_permutex2var_epi16(load(2 * i), at, load(2 * i + 1));
    }
    let mut n = N / 64;
    while n > 1 {
        let bit = (N / n) as i16;
        let odd = _mm512_test_epi16_mask(at, _mm512_set1_epi16(bit));
        for i in 0..n / 2 {
            found[i] = _mm512_mask_blend_epi16(odd, found[2 * i], found[2 * i + 1]);
        }
        n /= 2;
    }
    found[0]
}

/// `mask & a | !mask & b`.
#[inline]
#[target_feature(enable = "avx512f")]
fn select(mask: i32, a: __m512i, b: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1100_1010>(_mm512_set1_epi32(mask), a, b)
}

/// `a | b & mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn or_masked(a: __m512i, b: __m512i, mask: i32) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(a, b, _mm512_set1_epi32(mask))
}

/// The values of [`words`] with two-bit codes, two to a lane: each 16 values.
#[inline]
#[target_feature(enable = "avx512bw")]
fn two_bit_bytes<B: Coded>(found: __m512i, values: &[i8]) -> [__m512i; 4] {
    // Two bits further on in the upper half of a lane are the values of bytes 2 and 3.
    let first = select(0xFFFF, found, _mm512_slli_epi32::<14>(found));
    let second = select(
        0xFFFF,
        _mm512_srli_epi32::<16>(found),
        _mm512_srli_epi32::<2>(found),
    );
    let by = [
        load_i32(const { &swapped(0, 4) }),
        load_i32(const { &swapped(1, 4) }),
    ];
    let mut w = [first, first, second, second];
    for r in 0..4 {
        let codes = _mm512_and_si512(_mm512_srlv_epi32(w[r], by[r % 2]), _mm512_set1_epi8(3));
        w[r] = values_of_codes::<B>(codes, values);
    }
    w
}

/// The values of [`words`] with four-bit codes, two to a lane: the first and the last eight of each
/// 16 values.
#[inline]
#[target_feature(enable = "avx512bw")]
fn four_bit_bytes<B: Coded>([first, second]: [__m512i; 2], values: &[i8]) -> [__m512i; 4] {
    let by = [
        load_i32(const { &swapped(0, 16) }),
        load_i32(const { &swapped(1, 16) }),
    ];
    let mut w = [first, first, second, second];
    for r in 0..4 {
        let word = _mm512_srlv_epi32(w[r], by[r % 2]);
        let codes = select(0xFFFF, word, _mm512_slli_epi32::<12>(word));
        w[r] = values_of_codes::<B>(_mm512_and_si512(codes, _mm512_set1_epi8(7)), values);
    }
    w
}

/// Values of codes, with the largest integer as zero point.
#[inline]
#[target_feature(enable = "avx512bw")]
fn values_of_codes<B: Coded>(codes: __m512i, values: &[i8]) -> __m512i {
    let mut table = [0; 16];
    for (byte, &value) in table.iter_mut().zip(values) {
        *byte = (value + B::LARGEST) as u8;
    }
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16(&table)), codes)
}

/// Four words of 64 bits for each 32 values, in the order of [`BlockP16`](crate::arch::BlockP16).
#[inline]
#[target_feature(enable = "avx512f")]
fn from_groups(groups: [__m256i; 8]) -> [__m512i; 4] {
    let (a, b) = (pair(groups[0], groups[2]), pair(groups[4], groups[6]));
    let (c, d) = (pair(groups[1], groups[3]), pair(groups[5], groups[7]));
    in_order([
        _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b),
        _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b),
        _mm512_shuffle_i64x2::<0b10_00_10_00>(c, d),
        _mm512_shuffle_i64x2::<0b11_01_11_01>(c, d),
    ])
}

/// The bytes of a grid in memory; `grid(group, part)` has eight.
#[inline]
#[target_feature(enable = "avx512bw")]
fn read_grid<B: Coded>(grid: impl Fn(usize, usize) -> u64) -> [__m512i; 4] {
    let mut groups = [_mm256_setzero_si256(); 8];
    for (g, bytes) in groups.iter_mut().enumerate() {
        let part = |part: usize| grid(g, part).cast_signed();
        *bytes = _mm256_set_epi64x(part(3), part(2), part(1), part(0));
    }
    let mut w = from_groups(groups);
    for w in &mut w {
        *w = if B::EIGHTHS {
            // −1, 0 or 1: no bit goes to the next byte.
            let eights = _mm512_slli_epi16::<3>(_mm512_add_epi8(*w, _mm512_set1_epi8(1)));
            _mm512_add_epi8(eights, _mm512_set1_epi8(B::LARGEST - 7))
        } else {
            _mm512_add_epi8(*w, _mm512_set1_epi8(B::LARGEST))
        };
    }
    w
}

/// The same number, opaque to the compiler: otherwise it computes indices in vector registers, and
/// extracting them takes most of the time.
#[inline(always)]
fn opaque(mut x: u32) -> u32 {
    // SAFETY: does nothing.
    unsafe { asm!("/* {:e} */", inout(reg) x, options(pure, nomem, nostack, preserves_flags)) };
    x
}

/// Two times seven bits of a byte, the rest zero: with an eighth that makes the number of set bits
/// even.
#[inline]
#[target_feature(enable = "avx512f")]
fn even_signs(sevens: __m512i) -> __m512i {
    let parity = _mm512_xor_si512(sevens, _mm512_srli_epi32::<4>(sevens));
    let parity = _mm512_xor_si512(parity, _mm512_srli_epi32::<2>(parity));
    let parity = _mm512_xor_si512(parity, _mm512_srli_epi32::<1>(parity));
    or_masked(sevens, _mm512_slli_epi32::<7>(parity), 0x8080)
}

/// The signs of IQ2_XXS and IQ3_XXS, given their words of 32 values in both lanes: four times seven
/// bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn signs_of_words(words: __m512i) -> __m512i {
    let x = _mm512_srlv_epi32(words, load_i32(const { &by_lane(14, [0; 3]) }));
    let low = _mm512_and_si512(x, _mm512_set1_epi32(0x7F));
    even_signs(or_masked(low, _mm512_slli_epi32::<1>(x), 0x7F00))
}

/// The odd numbers of scales in the top four bits of such words.
#[inline]
#[target_feature(enable = "avx512f")]
fn odd_scales_of_words(words: __m512i) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<27>(words), _mm512_set1_epi32(1))
}

impl CodedPlanes for BlockIq2Xxs {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        let x = _mm512_shuffle_epi32::<0b10_10_00_00>(load_64(bytemuck::cast_ref(&self.qs)));
        let x = _mm512_srlv_epi32(x, load_i32(const { &by_lane(16, [0; 3]) }));
        // Two bytes of each lane, as words.
        let at = or_masked(
            _mm512_and_si512(x, _mm512_set1_epi32(0xFF)),
            _mm512_slli_epi32::<8>(x),
            0xFF_0000,
        );
        two_bit_bytes::<Self>(look_up(&IQ2_XXS_WORDS, at), &IQ2_VALUES)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        signs_of_words(_mm512_shuffle_epi32::<0b11_11_01_01>(load_64(
            bytemuck::cast_ref(&self.qs),
        )))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn odd_scales(&self) -> __m512i {
        odd_scales_of_words(_mm512_shuffle_epi32::<0b11_11_01_01>(load_64(
            bytemuck::cast_ref(&self.qs),
        )))
    }
}

impl CodedPlanes for BlockIq2Xs {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        let at = load_64(bytemuck::cast_ref(&self.qs));
        two_bit_bytes::<Self>(look_up(&IQ2_XS_WORDS, at), &IQ2_VALUES)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        let x = load_64(bytemuck::cast_ref(&self.qs));
        let low = _mm512_and_si512(_mm512_srli_epi32::<9>(x), _mm512_set1_epi32(0x7F));
        even_signs(or_masked(low, _mm512_srli_epi32::<17>(x), 0x7F00))
    }
}

impl CodedPlanes for BlockIq2S {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        read_grid::<Self>(|group, part| self.grid(group, part))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        _mm512_cvtepu16_epi32(load_32(&self.signs))
    }
}

/// The words of 32 values in both of their lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn words_twice(words: &[[u8; 4]; 8]) -> __m512i {
    _mm512_shuffle_epi32::<0b10_10_00_00>(_mm512_cvtepu32_epi64(load_32(bytemuck::cast_ref(words))))
}

impl CodedPlanes for BlockIq3Xxs {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        let at = four_bytes_as_words(&self.qs);
        let found = [
            look_up(&IQ3_XXS_WORDS, at[0]),
            look_up(&IQ3_XXS_WORDS, at[1]),
        ];
        four_bit_bytes::<Self>(found, &IQ3_XXS_VALUES)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        signs_of_words(words_twice(&self.scales_and_signs))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn odd_scales(&self) -> __m512i {
        odd_scales_of_words(words_twice(&self.scales_and_signs))
    }
}

/// The first and the last two of the four bytes of each lane, as words.
#[inline]
#[target_feature(enable = "avx512f")]
fn four_bytes_as_words(qs: &[u8; 64]) -> [__m512i; 2] {
    let x = load_64(qs);
    let low = |x| _mm512_and_si512(x, _mm512_set1_epi32(0xFF));
    [
        or_masked(low(x), _mm512_slli_epi32::<8>(x), 0xFF_0000),
        or_masked(
            low(_mm512_srli_epi32::<16>(x)),
            _mm512_srli_epi32::<8>(x),
            0xFF_0000,
        ),
    ]
}

impl CodedPlanes for BlockIq3S {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        let at = four_bytes_as_words(&self.qs);
        // Bit `i` of a lane is the ninth of its index `i`.
        let ninth = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(i64::from_le_bytes(self.qh)));
        let ninth = _mm512_shuffle_epi32::<0b10_10_00_00>(ninth);
        let ninth = _mm512_srlv_epi32(ninth, load_i32(const { &by_lane(4, [0; 3]) }));
        let first = or_masked(at[0], _mm512_slli_epi32::<8>(ninth), 0x100);
        let first = or_masked(first, _mm512_slli_epi32::<23>(ninth), 0x100_0000);
        let second = or_masked(at[1], _mm512_slli_epi32::<6>(ninth), 0x100);
        let second = or_masked(second, _mm512_slli_epi32::<21>(ninth), 0x100_0000);
        let found = [look_up(&IQ3_S_WORDS, first), look_up(&IQ3_S_WORDS, second)];
        four_bit_bytes::<Self>(found, &IQ3_S_VALUES)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        _mm512_cvtepu16_epi32(load_32(&self.signs))
    }
}

impl CodedPlanes for BlockIq1S {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        read_grid::<Self>(|group, part| {
            let high = opaque(u16::from_le_bytes(self.qh[group]).into()) << 8 >> (3 * part) & 0x700;
            bytemuck::cast(IQ1_GRID[(high | u32::from(self.qs[4 * group + part])) as usize])
        })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        // The top bits of words that are about 32 values each.
        _mm512_srai_epi32::<31>(_mm512_slli_epi32::<16>(iq1_s_words(self)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn odd_scales(&self) -> __m512i {
        let twice = _mm512_and_si512(
            _mm512_srli_epi32::<11>(iq1_s_words(self)),
            _mm512_set1_epi32(14),
        );
        _mm512_or_si512(twice, _mm512_set1_epi32(1))
    }
}

/// `qh` of each 32 values in both of their lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn iq1_s_words(block: &BlockIq1S) -> __m512i {
    _mm512_shuffle_epi32::<0b10_10_00_00>(_mm512_cvtepu16_epi64(load_16(bytemuck::cast_ref(
        &block.qh,
    ))))
}

impl CodedPlanes for BlockIq1M {
    #[inline]
    #[target_feature(enable = "avx512bw")]
    unsafe fn grid_bytes(&self) -> [__m512i; 4] {
        read_grid::<Self>(|group, part| self.grid(group, part))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sign_bits(&self) -> __m512i {
        // Bits 3 and 7 of a lane's byte are about eight values each.
        let x = _mm512_cvtepu8_epi32(load_16(&self.qh));
        let first = _mm512_and_si512(_mm512_srli_epi32::<3>(x), _mm512_set1_epi32(1));
        let both = or_masked(first, _mm512_slli_epi32::<1>(x), 0x100);
        _mm512_sub_epi32(_mm512_slli_epi32::<8>(both), both)
    }
}

impl UnpackPlanes for BlockTq1_0 {
    const ZERO_POINT: i32 = Self::LARGEST as i32;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        // SAFETY: this level includes AVX2.
        let groups = unsafe {
            [
                self.bytes(0),
                self.bytes(1),
                self.bytes(2),
                self.bytes(3),
                self.bytes(4),
                self.bytes(5),
                self.bytes(6),
                self.bytes(7),
            ]
        };
        let mut w = from_groups(groups);
        for w in &mut w {
            *w = _mm512_add_epi8(*w, _mm512_set1_epi8(Self::LARGEST));
        }
        scaled(self, w, _mm512_set1_epi32(1))
    }
}
