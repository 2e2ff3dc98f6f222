//! Attention of decode rows over quantised keys and values, in integers.
//!
//! Codes stay bytes: `vpdpbusd` does 64 multiply-adds, where an `f32` instruction does 16 and needs
//! each code widened. A query, and a row's weights times the scales of the values, are rounded to
//! 16 bits, two planes of bytes; scores are as accurate as in `f32`, as sums of integers are exact,
//! and weights are rounded relative to the block's largest. Both products keep lanes apart until a
//! block ends: a lane has a key in scores, and a column in outputs. For this, codes are transposed
//! while they are still packed, four bytes of a key to a lane for scores, a byte of four keys to a
//! lane for values, and unpacked once for all rows.
//!
//! The budget for 64 keys of 64 values and a query, in instructions of 64 bytes, of which Zen 4
//! starts one multiplication per cycle and Zen 5 two: 256 `vpdpbusd`, 90 for softmax and weights,
//! 110 for outputs; once for all queries, transposing and unpacking 360 (`q4_0`) to 620 (`q8_0`).
//! `docs/lab/memory.md` has the measured times.
//!
//! A row's result depends on the row and on the keys that it sees alone.

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::elementwise::{F32x16, short_exp, zero};
use crate::arch::arrays;
use crate::arch::attention::{AttnParams, AttnPartial};
use crate::arch::generic::attention::{ROWS, STRIDE, attention_merge, tiles};
use crate::arch::generic::attention_codes::{MAX_GROUPS, MAX_QUERY, TINY, TINY_SCALE};
use crate::arch::generic::kv_blocks::{Ahead, BLOCK};
use crate::arch::generic::lanes::{Lanes, exp, tanh};
use crate::arch::kv::GROUP;
use crate::arch::kv::{KvStored, KvType};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

const LANES: usize = 16;
/// Vectors of keys, one in each lane, of a block.
const N_VECTORS: usize = BLOCK / LANES;
/// Vectors of codes of a group and 16 keys.
const CODES: usize = GROUP / 4;
/// Largest integer that weights are rounded to.
const MAX_WEIGHT: f32 = 65535.0;

/// A query in 16 bits.
#[repr(C, align(64))]
struct Query {
    /// `[group][upper or lower bytes][four values]`
    words: [[[i32; CODES]; 2]; MAX_GROUPS],
    /// Initial value of each group's sums: codes are unsigned and stand for the middle of their
    /// interval.
    start: [i32; MAX_GROUPS],
    /// Value of an integer step.
    scale: f32,
}

/// A row's weights times the scales of the values, in 16 bits.
#[repr(C, align(64))]
struct Weights {
    /// `[group][upper or lower bytes]`: lane `m` of 128 bits has in word `t` the keys `16t + 4m
    /// ..` of the block.
    planes: [[__m512i; 2]; MAX_GROUPS],
    /// Half a step of a code of eight bits times their sum.
    middle: [f32; MAX_GROUPS],
    /// Value of an integer step.
    unit: [f32; MAX_GROUPS],
}

/// Working memory of a task.
#[repr(C, align(64))]
struct Room {
    /// Of keys `[16 keys][group][k, half]`: lane `i` has the values `16·half + 4k ..` of key `i`.
    /// Of values `[group][16 keys][k, half]`: word `i` of lane `m` of 128 bits has the column
    /// `16·half + 4k + i` of the keys `4m ..`, minus 128.
    codes: [__m512i; N_VECTORS * MAX_GROUPS * CODES],
    /// `[group][key]`
    scales: [f32; MAX_GROUPS * BLOCK],
    /// The same, divided by the group's largest, times [`MAX_WEIGHT`]; 0 for keys that are not
    /// seen.
    relative: [f32; MAX_GROUPS * BLOCK],
    /// The largest scale of each group.
    largest: [f32; MAX_GROUPS],
    queries: [Query; ROWS],
    weights: [Weights; ROWS],
    scores: [f32; ROWS * STRIDE],
    out: [f32; ROWS * MAX_GROUPS * GROUP],
}

