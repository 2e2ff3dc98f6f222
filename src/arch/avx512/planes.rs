//! Products of block formats with rows of generated tokens.
//!
//! A format only says how its weights become unsigned bytes, scales and offsets ([`UnpackPlanes::unpack`]); the product is
//! the same for all. Activations are 16-bit integers in two planes of bytes ([`BlockP16`]): `vpdpbusd` multiplies as many
//! weights by both planes as `vpdpwssd` by words, but takes bytes as they are. A lane of 32 bits sums the products of
//! the 16 or 32 values that share a scale, so that conversion to `f32`, scales and offsets take few instructions.
//!
//! Instructions for the two ports of vectors that Intel's CPUs have (Zen 4 has two for those that multiply, and twice as
//! many others, each half a register wide), for 256 weights and a row:
//!
//! | | to multiply | others | to unpack, whatever the number of rows |
//! |---|---|---|---|
//! | Q4_K | 8 | 2.5 | 21 |
//! | Q8_0, Q4_0, IQ4_NL, MXFP4 | 8 | 2 | 16 to 24 |
//! | Q6_K | 8 | 4 | 31 |

use super::matmul::{half, load_16, load_32, load_64, load_128, load_f32, negated};
use crate::arch::avx2::prefetch;
use crate::arch::{Acts, BlockP16, ColumnsMut};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// `64·R` weights: `scale·w + offset`.
#[derive(Clone, Copy)]
pub(super) struct Unpacked<const R: usize> {
    /// Bytes in the order of [`BlockP16`].
    pub(super) w: [__m512i; R],
    /// Scale of each lane.
    pub(super) scale: __m512,
    /// Offset of each lane.
    pub(super) offset: __m512,
}

impl<const R: usize> Unpacked<R> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn zero() -> Self {
        Unpacked { w: [_mm512_setzero_si512(); R], scale: _mm512_setzero_ps(), offset: _mm512_setzero_ps() }
    }
}

/// Blocks that hold `64·R` weights.
pub(super) trait UnpackPlanes<const R: usize>: Pod {
    /// For formats with a scale but no minimum, what the bytes are too large by: `offset = −EXCESS·scale`.
    const EXCESS: i32 = 0;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(&self) -> Unpacked<R>;
}

/// Weight rows that are unpacked, to the L1 cache, and then multiplied by all activation rows.
pub(super) const ROWS: usize = 8;
/// Prefetch distance for weights, in bytes. Rows of 1152 bytes from memory reach 0.72 of the streaming bandwidth with 1 KiB,
/// 0.84 with 4 KiB, 0.91 with 8 KiB, 0.88 with 16 KiB (Zen 5); without, decoding takes three times as long where the
/// CPU's own prefetcher is off, as in some virtual machines.
const AHEAD: usize = 8192;
/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in L2 while all weight rows
/// of a task go by.
const MANY: usize = 32;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn matvec<B: UnpackPlanes<4>>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::P16 { x, n } = *x else { unreachable!("the form this level asks for") };
    products::<B, 4>(y, w, x, n);
}

