//! Products with many activation rows: panels of integers, at this level and with `smmla`.
//!
//! Block-quantised weights are multiplied as bytes. K-quants take 8-bit activations with a scale
//! per 32, which has a smaller error than llama.cpp's scale per 256. For formats of 32 weights
//! llama.cpp has a scale per 32, too, which leaves no margin: they take 16-bit activations, in two
//! planes of bytes. F32, F16 and BF16 weights are multiplied as for decode rows
//! (`generic/matvec.rs`).
//!
//! The tile multiplies 8 activation rows by 4 weight rows: 8 registers of integer sums, and 8 of
//! `f32` that they are added to with their factors after each 32 (or 16) values. More would not
//! leave registers for operands. As each record's integers start from zero, those of the next
//! records do not wait for them.
//!
//! Instructions per product of a weight and an activation (`tests/neon_instructions.py`), and the
//! billions of products per second that four 128-bit pipes at 4.4 GHz bound them to if each took
//! one:
//!
//! | | one plane, factors per 32 | per 16 | two planes, per 32 | per 16 |
//! |---|---|---|---|---|
//! | `sdot` by element | 0.124: 142 | 0.164: 107 | 0.202: 87 | 0.250: 70 |
//! | `smmla`, two rows by two | 0.109: 161 | 0.169: 104 | 0.157: 112 | 0.226: 78 |
//!
//! The `f32` panels take 0.30, at most 58.

use crate::arch::aarch64::neon::gemm::{
    self, LANES, factors, int_words, record, round, store_bytes,
};
use crate::arch::aarch64::neon::unpack::{Factors, UnpackBlocks, with_weights};
use crate::arch::gemm::{BLOCK, Panels, RegisterTile, TILE, UnpackRows, table};
use crate::arch::table::{Gemm, PanelElement};
use crate::quant::*;
use std::arch::aarch64::*;

macro_rules! int_gemm_for {
    ($ints:ident) => {
        pub(super) fn gemm_for(dtype: DType) -> Gemm {
            macro_rules! two_planes {
                ($block:ident) => {
                    const { table::<$ints<2, 32>>() }
                };
            }
            match dtype {
                DType::Q4_K | DType::Q5_K => const { table::<$ints<1, 32>>() },
                DType::Q2_K | DType::Q3_K | DType::Q6_K => const { table::<$ints<1, 16>>() },
                DType::IQ1_M | DType::IQ2_XS | DType::IQ2_S | DType::NVFP4 => {
                    const { table::<$ints<2, 16>>() }
                }
                _ => with_weights!(dtype, two_planes, gemm::gemm_for(dtype)),
            }
        }
    };
}

/// Weight rows of a tile.
pub(in crate::arch) const ROWS: usize = 4;

/// A level's products of bytes, added to a tile of integers.
pub(in crate::arch) trait Products {
    /// Whether activation rows come in pairs, eight bytes of each in a register; else a register
    /// has four bytes of four rows.
    const PAIRS: bool;

    /// Adds the products of 16 weights of each row with the activations in registers
    /// `x[j · VECS + v]`, `j < 4`.
    ///
    /// # Safety
    /// The CPU must have the level's features, and there must be such activations.
    unsafe fn add<const VECS: usize>(
        int: &mut [[int32x4_t; VECS]; ROWS],
        w: [int8x16_t; ROWS],
        x: *const u32,
    );

    /// The sums for weight row `r` and the four activation rows of register `v`.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn sums<const VECS: usize>(
        int: &[[int32x4_t; VECS]; ROWS],
        r: usize,
        v: usize,
    ) -> int32x4_t;
}

/// `sdot` by element.
enum Sdot {}

impl Products for Sdot {
    const PAIRS: bool = false;

    #[inline(always)]
    unsafe fn add<const VECS: usize>(
        int: &mut [[int32x4_t; VECS]; ROWS],
        w: [int8x16_t; ROWS],
        x: *const u32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            word::<0, VECS>(int, w, x);
            word::<1, VECS>(int, w, x);
            word::<2, VECS>(int, w, x);
            word::<3, VECS>(int, w, x);
        }
    }

    #[inline(always)]
    unsafe fn sums<const VECS: usize>(
        int: &[[int32x4_t; VECS]; ROWS],
        r: usize,
        v: usize,
    ) -> int32x4_t {
        int[r][v]
    }
}

/// Four weights of each row.
#[inline(always)]
unsafe fn word<const J: usize, const VECS: usize>(
    int: &mut [[int32x4_t; VECS]; ROWS],
    w: [int8x16_t; ROWS],
    x: *const u32,
) {
    for v in 0..VECS {
        // SAFETY: the caller's promise.
        unsafe {
            let x = vld1q_s8(x.wrapping_add((J * VECS + v) * LANES).cast());
            for r in 0..ROWS {
                int[r][v] = sdot_word::<J>(int[r][v], x, w[r]);
            }
        }
    }
}

