//! Products of weights with an activation row, and with a few where a format has no strips.
//!
//! A block format only says how 256 of its weights become unsigned bytes, scales and offsets ([`Weights`]); the
//! product is the same for all. Activations are 16-bit integers in two planes of bytes ([`BlockP16`]): `vpdpbusd`
//! multiplies as many weights by both planes as `vpdpwssd` by words, but takes bytes as they are. What makes signed
//! weights unsigned is taken from the sums again, in integers. The order of weights and activations is such that a
//! lane of 32 bits sums the products of 16 values that share a scale, and nothing is added across lanes before it is
//! scaled.
//!
//! Measured by `benches/matvec.rs` on one Zen 4 thread (rows of 2,048, GB/s of weights from L2; multiplications of
//! `vpdpbusd` alone would allow 66 of Q4_K): Q4_K 24, Q6_K 28, Q8_0 33, Q4_0 24, Q5_K 20, IQ4_XS 21, IQ4_NL 21,
//! Q5_0 15, F16 44. From memory on huge pages, which this thread reads at 32: Q4_K 22, Q6_K 26, Q4_0 22, F32 31.

use super::strip::strip_for;
use crate::arch::avx2::{each, joined, padded, prefetch};
use crate::arch::{ActForm, Acts, BlockP16, BlockQ16, ColumnsMut, Matvec, MatvecFn};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

pub(super) fn matvec_for(dtype: DType, m: usize) -> Matvec {
    if m > 1
        && let Some(strips) = strip_for(dtype)
    {
        return strips;
    }
    let p16 = |kernel: MatvecFn| Matvec { form: ActForm::P16, kernel };
    let f32 = |kernel: MatvecFn| Matvec { form: ActForm::F32, kernel };
    match dtype {
        DType::F32 => f32(matvec_float::<F32, 128>),
        DType::F16 => f32(matvec_float::<F16, 64>),
        DType::BF16 => f32(matvec_float::<Bf16, 64>),
        DType::Q4_0 => p16(matvec::<BlockQ4_0, 8>),
        DType::Q4_1 => p16(matvec::<BlockQ4_1, 8>),
        DType::Q5_0 => p16(matvec::<BlockQ5_0, 8>),
        DType::Q5_1 => p16(matvec::<BlockQ5_1, 8>),
        DType::Q8_0 => p16(matvec::<BlockQ8_0, 8>),
        DType::Q2_K => p16(matvec::<BlockQ2K, 1>),
        DType::Q3_K => p16(matvec::<BlockQ3K, 1>),
        DType::Q4_K => p16(matvec::<BlockQ4K, 1>),
        DType::Q5_K => p16(matvec::<BlockQ5K, 1>),
        DType::Q6_K => p16(matvec::<BlockQ6K, 1>),
        DType::IQ4_NL => p16(matvec::<BlockIq4Nl, 8>),
        DType::IQ4_XS => p16(matvec::<BlockIq4Xs, 1>),
        DType::MXFP4 => p16(matvec::<BlockMxfp4, 8>),
        _ => f32(matvec_any),
    }
}

/// A format whose `N` blocks hold 256 weights, `scale·(q − BIAS) + offset` with bytes `q ≥ 0`.
trait Weights<const N: usize>: Pod {
    /// Factors of each 32 weights, or of each 16 in the order of [`BlockP16::lane`].
    type Factors: Factors;
    /// See above.
    const BIAS: i32 = 0;
    /// Whether there are offsets.
    const OFFSETS: bool = false;
    /// Whether memory is the limit with one row at a time, too, which it then reads faster than [`TILE`].
    const SINGLE: bool = false;

    /// The bytes, in the order of [`BlockP16`].
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn bytes(blocks: &[Self; N]) -> [__m512i; 4];

    /// Scales and offsets.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn factors(blocks: &[Self; N]) -> [Self::Factors; 2];
}

/// A register with a number for each scale of 256 weights.
trait Factors: Copy {
    /// Sums of products, given those of each lane of 16.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn of(lanes: __m512i) -> Self;

    /// Scales of activations.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn scales(x: &BlockP16) -> Self;

    /// What offsets of the weights are multiplied by.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn totals(x: &BlockP16) -> Self;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn zero() -> Self;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn add(self, other: Self) -> Self;

    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn mul(self, other: Self) -> Self;

    /// `self·b + c`.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;

    /// The sum of all numbers.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn sum(self) -> f32;
}

