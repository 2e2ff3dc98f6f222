//! Attention over half-precision keys and values for many query rows, on bf16 tiles.
//!
//! Tiles multiply the blocks of keys that a prefill row sees whole and that end before its own
//! position. AVX-512's kernels do the rest: partly visible blocks, odd widths of heads, decode
//! rows, and every softmax. Rows are processed 32 at a time; some of them may use tiles for a block
//! and the others AVX-512. Every factor is the sum of two bf16 numbers, as for F16 weights: for f16
//! the sum is exact, queries and weights lose at most 2⁻¹⁸ of their value.
//!
//! The budget of 64 keys of 64 values for 128 query rows, in cycles: 512 tile products, 8200; keys
//! and values to tiles, 3100, once for all rows of a task; softmax, 6000; weights to tiles, 2800.
//! AVX-512's multiply-adds take 32800 at their peak, besides the softmax.
//!
//! A row's result depends on its position and the keys that it sees, not on the other rows. An
//! infinite key, which is an f16 that overflowed, becomes NaN in tiles.

use super::tiles::{Tiles, tile_dpbf16ps, tile_loadd, tile_stored, tile_zero};
use super::unpack::{LANES, load_bytes, split};
use crate::arch::attention::{AttnParams, AttnPartial, KvSpan};
use crate::arch::gemm::Aligned;
use crate::arch::generic::attention::{ROWS, STRIDE, SoftmaxRows};
use crate::arch::generic::kv_blocks::{BLOCK, RowPtr, block_rows};
use crate::arch::x86::avx512::attention as avx512_attention;
use crate::arch::x86::avx512::common::transpose;
use crate::arch::x86::avx512::elementwise::zero;
use half::f16;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Passes that share packed keys and values.
const PASSES: usize = 4;
/// Widest head that this kernel takes.
const WIDEST: usize = 256;
/// Words that `hi` and `lo` of 32 values take.
const GROUP_WORDS: usize = 2 * LANES;

/// Working memory of a task.
#[repr(C, align(64))]
struct Room {
    scores: [f32; ROWS * STRIDE],
    /// Queries as the first operand: `[pass][row][group][part][word]`.
    queries: [u32; PASSES * ROWS * WIDEST],
    /// Keys as the second operand: `[pair of registers][group][part][word][register][key]`.
    keys: [u32; BLOCK * WIDEST],
    /// Values as the second operand: `[32 columns][group of keys][part][word][register][column]`.
    values: [u32; BLOCK * WIDEST],
    /// Weights as the first operand: `[row][group of keys][part][word]`.
    weights: [u32; ROWS * BLOCK],
    /// Outputs of each pass.
    out: [f32; PASSES * ROWS * WIDEST],
    /// Queries of an incomplete pass; a copy of the outputs of rows that a block must not change.
    spare: [f32; ROWS * WIDEST],
}