/// See [`crate::arch::Arch::attention_stored`]; the heads must
/// [fit](crate::arch::generic::attention_codes::fits). (Its length: the steps of a block share the
/// variables before the loop, above all prefetches.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn attention_stored(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let span = stored.span;
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: addresses of parts of the room.
    let (queries, out): (*mut Query, *mut f32) = unsafe {
        (
            (&raw mut (*room).queries).cast(),
            (&raw mut (*room).out).cast(),
        )
    };
    let (n_groups, n_groups_v) = (p.head_dim / GROUP, p.head_dim_v / GROUP);
    for (i, (q, ranges)) in q
        .chunks(ROWS * p.head_dim)
        .zip(ranges.chunks(ROWS))
        .enumerate()
    {
        let seen = span.seen(ranges);
        if seen.is_empty() {
            continue;
        }
        let blocks = &span.blocks[..seen.end];
        // No block before it has prefetched the first.
        Ahead::new(blocks.get(seen.start), 1).point();
        for (r, q) in q.chunks_exact(p.head_dim).enumerate() {
            // SAFETY: there is room for `ROWS` queries.
            unsafe { queries.add(r).write(round_query(q, stored.k, p.scale)) };
        }
        // SAFETY: there is room for as many rows of outputs.
        unsafe { out.write_bytes(0, ranges.len() * p.head_dim_v) };
        let (mut max, mut sums) = ([f32::NEG_INFINITY; ROWS], [_mm512_setzero_ps(); ROWS]);
        let n_keys = N_VECTORS * n_groups * (1 + tiles(ranges.len()).count());
        let n_points =
            n_keys + N_VECTORS * n_groups_v + ranges.len() * (1 + N_VECTORS * n_groups_v);
        for i in seen {
            let (block, mut ahead) = (blocks[i], Ahead::new(blocks.get(i + 1), n_points));
            let first = span.first + i * BLOCK;
            // SAFETY: the blocks are whole, the queries rounded, and the room is ours.
            unsafe {
                unpack(stored.k, block.k, p.head_dim, true, room, &mut ahead);
                add_scores(room, ranges.len(), n_groups, &mut ahead);
                unpack(stored.v, block.v, p.head_dim_v, false, room, &mut ahead);
                // First the weights of all rows: they are chains of dependent instructions, which
                // the CPU takes side by side.
                let (mut last, mut seen) = (0..0, [0; N_VECTORS]);
                for (r, &range) in ranges.iter().enumerate() {
                    let span = visible(range, first);
                    if span.is_empty() {
                        continue;
                    }
                    if span != last {
                        seen = masks(&span);
                        relative_scales(room, seen, n_groups_v);
                        last = span;
                    }
                    let weigh = if stored.v == KvType::Q8 {
                        weigh::<true>
                    } else {
                        weigh::<false>
                    };
                    weigh(
                        room,
                        r,
                        seen,
                        (&mut max[r], &mut sums[r]),
                        out.add(r * p.head_dim_v),
                        p,
                    );
                    ahead.point();
                }
                for (r, &range) in ranges.iter().enumerate() {
                    if !visible(range, first).is_empty() {
                        add_weighted(room, r, n_groups_v, out.add(r * p.head_dim_v), &mut ahead);
                    }
                }
            }
        }
        let mut sum = [0.0; ROWS];
        sum.iter_mut()
            .zip(sums)
            .for_each(|(sum, lanes)| *sum = F32x16(lanes).sum());
        let n = ranges.len();
        // SAFETY: all rows of outputs are initialised.
        let out = unsafe { std::slice::from_raw_parts_mut(out, n * p.head_dim_v) };
        let from = AttnPartial {
            out,
            max: &mut max[..n],
            sum: &mut sum[..n],
        };
        attention_merge(
            zero(),
            &mut to.rows(i * ROWS, ROWS, p.head_dim_v),
            &from,
            p.head_dim_v,
        );
    }
}

/// Part of the block at position `first` that a row sees, relative to `first`.
#[inline]
fn visible(range: (u32, u32), first: usize) -> Range<usize> {
    crate::arch::generic::kv_blocks::visible(range, &(first..first + BLOCK))
}

/// Difference of two codes of a precision, in codes of eight bits.
#[inline]
fn step(kind: KvType) -> i32 {
    1 << (8 - kind.bits())
}

