//! Products of weights with rows of generated tokens.
//!
//! A block format only says how 256 of its weights become bytes, 16 scales and 16 offsets
//! ([`UnpackDot::unpack`]); the product is the same for all. Its integers are 16-bit: `vpmaddwd`
//! takes signed weights and activations of any size without overflow, where the byte form would
//! need the activations in two planes, two instructions for each and care with signs. The two
//! 128-bit lanes hold two blocks of 32, so that one conversion to `f32` and one multiply-add serve
//! 64 weights.
//!
//! Measured by `benches/matvec.rs` on one Zen 5 core that reads 31–41 GB/s (rows of 2,048, GB/s of
//! weights from memory, in brackets from L2): Q4_K 19 (21), Q6_K 21 (21), Q8_0 28 (35), Q4_0 18
//! (19), F16 28 (41), F32 33 (81).

use super::elementwise::{F32x8, zero};
use super::unpack::{Groups, with_groups};
use crate::arch::acts::{ActForm, Acts, BlockQ16};
use crate::arch::gemm::prefetch_line;
use crate::arch::generic::matvec::{OneRow, plain_products};
use crate::arch::scalar;
use crate::arch::table::{Matvec, MatvecFn};
use crate::arch::view::ColumnsMut;
use crate::quant::*;
use bytemuck::Pod;
use half::{bf16, f16};
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType) -> Matvec {
    let f32 = |kernel: MatvecFn| Matvec {
        form: ActForm::F32,
        kernel,
    };
    macro_rules! q16 {
        ($block:ident) => {
            Matvec {
                form: ActForm::Q16,
                kernel: matvec::<$block, { $block::PER_256 }>,
            }
        };
    }
    match dtype {
        DType::F32 => f32(matvec_plain::<f32>),
        DType::F16 => f32(matvec_plain::<f16>),
        DType::BF16 => f32(matvec_plain::<bf16>),
        _ => with_groups!(dtype, q16, (scalar::KERNELS.matvec)(dtype)),
    }
}

/// 256 weights, `scale·w + offset`, in two halves.
struct Unpacked {
    /// Byte `j % 16` of lane `b % 4 / 2` of register `2·(b % 2) + j / 16` of half `b / 4` is value
    /// `j` of block `b` of 32.
    w: [[__m256i; 4]; 2],
    /// Scale per 16 weights.
    scale: [__m256; 2],
    /// Offset per 16 weights.
    offset: [__m256; 2],
}

/// A format whose `N` blocks hold 256 weights.
trait UnpackDot<const N: usize>: Pod {
    /// Whether each 16 weights have a scale of their own; otherwise each 32 share one.
    const SCALE_PER_16: bool = false;
    /// Whether the bytes are signed.
    const SIGNED: bool = false;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn unpack(blocks: &[Self; N]) -> Unpacked;
}

/// How far ahead of their use weights are prefetched, in bytes, at least; tuned at the AVX-512
/// level.
const AHEAD: usize = 8192;
plain_products!(
    "avx2,fma,f16c", zero(), F32x8,
    rows: 4, activation_rows: 3, rows_by_one: 4, OneRow { short: 0, ahead: None }
);

/// Activation rows that share the unpacking of weights. This many rows of 8192 values stay in the
/// L2 cache while all weight rows of a task go by.
const MANY: usize = 16;

#[target_feature(enable = "avx2,fma,f16c")]
fn matvec<B: UnpackDot<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    _: DType,
    w: &[u8],
    x: &Acts<'_>,
) {
    let Acts::Q16 { x, n } = *x else {
        unreachable!("the form this level asks for")
    };
    let (w, blocks, groups) = (
        bytemuck::cast_slice::<u8, B>(w),
        n * N / BlockQ16::VALUES,
        BlockQ16::per_row(n),
    );
    for (c, x) in x.chunks(MANY * groups).enumerate() {
        if x.len() > groups {
            many_rows(y, w, c * MANY, x, n);
            continue;
        }
        for (row, y) in w.chunks_exact(blocks).zip(y.row(c * MANY)) {
            let mut total = _mm256_setzero_ps();
            let mut ahead = row
                .as_ptr()
                .cast::<i8>()
                .wrapping_add(AHEAD.max(size_of_val(row)));
            for (k, x) in x.iter().enumerate() {
                ahead = prefetch(ahead, N * size_of::<B>());
                let weights = unpacked::<B, N>(row, k);
                for half in 0..2 {
                    total = _mm256_add_ps(
                        total,
                        product::<B, N>(&widened_half::<B, N>(&weights, half), x, half),
                    );
                }
            }
            *y = sum(total);
        }
    }
}

