//! Products with many activation rows on bf16 tiles.
//!
//! A panel row is 32 weights to 16 words, as a tile of weights wants them, and the packed activations are the words of
//! 16 rows side by side, as a tile of the other operand does: tiles are loaded from both without any more shuffling. A
//! register tile is 2 × 2 tiles of sums. Block formats are rounded to bf16, which has 0.4 of the error of 8-bit
//! activations. F16 and BF16 weights are to stay exact: an activation is the sum of three bf16 numbers, a weight of two
//! or, for BF16, of one; all products of the parts go into the same sum, except that of the two smallest, 2⁻²⁷ of the
//! whole. With two numbers an activation would lose up to 2⁻¹⁸ of its value, and logits of F16 models with 32 layers
//! would be off by three thousandths. F32 weights have more bits than two numbers hold, and use the `f32` panels of
//! AVX-512.
//!
//! ```text
//! for each SUMS activation rows, for each SWEEP of weight rows
//!     for each DEPTH of k              these activations stay in L2: 256 KiB
//!         for each TILE weight rows    their panel stays in L1: 16 KiB
//!             for each 32 activation rows
//!                 sums (L2: 512 KiB) += panel · activations
//!                 unpack a part of the next panel, prefetch the one after that
//!     transpose the sums into y
//! ```
//!
//! The budget, at 512 rows, for one step of the innermost loop (32 weight rows × 256 values × 32 activations: 32
//! products), in cycles of a core whose data are in the caches named above; two threads of a core share it:
//!
//! | | per step | cycles |
//! |---|---|---|
//! | products | 32 of 16 cycles | 512 |
//! | tiles loaded: weights 16, activations 16, sums 4 | 36 of 8 cycles (two rows per cycle) | 288 |
//! | tiles stored: sums 4 | 4 of 16 cycles | 64 |
//! | L2 to L1: activations 16 KiB, sums 4 KiB | 20 KiB of 48 bytes per cycle | 427 |
//! | L3 to L2: activations, once per sweep | 2 KiB of 8 bytes per cycle | 256 |
//! | unpack: 512 weights (Q4_K; Q6_K) | 0.13; 0.25 cycles per weight, as on Zen 4 | 68; 128 |
//!
//! All of it runs beside the products. This holds for up to one thread per 1024 weight rows; with more, sweeps are
//! shorter, so that all threads have work. If a task had one panel (32 rows instead of `SWEEP`), all activations would
//! come from L3 for each: 16 KiB per step, 2048 cycles. With panels of 512 values, a panel and the activations that
//! pass between two uses of it would take 64 KiB, more than L1 has. Keeping sums in tiles over all of k saves 8 KiB of
//! sums per step, but costs 16 KiB of weights that then come from L2.
//!
//! Five products for F16 leave a fifth of the peak, three for BF16 a third: at 60 % of 2.1 TFLOP/s that is 1.8
//! and three times the 0.14 that `f32` multiply-adds could reach.
//!
//! Up to 16 rows, a step is 16 products in two chains, at most 52 · 8 = 416 cycles, less than the unpacking
//! of 8192 weights (1100) that runs beside it: rows are free up to there. Activations then stay in L2 anyway,
//! and a task goes through the weights of one panel after the other, in the order of memory, which
//! gives a weight of 4.5 bits in 0.11 cycles.
//!
//! The level was written without such a CPU at hand and checked against emulations of the tile instructions
//! (`--cfg ruvllm_emulate_amx`, `tests/amx.sh`); its numbers of rows and prefetch distances are reasoned, not measured,
//! from the instruction tables and the cost of unpacking on Zen 4.

use super::tiles::{Tiles, tile_dpbf16ps, tile_loadd, tile_stored, tile_zero};
use super::unpack::{
    Bf16, DEPTH, Dequantized, F16, FiveBits, GROUP, Halves, LANES, PanelRow, UnpackTile, Widened, split,
};
use crate::arch::avx512::{gemm as avx512, peak};
use crate::arch::gemm::{TILE, packed_bytes, prefetch, prefetch_line_l1};
use crate::arch::{CacheLine, ColumnsMut, Gemm, PanelElement};
use crate::quant::*;
use std::arch::x86_64::*;

