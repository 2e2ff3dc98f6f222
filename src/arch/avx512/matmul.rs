//! Products of weights with few activation rows.
//!
//! A block format only says how 256 of its weights become bytes, 16 scales and 16 offsets
//! ([`Weights::unpack`]); the product is the same for all. Its integers are 16-bit: `vpdpwssd`
//! multiplies as many weights per second by 16-bit activations as `vpdpbusd` does in two passes over
//! byte planes, and takes signed weights without corrections. The four 128-bit lanes hold four blocks
//! of 32, so that one conversion to `f32` and one multiply-add serve 128 weights.

use crate::arch::{ActForm, Acts, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let q16 = |kernel: MatvecFn| Matvec { form: ActForm::Q16, kernel };
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    match dtype {
        DType::F32 => f32(matvec_float::<F32, 64>),
        DType::F16 => f32(matvec_float::<F16, 32>),
        DType::BF16 => f32(matvec_float::<Bf16, 32>),
        DType::Q4_0 => q16(matvec::<BlockQ4_0, 8>),
        DType::Q4_1 => q16(matvec::<BlockQ4_1, 8>),
        DType::Q5_0 => q16(matvec::<BlockQ5_0, 8>),
        DType::Q5_1 => q16(matvec::<BlockQ5_1, 8>),
        DType::Q8_0 => q16(matvec::<BlockQ8_0, 8>),
        DType::Q2_K => q16(matvec::<BlockQ2K, 1>),
        DType::Q3_K => q16(matvec::<BlockQ3K, 1>),
        DType::Q4_K => q16(matvec::<BlockQ4K, 1>),
        DType::Q5_K => q16(matvec::<BlockQ5K, 1>),
        DType::Q6_K => q16(matvec::<BlockQ6K, 1>),
        DType::IQ4_NL => q16(matvec::<BlockIq4Nl, 8>),
        DType::IQ4_XS => q16(matvec::<BlockIq4Xs, 1>),
        DType::MXFP4 => q16(matvec::<BlockMxfp4, 8>),
        _ => f32(matvec_any),
    }
}

/// 256 weights: `scale·w + offset`.
struct Unpacked {
    /// Byte `j % 16` of lane `b / 2` of register `2·(b % 2) + j / 16` is value `j` of block `b` of 32.
    w: [__m512i; 4],
    /// Of each 16 weights.
    scale: __m512,
    /// Of each 16 weights.
    offset: __m512,
}

/// A format whose `N` blocks hold 256 weights.
trait Weights<const N: usize>: Pod {
    /// Whether each 16 weights have a scale of their own; else each 32 share one.
    const SCALE_PER_16: bool = false;
    /// Whether the bytes are signed.
    const SIGNED: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: &[Self; N]) -> Unpacked;
}

/// Weight rows at a time: their reads overlap, and they share activations in the L1 cache.
const ROWS: usize = 4;
/// Activation rows at a time.
const COLUMNS: usize = 16;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn matvec<B: Weights<N>, const N: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::Q16 { x, n } = *x else { unreachable!("the form this level asks for") };
    let (blocks, groups) = (n * N / BlockQ16::VALUES, BlockQ16::per_row(n));
    for (t, rows) in bytemuck::cast_slice(w).chunks(ROWS * blocks).enumerate() {
        for (c, x) in x.chunks(COLUMNS * groups).enumerate() {
            tile::<B, N>(y, t * ROWS, rows, blocks, c * COLUMNS, x, groups);
        }
    }
}

/// The product of weight rows `r..`, of `blocks` blocks each, with activation rows `i..`, of `groups`.
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn tile<B: Weights<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    rows: &[B],
    blocks: usize,
    i: usize,
    x: &[BlockQ16],
    groups: usize,
) {
    let mut totals = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    for g in 0..groups {
        for (row, totals) in rows.chunks_exact(blocks).zip(&mut totals) {
            // SAFETY: this function has the features.
            let weights = unsafe { B::unpack(&group(&row[g * N..])) };
            let w = if B::SIGNED { weights.w.map(|w| signed_words(w)) } else { weights.w.map(|w| words(w)) };
            for (x, total) in x.chunks_exact(groups).zip(totals) {
                *total = multiply_add::<B, N>(*total, &w, &weights, &x[g]);
            }
        }
    }
    for (r, totals) in (r..y.cols()).zip(&totals).take(rows.len() / blocks) {
        for (i, total) in (i..).zip(&totals[..x.len() / groups]) {
            y.row(i)[r] = _mm512_reduce_add_ps(*total);
        }
    }
}