/// Products of weight rows of `n` values with at most [`MANY`] activation rows from row `i` on: the
/// same sums as [`matvec`] computes for each, added in the same order.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn many_rows<B: UnpackDot<N>, const N: usize>(
    y: &mut ColumnsMut<'_>,
    w: &[B],
    i: usize,
    x: &[BlockQ16],
    n: usize,
) {
    let (blocks, groups) = (n * N / BlockQ16::VALUES, BlockQ16::per_row(n));
    let mut totals = [_mm256_setzero_ps(); MANY];
    let totals = &mut totals[..x.len() / groups];
    for (r, row) in w.chunks_exact(blocks).enumerate() {
        totals.fill(_mm256_setzero_ps());
        let mut ahead = row
            .as_ptr()
            .cast::<i8>()
            .wrapping_add(AHEAD.max(size_of_val(row)));
        for k in 0..groups {
            if i == 0 {
                ahead = prefetch(ahead, N * size_of::<B>());
            }
            let weights = unpacked::<B, N>(row, k);
            let halves = [
                widened_half::<B, N>(&weights, 0),
                widened_half::<B, N>(&weights, 1),
            ];
            for (j, total) in totals.iter_mut().enumerate() {
                let x = &x[j * groups + k];
                *total = _mm256_add_ps(*total, product::<B, N>(&halves[0], x, 0));
                *total = _mm256_add_ps(*total, product::<B, N>(&halves[1], x, 1));
            }
        }
        for (j, total) in totals.iter().enumerate() {
            y.row(i + j)[r] = sum(*total);
        }
    }
}

/// The weights from block `N·k` of a row on, zeros after its end.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpacked<B: UnpackDot<N>, const N: usize>(row: &[B], k: usize) -> Unpacked {
    let rest = &row[k * N..];
    match rest.first_chunk() {
        // SAFETY: this function has the features.
        Some(blocks) => unsafe { B::unpack(blocks) },
        None => {
            let padded = std::array::from_fn(|b| rest.get(b).copied().unwrap_or(B::zeroed()));
            // SAFETY: as above.
            unsafe { B::unpack(&padded) }
        }
    }
}

