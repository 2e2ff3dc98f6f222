//! Blocks of 32 and of 64 weights as planes, eight or four blocks at a time.

use super::planes::{self, UnpackPlanes, Unpacked, registers_of_bits};
use crate::arch::arrays;
use crate::arch::x86::avx2::{each, four, joined};
use crate::arch::x86::avx512::common::{half, load_16, load_32, load_64, load_i32, power_of_two};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// A block of which `N` have 256 weights; for what it says of itself see [`UnpackPlanes`].
trait SmallBlock<const N: usize>: Pod {
    const ZERO_POINT: i32 = 0;
    const SHIFT: Option<[i32; 16]> = None;
    const UNPACKS_AHEAD: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: [&Self; N]) -> Unpacked;
}

impl<B: SmallBlock<N>, const N: usize> UnpackPlanes for [B; N]
where
    [B; N]: Pod,
{
    const ZERO_POINT: i32 = B::ZERO_POINT;
    const SHIFT: Option<[i32; 16]> = B::SHIFT;
    const UNPACKS_AHEAD: bool = B::UNPACKS_AHEAD;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        // SAFETY: this function has the features.
        unsafe { B::unpack(arrays::from_fn(|i| &self[i])) }
    }

    /// Blocks are not copied: they would be read by other instructions than they were written with,
    /// and reading would wait.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack_ends([first, second]: [&[u8]; 2]) -> Unpacked {
        let none = B::zeroed();
        let ends = [bytemuck::cast_slice(first), bytemuck::cast_slice(second)];
        // SAFETY: as above.
        unsafe { B::unpack(in_halves(ends, &none)) }
    }
}

/// The blocks of one end, then from the middle on those of the other; `none` for each that is
/// missing.
#[inline(always)]
fn in_halves<'a, B, const N: usize>(ends: [&'a [B]; 2], none: &'a B) -> [&'a B; N] {
    arrays::from_fn(|b| ends[b / (N / 2)].get(b % (N / 2)).unwrap_or(none))
}

impl SmallBlock<8> for BlockQ4_0 {
    const ZERO_POINT: i32 = 8;
    const SHIFT: Option<[i32; 16]> = Some(HIGH_HALVES);
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = planes::masked::<[Self; 8], 0x0F0F_0F0F>(nibble_bytes(each!(blocks.qs)));
        Unpacked::scaled::<[Self; 8]>(w, halves(each!(blocks.d)))
    }
}

impl SmallBlock<8> for BlockQ4_1 {
    const SHIFT: Option<[i32; 16]> = Some(HIGH_HALVES);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = planes::masked::<[Self; 8], 0x0F0F_0F0F>(nibble_bytes(each!(blocks.qs)));
        Unpacked::with_offset::<[Self; 8]>(w, halves(each!(blocks.d)), halves(each!(blocks.m)))
    }
}

impl SmallBlock<8> for BlockQ5_0 {
    const ZERO_POINT: i32 = 16;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let heads = heads(blocks);
        let w = with_fifth_bits::<2>(nibbles(each!(blocks.qs)), heads);
        Unpacked::scaled::<[Self; 8]>(w, halves_of_heads::<0>(heads))
    }
}

impl SmallBlock<8> for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let heads = heads(blocks);
        Unpacked {
            w: with_fifth_bits::<4>(nibbles(each!(blocks.qs)), heads),
            scale: halves_of_heads::<0>(heads),
            offset: halves_of_heads::<1>(heads),
        }
    }
}

impl SmallBlock<8> for BlockQ8_0 {
    const ZERO_POINT: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let mut w = bytes_in_order(arrays::map(each!(blocks.qs), bytemuck::cast_ref));
        for w in &mut w {
            *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
        }
        Unpacked::scaled::<[Self; 8]>(w, halves(each!(blocks.d)))
    }
}

impl SmallBlock<8> for BlockIq4Nl {
    const ZERO_POINT: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = planes::look_up(&IQ4_VALUES, nibbles(each!(blocks.qs)));
        Unpacked::scaled::<[Self; 8]>(w, halves(each!(blocks.d)))
    }
}

impl SmallBlock<8> for BlockMxfp4 {
    const ZERO_POINT: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 8]) -> Unpacked {
        let w = planes::look_up(&MXFP4_VALUES, nibbles(each!(blocks.qs)));
        let scale = power_of_two(_mm512_cvtepu8_epi32(twice(joined(each!(blocks.e)))));
        Unpacked::scaled::<[Self; 8]>(w, scale)
    }
}

