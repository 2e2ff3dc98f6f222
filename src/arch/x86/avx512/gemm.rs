//! Products with many activation rows: the packing, unpacking and register tiles of this level.
//!
//! K-quants are multiplied as integers, with 8-bit activations, by `vpdpbusd`: it does four times
//! the products of an `f32` multiply-add. With a scale per 32 activations the error of the logits
//! is two thirds of llama.cpp's, which has a scale per 256.
//!
//! The others are integers, too. For formats of 32 values llama.cpp has a scale per 32 activations.
//! Here they get one per 16, and no minimum to subtract, as sums of products start with the
//! correction for an excess of 128 in the weights' bytes; the error of the logits is at most 0.9 of
//! llama.cpp's, and 1.2 to 1.5 times as many products are done as with bf16 (Zen 4).
//!
//! Q4_1 and Q5_1 take 16-bit activations and `vpdpwssd`, which does twice the products of an `f32`
//! multiply-add.
//!
//! F32, F16 and BF16 weights are multiplied as for generated tokens.

use super::elementwise::{F32x16, zero};
use super::few;
use super::matmul::plain_gemm;
use crate::arch::acts::byte_scale;
use crate::arch::gemm::{
    BLOCK, FewRows, Multiply, Panels, RegisterTile, TILE, UnpackRows, prefetch_line, table,
};
use crate::arch::generic::Lanes;
use crate::arch::generic::packing::{MAX_LANES, Transpose};
use crate::arch::generic::panels::{self, f32_panels};
use crate::arch::transposed::{COLUMNS, Turn, transposed};
use crate::arch::x86::avx2::gemm::{int_blocks, int_words, record, round, round_halves};
use crate::arch::x86::avx2::unpack::{Factors, Groups, knows, wanted_groups, with_groups};
use crate::arch::{Gemm, PanelElement, Transposed, scalar};
use crate::quant::*;
use bytemuck::Pod;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

pub(in crate::arch) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! bytes {
        ($block:ident) => {
            const {
                match <$block>::GROUPS {
                    8 => few::halves(),
                    1 => few::blocks_of_32(),
                    _ => table::<IntPanels<true, 16, true>>(),
                }
            }
        };
    }
    match dtype {
        DType::F32 => const { plain_gemm::<f32>() },
        DType::F16 => const { plain_gemm::<f16>() },
        DType::BF16 => const { plain_gemm::<bf16>() },
        DType::Q4_K | DType::Q5_K => const { few::spans::<32>() },
        DType::Q2_K | DType::Q3_K | DType::Q6_K => const { few::spans::<16>() },
        DType::Q4_1 | DType::Q5_1 => const { table::<IntPanels<false, 32>>() },
        _ => with_groups!(dtype, bytes, (scalar::KERNELS.gemm)(dtype)),
    }
}

/// Scales run along rows, so that columns are rounded again: to bytes with a scale for each 64
/// rows, like gradients, which is more than twice as fast as bf16. Both are then off by six tenths
/// of a per cent of their typical size (the largest of 64 normally distributed values is 2.6 times
/// that; half a step of a 127th of it, over √3), where bf16 has a third of that error.
pub(super) fn transposed_for(dtype: DType) -> Transposed {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => const { transposed::<F32Panels>() },
        _ if knows(dtype) => const { transposed::<BytePanels>() },
        _ => (scalar::KERNELS.transposed)(dtype),
    }
}

f32_panels!("avx512f,avx512bw,avx512vl,avx512dq", F32x16, zero(), depth: 128, rows: 8, rows_of_one: 16);

impl Transpose for F32x16 {
    #[inline(always)]
    fn transpose(x: [F32x16; MAX_LANES]) -> [F32x16; MAX_LANES] {
        // SAFETY: a vector exists, so the CPU has the level's features; registers of the same bits.
        unsafe {
            std::mem::transmute(transpose(
                std::mem::transmute::<[F32x16; 16], [__m512i; 16]>(x),
            ))
        }
    }