/// Half of [`Unpacked`] weights, widened to words.
struct Half {
    w: [[__m256i; 2]; 4],
    scale: __m256,
    offset: __m256,
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widened_half<B: UnpackDot<N>, const N: usize>(weights: &Unpacked, half: usize) -> Half {
    let [a, b, c, d] = weights.w[half];
    let w = if B::SIGNED {
        [
            signed_words(a),
            signed_words(b),
            signed_words(c),
            signed_words(d),
        ]
    } else {
        [words(a), words(b), words(c), words(d)]
    };
    Half {
        w,
        scale: weights.scale[half],
        offset: weights.offset[half],
    }
}

/// Prefetches `bytes` from `p` on into the L2 cache; returns where they end. L1 supports fewer
/// outstanding misses: L2 is 1.5 times as fast for Q8_0 and F16 on Zen 4.
#[inline(always)]
pub(in crate::arch) fn prefetch(p: *const i8, bytes: usize) -> *const i8 {
    for line in 0..bytes.div_ceil(64) {
        prefetch_line(p.wrapping_add(line * 64).cast());
    }
    p.wrapping_add(bytes)
}

/// `Σ (scale·w + offset)·x` of half a block of activations, the sum spread over the lanes: each
/// 128-bit lane takes every second block of 32 columns, and adds the products of its two registers
/// of words in the order of columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn product<B: UnpackDot<N>, const N: usize>(
    Half { w, scale, offset }: &Half,
    x: &BlockQ16,
    half: usize,
) -> __m256 {
    let (d, s) = (&halves_of(&x.d)[half], &halves_of(&x.s)[half]);
    let sums = [
        dot_words::<0>(&w[0], x, half),
        dot_words::<1>(&w[1], x, half),
        dot_words::<2>(&w[2], x, half),
        dot_words::<3>(&w[3], x, half),
    ];
    let scale = _mm256_mul_ps(*scale, load_f32(d));
    let total = _mm256_mul_ps(*offset, load_f32(s));
    if B::SCALE_PER_16 {
        let total = scaled::<0b00_00_00_00>(total, sums[0], scale);
        let total = scaled::<0b01_01_01_01>(total, sums[1], scale);
        let total = scaled::<0b10_10_10_10>(total, sums[2], scale);
        scaled::<0b11_11_11_11>(total, sums[3], scale)
    } else {
        let total = scaled::<0b00_00_00_00>(total, _mm256_add_epi32(sums[0], sums[1]), scale);
        scaled::<0b10_10_10_10>(total, _mm256_add_epi32(sums[2], sums[3]), scale)
    }
}

/// `Σ w·x` over the four words of each lane, with half of `x.q[2J]` and `x.q[2J + 1]`.
///
/// |w| ≤ 128 and |x| ≤ 32767: two such sums stay below 2²⁵.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_words<const J: usize>(w: &[__m256i; 2], x: &BlockQ16, half: usize) -> __m256i {
    let even: &[[i16; 16]; 2] = bytemuck::cast_ref(&x.q[2 * J]);
    let odd: &[[i16; 16]; 2] = bytemuck::cast_ref(&x.q[2 * J + 1]);
    _mm256_add_epi32(
        _mm256_madd_epi16(w[0], load_i16(&even[half])),
        _mm256_madd_epi16(w[1], load_i16(&odd[half])),
    )
}

/// `total + sum·scale`, where `WHICH` is a permutation that broadcasts one scale within each
/// 128-bit lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scaled<const WHICH: i32>(total: __m256, sum: __m256i, scale: __m256) -> __m256 {
    _mm256_fmadd_ps(
        _mm256_cvtepi32_ps(sum),
        _mm256_permute_ps::<WHICH>(scale),
        total,
    )
}

/// The sum of all lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// Bytes 0, 2, 4… and bytes 1, 3, 5… as words.
#[inline]
#[target_feature(enable = "avx2")]
fn words(bytes: __m256i) -> [__m256i; 2] {
    [
        _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)),
        _mm256_srli_epi16::<8>(bytes),
    ]
}

/// As [`words`], signed.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_words(bytes: __m256i) -> [__m256i; 2] {
    [
        _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)),
        _mm256_srai_epi16::<8>(bytes),
    ]
}

/// References to a field of each of eight blocks. Not `map`: its closures would stay calls, because
/// `map` is not compiled for this level.
macro_rules! each {
    ($blocks:ident.$field:ident) => {
        [
            &$blocks[0].$field,
            &$blocks[1].$field,
            &$blocks[2].$field,
            &$blocks[3].$field,
            &$blocks[4].$field,
            &$blocks[5].$field,
            &$blocks[6].$field,
            &$blocks[7].$field,
        ]
    };
}
pub(in crate::arch) use each;

impl UnpackDot<8> for BlockQ4_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let scale = halves(each!(blocks.d));
        let offset = scaled_by(scale, -8.0);
        Unpacked {
            w: nibbles(each!(blocks.qs)),
            scale,
            offset,
        }
    }
}

impl UnpackDot<8> for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = nibbles(each!(blocks.qs));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: halves(each!(blocks.m)),
        }
    }
}

impl UnpackDot<8> for BlockQ5_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        let scale = halves(each!(blocks.d));
        let offset = scaled_by(scale, -16.0);
        Unpacked { w, scale, offset }
    }
}