/// `acc[i] + Σ x[4i + j]·w[4J + j]`.
#[inline]
#[target_feature(enable = "dotprod")]
fn sdot_word<const J: usize>(acc: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let mut acc = acc;
    // SAFETY: computes on registers. Once it is stable: `vdotq_laneq_s32`.
    unsafe {
        std::arch::asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]", inout(vreg) acc, in(vreg) x, in(vreg) w, const J, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// Words between rows of a panel.
const ROW: usize = BLOCK / 32 * record(1);

/// Panels of integers: activations in one plane of bytes or in two, with factors for each `SPAN` of
/// 16 or 32 weights.
///
/// Both operands consist of records of 32 values: their bytes, then four words of factors. A weight
/// row has its two scales and its two offsets there, an activation row the scale `d` and `d·Σq` of
/// the first half, of the second half, and of both.
macro_rules! int_panels {
    ($ints:ident, $features:literal, $products:ident) => {
        enum $ints<const PLANES: usize, const SPAN: usize> {}

        impl<const PLANES: usize, const SPAN: usize> Panels for $ints<PLANES, SPAN> {
            const LANES: usize = LANES;
            const TILES: &[RegisterTile] = &[
                RegisterTile {
                    rows: ROWS,
                    multiply: tile_ints::<PLANES, SPAN, 1>,
                },
                RegisterTile {
                    rows: ROWS,
                    multiply: tile_ints::<PLANES, SPAN, 2>,
                },
            ];
            const PACK: unsafe fn(&[f32], usize, &mut [u32]) = pack_ints::<$products, PLANES>;
            const STORE: unsafe fn(*const f32, *mut f32, usize, usize, usize) =
                gemm::store_transposed;

            fn words(k: usize) -> usize {
                k / 32 * record(PLANES)
            }

            fn panel_words(k: usize) -> usize {
                k / 32 * record(1)
            }
        }

        impl<const PLANES: usize, const SPAN: usize> UnpackRows for $ints<PLANES, SPAN> {
            const ELEMENT: (PanelElement, u64) = (PanelElement::I8, PLANES as u64);

            unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut [u32]) {
                macro_rules! blocks {
                    ($block:ident) => {
                        // SAFETY: the caller's promise.
                        unsafe { int_blocks::<$block, { $block::PER_256 }>(bytes, out) }
                    };
                }
                with_weights!(
                    dtype,
                    blocks,
                    unreachable!("{dtype} runs the scalar kernels")
                )
            }
        }

        /// `VECS` registers of activations times 4 weight rows.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn tile_ints<const PLANES: usize, const SPAN: usize, const VECS: usize>(
            w: *const u32,
            x: *const u32,
            k: usize,
            sums: *mut f32,
            first: bool,
            _ahead: *const u32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { int_tile::<$products, PLANES, SPAN, VECS>(w, x, k / 32, sums, first) }
        }
    };
}
pub(in crate::arch) use {int_gemm_for, int_panels};

int_panels!(IntPanels, "neon,dotprod", Sdot);
int_gemm_for!(IntPanels);

/// The tile, to be inlined into a function that has the features of `P`.
///
/// # Safety
/// The CPU must have them; else as [`crate::arch::gemm::Multiply`].
#[inline(always)]
pub(in crate::arch) unsafe fn int_tile<
    P: Products,
    const PLANES: usize,
    const SPAN: usize,
    const VECS: usize,
>(
    w: *const u32,
    x: *const u32,
    records: usize,
    sums: *mut f32,
    first: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[vdupq_n_f32(0.0); VECS]; ROWS];
        if !first {
            for r in 0..ROWS {
                for v in 0..VECS {
                    acc[r][v] = vld1q_f32(sums.wrapping_add((v * TILE + r) * LANES));
                }
            }
        }
        for i in 0..records {
            let w = w.wrapping_add(i * record(1));
            let x = x.wrapping_add(i * record(PLANES) * VECS * LANES);
            if SPAN == 32 {
                add_span::<P, PLANES, VECS, 2>(&mut acc, w, x, 0);
            } else {
                add_span::<P, PLANES, VECS, 1>(&mut acc, w, x, 0);
                add_span::<P, PLANES, VECS, 1>(&mut acc, w, x, 1);
            }
        }
        for r in 0..ROWS {
            for v in 0..VECS {
                vst1q_f32(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]);
            }
        }
    }
}

