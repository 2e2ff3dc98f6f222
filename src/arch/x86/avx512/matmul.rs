//! Products of weights with rows of generated tokens.
//!
//! Weights in blocks are multiplied by `planes`, eight blocks of 32 at a time.

use super::coded::registers_of_bits;
use super::elementwise::{F32x16, zero};
use super::planes::{self, UnpackPlanes, Unpacked};
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::x86::avx2::unpack::{Groups, with_groups};
use crate::arch::x86::avx2::{each, joined, padded};
use crate::arch::{ActForm, Acts, BlockP16, ColumnsMut, Matvec, MatvecFn, scalar};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    macro_rules! p16 {
        ($block:ident) => {
            Matvec {
                form: ActForm::P16,
                kernel: planes::matvec::<<$block as Groups>::Of256>,
            }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => with_groups!(dtype, p16, (scalar::KERNELS.matvec)(dtype)),
    }
}

plain_products!(
    "avx512f,avx512bw,avx512vl,avx512dq", zero(), F32x16,
    rows: 4, activation_rows: 6, rows_by_one: 8, OneRow { short: 2048, ahead: Some(512) }
);

/// Small blocks that hold 256 weights.
type Eight<B> = [B; 8];

impl UnpackPlanes for Eight<BlockQ4_0> {
    const EXCESS: i32 = 8;
    const SHIFT: Option<[i32; 16]> = Some(HIGH_HALVES);
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = planes::masked::<Self, 0x0F0F_0F0F>(nibble_bytes(each!(self.qs)));
        Unpacked::scaled::<Self>(w, halves(each!(self.d)))
    }
}

impl UnpackPlanes for Eight<BlockQ4_1> {
    const SHIFT: Option<[i32; 16]> = Some(HIGH_HALVES);

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = planes::masked::<Self, 0x0F0F_0F0F>(nibble_bytes(each!(self.qs)));
        Unpacked::with_offset::<Self>(w, halves(each!(self.d)), halves(each!(self.m)))
    }
}

impl UnpackPlanes for Eight<BlockQ5_0> {
    const EXCESS: i32 = 16;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(self.qs)), each!(self.qh));
        Unpacked::scaled::<Self>(w, halves(each!(self.d)))
    }
}

impl UnpackPlanes for Eight<BlockQ5_1> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(self.qs)), each!(self.qh));
        Unpacked {
            w,
            scale: halves(each!(self.d)),
            offset: halves(each!(self.m)),
        }
    }
}

impl UnpackPlanes for Eight<BlockQ8_0> {
    const EXCESS: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let [a, b, c, d, e, f, g, h]: [&[[u8; 16]; 2]; 8] = each!(self.qs).map(bytemuck::cast_ref);
        let mut w = planes::in_order([
            lanes([&a[0], &c[0], &e[0], &g[0]]),
            lanes([&a[1], &c[1], &e[1], &g[1]]),
            lanes([&b[0], &d[0], &f[0], &h[0]]),
            lanes([&b[1], &d[1], &f[1], &h[1]]),
        ]);
        for w in &mut w {
            *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
        }
        Unpacked::scaled::<Self>(w, halves(each!(self.d)))
    }
}

impl UnpackPlanes for Eight<BlockIq4Nl> {
    const EXCESS: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = planes::look_up(&IQ4_VALUES, nibbles(each!(self.qs)));
        Unpacked::scaled::<Self>(w, halves(each!(self.d)))
    }
}

impl UnpackPlanes for Eight<BlockMxfp4> {
    const EXCESS: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let w = planes::look_up(&MXFP4_VALUES, nibbles(each!(self.qs)));
        let scale = power_of_two(_mm512_cvtepu8_epi32(twice(joined(each!(self.e)))));
        Unpacked::scaled::<Self>(w, scale)
    }
}

impl UnpackPlanes for [BlockNvfp4; 4] {
    const EXCESS: i32 = 128;
    const UNPACKS_AHEAD: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked {
        let [a, b, c, d] = self;
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
        Unpacked::scaled::<Self>(w, _mm512_maskz_mul_ps(some, scales, _mm512_set1_ps(128.0)))
    }
}

