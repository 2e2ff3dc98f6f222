//! Products of quantised weights with few rows of prompts.
//!
//! With few activation rows most time goes into unpacking and transposing weights, which panels do once for many. Here
//! weights stay as `planes` unpacks them, a lane for each 16 or 32 values that share a scale, so that `vpdpbusd` gives the
//! 16 integer sums of 256 or 512 columns. Not the weights but the sums of 16 weight rows are transposed; then a lane is a
//! weight row, and scales, offsets and `f32` sums follow in the order of the panels' tiles, with the same bits. (The integers
//! of half of the lanes of Q4_K are 16 times as large, their scales a 16th: the same products, unless activations
//! of 10³² and more make them overflow.)
//!
//! Nanoseconds for 32 weights, one thread of Zen 4, from L2 (in brackets from memory), when lanes of Q4_K had 16 values:
//!
//! | activation rows | 1 | 2 | 4 | 8 | 12 | 16 |
//! |---|---|---|---|---|---|---|
//! | Q4_K | 0.92 (1.01) | 1.13 (1.19) | 1.57 (1.66) | 2.6 (2.8) | 3.6 (4.0) | 4.6 (5.5) |
//! | Q4_K, panels | 2.20 (2.65) | 2.20 (2.48) | 2.56 (2.81) | 3.3 (4.5) | 4.5 (5.6) | 4.5 (5.7) |
//! | Q6_K | 1.28 (1.99) | 1.66 (2.42) | 2.39 (3.46) | 4.0 (5.1) | 5.5 | 7.1 |
//! | Q6_K, panels | 2.30 (2.73) | 2.30 (2.69) | 2.78 (3.23) | 3.7 (4.3) | 5.4 | 5.4 |
//!
//! Formats of 256 without a minimum have a scale per 16 activations, as in their panels. (Blocks of 32, eight at a time,
//! take longer this way than in panels.)

use super::gemm::{IntPanels, LANES, transpose};
use super::matmul::load_64;
use super::planes::{self, ROWS, UnpackPlanes, Unpacked};
use crate::arch::avx2::gemm::{round, round_halves};
use crate::arch::gemm::{self, UnpackRows, prefetch_line};
use crate::arch::{Acts, BlockP16, Both, CacheLine, ColumnsMut, Gemm};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// `64·R` activations rounded to bytes: the integers and scales of the panels in the order of [`BlockP16`].
pub(super) trait Rounded<const R: usize>: Pod {
    /// The panels that have the same sums.
    type Panels: UnpackRows;
    /// Most activation rows for which this is faster than panels.
    const MOST: usize;

    /// # Safety
    /// The CPU must have AVX2.
    unsafe fn round(x: &[f32]) -> Self;

    /// Byte `i % 4` of lane [`BlockP16::lane`]`(i)` of register [`BlockP16::register`]`(i)` is value `i`.
    fn bytes(&self) -> &[[[u8; 4]; 16]; R];

    /// What the integer sum of each lane starts with, for weights whose bytes are `excess` too large.
    ///
    /// # Safety
    /// The CPU must have this level's features.
    unsafe fn starts(&self, excess: i32) -> __m512i;

    /// Adds to the sums of each row, a lane per weight row, the products of a block of it, whose integer sums, scales and
    /// offsets are `[weight row][lane]`.
    ///
    /// # Safety
    /// As above.
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    );

    /// Generated rows in the form that this level asks for.
    fn generated<'a>(x: &Acts<'a>) -> &'a [BlockP16<R>];

    /// The function [`multiply`] for `dtype`.
    ///
    /// # Safety
    /// As above; lengths as for [`Both::kernel`].
    unsafe fn multiply<const BOTH: bool>(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        generated: &[BlockP16<R>],
        x: &[Self],
    );
}

/// For weights with a scale and an offset per 32: a scale per 32 activations. Numbers are by lane.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Spans32 {
    q: [[[u8; 4]; 16]; 8],
    d: [f32; 16],
    /// `d·Σq`.
    sums: [f32; 16],
}

/// For weights with a scale and an offset per 16: a scale per 32 activations.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Spans16 {
    q: [[[u8; 4]; 16]; 4],
    d: [f32; 8],
    /// `d·Σq` per 16 values.
    sums: [f32; 16],
}

/// For weights with a scale per 16 and no offset: a scale per 16 activations.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Halves {
    q: [[[u8; 4]; 16]; 4],
    d: [f32; 16],
    /// `Σq` per 16 values.
    sums: [i32; 16],
}

/// The largest [`Rounded::MOST`].
const MOST: usize = 12;

/// Most generated rows that share the weights with prompt rows: their sums, 1 KiB each, stay in L1.
const GENERATED: usize = 16;