/// Adds the products of `16·N` values from `16·span` on of a record.
#[inline(always)]
unsafe fn add_span<P: Products, const PLANES: usize, const VECS: usize, const N: usize>(
    acc: &mut [[float32x4_t; VECS]; ROWS],
    w: *const u32,
    x: *const u32,
    span: usize,
) {
    // SAFETY: the caller's promise; all offsets are inside the records.
    unsafe {
        let mut int = [[vdupq_n_s32(0); VECS]; ROWS];
        if PLANES == 2 {
            add_plane::<P, VECS, N>(&mut int, w, x, span);
            for r in 0..ROWS {
                for v in 0..VECS {
                    int[r][v] = vshlq_n_s32::<8>(int[r][v]);
                }
            }
        }
        add_plane::<P, VECS, N>(
            &mut int,
            w,
            x.wrapping_add(int_words(PLANES - 1) * VECS * LANES),
            span,
        );

        let mut factors = [vdupq_n_f32(0.0); ROWS];
        for r in 0..ROWS {
            factors[r] = vld1q_f32(w.wrapping_add(r * ROW + int_words(1)).cast());
        }
        let word =
            |j: usize, v: usize| x.wrapping_add(((int_words(PLANES) + j) * VECS + v) * LANES);
        for v in 0..VECS {
            let d = vld1q_f32(word(0, v).cast());
            let x_sum = vld1q_f32(word(if N == 2 { 3 } else { 1 + span }, v).cast());
            for r in 0..ROWS {
                // At most 32 products of 2⁷ and 2¹⁴ in a lane.
                let product = vmulq_f32(vcvtq_f32_s32(P::sums(&int, r, v)), d);
                acc[r][v] = if span == 0 {
                    let scaled = vfmaq_laneq_f32::<0>(acc[r][v], product, factors[r]);
                    vfmaq_laneq_f32::<2>(scaled, x_sum, factors[r])
                } else {
                    let scaled = vfmaq_laneq_f32::<1>(acc[r][v], product, factors[r]);
                    vfmaq_laneq_f32::<3>(scaled, x_sum, factors[r])
                };
            }
        }
    }
}

/// Adds the products of `16·N` weights from `16·span` on with one plane of activations.
#[inline(always)]
unsafe fn add_plane<P: Products, const VECS: usize, const N: usize>(
    int: &mut [[int32x4_t; VECS]; ROWS],
    w: *const u32,
    x: *const u32,
    span: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        add_16::<P, VECS>(int, w, x, 4 * span);
        // Unrolled by hand: the compiler would keep a loop.
        if N == 2 {
            add_16::<P, VECS>(int, w, x, 4 * (span + 1));
        }
    }
}

/// Adds the products of 16 weights, from word `j` of the record on.
#[inline(always)]
unsafe fn add_16<P: Products, const VECS: usize>(
    int: &mut [[int32x4_t; VECS]; ROWS],
    w: *const u32,
    x: *const u32,
    j: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut ws = [vdupq_n_s8(0); ROWS];
        for r in 0..ROWS {
            ws[r] = vld1q_s8(w.wrapping_add(r * ROW + j).cast());
        }
        P::add::<VECS>(int, ws, x.wrapping_add(j * VECS * LANES));
    }
}

/// Packs groups of activation rows.
#[target_feature(enable = "neon")]
pub(in crate::arch) fn pack_ints<P: Products, const PLANES: usize>(
    x: &[f32],
    k: usize,
    packed: &mut [u32],
) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (i, packed) in packed
        .chunks_exact_mut(record(PLANES) * n_vecs * LANES)
        .enumerate()
    {
        for row in 0..n_vecs * LANES {
            let (v, lane) = (row / LANES, row % LANES);
            let words = match x.get(row * k + 32 * i..) {
                Some(x) if !x.is_empty() => {
                    round::<PLANES>(x.first_chunk().expect("rows of whole records"))
                }
                _ => [0; record(2)],
            };
            for (j, &word) in words.iter().enumerate().take(record(PLANES)) {
                let (register, lane) = if P::PAIRS && j < int_words(PLANES) {
                    (j / 2 * 2 + lane / 2, lane % 2 * 2 + j % 2)
                } else {
                    (j, lane)
                };
                packed[(register * n_vecs + v) * LANES + lane] = word;
            }
        }
    }
}

/// Writes the records of a weight row.
#[target_feature(enable = "neon")]
pub(in crate::arch) fn int_blocks<B: UnpackBlocks<N>, const N: usize>(
    bytes: &[u8],
    out: &mut [u32],
) {
    let bytes = bytemuck::cast_slice::<u8, B>(bytes);
    let mut blocks = [B::zeroed(); N];
    blocks[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: this level has NEON.
    let Factors { scale, offset } = unsafe { B::factors(&blocks) };
    let (scale, offset) = (factors::<B, N>(scale), factors::<B, N>(offset));
    for b in 0..bytes.len() * 8 / N {
        // SAFETY: as above.
        let [low, high] = unsafe { B::bytes(&blocks, b) };
        let (words, _) = out[b * record(1)..].as_chunks_mut::<4>();
        store_bytes(&mut words[0], low);
        store_bytes(&mut words[1], high);
        words[2] = [
            scale[2 * b],
            scale[2 * b + 1],
            offset[2 * b],
            offset[2 * b + 1],
        ]
        .map(f32::to_bits);
    }
}
