//! Products of K-quants and blocks of 32 with a small batch of prefill rows: the weights are
//! transposed.
//!
//! A lane is a weight row, so that each sum is added up in the order of columns, as in panels,
//! without a horizontal step. Words of 16 rows are transposed as they are stored, before their
//! nibbles or pairs of bits become bytes, which takes half or a quarter of the shuffles. Then
//! `vpdpbusd` multiplies four columns of 16 rows by a word of activations that it broadcasts from
//! memory.
//!
//! The 16 rows of a tile are far apart: lane `l` reads the `l`th part of the task's rows from its
//! beginning to its end. The CPU's prefetcher follows 16 long streams, but not 16 rows of a
//! kilobyte side by side. In a loop written to try it, two threads took 149, 148, 162, 268 ns for
//! 16 × 256 weights of Q4_K from memory and 1, 2, 4, 8 activation rows; with rows side by side and
//! the next ones prefetched 188, 201, 230, 271; from L2 100, 115, 148, 244 (Emerald Rapids; reading
//! alone takes 130). Groups of up to 8 activation rows share the transposed words; expanding them
//! to bytes again for each group takes less time than storing the bytes.
//!
//! Instructions for the two ports of vectors, for 16 × 256 weights; two per cycle would be the
//! ceiling; that loop reached 77, 86 and 79 % of it from L2 for 1, 4 and 8 rows at 2.87 GHz:
//!
//! | | to unpack | for an activation row |
//! |---|---|---|
//! | Q4_K | 344 | 96 |
//! | Q5_K | 584 | 96 |
//! | Q6_K | 566 | 128 |
//! | Q8_0 | 528 | 104 |

use super::rounded::{Record, Spans};
use crate::arch::gemm::prefetch_line;
use crate::arch::view::ColumnsMut;
use crate::arch::x86::avx512::common::{LANES, load_16, load_i32, power_of_two};
use crate::quant::*;
use bytemuck::{Pod, Zeroable};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Blocks of 16 weight rows: the first one, and how many bytes further the next row has its own.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Rows {
    first: *const u8,
    stride: usize,
}

/// Scales and offsets of a block's groups of 32, or of 16; a lane per row.
pub(in crate::arch) struct Factors {
    scale: [__m512; 16],
    offset: [__m512; 16],
}

/// A format of 256 weights, of 16 rows at a time. All functions need this level's features, and
/// readable rows.
pub(in crate::arch) trait TransposedBlocks: Pod {
    /// Words of 128 columns as they are stored.
    type Packed;

    unsafe fn factors(rows: Rows) -> Factors;

    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed;

    /// The bytes of columns `32·G + 4·i..32·G + 4·i + 4` of these 128.
    unsafe fn word<const G: usize>(packed: &Self::Packed, i: usize) -> __m512i;
}

/// A format of 32 weights with one scale, of 16 rows at a time. As [`TransposedBlocks`].
pub(in crate::arch) trait TransposedSmallBlocks: Pod {
    /// Zero point of the bytes: 128, divided by two this many times.
    const HALVED: u32;

    unsafe fn scale(rows: Rows) -> __m512;

    /// The bytes, four columns in a lane.
    unsafe fn words(rows: Rows) -> [__m512i; 8];
}

/// Blocks of a format, several at a time, by activations.
pub(in crate::arch) trait Step {
    type Block: Pod;
    /// The activations for a block.
    type X: Pod;
    /// Blocks at a time, at most 8.
    const BLOCKS: usize;

    /// Adds the products of some blocks of each row to the sums of the activation rows. `x` has the
    /// activations of each row for a block, then for the next.
    ///
    /// # Safety
    /// The CPU must have this level's features, and the rows that many blocks.
    unsafe fn add(totals: &mut [__m512], rows: Rows, x: &[Self::X]);
}

/// A block of 256 weights with a scale per `SPAN`.
pub(in crate::arch) struct Large<B, const SPAN: usize>(PhantomData<B>);

/// Up to eight blocks of 32 weights.
pub(in crate::arch) struct Small<B>(PhantomData<B>);

/// Maximum number of activation rows.
pub(in crate::arch) const MAX_ROWS: usize = 16;

