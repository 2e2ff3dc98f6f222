//! Attention for many query rows over keys and values of 16 bits or fewer, in integers of 16 bits.
//!
//! `vpdpwssd` does 32 multiply-adds, where an `f32` instruction does 16. It multiplies the blocks
//! of keys that a prefill row sees whole and that end before its own position. The shared kernel
//! does the rest: partly visible blocks, odd widths of heads, numbers that are not finite, and
//! decode rows. Rows are processed 32 at a time; some of them may use integers for a block and the
//! others the shared kernel.
//!
//! Queries lie in lanes, so that keys need no transposition, the softmax goes down the lanes, and
//! both products are one loop: pairs of words of 32 rows against pairs broadcast from memory. A
//! query, a key, the weights of a query and a column of values are each rounded to integers whose
//! 2-norm is at most 32767: by the Cauchy–Schwarz inequality no sum exceeds 2³⁰, and a product of
//! vectors `a` and `b` of `n` values errs by at most `|a||b|·√n/NORM`, typically by `|a||b|·2⁻¹⁶`.
//! Storing the keys in half precision lost as much.
//!
//! The budget of 64 keys of 64 values for 16 query rows, in cycles of Zen 4 (a multiplication of 64
//! bytes each): 64·64 for the products, 64·9 for scores and weights, 64·2 for outputs; everything
//! else runs on other ports. Rounding keys and values takes about 64·64, once for all rows of a
//! task: in all 64·83 with 128 rows, where the shared kernel's multiply-adds alone take 64·128.
//! Measured there, best of 20 runs with 128 rows, 4096 keys and heads of 64, 128 and 256 values:
//! 166, 181 and 182 GFLOP/s on one core, the shared kernel 67, 84 and 94.
//!
//! A row's result depends on its position and the keys that it sees, not on the other rows.

use super::common::transpose;
use super::elementwise::{F32x16, short_exp, zero};
use super::kv::load_kv;
use super::{attention, attention_i8};
use crate::arch::arrays;
use crate::arch::attention::{AttnParams, AttnPartial, KvSpan};
use crate::arch::gemm::Aligned;
use crate::arch::generic::attention::{ROWS, STRIDE, SoftmaxRows};
use crate::arch::generic::attention_codes;
use crate::arch::generic::kv_blocks::{BLOCK, Blocks, RowPtr, Tile, Widened, wanted};
use crate::arch::generic::lanes::Widen;
use crate::arch::generic::lanes::{Lanes, exp, tanh};
use crate::arch::kv::KvStored;
use half::f16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Passes that share rounded keys and values.
const PASSES: usize = 4;
/// Widest head that this kernel takes.
const WIDEST: usize = 256;
/// Rows of the second operand of a tile of products.
const TILE: usize = 8;
const LANES: usize = 16;
/// The 2-norm to which vectors are scaled before they are rounded; rounding adds at most `√256/2`
/// to it.
const NORM: f32 = 32700.0;
/// Limit of a row's squared 2-norm: rows at or above it, or not finite, are left to the shared
/// kernel.
const HUGE: f32 = 1e36;
/// Limit of a key's squared 2-norm, beyond half precision: keys above it are left to the shared
/// kernel.
const LONG: f32 = 256.0 * 65536.0 * 65536.0;
/// Vectors with a smaller squared 2-norm are scaled as if they had this one.
const SMALL: f32 = 1e-30;

