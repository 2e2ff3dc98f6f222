//! Products with many activation rows on bf16 tiles.
//!
//! A panel row is 32 weights in 16 words, the layout of a tile of weights, and the packed
//! activations are the words of 16 rows side by side, that of a tile of the other operand: tiles
//! are loaded from both without any more shuffling. A register tile is 2 × 2 tiles of sums. Block
//! formats are rounded to bf16, which has 0.4 of the error of 8-bit activations. F16 and BF16
//! weights are to stay exact: an activation is the sum of three bf16 numbers, a weight of two or,
//! for BF16, of one; all products of the parts go into the same sum, except that of the two
//! smallest, 2⁻²⁷ of the whole. With two numbers an activation would lose up to 2⁻¹⁸ of its value,
//! and logits of F16 models with 32 layers would be off by three thousandths. F32 weights have more
//! bits than two numbers, and use the `f32` panels of AVX-512.
//!
//! ```text
//! for each SUMS activation rows, for each SWEEP of weight rows
//!     for each panel's depth of k      these activations stay in L2: 512 KiB
//!         for each TILE weight rows    their panel stays in L1: 32 KiB
//!             for each 32 activation rows
//!                 new sums = panel · activations, 64 products
//!                 meanwhile: unpack a piece of the next panel, prefetch one of the panel after it,
//!                 add the new sums of the register tile before to its sums (L2: 1 MiB), or store them to y
//! ```
//!
//! Limits, measured on a Xeon with 2 MiB of L2 at 3.7 GHz, one core, ns per product of tiles (16
//! cycles, 4.4 ns):
//!
//! | | zeros | random numbers |
//! |---|---|---|
//! | operands in registers | 4.4 | 4.8 |
//! | all from L1 | 4.4 | 5.6 |
//! | activations from L2, 256 values deep, no sums | 4.5 | 5.6 |
//! | … sums loaded to tiles from L2 and stored | 6.6 | 8.4 |
//! | … new sums stored to L1 and added by AVX-512 | | 7.3 |
//! | 512 values deep, no sums | | 7.5, with hints 5.9 |
//! | … new sums added by AVX-512, with hints | | 6.8 |
//! | activations from L3 once per sweep | | 8.5 |
//!
//! So the CPU multiplies random numbers at 80 % of its peak at best; activations from L2 cost
//! nothing, software prefetches of them only take time; sums are expensive. Panels of 512 values
//! leave L1 no room for activations, unless these are loaded with the hint that they are not needed
//! again (`tileloaddt1`). Vector instructions between the products overlap with them, except
//! `vcvtne2ps2bf16` (0.2 ns). Stores to lines of y that are in L3 reach 10 GB/s: these lines are
//! prefetched one register tile ahead. Values that were stored in pieces and are loaded as a whole
//! wait until all older products are retired, so this must not happen between products: code
//! between them takes its arguments in registers.
//!
//! Of these, unpacking takes 0.9 to 1.3 ns per product with 512 rows (Q4_K; alone 0.08 ns per
//! weight), sums 1.0 to 1.9, stores 1.2 where k is 2048. With more than one thread per 2048 weight
//! rows sweeps are shorter, so that all threads have work. A task of one panel would read all
//! activations from L3: 32 KiB per 64 products, at 30 GB/s 17 ns each.
//!
//! Up to 16 rows, unpacking decides: 0.08 ns per weight. Activations then stay in L2 anyway, and a
//! task goes through the weights of one panel after the other, in the order of memory.

use super::tiles::{Tiles, tile_dpbf16ps, tile_loadd, tile_stored, tile_stream_loadd, tile_zero};
use super::unpack::{
    Bf16, DEPTH, Dequantized, F16, FiveBits, GROUP, Halves, LANES, PanelRow, UnpackTile, Widened,
    split,
};
use crate::arch::gemm::{TILE, packed_bytes, prefetch};
use crate::arch::table::{Gemm, PanelElement};
use crate::arch::view::{CacheLine, ColumnsMut};
use crate::arch::x86::avx2::unpack::with_groups;
use crate::arch::x86::avx512::common::{interleave, load_up_to_32, transpose};
use crate::arch::x86::avx512::panels::floats::store_transposed;
use crate::arch::x86::avx512::{gemm as avx512, peak};
use crate::quant::*;
use std::arch::x86_64::*;