    #[inline(always)]
    unsafe fn read_transposed(self, p: *const f32, stride: usize) -> [F32x16; MAX_LANES] {
        // SAFETY: as above; the caller's promise.
        unsafe {
            std::mem::transmute::<[__m512i; 16], [F32x16; 16]>(read_transposed(p.cast(), stride))
        }
    }
}

/// [`transpose`] of 16 rows in memory, `stride` words apart: quarters of rows go to their lanes as
/// they are read, which takes half of the shuffles.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn read_transposed(p: *const u32, stride: usize) -> [__m512i; 16] {
    let mut quarters = [_mm512_setzero_si512(); 16];
    for q in 0..4 {
        for j in 0..4 {
            // SAFETY: the caller's promise.
            let quarter =
                |r: usize| unsafe { _mm_loadu_si128(p.wrapping_add(r * stride + 4 * q).cast()) };
            let first = _mm512_castsi128_si512(quarter(j));
            let two = _mm512_inserti32x4::<1>(first, quarter(4 + j));
            let three = _mm512_inserti32x4::<2>(two, quarter(8 + j));
            quarters[4 * q + j] = _mm512_inserti32x4::<3>(three, quarter(12 + j));
        }
    }
    transpose_lanes(quarters)
}

/// 32-bit words per register.
pub(in crate::arch) const LANES: usize = 16;

/// Loads the sums of a tile: `VECS` registers of activations by `ROWS` rows of a panel.
///
/// # Safety
/// `sums` must be readable there.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) unsafe fn load_sums<const VECS: usize, const ROWS: usize>(
    sums: *const f32,
    first: bool,
) -> [[__m512; VECS]; ROWS] {
    let mut acc = [[_mm512_setzero_ps(); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { _mm512_loadu_ps(sums.wrapping_add((v * TILE + r) * LANES)) };
            }
        }
    }
    acc
}