impl UnpackDot<8> for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = with_fifth_bits(nibbles(each!(blocks.qs)), each!(blocks.qh));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: halves(each!(blocks.m)),
        }
    }
}

impl UnpackDot<8> for BlockQ8_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        Unpacked {
            w: bytes(each!(blocks.qs).map(bytemuck::cast_ref)),
            scale: halves(each!(blocks.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<8> for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = look_up(&IQ4_VALUES, nibbles(each!(blocks.qs)));
        Unpacked {
            w,
            scale: halves(each!(blocks.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<8> for BlockMxfp4 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(blocks: &[Self; 8]) -> Unpacked {
        let w = look_up(&MXFP4_VALUES, nibbles(each!(blocks.qs)));
        let [e0, e1] = widened(twice(joined(each!(blocks.e))));
        Unpacked {
            w,
            scale: [half_scale(e0), half_scale(e1)],
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

impl UnpackDot<1> for BlockQ2K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scales = load_16(&block.scales);
        let nibble = _mm_set1_epi8(15);
        let mins = _mm_and_si128(_mm_srli_epi16::<4>(scales), nibble);
        Unpacked {
            w: bit_pairs(&block.qs),
            scale: times(widened(_mm_and_si128(scales, nibble)), half(block.d)),
            offset: times(widened(mins), negated(half(block.dmin))),
        }
    }
}

impl UnpackDot<1> for BlockQ3K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scales = unpack_scales_q3_k(&block.scales);
        let scale = times(widened_signed(&scales), half(block.d));
        let (low, high) = (bit_pairs(&block.qs), block_bits(&block.hmask));
        Unpacked {
            w: merge::<2>(low, high),
            scale,
            offset: scaled_by(scale, -4.0),
        }
    }
}

impl UnpackDot<1> for BlockQ4K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block.d, block.dmin, &block.scales);
        Unpacked {
            w: nibble_pairs(&block.qs),
            scale,
            offset,
        }
    }
}

impl UnpackDot<1> for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let (scale, offset) = scales_mins(block.d, block.dmin, &block.scales);
        Unpacked {
            w: merge::<4>(nibble_pairs(&block.qs), block_bits(&block.qh)),
            scale,
            offset,
        }
    }
}

impl UnpackDot<1> for BlockQ6K {
    const SCALE_PER_16: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let scale = times(widened_signed(&block.scales), half(block.d));
        let [ql0, ql1]: &[[[u8; 16]; 4]; 2] = bytemuck::cast_ref(&block.ql);
        let low = [both_nibbles(ql0), both_nibbles(ql1)];
        Unpacked {
            w: merge::<4>(low, bit_pairs(&block.qh)),
            scale,
            offset: scaled_by(scale, -32.0),
        }
    }
}

impl UnpackDot<1> for BlockIq4Xs {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
        let low = _mm256_set1_epi32(i32::from_le_bytes(block.scales_l));
        let high = _mm256_set1_epi32(u16::from_le_bytes(block.scales_h).into());
        let scales = [
            six_bits(low, high, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            six_bits(low, high, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)),
        ];
        let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(&block.qs);
        Unpacked {
            w: look_up(&IQ4_VALUES, nibbles(qs.each_ref())),
            scale: times(scales, half(block.d)),
            offset: [_mm256_setzero_ps(); 2],
        }
    }
}

/// Formats that the panels unpack, too.
macro_rules! as_panels {
    ($($block:ident)*) => {$(
        impl UnpackDot<1> for $block {
            const SCALE_PER_16: bool = true;
            const SIGNED: bool = true;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn unpack([block]: &[Self; 1]) -> Unpacked {
                grouped(block)
            }
        }
    )*};
}
as_panels!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S BlockTq1_0 BlockTq2_0);

