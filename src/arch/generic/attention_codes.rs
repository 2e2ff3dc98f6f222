//! Attention of decode rows over quantised keys and values, in integers of 16 bits: what levels
//! without products of bytes share.
//!
//! The arithmetic is that of `avx512/attention_i8.rs`. A query, and a row's weights times the
//! scales of the values, are rounded to 16 bits, weights relative to the block's largest; sums of
//! integers are exact. Codes are widened to words once for all rows. Levels bring the [`Steps`]
//! that depend on how their instructions pair words.
//!
//! A row's result depends on the row and on the keys that it sees alone.

use super::attention::{ROWS, STRIDE, attention_merge};
use super::kv_blocks::{Ahead, BLOCK, visible};
use super::lanes::{Lanes, exp, tanh};
use crate::arch::attention::{AttnParams, AttnPartial};
use crate::arch::kv::GROUP;
use crate::arch::kv::{KvStored, KvType};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Widest head that these kernels take, in groups of values with one scale.
pub(in crate::arch) const MAX_GROUPS: usize = 8;
/// Largest integers that a query and weights are rounded to. The upper byte of a query's is at most
/// 127, and the lower one at least −128.
pub(in crate::arch) const MAX_QUERY: f32 = 32512.0;
const MAX_WEIGHT: f32 = 32767.0;
/// Queries with only smaller magnitudes count as zero.
pub(in crate::arch) const TINY: f32 = 1e-30;
/// Minimum of the largest scale of values, by which all are divided: a 128th of the largest value
/// stored as zero.
pub(in crate::arch) const TINY_SCALE: f32 = 1e-33;

/// A query in 16 bits.
#[repr(C, align(32))]
pub(in crate::arch) struct Query {
    pub(in crate::arch) words: [[i16; GROUP]; MAX_GROUPS],
    /// Initial value of each group's sums: codes are unsigned and stand for the middle of their
    /// interval.
    pub(in crate::arch) start: [i32; MAX_GROUPS],
    /// Value of an integer step.
    pub(in crate::arch) scale: f32,
}

/// A row's weights times the scales of the values, in 16 bits.
#[repr(C, align(32))]
pub(in crate::arch) struct Weights {
    pub(in crate::arch) words: [[i16; BLOCK]; MAX_GROUPS],
    /// As [`Query::start`].
    pub(in crate::arch) start: [i32; MAX_GROUPS],
    /// Value of an integer step.
    pub(in crate::arch) unit: [f32; MAX_GROUPS],
}

/// Working memory of a task.
#[repr(C, align(64))]
pub(in crate::arch) struct Room {
    /// Codes of a block, as words, in an order of the level's own.
    pub(in crate::arch) codes: [i16; BLOCK * MAX_GROUPS * GROUP],
    /// Value of a step of a code.
    pub(in crate::arch) scales: [[f32; BLOCK]; MAX_GROUPS],
    /// The same, divided by the group's largest, times [`MAX_WEIGHT`]; 0 for keys that are not
    /// seen.
    relative: [[f32; BLOCK]; MAX_GROUPS],
    /// The largest scale of each group.
    largest: [f32; MAX_GROUPS],
    pub(in crate::arch) queries: [Query; ROWS],
    pub(in crate::arch) weights: Weights,
    pub(in crate::arch) scores: [[f32; STRIDE]; ROWS],
    out: [f32; ROWS * MAX_GROUPS * GROUP],
}