/// See [`crate::arch::Arch::attention`]. (Its length: every step of a block is a loop over the
/// passes, and its variables are their state.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn attention_f16(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, f16>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let fits = |dim: usize| dim.is_multiple_of(32) && dim <= WIDEST;
    if p.exact || !fits(p.head_dim) || !fits(p.head_dim_v) {
        return avx512_attention::attention_f16(to, q, span, ranges, p);
    }
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::load_config() };
    let z = zero();
    let mut room = MaybeUninit::<Aligned<Room>>::uninit();
    let room = room.as_mut_ptr().cast::<Room>();
    // SAFETY: addresses of parts of the room.
    let (scores, queries, keys, values, weights, out, spare) = unsafe {
        (
            (&raw mut (*room).scores).cast::<f32>(),
            (&raw mut (*room).queries).cast::<u32>(),
            (&raw mut (*room).keys).cast::<u32>(),
            (&raw mut (*room).values).cast::<u32>(),
            (&raw mut (*room).weights).cast::<u32>(),
            (&raw mut (*room).out).cast::<f32>(),
            (&raw mut (*room).spare).cast::<f32>(),
        )
    };
    const MANY: usize = PASSES * ROWS;
    for (many, (q, ranges)) in q
        .chunks(MANY * p.head_dim)
        .zip(ranges.chunks(MANY))
        .enumerate()
    {
        let seen = span.seen(ranges);
        if seen.is_empty() {
            continue;
        }
        let mut parts = q.chunks(ROWS * p.head_dim).zip(ranges.chunks(ROWS));
        let mut passes: [Option<SoftmaxRows<'_>>; PASSES] = std::array::from_fn(|i| {
            let (q, ranges) = parts.next()?;
            let out = out.wrapping_add(i * ROWS * p.head_dim_v);
            // SAFETY: room for the outputs of a pass of its own, whole because tiles have missing
            // rows, too.
            unsafe { out.write_bytes(0, ROWS * p.head_dim_v) };
            // SAFETY: room for outputs as above, and room for scores.
            Some(unsafe { SoftmaxRows::new(p, q, out, ranges, scores) })
        });
        for (i, q) in q.chunks(ROWS * p.head_dim).enumerate() {
            let mut first = q.as_ptr();
            if q.len() < ROWS * p.head_dim {
                // SAFETY: room for as many queries, not in use yet.
                let room = unsafe {
                    spare.write_bytes(0, ROWS * p.head_dim);
                    std::slice::from_raw_parts_mut(spare, q.len())
                };
                room.copy_from_slice(q);
                first = spare;
            }
            // SAFETY: the rows of a pass exist, and there is room for them.
            unsafe {
                pack_rows(
                    first,
                    p.head_dim,
                    p.head_dim,
                    queries.wrapping_add(i * ROWS * p.head_dim),
                )
            };
        }
        for i in seen.clone() {
            let (k, v) = block_rows(span, i, seen.end, p);
            let first = span.first + i * BLOCK;
            let whole = first..first + BLOCK;
            let mut packed = false;
            for (i, pass) in passes.iter_mut().flatten().enumerate() {
                let rows = pass.behind(&whole);
                let rest = pass.sees(&whole) & !rows;
                if rest != 0 {
                    pass.skip = !rest;
                    // SAFETY: these are the keys and values of the block.
                    unsafe { pass.add_block(z, k, v, &whole) };
                }
                if rows == 0 {
                    continue;
                }
                if !packed {
                    // SAFETY: the block exists, and there is room for its keys and values.
                    unsafe { pack_keys(k, keys) };
                    // SAFETY: as above.
                    unsafe { pack_values(v, values) };
                    packed = true;
                }
                let queries = queries.wrapping_add(i * ROWS * p.head_dim);
                for pair in 0..BLOCK / 32 {
                    let (keys, to) = (
                        keys.wrapping_add(pair * 32 * p.head_dim),
                        scores.wrapping_add(pair * 32),
                    );
                    // SAFETY: 32 rows of queries, 32 keys, and the scores of both.
                    unsafe {
                        products(queries, p.head_dim, keys, p.head_dim / 32, to, STRIDE, true)
                    };
                }
                for row in (0..ROWS).filter(|row| rows >> row & 1 == 1) {
                    // SAFETY: the row's scores of the block have just been written.
                    unsafe { pass.weigh(z, row, 0..BLOCK) };
                }
                // SAFETY: the weights are initialised, those of other rows as scores.
                unsafe { pack_rows(scores, STRIDE, BLOCK, weights) };
                let out = pass.out_mut();
                if rows != u32::MAX {
                    // SAFETY: room for as many values.
                    unsafe { std::ptr::copy_nonoverlapping(out, spare, ROWS * p.head_dim_v) };
                }
                for column in (0..p.head_dim_v).step_by(32) {
                    let (values, to) = (
                        values.wrapping_add(column * BLOCK),
                        out.wrapping_add(column),
                    );
                    // SAFETY: 32 rows of weights, 32 columns of values, and the outputs of both.
                    unsafe {
                        products(weights, BLOCK, values, BLOCK / 32, to, p.head_dim_v, false)
                    };
                }
                // Tiles have all rows: those that skip the block get back what they had.
                for row in (0..ROWS).filter(|row| rows >> row & 1 == 0) {
                    let at = row * p.head_dim_v;
                    // SAFETY: a row of outputs, which was copied.
                    unsafe {
                        std::ptr::copy_nonoverlapping(spare.add(at), out.add(at), p.head_dim_v)
                    };
                }
            }
        }
        for (i, pass) in passes.iter_mut().flatten().enumerate() {
            pass.merge(z, &mut to.rows(many * MANY + i * ROWS, ROWS, p.head_dim_v));
        }
    }
}

