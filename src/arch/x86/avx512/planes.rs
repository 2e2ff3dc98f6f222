//! Products of block-quantised weights with rows of generated tokens.
//!
//! A format only says how 256 of its weights become unsigned bytes and 16 scales
//! ([`UnpackPlanes::unpack`]); the product is the same for all. Activations are 16-bit integers in
//! two planes of bytes ([`BlockP16`]): `vpdpbusd` multiplies as many weights by both planes as
//! `vpdpwssd` by words, but takes bytes as they are. The order of weights and activations
//! is such that a lane of 32 bits sums the products of 16 values that share a scale, so that one
//! conversion and one multiplication of scales serve 256 weights.
//!
//! Multiplications and multiply-adds have two ports, which the loop is limited by: for 256 weights
//! and a row 8 products of bytes and 2 for scales, or 3 where a format has a minimum. What else
//! bytes are too large by is taken off the integers.

use super::matmul::{half, load_16, load_32, load_64, load_128, load_f32, negated};
use crate::arch::x86::avx2::prefetch;
use crate::arch::{Acts, BlockP16, ColumnsMut};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// 256 weights: `scale·w + offset`.
#[derive(Clone, Copy)]
pub(super) struct Unpacked {
    /// Bytes in the order of [`BlockP16`].
    pub(super) w: [__m512i; 4],
    /// Scale per 16 weights.
    pub(super) scale: __m512,
    /// Offset per 16 weights.
    pub(super) offset: __m512,
}

impl Unpacked {
    /// Weights of `B`, which has no minimum.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn scaled<B: UnpackPlanes>(w: [__m512i; 4], scale: __m512) -> Unpacked {
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-(B::EXCESS as f32)));
        Unpacked::with_offset::<B>(w, scale, offset)
    }

    /// Weights of `B`, whose bytes may be shifted.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn with_offset<B: UnpackPlanes>(
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
pub(super) trait UnpackPlanes: Pod {
    /// What the bytes are too large by: `offset = −EXCESS·scale`. Zero for formats with a minimum.
    const EXCESS: i32 = 0;
    /// Bits by which the bytes of each lane are shifted left, and their excess with them; its scale
    /// makes up for it. To mask bytes takes less than to mask and to shift them.
    const SHIFT: Option<[i32; 16]> = None;
    /// Whether a generated row's next blocks are unpacked before these are multiplied: where steps
    /// wait long for one another, and registers are enough.
    const UNPACKS_AHEAD: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(&self) -> Unpacked;
}

/// Weight rows at a time: the steps of one row depend on each other. From L2 (Zen 4) two at a time
/// are 1.1 times as fast as one; four are little faster than two, and slower from memory with two
/// threads.
const TILE: usize = 2;
/// Bytes of the L1 cache, of all cores with this level at least. Where they hold an activation row
/// beside one weight row but not beside two, two at a time take 13 to 18 % longer from memory (Q8_0
/// of 8192 values, Q4_0 of 9216); where beside none, one at a time takes 1.6 times as long.
const L1: usize = 32 << 10;
/// Prefetch distance for weights, in bytes; without prefetching, decoding takes three times as long
/// where the CPU's own prefetcher is off, as in some virtual machines. From memory, rows of 1152
/// bytes reach 0.72 of the streaming bandwidth with 1 KiB, 0.84 with 4 KiB, 0.91 with 8 KiB, 0.88
/// with 16 KiB (Zen 5). Decoding on Zen 4 takes as long with 4 or 16 KiB, and a sixth longer with
/// 2.
const AHEAD: usize = 8192;

/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in L2
/// while all weight rows of a task go by.
const MANY: usize = 32;
/// Weight rows that are multiplied by many activation rows at a time: as many as there are
/// registers for. With two, 32 activation rows of Q8_0 take 7 % longer, with eight 6 %.
const FOUR: usize = 4;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn matvec<B: UnpackPlanes>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::P16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    let (format, blocks) = (dtype.float_format(), BlockP16::per_row(n));
    let row_bytes = n / format.block_elems * format.block_bytes;
    if x.len() > blocks {
        let (tiles, last) = w.split_at(w.len() / row_bytes / FOUR * FOUR * row_bytes);
        for (c, x) in x.chunks(MANY * blocks).enumerate() {
            many_rows::<B, FOUR>(y, 0, tiles, c * MANY, x, blocks, row_bytes);
            many_rows::<B, 1>(
                y,
                tiles.len() / row_bytes,
                last,
                c * MANY,
                x,
                blocks,
                row_bytes,
            );
        }
        return;
    }
    let fit = |rows: usize| size_of_val(x) + rows * row_bytes <= L1;
    let n_tiled = if fit(1) && !fit(TILE) {
        0
    } else {
        y.cols() / TILE * TILE
    };
    let (tiles, last) = y.row(0).split_at_mut(n_tiled);
    let (w, w_last) = w.split_at(n_tiled * row_bytes);
    let mut padding = [B::zeroed(); TILE];
    for (w, y) in w
        .chunks_exact(TILE * row_bytes)
        .zip(tiles.as_chunks_mut::<TILE>().0)
    {
        *y = rows(w, x, &mut padding);
    }
    for (w, y) in w_last.chunks_exact(row_bytes).zip(last) {
        [*y] = rows(w, x, padding.first_chunk_mut::<1>().expect("a row"));
    }
}