/// Rounds a query for such keys; its scores have the given factor.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn round_query(q: &[f32], keys: KvType, factor: f32) -> Query {
    let z = zero();
    let mut to = Query {
        words: [[[0; CODES]; 2]; MAX_GROUPS],
        start: [0; MAX_GROUPS],
        scale: 0.0,
    };
    // Zero, or NaN where a value is not finite.
    let (mut top, mut finite) = (z, z);
    for q in q.chunks_exact(LANES) {
        let q = z.load(q);
        top = q.abs().max(top);
        finite = q.mul_add(z, finite);
    }
    let largest = top.max_lane();
    let inverse = z.splat(if largest >= TINY {
        MAX_QUERY / largest
    } else {
        0.0
    });
    to.scale = largest / MAX_QUERY * factor + finite.sum();
    for (g, q) in q.chunks_exact(GROUP).enumerate() {
        let halves = arrays::map([0, LANES], |i| {
            _mm512_cvtps_epi32((z.load(&q[i..]) * inverse).0)
        });
        let lower = arrays::map(halves, |x| _mm512_cvtepi32_epi8(x));
        let upper = arrays::map([0, 1], |i| {
            let rest = _mm512_sub_epi32(halves[i], _mm512_cvtepi8_epi32(lower[i]));
            _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(rest))
        });
        // The words of both halves alternate, in the order of codes.
        for (words, [a, b]) in to.words[g].iter_mut().zip([upper, lower]) {
            let words = words.as_mut_ptr().cast::<__m128i>();
            // SAFETY: eight words.
            unsafe {
                _mm_storeu_si128(words, _mm_unpacklo_epi32(a, b));
                _mm_storeu_si128(words.add(1), _mm_unpackhi_epi32(a, b));
            }
        }
        let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(halves[0], halves[1]));
        to.start[g] = (step(keys) - 256) * sum / 2;
    }
    to
}

/// A plane of a block, and the bytes of its rows.
#[derive(Clone, Copy)]
struct Plane {
    first: *const u8,
    row: usize,
}

/// Unpacks a block of keys, or of values, to codes and scales in the room.
///
/// # Safety
/// The block must be whole, and the dimension one that
/// [`fits`](crate::arch::generic::attention_codes::fits).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack(
    kind: KvType,
    block: &[u8],
    dim: usize,
    keys: bool,
    room: *mut Room,
    ahead: &mut Ahead<'_>,
) {
    let [upper, lower, scales] = kind.row_bytes(dim);
    let from = |at: usize, row: usize| Plane {
        first: block[at..].as_ptr(),
        row,
    };
    let n_groups = dim / GROUP;
    // SAFETY: an address of a part of the room.
    let to: *mut __m512i = unsafe { (&raw mut (*room).codes).cast() };
    let planes = [from(0, upper), from(BLOCK * upper, lower)];
    // SAFETY: the planes have rows of that many groups, and there is room for their codes.
    unsafe {
        match kind {
            KvType::Q8 => unpack_codes::<4>(planes, n_groups, keys, to, ahead),
            KvType::Q6 => unpack_codes::<2>(planes, n_groups, keys, to, ahead),
            KvType::Q5 => unpack_codes::<1>(planes, n_groups, keys, to, ahead),
            _ => unpack_codes::<0>(planes, n_groups, keys, to, ahead),
        }
        unpack_scales(
            from(BLOCK * (upper + lower), scales),
            n_groups,
            (&raw mut (*room).scales).cast(),
        );
    }
}