/// Packs [`ROWS`] rows of `n` values, `stride` apart, as `hi` and `lo`.
///
/// # Safety
/// The rows must be readable, and `to` have room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_rows(from: *const f32, stride: usize, n: usize, to: *mut u32) {
    for row in 0..ROWS {
        for g in 0..n / 32 {
            let x = from.wrapping_add(row * stride + g * 32);
            // SAFETY: 32 values of a row.
            let x = unsafe { [_mm512_loadu_ps(x), _mm512_loadu_ps(x.wrapping_add(16))] };
            // SAFETY: room for as many values.
            unsafe { store_parts(split(x), to.wrapping_add(row * n + g * GROUP_WORDS), LANES) };
        }
    }
}

/// Stores `hi` and `lo`, `apart` words from each other.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_parts(parts: [__m512i; 2], to: *mut u32, apart: usize) {
    for (i, part) in parts.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.wrapping_add(i * apart).cast(), part) };
    }
}

/// Splits 32 numbers into `hi` and `lo`, exactly.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn split_f16(x: __m512i) -> [__m512i; 2] {
    split([
        _mm512_cvtph_ps(_mm512_castsi512_si256(x)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(x)),
    ])
}

/// Words between `hi` and `lo` of the second operand, 32 rows or columns wide.
const PART: usize = LANES * 2 * LANES;

/// Packs the keys of a block, with pairs of values in the words.
///
/// # Safety
/// The keys must be readable, and `to` have room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_keys(k: RowPtr<f16>, to: *mut u32) {
    for register in 0..BLOCK / LANES {
        for g in 0..k.dim / 32 {
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (i, row) in rows.iter_mut().enumerate() {
                // SAFETY: 32 values of a key.
                *row = unsafe {
                    _mm512_loadu_si512(k.row(register * LANES + i).wrapping_add(g * 32).cast())
                };
            }
            let to =
                to.wrapping_add(register / 2 * 32 * k.dim + g * 2 * PART + register % 2 * LANES);
            for (word, pairs) in transpose(rows).into_iter().enumerate() {
                // SAFETY: room for the keys.
                unsafe { store_parts(split_f16(pairs), to.wrapping_add(word * 2 * LANES), PART) };
            }
        }
    }
}