/// As [`matvec`], for formats with a scale per 32 weights.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn matvec_wide<B: UnpackPlanes<8>>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::P16Wide { x, n } = *x else { unreachable!("the form this level asks for") };
    products::<B, 8>(y, w, x, n);
}

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn products<B: UnpackPlanes<R>, const R: usize>(y: &mut ColumnsMut<'_>, w: &[u8], x: &[BlockP16<R>], n: usize) {
    if w.is_empty() {
        return y.fill(0.0);
    }
    let (blocks, row_bytes) = (BlockP16::<R>::per_row(n), w.len() / y.cols());
    let (mut weights, mut padding) = ([Unpacked::zero(); ROWS], B::zeroed());
    let mut totals = [[_mm512_setzero_ps(); ROWS]; MANY];
    for (c, x) in x.chunks(MANY * blocks).enumerate() {
        let totals = &mut totals[..x.len() / blocks];
        for (t, w) in w.chunks(ROWS * row_bytes).enumerate() {
            let n_rows = w.len() / row_bytes;
            totals.fill([_mm512_setzero_ps(); ROWS]);
            // A few lines with each step: many at once would keep activations waiting for L2.
            let part = if c == 0 { n_rows * size_of::<B>() / (1 + totals.len() / 2) } else { 0 };
            let mut ahead = w.as_ptr().cast::<i8>().wrapping_add(w.len() - row_bytes + AHEAD);
            for k in 0..blocks {
                for r in 0..n_rows {
                    ahead = prefetch(ahead, part / n_rows);
                    // SAFETY: this function has the features.
                    weights[r] = unsafe { block(&w[r * row_bytes..][..row_bytes], k, &mut padding).unpack() };
                }
                let (pairs, last) = totals.as_chunks_mut::<2>();
                for (j, totals) in pairs.iter_mut().enumerate() {
                    ahead = prefetch(ahead, part);
                    let x = &x[2 * j * blocks + k..];
                    tile(totals, &weights, B::EXCESS, [&x[0], &x[blocks]]);
                }
                for totals in last.as_chunks_mut::<1>().0 {
                    tile(totals, &weights, B::EXCESS, [&x[x.len() - blocks + k]]);
                }
            }
            for (j, totals) in totals.iter().enumerate() {
                y.row(c * MANY + j)[t * ROWS..][..n_rows].copy_from_slice(&sums(totals)[..n_rows]);
            }
        }
    }
}

/// Block `k` of a row; behind the row's end what `padding` holds: zeros, if it began as zeros and all rows have one
/// length.
#[inline(always)]
pub(super) fn block<'a, B: Pod>(row: &'a [u8], k: usize, padding: &'a mut B) -> &'a B {
    let rest = &row[k * size_of::<B>()..];
    match rest.get(..size_of::<B>()) {
        Some(block) => bytemuck::from_bytes(block),
        None => {
            bytemuck::bytes_of_mut(padding)[..rest.len()].copy_from_slice(rest);
            padding
        }
    }
}

/// Adds the products of a block of each weight row with one of each of `M` activation rows to `[activation row][weight
/// row]`: a lane adds those of its columns, in the order of blocks.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile<const R: usize, const M: usize>(
    totals: &mut [[__m512; ROWS]; M],
    weights: &[Unpacked<R>; ROWS],
    excess: i32,
    x: [&BlockP16<R>; M],
) {
    // At most 32 products of w ≤ 255 and |x| ≤ 2¹⁵ in a lane: below 2²⁸.
    let mut ints = [[_mm512_setzero_si512(); ROWS]; M];
    for i in 0..R {
        for r in 0..ROWS {
            for j in 0..M {
                ints[j][r] =
                    _mm512_dpbusd_epi32(ints[j][r], weights[r].w[i], load_64(bytemuck::cast_ref(&x[j].high[i])));
            }
        }
    }
    for j in 0..M {
        for r in 0..ROWS {
            ints[j][r] = _mm512_slli_epi32::<8>(ints[j][r]);
        }
    }
    // Otherwise the compiler keeps a copy of what it has read.
    let weights = std::hint::black_box(weights);
    for i in 0..R {
        for r in 0..ROWS {
            for j in 0..M {
                ints[j][r] =
                    _mm512_dpbusd_epi32(ints[j][r], weights[r].w[i], load_64(bytemuck::cast_ref(&x[j].low[i])));
            }
        }
    }
    for j in 0..M {
        let (d, s) = (load_f32(&x[j].d), load_f32(&x[j].s));
        let more = _mm512_mullo_epi32(load_64(bytemuck::cast_ref(&x[j].sums)), _mm512_set1_epi32(excess));
        for r in 0..ROWS {
            let Unpacked { scale, offset, .. } = weights[r];
            let (mut total, mut int) = (totals[j][r], ints[j][r]);
            if excess == 0 {
                total = _mm512_fmadd_ps(offset, s, total);
            } else {
                int = _mm512_sub_epi32(int, more);
            }
            totals[j][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(int), _mm512_mul_ps(scale, d), total);
        }
    }
}