/// Stores the sums of a tile.
///
/// # Safety
/// As [`load_sums`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) unsafe fn store_sums<const VECS: usize, const ROWS: usize>(
    sums: *mut f32,
    acc: [[__m512; VECS]; ROWS],
) {
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as in `load_sums`.
            unsafe { _mm512_storeu_ps(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

/// Panels of integers, as at the AVX2 level, multiplied by `vpdpbusd` and `vpdpwssd`. With
/// `EXCESS`, weights are bytes 128 too large, and activations those of [`round_halves`]. Weights
/// have a scale (and an offset) per `SPAN`.
pub(super) enum IntPanels<const BYTES: bool, const SPAN: usize, const EXCESS: bool = false> {}

impl<const BYTES: bool, const SPAN: usize, const EXCESS: bool> Panels
    for IntPanels<BYTES, SPAN, EXCESS>
{
    const LANES: usize = LANES;
    // Joined products take as many registers as sums do, so that there are too few for three
    // registers of activations.
    const TILES: &[RegisterTile] = {
        let tiles = &[
            RegisterTile {
                rows: 8,
                multiply: int_tile::<BYTES, SPAN, EXCESS, 1, 8, false, false>,
            },
            RegisterTile {
                rows: 4,
                multiply: int_tile::<BYTES, SPAN, EXCESS, 2, 4, false, false>,
            },
            RegisterTile {
                rows: 4,
                multiply: int_tile::<BYTES, SPAN, EXCESS, 3, 4, false, false>,
            },
        ];
        if joins(SPAN, EXCESS) {
            tiles.split_at(2).0
        } else {
            tiles
        }
    };
    const HALVES: &[Multiply] = &[
        int_tile::<BYTES, SPAN, EXCESS, 1, 8, false, true>,
        int_tile::<BYTES, SPAN, EXCESS, 2, 4, false, true>,
        int_tile::<BYTES, SPAN, EXCESS, 3, 4, false, true>,
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_ints::<BYTES, EXCESS>;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    fn words(k: usize) -> usize {
        k / 32 * record(BYTES)
    }
}

impl<const BYTES: bool, const SPAN: usize, const EXCESS: bool> UnpackRows
    for IntPanels<BYTES, SPAN, EXCESS>
{
    const ELEMENT: (PanelElement, u64) = (
        if BYTES {
            PanelElement::I8
        } else {
            PanelElement::I16
        },
        1,
    );

    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
        macro_rules! blocks {
            ($block:ident) => {
                // SAFETY: the caller's promise.
                unsafe { int_blocks::<$block, BYTES, EXCESS>(bytes, out) }
            };
        }
        with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        )
    }

    const FEW: Option<FewRows> = Some(FewRows {
        most: if EXCESS { 12 } else { 10 },
        fill: fill_ints::<BYTES, EXCESS>,
        tiles: &[
            int_tile::<BYTES, SPAN, EXCESS, 1, 2, true, false>,
            int_tile::<BYTES, SPAN, EXCESS, 1, 4, true, false>,
            int_tile::<BYTES, SPAN, EXCESS, 1, 8, true, false>,
        ],
    });
}

/// See [`FewRows::fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn fill_ints<const BYTES: bool, const EXCESS: bool>(
    dtype: DType,
    rows: &[&[u8]; LANES],
    panel: &mut [u32],
    turned: &mut [u32],
) {
    macro_rules! blocks {
        ($block:ident) => {
            if <$block>::GROUPS == 1 && !BYTES {
                fill_words::<$block>(rows, turned)
            } else {
                let stride = BLOCK / 32 * record(BYTES);
                for (row, panel) in rows.iter().zip(panel.chunks_exact_mut(stride)) {
                    int_blocks::<$block, BYTES, EXCESS>(row, panel);
                }
                assert!(panel.len() >= LANES * stride && turned.len() >= LANES * stride);
                // SAFETY: both have room for these words.
                unsafe { turn_panel(panel.as_ptr(), stride, turned.as_mut_ptr()) }
            }
        };
    }
    with_groups!(
        dtype,
        blocks,
        unreachable!("{dtype} runs the scalar kernels")
    )
}

/// Stores a register per row.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn store_all<const N: usize>(to: &mut [[u32; LANES]; N], x: [__m512i; N]) {
    for i in 0..N {
        // SAFETY: array and register have the same size.
        unsafe { _mm512_storeu_si512(to[i].as_mut_ptr().cast(), x[i]) };
    }
}

/// Writes the records of 16 weight rows in blocks of 32, which have one scale and one offset.
/// (Blocks of 256 take less time row by row.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn fill_words<B: Groups>(rows: &[&[u8]; LANES], turned: &mut [u32]) {
    let mut blocks: [&[B]; LANES] = [&[]; LANES];
    for r in 0..LANES {
        blocks[r] = bytemuck::cast_slice(rows[r]);
    }
    for (i, record) in turned
        .chunks_exact_mut(record(false) * LANES)
        .enumerate()
        .take(blocks[0].len())
    {
        let (words, factors) = record
            .as_chunks_mut::<LANES>()
            .0
            .split_at_mut(int_words(false));
        let mut q = [_mm512_setzero_si512(); LANES];
        for r in 0..LANES {
            // SAFETY: this level includes AVX2 and F16C.
            let Factors { scale, offset } = unsafe { blocks[r][i].factors() };
            factors[0][r] = scale[0].to_bits();
            factors[2][r] = offset[0].to_bits();
            // SAFETY: as above.
            q[r] = _mm512_cvtepi8_epi16(unsafe { blocks[r][i].bytes(0) });
        }
        factors[1] = factors[0];
        factors[3] = factors[2];
        store_all(words.first_chunk_mut().expect("16 words"), transpose(q));
    }
}

/// Whether 32 weights have one scale and their activations two: then the products with those are
/// added before they are multiplied by that.
const fn joins(span: usize, excess: bool) -> bool {
    excess && span == 32
}

