//! Products of weights with rows of generated tokens, which `planes` multiplies: the formats with blocks of 32, and plain
//! ones. (Those with blocks of 256 are in `planes` and `coded`.)

use super::elementwise::{F32x16, zero};
use super::planes::{self, UnpackPlanes, Unpacked};
use crate::arch::avx2::{self, joined, padded};
use crate::arch::lanes::matvec::{Shape, matvec_kernels};
use crate::arch::{ActForm, Acts, BlockP16, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let wide = |kernel: MatvecFn| Matvec { form: ActForm::P16Wide, kernel };
    let p16 = |kernel: MatvecFn| Matvec { form: ActForm::P16, kernel };
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        DType::Q4_0 => wide(planes::matvec_wide::<[BlockQ4_0; 16]>),
        DType::Q4_1 => wide(planes::matvec_wide::<[BlockQ4_1; 16]>),
        DType::Q5_0 => wide(planes::matvec_wide::<[BlockQ5_0; 16]>),
        DType::Q5_1 => wide(planes::matvec_wide::<[BlockQ5_1; 16]>),
        DType::Q8_0 => wide(planes::matvec_wide::<[BlockQ8_0; 16]>),
        DType::Q2_K => p16(planes::matvec::<BlockQ2K>),
        DType::Q3_K => p16(planes::matvec::<BlockQ3K>),
        DType::Q4_K => wide(planes::matvec_wide::<[BlockQ4K; 2]>),
        DType::Q5_K => wide(planes::matvec_wide::<[BlockQ5K; 2]>),
        DType::Q6_K => p16(planes::matvec::<BlockQ6K>),
        DType::IQ4_NL => wide(planes::matvec_wide::<[BlockIq4Nl; 16]>),
        DType::IQ4_XS => p16(planes::matvec::<BlockIq4Xs>),
        DType::MXFP4 => wide(planes::matvec_wide::<[BlockMxfp4; 16]>),
        // Each 16 weights have a scale, and blocks are smaller than those of planes.
        DType::NVFP4 => (avx2::KERNELS.matvec)(dtype),
        DType::IQ1_S => p16(planes::matvec::<BlockIq1S>),
        DType::IQ1_M => p16(planes::matvec::<BlockIq1M>),
        DType::IQ2_XXS => p16(planes::matvec::<BlockIq2Xxs>),
        DType::IQ2_XS => p16(planes::matvec::<BlockIq2Xs>),
        DType::IQ2_S => p16(planes::matvec::<BlockIq2S>),
        DType::IQ3_XXS => p16(planes::matvec::<BlockIq3Xxs>),
        DType::IQ3_S => p16(planes::matvec::<BlockIq3S>),
        DType::TQ1_0 => p16(planes::matvec::<BlockTq1_0>),
        DType::TQ2_0 => p16(planes::matvec::<BlockTq2_0>),
        _ => unreachable!("{dtype} is no format of weights"),
    }
}

/// See [`Shape`].
const SHAPE: Shape = Shape { short: 2048, prefetch: true };
matvec_kernels!(
    "avx512f,avx512bw,avx512vl,avx512dq", zero(), F32x16, SHAPE,
    sums: 2, rows: 8, activation_rows: 4
);

/// A field of each of 16 blocks, in the order of lanes: those of [`BlockP16::lane`].
macro_rules! by_lane {
    ($blocks:ident.$field:ident) => {{
        let b = $blocks;
        [
            &b[0].$field,
            &b[1].$field,
            &b[8].$field,
            &b[9].$field,
            &b[2].$field,
            &b[3].$field,
            &b[10].$field,
            &b[11].$field,
            &b[4].$field,
            &b[5].$field,
            &b[12].$field,
            &b[13].$field,
            &b[6].$field,
            &b[7].$field,
            &b[14].$field,
            &b[15].$field,
        ]
    }};
}

impl UnpackPlanes<8> for [BlockQ4_0; 16] {
    const EXCESS: i32 = 8;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        Unpacked { w: nibbles(by_lane!(self.qs)), scale: halves(by_lane!(self.d)), offset: _mm512_setzero_ps() }
    }
}