/// [`BlockMxfp4::half_scale`] of exponents.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn power_of_two(e: __m512i) -> __m512 {
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_sllv_epi32(
        normal,
        small,
        _mm512_set1_epi32(0x0020_0000),
        e,
    ))
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

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits(low: [__m512i; 4], [a, b, c, d, e, f, g, h]: [&[u8; 4]; 8]) -> [__m512i; 4] {
    let bits = _mm256_setr_epi32(
        word(*a),
        word(*b),
        word(*c),
        word(*d),
        word(*e),
        word(*f),
        word(*g),
        word(*h),
    );
    let has = registers_of_bits(_mm512_cvtepu16_epi32(bits));
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

/// Four words of 16 bits, the first one lowest.
#[inline(always)]
fn four([a, b, c, d]: [[u8; 2]; 4]) -> u64 {
    let word = |x| u64::from(u16::from_le_bytes(x));
    word(a) | word(b) << 16 | word(c) << 32 | word(d) << 48
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
pub(super) fn half(x: [u8; 2]) -> __m512 {
    _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(x).into(),
    )))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn negated(x: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_setzero_ps(), x)
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn lanes(x: [&[u8; 16]; 4]) -> __m512i {
    let low = _mm256_set_m128i(load_16(x[1]), load_16(x[0]));
    let high = _mm256_set_m128i(load_16(x[3]), load_16(x[2]));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn load_16(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_64(x: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_128(x: &[u8; 128]) -> [__m512i; 2] {
    let [a, b]: &[[u8; 64]; 2] = bytemuck::cast_ref(x);
    [load_64(a), load_64(b)]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_f32(x: &[f32; 16]) -> __m512 {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(super) fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_64(to: &mut [u8; 64], x: __m512i) {
    // SAFETY: 64 writable bytes; the store asks for no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_f32(to: &mut [f32; 16], x: __m512) {
    // SAFETY: 64 writable bytes; the store asks for no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        match x.first_chunk() {
            Some(x) => planes_256(x, block),
            None => planes_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn planes_256(x: &[f32; 256], block: &mut BlockP16) {
    let x: &[[f32; 16]; 16] = bytemuck::cast_ref(x);
    let (d, inverse) = scales(x, BlockP16::MAX);
    let (mut high, mut low) = ([_mm_setzero_si128(); 16], [_mm_setzero_si128(); 16]);
    for i in 0..16 {
        let q = rounded(load_f32(&x[i]), inverse[i]);
        low[i] = _mm512_cvtepi32_epi8(q);
        high[i] = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(
            q,
            _mm512_set1_epi32(128),
        )));
    }
    let (high, low) = (
        planes::in_order(fourths(high)),
        planes::in_order(fourths(low)),
    );
    let (mut high_sum, mut low_sum) = (_mm512_setzero_si512(), _mm512_setzero_si512());
    for r in 0..4 {
        store_64(bytemuck::cast_mut(&mut block.high[r]), high[r]);
        store_64(bytemuck::cast_mut(&mut block.low[r]), low[r]);
        high_sum = _mm512_dpbusd_epi32(high_sum, _mm512_set1_epi8(1), high[r]);
        low_sum = _mm512_dpbusd_epi32(low_sum, _mm512_set1_epi8(1), low[r]);
    }
    let sums = _mm512_add_epi32(_mm512_slli_epi32::<8>(high_sum), low_sum);
    store_f32(&mut block.d, d);
    store_f32(&mut block.s, _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums)));
    store_64(bytemuck::cast_mut(&mut block.sums), sums);
}

/// `BlockQ16::scale` of each 32 values, for both of their halves, and the inverses.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales(x: &[[f32; 16]; 16], largest_integer: i16) -> (__m512, [f32; 16]) {
    let magnitude = |i: usize| {
        _mm512_and_si512(
            _mm512_castps_si512(load_f32(&x[i])),
            _mm512_set1_epi32(i32::MAX),
        )
    };
    // Bits of magnitudes sort as integers do, NaN last. Of eight registers: the largest lane of
    // each.
    let max = |a, b| _mm512_max_epu32(a, b);
    let mut largest = [_mm512_setzero_si512(); 8];
    for b in 0..8 {
        largest[b] = max(magnitude(2 * b), magnitude(2 * b + 1));
    }
    let mut twos = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        let (a, b) = (largest[2 * i], largest[2 * i + 1]);
        twos[i] = max(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    let mut fours = [_mm512_setzero_si512(); 2];
    for i in 0..2 {
        let (a, b) = (twos[2 * i], twos[2 * i + 1]);
        fours[i] = max(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    let eight = max(
        _mm512_shuffle_i64x2::<0b01_00_01_00>(fours[0], fours[1]),
        _mm512_shuffle_i64x2::<0b11_10_11_10>(fours[0], fours[1]),
    );
    let eight = max(eight, _mm512_shuffle_i64x2::<0b10_11_00_01>(eight, eight));
    let each_twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9, 10, 10, 11, 11);
    let largest = _mm512_castsi512_ps(_mm512_permutexvar_epi32(each_twice, eight));

    let most = _mm512_set1_ps(f32::from(largest_integer));
    let d = _mm512_div_ps(largest, most);
    // As there, NaN is not small.
    let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(d, _mm512_set1_ps(f32::MIN_POSITIVE));
    let mut inverse = [0.0; 16];
    store_f32(&mut inverse, _mm512_maskz_div_ps(some, most, largest));
    (_mm512_maskz_mov_ps(some, d), inverse)
}

/// Four registers: the 128 bits `l` of register `q` are those of `x[4l + q]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn fourths(x: [__m128i; 16]) -> [__m512i; 4] {
    let mut fourths = [_mm512_setzero_si512(); 4];
    for q in 0..4 {
        let (low, high) = (
            _mm256_set_m128i(x[4 + q], x[q]),
            _mm256_set_m128i(x[12 + q], x[8 + q]),
        );
        fourths[q] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    fourths
}

/// `x·inverse` to the nearest integer; NaN becomes 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512, inverse: f32) -> __m512i {
    let x = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
    _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x)
}