/// [`unpack`] for codes with `LOWER` bits below the upper four.
///
/// # Safety
/// The planes must be those of a block, and there must be room for its codes.
#[inline(never)] // or else the steps' constants and tables are kept in registers across each other, and spill
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_codes<const LOWER: usize>(
    [upper, lower]: [Plane; 2],
    n_groups: usize,
    keys: bool,
    to: *mut __m512i,
    ahead: &mut Ahead<'_>,
) {
    for t in 0..N_VECTORS {
        for g in 0..n_groups {
            ahead.point();
            let at = |plane: Plane, bytes: usize| {
                plane.first.wrapping_add(t * LANES * plane.row + g * bytes)
            };
            // SAFETY: 16 rows of the planes, and a group of each.
            let (upper, lower) = unsafe {
                let upper_rows = rows(at(upper, GROUP / 2), upper.row, GROUP / 2);
                (
                    upper_rows,
                    if LOWER == 0 {
                        upper_rows
                    } else {
                        rows(at(lower, 4 * LOWER), lower.row, 4 * LOWER)
                    },
                )
            };
            // Where codes have fewer than eight bits, the bit below them is the middle of their
            // step.
            let middle = 8 >> LOWER;
            let (codes, i) = if keys {
                (
                    codes::<LOWER>(by_word(upper), by_word(lower), 0),
                    t * n_groups + g,
                )
            } else {
                // Flips the upper bit of both codes of a byte: 128 less, as signed bytes.
                let upper = arrays::map(upper, |x| {
                    _mm512_xor_si512(x, _mm512_set1_epi8(0x88u8 as i8))
                });
                (
                    codes::<LOWER>(by_byte(upper), by_byte(lower), middle),
                    g * N_VECTORS + t,
                )
            };
            for (j, codes) in codes.into_iter().enumerate() {
                // SAFETY: there is room for all codes of the block.
                unsafe { _mm512_store_si512(to.add(i * CODES + j), codes) };
            }
        }
    }
}

/// The first `n` bytes, at most 16, of 16 rows: of row `4m + k` in lane `m` of 128 bits of vector
/// `k`, then zeros.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn rows(first: *const u8, stride: usize, n: usize) -> [__m512i; 4] {
    let mut all = [_mm512_setzero_si512(); 4];
    for (k, to) in all.iter_mut().enumerate() {
        // SAFETY: the caller's promise; bytes that are masked are not read.
        let row = |m: usize| unsafe {
            let p = first.add((4 * m + k) * stride);
            if n == 16 {
                _mm_loadu_si128(p.cast())
            } else {
                _mm_maskz_loadu_epi8((1 << n) - 1, p.cast())
            }
        };
        *to = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(row(0)), row(1));
        *to = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(*to, row(2)), row(3));
    }
    all
}

/// Of [`rows`]: vector `t` has word `t` of row `i` in lane `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn by_word([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (low, low2) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (high, high2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(low, low2),
        _mm512_unpackhi_epi64(low, low2),
        _mm512_unpacklo_epi64(high, high2),
        _mm512_unpackhi_epi64(high, high2),
    ]
}

/// Of [`rows`]: word `i` in lane `m` of vector `t` has byte `4t + i` of the rows `4m ..`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn by_byte([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (low, low2) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
    let (high, high2) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
    [
        _mm512_unpacklo_epi16(low, low2),
        _mm512_unpackhi_epi16(low, low2),
        _mm512_unpacklo_epi16(high, high2),
        _mm512_unpackhi_epi16(high, high2),
    ]
}

/// Codes of eight bits from their four upper bits and the `LOWER` bits below these (layout:
/// `kv.rs`): first those in low halves of bytes of `upper[0]`, then those in high ones, and so on.
/// All have the bits of `middle`, too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn codes<const LOWER: usize>(
    upper: [__m512i; 4],
    lower: [__m512i; 4],
    middle: i8,
) -> [__m512i; CODES] {
    let middle = _mm512_set1_epi8(middle);
    // `a | b & c`.
    const OR_AND: i32 = 0xf8;
    let high = _mm512_set1_epi8(0xf0u8 as i8);
    // The places of lower bits in a code.
    let low = _mm512_set1_epi8(0xf - (0xf >> LOWER));
    // Words of a key's lower bits, and bits of each code.
    let words = LOWER.max(1);
    let mut all = [_mm512_setzero_si512(); CODES];
    for k in 0..4 {
        for half in 0..2 {
            let upper = if half == 0 {
                _mm512_slli_epi16::<4>(upper[k])
            } else {
                upper[k]
            };
            all[2 * k + half] = if LOWER == 0 {
                _mm512_ternarylogic_epi32::<OR_AND>(middle, upper, high)
            } else {
                // Place of the lower bits in their byte, and in a code.
                let (from, to) = (4 * half + k - k % words, 4 - LOWER);
                let lower = lower[k % words];
                let count = |n: usize| _mm_cvtsi32_si128(n as i32);
                let lower = if from > to {
                    _mm512_srl_epi16(lower, count(from - to))
                } else {
                    _mm512_sll_epi16(lower, count(to - from))
                };
                // The first where `high` is set, else the second.
                _mm512_ternarylogic_epi32::<0xca>(
                    high,
                    upper,
                    _mm512_ternarylogic_epi32::<OR_AND>(middle, lower, low),
                )
            };
        }
    }
    all
}