/// Working memory of a task.
#[repr(C)]
struct Room {
    /// Scores, then exponentials, of a pass, `[key][row]`; its outputs while they are transposed;
    /// scratch of the shared kernel.
    scores: [f32; ROWS * WIDEST],
    /// `[pass][pair][row]`
    queries: [u32; PASSES * ROWS * WIDEST / 2],
    /// `[key][pair]`
    keys: [u32; BLOCK * WIDEST / 2],
    /// `[pair of keys][column]`
    values: [u32; BLOCK / 2 * WIDEST],
    /// `[pair of keys][row]`
    weights: [u32; BLOCK / 2 * ROWS],
    /// Scale of the integers of each `[pass][row]`, times the factor on scores.
    of_queries: [f32; PASSES * ROWS],
    /// Scale of the integers of each key.
    of_keys: [f32; BLOCK],
    /// Scale of the integers of each column.
    of_values: [f32; WIDEST],
    /// Outputs of each pass, as rows or, transposed, as columns.
    out: [f32; PASSES * ROWS * WIDEST],
}

const _: () = assert!(WIDEST >= STRIDE && WIDEST >= BLOCK);

/// Pointers to the parts of a [`Room`].
#[derive(Clone, Copy)]
struct Parts {
    scores: *mut f32,
    queries: *mut u32,
    keys: *mut u32,
    values: *mut u32,
    weights: *mut u32,
    of_queries: *mut f32,
    of_keys: *mut f32,
    of_values: *mut f32,
}

/// Whether the shared kernel takes all rows.
fn is_shared(p: &AttnParams) -> bool {
    let fits = |dim: usize| dim.is_multiple_of(LANES) && dim <= WIDEST;
    p.exact || !fits(p.head_dim) || !fits(p.head_dim_v)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn attention_f16(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, f16>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    if is_shared(p) {
        return attention::attention_f16(to, q, span, ranges, p);
    }
    many_rows(to, q, span, ranges, p);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(in crate::arch) fn attention_stored(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    if attention_codes::fits(&stored, p) {
        return attention_i8::attention_stored(to, q, stored, ranges, p);
    }
    if is_shared(p) {
        return attention::attention_stored(to, q, stored, ranges, p);
    }
    let mut tiles = [const { Tile::uninit() }; 2];
    // SAFETY: this level's.
    let blocks = unsafe { Widened::new(stored, &mut tiles, load_kv, p) };
    many_rows(to, q, blocks, ranges, p);
}

/// Processes some passes of query rows at a time, over all blocks. (Its length: every step of a
/// block is a loop over the passes, and its variables are their state.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn many_rows<B: Blocks<F32x16>>(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    mut blocks: B,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let z = zero();
    let mut room = MaybeUninit::<Aligned<Room>>::uninit();
    let room = room.as_mut_ptr().cast::<Room>();
    // SAFETY: addresses of parts of the room.
    let parts = unsafe {
        Parts {
            scores: (&raw mut (*room).scores).cast(),
            queries: (&raw mut (*room).queries).cast(),
            keys: (&raw mut (*room).keys).cast(),
            values: (&raw mut (*room).values).cast(),
            weights: (&raw mut (*room).weights).cast(),
            of_queries: (&raw mut (*room).of_queries).cast(),
            of_keys: (&raw mut (*room).of_keys).cast(),
            of_values: (&raw mut (*room).of_values).cast(),
        }
    };
    // SAFETY: an address of a part of the room.
    let out: *mut f32 = unsafe { (&raw mut (*room).out).cast() };
    const MANY: usize = PASSES * ROWS;
    for (many, (q, ranges)) in q
        .chunks(MANY * p.head_dim)
        .zip(ranges.chunks(MANY))
        .enumerate()
    {
        let seen = blocks.seen(ranges);
        if seen.is_empty() {
            continue;
        }
        let mut chunks = q.chunks(ROWS * p.head_dim).zip(ranges.chunks(ROWS));
        let mut passes: [Option<SoftmaxRows<'_>>; PASSES] = std::array::from_fn(|i| {
            let (q, ranges) = chunks.next()?;
            let out = out.wrapping_add(i * ROWS * p.head_dim_v);
            // SAFETY: room for the outputs of a pass of its own, whole because missing rows are
            // transposed, too.
            unsafe { out.write_bytes(0, ROWS * p.head_dim_v) };
            // SAFETY: room for outputs as above, and room for scores.
            Some(unsafe { SoftmaxRows::new(p, q, out, ranges, parts.scores) })
        });
        // Of each pass: the rows with queries that could be rounded; whether its outputs are
        // transposed, once it has any.
        let (mut rounded, mut transposed) = ([0; PASSES], [None; PASSES]);
        for (i, q) in q.chunks(ROWS * p.head_dim).enumerate() {
            let mut first = q.as_ptr();
            if q.len() < ROWS * p.head_dim {
                // SAFETY: room for as many queries, not in use yet.
                let room = unsafe {
                    parts.scores.write_bytes(0, ROWS * p.head_dim);
                    std::slice::from_raw_parts_mut(parts.scores, q.len())
                };
                room.copy_from_slice(q);
                first = parts.scores;
            }
            // SAFETY: the rows of a pass exist, and there is room for them.
            rounded[i] = unsafe { round_queries(parts.pass(i, p), first, p) };
        }
        for block in seen.clone() {
            let first = blocks.first() + block * BLOCK;
            let (k, v) = blocks.rows(block, seen.end, wanted(ranges, first), p);
            let whole = first..first + BLOCK;
            let mut keys_values = None;
            for (i, pass) in passes.iter_mut().flatten().enumerate() {
                let mut rows = rounded[i] & pass.behind(&whole);
                if rows != 0 && keys_values.is_none() {
                    // SAFETY: the block exists, and there is room for its keys and values.
                    keys_values = Some(unsafe { round_keys(parts, k) && round_values(parts, v) });
                }
                if keys_values != Some(true) {
                    rows = 0;
                }
                let rest = pass.sees(&whole) & !rows;
                for (rows, columns) in [(rows, true), (rest, false)] {
                    if rows == 0 {
                        continue;
                    }
                    if transposed[i] == Some(!columns) {
                        // SAFETY: the outputs of a whole pass, and room for as many values.
                        unsafe {
                            transpose_outputs(pass.out_mut(), p.head_dim_v, columns, parts.scores)
                        };
                    }
                    transposed[i] = Some(columns);
                    if columns {
                        // SAFETY: queries, keys and values are there.
                        unsafe { add_block(parts.pass(i, p), pass, rows, p) };
                    } else {
                        pass.skip = !rows;
                        // SAFETY: these are the keys and values of the block.
                        unsafe { pass.add_block(z, k, v, &whole) };
                    }
                }
            }
        }
        for (i, (pass, transposed)) in passes.iter_mut().flatten().zip(transposed).enumerate() {
            if transposed == Some(true) {
                // SAFETY: as above.
                unsafe { transpose_outputs(pass.out_mut(), p.head_dim_v, false, parts.scores) };
            }
            pass.merge(z, &mut to.rows(many * MANY + i * ROWS, ROWS, p.head_dim_v));
        }
    }
}