impl SmallBlock<4> for BlockNvfp4 {
    const ZERO_POINT: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 4]) -> Unpacked {
        let [a, b, c, d] = blocks;
        // Eight bytes have 16 values: the low nibbles are the first eight.
        let first = lanes([a.half(0), b.half(0), c.half(0), d.half(0)]);
        let second = lanes([a.half(1), b.half(1), c.half(1), d.half(1)]);
        let low = shuffled::<0b11_01_10_00>(first, second);
        let high = shuffled::<0b10_00_11_01>(first, second);
        let [low, high] = [split_nibbles(low), split_nibbles(high)];
        let w = planes::look_up(&MXFP4_VALUES, [low[0], high[0], low[1], high[1]]);
        // As half-precision numbers, scales are 2⁸ times too small. `0x7F` stands for zero.
        let words = _mm_setr_epi32(word(a.d), word(b.d), word(c.d), word(d.d));
        let scales = _mm_and_si128(words, _mm_set1_epi8(0x7F));
        let some = _mm_cmpneq_epi8_mask(scales, _mm_set1_epi8(0x7F));
        let scales = _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(scales)));
        Unpacked::scaled::<[Self; 4]>(w, _mm512_maskz_mul_ps(some, scales, _mm512_set1_ps(128.0)))
    }
}

impl SmallBlock<2> for BlockQ1_0 {
    const ZERO_POINT: i32 = 1;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 2]) -> Unpacked {
        let [a, b] = blocks;
        let bits = _mm256_set_m128i(load_16(&b.qs), load_16(&a.qs));
        let positive = registers_of_bits(_mm512_cvtepu16_epi32(bits));
        let w = arrays::map(positive, |positive| _mm512_maskz_set1_epi8(positive, 2));
        // Each scale is that of eight lanes.
        let scale = _mm512_mask_blend_ps(0xFF00, half(a.d), half(b.d));
        Unpacked::scaled::<[Self; 2]>(w, scale)
    }
}

impl SmallBlock<4> for BlockQ2_0 {
    const ZERO_POINT: i32 = 1;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: [&Self; 4]) -> Unpacked {
        let [a, b, c, d] = blocks;
        let w = pairs_in_order(lanes([&a.qs, &b.qs, &c.qs, &d.qs]));
        // Each scale is that of four lanes.
        let four = four([a.d, b.d, c.d, d.d]);
        let scales = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(four.cast_signed())));
        let each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        Unpacked::scaled::<[Self; 4]>(w, _mm512_permutexvar_ps(each, scales))
    }
}

/// The pairs of bits of 16 words, the lowest first, in the order of [`BlockP16`].
///
/// [`BlockP16`]: crate::arch::acts::BlockP16
#[inline]
#[target_feature(enable = "avx512bw")]
fn pairs_in_order(words: __m512i) -> [__m512i; 4] {
    // What a pair is that is the low or the high half of a nibble whose other half is zero.
    const PAIR: [i8; 16] = [0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0];
    // Byte `even` of the words of an even block of 32 values, `odd` of those of an odd one, in all
    // bytes of its word.
    let byte = |even: i32, odd: i32| {
        let (even, odd) = (0x0101_0101 * even, 0x0101_0101 * odd);
        _mm512_set4_epi32(
            0x0C0C_0C0C + odd,
            0x0808_0808 + odd,
            0x0404_0404 + even,
            even,
        )
    };
    let table = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(&PAIR)));
    // The upper 16 bits of a word have the upper nibble.
    let right = _mm512_set1_epi32(0x0004_0000);
    let mut w = [byte(0, 1), byte(1, 0), byte(2, 3), byte(3, 2)];
    for w in &mut w {
        let bytes = _mm512_shuffle_epi8(words, *w);
        let pairs = _mm512_and_si512(bytes, _mm512_set1_epi32(0xC030_0C03_u32.cast_signed()));
        *w = _mm512_shuffle_epi8(table, _mm512_srlv_epi16(pairs, right));
    }
    w
}

/// The bytes of eight blocks in the order of [`BlockP16`].
#[inline]
#[target_feature(enable = "avx512bw")]
fn bytes_in_order([a, b, c, d, e, f, g, h]: [&[u8; 32]; 8]) -> [__m512i; 4] {
    // The words of two pairs of blocks that registers `q` and `q + 1` take: in each 128-bit lane
    // those of one pair.
    const fn words(q: usize) -> [i32; 16] {
        let mut at = [0; 16];
        let mut i = 0;
        while i < 16 {
            let (register, pair, word) = (q + i / 8, i / 4 % 2, i % 4);
            let swapped = register ^ (word / 2);
            at[i] = (16 * pair + 4 * word + swapped) as i32;
            i += 1;
        }
        at
    }
    let (low, high) = (load_i32(const { &words(0) }), load_i32(const { &words(2) }));
    let [first, second] = [[two(a, b), two(c, d)], [two(e, f), two(g, h)]];
    let halves = |at, x: [__m512i; 2]| _mm512_permutex2var_epi32(x[0], at, x[1]);
    let (a, b) = (halves(low, first), halves(low, second));
    let (c, d) = (halves(high, first), halves(high, second));
    [
        _mm512_shuffle_i64x2::<0b01_00_01_00>(a, b),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(a, b),
        _mm512_shuffle_i64x2::<0b01_00_01_00>(c, d),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(c, d),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn two(a: &[u8; 32], b: &[u8; 32]) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load_32(a)), load_32(b))
}

/// Positions of the nibbles in the bytes of [`nibble_bytes`].
const HIGH_HALVES: [i32; 16] = planes::by_lane(4, [0; 3]);