/// `VECS` registers of activations times `ROWS` weight rows; with `TURNED`, of weights times
/// activation rows. With `HALF`, the last register of activations has rows in its lower half only,
/// which takes half the time on cores that do an instruction of 512 bits in two steps.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
unsafe fn int_tile<
    const BYTES: bool,
    const SPAN: usize,
    const EXCESS: bool,
    const VECS: usize,
    const ROWS: usize,
    const TURNED: bool,
    const HALF: bool,
>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    // SAFETY: the caller's promise.
    let mut acc = unsafe { load_sums::<VECS, ROWS>(sums, first) };
    let factors = int_words(BYTES);
    // Integer sums of 32 products.
    let (parts, joins) = (if EXCESS { 2 } else { 32 / SPAN }, joins(SPAN, EXCESS));
    for i in 0..k / 32 {
        let lanes = x.wrapping_add(i * record(BYTES) * VECS * LANES);
        let w = w.wrapping_add(i * record(BYTES) * if TURNED { LANES } else { 1 });
        if !TURNED {
            for line in 0..5 {
                let ahead = ahead.wrapping_add((i * record(BYTES) * VECS + line * 8) * LANES);
                prefetch_line(ahead.cast());
            }
        }
        // Word `j` of the record, for the rows in register `v`.
        // SAFETY: it is there.
        let lanes = |j: usize, v: usize| unsafe {
            _mm512_loadu_si512(lanes.wrapping_add((j * VECS + v) * LANES).cast())
        };
        // Word `j` of the record of row `r`, in all lanes.
        let splat = |j: usize, r: usize| {
            let at = if TURNED {
                j * LANES + r
            } else {
                r * (BLOCK / 32) * record(BYTES) + j
            };
            // SAFETY: it is there.
            _mm512_set1_epi32(unsafe { w.wrapping_add(at).read() } as i32)
        };
        // The same of the weights and of the activations.
        let w = |j: usize, r: usize, v: usize| if TURNED { lanes(j, v) } else { splat(j, r) };
        let x = |j: usize, r: usize, v: usize| if TURNED { splat(j, r) } else { lanes(j, v) };
        let half = |v: usize| HALF && v == VECS - 1;
        let mut joined = [[_mm512_setzero_ps(); VECS]; ROWS];
        for part in 0..parts {
            let mut int = [[_mm512_setzero_si512(); VECS]; ROWS];
            if EXCESS {
                for r in 0..ROWS {
                    for v in 0..VECS {
                        int[r][v] = x(factors + 2 + part, r, v);
                    }
                }
            }
            for j in part * factors / parts..(part + 1) * factors / parts {
                for r in 0..ROWS {
                    for v in 0..VECS {
                        int[r][v] =
                            add_products::<BYTES>(int[r][v], w(j, r, v), x(j, r, v), half(v));
                    }
                }
            }
            let (d_word, sum_word) = match (EXCESS, SPAN) {
                (true, _) => (factors + part, 0),
                (false, 32) => (factors, factors + 3),
                (false, _) => (factors, factors + 1 + part),
            };
            for r in 0..ROWS {
                for v in 0..VECS {
                    let (sum, d) = (
                        to_floats(int[r][v], half(v)),
                        _mm512_castsi512_ps(x(d_word, r, v)),
                    );
                    if joins && part > 0 {
                        joined[r][v] = mul_add(sum, d, joined[r][v], half(v));
                    } else {
                        joined[r][v] = mul(sum, d, half(v));
                    }
                    if !joins || part > 0 {
                        let scale = _mm512_castsi512_ps(w(factors + part, r, v));
                        acc[r][v] = mul_add(joined[r][v], scale, acc[r][v], half(v));
                    }
                    if !EXCESS {
                        let offset = _mm512_castsi512_ps(w(factors + 2 + part, r, v));
                        let sum = _mm512_castsi512_ps(x(sum_word, r, v));
                        acc[r][v] = mul_add(offset, sum, acc[r][v], half(v));
                    }
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { store_sums(sums, acc) };
}

/// Adds the products of four bytes or two 16-bit integers to each lane of `sum`; with `half`, to
/// each of the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
fn add_products<const BYTES: bool>(sum: __m512i, w: __m512i, x: __m512i, half: bool) -> __m512i {
    if half {
        let [sum, w, x] = [sum, w, x].map(|x| _mm512_castsi512_si256(x));
        let sum = if BYTES {
            _mm256_dpbusd_epi32(sum, w, x)
        } else {
            _mm256_dpwssd_epi32(sum, w, x)
        };
        return _mm512_castsi256_si512(sum);
    }
    if BYTES {
        _mm512_dpbusd_epi32(sum, w, x)
    } else {
        _mm512_dpwssd_epi32(sum, w, x)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn to_floats(x: __m512i, half: bool) -> __m512 {
    if half {
        _mm512_castps256_ps512(_mm256_cvtepi32_ps(_mm512_castsi512_si256(x)))
    } else {
        _mm512_cvtepi32_ps(x)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn mul(a: __m512, b: __m512, half: bool) -> __m512 {
    if half {
        let [a, b] = [a, b].map(|x| _mm512_castps512_ps256(x));
        return _mm512_castps256_ps512(_mm256_mul_ps(a, b));
    }
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn mul_add(a: __m512, b: __m512, c: __m512, half: bool) -> __m512 {
    if half {
        let [a, b, c] = [a, b, c].map(|x| _mm512_castps512_ps256(x));
        return _mm512_castps256_ps512(_mm256_fmadd_ps(a, b, c));
    }
    _mm512_fmadd_ps(a, b, c)
}

/// Panels of the transposed product: of columns, and of gradients, as bytes with a scale for each
/// 64.
///
/// Both consist of records of 64 values: 16 words of bytes, the scale and, for gradients,
/// `−128·Σq`, with which sums of products start because the bytes of weights are 128 too large.
/// `d·q` with `|q| ≤ 127` is off by at most half of `d`, a 127th of the record's largest magnitude.
enum BytePanels {}

impl BytePanels {
    /// Values per record.
    const SPAN: usize = 64;
    /// Words of bytes in a record; the scale and the start of the sums follow.
    const WORDS: usize = Self::SPAN / 4;
    const RECORD: usize = Self::WORDS + 2;
}

impl Panels for BytePanels {
    const LANES: usize = LANES;
    const TILES: &[RegisterTile] = &[
        RegisterTile {
            rows: 8,
            multiply: byte_tile::<1, 8>,
        },
        RegisterTile {
            rows: 4,
            multiply: byte_tile::<2, 4>,
        },
        RegisterTile {
            rows: 4,
            multiply: byte_tile::<3, 4>,
        },
    ];
    const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_bytes;
    const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) = store_transposed;

    fn words(k: usize) -> usize {
        k.div_ceil(Self::SPAN) * Self::RECORD
    }
}

impl Turn for BytePanels {
    const KNOWS: fn(DType) -> bool = knows;
    const ROWS: usize = Self::SPAN;
    const EXPAND: unsafe fn(DType, &[u8], Range<usize>, &mut [f32]) = unpack;
    const TURN: unsafe fn(*const f32, *mut u32) = turn_bytes;
}

/// `VECS` registers of gradients times `ROWS` columns.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn byte_tile<const VECS: usize, const ROWS: usize>(
    w: *const u32,
    x: *const u32,
    k: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    // SAFETY: the caller's promise.
    let mut acc = unsafe { load_sums::<VECS, ROWS>(sums, first) };
    for i in 0..k.div_ceil(BytePanels::SPAN) {
        let start = i * BytePanels::RECORD * VECS * LANES;
        for line in 0..7 {
            prefetch_line(ahead.wrapping_add(start + line * 8 * LANES).cast());
        }
        let x = x.wrapping_add(start);
        // SAFETY: word `j` of the record, for the rows in register `v`.
        let x = |j: usize, v: usize| unsafe {
            _mm512_loadu_si512(x.wrapping_add((j * VECS + v) * LANES).cast())
        };
        // SAFETY: word `j` of the record of column `r`.
        let w = |j: usize, r: usize| unsafe {
            w.wrapping_add((r * (BLOCK / BytePanels::SPAN) + i) * BytePanels::RECORD + j)
                .read()
        };
        let mut int = [[_mm512_setzero_si512(); VECS]; ROWS];
        for r in 0..ROWS {
            for v in 0..VECS {
                int[r][v] = x(BytePanels::WORDS + 1, v);
            }
        }
        for j in 0..BytePanels::WORDS {
            let mut xs = [_mm512_setzero_si512(); VECS];
            for v in 0..VECS {
                xs[v] = x(j, v);
            }
            for r in 0..ROWS {
                let w = _mm512_set1_epi32(w(j, r) as i32);
                for v in 0..VECS {
                    int[r][v] = _mm512_dpbusd_epi32(int[r][v], w, xs[v]);
                }
            }
        }
        for r in 0..ROWS {
            let scale = _mm512_set1_ps(f32::from_bits(w(BytePanels::WORDS, r)));
            for v in 0..VECS {
                let product = _mm512_mul_ps(
                    _mm512_cvtepi32_ps(int[r][v]),
                    _mm512_castsi512_ps(x(BytePanels::WORDS, v)),
                );
                acc[r][v] = _mm512_fmadd_ps(product, scale, acc[r][v]);
            }
        }
    }
    // SAFETY: as above.
    unsafe { store_sums(sums, acc) };
}

/// Scales of records and their inverses, given their largest magnitudes: NaN if one is not finite,
/// and 0 for all magnitudes below 2⁻¹⁰⁰.
#[inline]
#[target_feature(enable = "avx512f")]
fn byte_scales(largest: __m512i) -> (__m512, __m512) {
    let values = _mm512_castsi512_ps(largest);
    let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(values, _mm512_set1_ps(f32::INFINITY));
    let some =
        _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(finite, values, _mm512_set1_ps(2f32.powi(-100)));
    let scale = _mm512_maskz_div_ps(some, values, _mm512_set1_ps(127.0));
    let inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0), values);
    (
        _mm512_mask_mov_ps(_mm512_set1_ps(f32::NAN), finite, scale),
        inverse,
    )
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn pack_bytes(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (i, packed) in packed
            .chunks_exact_mut(BytePanels::RECORD * n_vecs * LANES)
            .enumerate()
        {
            let (mut words, mut scales) = ([_mm512_setzero_si512(); LANES], [0.0f32; LANES]);
            for (row, x) in x.chunks_exact(k).enumerate() {
                let x = &x[i * BytePanels::SPAN..k.min((i + 1) * BytePanels::SPAN)];
                (words[row], scales[row]) = round_bytes(x);
            }
            let words = transpose(words);
            let mut start = _mm512_setzero_si512();
            for word in words {
                start = _mm512_dpbusd_epi32(start, _mm512_set1_epi8(-128), word);
            }
            let start = _mm512_sub_epi32(_mm512_setzero_si512(), start);
            let record = words.into_iter().chain([load512(&scales), start]);
            interleave(record, packed, v, n_vecs);
        }
    }
}

/// Rounds at most 64 values to bytes, padded with zeros, and returns their scale, too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_bytes(x: &[f32]) -> (__m512i, f32) {
    let (first, second) = x.split_at(x.len().min(32));
    let ([a, b], [c, d]) = (load_f32(first), load_f32(second));
    let mut largest = _mm512_setzero_si512();
    for x in [a, b, c, d] {
        // The bits of positive numbers sort as the numbers do, NaN last.
        largest = _mm512_max_epu32(
            largest,
            _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)),
        );
    }
    let (scale, inverse) = byte_scale(_mm512_reduce_max_epu32(largest));
    let mut bytes = [_mm_setzero_si128(); 4];
    for (bytes, x) in bytes.iter_mut().zip([a, b, c, d]) {
        *bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(
            x,
            _mm512_set1_ps(inverse),
        )));
    }
    // SAFETY: array and register have the same size.
    (
        unsafe { std::mem::transmute::<[__m128i; 4], __m512i>(bytes) },
        scale,
    )
}