/// Scales of a block, `[group][key]`.
///
/// # Safety
/// The plane must have 64 rows of as many scales, and `to` room for them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_scales(plane: Plane, n_groups: usize, to: *mut f32) {
    for t in 0..N_VECTORS {
        let first = plane.first.wrapping_add(t * LANES * plane.row);
        // SAFETY: 16 rows of the plane.
        let pairs = unsafe {
            if n_groups == 2 {
                [_mm512_loadu_si512(first.cast()); 4]
            } else {
                by_word(rows(first, plane.row, plane.row))
            }
        };
        for g in 0..n_groups {
            let pair = pairs[g / 2];
            let scales = match g % 2 {
                0 => _mm512_slli_epi32::<16>(pair),
                _ => _mm512_and_si512(pair, _mm512_set1_epi32(!0xffff)),
            };
            // SAFETY: there is room for 64 scales of each group.
            unsafe { _mm512_storeu_ps(to.add(g * BLOCK + t * LANES), _mm512_castsi512_ps(scales)) };
        }
    }
}

/// Products of the `n` queries with the unpacked keys.
///
/// # Safety
/// The room must have the queries, and codes and scales of a block of keys.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_scores(room: *mut Room, n: usize, n_groups: usize, ahead: &mut Ahead<'_>) {
    for tile in tiles(n) {
        // SAFETY: the caller's promise.
        unsafe {
            match tile.len() {
                4 => dots::<4>(room, tile.start, n_groups, ahead),
                2 => dots::<2>(room, tile.start, n_groups, ahead),
                _ => dots::<1>(room, tile.start, n_groups, ahead),
            }
        }
    }
}

/// [`add_scores`] for `R` rows from `row` on.
///
/// # Safety
/// As there.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dots<const R: usize>(
    room: *mut Room,
    row: usize,
    n_groups: usize,
    ahead: &mut Ahead<'_>,
) {
    // SAFETY: addresses of parts of the room, which are initialised by the caller's promise.
    let (q, codes, scales, scores): (&[Query; R], *const __m512i, *const f32, *mut f32) = unsafe {
        (
            &*(&raw const (*room).queries[row]).cast(),
            (&raw const (*room).codes).cast(),
            (&raw const (*room).scales).cast(),
            (&raw mut (*room).scores[row * STRIDE]).cast(),
        )
    };
    for t in 0..N_VECTORS {
        let mut sums = [_mm512_setzero_ps(); R];
        for g in 0..n_groups {
            ahead.point();
            let mut upper = [_mm512_setzero_si512(); R];
            let mut lower: [__m512i; R] = arrays::from_fn(|r| _mm512_set1_epi32(q[r].start[g]));
            for i in 0..CODES {
                // SAFETY: codes of the block.
                let code = unsafe { _mm512_load_si512(codes.add((t * n_groups + g) * CODES + i)) };
                for r in 0..R {
                    // A sum of 32 products of a code and a byte is below 2²⁰: times 256 it fits.
                    upper[r] =
                        _mm512_dpbusd_epi32(upper[r], code, _mm512_set1_epi32(q[r].words[g][0][i]));
                    lower[r] =
                        _mm512_dpbusd_epi32(lower[r], code, _mm512_set1_epi32(q[r].words[g][1][i]));
                }
            }
            // SAFETY: scales of the block.
            let scale = unsafe { _mm512_loadu_ps(scales.add(g * BLOCK + t * LANES)) };
            for r in 0..R {
                let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(
                    _mm512_slli_epi32::<8>(upper[r]),
                    lower[r],
                ));
                sums[r] = _mm512_fmadd_ps(
                    sum,
                    _mm512_mul_ps(scale, _mm512_set1_ps(q[r].scale)),
                    sums[r],
                );
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            // SAFETY: there is room for the scores of each row.
            unsafe { _mm512_storeu_ps(scores.add(r * STRIDE + t * LANES), sum) };
        }
    }
}