/// Registers of activations in a register tile.
const VECS: usize = 2;
/// Maximum activation rows with sums kept at a time; with more rows, the weights are unpacked
/// again.
const SUMS: usize = 512;
/// Maximum weight rows with sums kept at a time: 1 MiB.
const SWEEP: usize = 512;
/// Bytes of activations that stay in L2 whatever the order of the loops.
const STAYS: usize = 512 << 10;
/// Maximum pieces of a panel row, of `UnpackTile::VALUES` values each.
const PIECES: usize = 2;
/// Words between panel rows.
const PANEL: usize = PIECES * DEPTH / 2;
/// Sums of a register tile.
const TILE_SUMS: usize = TILE * VECS * LANES;
/// 16 x 16 sums.
const SQUARE: usize = LANES * LANES;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    macro_rules! dequantized {
        ($block:ident) => {
            const { on_tiles::<Dequantized>() }
        };
    }
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
        DType::Q1_0 => const { on_tiles::<Widened<BlockQ1_0>>() },
        DType::Q2_0 => const { on_tiles::<Widened<BlockQ2_0>>() },
        _ => with_groups!(dtype, dequantized, avx512::gemm_for(dtype)),
    }
}

const fn on_tiles<W: UnpackTile>() -> Gemm {
    Gemm {
        element: (PanelElement::Bf16, products_of::<W>()),
        tile: SWEEP,
        small_batch: 0,
        mixed: None,
        group: VECS * LANES,
        packed_len: if W::X_PARTS == 1 {
            packed_len::<1>
        } else {
            packed_len::<3>
        },
        pack: if W::X_PARTS == 1 {
            pack::<1>
        } else {
            pack::<3>
        },
        workspace: CacheLine::holding(2 * TILE * PANEL + TILE_SUMS + SWEEP * SUMS),
        kernel: kernel::<W>,
    }
}

/// Products of parts per product of a weight and an activation: all except that of the smallest
/// parts of both.
const fn products_of<W: UnpackTile>() -> u64 {
    (W::PARTS * W::X_PARTS - (W::PARTS - 1)) as u64
}

/// Words that `k` values of an activation row take.
#[inline]
const fn words<const PARTS: usize>(k: usize) -> usize {
    k.div_ceil(GROUP) * PARTS * LANES
}

fn packed_len<const PARTS: usize>(m: usize, k: usize) -> usize {
    packed_bytes(m, LANES, words::<PARTS>(k))
}

/// Four independent tiles of sums, as in [`tile`], without loads: of numbers of any bits, as a tile
/// of zeros takes less power and so runs at a higher clock.
pub(super) unsafe fn peak(element: PanelElement, rounds: u64) -> u64 {
    if element != PanelElement::Bf16 {
        // SAFETY: this level includes AVX-512.
        return unsafe { peak::peak(element, rounds) };
    }
    // Magnitudes from 0.5 to 2.
    let operand: [u32; SQUARE] =
        std::array::from_fn(|i| (i as u32).wrapping_mul(2_654_435_761) & 0x80ff_80ff | 0x3f00_3f00);
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    // SAFETY: a configuration is loaded, which leaves all tiles zero; the operand is a tile.
    unsafe {
        tile_loadd::<4>(operand.as_ptr(), LANES * 4);
        tile_loadd::<5>(operand.as_ptr(), LANES * 4);
        tile_loadd::<6>(operand.as_ptr(), LANES * 4);
        tile_loadd::<7>(operand.as_ptr(), LANES * 4);
    }
    for _ in 0..rounds {
        // SAFETY: as above.
        unsafe { products(VECS) };
    }
    rounds * 4 * 2 * (LANES * LANES * GROUP) as u64
}