/// The first `N` blocks; zeros where a row ends before.
#[inline]
fn group<B: Pod, const N: usize>(blocks: &[B]) -> [B; N] {
    match blocks.first_chunk() {
        Some(blocks) => *blocks,
        None => std::array::from_fn(|b| blocks.get(b).copied().unwrap_or(B::zeroed())),
    }
}

/// `total + Σ (scale·w + offset)·x`, its sum spread over the lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn multiply_add<B: Weights<N>, const N: usize>(
    total: __m512,
    w: &[[__m512i; 2]; 4],
    weights: &Unpacked,
    x: &BlockQ16,
) -> __m512 {
    let zero = _mm512_setzero_si512();
    // |w| ≤ 128, |x| ≤ 32767, eight products per lane: below 2²⁵.
    let pairs = |sum, j: usize| {
        let sum = _mm512_dpwssd_epi32(sum, w[j][0], load_i16(&x.q[2 * j]));
        _mm512_dpwssd_epi32(sum, w[j][1], load_i16(&x.q[2 * j + 1]))
    };
    let scale = _mm512_mul_ps(weights.scale, load_f32(&x.d));
    let total = _mm512_fmadd_ps(weights.offset, load_f32(&x.s), total);
    if B::SCALE_PER_16 {
        let total = scaled::<0b00_00_00_00>(total, pairs(zero, 0), scale);
        let total = scaled::<0b01_01_01_01>(total, pairs(zero, 1), scale);
        let total = scaled::<0b10_10_10_10>(total, pairs(zero, 2), scale);
        scaled::<0b11_11_11_11>(total, pairs(zero, 3), scale)
    } else {
        let total = scaled::<0b00_00_00_00>(total, pairs(pairs(zero, 0), 1), scale);
        scaled::<0b10_10_10_10>(total, pairs(pairs(zero, 2), 3), scale)
    }
}

/// `total + sum·scale`, where each 128-bit lane uses the one of its scales that `WHICH` names four
/// times.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn scaled<const WHICH: i32>(total: __m512, sum: __m512i, scale: __m512) -> __m512 {
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permute_ps::<WHICH>(scale), total)
}

/// Bytes 0, 2, 4… and bytes 1, 3, 5… as words.
#[inline]
#[target_feature(enable = "avx512bw")]
fn words(bytes: __m512i) -> [__m512i; 2] {
    [_mm512_and_si512(bytes, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16::<8>(bytes)]
}

/// As [`words`], signed.
#[inline]
#[target_feature(enable = "avx512bw")]
fn signed_words(bytes: __m512i) -> [__m512i; 2] {
    [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes)), _mm512_srai_epi16::<8>(bytes)]
}

impl Weights<8> for BlockQ4_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let scale = halves(&blocks.map(|b| b.d));
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-8.0));
        Unpacked { w: nibbles(&blocks.each_ref().map(|b| &b.qs)), scale, offset }
    }
}

impl Weights<8> for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = nibbles(&blocks.each_ref().map(|b| &b.qs));
        Unpacked { w, scale: halves(&blocks.map(|b| b.d)), offset: halves(&blocks.map(|b| b.m)) }
    }
}

impl Weights<8> for BlockQ5_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let scale = halves(&blocks.map(|b| b.d));
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-16.0));
        let w = nibbles(&blocks.each_ref().map(|b| &b.qs));
        Unpacked { w: with_fifth_bits(w, &blocks.map(|b| b.qh)), scale, offset }
    }
}

impl Weights<8> for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(&blocks.each_ref().map(|b| &b.qs)), &blocks.map(|b| b.qh));
        Unpacked { w, scale: halves(&blocks.map(|b| b.d)), offset: halves(&blocks.map(|b| b.m)) }
    }
}

