//! Products of weights with rows of generated tokens.
//!
//! A format of blocks of 32 only says how eight of them become bytes, scales and offsets ([`UnpackDot::unpack`]); the
//! product is the same for all (that of blocks of 256 is in `planes`). Its integers are 16-bit: `vpdpwssd`
//! multiplies as many weights per second by 16-bit activations as `vpdpbusd` does in two passes over
//! byte planes, and takes signed weights without corrections. The four 128-bit lanes hold four blocks
//! of 32, so that one conversion to `f32` and one multiply-add serve 128 weights. (Planes, two rows at a time as for
//! blocks of 256, are 6 % slower to 17 % faster from L2, and decode 4 to 10 % slower from memory; two threads, Zen 4.)
//!
//! Measured by `benches/matvec.rs` on one Zen 5 core that reads 31–38 GB/s (rows of 2,048, GB/s of weights from memory,
//! in brackets from L2): Q8_0 31 (49), Q4_0 26 (29), F16 29 (75), F32 31 (110). Zen 4, whose registers are half as wide
//! inside, from L2: Q8_0 35, Q4_0 22, Q5_0 17, IQ4_NL 18, MXFP4 16, and from memory on huge pages as much.

use super::elementwise::{F32x16, zero};
use super::planes;
use crate::arch::avx2::{self, each, joined, padded, prefetch};
use crate::arch::lanes::matvec::{Shape, matvec_kernels};
use crate::arch::{ActForm, Acts, BlockP16, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use bytemuck::Pod;
use half::{bf16, f16};
use std::arch::asm;
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let q16 = |kernel: MatvecFn| Matvec { form: ActForm::Q16, kernel };
    let p16 = |kernel: MatvecFn| Matvec { form: ActForm::P16, kernel };
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        DType::Q4_0 => q16(matvec::<BlockQ4_0>),
        DType::Q4_1 => q16(matvec::<BlockQ4_1>),
        DType::Q5_0 => q16(matvec::<BlockQ5_0>),
        DType::Q5_1 => q16(matvec::<BlockQ5_1>),
        DType::Q8_0 => q16(matvec::<BlockQ8_0>),
        DType::Q2_K => p16(planes::matvec::<BlockQ2K>),
        DType::Q3_K => p16(planes::matvec::<BlockQ3K>),
        DType::Q4_K => p16(planes::matvec::<BlockQ4K>),
        DType::Q5_K => p16(planes::matvec::<BlockQ5K>),
        DType::Q6_K => p16(planes::matvec::<BlockQ6K>),
        DType::IQ4_NL => q16(matvec::<BlockIq4Nl>),
        DType::IQ4_XS => p16(planes::matvec::<BlockIq4Xs>),
        DType::MXFP4 => q16(matvec::<BlockMxfp4>),
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

/// 256 weights: `scale·w + offset`.
struct Unpacked {
    /// Byte `j % 16` of lane `b / 2` of register `2·(b % 2) + j / 16` is value `j` of block `b` of 32.
    w: [__m512i; 4],
    /// Scale per 16 weights; the two halves of a block share one.
    scale: __m512,
    /// Offset per 16 weights, likewise.
    offset: __m512,
}

/// Blocks of 32 that hold 256 weights.
const BLOCKS: usize = BlockQ16::VALUES / 32;

/// A format of blocks of 32.
trait UnpackDot: Pod {
    /// Whether the bytes are signed.
    const SIGNED: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked;
}

/// How far ahead of their use weights are prefetched, in bytes, at least. From memory, rows of 1152 bytes reach
/// 0.72 of the streaming bandwidth with 1 KiB, 0.84 with 4 KiB, 0.91 with 8 KiB, 0.88 with 16 KiB (Zen 5). Decoding on
/// Zen 4 takes as long with 4 or 16 KiB, and a sixth longer with 2.
const AHEAD: usize = 8192;
/// See [`Shape`].
const SHAPE: Shape = Shape { short: 2048, prefetch: true };
matvec_kernels!(
    "avx512f,avx512bw,avx512vl,avx512dq", zero(), F32x16, SHAPE,
    sums: 2, rows: 8, activation_rows: 4
);

/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in L2 while all weight rows
/// of a task go by.
const MANY: usize = 32;
/// Weight rows that are multiplied by many activation rows at a time: as many as there are registers for.
const TWO: usize = 2;

#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn matvec<B: UnpackDot>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::Q16 { x, n } = *x else { unreachable!("the form this level asks for") };
    let (w, blocks, groups) = (bytemuck::cast_slice::<u8, B>(w), n / 32, BlockQ16::per_row(n));
    if x.len() > groups {
        let (tiles, last) = w.split_at(w.len() / blocks / TWO * TWO * blocks);
        for (c, x) in x.chunks(MANY * groups).enumerate() {
            many_rows::<B, TWO>(y, 0, tiles, c * MANY, x, n);
            many_rows::<B, 1>(y, tiles.len() / blocks, last, c * MANY, x, n);
        }
        return;
    }
    let mut padding = [B::zeroed(); BLOCKS];
    for (row, y) in w.chunks_exact(blocks).zip(y.row(0)) {
        let mut total = _mm512_setzero_ps();
        let mut ahead = row.as_ptr().cast::<i8>().wrapping_add(AHEAD.max(size_of_val(row)));
        for (k, x) in x.iter().enumerate() {
            ahead = prefetch(ahead, BLOCKS * size_of::<B>());
            total = _mm512_add_ps(total, product(&words_of(eight(row, k, &mut padding)), x));
        }
        *y = _mm512_reduce_add_ps(total);
    }
}