#[target_feature(enable = "avx512f,avx512bw")]
fn pack_ints<const BYTES: bool, const EXCESS: bool>(x: &[f32], k: usize, packed: &mut [u32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (i, packed) in packed
            .chunks_exact_mut(record(BYTES) * n_vecs * LANES)
            .enumerate()
        {
            let mut rows = [[[0.0; 8]; 3]; LANES];
            for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
                if let Some(x) = x[32 * i..].first_chunk() {
                    *row = if EXCESS {
                        round_halves(x)
                    } else {
                        round::<BYTES>(x)
                    };
                }
            }
            for (c, packed) in packed.chunks_mut(LANES * n_vecs * LANES).enumerate() {
                let mut words = [_mm512_setzero_si512(); LANES];
                for (words, row) in words.iter_mut().zip(&rows) {
                    *words = _mm512_castps_si512(load_f32(&row.as_flattened()[c * LANES..])[0]);
                }
                interleave(transpose(words), packed, v, n_vecs);
            }
        }
    }
}

/// Writes the words of register `v` of the activations to their places in `packed`, among those of
/// all `n_vecs` registers; stops at the end of `packed`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn interleave(
    words: impl IntoIterator<Item = __m512i>,
    packed: &mut [u32],
    v: usize,
    n_vecs: usize,
) {
    for (word, out) in words
        .into_iter()
        .zip(packed.chunks_exact_mut(n_vecs * LANES))
    {
        let out: &mut [u32] = &mut out[v * LANES..][..LANES];
        // SAFETY: array and register have the same size.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), word) };
    }
}