impl Weights<8> for BlockQ8_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let halves_of = |p: usize, h: usize| {
            lanes([0, 2, 4, 6].map(|b| &bytemuck::cast_ref::<_, [[u8; 16]; 2]>(&blocks[b + p].qs)[h]))
        };
        Unpacked {
            w: [halves_of(0, 0), halves_of(0, 1), halves_of(1, 0), halves_of(1, 1)],
            scale: halves(&blocks.map(|b| b.d)),
            offset: _mm512_setzero_ps(),
        }
    }
}

impl Weights<8> for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = look_up(&IQ4_VALUES, nibbles(&blocks.each_ref().map(|b| &b.qs)));
        Unpacked { w, scale: halves(&blocks.map(|b| b.d)), offset: _mm512_setzero_ps() }
    }
}

impl Weights<8> for BlockMxfp4 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = look_up(&MXFP4_VALUES, nibbles(&blocks.each_ref().map(|b| &b.qs)));
        let e = _mm512_cvtepu8_epi32(twice(blocks.map(|b| b.e)));
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
        let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
        let scale = _mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x0020_0000), e);
        Unpacked { w, scale: _mm512_castsi512_ps(scale), offset: _mm512_setzero_ps() }
    }
}

impl Weights<1> for BlockQ2K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scales = load_16(&block.scales);
        let nibble = _mm_set1_epi8(15);
        let scale = _mm512_cvtepu8_epi32(_mm_and_si128(scales, nibble));
        let offset = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(scales), nibble));
        Unpacked {
            w: bit_pairs::<0>(&block.qs).map(|w| _mm512_and_si512(w, _mm512_set1_epi8(3))),
            scale: _mm512_mul_ps(_mm512_cvtepi32_ps(scale), half(block.d)),
            offset: _mm512_mul_ps(_mm512_cvtepi32_ps(offset), negated(half(block.dmin))),
        }
    }
}

impl Weights<1> for BlockQ3K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scales = unpack_scales_q3_k(&block.scales);
        let scales = _mm512_cvtepi8_epi32(load_16(bytemuck::cast_ref(&scales)));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(block.d));
        let low = bit_pairs::<0>(&block.qs);
        let high = block_bits::<2>(&block.hmask);
        let (low_bits, high_bit) = (_mm512_set1_epi8(3), _mm512_set1_epi8(4));
        Unpacked {
            w: std::array::from_fn(|j| merge(_mm512_and_si512(low[j], low_bits), high[j], high_bit)),
            scale,
            offset: _mm512_mul_ps(scale, _mm512_set1_ps(-4.0)),
        }
    }
}

impl Weights<1> for BlockQ4K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block.d, block.dmin, &block.scales);
        Unpacked { w: nibble_pairs(&block.qs), scale, offset }
    }
}

impl Weights<1> for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block.d, block.dmin, &block.scales);
        let (low, high) = (nibble_pairs(&block.qs), block_bits::<4>(&block.qh));
        let high_bit = _mm512_set1_epi8(16);
        Unpacked { w: std::array::from_fn(|j| merge(low[j], high[j], high_bit)), scale, offset }
    }
}

impl Weights<1> for BlockQ6K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scales = _mm512_cvtepi8_epi32(load_16(bytemuck::cast_ref(&block.scales)));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(block.d));
        let [q0, q1] = load_128(&block.ql);
        // Blocks 0 and 2 of each four are the nibbles of the first 32 bytes, 1 and 3 of the next 32.
        let low = [
            _mm512_shuffle_i64x2::<0b00_00_00_00>(q0, q1),
            _mm512_shuffle_i64x2::<0b01_01_01_01>(q0, q1),
            _mm512_shuffle_i64x2::<0b10_10_10_10>(q0, q1),
            _mm512_shuffle_i64x2::<0b11_11_11_11>(q0, q1),
        ];
        let nibble = _mm512_set1_epi8(15);
        let low = low.map(|q| _mm512_and_si512(_mm512_rorv_epi32(q, each_lane(0, 4, 0, 4)), nibble));
        let high = bit_pairs::<4>(&block.qh);
        let high_bits = _mm512_set1_epi8(0x30);
        Unpacked {
            w: std::array::from_fn(|j| merge(low[j], high[j], high_bits)),
            scale,
            offset: _mm512_mul_ps(scale, _mm512_set1_ps(-32.0)),
        }
    }
}