impl UnpackPlanes<8> for [BlockQ4_1; 16] {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let w = nibbles(by_lane!(self.qs));
        Unpacked { w, scale: halves(by_lane!(self.d)), offset: halves(by_lane!(self.m)) }
    }
}

impl UnpackPlanes<8> for [BlockQ5_0; 16] {
    const EXCESS: i32 = 16;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let w = with_fifth_bits(nibbles(by_lane!(self.qs)), by_lane!(self.qh));
        Unpacked { w, scale: halves(by_lane!(self.d)), offset: _mm512_setzero_ps() }
    }
}

impl UnpackPlanes<8> for [BlockQ5_1; 16] {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let w = with_fifth_bits(nibbles(by_lane!(self.qs)), by_lane!(self.qh));
        Unpacked { w, scale: halves(by_lane!(self.d)), offset: halves(by_lane!(self.m)) }
    }
}

impl UnpackPlanes<8> for [BlockQ8_0; 16] {
    const EXCESS: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let mut w = bytes(by_lane!(self.qs));
        for w in &mut w {
            *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
        }
        Unpacked { w, scale: halves(by_lane!(self.d)), offset: _mm512_setzero_ps() }
    }
}

impl UnpackPlanes<8> for [BlockIq4Nl; 16] {
    const EXCESS: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let w = look_up(&IQ4_VALUES, Self::EXCESS, nibbles(by_lane!(self.qs)));
        Unpacked { w, scale: halves(by_lane!(self.d)), offset: _mm512_setzero_ps() }
    }
}

impl UnpackPlanes<8> for [BlockMxfp4; 16] {
    const EXCESS: i32 = 12;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&self) -> Unpacked<8> {
        let w = look_up(&MXFP4_VALUES, Self::EXCESS, nibbles(by_lane!(self.qs)));
        let e = _mm512_cvtepu8_epi32(exponents(by_lane!(self.e)));
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
        let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
        let scale = _mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x0020_0000), e);
        Unpacked { w, scale: _mm512_castsi512_ps(scale), offset: _mm512_setzero_ps() }
    }
}

/// The bytes of 16 blocks, given in the order of lanes.
#[inline]
#[target_feature(enable = "avx512bw")]
fn bytes(qs: [&[i8; 32]; 16]) -> [__m512i; 8] {
    let (mut first, mut second) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
    for q in 0..4 {
        let block = |l: usize| load_32(bytemuck::cast_ref(qs[4 * l + q]));
        let (a, b) = (planes::pair(block(0), block(1)), planes::pair(block(2), block(3)));
        first[q] = _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b);
        second[q] = _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b);
    }
    let ([a, b, c, d], [e, f, g, h]) = (planes::words_by_lane(first), planes::words_by_lane(second));
    [a, b, c, d, e, f, g, h]
}

/// Nibbles of 16 blocks, given in the order of lanes, that hold value `j` in the low half of byte `j` and value `j + 16`
/// in its high half.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibbles(qs: [&[u8; 16]; 16]) -> [__m512i; 8] {
    let mut q = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        q[i] = lanes([qs[i], qs[4 + i], qs[8 + i], qs[12 + i]]);
    }
    let mut w = [_mm512_setzero_si512(); 8];
    for (i, words) in planes::words_by_lane(q).into_iter().enumerate() {
        w[i] = _mm512_and_si512(words, _mm512_set1_epi8(15));
        w[4 + i] = _mm512_and_si512(_mm512_srli_epi16::<4>(words), _mm512_set1_epi8(15));
    }
    w
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits(low: [__m512i; 8], qh: [&[u8; 4]; 16]) -> [__m512i; 8] {
    let mut words = [0; 16];
    for l in 0..16 {
        words[l] = i32::from_le_bytes(*qh[l]);
    }
    let (words, mut w) = (planes::load_i32(&words), low);
    for (r, w) in w.iter_mut().enumerate() {
        // Of each lane the byte with the bits of its eight values in registers `r` and `r ^ 1`; in odd lanes these are
        // swapped.
        let byte = |lane: i32| (4 * lane + r as i32 / 2) * 0x0101_0101;
        let eight = _mm512_shuffle_epi8(words, _mm512_set4_epi32(byte(3), byte(2), byte(1), byte(0)));
        let (even, odd) =
            [(0x0804_0201, 0x8040_2010_u32.cast_signed()), (0x8040_2010_u32.cast_signed(), 0x0804_0201)][r % 2];
        let has = _mm512_test_epi8_mask(eight, _mm512_set4_epi32(odd, even, odd, even));
        *w = _mm512_mask_add_epi8(*w, has, *w, _mm512_set1_epi8(16));
    }
    w
}