/// Loads at most 32 values, padded with zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::arch) fn load_f32(x: &[f32]) -> [__m512; 2] {
    let mask = ((1u64 << x.len().min(32)) - 1) as u32;
    // SAFETY: the mask excludes everything after `x`.
    let low = unsafe { _mm512_maskz_loadu_ps(mask as u16, x.as_ptr()) };
    // SAFETY: as above.
    let high = unsafe { _mm512_maskz_loadu_ps((mask >> 16) as u16, x.as_ptr().wrapping_add(16)) };
    [low, high]
}

/// Transposes the 128-bit lanes of each four registers: in lane `l`, `c[4g + j]` has word `4l + j`
/// of `a[4g..4g + 4]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_lanes<const N: usize>(a: [__m512i; N]) -> [__m512i; N] {
    let mut b = a;
    for i in (0..N).step_by(2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    let mut c = b;
    for i in (0..N).step_by(4) {
        c[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    c
}

/// Transposes: word `i` of row `j` becomes word `j` of row `i`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn transpose(a: [__m512i; 16]) -> [__m512i; 16] {
    let c = transpose_lanes(a);
    let mut d = c;
    for j in 0..4 {
        [d[j], d[4 + j], d[8 + j], d[12 + j]] =
            transpose_quarters([c[j], c[4 + j], c[8 + j], c[12 + j]]);
    }
    d
}

/// Transposes 128-bit lanes: lane `i` of register `j` becomes lane `j` of register `i`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let even_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    let odd_low = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
    let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
    let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high),
    ]
}