macro_rules! factors {
    ($register:ty, of: |$lanes:ident| $of:expr, scales: |$d:ident| $scales:expr, totals: |$s:ident| $totals:expr,
     $zero:ident, $add:ident, $mul:ident, $mul_add:ident, sum: |$x:ident| $sum:expr) => {
        impl Factors for $register {
            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn of($lanes: __m512i) -> Self {
                $of
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn scales($d: &BlockP16) -> Self {
                $scales
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn totals($s: &BlockP16) -> Self {
                $totals
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn zero() -> Self {
                $zero()
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn add(self, other: Self) -> Self {
                $add(self, other)
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn mul(self, other: Self) -> Self {
                $mul(self, other)
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                $mul_add(self, b, c)
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn sum(self) -> f32 {
                let $x = self;
                $sum
            }
        }
    };
}
factors!(
    __m256,
    of: |lanes| {
        let halves = [_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes)];
        _mm256_cvtepi32_ps(_mm256_add_epi32(halves[0], halves[1]))
    },
    scales: |x| load_eight(&x.d),
    totals: |x| load_eight(&x.s),
    _mm256_setzero_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_fmadd_ps,
    sum: |x| _mm512_reduce_add_ps(_mm512_zextps256_ps512(x))
);
factors!(
    __m512,
    of: |lanes| _mm512_cvtepi32_ps(lanes),
    scales: |x| _mm512_broadcast_f32x8(load_eight(&x.d)),
    totals: |x| _mm512_mul_ps(_mm512_cvtepi32_ps(load_i32(&x.sums)), _mm512_broadcast_f32x8(load_eight(&x.d))),
    _mm512_setzero_ps, _mm512_add_ps, _mm512_mul_ps, _mm512_fmadd_ps,
    sum: |x| _mm512_reduce_add_ps(x)
);

/// Weight rows of blocks at a time: the steps of one wait for each other. From L2 (Zen 4) two at a time go 1.1 times
/// as fast as one, four 1.1 to 1.3 times.
const TILE: usize = 4;
/// Weight rows that stay in the L2 cache while several activation rows are multiplied by them.
const ROWS: usize = 8;
/// Activation rows at a time.
const COLUMNS: usize = 16;
/// How far ahead of their use weights are prefetched, in bytes, at least. Decoding with one thread (Zen 4) gains up to
/// 4 % from 16 KiB instead of 8 KiB, and nothing from 32 KiB.
const AHEAD: usize = 16 << 10;
/// Longest activation row of which one weight row at a time is multiplied. A longer one, of `f32`, leaves the L1
/// cache before the next weight row comes; with several rows at a time 8192 values take half as long (Zen 4),
/// 2048 a fifth longer.
const SHORT: usize = 2048;

#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
fn matvec<B: Weights<N>, const N: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::P16 { x, n } = *x else { unreachable!("the form this level asks for") };
    let (w, blocks) = (bytemuck::cast_slice::<u8, B>(w), n * N / BlockP16::VALUES);
    for (i, x) in x.chunks_exact(BlockP16::per_row(n)).enumerate() {
        for (w, y) in w.chunks(TILE * blocks).zip(y.row(i).chunks_mut(TILE)) {
            if !B::SINGLE
                && let Some(y) = y.first_chunk_mut()
            {
                rows::<B, N, TILE>(y, w, x);
            } else {
                for (w, y) in w.chunks_exact(blocks).zip(y) {
                    rows::<B, N, 1>(std::array::from_mut(y), w, x);
                }
            }
        }
    }
}

/// The products of `R` weight rows with an activation row.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
fn rows<B: Weights<N>, const N: usize, const R: usize>(y: &mut [f32; R], w: &[B], x: &[BlockP16]) {
    let blocks = w.len() / R;
    let w: [_; R] = std::array::from_fn(|r| w[r * blocks..][..blocks].as_chunks::<N>());
    // SAFETY: this function has the features.
    let mut totals = [unsafe { B::Factors::zero() }; R];
    let mut ahead = w[R - 1].0.as_ptr().cast::<i8>().wrapping_add(AHEAD);
    for (k, x) in x.iter().enumerate() {
        ahead = prefetch(ahead, R * N * size_of::<B>());
        if k < blocks / N {
            accumulate(&mut totals, std::array::from_fn(|r| &w[r].0[k]), x);
        } else {
            let padded: [[B; N]; R] =
                std::array::from_fn(|r| std::array::from_fn(|b| w[r].1.get(b).copied().unwrap_or(B::zeroed())));
            accumulate(&mut totals, padded.each_ref(), x);
        }
    }
    for r in 0..R {
        // SAFETY: this function has the features.
        y[r] = unsafe { totals[r].sum() };
    }
}

/// Adds the products of 256 weights of each row with as many activations.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
fn accumulate<B: Weights<N>, const N: usize, const R: usize>(
    totals: &mut [B::Factors; R],
    w: [&[B; N]; R],
    x: &BlockP16,
) {
    // SAFETY: this function has the features.
    unsafe {
        let bias = _mm512_mullo_epi32(load_i32(&x.sums), _mm512_set1_epi32(-B::BIAS));
        let mut q = [[bias; 4]; R];
        for r in 0..R {
            q[r] = B::bytes(w[r]);
        }
        // 16 products of |q| ≤ 255 and |x| ≤ 2¹⁵ in a lane, and 16·BIAS·2¹⁵: below 2²⁸.
        let (mut high, mut low) = ([_mm512_setzero_si512(); R], [bias; R]);
        for j in 0..4 {
            for r in 0..R {
                high[r] = dot_bytes(high[r], q[r][j], &x.high[j]);
                low[r] = dot_bytes(low[r], q[r][j], &x.low[j]);
            }
        }
        for r in 0..R {
            let sums = B::Factors::of(_mm512_add_epi32(_mm512_slli_epi32::<8>(high[r]), low[r]));
            let [scale, offset] = B::factors(w[r]);
            let scale = scale.mul(B::Factors::scales(x));
            totals[r] = if B::OFFSETS {
                totals[r].add(sums.mul_add(scale, offset.mul(B::Factors::totals(x))))
            } else {
                sums.mul_add(scale, totals[r])
            };
        }
    }
}

/// `sum + Σ q·x` over the four bytes of each lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
fn dot_bytes(sum: __m512i, q: __m512i, x: &[[i8; 4]; 16]) -> __m512i {
    _mm512_dpbusd_epi32(sum, q, load_64(bytemuck::cast_ref(x)))
}

/// Formats: their constants, their bytes, their scales and offsets.
macro_rules! weights {
    ($block:ident, $n:literal, $factors:ident, { $($const:ident: $type:ident = $value:expr),* },
     |$w:pat_param| $bytes:expr, |$f:pat_param| $both:expr) => {
        impl Weights<$n> for $block {
            type Factors = $factors;
            $(const $const: $type = $value;)*

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn bytes($w: &[Self; $n]) -> [__m512i; 4] {
                $bytes
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn factors($f: &[Self; $n]) -> [$factors; 2] {
                $both
            }
        }
    };
}
weights!(
    BlockQ4_0, 8, __m256, { BIAS: i32 = 8 },
    |blocks| nibbles(joined_16(each!(blocks.qs))),
    |blocks| [halves(each!(blocks.d)), _mm256_setzero_ps()]
);
weights!(
    BlockQ4_1, 8, __m256, { OFFSETS: bool = true },
    |blocks| nibbles(joined_16(each!(blocks.qs))),
    |blocks| [halves(each!(blocks.d)), halves(each!(blocks.m))]
);
weights!(
    BlockQ5_0, 8, __m256, { BIAS: i32 = 16 },
    |blocks| with_fifth_bits(nibbles(joined_16(each!(blocks.qs))), each!(blocks.qh)),
    |blocks| [halves(each!(blocks.d)), _mm256_setzero_ps()]
);
weights!(
    BlockQ5_1, 8, __m256, { OFFSETS: bool = true },
    |blocks| with_fifth_bits(nibbles(joined_16(each!(blocks.qs))), each!(blocks.qh)),
    |blocks| [halves(each!(blocks.d)), halves(each!(blocks.m))]
);
weights!(
    BlockQ8_0, 8, __m256, { BIAS: i32 = 128, SINGLE: bool = true },
    |blocks| whole_bytes(each!(blocks.qs)),
    |blocks| [halves(each!(blocks.d)), _mm256_setzero_ps()]
);
weights!(
    BlockIq4Nl, 8, __m256, { BIAS: i32 = 128 },
    |blocks| look_up(&IQ4_VALUES, nibbles(joined_16(each!(blocks.qs)))),
    |blocks| [halves(each!(blocks.d)), _mm256_setzero_ps()]
);
weights!(
    BlockMxfp4, 8, __m256, { BIAS: i32 = 128 },
    |blocks| look_up(&MXFP4_VALUES, nibbles(joined_16(each!(blocks.qs)))),
    |blocks| {
        // As [`BlockMxfp4::half_scale`].
        let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(joined(each!(blocks.e)).cast_signed()));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let small = _mm256_cmplt_epi32_mask(e, _mm256_set1_epi32(2));
        let scale = _mm256_mask_sllv_epi32(normal, small, _mm256_set1_epi32(0x0020_0000), e);
        [_mm256_castsi256_ps(scale), _mm256_setzero_ps()]
    }
);
weights!(
    BlockQ2K, 1, __m512, { OFFSETS: bool = true },
    |[block]| bit_pairs(&block.qs),
    |[block]| {
        let scales = evens_odds(load_16(&block.scales));
        let nibble = _mm_set1_epi8(15);
        let scale = _mm512_cvtepu8_epi32(_mm_and_si128(scales, nibble));
        let offset = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(scales), nibble));
        [
            _mm512_mul_ps(_mm512_cvtepi32_ps(scale), half(block.d)),
            _mm512_mul_ps(_mm512_cvtepi32_ps(offset), negated(half(block.dmin))),
        ]
    }
);
weights!(
    BlockQ3K, 1, __m512, { BIAS: i32 = 4 },
    |[block]| merge(bit_pairs(&block.qs), block_bits::<2>(&block.hmask), _mm512_set1_epi8(4)),
    |[block]| signed_scales(&unpack_scales_q3_k(&block.scales), block.d)
);
weights!(
    BlockQ4K, 1, __m256, { OFFSETS: bool = true },
    |[block]| nibble_pairs(&block.qs),
    |[block]| scales_mins(block.d, block.dmin, &block.scales)
);
weights!(
    BlockQ5K, 1, __m256, { OFFSETS: bool = true },
    |[block]| merge(nibble_pairs(&block.qs), block_bits::<4>(&block.qh), _mm512_set1_epi8(16)),
    |[block]| scales_mins(block.d, block.dmin, &block.scales)
);
weights!(
    BlockQ6K, 1, __m512, { BIAS: i32 = 32 },
    |[block]| {
        // Blocks 0 and 2 of each four are the nibbles of the first 32 bytes, 1 and 3 of the next 32.
        const WORDS: [[i32; 16]; 4] = registers(by_lane(4, [8, 0, 16]));
        const SHIFT: [i32; 16] = by_lane(0, [0, 4, 0]);
        let low = shifted(words(load_128(&block.ql), &WORDS), &SHIFT, 15);
        merge(low, rotated_pairs::<4>(&block.qh), _mm512_set1_epi8(0x30))
    },
    |[block]| signed_scales(&block.scales, block.d)
);
weights!(
    BlockIq4Xs, 1, __m256, { BIAS: i32 = 128 },
    |[block]| look_up(&IQ4_VALUES, nibbles(load_128(&block.qs))),
    |[block]| {
        let b = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let low = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(block.scales_l)), _mm256_slli_epi32::<2>(b));
        let high = _mm256_set1_epi32(u16::from_le_bytes(block.scales_h).into());
        let high = _mm256_srlv_epi32(high, _mm256_slli_epi32::<1>(b));
        let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        let scale = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        let d = _mm512_castps512_ps256(half(block.d));
        [_mm256_mul_ps(_mm256_cvtepi32_ps(scale), d), _mm256_setzero_ps()]
    }
);