/// Products of weight rows of `n` values, the first of them row `first` and `R` at a time, with at most [`MANY`]
/// activation rows from row `i` on: the same sums as [`matvec`] computes for each, added in the same order.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn many_rows<B: UnpackDot, const R: usize>(
    y: &mut ColumnsMut<'_>,
    first: usize,
    w: &[B],
    i: usize,
    x: &[BlockQ16],
    n: usize,
) {
    let (blocks, groups) = (n / 32, BlockQ16::per_row(n));
    let mut totals = [[_mm512_setzero_ps(); R]; MANY];
    let totals = &mut totals[..x.len() / groups];
    let mut padding = [B::zeroed(); BLOCKS];
    for (t, w) in w.chunks_exact(R * blocks).enumerate() {
        let w: [_; R] = planes::rows_of(w, blocks);
        totals.fill([_mm512_setzero_ps(); R]);
        let mut ahead = w[R - 1].as_ptr().cast::<i8>().wrapping_add(AHEAD);
        for k in 0..groups {
            if i == 0 {
                ahead = prefetch(ahead, R * BLOCKS * size_of::<B>());
            }
            let (zero, none) = (_mm512_setzero_si512(), _mm512_setzero_ps());
            let mut weights = [Words { w: [[zero; 2]; 4], scale: none, offset: none }; R];
            for r in 0..R {
                weights[r] = words_of(eight(w[r], k, &mut padding));
            }
            for (j, totals) in totals.iter_mut().enumerate() {
                let x = &x[j * groups + k];
                for r in 0..R {
                    totals[r] = _mm512_add_ps(totals[r], product(&weights[r], x));
                }
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

/// [`Unpacked`] weights, widened to words.
#[derive(Clone, Copy)]
struct Words {
    w: [[__m512i; 2]; 4],
    scale: __m512,
    offset: __m512,
}

/// The blocks from `BLOCKS·k` of a row on; behind its end what `padding` holds: zeros, if it began as zeros and all its
/// rows have one length.
#[inline(always)]
fn eight<'a, B: UnpackDot>(row: &'a [B], k: usize, padding: &'a mut [B; BLOCKS]) -> &'a [B; BLOCKS] {
    let rest = &row[k * BLOCKS..];
    rest.first_chunk().unwrap_or_else(|| {
        padding[..rest.len()].copy_from_slice(rest);
        padding
    })
}

/// The weights of eight blocks. It has to be compiled into its callers, whose registers it fills, so it calls nothing
/// else.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn words_of<B: UnpackDot>(blocks: &[B; BLOCKS]) -> Words {
    // SAFETY: this function has the features.
    let Unpacked { w: [a, b, c, d], scale, offset } = unsafe { B::unpack(blocks) };
    let w = if B::SIGNED {
        [signed_words(a), signed_words(b), signed_words(c), signed_words(d)]
    } else {
        [words(a), words(b), words(c), words(d)]
    };
    Words { w, scale, offset }
}

/// `Σ (scale·w + offset)·x`, the sum spread over the lanes: one lane of 128 bits for each four blocks of 32 columns, in
/// which the even blocks are added first; the product of each four sums goes to one of its four lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
fn product(Words { w, scale, offset }: &Words, x: &BlockQ16) -> __m512 {
    let zero = _mm512_setzero_si512();
    // |w| ≤ 128, |x| ≤ 32767, eight products per lane: below 2²⁵.
    let scale = _mm512_mul_ps(*scale, load_f32(&x.d));
    let total = _mm512_mul_ps(*offset, load_f32(&x.s));
    let even = dot_words::<1>(dot_words::<0>(zero, w[0][0], x), w[0][1], x);
    let odd = dot_words::<5>(dot_words::<4>(zero, w[2][0], x), w[2][1], x);
    let even = dot_words::<3>(dot_words::<2>(even, w[1][0], x), w[1][1], x);
    let odd = dot_words::<7>(dot_words::<6>(odd, w[3][0], x), w[3][1], x);
    let total = scaled::<0b00_00_00_00>(total, even, scale);
    scaled::<0b10_10_10_10>(total, odd, scale)
}

/// `sum + Σ w·x` over the two words of each lane, with `x.q[J]`.
///
/// In assembly, because LLVM takes the intrinsic apart into a multiplication and an addition.
#[inline]
#[target_feature(enable = "avx512vnni")]
fn dot_words<const J: usize>(mut sum: __m512i, w: __m512i, x: &BlockQ16) -> __m512i {
    // SAFETY: reads the 64 bytes of `x.q[J]`; the CPU has the instruction.
    unsafe {
        asm!("vpdpwssd {}, {}, [{} + {}]", inout(zmm_reg) sum, in(zmm_reg) w, in(reg) x, const J * 64,
            options(pure, readonly, nostack, preserves_flags));
    }
    sum
}

/// `total + sum·scale`, where `WHICH` is a permutation that broadcasts one scale within each 128-bit lane.
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

impl UnpackDot for BlockQ4_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let scale = halves(each!(blocks.d));
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-8.0));
        Unpacked { w: nibbles(each!(blocks.qs)), scale, offset }
    }
}