/// The steps of a level. Their promises: the CPU has it; blocks are whole; the room has what the
/// step reads.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Steps {
    /// Rounds as many numbers as there are words, a multiple of 16, to the nearest integers.
    /// Returns their sum.
    pub(in crate::arch) round: unsafe fn(&[f32], &mut [i16]) -> i32,
    /// Unpacks a block of keys, or of values, with a number of groups per row, to codes and scales.
    pub(in crate::arch) unpack: unsafe fn(KvType, &[u8], usize, bool, *mut Room, &mut Ahead<'_>),
    /// Scores of a query with the unpacked keys.
    pub(in crate::arch) add_scores: unsafe fn(*mut Room, usize, usize, &mut Ahead<'_>),
    /// Adds unpacked values by weight to a row of outputs.
    pub(in crate::arch) add_weighted: unsafe fn(*const Room, usize, *mut f32, &mut Ahead<'_>),
}

/// Whether these kernels take such heads.
#[inline(always)]
pub(in crate::arch) fn fits(stored: &KvStored<'_>, p: &AttnParams) -> bool {
    let fits = |kind: KvType, dim: usize| {
        kind.is_quantized() && dim.is_multiple_of(GROUP) && dim <= MAX_GROUPS * GROUP && dim > 0
    };
    p.exact && fits(stored.k, p.head_dim) && fits(stored.v, p.head_dim_v) && p.slope == 0.0
}

/// See [`crate::arch::Arch::attention_stored`].
///
/// # Safety
/// The heads must fit, and the steps be those of the level of `z`.
#[inline(always)]
pub(in crate::arch) unsafe fn attention_codes<V: Lanes>(
    z: V,
    steps: Steps,
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let span = stored.span;
    let (n_groups, n_groups_v) = (p.head_dim / GROUP, p.head_dim_v / GROUP);
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: addresses of parts of the room.
    let (queries, out): (*mut Query, *mut f32) = unsafe {
        (
            (&raw mut (*room).queries).cast(),
            (&raw mut (*room).out).cast(),
        )
    };
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
            unsafe { round_query(z, steps, queries.add(r), q, stored.k, p.scale) };
        }
        let n_out = ranges.len() * p.head_dim_v;
        // SAFETY: there is room for as many rows of outputs.
        unsafe { out.write_bytes(0, n_out) };
        let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
        let n_points = BLOCK / 8 * (n_groups + n_groups_v + ranges.len() * (1 + n_groups_v));
        for i in seen {
            let (block, mut ahead) = (blocks[i], Ahead::new(blocks.get(i + 1), n_points));
            let first = span.first + i * BLOCK;
            // SAFETY: the caller's promise; the blocks are whole, the queries rounded.
            unsafe {
                (steps.unpack)(stored.k, block.k, n_groups, true, room, &mut ahead);
                for r in 0..ranges.len() {
                    (steps.add_scores)(room, r, n_groups, &mut ahead);
                }
                (steps.unpack)(stored.v, block.v, n_groups_v, false, room, &mut ahead);
            }
            let mut last = 0..0;
            for (r, &range) in ranges.iter().enumerate() {
                let span = visible(range, &(first..first + BLOCK));
                if span.is_empty() {
                    continue;
                }
                // SAFETY: scores and scales of the block are there, and rows of outputs.
                unsafe {
                    if span != last {
                        relative_scales(room, &span, n_groups_v);
                        last = span.clone();
                    }
                    let out = out.add(r * p.head_dim_v);
                    weigh(
                        z,
                        steps,
                        room,
                        r,
                        &span,
                        stored.v,
                        (&mut max[r], &mut sum[r]),
                        out,
                        p,
                    );
                    (steps.add_weighted)(room, n_groups_v, out, &mut ahead);
                }
            }
        }
        let n = ranges.len();
        // SAFETY: all rows of outputs are initialised.
        let out = unsafe { std::slice::from_raw_parts_mut(out, n_out) };
        let from = AttnPartial {
            out,
            max: &mut max[..n],
            sum: &mut sum[..n],
        };
        attention_merge(
            z,
            &mut to.rows(i * ROWS, ROWS, p.head_dim_v),
            &from,
            p.head_dim_v,
        );
    }
}

/// Initial value of a sum of codes times integers with the given sum: codes stand for the middle of
/// their interval, and 0 is half of the largest code.
#[inline(always)]
fn start(kind: KvType, sum: i32) -> i32 {
    -(sum.wrapping_mul((1 << kind.bits()) - 1) >> 1)
}