/// A number for each lane of [`BlockP16`]: `half` for the second half of a block, and what the bits of the block's
/// index stand for.
const fn by_lane(half: i32, block: [i32; 3]) -> [i32; 16] {
    let mut numbers = [0; 16];
    let mut b = 0;
    while b < 8 {
        let first = block[0] * (b as i32 & 1) + block[1] * (b as i32 >> 1 & 1) + block[2] * (b as i32 >> 2);
        numbers[BlockP16::lane(b, 0)] = first;
        numbers[BlockP16::lane(b, 1)] = first + half;
        b += 1;
    }
    numbers
}

const fn plus(numbers: [i32; 16], more: i32) -> [i32; 16] {
    let mut numbers = numbers;
    let mut i = 0;
    while i < 16 {
        numbers[i] += more;
        i += 1;
    }
    numbers
}

/// Where the registers of [`BlockP16`] find their words of 32 bits, given where the first one does.
const fn registers(first: [i32; 16]) -> [[i32; 16]; 4] {
    [first, plus(first, 1), plus(first, 2), plus(first, 3)]
}

/// The words of two registers that `at` counts.
#[inline]
#[target_feature(enable = "avx512bw")]
fn words(q: [__m512i; 2], at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for (w, at) in w.iter_mut().zip(at) {
        *w = _mm512_permutex2var_epi32(q[0], load_i32(at), q[1]);
    }
    w
}