/// The values that nibbles stand for, plus `excess`.
#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up(values: &[i8; 16], excess: i32, codes: [__m512i; 8]) -> [__m512i; 8] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    let values = _mm512_add_epi8(values, _mm512_set1_epi8(excess as i8));
    let mut w = codes;
    for w in &mut w {
        *w = _mm512_shuffle_epi8(values, *w);
    }
    w
}

/// One byte of each block.
#[inline]
#[target_feature(enable = "sse2")]
fn exponents(e: [&u8; 16]) -> __m128i {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = e;
    let (low, high) = (joined([a, b, c, d, e, f, g, h]), joined([i, j, k, l, m, n, o, p]));
    _mm_set_epi64x(high.cast_signed(), low.cast_signed())
}

/// An f16 of each block.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn halves(x: [&[u8; 2]; 16]) -> __m512 {
    // Combined in general registers: there are few ports for vector shuffles.
    let four = |i: usize| {
        let word = |j: usize| u64::from(u16::from_le_bytes(*x[4 * i + j])) << (16 * j);
        (word(0) | word(1) | word(2) | word(3)).cast_signed()
    };
    _mm512_cvtph_ps(_mm256_set_epi64x(four(3), four(2), four(1), four(0)))
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
pub(super) fn half(x: [u8; 2]) -> __m512 {
    _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(x).into())))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn negated(x: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_setzero_ps(), x)
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn lanes(x: [&[u8; 16]; 4]) -> __m512i {
    joined_lanes([load_16(x[0]), load_16(x[1]), load_16(x[2]), load_16(x[3])])
}

#[inline]
#[target_feature(enable = "avx512f")]
fn joined_lanes([a, b, c, d]: [__m128i; 4]) -> __m512i {
    planes::pair(_mm256_set_m128i(b, a), _mm256_set_m128i(d, c))
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

#[inline]
#[target_feature(enable = "sse2")]
fn store_i16(to: &mut [i16; 8], x: __m128i) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) }
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        match x.first_chunk() {
            Some(x) => words_256(x, block),
            None => words_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn words_256(x: &[f32; 256], block: &mut BlockQ16) {
    let evens_odds = _mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let x: &[[f32; 16]; 16] = bytemuck::cast_ref(x);
    let (d, inverse) = scales(x, BlockQ16::MAX);
    for (i, x) in x.iter().enumerate() {
        let words = _mm512_cvtepi32_epi16(rounded(load_f32(x), inverse[i]));
        let words = _mm256_permutexvar_epi16(evens_odds, words);
        let (row, column) = BlockQ16::position(16 * i);
        store_i16(block.q[row][column..].first_chunk_mut().expect("8 of 32"), _mm256_castsi256_si128(words));
        store_i16(block.q[row + 1][column..].first_chunk_mut().expect("8 of 32"), _mm256_extracti128_si256::<1>(words));
    }
    // Lane `l` of 128 bits of sum `i` has parts of the sum of the 16 values from `64·l + 16·i` on.
    let mut sums = [_mm512_setzero_si512(); 4];
    for (i, sum) in sums.iter_mut().enumerate() {
        for row in &block.q[2 * i..][..2] {
            *sum = _mm512_dpwssd_epi32(*sum, _mm512_set1_epi16(1), load_64(bytemuck::cast_ref(row)));
        }
    }
    let add = |a, b| _mm512_add_epi32(a, b);
    let first = add(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
    let second = add(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
    let sums = add(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    store_f32(&mut block.d, d);
    store_f32(&mut block.s, _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums)));
}

/// As [`quantize_q16`], in two planes of bytes.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16<4>]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(256)) {
        let (d, [high, low]) = match x.first_chunk() {
            Some(x) => bytes_256(x),
            None => bytes_256(&padded(x)),
        };
        let in_order = |x: [__m128i; 16]| planes::in_order(fourths(x));
        put_planes(block, in_order(high), in_order(low), d);
    }
}