/// Registers of activations in a register tile.
const VECS: usize = 2;
/// Activation rows whose sums are kept at a time; with more rows, the weights are unpacked again.
const SUMS: usize = 512;
/// Weight rows whose sums are kept at a time: 512 KiB.
const SWEEP: usize = 256;
/// Bytes of activations that stay in L2 whatever the order of the loops.
const STAYS: usize = 512 << 10;
/// Words per panel row.
const PANEL: usize = DEPTH / 2;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::F32 => avx512::gemm_for(dtype),
        DType::F16 => const { on_tiles::<F16>() },
        DType::BF16 => const { on_tiles::<Bf16>() },
        DType::Q4_0 => const { on_tiles::<Halves<BlockQ4_0>>() },
        DType::Q4_1 => const { on_tiles::<Halves<BlockQ4_1>>() },
        DType::IQ4_NL => const { on_tiles::<Halves<BlockIq4Nl>>() },
        DType::IQ4_XS => const { on_tiles::<Halves<BlockIq4Xs>>() },
        DType::MXFP4 => const { on_tiles::<Halves<BlockMxfp4>>() },
        DType::Q4_K => const { on_tiles::<BlockQ4K>() },
        DType::Q5_K => const { on_tiles::<BlockQ5K>() },
        DType::Q5_0 => const { on_tiles::<FiveBits<BlockQ5_0>>() },
        DType::Q5_1 => const { on_tiles::<FiveBits<BlockQ5_1>>() },
        DType::Q8_0 => const { on_tiles::<Widened<BlockQ8_0>>() },
        DType::Q2_K => const { on_tiles::<Widened<BlockQ2K>>() },
        DType::Q3_K => const { on_tiles::<Widened<BlockQ3K>>() },
        DType::Q6_K => const { on_tiles::<Widened<BlockQ6K>>() },
        DType::TQ2_0 => const { on_tiles::<Widened<BlockTq2_0>>() },
        _ => const { on_tiles::<Dequantized>() },
    }
}

const fn on_tiles<W: UnpackTile>() -> Gemm {
    Gemm {
        element: (PanelElement::Bf16, products_of::<W>()),
        tile: SWEEP,
        few: 0,
        both: None,
        group: VECS * LANES,
        packed_len: if W::X_PARTS == 1 { packed_len::<1> } else { packed_len::<3> },
        pack: if W::X_PARTS == 1 { pack::<1> } else { pack::<3> },
        workspace: CacheLine::holding(2 * TILE * PANEL + SWEEP * SUMS),
        kernel: kernel::<W>,
    }
}

/// Products of parts per product of a weight and an activation: all except that of the smallest parts of both.
const fn products_of<W: UnpackTile>() -> u64 {
    (W::PARTS * W::X_PARTS - (W::PARTS - 1)) as u64
}

/// Words that `k` values of an activation row take.
const fn words<const PARTS: usize>(k: usize) -> usize {
    k.div_ceil(GROUP) * PARTS * LANES
}

fn packed_len<const PARTS: usize>(m: usize, k: usize) -> usize {
    packed_bytes(m, LANES, words::<PARTS>(k))
}

/// Four independent tiles of sums, as in [`multiply`], without loads.
pub(super) unsafe fn peak(element: PanelElement, rounds: u64) -> u64 {
    if element != PanelElement::Bf16 {
        // SAFETY: this level includes AVX-512.
        return unsafe { peak::peak(element, rounds) };
    }
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    for _ in 0..rounds {
        // SAFETY: a configuration is loaded, which leaves all tiles zero.
        unsafe { products::<2>() };
    }
    rounds * 4 * 2 * (LANES * LANES * GROUP) as u64
}