impl UnpackDot<4> for BlockNvfp4 {
    const SCALE_PER_16: bool = true;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack([a, b, c, d]: &[Self; 4]) -> Unpacked {
        let scales = [
            a.half_scales(),
            b.half_scales(),
            c.half_scales(),
            d.half_scales(),
        ];
        // SAFETY: this function has the features.
        let q = unsafe {
            [
                a.bytes(0),
                a.bytes(1),
                b.bytes(0),
                b.bytes(1),
                c.bytes(0),
                c.bytes(1),
                d.bytes(0),
                d.bytes(1),
            ]
        };
        in_order(bytemuck::cast_ref(&scales), &[0.0; 16], q)
    }
}

/// The groups of a block in the order of products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn grouped<B: Groups>(block: &B) -> Unpacked {
    // SAFETY: this function has the features.
    let (factors, q) = unsafe {
        let [a, b, c, d] = [
            block.bytes(0),
            block.bytes(1),
            block.bytes(2),
            block.bytes(3),
        ];
        let [e, f, g, h] = [
            block.bytes(4),
            block.bytes(5),
            block.bytes(6),
            block.bytes(7),
        ];
        (block.factors(), [a, b, c, d, e, f, g, h])
    };
    in_order(&factors.scale, &factors.offset, q)
}

/// Eight groups of 32 bytes in the order of products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_order(scale: &[f32; 16], offset: &[f32; 16], q: [__m256i; 8]) -> Unpacked {
    let mut w = [[_mm256_setzero_si256(); 4]; 2];
    for half in 0..2 {
        for odd in 0..2 {
            let (first, second) = (q[4 * half + odd], q[4 * half + odd + 2]);
            w[half][2 * odd] = _mm256_permute2x128_si256::<0x20>(first, second);
            w[half][2 * odd + 1] = _mm256_permute2x128_si256::<0x31>(first, second);
        }
    }
    let floats = |x: &[f32; 16]| [load_f32(&halves_of(x)[0]), load_f32(&halves_of(x)[1])];
    Unpacked {
        w,
        scale: floats(scale),
        offset: floats(offset),
    }
}

/// The bytes of eight blocks; two times 16 each.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes(qs: [&[[u8; 16]; 2]; 8]) -> [[__m256i; 4]; 2] {
    [
        [
            lanes(&qs[0][0], &qs[2][0]),
            lanes(&qs[0][1], &qs[2][1]),
            lanes(&qs[1][0], &qs[3][0]),
            lanes(&qs[1][1], &qs[3][1]),
        ],
        [
            lanes(&qs[4][0], &qs[6][0]),
            lanes(&qs[4][1], &qs[6][1]),
            lanes(&qs[5][0], &qs[7][0]),
            lanes(&qs[5][1], &qs[7][1]),
        ],
    ]
}

/// Nibbles of blocks that hold value `j` in the low half of byte `j` and value `j + 16` in its high
/// half.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(qs: [&[u8; 16]; 8]) -> [[__m256i; 4]; 2] {
    let [a, b] = split_nibbles(lanes(qs[0], qs[2]));
    let [c, d] = split_nibbles(lanes(qs[1], qs[3]));
    let [e, f] = split_nibbles(lanes(qs[4], qs[6]));
    let [g, h] = split_nibbles(lanes(qs[5], qs[7]));
    [[a, b, c, d], [e, f, g, h]]
}

/// Nibbles of pairs of blocks: the low halves of 32 bytes are one block, the high halves the next.
#[inline]
#[target_feature(enable = "avx2")]
fn nibble_pairs(qs: &[u8; 128]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(qs);
    let [a, c] = split_nibbles(lanes(&qs[0], &qs[2]));
    let [b, d] = split_nibbles(lanes(&qs[1], &qs[3]));
    let [e, g] = split_nibbles(lanes(&qs[4], &qs[6]));
    let [f, h] = split_nibbles(lanes(&qs[5], &qs[7]));
    [[a, b, c, d], [e, f, g, h]]
}

/// Low and high nibbles.
#[inline]
#[target_feature(enable = "avx2")]
fn split_nibbles(x: __m256i) -> [__m256i; 2] {
    let nibble = _mm256_set1_epi8(15);
    [
        _mm256_and_si256(x, nibble),
        _mm256_and_si256(_mm256_srli_epi16::<4>(x), nibble),
    ]
}