/// Words per row when values are paired, rounded up to whole registers.
#[inline]
fn pairs(dim: usize) -> usize {
    dim.div_ceil(2 * LANES) * LANES
}

impl Parts {
    /// The parts for pass `i`.
    #[inline]
    fn pass(self, i: usize, p: &AttnParams) -> Parts {
        Parts {
            queries: self.queries.wrapping_add(i * ROWS * pairs(p.head_dim)),
            of_queries: self.of_queries.wrapping_add(i * ROWS),
            ..self
        }
    }
}

/// Rounds `a·factor` and `b·factor`, below 2¹⁵, to the low and the high words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words(a: F32x16, b: F32x16, factor: __m512) -> __m512i {
    // Adding this leaves the integer in the low bits of the sum.
    let magic = _mm512_set1_ps(12_582_912.0);
    let a = _mm512_castps_si512(_mm512_fmadd_ps(a.0, factor, magic));
    let b = _mm512_castps_si512(_mm512_fmadd_ps(b.0, factor, magic));
    _mm512_mask_blend_epi16(0xAAAA_AAAA, a, _mm512_slli_epi32::<16>(b))
}

/// Vectors `2·i` and `2·i + 1` of a row of `dim` values, zero after its end.
///
/// # Safety
/// The row must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn read_pair<E: Widen<F32x16>>(row: *const E, i: usize, dim: usize) -> [F32x16; 2] {
    let (z, at) = (zero(), 2 * LANES * i);
    // SAFETY: the row has this vector.
    let a = unsafe { E::read(z, row.wrapping_add(at)) };
    if at + LANES == dim {
        return [a, z];
    }
    // SAFETY: and this one.
    [a, unsafe { E::read(z, row.wrapping_add(at + LANES)) }]
}