/// As [`words`], of one register.
#[inline]
#[target_feature(enable = "avx512bw")]
fn words_of_one(q: __m512i, at: &[[i32; 16]; 4]) -> [__m512i; 4] {
    let mut w = [_mm512_setzero_si512(); 4];
    for (w, at) in w.iter_mut().zip(at) {
        *w = _mm512_permutexvar_epi32(load_i32(at), q);
    }
    w
}

/// `w >> by & mask`, where nothing that a byte gets from the next one is left by the mask.
#[inline]
#[target_feature(enable = "avx512bw")]
fn shifted(w: [__m512i; 4], by: &[i32; 16], mask: i8) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_and_si512(_mm512_srlv_epi32(*w, load_i32(by)), _mm512_set1_epi8(mask));
    }
    w
}

/// Bits of words turned to the right.
#[inline]
#[target_feature(enable = "avx512bw")]
fn rotated(w: [__m512i; 4], by: &[i32; 16]) -> [__m512i; 4] {
    let mut w = w;
    for w in &mut w {
        *w = _mm512_rorv_epi32(*w, load_i32(by));
    }
    w
}

/// Nibbles of eight times 16 bytes: byte `j` has value `j` of a block in its low half and value `j + 16` in its high
/// half.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibbles(qs: [__m512i; 2]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = registers(by_lane(0, [4, 8, 16]));
    const SHIFT: [i32; 16] = by_lane(4, [0; 3]);
    shifted(words(qs, &WORDS), &SHIFT, 15)
}

