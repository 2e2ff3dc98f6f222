//! The shared attention over codes, by products of words: 8 with their sums in two instructions,
//! and codes need no conversion.

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::attention;
use super::elementwise::zero;
use super::matmul::{integers, lane_sum};
use crate::arch::attention::{AttnParams, AttnPartial};
use crate::arch::generic::attention_codes::{
    MAX_GROUPS, Query, Room, Steps, Weights, attention_codes, fits,
};
use crate::arch::generic::kv_blocks::{Ahead, BLOCK};
use crate::arch::kv::{GROUP, widen};
use crate::arch::kv::{KvStored, KvType};
use std::arch::wasm32::*;

/// Vectors of words of a group.
const WORDS: usize = GROUP / 8;

/// See [`crate::arch::Arch::attention_stored`].
pub(super) fn attention_stored(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    if !fits(&stored, p) {
        return attention::attention_stored(to, q, stored, ranges, p);
    }
    let steps = Steps {
        round,
        unpack,
        add_scores,
        add_weighted,
    };
    // SAFETY: they fit, and the steps are this level's.
    unsafe { attention_codes(zero(), steps, to, q, stored, ranges, p) }
}

/// See [`Steps::round`].
#[inline(always)]
fn round(x: &[f32], words: &mut [i16]) -> i32 {
    let mut sum = i32x4_splat(0);
    for (x, words) in x.chunks_exact(8).zip(words.chunks_exact_mut(8)) {
        // SAFETY: eight numbers.
        let (a, b) = unsafe {
            (
                v128_load(x.as_ptr().cast()),
                v128_load(x[4..].as_ptr().cast()),
            )
        };
        let (a, b) = (integers(a), integers(b));
        sum = i32x4_add(sum, i32x4_add(a, b));
        // SAFETY: room for eight words.
        unsafe { v128_store(words.as_mut_ptr().cast(), i16x8_narrow_i32x4(a, b)) };
    }
    lane_sum(sum)
}

/// See [`Steps::unpack`]: keys lie as `[key][group]`, values as `[group][two keys]`, whose words
/// alternate.
unsafe fn unpack(
    kind: KvType,
    block: &[u8],
    n_groups: usize,
    keys: bool,
    room: *mut Room,
    ahead: &mut Ahead<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            KvType::Q8 => unpack_groups::<4>(block, n_groups, keys, room, ahead),
            KvType::Q6 => unpack_groups::<2>(block, n_groups, keys, room, ahead),
            KvType::Q5 => unpack_groups::<1>(block, n_groups, keys, room, ahead),
            _ => unpack_groups::<0>(block, n_groups, keys, room, ahead),
        }
    }
}

/// [`unpack`] for codes with `LOWER` bits below the upper four.
unsafe fn unpack_groups<const LOWER: usize>(
    block: &[u8],
    n_groups: usize,
    keys: bool,
    room: *mut Room,
    ahead: &mut Ahead<'_>,
) {
    // Bytes of a group in each plane.
    let (upper_group, lower_group, scale_group) = (GROUP / 2, GROUP * LOWER / 8, 2);
    let n = BLOCK * n_groups;
    assert!(block.len() == n * (upper_group + lower_group + scale_group) && n_groups <= MAX_GROUPS);
    let uppers = block.as_ptr();
    let lowers = uppers.wrapping_add(n * upper_group);
    let scales = lowers.wrapping_add(n * lower_group);
    let step = (1 << (4 - LOWER)) as f32;
    for j in (0..BLOCK).step_by(2) {
        if j % 8 == 0 {
            (0..n_groups).for_each(|_| ahead.point());
        }
        for g in 0..n_groups {
            let mut words = [[i16x8_splat(0); WORDS]; 2];
            for (key, words) in words.iter_mut().enumerate() {
                let i = (j + key) * n_groups + g;
                // SAFETY: a group of each plane; there is room for its scale.
                let [a, b] = unsafe {
                    let scale =
                        u16::from_le(scales.add(i * scale_group).cast::<u16>().read_unaligned());
                    (&raw mut (*room).scales)
                        .cast::<f32>()
                        .add(g * BLOCK + j + key)
                        .write(widen(scale) * step);
                    codes::<LOWER>(uppers.add(i * upper_group), lowers.add(i * lower_group))
                };
                *words = [
                    u16x8_extend_low_u8x16(a),
                    u16x8_extend_high_u8x16(a),
                    u16x8_extend_low_u8x16(b),
                    u16x8_extend_high_u8x16(b),
                ];
            }
            let [first, second] = words;
            // SAFETY: an address of a part of the room.
            let to: *mut v128 = unsafe { (&raw mut (*room).codes).cast() };
            for w in 0..WORDS {
                // SAFETY: there is room for the codes of all keys.
                unsafe {
                    if keys {
                        let to = to.add((j * n_groups + g) * WORDS + w);
                        to.write(first[w]);
                        to.add(n_groups * WORDS).write(second[w]);
                    } else {
                        let to = to.add((g * BLOCK + j) * WORDS + 2 * w);
                        let (a, b) = (first[w], second[w]);
                        to.write(i16x8_shuffle::<0, 8, 1, 9, 2, 10, 3, 11>(a, b));
                        to.add(1)
                            .write(i16x8_shuffle::<4, 12, 5, 13, 6, 14, 7, 15>(a, b));
                    }
                }
            }
        }
    }
}