/// The low nibbles of each 16 bytes in the low lane, the high ones in the high lane.
#[inline]
#[target_feature(enable = "avx2")]
fn both_nibbles(qs: &[[u8; 16]; 4]) -> [__m256i; 4] {
    let (by, nibble) = (each_lane(0, 4), _mm256_set1_epi8(15));
    [
        shifted(load_twice(&qs[0]), by, nibble),
        shifted(load_twice(&qs[1]), by, nibble),
        shifted(load_twice(&qs[2]), by, nibble),
        shifted(load_twice(&qs[3]), by, nibble),
    ]
}

/// Bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`.
#[inline]
#[target_feature(enable = "avx2")]
fn bit_pairs(qs: &[u8; 64]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 4] = bytemuck::cast_ref(qs);
    let (even, odd, mask) = (each_lane(0, 4), each_lane(2, 6), _mm256_set1_epi8(3));
    let [a, b, c, d] = [
        load_twice(&qs[0]),
        load_twice(&qs[1]),
        load_twice(&qs[2]),
        load_twice(&qs[3]),
    ];
    [
        [
            shifted(a, even, mask),
            shifted(b, even, mask),
            shifted(a, odd, mask),
            shifted(b, odd, mask),
        ],
        [
            shifted(c, even, mask),
            shifted(d, even, mask),
            shifted(c, odd, mask),
            shifted(d, odd, mask),
        ],
    ]
}

/// Bit `b` of byte `i` for value `i` of block `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn block_bits(qs: &[u8; 32]) -> [[__m256i; 4]; 2] {
    let qs: &[[u8; 16]; 2] = bytemuck::cast_ref(qs);
    let [a, b] = [load_twice(&qs[0]), load_twice(&qs[1])];
    let by = [
        each_lane(0, 2),
        each_lane(1, 3),
        each_lane(4, 6),
        each_lane(5, 7),
    ];
    let bit = _mm256_set1_epi8(1);
    [
        [
            shifted(a, by[0], bit),
            shifted(b, by[0], bit),
            shifted(a, by[1], bit),
            shifted(b, by[1], bit),
        ],
        [
            shifted(a, by[2], bit),
            shifted(b, by[2], bit),
            shifted(a, by[3], bit),
            shifted(b, by[3], bit),
        ],
    ]
}

/// `x >> by & mask`.
#[inline]
#[target_feature(enable = "avx2")]
fn shifted(x: __m256i, by: __m256i, mask: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srlv_epi32(x, by), mask)
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx2")]
fn with_fifth_bits(low: [[__m256i; 4]; 2], qh: [&[u8; 4]; 8]) -> [[__m256i; 4]; 2] {
    // Each byte gets the byte of `qh` that holds its bit.
    let first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
    ));
    let second = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    ));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let mut w = low;
    for half in 0..2 {
        for odd in 0..2 {
            let b = 4 * half + odd;
            let qh = each_lane(i32::from_le_bytes(*qh[b]), i32::from_le_bytes(*qh[b + 2]));
            for (w, bytes) in w[half][2 * odd..][..2].iter_mut().zip([first, second]) {
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(qh, bytes), bit);
                let high = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(16));
                *w = _mm256_or_si256(*w, high);
            }
        }
    }
    w
}

#[inline]
#[target_feature(enable = "avx2")]
fn look_up(values: &[i8; 16], codes: [[__m256i; 4]; 2]) -> [[__m256i; 4]; 2] {
    let values = load_twice(bytemuck::cast_ref(values));
    let mut w = codes;
    for w in w.as_flattened_mut() {
        *w = _mm256_shuffle_epi8(values, *w);
    }
    w
}