/// The sums of the lanes of eight rows: lanes half a register apart are added first, neighbours last.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn sums(totals: &[__m512; ROWS]) -> [f32; ROWS] {
    let add = |a, b| _mm512_add_ps(a, b);
    let mut halves = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let (a, b) = (totals[i], totals[i + 4]);
        halves[i] = add(_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
    }
    // Each 128 bits a row: 0, 2, 4, 6 and 1, 3, 5, 7.
    let mut fourths = [_mm512_setzero_ps(); 2];
    for i in 0..2 {
        let (a, b) = (halves[i], halves[i + 2]);
        fourths[i] = add(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
    }
    let [a, b] = fourths;
    let twos = add(_mm512_shuffle_ps::<0b01_00_01_00>(a, b), _mm512_shuffle_ps::<0b11_10_11_10>(a, b));
    let ones = add(twos, _mm512_permute_ps::<0b11_11_01_01>(twos));
    let at = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    let ones = _mm512_castps512_ps256(_mm512_permutexvar_ps(at, ones));
    let mut sums = [0.0; ROWS];
    // SAFETY: array and register have the same size.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), ones) };
    sums
}

impl UnpackPlanes<4> for BlockQ2K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<4> {
        let scales = load_16(&self.scales);
        let nibble = _mm_set1_epi8(15);
        let scale = _mm512_cvtepu8_epi32(_mm_and_si128(scales, nibble));
        let offset = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(scales), nibble));
        Unpacked {
            w: shifted(bit_pairs(&self.qs), &PAIR_SHIFT, 3),
            scale: _mm512_mul_ps(_mm512_cvtepi32_ps(scale), half(self.d)),
            offset: _mm512_mul_ps(_mm512_cvtepi32_ps(offset), negated(half(self.dmin))),
        }
    }
}

impl UnpackPlanes<4> for BlockQ3K {
    const EXCESS: i32 = 4;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<4> {
        let low = shifted(bit_pairs(&self.qs), &PAIR_SHIFT, 3);
        let w = merge(low, block_bits::<2>(&self.hmask), _mm512_set1_epi8(4));
        let scale = signed_scales(&unpack_scales_q3_k(&self.scales), self.d);
        Unpacked { w, scale, offset: _mm512_mul_ps(scale, _mm512_set1_ps(-4.0)) }
    }
}

impl UnpackPlanes<8> for [BlockQ4K; 2] {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let [scale, offset] = scales_mins(self);
        let mut w = word_pairs([&self[0].qs, &self[1].qs]);
        // The nibbles of odd groups stay where they are, 16 times as large.
        let nibbles = _mm512_set1_epi64(0xF0F0_F0F0_0F0F_0F0F_u64.cast_signed());
        for w in &mut w {
            *w = _mm512_and_si512(*w, nibbles);
        }
        Unpacked { w, scale: _mm512_mul_ps(scale, _mm512_set4_ps(0.0625, 1.0, 0.0625, 1.0)), offset }
    }
}

impl UnpackPlanes<8> for [BlockQ5K; 2] {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        // Bit 4 of a value is bit `g` of a byte, in group `g` of its block.
        const ROTATION: [i32; 16] = plus(by_wide_lane(1, 0, 2), -4);
        let [scale, offset] = scales_mins(self);
        let mut w = word_pairs([&self[0].qs, &self[1].qs]);
        let bits = pair(load_32(&self[0].qh), load_32(&self[1].qh));
        for (i, w) in w.iter_mut().enumerate() {
            let low = _mm512_and_si512(_mm512_srlv_epi32(*w, _mm512_set1_epi64(4 << 32)), _mm512_set1_epi8(15));
            let at = load_i32(&WIDE_WORDS[i]);
            let high = _mm512_rorv_epi32(_mm512_permutexvar_epi32(at, bits), load_i32(&ROTATION));
            *w = _mm512_ternarylogic_epi32::<0b1111_1000>(low, high, _mm512_set1_epi8(16));
        }
        Unpacked { w, scale, offset }
    }
}

impl UnpackPlanes<4> for BlockQ6K {
    const EXCESS: i32 = 32;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<4> {
        // Of each four blocks, the first two are the low halves of the bytes that the others are the high halves of.
        const WORDS: [[i32; 16]; 4] = words_of(4, [8, 0, 16]);
        const LOW: [i32; 16] = by_lane(0, [0, 4, 0]);
        const HIGH: [i32; 16] = plus(PAIR_SHIFT, -4);
        let low = shifted(words(load_128(&self.ql), &WORDS), &LOW, 15);
        let w = merge(low, rotated(bit_pairs(&self.qh), &HIGH), _mm512_set1_epi8(0x30));
        let scale = signed_scales(&self.scales, self.d);
        Unpacked { w, scale, offset: _mm512_mul_ps(scale, _mm512_set1_ps(-32.0)) }
    }
}