/// `packed[g][part][v][word][lane]`: of group `g` of the rows `v·LANES + lane`, at most `VECS ·
/// LANES`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack<const PARTS: usize>(x: &[f32], _m: usize, k: usize, packed: &mut [u8]) {
    let packed: &mut [u32] = bytemuck::cast_slice_mut(packed);
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (g, packed) in packed
            .chunks_mut(PARTS * LANES * n_vecs * LANES)
            .enumerate()
        {
            let mut parts = [[_mm512_setzero_si512(); LANES]; PARTS];
            for (row, x) in x.chunks_exact(k).enumerate() {
                let x = load_up_to_32(&x[g * GROUP..((g + 1) * GROUP).min(k)]);
                for (to, part) in parts.iter_mut().zip(split::<PARTS>(x)) {
                    to[row] = part;
                }
            }
            for (part, packed) in parts
                .into_iter()
                .zip(packed.chunks_exact_mut(n_vecs * SQUARE))
            {
                let tile = &mut packed[v * SQUARE..][..SQUARE];
                interleave(transpose(part), tile, 0, 1);
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
    /// Bytes of `W::VALUES` values.
    bytes: usize,
    /// Weight rows that are multiplied by one part of the activations before the next part is
    /// used.
    sweep: usize,
}

/// A panel: the rows from `row` on, which is row `in_sweep` of a sweep, and the values from `k0`
/// on.
#[derive(Clone, Copy)]
struct Panel {
    row: usize,
    in_sweep: usize,
    k0: usize,
}

impl PanelWeights<'_> {
    /// The panel after `p`.
    fn after<W: UnpackTile>(&self, p: Panel) -> Option<Panel> {
        let start = p.row - p.in_sweep;
        let end = (start + self.sweep).min(self.n_rows);
        if p.row + TILE < end {
            Some(Panel {
                row: p.row + TILE,
                in_sweep: p.in_sweep + TILE,
                ..p
            })
        } else if p.k0 + depth::<W>() < self.k {
            Some(Panel {
                row: start,
                in_sweep: 0,
                k0: p.k0 + depth::<W>(),
            })
        } else {
            (end < self.n_rows).then_some(Panel {
                row: end,
                in_sweep: 0,
                k0: 0,
            })
        }
    }

    /// The blocks of piece `i` of `p`, each row's pieces one after the other; empty past the last
    /// row or value.
    #[inline]
    fn blocks<W: UnpackTile>(&self, p: Panel, i: usize) -> &[u8] {
        let row = p.row + i / pieces::<W>();
        if row >= self.n_rows {
            return &[];
        }
        let start = (p.k0 / W::VALUES + i % pieces::<W>()) * self.bytes;
        let row = &self.w[row * self.row_bytes..][..self.row_bytes];
        &row[start.min(self.row_bytes)..(start + self.bytes).min(self.row_bytes)]
    }

    /// Unpacks piece `i` of `p`, and prefetches that of the panel `after` it.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack<W: UnpackTile>(
        &self,
        p: Panel,
        after: Option<Panel>,
        i: usize,
        panel: &mut [PanelRow],
    ) {
        let to = &mut panel[i / pieces::<W>() * PIECES + i % pieces::<W>()];
        let blocks = self.blocks::<W>(p, i);
        if blocks.len() == self.bytes {
            // SAFETY: the caller's promise.
            unsafe { W::unpack(self.dtype, blocks, to) };
        } else {
            // Panels are multiplied whole: missing blocks are replaced by zero bytes, which expand
            // to 0.
            let mut filled = [0; 2 * DEPTH];
            filled[..blocks.len()].copy_from_slice(blocks);
            // SAFETY: the caller's promise.
            unsafe { W::unpack(self.dtype, &filled[..self.bytes], to) };
        }
        if let Some(after) = after {
            prefetch(self.blocks::<W>(after, i));
        }
    }
}

/// Values of a panel row: the activations of 512 rows stay in L2.
#[inline]
const fn depth<W: UnpackTile>() -> usize {
    if W::X_PARTS == 1 { 2 * DEPTH } else { DEPTH }
}

/// Pieces of a panel row.
#[inline]
const fn pieces<W: UnpackTile>() -> usize {
    depth::<W>() / W::VALUES
}