/// As [`quantize_p16`], 512 values at a time.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
pub(super) fn quantize_p16_wide(x: &[f32], blocks: &mut [BlockP16<8>]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(512)) {
        let (a, b) = x.split_at(x.len().min(256));
        let (da, [high_a, low_a]) = match a.first_chunk() {
            Some(a) => bytes_256(a),
            None => bytes_256(&padded(a)),
        };
        let (db, [high_b, low_b]) = match b.first_chunk() {
            Some(b) => bytes_256(b),
            None => bytes_256(&padded(b)),
        };
        let d = _mm512_permutex2var_ps(da, planes::load_i32(&planes::TWO_BLOCKS), db);
        put_planes(block, in_wide_order(high_a, high_b), in_wide_order(low_a, low_b), d);
    }
}

/// 16 times 16 bytes of each of two blocks, in the order of [`BlockP16`].
#[inline]
#[target_feature(enable = "avx512f")]
fn in_wide_order(a: [__m128i; 16], b: [__m128i; 16]) -> [__m512i; 8] {
    let mut halves = [[_mm512_setzero_si512(); 4]; 2];
    for half in 0..2 {
        for q in 0..4 {
            let x = if q < 2 { &a } else { &b };
            // Of groups 0, 2, 4 and 6, or of 1, 3, 5 and 7.
            let group = |l: usize| x[2 * (2 * l + q % 2) + half];
            halves[half][q] = joined_lanes([group(0), group(1), group(2), group(3)]);
        }
    }
    let ([a, b, c, d], [e, f, g, h]) = (planes::words_by_lane(halves[0]), planes::words_by_lane(halves[1]));
    [a, b, c, d, e, f, g, h]
}

/// Scales of each 16 of 256 values, and the high and the low bytes of their integers, 16 at a time.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn bytes_256(x: &[f32; 256]) -> (__m512, [[__m128i; 16]; 2]) {
    let x: &[[f32; 16]; 16] = bytemuck::cast_ref(x);
    let (d, inverse) = scales(x, BlockP16::<4>::MAX);
    let (mut high, mut low) = ([_mm_setzero_si128(); 16], [_mm_setzero_si128(); 16]);
    for i in 0..16 {
        let q = rounded(load_f32(&x[i]), inverse[i]);
        low[i] = _mm512_cvtepi32_epi8(q);
        high[i] = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
    }
    (d, [high, low])
}

/// Stores planes and what follows of them.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn put_planes<const R: usize>(block: &mut BlockP16<R>, high: [__m512i; R], low: [__m512i; R], d: __m512) {
    let (mut high_sum, mut low_sum) = (_mm512_setzero_si512(), _mm512_setzero_si512());
    for r in 0..R {
        store_64(bytemuck::cast_mut(&mut block.high[r]), high[r]);
        store_64(bytemuck::cast_mut(&mut block.low[r]), low[r]);
        high_sum = _mm512_dpbusd_epi32(high_sum, _mm512_set1_epi8(1), high[r]);
        low_sum = _mm512_dpbusd_epi32(low_sum, _mm512_set1_epi8(1), low[r]);
    }
    let sums = _mm512_add_epi32(_mm512_slli_epi32::<8>(high_sum), low_sum);
    store_f32(&mut block.d, d);
    store_64(bytemuck::cast_mut(&mut block.sums), sums);
    store_f32(&mut block.s, _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums)));
}

/// `BlockQ16::scale` of each 32 values, for both of their halves, and the inverses.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales(x: &[[f32; 16]; 16], largest_integer: i16) -> (__m512, [f32; 16]) {
    let magnitude = |i: usize| _mm512_and_si512(_mm512_castps_si512(load_f32(&x[i])), _mm512_set1_epi32(i32::MAX));
    // Bits of magnitudes sort as integers do, NaN last. Of eight registers: the largest lane of each.
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
        fourths[q] = joined_lanes([x[q], x[4 + q], x[8 + q], x[12 + q]]);
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