/// `packed[g][part][word][v][lane]`: of group `g` of the rows `v·LANES + lane`, at most `VECS · LANES`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack<const PARTS: usize>(x: &[f32], _m: usize, k: usize, packed: &mut [u8]) {
    let packed: &mut [u32] = bytemuck::cast_slice_mut(packed);
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (g, packed) in packed.chunks_mut(PARTS * LANES * n_vecs * LANES).enumerate() {
            let mut parts = [[_mm512_setzero_si512(); LANES]; PARTS];
            for (row, x) in x.chunks_exact(k).enumerate() {
                let x = avx512::load_f32(&x[g * GROUP..((g + 1) * GROUP).min(k)]);
                for (to, part) in parts.iter_mut().zip(split::<PARTS>(x)) {
                    to[row] = part;
                }
            }
            for (part, packed) in parts.into_iter().zip(packed.chunks_exact_mut(LANES * n_vecs * LANES)) {
                avx512::interleave(avx512::transpose(part), packed, v, n_vecs);
            }
        }
    }
}

/// The weights of a product, panel by panel.
struct PanelWeights<'a> {
    dtype: DType,
    w: &'a [u8],
    row_bytes: usize,
    n_rows: usize,
    k: usize,
    /// Values per panel row, and the bytes they come from.
    depth: usize,
    bytes: usize,
    /// Weight rows that are multiplied by one part of the activations before the next part is used.
    sweep: usize,
}

/// A panel: the rows from `row` on, the values from `k0` on.
#[derive(Clone, Copy)]
struct Panel {
    row: usize,
    k0: usize,
}

impl PanelWeights<'_> {
    /// The panel after `p`.
    fn after(&self, p: Panel) -> Option<Panel> {
        let start = p.row / self.sweep * self.sweep;
        let end = (start + self.sweep).min(self.n_rows);
        if p.row + TILE < end {
            Some(Panel { row: p.row + TILE, ..p })
        } else if p.k0 + self.depth < self.k {
            Some(Panel { row: start, k0: p.k0 + self.depth })
        } else {
            (end < self.n_rows).then_some(Panel { row: end, k0: 0 })
        }
    }

    /// The blocks of row `r` of `p`; empty past the last row.
    #[inline]
    fn blocks(&self, p: Panel, r: usize) -> &[u8] {
        if p.row + r >= self.n_rows {
            return &[];
        }
        let row = &self.w[(p.row + r) * self.row_bytes..][..self.row_bytes];
        let start = p.k0 / self.depth * self.bytes;
        &row[start..(start + self.bytes).min(self.row_bytes)]
    }

    /// Unpacks `rows` of `p`, and prefetches those of the panel after it.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack<W: UnpackTile>(&self, p: Panel, rows: std::ops::Range<usize>, panel: &mut [PanelRow]) {
        let after = self.after(p);
        for r in rows {
            let mut blocks = self.blocks(p, r);
            // Panels are multiplied whole: missing blocks are replaced by zero bytes, which expand to 0.
            let mut filled;
            if blocks.len() < self.bytes {
                filled = [0; 2 * DEPTH];
                filled[..blocks.len()].copy_from_slice(blocks);
                blocks = &filled[..self.bytes];
            }
            // SAFETY: the caller's promise.
            unsafe { W::unpack(self.dtype, blocks, &mut panel[r]) };
            if let Some(after) = after {
                prefetch(self.blocks(after, r));
            }
        }
    }
}