/// Codes of a group, its lower values first, from their four upper bits and the `LOWER` bits below
/// these (layout: `kv.rs`).
///
/// # Safety
/// The planes must have the group.
#[inline(always)]
unsafe fn codes<const LOWER: usize>(upper: *const u8, lower: *const u8) -> [v128; 2] {
    // SAFETY: the caller's promise.
    let upper = unsafe { v128_load(upper.cast()) };
    let upper = [v128_and(upper, u8x16_splat(15)), u8x16_shr(upper, 4)];
    if LOWER == 0 {
        return upper;
    }
    let bits = u8x16_splat((1 << LOWER) - 1);
    let half_of = |half: usize| {
        // Value `i` of the half is in byte `i % (4·LOWER)`, `i / (4·LOWER)·LOWER` bits further on.
        let from = 4 * half as u32;
        // SAFETY: the caller's promise; `4·LOWER` bytes.
        let lower = unsafe {
            match LOWER {
                4 => u8x16_shr(v128_load(lower.cast()), from),
                2 => {
                    let bytes = v128_load64_splat(lower.cast());
                    i64x2_shuffle::<0, 3>(u64x2_shr(bytes, from), u64x2_shr(bytes, from + 2))
                }
                _ => {
                    let bytes = lower.cast::<u32>().read_unaligned() >> from;
                    u32x4(bytes, bytes >> 1, bytes >> 2, bytes >> 3)
                }
            }
        };
        v128_or(u8x16_shl(upper[half], LOWER as u32), v128_and(lower, bits))
    };
    [half_of(0), half_of(1)]
}

/// See [`Steps::add_scores`].
unsafe fn add_scores(room: *mut Room, r: usize, n_groups: usize, ahead: &mut Ahead<'_>) {
    // SAFETY: addresses of parts of the room, which are initialised by the caller's promise.
    let (q, codes, scales, scores): (&Query, *const v128, *const f32, *mut f32) = unsafe {
        (
            &(*room).queries[r],
            (&raw const (*room).codes).cast(),
            (&raw const (*room).scales).cast(),
            (&raw mut (*room).scores[r]).cast(),
        )
    };
    for t in 0..BLOCK / 4 {
        if t % 2 == 0 {
            ahead.point();
        }
        let mut score = f32x4_splat(0.0);
        for g in 0..n_groups {
            let (words, mut sums) = (q.words[g].as_ptr(), [i32x4_splat(0); 4]);
            for w in 0..WORDS {
                // SAFETY: the words of a group.
                let q = unsafe { v128_load(words.add(8 * w).cast()) };
                for i in 0..4 {
                    // SAFETY: codes of the block.
                    let code = unsafe { *codes.add(((4 * t + i) * n_groups + g) * WORDS + w) };
                    sums[i] = i32x4_add(sums[i], i32x4_dot_i16x8(code, q));
                }
            }
            let pairs = |a, b| {
                i32x4_add(
                    i32x4_shuffle::<0, 2, 4, 6>(a, b),
                    i32x4_shuffle::<1, 3, 5, 7>(a, b),
                )
            };
            let sum = pairs(pairs(sums[0], sums[1]), pairs(sums[2], sums[3]));
            let sum = f32x4_convert_i32x4(i32x4_add(sum, i32x4_splat(q.start[g])));
            // SAFETY: scales of the block.
            let scale = unsafe { v128_load(scales.add(g * BLOCK + 4 * t).cast()) };
            let scale = f32x4_mul(scale, f32x4_splat(q.scale));
            score = f32x4_add(score, f32x4_mul(sum, scale));
        }
        // SAFETY: there is room for the scores of each row.
        unsafe { v128_store(scores.add(4 * t).cast(), score) };
    }
}

/// See [`Steps::add_weighted`].
unsafe fn add_weighted(room: *const Room, n_groups: usize, out: *mut f32, ahead: &mut Ahead<'_>) {
    // SAFETY: parts of the room, which are initialised by the caller's promise.
    let (codes, w): (*const v128, &Weights) =
        unsafe { ((&raw const (*room).codes).cast(), &(*room).weights) };
    for g in 0..n_groups {
        let mut sums = [i32x4_splat(0); 2 * WORDS];
        for (t, words) in w.words[g].chunks_exact(2).enumerate() {
            if t % 4 == 0 {
                ahead.point();
            }
            // SAFETY: two words.
            let weights = unsafe { v128_load32_splat(words.as_ptr().cast()) };
            for i in 0..2 * WORDS {
                // SAFETY: codes of the block.
                let code = unsafe { *codes.add((g * BLOCK + 2 * t) * WORDS + i) };
                sums[i] = i32x4_add(sums[i], i32x4_dot_i16x8(code, weights));
            }
        }
        let (unit, start) = (f32x4_splat(w.unit[g]), i32x4_splat(w.start[g]));
        for (i, sum) in sums.into_iter().enumerate() {
            let sum = f32x4_convert_i32x4(i32x4_add(sum, start));
            // SAFETY: four columns of the row.
            unsafe {
                let to: *mut v128 = out.add(g * GROUP + 4 * i).cast();
                v128_store(to, f32x4_add(v128_load(to), f32x4_mul(sum, unit)));
            }
        }
    }
}