/// Products of weight rows, the first of them row `first` and `R` at a time, with at most [`MANY`]
/// activation rows from row `i` on: the same sums as [`rows`] computes, added in the same order.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn many_rows<B: UnpackPlanes, const R: usize>(
    y: &mut ColumnsMut<'_>,
    first: usize,
    w: &[u8],
    i: usize,
    x: &[BlockP16],
    blocks: usize,
    row_bytes: usize,
) {
    let mut totals = [[_mm512_setzero_ps(); R]; MANY];
    let totals = &mut totals[..x.len() / blocks];
    let mut padding = [B::zeroed(); R];
    for (t, w) in w.chunks_exact(R * row_bytes).enumerate() {
        let mut ahead = w[(R - 1) * row_bytes..]
            .as_ptr()
            .cast::<i8>()
            .wrapping_add(AHEAD);
        totals.fill([_mm512_setzero_ps(); R]);
        let mut k = 0;
        for w in rows_of(w, &mut padding) {
            for b in 0..w[0].len() {
                if i == 0 {
                    ahead = prefetch(ahead, R * size_of::<B>());
                }
                let weights = unpacked(&w, b);
                for (j, totals) in totals.iter_mut().enumerate() {
                    multiply::<B, R>(totals, &weights, &x[j * blocks + k]);
                }
                k += 1;
            }
        }
        for (j, totals) in totals.iter().enumerate() {
            let y = &mut y.row(i + j)[first + t * R..][..R];
            for r in 0..R {
                y[r] = _mm512_reduce_add_ps(totals[r]);
            }
        }
    }
}

/// Products of `R` weight rows with an activation row. A lane sums the products of every 16th group
/// of 16 columns, in the order of columns; the lanes are added at the end.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn rows<B: UnpackPlanes, const R: usize>(
    w: &[u8],
    x: &[BlockP16],
    padding: &mut [B; R],
) -> [f32; R] {
    let mut ahead = w[(R - 1) * (w.len() / R)..]
        .as_ptr()
        .cast::<i8>()
        .wrapping_add(AHEAD);
    let (mut totals, mut k) = ([_mm512_setzero_ps(); R], 0);
    for w in rows_of(w, padding) {
        let n = w[0].len();
        if B::UNPACKS_AHEAD && n > 0 {
            let mut weights = unpacked(&w, 0);
            for b in 1..n {
                ahead = prefetch(ahead, R * size_of::<B>());
                let next = unpacked(&w, b);
                multiply::<B, R>(&mut totals, &weights, &x[k]);
                weights = next;
                k += 1;
            }
            ahead = prefetch(ahead, R * size_of::<B>());
            multiply::<B, R>(&mut totals, &weights, &x[k]);
            k += 1;
        } else {
            for b in 0..n {
                ahead = prefetch(ahead, R * size_of::<B>());
                multiply::<B, R>(&mut totals, &unpacked(&w, b), &x[k]);
                k += 1;
            }
        }
    }
    let mut y = [0.0; R];
    for r in 0..R {
        y[r] = _mm512_reduce_add_ps(totals[r]);
    }
    y
}

/// Splits `w` into the whole blocks of `R` rows, and those that zeros complete, at most one of
/// each. `padding` begins as zeros, and then all its rows have one length.
#[inline(always)]
fn rows_of<'a, B: UnpackPlanes, const R: usize>(
    w: &'a [u8],
    padding: &'a mut [B; R],
) -> [[&'a [B]; R]; 2] {
    let bytes = w.len() / R;
    let (n, rest) = (bytes / size_of::<B>(), bytes % size_of::<B>());
    let whole = bytes - rest;
    if rest > 0 {
        for r in 0..R {
            bytemuck::bytes_of_mut(&mut padding[r])[..rest]
                .copy_from_slice(&w[r * bytes + whole..][..rest]);
        }
    }
    // `from_fn` would leave its closure a call, as it is not compiled for this level.
    let mut parts: [[&[B]; R]; 2] = [[&[]; R]; 2];
    for r in 0..R {
        parts[0][r] = &bytemuck::cast_slice(&w[r * bytes..][..whole])[..n];
        parts[1][r] = &padding[r..][..usize::from(rest > 0)];
    }
    parts
}

/// Unpacks block `b` of each row.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn unpacked<B: UnpackPlanes, const R: usize>(w: &[&[B]; R], b: usize) -> [Unpacked; R] {
    let (zero, none) = (_mm512_setzero_si512(), _mm512_setzero_ps());
    let mut weights = [Unpacked {
        w: [zero; 4],
        scale: none,
        offset: none,
    }; R];
    // Not a loop: the compiler leaves long ones as they are, and then clears this array each time,
    // in memory.
    macro_rules! unpack {
        ($($r:literal)*) => {$(
            if $r < R {
                // SAFETY: this function has the features.
                weights[$r] = unsafe { w[$r][b].unpack() };
            }
        )*};
    }
    const { assert!(R <= 4) };
    unpack!(0 1 2 3);
    weights
}