/// See [`Gemm::kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
unsafe fn kernel<W: UnpackTile>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    let format = dtype.float_format();
    let x: &[u32] = bytemuck::cast_slice(packed);
    let words = |k: usize| k.div_ceil(GROUP) * W::X_PARTS * LANES;
    let depth = W::VALUES;
    let row_bytes = k / format.block_elems * format.block_bytes;
    let panels = PanelWeights {
        dtype,
        w,
        row_bytes,
        n_rows: y.cols(),
        k,
        depth,
        bytes: depth / format.block_elems * format.block_bytes,
        sweep: if packed.len() <= STAYS { TILE } else { SWEEP },
    };
    let vec_words = words(k) * LANES;
    let n_vecs = y.rows().div_ceil(LANES);

    // One buffer is multiplied while the other is filled.
    let (buffers, sums) = bytemuck::cast_slice_mut::<_, u32>(workspace).split_at_mut(2 * TILE * PANEL);
    let mut buffers: [&mut [PanelRow]; 2] = bytemuck::cast_slice_mut::<_, PanelRow>(buffers).split_at_mut(TILE).into();
    // `[TILE of weight rows][register of activations][weight row][lane]`
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[..SWEEP * SUMS]);
    let sums = sums.as_mut_ptr();

    for first_vec in (0..n_vecs).step_by(SUMS / LANES) {
        let n_vecs = (n_vecs - first_vec).min(SUMS / LANES);
        let x = &x[first_vec * vec_words..];
        let n_tiles = n_vecs.div_ceil(VECS);
        // Activations of register tile `t`, `n` values from `k0` on.
        let activations = |t: usize, k0: usize| {
            let vecs = (n_vecs - t * VECS).min(VECS);
            let x = &x[t * VECS * vec_words..][..vecs * vec_words];
            &x[words(k0) * vecs * LANES..words((k0 + depth).min(k)) * vecs * LANES]
        };
        let mut next = (panels.n_rows > 0 && k > 0).then_some(Panel { row: 0, k0: 0 });
        if let Some(first) = next {
            // SAFETY: the caller's promise.
            unsafe { panels.unpack::<W>(first, 0..TILE, buffers[0]) };
        }
        while let Some(panel) = next {
            next = panels.after(panel);
            let in_sweep = panel.row % panels.sweep;
            let tile_sums = |v: usize| sums.wrapping_add((in_sweep * n_vecs + v * TILE) * LANES);
            let groups = (k - panel.k0).min(depth).div_ceil(GROUP);
            let next_k0 = if panel.k0 + depth < k { panel.k0 + depth } else { 0 };
            for t in 0..n_tiles {
                let vecs = (n_vecs - t * VECS).min(VECS);
                let x = activations(t, panel.k0);
                let ahead = activations((t + 1) % n_tiles, panel.k0).as_ptr();
                let tile = if vecs == 1 { tile::<W, 1> } else { tile::<W, 2> };
                // SAFETY: the panel is unpacked, the activations are packed; the tiles of sums lie among them.
                unsafe {
                    tile(buffers[0].as_ptr().cast(), x.as_ptr(), groups, tile_sums(t * VECS), panel.k0 == 0, ahead)
                };
                // Each panel of a sweep prefetches a part of what the next ones multiply.
                let soon = activations(t, next_k0);
                if panels.sweep > TILE
                    && let Some(soon) = soon.chunks(soon.len().div_ceil(SWEEP / TILE)).nth(in_sweep / TILE)
                {
                    prefetch(bytemuck::cast_slice(soon));
                }
                if let Some(next) = next {
                    let rows = t * TILE / n_tiles..(t + 1) * TILE / n_tiles;
                    // SAFETY: the caller's promise.
                    unsafe { panels.unpack::<W>(next, rows, buffers[1]) };
                }
            }
            buffers.swap(0, 1);
            // After the last panel of a sweep, another sweep begins or the work is done.
            if next.is_none_or(|next| next.k0 == 0 && next.row % panels.sweep == 0) {
                let start = panel.row - in_sweep;
                // SAFETY: all sums of the sweep were computed.
                unsafe { store(y, first_vec, n_vecs, start, panel.row + TILE, sums) };
            }
        }
    }
}

/// Stores the sums of the activation rows in `n_vecs` registers to the columns `start..end` of `y`, where it has them.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn store(y: &mut ColumnsMut<'_>, first_vec: usize, n_vecs: usize, start: usize, end: usize, sums: *const f32) {
    let (rows, cols, stride) = (y.rows(), y.cols().min(end), y.stride());
    for v in 0..n_vecs {
        let row = (first_vec + v) * LANES;
        let n = (rows - row).min(LANES);
        for col in (start..cols).step_by(LANES) {
            let (panel, r) = ((col - start) / TILE, (col - start) % TILE);
            let sums = sums.wrapping_add(((panel * n_vecs + v) * TILE + r) * LANES);
            let y = y.as_mut_ptr().wrapping_add(row * stride + col);
            // SAFETY: rows `row..row + n` and these columns are in `y`.
            unsafe { avx512::store_transposed(sums, y, stride, n, (cols - col).min(LANES)) };
        }
    }
}