/// `low | high << AT`, byte by byte; `high` must be small enough not to spill into the next byte.
#[inline]
#[target_feature(enable = "avx2")]
fn merge<const AT: i32>(low: [[__m256i; 4]; 2], high: [[__m256i; 4]; 2]) -> [[__m256i; 4]; 2] {
    let mut w = low;
    for (w, high) in w.as_flattened_mut().iter_mut().zip(high.as_flattened()) {
        *w = _mm256_or_si256(*w, _mm256_slli_epi16::<AT>(*high));
    }
    w
}

/// The scales of IQ4_XS for the blocks in `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn six_bits(low: __m256i, high: __m256i, b: __m256i) -> __m256i {
    let low = shifted(low, _mm256_slli_epi32::<2>(b), _mm256_set1_epi32(15));
    let high = shifted(high, _mm256_slli_epi32::<1>(b), _mm256_set1_epi32(3));
    _mm256_sub_epi32(
        _mm256_or_si256(low, _mm256_slli_epi32::<4>(high)),
        _mm256_set1_epi32(32),
    )
}

/// [`BlockMxfp4::half_scale`].
#[inline]
#[target_feature(enable = "avx2")]
fn half_scale(e: __m256i) -> __m256 {
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
}

/// Scales and offsets of Q4_K and Q5_K, as [`unpack_scales_mins`] describes them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> ([__m256; 2], [__m256; 2]) {
    let [a, b, c]: [[u8; 4]; 3] = bytemuck::cast(*packed);
    let (a, b, c) = (
        u32::from_le_bytes(a),
        u32::from_le_bytes(b),
        u32::from_le_bytes(c),
    );
    let scale = low_six_bits(a, c & 0x0F0F_0F0F | a >> 2 & 0x3030_3030);
    let min = low_six_bits(b, c >> 4 & 0x0F0F_0F0F | b >> 2 & 0x3030_3030);
    (times(scale, half(d)), times(min, negated(half(dmin))))
}

/// The low six bits of four bytes, then four more bytes; each twice.
#[inline]
#[target_feature(enable = "avx2")]
fn low_six_bits(low: u32, high: u32) -> [__m256i; 2] {
    widened(twice(u64::from(low & 0x3F3F_3F3F) | u64::from(high) << 32))
}

/// Each byte twice.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(x: u64) -> __m128i {
    let x = _mm_cvtsi64_si128(x.cast_signed());
    _mm_unpacklo_epi8(x, x)
}

/// Eight bytes in one word. `from_le_bytes` would go through memory here, and stall.
#[inline(always)]
pub(in crate::arch) fn joined(x: [&u8; 8]) -> u64 {
    let [a, b, c, d, e, f, g, h] = x;
    let low = u32::from(*a) | u32::from(*b) << 8 | u32::from(*c) << 16 | u32::from(*d) << 24;
    let high = u32::from(*e) | u32::from(*f) << 8 | u32::from(*g) << 16 | u32::from(*h) << 24;
    u64::from(low) | u64::from(high) << 32
}

/// Unsigned bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widened(x: __m128i) -> [__m256i; 2] {
    [
        _mm256_cvtepu8_epi32(x),
        _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

/// Signed bytes as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widened_signed(x: &[i8; 16]) -> [__m256i; 2] {
    let x = load_16(bytemuck::cast_ref(x));
    [
        _mm256_cvtepi8_epi32(x),
        _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn times(x: [__m256i; 2], factor: __m256) -> [__m256; 2] {
    [
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[0]), factor),
        _mm256_mul_ps(_mm256_cvtepi32_ps(x[1]), factor),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn scaled_by(x: [__m256; 2], factor: f32) -> [__m256; 2] {
    [
        _mm256_mul_ps(x[0], _mm256_set1_ps(factor)),
        _mm256_mul_ps(x[1], _mm256_set1_ps(factor)),
    ]
}

/// Each f16 twice.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves(x: [&[u8; 2]; 8]) -> [__m256; 2] {
    let x = load_16(bytemuck::cast_ref(&x.map(|x| *x)));
    [
        _mm256_cvtph_ps(_mm_unpacklo_epi16(x, x)),
        _mm256_cvtph_ps(_mm_unpackhi_epi16(x, x)),
    ]
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half(x: [u8; 2]) -> __m256 {
    _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(x).into(),
    )))
}