/// Sums of squares of four rows.
///
/// # Safety
/// The rows must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn squares<E: Widen<F32x16>>(rows: [*const E; 4], dim: usize) -> [f32; 4] {
    let z = zero();
    let mut sums = [z; 4];
    for i in (0..dim).step_by(LANES) {
        for r in 0..4 {
            // SAFETY: a vector of a row.
            let x = unsafe { E::read(z, rows[r].wrapping_add(i)) };
            sums[r] = x.mul_add(x, sums[r]);
        }
    }
    F32x16::sum4(sums)
}

/// Rounds the queries of a pass. Returns the rows, one bit each, that are finite, as are all their
/// scores.
///
/// # Safety
/// [`ROWS`] rows must be readable, and there must be room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_queries(parts: Parts, q: *const f32, p: &AttnParams) -> u32 {
    let dim = p.head_dim;
    let (mut factors, mut finite) = ([0.0; ROWS], 0);
    for r in (0..ROWS).step_by(4) {
        let rows = arrays::map([0, 1, 2, 3], |i| q.wrapping_add((r + i) * dim));
        // SAFETY: rows of queries.
        let squares = unsafe { squares(rows, dim) };
        for (i, square) in squares.into_iter().enumerate() {
            let norm = square.max(SMALL).sqrt();
            // No key is longer than √LONG. Numbers that are not finite fail here, too.
            let largest = norm * p.scale.abs();
            let is_finite = square < HUGE && largest < 1e30;
            finite |= u32::from(is_finite) << (r + i);
            let (factor, of_query) = if is_finite {
                (NORM / norm, norm * p.scale / NORM)
            } else {
                (0.0, 0.0)
            };
            factors[r + i] = factor;
            // SAFETY: there is one number per row.
            unsafe { parts.of_queries.add(r + i).write(of_query) };
        }
    }
    for first in (0..ROWS).step_by(LANES) {
        for g in 0..pairs(dim) / LANES {
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                // SAFETY: a row of queries.
                let [a, b] = unsafe { read_pair(q.wrapping_add((first + r) * dim), g, dim) };
                *row = words(a, b, _mm512_set1_ps(factors[first + r]));
            }
            for (i, pairs) in transpose(rows).into_iter().enumerate() {
                let to = parts.queries.wrapping_add((g * LANES + i) * ROWS + first);
                // SAFETY: room for the rows.
                unsafe { _mm512_storeu_si512(to.cast(), pairs) };
            }
        }
    }
    finite
}

/// Rounds the keys of a block. Returns whether they are finite and not too long.
///
/// # Safety
/// The keys must be readable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_keys<E: Widen<F32x16>>(parts: Parts, k: RowPtr<E>) -> bool {
    for j in (0..BLOCK).step_by(4) {
        let mut rows = [k.first; 4];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: a key of the block.
            *row = unsafe { k.row(j + i) };
        }
        // SAFETY: these keys.
        let squares = unsafe { squares(rows, k.dim) };
        for (i, (square, row)) in squares.into_iter().zip(rows).enumerate() {
            if square.is_nan() || square > LONG {
                return false;
            }
            let norm = square.max(SMALL).sqrt();
            // SAFETY: there is one number per key.
            unsafe { parts.of_keys.add(j + i).write(norm / NORM) };
            let factor = _mm512_set1_ps(NORM / norm);
            let to = parts.keys.wrapping_add((j + i) * pairs(k.dim));
            for g in 0..pairs(k.dim) / LANES {
                // SAFETY: this key.
                let [a, b] = unsafe { read_pair(row, g, k.dim) };
                // SAFETY: room for the key.
                unsafe {
                    _mm512_storeu_si512(to.wrapping_add(g * LANES).cast(), words(a, b, factor))
                };
            }
        }
    }
    true
}