/// See [`Gemm::kernel`]. (Its length: unpacking, products and sums are interleaved, and code
/// between the tiles takes its arguments in registers.)
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
    let row_bytes = k / format.block_elems * format.block_bytes;
    let panels = PanelWeights {
        dtype,
        w,
        row_bytes,
        n_rows: y.cols(),
        k,
        bytes: W::VALUES / format.block_elems * format.block_bytes,
        sweep: if packed.len() <= STAYS { TILE } else { SWEEP },
    };
    let vec_words = words(k) * LANES;
    let n_vecs = y.rows().div_ceil(LANES);

    // One buffer is multiplied while the other is filled.
    let (buffers, sums) =
        bytemuck::cast_slice_mut::<_, u32>(workspace).split_at_mut(2 * TILE * PANEL);
    let (mut current, mut filled) =
        bytemuck::cast_slice_mut::<_, PanelRow>(buffers).split_at_mut(PIECES * TILE);
    // The new sums of a register tile, then `[TILE of weight rows][register tile]` of a sweep.
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[..TILE_SUMS + SWEEP * SUMS]);
    let new = sums.as_mut_ptr();
    let sums = new.wrapping_add(TILE_SUMS);

    for first_vec in (0..n_vecs).step_by(SUMS / LANES) {
        let n_vecs = (n_vecs - first_vec).min(SUMS / LANES);
        let x = &x[first_vec * vec_words..];
        let n_tiles = n_vecs.div_ceil(VECS);
        // Activations of register tile `t`, those of a panel row from `k0` on.
        let activations = |t: usize, k0: usize| {
            let vecs = (n_vecs - t * VECS).min(VECS);
            let x = &x[t * VECS * vec_words..][..vecs * vec_words];
            x[words(k0) * vecs * LANES..words((k0 + depth::<W>()).min(k)) * vecs * LANES].as_ptr()
        };
        let mut next = (panels.n_rows > 0 && k > 0).then_some(Panel {
            row: 0,
            in_sweep: 0,
            k0: 0,
        });
        if let Some(first) = next {
            for i in 0..pieces::<W>() * TILE {
                // SAFETY: the caller's promise.
                unsafe { panels.unpack::<W>(first, panels.after::<W>(first), i, current) };
            }
        }
        let mut before = NewSums {
            sums,
            line: 0,
            end: 0,
            first: true,
            last: false,
            vec: 0,
            col: 0,
        };
        while let Some(panel) = next {
            next = panels.after::<W>(panel);
            let after = next.and_then(|next| panels.after::<W>(next));
            let groups = (k - panel.k0).min(depth::<W>()).div_ceil(GROUP);
            let last = panel.k0 + depth::<W>() >= k;
            // Work per group between the products: registers of sums, rows of y, pieces of a panel;
            // `due` counts the fractions.
            let (lines, rows) = (
                (VECS * TILE).div_ceil(groups),
                (VECS * LANES).div_ceil(groups),
            );
            let (mut unpacked, mut due) = (0, 0);
            for t in 0..n_tiles {
                let (vec, vecs) = (first_vec + t * VECS, (n_vecs - t * VECS).min(VECS));
                let stride = y.stride();
                let y_tile = y
                    .as_mut_ptr()
                    .wrapping_add(vec * LANES * stride + panel.row);
                let beside = |g: usize| {
                    due += pieces::<W>() * TILE;
                    while due >= n_tiles * groups {
                        due -= n_tiles * groups;
                        if let Some(next) = next {
                            // SAFETY: the caller's promise.
                            unsafe { panels.unpack::<W>(next, after, unpacked, filled) };
                        }
                        unpacked += 1;
                    }
                    // SAFETY: the new sums are those of the register tile before.
                    unsafe { before.add(new, lines, y) };
                    if last {
                        for row in g * rows..(g + 1) * rows {
                            prefetch_to_write(y_tile.wrapping_add(row * stride));
                            prefetch_to_write(y_tile.wrapping_add(row * stride + LANES));
                        }
                    }
                };
                // SAFETY: the panel is unpacked, the activations are packed; the new sums before
                // were added.
                unsafe {
                    tile::<W>(
                        current.as_ptr().cast(),
                        activations(t, panel.k0),
                        groups,
                        vecs,
                        new,
                        beside,
                    )
                };
                before = NewSums {
                    sums: sums.wrapping_add((panel.in_sweep / TILE * n_tiles + t) * TILE_SUMS),
                    line: 0,
                    end: vecs * TILE,
                    first: panel.k0 == 0,
                    last,
                    vec,
                    col: panel.row,
                };
            }
            std::mem::swap(&mut current, &mut filled);
        }
        // SAFETY: as above.
        unsafe { before.add(new, VECS * TILE, y) };
    }
}

/// Asks for a line of y, which need not exist, to be written.
#[inline(always)]
fn prefetch_to_write(y: *const f32) {
    // SAFETY: prefetching has no effect on memory.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(y.cast()) }
}

/// Sums of a register tile over one panel, which are to be added to those over the panels before
/// and, after the last panel of k, stored to `y`.
struct NewSums {
    /// Sums over earlier panels: `[register of activations][weight row][lane]`, as the new ones.
    sums: *mut f32,
    /// Registers that were added, and how many there are.
    line: usize,
    end: usize,
    /// Whether there are none before; whether none come after.
    first: bool,
    last: bool,
    /// First register of activations, and first weight row.
    vec: usize,
    col: usize,
}