/// Nibbles of pairs of blocks: the low halves of 32 bytes are one block, the high halves the next.
#[inline]
#[target_feature(enable = "avx512bw")]
fn nibble_pairs(qs: &[u8; 128]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = registers(by_lane(4, [0, 8, 16]));
    const SHIFT: [i32; 16] = by_lane(0, [4, 0, 0]);
    shifted(words(load_128(qs), &WORDS), &SHIFT, 15)
}

/// Bits `2j` and `2j + 1` of byte `32h + i` for value `i` of block `4h + j`.
#[inline]
#[target_feature(enable = "avx512bw")]
fn bit_pairs(qs: &[u8; 64]) -> [__m512i; 4] {
    const SHIFT: [i32; 16] = by_lane(0, [2, 4, 0]);
    shifted(words_of_one(load_64(qs), &PAIR_WORDS), &SHIFT, 3)
}

/// Which word of those `bit_pairs` and `rotated_pairs` read.
const PAIR_WORDS: [[i32; 16]; 4] = registers(by_lane(4, [0, 0, 8]));

/// As [`bit_pairs`], at bits `AT` and `AT + 1` of bytes whose other bits are anything.
#[inline]
#[target_feature(enable = "avx512bw")]
fn rotated_pairs<const AT: i32>(qs: &[u8; 64]) -> [__m512i; 4] {
    let by = const { plus(by_lane(0, [2, 4, 0]), -AT) };
    rotated(words_of_one(load_64(qs), &PAIR_WORDS), &by)
}

/// Bit `b` of byte `i` for value `i` of block `b`, at bit `AT` of bytes whose other bits are anything.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn block_bits<const AT: i32>(qs: &[u8; 32]) -> [__m512i; 4] {
    const WORDS: [[i32; 16]; 4] = registers(by_lane(4, [0; 3]));
    let by = const { plus(by_lane(0, [1, 2, 4]), -AT) };
    rotated(words_of_one(_mm512_castsi256_si512(load_32(qs)), &WORDS), &by)
}

/// The signed bytes of eight blocks, 128 more.
#[inline]
#[target_feature(enable = "avx512bw")]
fn whole_bytes(qs: [&[i8; 32]; 8]) -> [__m512i; 4] {
    // Words 0 and 1 of four times 16 bytes, or words 2 and 3; then one of them of twice as many.
    const TWO: [i32; 16] = [0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29];
    const ONE: [i32; 16] = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23];
    let (first, second) = (load_i32(&TWO), load_i32(const { &plus(TWO, 2) }));
    let [a, b] = [pair(qs[0], qs[1]), pair(qs[2], qs[3])];
    let [c, d] = [pair(qs[4], qs[5]), pair(qs[6], qs[7])];
    let low = [_mm512_permutex2var_epi32(a, first, b), _mm512_permutex2var_epi32(c, first, d)];
    let high = [_mm512_permutex2var_epi32(a, second, b), _mm512_permutex2var_epi32(c, second, d)];
    let (first, second) = (load_i32(&ONE), load_i32(const { &plus(ONE, 8) }));
    let mut w = [
        _mm512_permutex2var_epi32(low[0], first, low[1]),
        _mm512_permutex2var_epi32(low[0], second, low[1]),
        _mm512_permutex2var_epi32(high[0], first, high[1]),
        _mm512_permutex2var_epi32(high[0], second, high[1]),
    ];
    for w in &mut w {
        *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
    }
    w
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pair(a: &[i8; 32], b: &[i8; 32]) -> __m512i {
    let a = _mm512_castsi256_si512(load_32(bytemuck::cast_ref(a)));
    _mm512_inserti64x4::<1>(a, load_32(bytemuck::cast_ref(b)))
}