impl Weights<1> for BlockIq4Xs {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let block_of = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        let low = _mm512_set1_epi32(i32::from_le_bytes(block.scales_l));
        let high = _mm512_set1_epi32(u16::from_le_bytes(block.scales_h).into());
        let low = _mm512_srlv_epi32(low, _mm512_slli_epi32::<2>(block_of));
        let high = _mm512_srlv_epi32(high, _mm512_slli_epi32::<1>(block_of));
        let scales =
            merge(_mm512_and_si512(low, _mm512_set1_epi32(15)), _mm512_slli_epi32::<4>(high), _mm512_set1_epi32(0x30));
        let scales = _mm512_sub_epi32(scales, _mm512_set1_epi32(32));
        let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(&block.qs);
        Unpacked {
            w: look_up(&IQ4_VALUES, nibbles(&qs.each_ref())),
            scale: _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(block.d)),
            offset: _mm512_setzero_ps(),
        }
    }
}

/// Nibbles of blocks that hold value `j` in the low half of byte `j` and value `j + 16` in its high
/// half.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibbles(qs: &[&[u8; 16]; 8]) -> [__m512i; 4] {
    let even = lanes([qs[0], qs[2], qs[4], qs[6]]);
    let odd = lanes([qs[1], qs[3], qs[5], qs[7]]);
    let nibble = _mm512_set1_epi8(15);
    [even, _mm512_srli_epi16::<4>(even), odd, _mm512_srli_epi16::<4>(odd)].map(|q| _mm512_and_si512(q, nibble))
}

/// Nibbles of pairs of blocks: the low halves of 32 bytes are one block, the high halves the next.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibble_pairs(qs: &[u8; 128]) -> [__m512i; 4] {
    let [q0, q1] = load_128(qs);
    let first = _mm512_shuffle_i64x2::<0b10_00_10_00>(q0, q1);
    let second = _mm512_shuffle_i64x2::<0b11_01_11_01>(q0, q1);
    let nibble = _mm512_set1_epi8(15);
    [first, second, _mm512_srli_epi16::<4>(first), _mm512_srli_epi16::<4>(second)].map(|q| _mm512_and_si512(q, nibble))
}

/// Bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`, at bits `AT` and
/// `AT + 1` of its byte.
#[inline]
#[target_feature(enable = "avx512bw")]
fn bit_pairs<const AT: i32>(qs: &[u8; 64]) -> [__m512i; 4] {
    let q = load_64(qs);
    let first = _mm512_shuffle_i64x2::<0b10_10_00_00>(q, q);
    let second = _mm512_shuffle_i64x2::<0b11_11_01_01>(q, q);
    let (even, odd) = (each_lane(-AT, 4 - AT, -AT, 4 - AT), each_lane(2 - AT, 6 - AT, 2 - AT, 6 - AT));
    [
        _mm512_rorv_epi32(first, even),
        _mm512_rorv_epi32(second, even),
        _mm512_rorv_epi32(first, odd),
        _mm512_rorv_epi32(second, odd),
    ]
}