/// Rounds the values of a block. Returns whether they are finite.
///
/// # Safety
/// The values must be readable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_values<E: Widen<F32x16>>(parts: Parts, v: RowPtr<E>) -> bool {
    let z = zero();
    for column in (0..v.dim).step_by(LANES) {
        let mut square = z;
        for j in 0..BLOCK {
            // SAFETY: a vector of a row.
            let x = unsafe { E::read(z, v.row(j).wrapping_add(column)) };
            square = x.mul_add(x, square);
        }
        if _mm512_cmp_ps_mask::<_CMP_LT_OQ>(square.0, _mm512_set1_ps(HUGE)) != 0xFFFF {
            return false;
        }
        let norm = _mm512_sqrt_ps(_mm512_max_ps(square.0, _mm512_set1_ps(SMALL)));
        let bound = _mm512_set1_ps(NORM);
        // SAFETY: there is one number per column.
        unsafe {
            _mm512_storeu_ps(
                parts.of_values.wrapping_add(column),
                _mm512_div_ps(norm, bound),
            )
        };
        let factor = _mm512_div_ps(bound, norm);
        for j in 0..BLOCK / 2 {
            // SAFETY: a vector of a row.
            let a = unsafe { E::read(z, v.row(2 * j).wrapping_add(column)) };
            // SAFETY: as above.
            let b = unsafe { E::read(z, v.row(2 * j + 1).wrapping_add(column)) };
            let to = parts.values.wrapping_add(j * v.dim + column);
            // SAFETY: room for the values.
            unsafe { _mm512_storeu_si512(to.cast(), words(a, b, factor)) };
        }
    }
    true
}

/// Transposes the outputs of a pass: from rows of `dim` to columns, if `columns`, or back.
///
/// # Safety
/// There must be [`ROWS`] of them, and `room` for as many.
#[target_feature(enable = "avx512f")]
unsafe fn transpose_outputs(out: *mut f32, dim: usize, columns: bool, room: *mut f32) {
    let (height, width) = if columns { (ROWS, dim) } else { (dim, ROWS) };
    for i in (0..height).step_by(LANES) {
        for j in (0..width).step_by(LANES) {
            let mut tile = [_mm512_setzero_si512(); LANES];
            for (r, row) in tile.iter_mut().enumerate() {
                // SAFETY: a vector of a row.
                *row = unsafe { _mm512_loadu_si512(out.wrapping_add((i + r) * width + j).cast()) };
            }
            for (r, row) in transpose(tile).into_iter().enumerate() {
                // SAFETY: room for as many values.
                unsafe { _mm512_storeu_si512(room.wrapping_add((j + r) * height + i).cast(), row) };
            }
        }
    }
    // SAFETY: as many values, all written.
    unsafe { std::ptr::copy_nonoverlapping(room, out, ROWS * dim) };
}