/// Adds bit `j` of `qh` of each block as bit 4 of its value `j`.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn with_fifth_bits(low: [__m512i; 4], qh: [&[u8; 4]; 8]) -> [__m512i; 4] {
    const SHIFT: [i32; 16] = by_lane(16, [0; 3]);
    let [a, b, c, d, e, f, g, h] = qh;
    let word = |x: &[u8; 4]| i32::from_le_bytes(*x);
    let bits = _mm256_setr_epi32(word(a), word(b), word(c), word(d), word(e), word(f), word(g), word(h));
    let bits = _mm512_srlv_epi32(_mm512_broadcast_i64x4(bits), load_i32(&SHIFT));
    // Byte 0 and byte 1 of each word, in all four of it.
    let first = _mm512_set4_epi32(0x0C0C_0C0C, 0x0808_0808, 0x0404_0404, 0);
    let second = _mm512_add_epi8(first, _mm512_set1_epi8(1));
    let bits = [_mm512_shuffle_epi8(bits, first), _mm512_shuffle_epi8(bits, second)];
    let mut w = low;
    for (r, w) in w.iter_mut().enumerate() {
        let four = _mm512_set1_epi32(if r % 2 == 0 { 0x0804_0201 } else { 0x8040_2010_u32.cast_signed() });
        *w = _mm512_mask_add_epi8(*w, _mm512_test_epi8_mask(bits[r / 2], four), *w, _mm512_set1_epi8(16));
    }
    w
}

/// The value of each code, and 128.
#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up(values: &[i8; 16], codes: [__m512i; 4]) -> [__m512i; 4] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    let values = _mm512_xor_si512(values, _mm512_set1_epi8(-128));
    let mut w = codes;
    for w in &mut w {
        *w = _mm512_shuffle_epi8(values, *w);
    }
    w
}

/// `low | high & mask`.
#[inline]
#[target_feature(enable = "avx512bw")]
fn merge(low: [__m512i; 4], high: [__m512i; 4], mask: __m512i) -> [__m512i; 4] {
    let mut w = low;
    for (w, high) in w.iter_mut().zip(high) {
        *w = _mm512_ternarylogic_epi32::<0b1111_1000>(*w, high, mask);
    }
    w
}

/// Scales and offsets of Q4_K and Q5_K, as [`unpack_scales_mins`] describes them.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> [__m256; 2] {
    let [a, b, c]: [[u8; 4]; 3] = bytemuck::cast(*packed);
    // The low six bits are the first four scales and the first four minima, the rest is put together.
    let ab = u64::from(u32::from_le_bytes(a)) | u64::from(u32::from_le_bytes(b)) << 32;
    let c = u64::from(u32::from_le_bytes(c));
    let first = ab & 0x3F3F_3F3F_3F3F_3F3F;
    let second = (c | c << 28) & 0x0F0F_0F0F_0F0F_0F0F | ab >> 2 & 0x3030_3030_3030_3030;
    let both = _mm_unpacklo_epi32(_mm_cvtsi64_si128(first.cast_signed()), _mm_cvtsi64_si128(second.cast_signed()));
    let both = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both));
    let (scale, min) = (_mm512_castps512_ps256(both), _mm512_extractf32x8_ps::<1>(both));
    let (d, dmin) = (_mm512_castps512_ps256(half(d)), _mm512_castps512_ps256(negated(half(dmin))));
    [_mm256_mul_ps(scale, d), _mm256_mul_ps(min, dmin)]
}

/// Scales of each 16 weights, and no offsets.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn signed_scales(scales: &[i8; 16], d: [u8; 2]) -> [__m512; 2] {
    let scales = _mm512_cvtepi8_epi32(evens_odds(load_16(bytemuck::cast_ref(scales))));
    [_mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(d)), _mm512_setzero_ps()]
}

/// The bytes of the first halves of blocks, then those of the second.
#[inline]
#[target_feature(enable = "ssse3")]
fn evens_odds(x: __m128i) -> __m128i {
    _mm_shuffle_epi8(x, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15))
}

/// Eight numbers of half precision.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl,f16c")]
fn halves(x: [&[u8; 2]; 8]) -> __m256 {
    // Put together in general registers: vector ones are short of shuffles.
    let [a, b, c, d, e, f, g, h] = x;
    let x = _mm_set_epi64x(four([*e, *f, *g, *h]).cast_signed(), four([*a, *b, *c, *d]).cast_signed());
    _mm256_cvtph_ps(x)
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
fn half(x: [u8; 2]) -> __m512 {
    _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(x).into())))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn negated(x: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_setzero_ps(), x)
}