/// Bit `b` of byte `i` for value `i` of block `b`, at bit `AT` of its byte.
#[inline]
#[target_feature(enable = "avx512bw")]
fn block_bits<const AT: i32>(qs: &[u8; 32]) -> [__m512i; 4] {
    let (first, second) = qs.split_at(16);
    let [first, second] = [first, second].map(|q| _mm512_broadcast_i32x4(load_16(q.try_into().expect("16 bytes"))));
    let (even, odd) = (each_lane(-AT, 2 - AT, 4 - AT, 6 - AT), each_lane(1 - AT, 3 - AT, 5 - AT, 7 - AT));
    [
        _mm512_rorv_epi32(first, even),
        _mm512_rorv_epi32(second, even),
        _mm512_rorv_epi32(first, odd),
        _mm512_rorv_epi32(second, odd),
    ]
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits(low: [__m512i; 4], qh: &[[u8; 4]; 8]) -> [__m512i; 4] {
    let qh = qh.map(i32::from_le_bytes);
    let even = each_lane(qh[0], qh[2], qh[4], qh[6]);
    let odd = each_lane(qh[1], qh[3], qh[5], qh[7]);
    // Each byte looks at the byte of `qh` that holds its bit.
    let first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
    let second = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    let bit = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    let sources = [(even, first), (even, second), (odd, first), (odd, second)];
    std::array::from_fn(|j| {
        let has = _mm512_test_epi8_mask(_mm512_shuffle_epi8(sources[j].0, sources[j].1), bit);
        _mm512_mask_add_epi8(low[j], has, low[j], _mm512_set1_epi8(16))
    })
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up(values: &[i8; 16], codes: [__m512i; 4]) -> [__m512i; 4] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    codes.map(|code| _mm512_shuffle_epi8(values, code))
}

/// `low | high & mask`.
#[inline]
#[target_feature(enable = "avx512bw")]
fn merge(low: __m512i, high: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(low, high, mask)
}

/// Scales and offsets of Q4_K and Q5_K, as [`unpack_scales_mins`] describes them.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> (__m512, __m512) {
    let [a, b, c] = bytemuck::cast::<_, [[u8; 4]; 3]>(*packed).map(u32::from_le_bytes);
    let six_bits = |low: u32, high: u32| {
        let eight = u64::from(low & 0x3F3F_3F3F) | u64::from(high) << 32;
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(twice(eight.to_le_bytes())))
    };
    let scale = six_bits(a, c & 0x0F0F_0F0F | a >> 2 & 0x3030_3030);
    let min = six_bits(b, c >> 4 & 0x0F0F_0F0F | b >> 2 & 0x3030_3030);
    (_mm512_mul_ps(scale, half(d)), _mm512_mul_ps(min, negated(half(dmin))))
}

/// Each byte twice.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn twice(x: [u8; 8]) -> __m128i {
    let x = _mm_cvtsi64_si128(i64::from_le_bytes(x));
    _mm_unpacklo_epi8(x, x)
}

/// Each f16 twice.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn halves(x: &[[u8; 2]; 8]) -> __m512 {
    let x = load_16(bytemuck::cast_ref(x));
    let twice = _mm256_setr_epi16(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_cvtph_ps(_mm256_permutexvar_epi16(twice, _mm256_castsi128_si256(x)))
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn half(x: [u8; 2]) -> __m512 {
    _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(x).into())))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn negated(x: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_setzero_ps(), x)
}

/// A value for each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512bw")]
fn each_lane(a: i32, b: i32, c: i32, d: i32) -> __m512i {
    _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d)
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn lanes(x: [&[u8; 16]; 4]) -> __m512i {
    let v = _mm512_castsi128_si512(load_16(x[0]));
    let v = _mm512_inserti32x4::<1>(v, load_16(x[1]));
    let v = _mm512_inserti32x4::<2>(v, load_16(x[2]));
    _mm512_inserti32x4::<3>(v, load_16(x[3]))
}

#[inline]
#[target_feature(enable = "sse2")]
fn load_16(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_64(x: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_128(x: &[u8; 128]) -> [__m512i; 2] {
    let (a, b) = x.split_at(64);
    [a, b].map(|x| load_64(x.try_into().expect("64 bytes")))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_i16(x: &[i16; 32]) -> __m512i {
    load_64(bytemuck::cast_ref(x))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f32(x: &[f32; 16]) -> __m512 {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

/// A plain format: `BYTES` bytes hold 16 weights.
trait Floats<const BYTES: usize> {
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn widen(bytes: &[u8; BYTES]) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Floats<64> for F32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen(bytes: &[u8; 64]) -> __m512 {
        _mm512_castsi512_ps(load_64(bytes))
    }
}

impl Floats<32> for F16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen(bytes: &[u8; 32]) -> __m512 {
        _mm512_cvtph_ps(load_32(bytes))
    }
}

impl Floats<32> for Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen(bytes: &[u8; 32]) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_32(bytes))))
    }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

/// Weight and activation rows at a time in [`matvec_float`]: their sums fill half the registers.
const TILE: usize = 4;