/// Processes a block for the rows of a pass with bits set in `rows`.
///
/// # Safety
/// The outputs must be transposed, and queries, keys and values rounded.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_block(parts: Parts, pass: &mut SoftmaxRows<'_>, rows: u32, p: &AttnParams) {
    let z = zero();
    // SAFETY: the caller's promise.
    let top = unsafe { add_scores(parts, p) };
    // SAFETY: the scores were just written.
    let (sums, mut factors) = unsafe { weigh(parts, top) };
    let out = pass.out_mut();
    let (max, sum) = pass.softmax_mut();
    for h in 0..2 {
        let (max, sum) = (
            &mut max[h * LANES..][..LANES],
            &mut sum[h * LANES..][..LANES],
        );
        let before = z.load(max);
        let after = before.max(top[h]);
        let (shrink, part) = (exp(before - after), exp(top[h] - after));
        let (rows, total) = (halves(rows)[h], sums[h].mul_add(part, z.load(sum) * shrink));
        // SAFETY: there is one number per row.
        unsafe { _mm512_mask_storeu_ps(max.as_mut_ptr(), rows, after.0) };
        // SAFETY: as above.
        unsafe { _mm512_mask_storeu_ps(sum.as_mut_ptr(), rows, total.0) };
        factors[h] = part * factors[h];
        let grown = rows & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(before.0, after.0);
        if grown != 0 {
            for c in 0..p.head_dim_v {
                let out = out.wrapping_add(c * ROWS + h * LANES);
                // SAFETY: half a column of outputs.
                unsafe { _mm512_mask_storeu_ps(out, grown, (z.read(out) * shrink).0) };
            }
        }
    }
    // SAFETY: the weights were just written.
    unsafe { add_values(parts, factors, rows, out, p.head_dim_v) };
}

/// The bits of the first and of the second half of the rows.
#[inline]
fn halves(rows: u32) -> [u16; 2] {
    [rows as u16, (rows >> LANES) as u16]
}

/// Writes the scores of the rows and keys. Returns the largest of each row.
///
/// # Safety
/// Queries and keys must be there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_scores(parts: Parts, p: &AttnParams) -> [F32x16; 2] {
    let (z, n) = (zero(), pairs(p.head_dim));
    let mut top = [z.splat(f32::NEG_INFINITY); 2];
    // SAFETY: there is one number per row.
    let of_queries = unsafe {
        [
            z.read(parts.of_queries),
            z.read(parts.of_queries.wrapping_add(LANES)),
        ]
    };
    for j in (0..BLOCK).step_by(TILE) {
        // SAFETY: the queries, and as many keys.
        let sums = unsafe { products(parts.queries, parts.keys.wrapping_add(j * n), n, 1, n) };
        for r in 0..TILE {
            // SAFETY: of a key.
            let of_key = z.splat(unsafe { *parts.of_keys.wrapping_add(j + r) });
            for h in 0..2 {
                let score = F32x16(_mm512_cvtepi32_ps(sums[r][h])) * of_key * of_queries[h];
                top[h] = score.max(top[h]);
                // SAFETY: room for the scores of a key.
                unsafe { score.write(parts.scores.wrapping_add((j + r) * ROWS + h * LANES)) };
            }
        }
    }
    if p.softcap > 0.0 {
        let cap = z.splat(p.softcap);
        top = [z.splat(f32::NEG_INFINITY); 2];
        for j in 0..BLOCK {
            for h in 0..2 {
                let score = parts.scores.wrapping_add(j * ROWS + h * LANES);
                // SAFETY: a score just written.
                let capped = tanh(unsafe { z.read(score) } / cap) * cap;
                top[h] = capped.max(top[h]);
                // SAFETY: as above.
                unsafe { capped.write(score) };
            }
        }
    }
    top
}