impl NewSums {
    /// Adds the next `n` registers, or all that are left.
    ///
    /// # Safety
    /// `new` must have the sums, and the CPU the level's features.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn add(&mut self, new: *const f32, n: usize, y: &mut ColumnsMut<'_>) {
        for line in self.line..(self.line + n).min(self.end) {
            let sums = self.sums.wrapping_add(line * LANES);
            // SAFETY: the caller's promise.
            unsafe {
                let mut x = _mm512_load_ps(new.wrapping_add(line * LANES));
                if !self.first {
                    x = _mm512_add_ps(_mm512_load_ps(sums), x);
                }
                _mm512_store_ps(sums, x);
            }
            if self.last && line % LANES == LANES - 1 {
                let (vec, col) = (
                    self.vec + line / TILE,
                    self.col + line % TILE / LANES * LANES,
                );
                // SAFETY: the sums of these 16 weight rows are complete.
                unsafe { store(y, vec, col, self.sums.wrapping_add(line / LANES * SQUARE)) };
            }
        }
        self.line += n;
    }
}

/// Stores the sums of 16 weight rows from `col` on and the activation rows in register `vec` to
/// `y`, as far as it has them.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn store(y: &mut ColumnsMut<'_>, vec: usize, col: usize, sums: *const f32) {
    let (rows, cols, stride) = (y.rows(), y.cols(), y.stride());
    let row = vec * LANES;
    if row < rows && col < cols {
        let y = y.as_mut_ptr().wrapping_add(row * stride + col);
        // SAFETY: rows `row..row + n` and these columns are in `y`.
        unsafe {
            store_transposed(
                sums,
                y,
                stride,
                (rows - row).min(LANES),
                (cols - col).min(LANES),
            )
        };
    }
}

/// `sums[v][r][lane] = Σ w[r]·x[v][lane]` for 32 weight rows and `vecs` registers of activations.
/// Tiles 0 to 3 are the sums (`2·row + vec`), 4 and 5 weights, 6 and 7 activations. Calls `beside`
/// for each group, for work that runs while the tiles multiply.
///
/// # Safety
/// A configuration must be loaded, `w` be a panel, `x` have the groups, and `sums` room.
#[inline(always)]
unsafe fn tile<W: UnpackTile>(
    w: *const u32,
    x: *const u32,
    groups: usize,
    vecs: usize,
    sums: *mut f32,
    mut beside: impl FnMut(usize),
) {
    let (x_part, x_group) = (vecs * SQUARE, W::X_PARTS * vecs * SQUARE);
    // SAFETY: the caller has a configuration loaded.
    unsafe {
        tile_zero::<0>();
        tile_zero::<1>();
        tile_zero::<2>();
        tile_zero::<3>();
    }
    for g in 0..groups {
        let x = x.wrapping_add(g * x_group);
        let w = w.wrapping_add(g * W::PARTS * LANES);
        // SAFETY: as above; tiles of weights lie in the panel, those of activations in `x`.
        unsafe {
            weights(w);
            activations(x, vecs);
            products(vecs);
            if W::X_PARTS == 3 {
                // hi·lowest, hi·middle, lo·middle, lo·hi: each time only one operand has to be
                // loaded.
                activations(x.wrapping_add(2 * x_part), vecs);
                products(vecs);
                activations(x.wrapping_add(x_part), vecs);
                products(vecs);
                if W::PARTS == 2 {
                    weights(w.wrapping_add(LANES));
                    products(vecs);
                    activations(x, vecs);
                    products(vecs);
                }
            }
        }
        beside(g);
    }
    // SAFETY: as above; there is room for the sums.
    unsafe {
        tile_stored::<0>(sums, LANES * 4);
        tile_stored::<2>(sums.wrapping_add(SQUARE), LANES * 4);
        if vecs == VECS {
            tile_stored::<1>(sums.wrapping_add(2 * SQUARE), LANES * 4);
            tile_stored::<3>(sums.wrapping_add(3 * SQUARE), LANES * 4);
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
unsafe fn activations(x: *const u32, vecs: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_stream_loadd::<6>(x, LANES * 4);
        if vecs == VECS {
            tile_stream_loadd::<7>(x.wrapping_add(SQUARE), LANES * 4);
        }
    }
}

#[inline(always)]
unsafe fn products(vecs: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_dpbf16ps::<0, 4, 6>();
        tile_dpbf16ps::<2, 5, 6>();
        if vecs == VECS {
            tile_dpbf16ps::<1, 4, 7>();
            tile_dpbf16ps::<3, 5, 7>();
        }
    }
}