/// Packs the values of a block, with pairs of rows in the words.
///
/// # Safety
/// The values must be readable, and `to` have room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_values(v: RowPtr<f16>, to: *mut u32) {
    // Interleaves two rows: columns 0..16, then 16..32.
    const TURNS: [[u16; 32]; 2] = {
        let mut orders = [[0; 32]; 2];
        let mut i = 0;
        while i < 32 {
            orders[0][i] = (i / 2 + i % 2 * 32) as u16;
            orders[1][i] = orders[0][i] + 16;
            i += 1;
        }
        orders
    };
    let orders = [
        load_bytes(bytemuck::cast_ref(&TURNS[0])),
        load_bytes(bytemuck::cast_ref(&TURNS[1])),
    ];
    for pair in 0..BLOCK / 2 {
        for column in (0..v.dim).step_by(32) {
            // SAFETY: 32 values of a row.
            let first = unsafe { _mm512_loadu_si512(v.row(2 * pair).wrapping_add(column).cast()) };
            // SAFETY: as above.
            let second =
                unsafe { _mm512_loadu_si512(v.row(2 * pair + 1).wrapping_add(column).cast()) };
            let to = to
                .wrapping_add(column * BLOCK + pair / LANES * 2 * PART + pair % LANES * 2 * LANES);
            for (register, order) in orders.into_iter().enumerate() {
                let pairs = _mm512_permutex2var_epi16(first, order, second);
                // SAFETY: room for the values.
                unsafe { store_parts(split_f16(pairs), to.wrapping_add(register * LANES), PART) };
            }
        }
    }
}

/// `c[i][j] (+)= Σ a[i]·b[j]` over `groups` of 32 values for 32 rows of `a` and 32 of `b`; `first`
/// starts from zero. Rows of `a` lie `a_stride` words apart, those of `c` as many values as
/// `c_stride`.
///
/// # Safety
/// A configuration must be loaded, and all this memory exist.
#[inline]
unsafe fn products(
    a: *const u32,
    a_stride: usize,
    b: *const u32,
    groups: usize,
    c: *mut f32,
    c_stride: usize,
    first: bool,
) {
    let lower = c.wrapping_add(LANES * c_stride);
    let (a_bytes, b_bytes, c_bytes) = (a_stride * 4, 2 * LANES * 4, c_stride * 4);
    let below = LANES * a_stride;
    // SAFETY: the caller's promise.
    unsafe {
        if first {
            tile_zero::<0>();
            tile_zero::<1>();
            tile_zero::<2>();
            tile_zero::<3>();
        } else {
            tile_loadd::<0>(c.cast(), c_bytes);
            tile_loadd::<1>(c.wrapping_add(LANES).cast(), c_bytes);
            tile_loadd::<2>(lower.cast(), c_bytes);
            tile_loadd::<3>(lower.wrapping_add(LANES).cast(), c_bytes);
        }
        for g in 0..groups {
            let (a, b) = (
                a.wrapping_add(g * GROUP_WORDS),
                b.wrapping_add(g * 2 * PART),
            );
            let (a_low, b_low) = (a.wrapping_add(LANES), b.wrapping_add(PART));
            tile_loadd::<4>(a, a_bytes);
            tile_loadd::<5>(a.wrapping_add(below), a_bytes);
            tile_loadd::<6>(b_low, b_bytes);
            tile_loadd::<7>(b_low.wrapping_add(LANES), b_bytes);
            multiply();
            tile_loadd::<6>(b, b_bytes);
            tile_loadd::<7>(b.wrapping_add(LANES), b_bytes);
            multiply();
            tile_loadd::<4>(a_low, a_bytes);
            tile_loadd::<5>(a_low.wrapping_add(below), a_bytes);
            multiply();
            tile_loadd::<6>(b_low, b_bytes);
            tile_loadd::<7>(b_low.wrapping_add(LANES), b_bytes);
            multiply();
        }
        tile_stored::<0>(c, c_bytes);
        tile_stored::<1>(c.wrapping_add(LANES), c_bytes);
        tile_stored::<2>(lower, c_bytes);
        tile_stored::<3>(lower.wrapping_add(LANES), c_bytes);
    }
}

/// Adds to tiles 0 to 3, a grid of 2 × 2, the products of tiles 4 and 5 with tiles 6 and 7.
#[inline(always)]
unsafe fn multiply() {
    // SAFETY: the caller's promise.
    unsafe {
        tile_dpbf16ps::<0, 4, 6>();
        tile_dpbf16ps::<2, 5, 6>();
        tile_dpbf16ps::<1, 4, 7>();
        tile_dpbf16ps::<3, 5, 7>();
    }
}