/// Prefetch distance of weights, in bytes of each row. Twice the distance takes 5 % longer, four
/// times 16 %.
const AHEAD: usize = 512;

/// Products of all rows of `w` with those of `x`, which has the activations of each row for a
/// block, then for the next.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
pub(in crate::arch) fn multiply<S: Step>(y: &mut ColumnsMut<'_>, w: &[u8], x: &[S::X]) {
    let (m, n, w) = (y.rows(), y.cols(), bytemuck::cast_slice::<_, S::Block>(w));
    let row_blocks = x.len() / m;
    assert!(
        m <= MAX_ROWS && x.len() == m * row_blocks && w.len() == n * row_blocks,
        "small batch: {m} rows"
    );
    let mut first = 0;
    while n - first >= LANES {
        // An odd number of rows apart, lanes do not meet in the same sets of the L1 cache.
        let run = ((n - first) / LANES - 1) / 2 * 2 + 1;
        let stride = run * row_blocks * size_of::<S::Block>();
        for t in first..first + run {
            let mut totals = [_mm512_setzero_ps(); MAX_ROWS];
            for (k, x) in x.chunks(S::BLOCKS * m).enumerate() {
                let rows = Rows {
                    first: w[t * row_blocks + k * S::BLOCKS..].as_ptr().cast(),
                    stride,
                };
                // SAFETY: this function has the features; rows `t`, `t + run` and so on have these
                // blocks.
                unsafe { S::add(&mut totals[..m], rows, x) };
            }
            put(y, &totals[..m], LANES, |lane| lane * run + t);
        }
        first += run * LANES;
    }
    if first < n {
        let mut totals = [_mm512_setzero_ps(); MAX_ROWS];
        // Those of missing rows are zero.
        let mut copies = [[S::Block::zeroed(); 8]; LANES];
        for (k, x) in x.chunks(S::BLOCKS * m).enumerate() {
            let n_blocks = x.len() / m;
            for (copy, row) in copies
                .iter_mut()
                .zip(w[first * row_blocks..].chunks_exact(row_blocks))
            {
                copy[..n_blocks].copy_from_slice(&row[k * S::BLOCKS..][..n_blocks]);
            }
            let rows = Rows {
                first: copies.as_ptr().cast(),
                stride: size_of_val(&copies[0]),
            };
            // SAFETY: as above.
            unsafe { S::add(&mut totals[..m], rows, x) };
        }
        put(y, &totals[..m], n - first, |lane| first + lane);
    }
}

/// Stores the first `n` lanes of the sums of each activation row.
#[inline]
#[target_feature(enable = "avx512f")]
fn put(y: &mut ColumnsMut<'_>, totals: &[__m512], n: usize, column: impl Fn(usize) -> usize) {
    for (i, total) in totals.iter().enumerate() {
        let mut sums = [0.0f32; LANES];
        // SAFETY: array and register have the same size.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), *total) };
        let y = y.row(i);
        for (lane, sum) in sums[..n].iter().enumerate() {
            y[column(lane)] = *sum;
        }
    }
}

/// `$add` for all of `$totals`: `$M` sums `$tile`, of activation rows from `$i` on, as many at a
/// time as there are registers for.
macro_rules! in_tiles {
    ($totals:expr, |$tile:ident, $i:ident, $M:ident| $add:expr) => {
        let (totals, mut $i): (&mut [__m512], usize) = ($totals, 0);
        in_tiles!(8, totals, |$tile, $i, $M| $add);
        in_tiles!(4, totals, |$tile, $i, $M| $add);
        in_tiles!(2, totals, |$tile, $i, $M| $add);
        in_tiles!(1, totals, |$tile, $i, $M| $add);
        debug_assert_eq!($i, totals.len());
    };
    ($m:literal, $totals:ident, |$tile:ident, $i:ident, $M:ident| $add:expr) => {
        for $tile in $totals[$i..].as_chunks_mut::<$m>().0 {
            const $M: usize = $m;
            $add;
            $i += $m;
        }
    };
}