/// Prefetch distance for activations, in groups: L2 takes some 15 cycles, and a group 64.
const AHEAD: usize = 2;

/// `sums[v][r][lane] (+)= Σ w[r]·x[v][lane]` for 32 weight rows and `VECS` registers of activations; `first` starts
/// from zero. Tiles 0 to 3 are the sums (`2·row + vec`), 4 and 5 weights, 6 and 7 activations. Also prefetches the
/// activations from `ahead` on, which are next.
///
/// # Safety
/// A configuration must be loaded, `w` be a panel, `x` have the groups, and the registers of sums
/// lie [`TILE`] registers apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tile<W: UnpackTile, const VECS: usize>(
    w: *const u32,
    x: *const u32,
    groups: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    let x_stride = VECS * LANES * size_of::<u32>();
    let (x_part, x_group) = (LANES * VECS * LANES, W::X_PARTS * LANES * VECS * LANES);
    let sums_at = |r: usize, v: usize| sums.wrapping_add((v * TILE + r * LANES) * LANES);
    // SAFETY: the caller has a configuration loaded, and the tiles lie among the sums.
    unsafe {
        if first {
            tile_zero::<0>();
            tile_zero::<2>();
            if VECS == 2 {
                tile_zero::<1>();
                tile_zero::<3>();
            }
        } else {
            tile_loadd::<0>(sums_at(0, 0).cast(), LANES * 4);
            tile_loadd::<2>(sums_at(1, 0).cast(), LANES * 4);
            if VECS == 2 {
                tile_loadd::<1>(sums_at(0, 1).cast(), LANES * 4);
                tile_loadd::<3>(sums_at(1, 1).cast(), LANES * 4);
            }
        }
    }
    for g in 0..groups {
        let next = match g + AHEAD < groups {
            true => x.wrapping_add((g + AHEAD) * x_group),
            false => ahead.wrapping_add((g + AHEAD - groups) * x_group),
        };
        for line in 0..x_group / LANES {
            prefetch_line_l1(next.wrapping_add(line * LANES).cast());
        }
        let x = x.wrapping_add(g * x_group);
        let w = w.wrapping_add(g * W::PARTS * LANES);
        // SAFETY: as above; tiles of weights lie in the panel, those of activations in `x`.
        unsafe {
            weights(w);
            activations::<VECS>(x, x_stride);
            products::<VECS>();
            if W::X_PARTS == 3 {
                // hi·lowest, hi·middle, lo·middle, lo·hi: each time only one operand has to be loaded.
                activations::<VECS>(x.wrapping_add(2 * x_part), x_stride);
                products::<VECS>();
                activations::<VECS>(x.wrapping_add(x_part), x_stride);
                products::<VECS>();
                if W::PARTS == 2 {
                    weights(w.wrapping_add(LANES));
                    products::<VECS>();
                    activations::<VECS>(x, x_stride);
                    products::<VECS>();
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe {
        tile_stored::<0>(sums_at(0, 0), LANES * 4);
        tile_stored::<2>(sums_at(1, 0), LANES * 4);
        if VECS == 2 {
            tile_stored::<1>(sums_at(0, 1), LANES * 4);
            tile_stored::<3>(sums_at(1, 1), LANES * 4);
        }
    }
}

#[inline(always)]
unsafe fn weights(w: *const u32) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_loadd::<4>(w, PANEL * size_of::<u32>());
        tile_loadd::<5>(w.wrapping_add(LANES * PANEL), PANEL * size_of::<u32>());
    }
}

#[inline(always)]
unsafe fn activations<const VECS: usize>(x: *const u32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_loadd::<6>(x, stride);
        if VECS == 2 {
            tile_loadd::<7>(x.wrapping_add(LANES), stride);
        }
    }
}

#[inline(always)]
unsafe fn products<const VECS: usize>() {
    // SAFETY: the caller's promise.
    unsafe {
        tile_dpbf16ps::<0, 4, 6>();
        tile_dpbf16ps::<2, 5, 6>();
        if VECS == 2 {
            tile_dpbf16ps::<1, 4, 7>();
            tile_dpbf16ps::<3, 5, 7>();
        }
    }
}