impl UnpackPlanes<4> for BlockIq4Xs {
    const EXCESS: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<4> {
        const WORDS: [[i32; 16]; 4] = words_of(0, [4, 8, 16]);
        const SHIFT: [i32; 16] = by_lane(4, [0; 3]);
        const SCALES_LOW: [i32; 16] = by_lane(0, [4, 8, 16]);
        const SCALES_HIGH: [i32; 16] = by_lane(0, [2, 4, 8]);
        let low = _mm512_set1_epi32(i32::from_le_bytes(self.scales_l));
        let low = _mm512_and_si512(_mm512_srlv_epi32(low, load_i32(&SCALES_LOW)), _mm512_set1_epi32(15));
        let high = _mm512_set1_epi32(u16::from_le_bytes(self.scales_h).into());
        let high = _mm512_and_si512(_mm512_srlv_epi32(high, load_i32(&SCALES_HIGH)), _mm512_set1_epi32(3));
        let scales = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
        let scales = _mm512_sub_epi32(scales, _mm512_set1_epi32(32));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(self.d));
        // Their values plus 128.
        let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(&IQ4_VALUES)));
        let values = _mm512_xor_si512(values, _mm512_set1_epi8(-128));
        let mut w = shifted(words(load_128(&self.qs), &WORDS), &SHIFT, 15);
        for w in &mut w {
            *w = _mm512_shuffle_epi8(values, *w);
        }
        Unpacked { w, scale, offset: _mm512_mul_ps(scale, _mm512_set1_ps(-128.0)) }
    }
}

impl UnpackPlanes<4> for BlockTq2_0 {
    const EXCESS: i32 = 1;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<4> {
        let scale = half(self.d);
        Unpacked { w: shifted(bit_pairs(&self.qs), &PAIR_SHIFT, 3), scale, offset: negated(scale) }
    }
}

/// Bytes in the order of [`BlockP16`]; the 128 bits `l` of register `q` are the 16 bytes from `64·l + 16·q` on.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_order([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // Words 0 and 1, and 2 and 3, of an even block of 32 bytes, and of an odd one, where registers change places in twos.
    let (even_01, even_23) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (odd_01, odd_23) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        join::<0b10_10_10_10>(even_01, odd_01),
        join::<0b01_01_01_01>(even_01, odd_01),
        join::<0b10_10_10_10>(even_23, odd_23),
        join::<0b01_01_01_01>(even_23, odd_23),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn pair(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// In each 128-bit lane a word of 64 bits of `a`, and one of `b`: the upper ones where the bits of `WHICH` are set.
#[inline]
#[target_feature(enable = "avx512f")]
fn join<const WHICH: i32>(a: __m512i, b: __m512i) -> __m512i {
    _mm512_castpd_si512(_mm512_shuffle_pd::<WHICH>(_mm512_castsi512_pd(a), _mm512_castsi512_pd(b)))
}

/// A number for each 16-value lane of [`BlockP16`]: `half` if it is the second half of a block of 32, plus `block[i]`
/// for each set bit `i` of the block's index.
pub(super) const fn by_lane(half: i32, block: [i32; 3]) -> [i32; 16] {
    let mut numbers = [0; 16];
    let mut i = 0;
    while i < 16 {
        let (b, h) = (i as i32 / 2, i as i32 % 2);
        numbers[i] = half * h + block[0] * (b & 1) + block[1] * (b >> 1 & 1) + block[2] * (b >> 2);
        i += 1;
    }
    numbers
}

/// A number for each 32-value lane of [`BlockP16`]: `odd` if it is an odd group of a block of 256, plus `second` if that
/// is the second block, plus `pair` for each two groups before it.
const fn by_wide_lane(odd: i32, second: i32, pair: i32) -> [i32; 16] {
    let mut numbers = [0; 16];
    let mut i = 0;
    while i < 16 {
        let lane = i as i32;
        numbers[i] = odd * (lane % 2) + second * (lane / 2 % 2) + pair * (lane / 4);
        i += 1;
    }
    numbers
}

/// For each 32-value lane of [`BlockP16`] one of the two numbers of its group, for which a block of 256 has two each.
pub(super) const TWO_BLOCKS: [i32; 16] = by_wide_lane(2, 16, 4);

/// Of eight words for each of two blocks, those that the registers of [`BlockP16`] take.
const WIDE_WORDS: [[i32; 16]; 8] = {
    let mut at = [[0; 16]; 8];
    let mut r = 0;
    while r < 8 {
        let i = r as i32;
        at[r] = plus(by_wide_lane((i ^ 1) - i, 8, 0), i);
        r += 1;
    }
    at
};

pub(super) const fn plus(numbers: [i32; 16], more: i32) -> [i32; 16] {
    let mut numbers = numbers;
    let mut i = 0;
    while i < 16 {
        numbers[i] += more;
        i += 1;
    }
    numbers
}

/// Indices of the 32-bit words that the registers of [`BlockP16`] take; each 16 values begin at the word that
/// [`by_lane`] gives.
const fn words_of(half: i32, block: [i32; 3]) -> [[i32; 16]; 4] {
    let mut at = [by_lane(half, block); 4];
    let mut i = 0;
    while i < 64 {
        at[BlockP16::<4>::register(4 * i)][i / 4] += i as i32 % 4;
        i += 1;
    }
    at
}

/// The words of two registers that the indices `at` select.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(q: [__m512i; 2], at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for (w, at) in w.iter_mut().zip(at) {
        *w = _mm512_permutex2var_epi32(q[0], load_i32(at), q[1]);
    }
    w
}