impl<B: TransposedBlocks, const SPAN: usize> Step for Large<B, SPAN>
where
    Spans<SPAN>: Pod,
{
    type Block = B;
    type X = Spans<SPAN>;
    const BLOCKS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn add(totals: &mut [__m512], rows: Rows, x: &[Spans<SPAN>]) {
        // SAFETY: the caller's promise.
        let factors = unsafe { B::factors(rows) };
        macro_rules! half {
            ($half:literal) => {
                rows.prefetch(size_of::<B>(), 4 * $half);
                rows.prefetch(size_of::<B>(), 4 * $half + 1);
                // SAFETY: as above.
                let packed = unsafe { B::packed(rows, $half) };
                rows.prefetch(size_of::<B>(), 4 * $half + 2);
                rows.prefetch(size_of::<B>(), 4 * $half + 3);
                in_tiles!(totals, |tile, i, M| {
                    let x = x[i..].first_chunk().expect("M rows");
                    // SAFETY: this function has the features.
                    unsafe { add_half::<B, SPAN, M>(tile, &packed, &factors, x, $half) }
                });
            };
        }
        half!(0);
        half!(1);
    }
}

/// Adds the products of 128 columns to the sums of `M` activation rows.
///
/// # Safety
/// The CPU must have this level's features.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn add_half<B: TransposedBlocks, const SPAN: usize, const M: usize>(
    totals: &mut [__m512; M],
    packed: &B::Packed,
    factors: &Factors,
    x: &[Spans<SPAN>; M],
    half: usize,
) {
    let mut sums = *totals;
    macro_rules! group {
        ($g:literal) => {
            let g = 4 * half + $g;
            for span in 0..32 / SPAN {
                let mut ints = [_mm512_setzero_si512(); M];
                for i in span * (SPAN / 4)..(span + 1) * (SPAN / 4) {
                    // SAFETY: the caller's promise.
                    let w = unsafe { B::word::<$g>(packed, i) };
                    for m in 0..M {
                        ints[m] = _mm512_dpbusd_epi32(
                            ints[m],
                            w,
                            _mm512_set1_epi32(x[m].word(8 * g + i)),
                        );
                    }
                }
                let at = g * (32 / SPAN) + span;
                for m in 0..M {
                    let sum = if SPAN == 32 {
                        x[m].sums[g]
                    } else {
                        x[m].half_sums[at]
                    };
                    let product =
                        _mm512_mul_ps(_mm512_cvtepi32_ps(ints[m]), _mm512_set1_ps(x[m].d[g]));
                    let total = _mm512_fmadd_ps(product, factors.scale[at], sums[m]);
                    sums[m] = _mm512_fmadd_ps(factors.offset[at], _mm512_set1_ps(sum), total);
                }
            }
        };
    }
    group!(0);
    group!(1);
    group!(2);
    group!(3);
    *totals = sums;
}

impl<B: TransposedSmallBlocks> Step for Small<B> {
    type Block = B;
    type X = Record;
    const BLOCKS: usize = 8;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn add(totals: &mut [__m512], rows: Rows, x: &[Record]) {
        let m = totals.len();
        in_tiles!(totals, |tile, i, M| {
            // SAFETY: the caller's promise.
            unsafe { add_blocks::<B, M>(tile, rows, &x[i..], m) }
        });
    }
}