#[inline]
#[target_feature(enable = "avx2")]
fn negated(x: __m256) -> __m256 {
    _mm256_sub_ps(_mm256_setzero_ps(), x)
}

/// A value for each 128-bit lane.
#[inline]
#[target_feature(enable = "avx2")]
fn each_lane(a: i32, b: i32) -> __m256i {
    _mm256_setr_epi32(a, a, a, a, b, b, b, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn lanes(a: &[u8; 16], b: &[u8; 16]) -> __m256i {
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load_16(a)), load_16(b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_twice(x: &[u8; 16]) -> __m256i {
    _mm256_broadcastsi128_si256(load_16(x))
}

fn halves_of(x: &[f32; 16]) -> &[[f32; 8]; 2] {
    bytemuck::cast_ref(x)
}

#[inline]
#[target_feature(enable = "sse2")]
fn load_16(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_i16(x: &[i16; 16]) -> __m256i {
    load_32(bytemuck::cast_ref(x))
}

#[inline]
#[target_feature(enable = "avx")]
fn load_f32(x: &[f32; 8]) -> __m256 {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "sse2")]
fn store_i16(to: &mut [i16; 8], x: __m128i) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) }
}

/// The values, padded with zeros.
pub(in crate::arch) fn padded<T: Copy + Default, const N: usize>(values: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Rounds a row of activations, with exactly the results of the scalar level.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_256(x, block),
            None => quantize_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_256(x: &[f32; 256], block: &mut BlockQ16) {
    // Evens, then odds, of each 128-bit lane's words.
    let evens_odds = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
    ));
    let magnitude = _mm256_set1_epi32(i32::MAX);
    let x: &[[[f32; 8]; 4]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [
            load_f32(&x[0]),
            load_f32(&x[1]),
            load_f32(&x[2]),
            load_f32(&x[3]),
        ];
        let mut max = _mm256_setzero_si256();
        for x in x {
            max = _mm256_max_epu32(max, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
        }
        let max = _mm_max_epu32(
            _mm256_castsi256_si128(max),
            _mm256_extracti128_si256::<1>(max),
        );
        let max = _mm_max_epu32(max, _mm_unpackhi_epi64(max, max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<1>(max));
        let (d, inverse) = BlockQ16::scale(_mm_cvtsi128_si32(max).cast_unsigned());
        for (h, x) in [[x[0], x[1]], [x[2], x[3]]].into_iter().enumerate() {
            let (low, high) = (rounded(x[0], inverse), rounded(x[1], inverse));
            // Words of the low and high eight values, in lanes (low 4, high 4 | low 4, high 4).
            let words = _mm256_shuffle_epi8(_mm256_packs_epi32(low, high), evens_odds);
            // Quarters of words: (0 2, 8 10, 1 3, 9 11 | 4 6, 12 14, 5 7, 13 15).
            let words =
                _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            let (row, column) = BlockQ16::position(32 * b + 16 * h);
            store_i16(
                block.q[row][column..].first_chunk_mut().expect("8 of 32"),
                _mm256_castsi256_si128(words),
            );
            store_i16(
                block.q[row + 1][column..]
                    .first_chunk_mut()
                    .expect("8 of 32"),
                _mm256_extracti128_si256::<1>(words),
            );
            let sum = _mm256_add_epi32(low, high);
            let sum = _mm_add_epi32(
                _mm256_castsi256_si128(sum),
                _mm256_extracti128_si256::<1>(sum),
            );
            let sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<1>(sum));
            block.d[2 * b + h] = d;
            block.s[2 * b + h] = d * _mm_cvtsi128_si32(sum) as f32;
        }
    }
}

/// `x·inverse` to the nearest integer; NaN becomes 0.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(x: __m256, inverse: f32) -> __m256i {
    let x = _mm256_mul_ps(x, _mm256_set1_ps(inverse));
    let is_number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(x, x));
    _mm256_and_si256(_mm256_cvtps_epi32(x), is_number)
}