impl UnpackDot for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let w = nibbles(each!(blocks.qs));
        Unpacked { w, scale: halves(each!(blocks.d)), offset: halves(each!(blocks.m)) }
    }
}

impl UnpackDot for BlockQ5_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let scale = halves(each!(blocks.d));
        let offset = _mm512_mul_ps(scale, _mm512_set1_ps(-16.0));
        let w = nibbles(each!(blocks.qs));
        Unpacked { w: with_fifth_bits(w, each!(blocks.qh)), scale, offset }
    }
}

impl UnpackDot for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        Unpacked { w, scale: halves(each!(blocks.d)), offset: halves(each!(blocks.m)) }
    }
}

impl UnpackDot for BlockQ8_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        Unpacked {
            w: bytes(each!(blocks.qs).map(bytemuck::cast_ref)),
            scale: halves(each!(blocks.d)),
            offset: _mm512_setzero_ps(),
        }
    }
}

impl UnpackDot for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let w = look_up(&IQ4_VALUES, nibbles(each!(blocks.qs)));
        Unpacked { w, scale: halves(each!(blocks.d)), offset: _mm512_setzero_ps() }
    }
}

impl UnpackDot for BlockMxfp4 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(blocks: &[Self; BLOCKS]) -> Unpacked {
        let w = look_up(&MXFP4_VALUES, nibbles(each!(blocks.qs)));
        let scale = power_of_two(_mm512_cvtepu8_epi32(twice(joined(each!(blocks.e)))));
        Unpacked { w, scale, offset: _mm512_setzero_ps() }
    }
}

/// [`BlockMxfp4::half_scale`] of exponents.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn power_of_two(e: __m512i) -> __m512 {
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x0020_0000), e))
}

/// The bytes of eight blocks; two times 16 each.
#[inline]
#[target_feature(enable = "avx512bw")]
fn bytes(qs: [&[[u8; 16]; 2]; 8]) -> [__m512i; 4] {
    [
        lanes([&qs[0][0], &qs[2][0], &qs[4][0], &qs[6][0]]),
        lanes([&qs[0][1], &qs[2][1], &qs[4][1], &qs[6][1]]),
        lanes([&qs[1][0], &qs[3][0], &qs[5][0], &qs[7][0]]),
        lanes([&qs[1][1], &qs[3][1], &qs[5][1], &qs[7][1]]),
    ]
}

/// Nibbles of blocks that hold value `j` in the low half of byte `j` and value `j + 16` in its high
/// half.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibbles(qs: [&[u8; 16]; 8]) -> [__m512i; 4] {
    let [a, b] = split_nibbles(lanes([qs[0], qs[2], qs[4], qs[6]]));
    let [c, d] = split_nibbles(lanes([qs[1], qs[3], qs[5], qs[7]]));
    [a, b, c, d]
}

/// Low and high nibbles.
#[inline]
#[target_feature(enable = "avx512bw")]
fn split_nibbles(x: __m512i) -> [__m512i; 2] {
    let nibble = _mm512_set1_epi8(15);
    [_mm512_and_si512(x, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(x), nibble)]
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits(low: [__m512i; 4], qh: [&[u8; 4]; 8]) -> [__m512i; 4] {
    let mut w = low;
    for (r, w) in w.iter_mut().enumerate() {
        // Half `r % 2` of every second block.
        let [a, b, c, d] = [qh[r / 2], qh[r / 2 + 2], qh[r / 2 + 4], qh[r / 2 + 6]];
        let half = |qh: &[u8; 4]| [qh[r % 2 * 2], qh[r % 2 * 2 + 1]];
        let has = four([half(a), half(b), half(c), half(d)]);
        *w = _mm512_mask_add_epi8(*w, has, *w, _mm512_set1_epi8(16));
    }
    w
}

#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up(values: &[i8; 16], codes: [__m512i; 4]) -> [__m512i; 4] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    let mut w = codes;
    for w in &mut w {
        *w = _mm512_shuffle_epi8(values, *w);
    }
    w
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
    let x = _mm_set_epi64x(four([*e, *f, *g, *h]).cast_signed(), four([*a, *b, *c, *d]).cast_signed());
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
        high[i] = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
    }
    let (high, low) = (planes::in_order(fourths(high)), planes::in_order(fourths(low)));
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
        let (low, high) = (_mm256_set_m128i(x[4 + q], x[q]), _mm256_set_m128i(x[12 + q], x[8 + q]));
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