/// Adds the products of some blocks to the sums of `M` activation rows, the first of `x`, which has
/// those of `m` rows for each block.
///
/// # Safety
/// The CPU must have this level's features, and the rows that many blocks.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn add_blocks<B: TransposedSmallBlocks, const M: usize>(
    totals: &mut [__m512; M],
    rows: Rows,
    x: &[Record],
    m: usize,
) {
    let mut sums = *totals;
    let mut block = rows;
    for (b, x) in x.chunks(m).enumerate() {
        let x: &[Record; M] = x.first_chunk().expect("M rows");
        rows.prefetch(8 * size_of::<B>(), b);
        // SAFETY: the caller's promise.
        let (scale, words) = unsafe { (B::scale(block), B::words(block)) };
        let mut joined = [_mm512_setzero_ps(); M];
        for span in 0..2 {
            let mut ints = [_mm512_setzero_si512(); M];
            for i in 0..M {
                // `−128·Σq`.
                let start = _mm512_set1_epi32(x[i][10 + span].cast_signed() >> B::HALVED);
                ints[i] = _mm512_dpbusd_epi32(
                    start,
                    words[4 * span],
                    _mm512_set1_epi32(x[i][4 * span].cast_signed()),
                );
            }
            for j in 4 * span + 1..4 * span + 4 {
                for i in 0..M {
                    ints[i] = _mm512_dpbusd_epi32(
                        ints[i],
                        words[j],
                        _mm512_set1_epi32(x[i][j].cast_signed()),
                    );
                }
            }
            for i in 0..M {
                let d = _mm512_set1_ps(f32::from_bits(x[i][8 + span]));
                let sum = _mm512_cvtepi32_ps(ints[i]);
                joined[i] = if span == 0 {
                    _mm512_mul_ps(sum, d)
                } else {
                    _mm512_fmadd_ps(sum, d, joined[i])
                };
            }
        }
        for i in 0..M {
            sums[i] = _mm512_fmadd_ps(joined[i], scale, sums[i]);
        }
        block.first = block.first.wrapping_add(size_of::<B>());
    }
    *totals = sums;
}

impl Rows {
    /// Prefetches an eighth of the lines of later `bytes` of each row. Spread over the work they
    /// leave the buffers for misses to others.
    #[inline(always)]
    fn prefetch(self, bytes: usize, eighth: usize) {
        let lines = LANES * bytes / 64;
        for line in lines * eighth / 8..lines * (eighth + 1) / 8 {
            let row = self.first.wrapping_add(line % LANES * self.stride);
            prefetch_line(row.wrapping_add(AHEAD + line / LANES * 64));
        }
    }

    /// The four words from byte `at` of each row's block on.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        let mut q = [_mm512_setzero_si512(); 4];
        for (j, q) in q.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let row = |r: usize| unsafe {
                _mm_loadu_si128(self.first.wrapping_add(r * self.stride + at).cast())
            };
            // Masked broadcasts from memory take no port for shuffles; insertions take one on Zen
            // 4.
            let first = _mm512_castsi128_si512(row(j));
            let two = _mm512_mask_broadcast_i32x4(first, 0x00f0, row(4 + j));
            let three = _mm512_mask_broadcast_i32x4(two, 0x0f00, row(8 + j));
            *q = _mm512_mask_broadcast_i32x4(three, 0xf000, row(12 + j));
        }
        let (ab, ab_high) = (
            _mm512_unpacklo_epi32(q[0], q[1]),
            _mm512_unpackhi_epi32(q[0], q[1]),
        );
        let (cd, cd_high) = (
            _mm512_unpacklo_epi32(q[2], q[3]),
            _mm512_unpackhi_epi32(q[2], q[3]),
        );
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }

    /// The eight words from byte `at` on.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn eight(self, at: usize) -> [__m512i; 8] {
        // SAFETY: the caller's promise.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (self.words(at), self.words(at + 16)) };
        [a, b, c, d, e, f, g, h]
    }

    /// The half-precision number at byte `at` of each row's block.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn half(self, at: usize) -> __m512 {
        let mut bits = [0u16; LANES];
        for (r, bits) in bits.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *bits = unsafe {
                self.first
                    .wrapping_add(r * self.stride + at)
                    .cast::<u16>()
                    .read_unaligned()
            };
        }
        // SAFETY: array and register have the same size.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
    }
}

/// `by` times each byte of the words.
#[inline]
#[target_feature(enable = "avx512f")]
fn times<const N: usize>(by: __m512, words: [__m512i; N], signed: bool) -> [__m512; 16] {
    let mut factors = [_mm512_setzero_ps(); 16];
    for (i, word) in words.into_iter().enumerate() {
        let bytes = if signed {
            [
                _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(word)),
                _mm512_srai_epi32::<24>(_mm512_slli_epi32::<16>(word)),
                _mm512_srai_epi32::<24>(_mm512_slli_epi32::<8>(word)),
                _mm512_srai_epi32::<24>(word),
            ]
        } else {
            let byte = _mm512_set1_epi32(255);
            [
                _mm512_and_si512(word, byte),
                _mm512_and_si512(_mm512_srli_epi32::<8>(word), byte),
                _mm512_and_si512(_mm512_srli_epi32::<16>(word), byte),
                _mm512_srli_epi32::<24>(word),
            ]
        };
        for (j, byte) in bytes.into_iter().enumerate() {
            factors[4 * i + j] = _mm512_mul_ps(_mm512_cvtepi32_ps(byte), by);
        }
    }
    factors
}