/// The keys of a span, one bit each, of each vector.
#[inline]
fn masks(span: &Range<usize>) -> [u16; N_VECTORS] {
    arrays::from_fn(|t| {
        let at = |x: usize| x.clamp(t * LANES, (t + 1) * LANES) - t * LANES;
        ((1u32 << at(span.end)) - (1 << at(span.start))) as u16
    })
}

/// Divides the scales of the keys that are `seen` by the largest of each group.
///
/// # Safety
/// The room must have scales of `n_groups` groups.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn relative_scales(room: *mut Room, seen: [u16; N_VECTORS], n_groups: usize) {
    for g in 0..n_groups {
        // The bits of numbers that are not negative have their order, and those of NaN are the
        // largest.
        let (mut scales, mut top) = (
            [_mm512_setzero_si512(); N_VECTORS],
            _mm512_set1_epi32(TINY_SCALE.to_bits() as i32),
        );
        for (t, scales) in scales.iter_mut().enumerate() {
            // SAFETY: scales of the block.
            *scales = unsafe {
                _mm512_maskz_loadu_epi32(
                    seen[t],
                    (&raw const (*room).scales)
                        .cast::<i32>()
                        .add(g * BLOCK + t * LANES),
                )
            };
            top = _mm512_max_epi32(*scales, top);
        }
        let largest = f32::from_bits(_mm512_reduce_max_epi32(top) as u32);
        let inverse = _mm512_set1_ps(MAX_WEIGHT / largest);
        // SAFETY: there is room for them.
        unsafe {
            (*room).largest[g] = largest;
            for (t, scales) in scales.into_iter().enumerate() {
                let to = (&raw mut (*room).relative)
                    .cast::<f32>()
                    .add(g * BLOCK + t * LANES);
                _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_castsi512_ps(scales), inverse));
            }
        }
    }
}