#[target_feature(enable = "avx512bw,avx512vl")]
fn matvec_float<F: Floats<BYTES>, const BYTES: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    let row_bytes = n * BYTES / 16;
    for (t, rows) in w.chunks(TILE * row_bytes).enumerate() {
        for (c, x) in x.chunks(TILE * n).enumerate() {
            match (rows.len() == TILE * row_bytes, x.len() == TILE * n) {
                (true, true) => tile_float::<F, BYTES, TILE, TILE>(y, t * TILE, rows, c * TILE, x, n),
                (true, false) => {
                    for (i, x) in (c * TILE..).zip(x.chunks_exact(n)) {
                        tile_float::<F, BYTES, TILE, 1>(y, t * TILE, rows, i, x, n);
                    }
                }
                (false, _) => {
                    for (r, row) in (t * TILE..).zip(rows.chunks_exact(row_bytes)) {
                        for (i, x) in (c * TILE..).zip(x.chunks_exact(n)) {
                            tile_float::<F, BYTES, 1, 1>(y, r, row, i, x, n);
                        }
                    }
                }
            }
        }
    }
}

/// The product of weight rows `r..r + R` with activation rows `i..i + M`, all of `n` values.
#[target_feature(enable = "avx512bw,avx512vl")]
fn tile_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    rows: &[u8],
    i: usize,
    x: &[f32],
    n: usize,
) {
    let row_bytes = n * BYTES / 16;
    let w: [_; R] = std::array::from_fn(|r| rows[r * row_bytes..][..row_bytes].as_chunks::<BYTES>());
    let x: [_; M] = std::array::from_fn(|i| x[i * n..][..n].as_chunks::<16>());
    let mut totals = [[_mm512_setzero_ps(); M]; R];
    for k in 0..n / 16 {
        let w: [_; R] = std::array::from_fn(|r| &w[r].0[k]);
        let x: [_; M] = std::array::from_fn(|i| &x[i].0[k]);
        fma_float::<F, BYTES, R, M>(&mut totals, w, x);
    }
    if !n.is_multiple_of(16) {
        let w: [_; R] = std::array::from_fn(|r| padded(w[r].1));
        let x: [_; M] = std::array::from_fn(|i| padded(x[i].1));
        fma_float::<F, BYTES, R, M>(&mut totals, w.each_ref(), x.each_ref());
    }
    for (r, totals) in (r..).zip(&totals) {
        for (i, total) in (i..).zip(totals) {
            y.row(i)[r] = _mm512_reduce_add_ps(*total);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn fma_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    totals: &mut [[__m512; M]; R],
    w: [&[u8; BYTES]; R],
    x: [&[f32; 16]; M],
) {
    for r in 0..R {
        // SAFETY: this function has the features.
        let w = unsafe { F::widen(w[r]) };
        for i in 0..M {
            totals[r][i] = _mm512_fmadd_ps(w, load_f32(x[i]), totals[r][i]);
        }
    }
}

/// The values, then zeros.
fn padded<T: Copy + Default, const N: usize>(values: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Any format: expands 256 weights at a time.
#[target_feature(enable = "avx512bw,avx512vl")]
fn matvec_any(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    let format = dtype.float_format();
    let row_bytes = n / format.block_elems * format.block_bytes;
    let mut values = [0.0; 256];
    for (r, row) in w.chunks_exact(row_bytes).enumerate() {
        for (c, x) in x.chunks(COLUMNS * n).enumerate() {
            let mut totals = [_mm512_setzero_ps(); COLUMNS];
            for (k, blocks) in row.chunks(256 / format.block_elems * format.block_bytes).enumerate() {
                let values = &mut values[..blocks.len() / format.block_bytes * format.block_elems];
                (format.dequantize)(blocks, values);
                for (x, total) in x.chunks_exact(n).zip(&mut totals) {
                    for (w, x) in values.as_chunks().0.iter().zip(x[256 * k..].as_chunks().0) {
                        *total = _mm512_fmadd_ps(load_f32(w), load_f32(x), *total);
                    }
                }
            }
            for (i, total) in (c * COLUMNS..y.rows()).zip(totals) {
                y.row(i)[r] = _mm512_reduce_add_ps(total);
            }
        }
    }
}