/// Eight times 16 bytes.
#[inline]
#[target_feature(enable = "avx512bw")]
fn joined_16([a, b, c, d, e, f, g, h]: [&[u8; 16]; 8]) -> [__m512i; 2] {
    [lanes([a, b, c, d]), lanes([e, f, g, h])]
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
    let [a, b]: &[[u8; 64]; 2] = bytemuck::cast_ref(x);
    [load_64(a), load_64(b)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f32(x: &[f32; 16]) -> __m512 {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_i32(x: &[i32; 16]) -> __m512i {
    load_64(bytemuck::cast_ref(x))
}

#[inline]
#[target_feature(enable = "avx")]
fn load_eight(x: &[f32; 8]) -> __m256 {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "sse2")]
fn store_i16(to: &mut [i16; 8], x: __m128i) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) }
}

/// A plain format: `BYTES` bytes hold 32 weights.
trait Floats<const BYTES: usize> {
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn widen(bytes: &[u8; BYTES]) -> [__m512; 2];
}

struct F32;
struct F16;
struct Bf16;

impl Floats<128> for F32 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl")]
    unsafe fn widen(bytes: &[u8; 128]) -> [__m512; 2] {
        let [a, b] = load_128(bytes);
        [_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)]
    }
}

impl Floats<64> for F16 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl")]
    unsafe fn widen(bytes: &[u8; 64]) -> [__m512; 2] {
        let [a, b]: &[[u8; 32]; 2] = bytemuck::cast_ref(bytes);
        [_mm512_cvtph_ps(load_32(a)), _mm512_cvtph_ps(load_32(b))]
    }
}

impl Floats<64> for Bf16 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl")]
    unsafe fn widen(bytes: &[u8; 64]) -> [__m512; 2] {
        let [a, b]: &[[u8; 32]; 2] = bytemuck::cast_ref(bytes);
        let [a, b] = [_mm512_cvtepu16_epi32(load_32(a)), _mm512_cvtepu16_epi32(load_32(b))];
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(a)), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b))]
    }
}

#[target_feature(enable = "avx512bw,avx512vl")]
fn matvec_float<F: Floats<BYTES>, const BYTES: usize>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
    let Acts::F32 { x, n } = *x else { unreachable!("the form this level asks for") };
    // Some weight rows stay in the L2 cache, some activation rows in L1.
    for (t, w) in w.chunks(ROWS * n * BYTES / 32).enumerate() {
        for (c, x) in x.chunks(4 * n).enumerate() {
            if x.len() == 4 * n {
                rows_float::<F, BYTES, 2, 4>(y, t * ROWS, w, c * 4, x, n);
            } else {
                for (i, x) in (c * 4..).zip(x.chunks_exact(n)) {
                    match n {
                        ..=SHORT => rows_float::<F, BYTES, 1, 1>(y, t * ROWS, w, i, x, n),
                        _ => rows_float::<F, BYTES, 8, 1>(y, t * ROWS, w, i, x, n),
                    }
                }
            }
        }
    }
}

/// The products of weight rows, the first of them row `r`, with activation rows `i..i + M`; `R` weight
/// rows at a time, of `n` values.
#[target_feature(enable = "avx512bw,avx512vl")]
fn rows_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[u8],
    i: usize,
    x: &[f32],
    n: usize,
) {
    let row_bytes = n * BYTES / 32;
    let mut r = r;
    for w in w.chunks(R * row_bytes) {
        if w.len() == R * row_bytes {
            tile_float::<F, BYTES, R, M>(y, r, w, i, x, n);
        } else {
            rows_float::<F, BYTES, 1, M>(y, r, w, i, x, n);
        }
        r += R;
    }
}