/// As [`words`], of one register.
#[inline]
#[target_feature(enable = "avx512f")]
fn words_of_one(q: __m512i, at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for (w, at) in w.iter_mut().zip(at) {
        *w = _mm512_permutexvar_epi32(load_i32(at), q);
    }
    w
}

/// `w >> by & mask`; the mask must drop the bits that a byte gets from the next one.
#[inline]
#[target_feature(enable = "avx512bw")]
fn shifted(w: [__m512i; 4], by: &[i32; 16], mask: i8) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_and_si512(_mm512_srlv_epi32(*w, load_i32(by)), _mm512_set1_epi8(mask));
    }
    w
}

/// Rotates words right.
#[inline]
#[target_feature(enable = "avx512f")]
fn rotated(w: [__m512i; 4], by: &[i32; 16]) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_rorv_epi32(*w, load_i32(by));
    }
    w
}

/// The words of two blocks of 128 bytes, where each 32 bytes hold two groups of 32 values, in the order of [`BlockP16`] for
/// both of these groups.
#[inline]
#[target_feature(enable = "avx512f")]
fn word_pairs([a, b]: [&[u8; 128]; 2]) -> [__m512i; 8] {
    let ([a0, a1], [b0, b1]) = (load_128(a), load_128(b));
    // Words 0 and 1 or 4 and 5 (`low`), 2 and 3 or 6 and 7 (`high`) of 32 bytes of the first block, then of the second.
    let low = [_mm512_unpacklo_epi64(a0, b0), _mm512_unpacklo_epi64(a1, b1)];
    let high = [_mm512_unpackhi_epi64(a0, b0), _mm512_unpackhi_epi64(a1, b1)];
    let twos = [
        _mm512_shuffle_i64x2::<0b10_00_10_00>(low[0], low[1]),
        _mm512_shuffle_i64x2::<0b10_00_10_00>(high[0], high[1]),
        _mm512_shuffle_i64x2::<0b11_01_11_01>(low[0], low[1]),
        _mm512_shuffle_i64x2::<0b11_01_11_01>(high[0], high[1]),
    ];
    let mut words = [_mm512_setzero_si512(); 8];
    for i in 0..4 {
        words[2 * i] = twos[i];
        words[2 * i + 1] = _mm512_ror_epi64::<32>(twos[i]);
    }
    words
}