/// Transposes columns of 64 rows to records of bytes.
#[target_feature(enable = "avx512f")]
unsafe fn turn_bytes(values: *const f32, panel: *mut u32) {
    // SAFETY: a register of a row.
    let row = |r: usize| unsafe { _mm512_loadu_ps(values.wrapping_add(r * COLUMNS)) };
    let mut largest = _mm512_setzero_si512();
    for r in 0..BytePanels::SPAN {
        // The bits of positive numbers sort as the numbers do, NaN last.
        let bits = _mm512_and_si512(_mm512_castps_si512(row(r)), _mm512_set1_epi32(i32::MAX));
        largest = _mm512_max_epu32(largest, bits);
    }
    let (scale, inverse) = byte_scales(largest);
    // Adding this leaves an integer, rounded to nearest even and 128 too large, in the low byte.
    let excess = _mm512_set1_ps((3 << 22 | 128) as f32);
    let bits = |r: usize| _mm512_castps_si512(_mm512_fmadd_ps(row(r), inverse, excess));
    let select = |mask: i32, a: __m512i, b: __m512i| {
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(mask), a, b)
    };
    let mut words = [_mm512_setzero_si512(); LANES];
    for (i, word) in words.iter_mut().enumerate() {
        let low = select(0xff, bits(4 * i), _mm512_slli_epi32::<8>(bits(4 * i + 1)));
        let high = _mm512_slli_epi32::<24>(bits(4 * i + 3));
        *word = select(
            0xffff,
            low,
            select(0xff_ffff, _mm512_slli_epi32::<16>(bits(4 * i + 2)), high),
        );
    }
    let mut scales = [0.0f32; LANES];
    // SAFETY: array and register have the same size.
    unsafe { _mm512_storeu_ps(scales.as_mut_ptr(), scale) };
    for (c, words) in transpose(words).into_iter().enumerate() {
        let out = panel.wrapping_add(c * (BLOCK / BytePanels::SPAN) * BytePanels::RECORD);
        // SAFETY: panel rows have room for a record.
        unsafe { _mm512_storeu_si512(out.cast(), words) };
        // SAFETY: as above.
        unsafe {
            out.wrapping_add(BytePanels::WORDS)
                .write(scales[c].to_bits())
        };
    }
}