/// The [`Gemm`] table entry for a K-quant with a scale per 32 weights.
pub(super) const fn spans_of_32() -> Gemm {
    table::<Spans32, 8>()
}

/// The same with a scale per 16 weights.
pub(super) const fn spans_of_16() -> Gemm {
    table::<Spans16, 4>()
}

/// The [`Gemm`] table entry for a format with blocks of 256 and no minimum.
pub(super) const fn halves() -> Gemm {
    table::<Halves, 4>()
}

const fn table<X: Rounded<R>, const R: usize>() -> Gemm {
    let panels = gemm::table::<X::Panels>();
    let few = if panels.few > X::MOST { panels.few } else { X::MOST };
    let both = Some(Both { most: (GENERATED, X::MOST), least_columns: 64 * R, kernel: both::<X, R> });
    Gemm { few, pack: pack::<X, R>, kernel: kernel::<X, R>, both, ..panels }
}

/// Whether so many rows have a kernel here. Rows shorter than a block would take more memory than in panels.
fn is_few<X: Rounded<R>, const R: usize>(m: usize, k: usize) -> bool {
    m <= X::MOST && k >= 64 * R
}

/// Implements [`Gemm::pack`]; few rows become `[block][row]`.
///
/// # Safety
/// As for [`Gemm::pack`].
unsafe fn pack<X: Rounded<R>, const R: usize>(x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
    if !is_few::<X, R>(m, k) {
        // SAFETY: the caller's promise.
        return unsafe { gemm::pack::<X::Panels>(x, m, k, packed) };
    }
    let blocks = bytemuck::cast_slice_mut::<_, X>(&mut packed[..m * k.div_ceil(64 * R) * size_of::<X>()]);
    for (i, x) in x.chunks_exact(k).enumerate() {
        for (x, blocks) in x.chunks(64 * R).zip(blocks.chunks_exact_mut(m)) {
            // SAFETY: this level includes AVX2.
            blocks[i] = unsafe { X::round(x) };
        }
    }
}

/// Implements [`Gemm::kernel`].
///
/// # Safety
/// As for [`Gemm::kernel`].
unsafe fn kernel<X: Rounded<R>, const R: usize>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    if !is_few::<X, R>(y.rows(), k) {
        // SAFETY: the caller's promise.
        return unsafe { gemm::kernel::<X::Panels>(y, dtype, w, packed, k, workspace) };
    }
    // SAFETY: the CPU has this level's features.
    unsafe { X::multiply::<false>(y, dtype, w, &[], packed_blocks::<X, R>(packed, y.rows(), k)) }
}

/// Implements [`Both::kernel`].
///
/// # Safety
/// As for [`Both::kernel`].
unsafe fn both<X: Rounded<R>, const R: usize>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    generated: &Acts<'_>,
    packed: &[u8],
    k: usize,
) {
    let packed = packed_blocks::<X, R>(packed, y.rows() - generated.m(), k);
    // SAFETY: the CPU has this level's features.
    unsafe { X::multiply::<true>(y, dtype, w, X::generated(generated), packed) }
}

/// What [`pack`] wrote for `m` rows.
fn packed_blocks<X: Rounded<R>, const R: usize>(packed: &[u8], m: usize, k: usize) -> &[X] {
    bytemuck::cast_slice(&packed[..m * k.div_ceil(64 * R) * size_of::<X>()])
}