#[inline]
#[target_feature(enable = "avx512f")]
fn negated(x: __m512) -> __m512 {
    _mm512_mul_ps(x, _mm512_set1_ps(-1.0))
}

/// `low | high & mask`, a mask of bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn merged(low: __m512i, high: __m512i, mask: u8) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(
        low,
        high,
        _mm512_set1_epi32(i32::from_ne_bytes([mask; 4])),
    )
}

#[inline]
#[target_feature(enable = "avx512f")]
fn masked(x: __m512i, mask: u8) -> __m512i {
    _mm512_and_si512(x, _mm512_set1_epi32(i32::from_ne_bytes([mask; 4])))
}

/// The low (0) or high (1) nibbles of each byte.
#[inline]
#[target_feature(enable = "avx512f")]
fn nibbles(x: __m512i, high: usize) -> __m512i {
    masked(
        if high == 0 {
            x
        } else {
            _mm512_srli_epi32::<4>(x)
        },
        15,
    )
}

/// Scales and offsets of Q4_K and Q5_K, see [`unpack_scales_mins`]; both begin with the same 16
/// bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn scales_mins(rows: Rows) -> Factors {
    // SAFETY: the caller's promise.
    let [both, a, b, c] = unsafe { rows.words(0) };
    let half = |x| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
    let (d, min) = (half(both), negated(half(_mm512_srli_epi32::<16>(both))));
    let last =
        |four: __m512i, two: __m512i| merged(masked(four, 15), _mm512_srli_epi32::<2>(two), 0x30);
    Factors {
        scale: times(d, [masked(a, 63), last(c, a)], false),
        offset: times(
            min,
            [masked(b, 63), last(_mm512_srli_epi32::<4>(c), b)],
            false,
        ),
    }
}