/// Four words of each of 16 groups, in the order of [`BlockP16`]: the 128 bits `l` of register `q` are those of the group
/// of lane `4·l + q`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words_by_lane([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let float = |x| _mm512_castsi512_ps(x);
    let (first_01, second_01) = (float(_mm512_unpacklo_epi32(a, b)), float(_mm512_unpackhi_epi32(a, b)));
    let (first_23, second_23) = (float(_mm512_unpacklo_epi32(c, d)), float(_mm512_unpackhi_epi32(c, d)));
    // In odd lanes words are swapped.
    [
        _mm512_castps_si512(_mm512_shuffle_ps::<0b11_00_11_00>(first_01, first_23)),
        _mm512_castps_si512(_mm512_shuffle_ps::<0b01_10_01_10>(first_01, first_23)),
        _mm512_castps_si512(_mm512_shuffle_ps::<0b11_00_11_00>(second_01, second_23)),
        _mm512_castps_si512(_mm512_shuffle_ps::<0b01_10_01_10>(second_01, second_23)),
    ]
}

/// Positions of the bits in the words of [`bit_pairs`].
const PAIR_SHIFT: [i32; 16] = by_lane(0, [2, 4, 0]);

/// The words whose bytes have bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`.
#[inline]
#[target_feature(enable = "avx512f")]
fn bit_pairs(qs: &[u8; 64]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = words_of(4, [0, 0, 8]);
    words_of_one(load_64(qs), &WORDS)
}

/// Bit `b` of byte `i` for value `i` of block `b`, at bit `AT` of bytes whose other bits are arbitrary.
#[inline]
#[target_feature(enable = "avx512f")]
fn block_bits<const AT: i32>(qs: &[u8; 32]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = words_of(4, [0; 3]);
    let by = const { plus(by_lane(0, [1, 2, 4]), -AT) };
    rotated(words_of_one(_mm512_castsi256_si512(load_32(qs)), &WORDS), &by)
}

/// `low | high & mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn merge(low: [__m512i; 4], high: [__m512i; 4], mask: __m512i) -> [__m512i; 4] {
    let mut w = low;
    for (w, high) in w.iter_mut().zip(high) {
        *w = _mm512_ternarylogic_epi32::<0b1111_1000>(*w, high, mask);
    }
    w
}

/// Scales and offsets of two blocks of Q4_K or Q5_K, as [`unpack_scales_mins`] describes them; both formats
/// begin with the same 16 bytes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn scales_mins<B: Pod>(blocks: &[B; 2]) -> [__m512; 2] {
    const D: [i32; 16] = by_wide_lane(0, 8, 0);
    const DMIN: [i32; 16] = plus(D, 1);
    let first = |block| bytemuck::bytes_of::<B>(block).first_chunk().expect("16 bytes");
    // `d` and `dmin`, then the words a, b, c: the low six bits of `a` are the first scales, those of `b` the first
    // minima; the last scales and minima are half a byte of `c`, and two bits of `a` or `b`.
    let begin = _mm256_set_m128i(load_16(first(&blocks[1])), load_16(first(&blocks[0])));
    let low = _mm256_shuffle_epi32::<0b11_10_11_01>(begin);
    let low = _mm256_srlv_epi32(low, _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4));
    let low = _mm256_and_si256(low, _mm256_set1_epi64x(0x0F0F_0F0F_3F3F_3F3F));
    let high = _mm256_srli_epi32::<2>(_mm256_shuffle_epi32::<0b10_10_01_01>(begin));
    let both = _mm256_ternarylogic_epi32::<0b1111_1000>(low, high, _mm256_set1_epi64x(0x3030_3030_0000_0000));
    // Twos of the first block's, twos of the second's.
    let (a, b) = (_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
    let (scales, mins) = (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
    let factors = _mm512_cvtph_ps(begin);
    let (d, dmin) = (_mm512_permutexvar_ps(load_i32(&D), factors), _mm512_permutexvar_ps(load_i32(&DMIN), factors));
    let number = |x| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x));
    [_mm512_mul_ps(number(scales), d), _mm512_mul_ps(number(mins), negated(dmin))]
}

/// Scale per 16 weights.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn signed_scales(scales: &[i8; 16], d: [u8; 2]) -> __m512 {
    let scales = _mm512_cvtepi8_epi32(load_16(bytemuck::cast_ref(scales)));
    _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(d))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_i32(x: &[i32; 16]) -> __m512i {
    load_64(bytemuck::cast_ref(x))
}