#[target_feature(enable = "avx512bw,avx512vl")]
fn tile_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    y: &mut ColumnsMut<'_>,
    r: usize,
    w: &[u8],
    i: usize,
    x: &[f32],
    n: usize,
) {
    let row_bytes = w.len() / R;
    let w: [_; R] = std::array::from_fn(|r| w[r * row_bytes..][..row_bytes].as_chunks::<BYTES>());
    let x: [_; M] = std::array::from_fn(|i| x[i * n..][..n].as_chunks::<32>());
    // Two sums each, because one would wait for its last addition.
    let mut totals = [[[_mm512_setzero_ps(); 2]; M]; R];
    let mut ahead = w[0].0.as_ptr().cast::<i8>().wrapping_add(AHEAD.max(R * row_bytes));
    for k in 0..n / 32 {
        let w: [_; R] = std::array::from_fn(|r| &w[r].0[k]);
        // With one activation row nothing keeps the CPU's own prefetcher from being fast enough, or faster.
        if M > 1 {
            ahead = prefetch(ahead, R * BYTES);
        }
        let x: [_; M] = std::array::from_fn(|i| &x[i].0[k]);
        accumulate_float::<F, BYTES, R, M>(&mut totals, w, x);
    }
    if !n.is_multiple_of(32) {
        let w: [_; R] = std::array::from_fn(|r| padded(w[r].1));
        let x: [_; M] = std::array::from_fn(|i| padded(x[i].1));
        accumulate_float::<F, BYTES, R, M>(&mut totals, w.each_ref(), x.each_ref());
    }
    for j in 0..M {
        for k in 0..R {
            y.row(i + j)[r + k] = _mm512_reduce_add_ps(_mm512_add_ps(totals[k][j][0], totals[k][j][1]));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn accumulate_float<F: Floats<BYTES>, const BYTES: usize, const R: usize, const M: usize>(
    totals: &mut [[[__m512; 2]; M]; R],
    w: [&[u8; BYTES]; R],
    x: [&[f32; 32]; M],
) {
    for r in 0..R {
        // SAFETY: this function has the features.
        let w = unsafe { F::widen(w[r]) };
        for i in 0..M {
            let [a, b]: &[[f32; 16]; 2] = bytemuck::cast_ref(x[i]);
            totals[r][i][0] = _mm512_fmadd_ps(w[0], load_f32(a), totals[r][i][0]);
            totals[r][i][1] = _mm512_fmadd_ps(w[1], load_f32(b), totals[r][i][1]);
        }
    }
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

/// Rounds a row of activations, with the very results of the scalar level.
#[target_feature(enable = "avx512bw,avx512vl")]
pub(super) fn quantize_q16(x: &[f32], blocks: &mut [BlockQ16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockQ16::VALUES)) {
        match x.first_chunk() {
            Some(x) => quantize_256(x, block),
            None => quantize_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn quantize_256(x: &[f32; 256], block: &mut BlockQ16) {
    let evens_odds = _mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let x: &[[[f32; 16]; 2]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [load_f32(&x[0]), load_f32(&x[1])];
        let (d, inverse) = BlockQ16::scale(largest_bits(x));
        for (h, x) in x.into_iter().enumerate() {
            let q = rounded(x, inverse);
            let words = _mm256_permutexvar_epi16(evens_odds, _mm512_cvtepi32_epi16(q));
            let (row, column) = BlockQ16::position(32 * b + 16 * h);
            store_i16(block.q[row][column..].first_chunk_mut().expect("8 of 32"), _mm256_castsi256_si128(words));
            store_i16(
                block.q[row + 1][column..].first_chunk_mut().expect("8 of 32"),
                _mm256_extracti128_si256::<1>(words),
            );
            block.d[2 * b + h] = d;
            block.s[2 * b + h] = d * _mm512_reduce_add_epi32(q) as f32;
        }
    }
}

/// Rounds a row of activations, with the very results of the scalar level.
#[target_feature(enable = "avx512bw,avx512vl")]
pub(super) fn quantize_p16(x: &[f32], blocks: &mut [BlockP16]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(BlockP16::VALUES)) {
        match x.first_chunk() {
            Some(x) => planes_256(x, block),
            None => planes_256(&padded(x), block),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn planes_256(x: &[f32; 256], block: &mut BlockP16) {
    let x: &[[[f32; 16]; 2]; 8] = bytemuck::cast_ref(x);
    for (b, x) in x.iter().enumerate() {
        let x = [load_f32(&x[0]), load_f32(&x[1])];
        let (d, inverse) = BlockP16::scale(largest_bits(x));
        for (h, x) in x.into_iter().enumerate() {
            let (q, lane) = (rounded(x, inverse), BlockP16::lane(b, h));
            let low = _mm512_cvtepi32_epi8(q);
            let high = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
            let (high, low) = (fours(high), fours(low));
            for r in 0..4 {
                block.high[r][lane] = high[r];
                block.low[r][lane] = low[r];
            }
            block.sums[lane] = _mm512_reduce_add_epi32(q);
        }
        block.d[b] = d;
        block.s[b] = d * (block.sums[BlockP16::lane(b, 0)] + block.sums[BlockP16::lane(b, 1)]) as f32;
    }
}

/// The largest bits of magnitudes.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest_bits(x: [__m512; 2]) -> u32 {
    let magnitude = _mm512_set1_epi32(i32::MAX);
    let first = _mm512_and_si512(_mm512_castps_si512(x[0]), magnitude);
    let second = _mm512_and_si512(_mm512_castps_si512(x[1]), magnitude);
    _mm512_reduce_max_epu32(_mm512_max_epu32(first, second))
}

/// `x·inverse` to the nearest integer; NaN becomes 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512, inverse: f32) -> __m512i {
    let x = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
    _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x)
}

#[inline]
#[target_feature(enable = "sse2")]
fn fours(x: __m128i) -> [[i8; 4]; 4] {
    let mut fours = [[0; 4]; 4];
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(fours.as_mut_ptr().cast(), x) };
    fours
}