/// What bytes are too large by in each lane, negated.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn starts<B: UnpackPlanes>() -> __m512i {
    // One number where it can be, which the compiler then knows: it does not look into arrays of
    // this size.
    match B::SHIFT {
        Some(_) if B::EXCESS > 0 => load_i32(const { &shifted_numbers(-B::EXCESS, B::SHIFT) }),
        _ => _mm512_set1_epi32(-B::EXCESS),
    }
}

/// Adds the products of 256 weights of each row with as many activations.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn multiply<B: UnpackPlanes, const R: usize>(
    totals: &mut [__m512; R],
    weights: &[Unpacked; R],
    x: &BlockP16,
) {
    // 16 products of w ≤ 255 and |x| ≤ 2¹⁵ in a lane, and its start: below 2²⁸. Two sums, though
    // one chain would do: the CPU's scheduler cannot hold that many waiting instructions.
    let start = _mm512_mullo_epi32(load_64(bytemuck::cast_ref(&x.sums)), starts::<B>());
    let (mut high, mut low) = ([_mm512_setzero_si512(); R], [start; R]);
    for j in 0..4 {
        let x_high = load_64(bytemuck::cast_ref(&x.high[j]));
        let x_low = load_64(bytemuck::cast_ref(&x.low[j]));
        for r in 0..R {
            high[r] = _mm512_dpbusd_epi32(high[r], weights[r].w[j], x_high);
            low[r] = _mm512_dpbusd_epi32(low[r], weights[r].w[j], x_low);
        }
    }
    let (d, s) = (load_f32(&x.d), load_f32(&x.s));
    for r in 0..R {
        let Unpacked { scale, offset, .. } = weights[r];
        if B::EXCESS == 0 {
            totals[r] = _mm512_fmadd_ps(offset, s, totals[r]);
        }
        let sums = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high[r]), low[r]));
        totals[r] = _mm512_fmadd_ps(sums, _mm512_mul_ps(scale, d), totals[r]);
    }
}

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
    const EXCESS: i32 = 4;

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
    const EXCESS: i32 = 32;

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
    const EXCESS: i32 = 128;
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
    const EXCESS: i32 = 1;
    const SHIFT: Option<[i32; 16]> = Some(PAIR_SHIFT);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = masked::<Self, 0x0303_0303>(bit_pairs(&self.qs));
        Unpacked::scaled::<Self>(w, half(self.d))
    }
}

/// The values of four-bit codes plus 128.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(super) fn look_up(values: &[i8; 16], codes: [__m512i; 4]) -> [__m512i; 4] {
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
pub(super) fn in_order([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
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

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn pair(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// In each 128-bit lane a word of 64 bits of `a`, and one of `b`: the upper ones where the bits of
/// `WHICH` are set.
#[inline]
#[target_feature(enable = "avx512f")]
fn join<const WHICH: i32>(a: __m512i, b: __m512i) -> __m512i {
    _mm512_castpd_si512(_mm512_shuffle_pd::<WHICH>(
        _mm512_castsi512_pd(a),
        _mm512_castsi512_pd(b),
    ))
}

/// A number for each 16-value lane of [`BlockP16`]: `half` if it is the second half of a block of
/// 32, plus `block[i]` for each set bit `i` of the block's index.
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

pub(super) const fn plus(numbers: [i32; 16], more: i32) -> [i32; 16] {
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
const fn words_of(half: i32, block: [i32; 3]) -> [[i32; 16]; 4] {
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

/// `n·2^shift` of each lane.
const fn shifted_numbers(n: i32, shift: Option<[i32; 16]>) -> [i32; 16] {
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
const fn inverse_powers(shift: Option<[i32; 16]>) -> [f32; 16] {
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
pub(super) fn masked<B: UnpackPlanes, const BITS: i32>(w: [__m512i; 4]) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_and_si512(*w, load_i32(const { &shifted_numbers(BITS, B::SHIFT) }));
    }
    w
}

/// `w >> by & mask`; the mask must drop the bits that a byte gets from the next one.
#[inline]
#[target_feature(enable = "avx512bw")]
pub(super) fn shifted(w: [__m512i; 4], by: &[i32; 16], mask: i8) -> [__m512i; 4] {
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

/// The words whose bytes have bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h +
/// j`.
#[inline]
#[target_feature(enable = "avx512f")]
fn bit_pairs(qs: &[u8; 64]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = words_of(4, [0, 0, 8]);
    words_of_one(load_64(qs), &WORDS)
}

/// Bit `b` of byte `i` for value `i` of block `b`, at bit `AT` of bytes whose other bits are
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
    for (w, high) in w.iter_mut().zip(high) {
        *w = _mm512_ternarylogic_epi32::<0b1111_1000>(*w, high, mask);
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

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_i32(x: &[i32; 16]) -> __m512i {
    load_64(bytemuck::cast_ref(x))
}