/// Products of all rows of `w` with those of `x`, which has a block of each row, then the next of each. If `BOTH`, the
/// first rows of `y` are those of `generated`, which has all blocks of a row, then those of the next.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply<B: UnpackPlanes<R>, X: Rounded<R>, const R: usize, const BOTH: bool>(
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    generated: &[BlockP16<R>],
    x: &[X],
) {
    let row_bytes = w.len() / y.cols();
    let row_blocks = (generated.len() + x.len()) / y.rows();
    let (n_generated, m) = (generated.len() / row_blocks, x.len() / row_blocks);
    // Integer sums of blocks: `[activation row][weight row][lane]`.
    let mut ints = [[_mm512_setzero_si512(); LANES]; MOST];
    let ints = &mut ints[..m];
    let mut starts = [_mm512_setzero_si512(); MOST];
    // Of blocks of 16 weight rows, `[weight row][lane]`.
    let (mut scales, mut offsets) = ([_mm512_setzero_si512(); LANES], [_mm512_setzero_si512(); LANES]);
    let (mut weights, mut padding) = ([Unpacked::zero(); ROWS], B::zeroed());
    // Of generated rows, for the first eight weight rows and for the others.
    let mut generated_totals = [[[_mm512_setzero_ps(); ROWS]; GENERATED]; LANES / ROWS];
    for (t, w) in w.chunks(LANES * row_bytes).enumerate() {
        let n_rows = w.len() / row_bytes;
        let mut totals = [_mm512_setzero_ps(); MOST];
        if BOTH {
            generated_totals.fill([[_mm512_setzero_ps(); ROWS]; GENERATED]);
        }
        for (k, x) in x.chunks_exact(m).enumerate() {
            for (starts, x) in starts.iter_mut().zip(x) {
                // SAFETY: this function has the features.
                *starts = unsafe { x.starts(B::EXCESS) };
            }
            for first in (0..LANES).step_by(ROWS) {
                for r in 0..ROWS {
                    // The next weight rows, which lie behind these, are read in one stream.
                    let ahead = w.as_ptr().wrapping_add(w.len() + (k * LANES + first + r) * size_of::<B>());
                    for line in (0..size_of::<B>()).step_by(64) {
                        prefetch_line(ahead.wrapping_add(line));
                    }
                    // Lanes of missing rows hold the last one.
                    let row = &w[(first + r).min(n_rows - 1) * row_bytes..][..row_bytes];
                    // SAFETY: this function has the features.
                    weights[r] = unsafe { planes::block(row, k, &mut padding).unpack() };
                    scales[first + r] = _mm512_castps_si512(weights[r].scale);
                    offsets[first + r] = _mm512_castps_si512(weights[r].offset);
                }
                for ((ints, x), start) in ints.iter_mut().zip(x).zip(&starts) {
                    let mut sums = [*start; ROWS];
                    for i in 0..R {
                        let x = load_64(bytemuck::cast_ref(&x.bytes()[i]));
                        for r in 0..ROWS {
                            sums[r] = _mm512_dpbusd_epi32(sums[r], weights[r].w[i], x);
                        }
                    }
                    ints[first..first + ROWS].copy_from_slice(&sums);
                }
                if BOTH {
                    let totals = generated_totals[first / ROWS][..n_generated].as_chunks_mut::<1>().0;
                    for (totals, x) in totals.iter_mut().zip(generated.chunks_exact(row_blocks)) {
                        planes::tile(totals, &weights, B::EXCESS, [&x[k]]);
                    }
                }
            }
            // SAFETY: this function has the features.
            unsafe { X::add(&mut totals[..m], ints, scales, offsets, x) };
        }
        for i in 0..n_generated {
            let y = &mut y.row(i)[t * LANES..][..n_rows];
            for (y, totals) in y.chunks_mut(ROWS).zip(&generated_totals) {
                y.copy_from_slice(&planes::sums(&totals[i])[..y.len()]);
            }
        }
        for (i, total) in totals[..m].iter().enumerate() {
            let mut sums = [0.0f32; LANES];
            // SAFETY: array and register have the same size.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), *total) };
            y.row(n_generated + i)[t * LANES..][..n_rows].copy_from_slice(&sums[..n_rows]);
        }
    }
}

macro_rules! multiply {
    ($dtype:expr, $y:expr, $w:expr, $generated:expr, $x:expr, $($format:ident: $blocks:ty),*) => {
        match $dtype {
            $(DType::$format => multiply::<$blocks, Self, _, BOTH>($y, $w, $generated, $x),)*
            dtype => unreachable!("{dtype} has no kernel for few rows"),
        }
    };
}

impl Rounded<8> for Spans32 {
    type Panels = IntPanels<true, 32>;
    const MOST: usize = MOST;