/// Turns scores into weights. Returns the sums of exponentials, and the scales of the weights'
/// integers.
///
/// # Safety
/// The scores must be there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn weigh(parts: Parts, top: [F32x16; 2]) -> ([F32x16; 2], [F32x16; 2]) {
    let z = zero();
    let mut sums = [z; 2];
    for j in 0..BLOCK {
        for h in 0..2 {
            let score = parts.scores.wrapping_add(j * ROWS + h * LANES);
            // SAFETY: scores of a key.
            let e = short_exp(unsafe { z.read(score) } - top[h]);
            sums[h] = sums[h] + e;
            // SAFETY: as above.
            unsafe { e.write(score) };
        }
    }
    let bound = z.splat(NORM);
    // The largest exponential is 1, so that the sum of squares is at most the sum.
    let norms = [
        F32x16(_mm512_sqrt_ps(sums[0].0)),
        F32x16(_mm512_sqrt_ps(sums[1].0)),
    ];
    let factors = [bound / norms[0], bound / norms[1]];
    for j in 0..BLOCK / 2 {
        for h in 0..2 {
            let e = parts.scores.wrapping_add(2 * j * ROWS + h * LANES);
            // SAFETY: exponentials of two keys, just written.
            let [a, b] = unsafe { [z.read(e), z.read(e.wrapping_add(ROWS))] };
            let to = parts.weights.wrapping_add(j * ROWS + h * LANES);
            // SAFETY: room for the weights of two keys.
            unsafe { _mm512_storeu_si512(to.cast(), words(a, b, factors[h].0)) };
        }
    }
    (sums, [norms[0] / bound, norms[1] / bound])
}

/// Adds the values, by weights of scale `factors`, to the outputs of the rows with bits set in
/// `rows`.
///
/// # Safety
/// Weights and values must be there, and the outputs transposed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_values(parts: Parts, factors: [F32x16; 2], rows: u32, out: *mut f32, dim: usize) {
    let z = zero();
    for c in (0..dim).step_by(TILE) {
        // SAFETY: the weights, and as many columns.
        let sums = unsafe {
            products(
                parts.weights,
                parts.values.wrapping_add(c),
                1,
                dim,
                BLOCK / 2,
            )
        };
        for r in 0..TILE {
            // SAFETY: of a column.
            let of_column = z.splat(unsafe { *parts.of_values.wrapping_add(c + r) });
            for h in 0..2 {
                let out = out.wrapping_add((c + r) * ROWS + h * LANES);
                let sum = F32x16(_mm512_cvtepi32_ps(sums[r][h])) * factors[h];
                // SAFETY: half a column of outputs.
                unsafe {
                    _mm512_mask_storeu_ps(
                        out,
                        halves(rows)[h],
                        sum.mul_add(of_column, z.read(out)).0,
                    )
                };
            }
        }
    }
}

/// Products of [`ROWS`] rows of `a`, `[pair][row]`, with [`TILE`] rows of `b`, which lie `of_row`
/// words apart; the `n` pairs of a row lie `of_pair` words apart.
///
/// # Safety
/// All of these must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn products(
    a: *const u32,
    b: *const u32,
    of_row: usize,
    of_pair: usize,
    n: usize,
) -> [[__m512i; 2]; TILE] {
    let mut sums = [[_mm512_setzero_si512(); 2]; TILE];
    for i in 0..n {
        let (a, b) = (
            a.wrapping_add(i * ROWS),
            b.wrapping_add(i * of_pair).cast::<i32>(),
        );
        // SAFETY: a pair of all rows.
        let a = unsafe {
            [
                _mm512_loadu_si512(a.cast()),
                _mm512_loadu_si512(a.wrapping_add(LANES).cast()),
            ]
        };
        for r in 0..TILE {
            // SAFETY: a pair of a row.
            let b = _mm512_set1_epi32(unsafe { *b.wrapping_add(r * of_row) });
            sums[r][0] = dot_words(sums[r][0], a[0], b);
            sums[r][1] = dot_words(sums[r][1], a[1], b);
        }
    }
    sums
}

/// `sum + Σ a·b` over the two words of each lane.
///
/// In assembly, because LLVM takes the intrinsic apart into a multiplication and an addition.
#[inline]
#[target_feature(enable = "avx512vnni")]
fn dot_words(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: touches nothing but registers; the CPU has the instruction.
    unsafe {
        asm!("vpdpwssd {}, {}, {}", inout(zmm_reg) sum, in(zmm_reg) a, in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}