impl TransposedBlocks for BlockQ4K {
    type Packed = [[__m512i; 8]; 2];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors(rows: Rows) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { scales_mins(rows) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed {
        // SAFETY: the caller's promise.
        unsafe { [rows.eight(16 + 64 * half), rows.eight(48 + 64 * half)] }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const G: usize>(packed: &Self::Packed, i: usize) -> __m512i {
        nibbles(packed[G / 2][i], G % 2)
    }
}

impl TransposedBlocks for BlockQ5K {
    /// Low bits, and the fifth ones.
    type Packed = ([[__m512i; 8]; 2], [__m512i; 8]);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors(rows: Rows) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { scales_mins(rows) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed {
        // SAFETY: the caller's promise.
        let low = unsafe { [rows.eight(48 + 64 * half), rows.eight(80 + 64 * half)] };
        // SAFETY: as above.
        (low, unsafe { bits_of(rows, 16, half) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const G: usize>((low, bits): &Self::Packed, i: usize) -> __m512i {
        let bit = match G {
            0 => _mm512_slli_epi32::<4>(bits[i]),
            1 => _mm512_slli_epi32::<3>(bits[i]),
            2 => _mm512_slli_epi32::<2>(bits[i]),
            _ => _mm512_slli_epi32::<1>(bits[i]),
        };
        merged(nibbles(low[G / 2][i], G % 2), bit, 16)
    }
}

/// The eight words from byte `at` on; a byte has a bit for each group of a block, with those of
/// this half lowest.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bits_of(rows: Rows, at: usize, half: usize) -> [__m512i; 8] {
    // SAFETY: the caller's promise.
    let mut bits = unsafe { rows.eight(at) };
    for bits in &mut bits {
        *bits = _mm512_srl_epi32(*bits, _mm_cvtsi32_si128(4 * half as i32));
    }
    bits
}

impl TransposedBlocks for BlockQ6K {
    /// Low four bits, and high two.
    type Packed = ([[__m512i; 8]; 2], [__m512i; 8]);

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn factors(rows: Rows) -> Factors {
        // SAFETY: the caller's promise.
        let (d, [a, b, c, e]) = unsafe { (rows.half(208), rows.words(192)) };
        let scale = times(d, [a, b, c, e], true);
        let mut offset = scale;
        for offset in &mut offset {
            *offset = _mm512_mul_ps(*offset, _mm512_set1_ps(-32.0));
        }
        Factors { scale, offset }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed {
        // SAFETY: the caller's promise.
        unsafe {
            (
                [rows.eight(64 * half), rows.eight(64 * half + 32)],
                rows.eight(128 + 32 * half),
            )
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const G: usize>((low, high): &Self::Packed, i: usize) -> __m512i {
        let two = match G {
            0 => _mm512_slli_epi32::<4>(high[i]),
            1 => _mm512_slli_epi32::<2>(high[i]),
            2 => high[i],
            _ => _mm512_srli_epi32::<2>(high[i]),
        };
        merged(nibbles(low[G % 2][i], G / 2), two, 0x30)
    }
}

/// Bits `2·G` and `2·G + 1` of each byte.
#[inline]
#[target_feature(enable = "avx512f")]
fn bit_pairs<const G: usize>(x: __m512i) -> __m512i {
    let low = match G {
        0 => x,
        1 => _mm512_srli_epi32::<2>(x),
        2 => _mm512_srli_epi32::<4>(x),
        _ => _mm512_srli_epi32::<6>(x),
    };
    masked(low, 3)
}

impl TransposedBlocks for BlockQ2K {
    type Packed = [__m512i; 8];

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn factors(rows: Rows) -> Factors {
        // SAFETY: the caller's promise.
        let (d, min, both) = unsafe { (rows.half(80), rows.half(82), rows.words(0)) };
        let of = |high: usize| {
            [
                nibbles(both[0], high),
                nibbles(both[1], high),
                nibbles(both[2], high),
                nibbles(both[3], high),
            ]
        };
        Factors {
            scale: times(d, of(0), false),
            offset: times(negated(min), of(1), false),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed {
        // SAFETY: the caller's promise.
        unsafe { rows.eight(16 + 32 * half) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const G: usize>(packed: &Self::Packed, i: usize) -> __m512i {
        bit_pairs::<G>(packed[i])
    }
}

impl TransposedBlocks for BlockQ3K {
    /// Low two bits, and the third ones.
    type Packed = ([__m512i; 8], [__m512i; 8]);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors(rows: Rows) -> Factors {
        // As [`unpack_scales_q3_k`] does.
        // SAFETY: the caller's promise.
        let (d, [_, a, b, c]) = unsafe { (rows.half(108), rows.words(92)) };
        let zero_point = _mm512_set1_epi8(32);
        let scales =
            |low: __m512i, high: __m512i| _mm512_sub_epi8(merged(low, high, 0x30), zero_point);
        let scales = [
            scales(nibbles(a, 0), _mm512_slli_epi32::<4>(c)),
            scales(nibbles(b, 0), _mm512_slli_epi32::<2>(c)),
            scales(nibbles(a, 1), c),
            scales(nibbles(b, 1), _mm512_srli_epi32::<2>(c)),
        ];
        let scale = times(d, scales, true);
        let mut offset = scale;
        for offset in &mut offset {
            *offset = _mm512_mul_ps(*offset, _mm512_set1_ps(-4.0));
        }
        Factors { scale, offset }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn packed(rows: Rows, half: usize) -> Self::Packed {
        // SAFETY: the caller's promise.
        unsafe { (rows.eight(32 + 32 * half), bits_of(rows, 0, half)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const G: usize>((low, bits): &Self::Packed, i: usize) -> __m512i {
        let bit = match G {
            0 => _mm512_slli_epi32::<2>(bits[i]),
            1 => _mm512_slli_epi32::<1>(bits[i]),
            2 => bits[i],
            _ => _mm512_srli_epi32::<1>(bits[i]),
        };
        merged(bit_pairs::<G>(low[i]), bit, 4)
    }
}

macro_rules! small {
    ($block:ident, halved: $halved:literal, |$rows:ident| $scale:expr, $words:expr) => {
        impl TransposedSmallBlocks for $block {
            const HALVED: u32 = $halved;

            #[inline]
            #[target_feature(enable = "avx512f,avx512vl")]
            unsafe fn scale($rows: Rows) -> __m512 {
                // SAFETY: the caller's promise.
                unsafe { $scale }
            }

            #[inline]
            #[target_feature(enable = "avx512bw,avx512vl")]
            unsafe fn words($rows: Rows) -> [__m512i; 8] {
                // SAFETY: the caller's promise.
                unsafe { $words }
            }
        }
    };
}

small!(BlockQ8_0, halved: 0, |rows| rows.half(0), {
    let mut w = rows.eight(2);
    for w in &mut w {
        *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
    }
    w
});

small!(BlockQ4_0, halved: 4, |rows| rows.half(0), both_nibbles(rows, 2));

small!(BlockQ5_0, halved: 3, |rows| rows.half(0), with_fifth_bits(both_nibbles(rows, 6), rows, 2));

small!(BlockIq4Nl, halved: 0, |rows| rows.half(0), look_up(&IQ4_VALUES, both_nibbles(rows, 2)));

small!(BlockMxfp4, halved: 0, |rows| exponents(rows), look_up(&MXFP4_VALUES, both_nibbles(rows, 1)));

/// The low nibbles of 16 bytes, then the high ones.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn both_nibbles(rows: Rows, at: usize) -> [__m512i; 8] {
    // SAFETY: the caller's promise.
    let packed = unsafe { rows.words(at) };
    let mut w = [_mm512_setzero_si512(); 8];
    for (j, packed) in packed.into_iter().enumerate() {
        w[j] = nibbles(packed, 0);
        w[4 + j] = nibbles(packed, 1);
    }
    w
}

/// Adds bit `j` of the word at byte `at` as bit 4 of byte `j`.
#[inline]
#[target_feature(enable = "avx512bw")]
unsafe fn with_fifth_bits(low: [__m512i; 8], rows: Rows, at: usize) -> [__m512i; 8] {
    let mut bits = [0u32; LANES];
    for (r, bits) in bits.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *bits = unsafe {
            rows.first
                .wrapping_add(r * rows.stride + at)
                .cast::<u32>()
                .read_unaligned()
        };
    }
    let (bits, mut w) = (load_i32(bytemuck::cast_ref(&bits)), low);
    for (j, w) in w.iter_mut().enumerate() {
        // The byte with the four bits, in all bytes of a lane.
        let byte = |lane: i32| (4 * lane + j as i32 / 2) * 0x0101_0101;
        let four = _mm512_shuffle_epi8(bits, _mm512_set4_epi32(byte(3), byte(2), byte(1), byte(0)));
        let each = if j % 2 == 0 {
            0x0804_0201
        } else {
            0x8040_2010_u32.cast_signed()
        };
        let has = _mm512_test_epi8_mask(four, _mm512_set1_epi32(each));
        *w = _mm512_mask_add_epi8(*w, has, *w, _mm512_set1_epi8(16));
    }
    w
}

/// The values that nibbles stand for, plus 128.
#[inline]
#[target_feature(enable = "avx512bw")]
fn look_up(values: &[i8; 16], codes: [__m512i; 8]) -> [__m512i; 8] {
    let values = _mm512_broadcast_i32x4(load_16(bytemuck::cast_ref(values)));
    let values = _mm512_xor_si512(values, _mm512_set1_epi8(-128));
    let mut w = codes;
    for w in &mut w {
        *w = _mm512_shuffle_epi8(values, *w);
    }
    w
}

/// [`BlockMxfp4::half_scale`] of each row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn exponents(rows: Rows) -> __m512 {
    let mut e = [0u8; LANES];
    for (r, e) in e.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *e = unsafe { rows.first.wrapping_add(r * rows.stride).read() };
    }
    power_of_two(_mm512_cvtepu8_epi32(load_16(&e)))
}