/// Rounds a query for such keys; its scores have the given factor.
///
/// # Safety
/// `to` must be writable, and the steps be those of the level.
#[inline(always)]
unsafe fn round_query<V: Lanes>(
    z: V,
    steps: Steps,
    to: *mut Query,
    q: &[f32],
    keys: KvType,
    factor: f32,
) {
    // Zero, or NaN where a value is not finite.
    let (mut top, mut finite) = (z, z);
    for q in q.chunks_exact(V::N) {
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
    for (g, q) in q.chunks_exact(GROUP).enumerate() {
        let mut scaled = [0.0f32; GROUP];
        for (q, to) in q.chunks_exact(V::N).zip(scaled.chunks_exact_mut(V::N)) {
            (z.load(q) * inverse).store(to);
        }
        let mut words = [0; GROUP];
        // SAFETY: the caller's promise.
        unsafe {
            (*to).start[g] = start(keys, (steps.round)(&scaled, &mut words));
            (*to).words[g] = words;
        }
    }
    // SAFETY: as above.
    unsafe { (*to).scale = largest / MAX_QUERY * factor + finite.sum() };
}

/// Divides the scales of the keys in `span` by the largest of each group.
///
/// # Safety
/// The room must have scales of `n_groups` groups.
#[inline(always)]
unsafe fn relative_scales(room: *mut Room, span: &Range<usize>, n_groups: usize) {
    for g in 0..n_groups {
        // SAFETY: the caller's promise, and room for as many.
        let (scales, relative, to) = unsafe {
            (
                &(*room).scales[g],
                &mut (*room).relative[g],
                &mut (*room).largest[g],
            )
        };
        // The bits of numbers that are not negative have their order, and those of NaN are the
        // largest.
        let largest = scales[span.clone()]
            .iter()
            .fold(TINY_SCALE.to_bits(), |top, x| top.max(x.to_bits()));
        *to = f32::from_bits(largest);
        let inverse = MAX_WEIGHT / *to;
        *relative = [0.0; BLOCK];
        relative[span.clone()]
            .iter_mut()
            .zip(&scales[span.clone()])
            .for_each(|(y, x)| *y = x * inverse);
    }
}

/// Turns the scores of row `r`, which sees the keys of `span`, into weights, and moves its running
/// maximum and sum, and its outputs `out`.
///
/// # Safety
/// The room must have the row's scores, and relative scales of the span; `out` must be a row of
/// outputs. The steps must be those of the level.
#[inline(always)]
unsafe fn weigh<V: Lanes>(
    z: V,
    steps: Steps,
    room: *mut Room,
    r: usize,
    span: &Range<usize>,
    values: KvType,
    (max, sum): (&mut f32, &mut f32),
    out: *mut f32,
    p: &AttnParams,
) {
    // SAFETY: parts of the room; the row has a score for each key of the block.
    let (scores, relative, largest, weights) = unsafe {
        let scores: &mut [f32; BLOCK] = &mut *(&raw mut (*room).scores[r]).cast();
        (
            scores,
            &(*room).relative,
            &(*room).largest,
            &mut (*room).weights,
        )
    };
    if p.softcap > 0.0 {
        let cap = z.splat(p.softcap);
        for s in scores.chunks_exact_mut(V::N) {
            (tanh(z.load(s) / cap) * cap).store(s);
        }
    }
    scores[..span.start].fill(f32::NEG_INFINITY);
    scores[span.end..].fill(f32::NEG_INFINITY);
    let mut top = z.splat(f32::NEG_INFINITY);
    for s in scores.chunks_exact(V::N) {
        top = z.load(s).max(top);
    }
    let top = top.max_lane();
    let mut total = z;
    for s in scores.chunks_exact_mut(V::N) {
        let weight = exp(z.load(s) - z.splat(top));
        weight.store(s);
        total = total + weight;
    }
    let (before, total) = (*max, total.sum());
    let mut part = 1.0;
    if top > before {
        let shrink = exp(z.splat(before - top));
        for c in (0..p.head_dim_v).step_by(V::N) {
            // SAFETY: a vector of the row.
            unsafe { (z.read(out.add(c)) * shrink).write(out.add(c)) };
        }
        (*sum, *max) = (*sum * shrink.max_lane() + total, top);
    } else {
        part = exp(z.splat(top - before)).max_lane();
        *sum += total * part;
    }
    // The largest is 1 now: weights are rounded relative to the block's largest, whatever came
    // before.
    for g in 0..p.head_dim_v / GROUP {
        let mut scaled = [0.0f32; BLOCK];
        let of_keys = scores
            .chunks_exact(V::N)
            .zip(relative[g].chunks_exact(V::N));
        for ((s, scale), to) in of_keys.zip(scaled.chunks_exact_mut(V::N)) {
            (z.load(s) * z.load(scale)).store(to);
        }
        // SAFETY: the caller's promise.
        let sum = unsafe { (steps.round)(&scaled, &mut weights.words[g]) };
        weights.start[g] = start(values, sum);
        weights.unit[g] = part / MAX_WEIGHT * largest[g];
    }
}