/// Nibbles of blocks that hold value `j` in the low half of byte `j` and value `j + 16` in its high
/// half, in the order of [`BlockP16`].
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibbles(qs: [&[u8; 16]; 8]) -> [__m512i; 4] {
    planes::shifted(nibble_bytes(qs), &HIGH_HALVES, 15)
}

/// The bytes that hold the nibbles of [`nibbles`].
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibble_bytes(qs: [&[u8; 16]; 8]) -> [__m512i; 4] {
    let [even, odd] = [
        lanes([qs[0], qs[2], qs[4], qs[6]]),
        lanes([qs[1], qs[3], qs[5], qs[7]]),
    ];
    // Of each block one word twice, for its two lanes.
    [
        shuffled::<0b01_01_00_00>(even, odd),
        shuffled::<0b00_00_01_01>(even, odd),
        shuffled::<0b11_11_10_10>(even, odd),
        shuffled::<0b10_10_11_11>(even, odd),
    ]
}

/// In each 128-bit lane two words of `a`, then two of `b`.
#[inline]
#[target_feature(enable = "avx512f")]
fn shuffled<const WHICH: i32>(a: __m512i, b: __m512i) -> __m512i {
    _mm512_castps_si512(_mm512_shuffle_ps::<WHICH>(
        _mm512_castsi512_ps(a),
        _mm512_castsi512_ps(b),
    ))
}

/// Low and high nibbles.
#[inline]
#[target_feature(enable = "avx512bw")]
fn split_nibbles(x: __m512i) -> [__m512i; 2] {
    let nibble = _mm512_set1_epi8(15);
    [
        _mm512_and_si512(x, nibble),
        _mm512_and_si512(_mm512_srli_epi16::<4>(x), nibble),
    ]
}

/// The first eight bytes of blocks, two in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512bw")]
fn heads<B: Pod>([a, b, c, d, e, f, g, h]: [&B; 8]) -> __m512i {
    _mm512_unpacklo_epi64(
        lanes([first_16(a), first_16(c), first_16(e), first_16(g)]),
        lanes([first_16(b), first_16(d), first_16(f), first_16(h)]),
    )
}

#[inline(always)]
fn first_16<B: Pod>(block: &B) -> &[u8; 16] {
    let bytes = bytemuck::bytes_of(block).first_chunk();
    bytes.expect("blocks of more bytes")
}

/// The f16 at word `AT` of [`heads`], each twice.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn halves_of_heads<const AT: i16>(heads: __m512i) -> __m512 {
    const fn words(at: i16) -> [i16; 32] {
        let mut words = [0; 32];
        let mut i = 0;
        while i < 16 {
            words[i] = i as i16 / 2 * 4 + at;
            i += 1;
        }
        words
    }
    let words = load_64(bytemuck::cast_ref(const { &words(AT) }));
    let halves = _mm512_permutexvar_epi16(words, heads);
    _mm512_cvtph_ps(_mm512_castsi512_si256(halves))
}

/// Adds bit `j` of `qh`, which is at byte `AT` of [`heads`], as bit 4 of value `j` of a block.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits<const AT: i32>(low: [__m512i; 4], heads: __m512i) -> [__m512i; 4] {
    // Of the 16 bits of a lane the first eight, or the others, in all its bytes.
    let byte = |i: i32| {
        let i = 0x0101_0101 * (AT + i);
        let next = |n: i32| 0x0101_0101 * n + i;
        _mm512_set4_epi32(next(10), next(8), next(2), i)
    };
    let has = planes::registers_of_bytes([
        _mm512_shuffle_epi8(heads, byte(0)),
        _mm512_shuffle_epi8(heads, byte(1)),
    ]);
    let mut w = low;
    for r in 0..4 {
        w[r] = _mm512_mask_add_epi8(w[r], has[r], w[r], _mm512_set1_epi8(16));
    }
    w
}

#[inline(always)]
fn word(x: [u8; 4]) -> i32 {
    i32::from_le_bytes(x)
}

/// Each byte twice.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn twice(x: u64) -> __m128i {
    let x = _mm_cvtsi64_si128(x.cast_signed());
    _mm_unpacklo_epi8(x, x)
}

/// Each f16 twice.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn halves(x: [&[u8; 2]; 8]) -> __m512 {
    // Combined in general registers: there are few ports for vector shuffles.
    let [a, b, c, d, e, f, g, h] = x;
    let x = _mm_set_epi64x(
        four([*e, *f, *g, *h]).cast_signed(),
        four([*a, *b, *c, *d]).cast_signed(),
    );
    let twice = _mm256_setr_epi16(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_cvtph_ps(_mm256_permutexvar_epi16(twice, _mm256_castsi128_si256(x)))
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn lanes(x: [&[u8; 16]; 4]) -> __m512i {
    let low = _mm256_set_m128i(load_16(x[1]), load_16(x[0]));
    let high = _mm256_set_m128i(load_16(x[3]), load_16(x[2]));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}