/// Turns the scores of row `r` of the keys that are `seen` into weights, and moves its running
/// maximum and sum, and its outputs `out`. With `HALF`, codes of values stand for half a step more.
///
/// # Safety
/// The room must have the row's scores, and relative scales of the `seen` keys; `out` must be a row
/// of outputs.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn weigh<const HALF: bool>(
    room: *mut Room,
    r: usize,
    seen: [u16; N_VECTORS],
    (max, sum): (&mut f32, &mut __m512),
    out: *mut f32,
    p: &AttnParams,
) {
    let z = zero();
    let (mut scores, mut top) = ([z; N_VECTORS], z.splat(f32::NEG_INFINITY));
    for (t, score) in scores.iter_mut().enumerate() {
        // SAFETY: the row's scores; lanes that are masked are not read.
        *score = F32x16(unsafe {
            _mm512_maskz_loadu_ps(
                seen[t],
                (&raw const (*room).scores)
                    .cast::<f32>()
                    .add(r * STRIDE + t * LANES),
            )
        });
        if p.softcap > 0.0 {
            let cap = z.splat(p.softcap);
            *score = tanh(*score / cap) * cap;
        }
        // After the cap, which would make them finite.
        *score = F32x16(_mm512_mask_mov_ps(
            _mm512_set1_ps(f32::NEG_INFINITY),
            seen[t],
            score.0,
        ));
        top = score.max(top);
    }
    let top = _mm512_reduce_max_ps(top.0);
    let mut total = z;
    for score in &mut scores {
        *score = short_exp(*score - z.splat(top));
        total = total + *score;
    }
    let before = *max;
    let part;
    if top > before {
        let shrink = exp(z.splat(before - top));
        for c in (0..p.head_dim_v).step_by(LANES) {
            // SAFETY: a vector of the row.
            unsafe { (z.read(out.add(c)) * shrink).write(out.add(c)) };
        }
        (part, *max) = (1.0, top);
        *sum = F32x16(*sum).mul_add(shrink, total).0;
    } else {
        let shrink = exp(z.splat(top - before));
        part = _mm512_cvtss_f32(shrink.0);
        *sum = total.mul_add(shrink, F32x16(*sum)).0;
    }
    // The largest is 1 now: weights are rounded relative to the block's largest, whatever came
    // before.
    for g in 0..p.head_dim_v / GROUP {
        let (mut words, mut sum) = ([_mm512_setzero_si512(); N_VECTORS], z);
        for t in 0..N_VECTORS {
            // SAFETY: relative scales of what is seen.
            let scale = unsafe {
                z.read(
                    (&raw const (*room).relative)
                        .cast::<f32>()
                        .add(g * BLOCK + t * LANES),
                )
            };
            let x = scores[t] * scale;
            if HALF {
                sum = sum + x;
            }
            words[t] = _mm512_cvtps_epi32(x.0);
        }
        let [a, b, c, d] = words;
        let (a, b) = (_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
        let byte = _mm512_set1_epi16(255);
        let upper = _mm512_packus_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
        let lower = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        // SAFETY: the caller's promise.
        unsafe {
            let to = &raw mut (*room).weights[r];
            (*to).planes[g] = [upper, lower];
            (*to).middle[g] = if HALF { 0.5 * sum.sum() } else { 0.0 };
            (*to).unit[g] = part / MAX_WEIGHT * (*room).largest[g];
        }
    }
}

/// Adds values by weight to a row of outputs.
///
/// # Safety
/// The room must have the row's weights, and codes and scales of a block of values with as many
/// groups; `out` must be a row of them.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_weighted(
    room: *const Room,
    r: usize,
    n_groups: usize,
    out: *mut f32,
    ahead: &mut Ahead<'_>,
) {
    // SAFETY: parts of the room, which are initialised by the caller's promise.
    let (codes, w): (*const __m512i, &Weights) =
        unsafe { ((&raw const (*room).codes).cast(), &(*room).weights[r]) };
    for g in 0..n_groups {
        let [upper, lower] = arrays::map(w.planes[g], |plane| {
            [
                _mm512_shuffle_epi32::<0x00>(plane),
                _mm512_shuffle_epi32::<0x55>(plane),
                _mm512_shuffle_epi32::<0xaa>(plane),
                _mm512_shuffle_epi32::<0xff>(plane),
            ]
        });
        let mut sums = [[_mm512_setzero_si512(); CODES]; 2];
        for t in 0..N_VECTORS {
            ahead.point();
            for i in 0..CODES {
                // SAFETY: codes of the block.
                let code = unsafe { _mm512_load_si512(codes.add((g * N_VECTORS + t) * CODES + i)) };
                // A sum of 16 products of two bytes is below 2¹⁹: four of them, times 256, fit.
                sums[0][i] = _mm512_dpbusd_epi32(sums[0][i], upper[t], code);
                sums[1][i] = _mm512_dpbusd_epi32(sums[1][i], lower[t], code);
            }
        }
        let (unit, middle) = (_mm512_set1_ps(w.unit[g]), _mm512_set1_ps(w.middle[g]));
        for half in 0..2 {
            let sum = arrays::from_fn(|k| {
                let i = 2 * k + half;
                _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0][i]), sums[1][i])
            });
            let sum = _mm512_add_ps(_mm512_cvtepi32_ps(fold(sum)), middle);
            // SAFETY: 16 columns of the row.
            unsafe {
                let to = out.add(g * GROUP + half * LANES);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, unit, _mm512_loadu_ps(to)));
            }
        }
    }
}

/// Sums over the lanes of 128 bits of four vectors: that of vector `k` in lane `k`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fold([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let pair = |a, b| {
        _mm512_add_epi32(
            _mm512_shuffle_i32x4::<0x44>(a, b),
            _mm512_shuffle_i32x4::<0xee>(a, b),
        )
    };
    let (a, b) = (pair(a, b), pair(c, d));
    _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0x88>(a, b),
        _mm512_shuffle_i32x4::<0xdd>(a, b),
    )
}