/// Expands the values `wanted` of a row's blocks; `out` has room for them, rounded up to 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
fn unpack(dtype: DType, bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block>(bytes, wanted, out)
        };
    }
    match dtype {
        DType::F32 => panels::widen::<_, f32>(zero(), bytes, out),
        DType::F16 => panels::widen::<_, f16>(zero(), bytes, out),
        DType::BF16 => panels::widen::<_, bf16>(zero(), bytes, out),
        _ => with_groups!(
            dtype,
            blocks,
            unreachable!("{dtype} runs the scalar kernels")
        ),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [f32; 32], [low, high]: [__m512; 2]) {
    // SAFETY: the array has the size of both registers.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), low) };
    // SAFETY: as above.
    unsafe { _mm512_storeu_ps(to[16..].as_mut_ptr(), high) };
}

/// Expands blocks of signed bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn blocks<B: Groups>(bytes: &[u8], wanted: Range<usize>, out: &mut [f32]) {
    let out = out.as_chunks_mut().0;
    for (i, block) in bytemuck::cast_slice::<u8, B>(bytes).iter().enumerate() {
        // SAFETY: this level includes AVX2 and F16C.
        let factors = unsafe { block.factors() };
        for g in wanted_groups::<B>(i, &wanted) {
            store(
                &mut out[i * B::GROUPS + g - wanted.start / 32],
                group(block, &factors, g),
            );
        }
    }
}

/// The values of group `g` of `block`, whose factors are given.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(in crate::arch) fn group<B: Groups>(
    block: &B,
    Factors { scale, offset }: &Factors,
    g: usize,
) -> [__m512; 2] {
    // SAFETY: this level includes AVX2.
    let q = unsafe { block.bytes(g) };
    let value = |half: usize, q: __m128i| {
        let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
        _mm512_fmadd_ps(
            _mm512_set1_ps(scale[2 * g + half]),
            q,
            _mm512_set1_ps(offset[2 * g + half]),
        )
    };
    [
        value(0, _mm256_castsi256_si128(q)),
        value(1, _mm256_extracti128_si256::<1>(q)),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load512<T: Pod>(x: &[T]) -> __m512i {
    assert_eq!(size_of_val(x), 64);
    // SAFETY: the length was checked.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}