    #[target_feature(enable = "avx2")]
    unsafe fn round(x: &[f32]) -> Self {
        let mut block: Self = bytemuck::Zeroable::zeroed();
        for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let [words, [d, _, _, sum, ..], _] = round::<true>(x);
            put_words(&mut block.q, b, words);
            block.d[BlockP16::<8>::lane(32 * b)] = d;
            block.sums[BlockP16::<8>::lane(32 * b)] = sum;
        }
        block
    }

    fn generated<'a>(x: &Acts<'a>) -> &'a [BlockP16<8>] {
        let Acts::P16Wide { x, .. } = *x else { unreachable!("the form this level asks for") };
        x
    }

    fn bytes(&self) -> &[[[u8; 4]; 16]; 8] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, _excess: i32) -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        let (scales, offsets) = (transpose(scales), transpose(offsets));
        for ((total, ints), x) in totals.iter_mut().zip(ints).zip(x) {
            let ints = transpose(*ints);
            for g in 0..16 {
                let lane = BlockP16::<8>::lane(32 * g);
                *total = add(*total, ints[lane], x.d[lane], scales[lane], x.sums[lane], offsets[lane]);
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn multiply<const BOTH: bool>(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        generated: &[BlockP16<8>],
        x: &[Self],
    ) {
        multiply!(dtype, y, w, generated, x, Q4_K: [BlockQ4K; 2], Q5_K: [BlockQ5K; 2]);
    }
}

impl Rounded<4> for Spans16 {
    type Panels = IntPanels<true, 16>;
    /// More sums are transposed.
    const MOST: usize = 3;

    #[target_feature(enable = "avx2")]
    unsafe fn round(x: &[f32]) -> Self {
        let mut block: Self = bytemuck::Zeroable::zeroed();
        for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let [words, [d, first, second, ..], _] = round::<true>(x);
            put_words(&mut block.q, b, words);
            block.d[b] = d;
            block.sums[2 * b..][..2].copy_from_slice(&[first, second]);
        }
        block
    }

    fn generated<'a>(x: &Acts<'a>) -> &'a [BlockP16<4>] {
        let Acts::P16 { x, .. } = *x else { unreachable!("the form this level asks for") };
        x
    }

    fn bytes(&self) -> &[[[u8; 4]; 16]; 4] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, _excess: i32) -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        let (scales, offsets) = (transpose(scales), transpose(offsets));
        for ((total, ints), x) in totals.iter_mut().zip(ints).zip(x) {
            let ints = transpose(*ints);
            for g in 0..16 {
                *total = add(*total, ints[g], x.d[g / 2], scales[g], x.sums[g], offsets[g]);
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn multiply<const BOTH: bool>(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        generated: &[BlockP16<4>],
        x: &[Self],
    ) {
        multiply!(dtype, y, w, generated, x, Q2_K: BlockQ2K, Q3_K: BlockQ3K, Q6_K: BlockQ6K);
    }
}

/// The bytes of 32 values, those from `32·b` on.
fn put_words<const R: usize>(q: &mut [[[u8; 4]; 16]; R], b: usize, words: [f32; 8]) {
    for (i, word) in words.into_iter().enumerate() {
        let at = 32 * b + 4 * i;
        q[BlockP16::<R>::register(at)][BlockP16::<R>::lane(at)] = word.to_bits().to_le_bytes();
    }
}

impl Rounded<4> for Halves {
    type Panels = IntPanels<true, 16, true>;
    const MOST: usize = 4;

    #[target_feature(enable = "avx2")]
    unsafe fn round(x: &[f32]) -> Self {
        let mut block: Self = bytemuck::Zeroable::zeroed();
        for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let [words, [d, e, starts @ ..], _] = round_halves(x);
            put_words(&mut block.q, b, words);
            block.d[2 * b..][..2].copy_from_slice(&[d, e]);
            for h in 0..2 {
                block.sums[2 * b + h] = starts[h].to_bits().cast_signed() / -128;
            }
        }
        block
    }

    fn generated<'a>(x: &Acts<'a>) -> &'a [BlockP16<4>] {
        Spans16::generated(x)
    }

    fn bytes(&self) -> &[[[u8; 4]; 16]; 4] {
        &self.q
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn starts(&self, excess: i32) -> __m512i {
        _mm512_mullo_epi32(load_64(bytemuck::cast_ref(&self.sums)), _mm512_set1_epi32(-excess))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(
        totals: &mut [__m512],
        ints: &[[__m512i; LANES]],
        scales: [__m512i; LANES],
        _offsets: [__m512i; LANES],
        x: &[Self],
    ) {
        let scales = transpose(scales);
        for ((total, ints), x) in totals.iter_mut().zip(ints).zip(x) {
            let ints = transpose(*ints);
            for g in 0..16 {
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(ints[g]), _mm512_set1_ps(x.d[g]));
                *total = _mm512_fmadd_ps(product, _mm512_castsi512_ps(scales[g]), *total);
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn multiply<const BOTH: bool>(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        generated: &[BlockP16<4>],
        x: &[Self],
    ) {
        multiply!(
            dtype, y, w, generated, x,
            IQ4_XS: BlockIq4Xs, IQ1_S: BlockIq1S, IQ1_M: BlockIq1M, IQ2_XXS: BlockIq2Xxs, IQ2_XS: BlockIq2Xs,
            IQ2_S: BlockIq2S, IQ3_XXS: BlockIq3Xxs, IQ3_S: BlockIq3S, TQ1_0: BlockTq1_0, TQ2_0: BlockTq2_0
        );
    }
}

/// `total + int·d·scale + sum·offset`, rounded as the panels' tiles do.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(total: __m512, int: __m512i, d: f32, scale: __m512i, sum: f32, offset: __m512i) -> __m512 {
    let product = _mm512_mul_ps(_mm512_cvtepi32_ps(int), _mm512_set1_ps(d));
    let total = _mm512_fmadd_ps(product, _mm512_castsi512_ps(scale), total);
    _mm512_fmadd_ps(_mm512_castsi512_ps(offset), _mm512_set1_ps(sum), total)
}
