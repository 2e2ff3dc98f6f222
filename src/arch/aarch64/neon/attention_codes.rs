//! The shared attention over codes, by `smlal`: as many products as an `f32` instruction does, but
//! codes need no conversion.
//!
//! Per value of a key or value, in executed instructions (`tests/neon_instructions.py`, heads of
//! 128): 0.55 for each query, softmax included; unpacking, once for all queries, and prefetching
//! take 0.86 (`q4_0`), 0.98 (`q8_0`), and 1.2 (`q5_0`, `q6_0`).

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::attention;
use super::elementwise::zero;
use crate::arch::arrays;
use crate::arch::attention::{AttnParams, AttnPartial};
use crate::arch::generic::attention_codes::{
    MAX_GROUPS, Query, Room, Steps, Weights, attention_codes, fits,
};
use crate::arch::generic::kv_blocks::{Ahead, BLOCK};
use crate::arch::kv::{GROUP, widen};
use crate::arch::kv::{KvStored, KvType};
use std::arch::aarch64::*;

/// Vectors of words of a group.
const WORDS: usize = GROUP / 8;

/// See [`crate::arch::Arch::attention_stored`].
#[target_feature(enable = "neon")]
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
#[inline]
#[target_feature(enable = "neon")]
unsafe fn round(x: &[f32], words: &mut [i16]) -> i32 {
    let mut sum = vdupq_n_s32(0);
    for (x, words) in x.chunks_exact(8).zip(words.chunks_exact_mut(8)) {
        // SAFETY: eight numbers, and room for as many words.
        unsafe {
            let low = vqmovn_s32(vcvtnq_s32_f32(vld1q_f32(x.as_ptr())));
            let packed = vqmovn_high_s32(low, vcvtnq_s32_f32(vld1q_f32(x.as_ptr().add(4))));
            sum = vpadalq_s16(sum, packed);
            vst1q_s16(words.as_mut_ptr(), packed);
        }
    }
    vaddvq_s32(sum)
}

/// See [`Steps::unpack`]: keys lie as `[key][group]`, values as `[group][key]`.
#[target_feature(enable = "neon")]
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
#[target_feature(enable = "neon")]
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
    for j in 0..BLOCK {
        if j % 8 == 0 {
            (0..n_groups).for_each(|_| ahead.point());
        }
        for g in 0..n_groups {
            let i = j * n_groups + g;
            let at = if keys { i } else { g * BLOCK + j };
            // SAFETY: a group of each plane; there is room for its codes and scale.
            unsafe {
                let scale =
                    u16::from_le(scales.add(i * scale_group).cast::<u16>().read_unaligned());
                (&raw mut (*room).scales)
                    .cast::<f32>()
                    .add(g * BLOCK + j)
                    .write(widen(scale) * step);
                let [a, b] =
                    codes::<LOWER>(uppers.add(i * upper_group), lowers.add(i * lower_group));
                let to = (&raw mut (*room).codes).cast::<u16>().add(at * GROUP);
                vst1q_u16(to, vmovl_u8(vget_low_u8(a)));
                vst1q_u16(to.add(8), vmovl_high_u8(a));
                vst1q_u16(to.add(16), vmovl_u8(vget_low_u8(b)));
                vst1q_u16(to.add(24), vmovl_high_u8(b));
            }
        }
    }
}

/// Codes of a group, its lower values first, from their four upper bits and the `LOWER` bits below
/// these (layout: `kv.rs`).
///
/// # Safety
/// The planes must have the group.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes<const LOWER: usize>(upper: *const u8, lower: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let (upper, lower) = unsafe {
        let lower = match LOWER {
            4 => vld1q_u8(lower),
            2 => vreinterpretq_u8_u64(vdupq_n_u64(lower.cast::<u64>().read_unaligned())),
            1 => vreinterpretq_u8_u32(vdupq_n_u32(lower.cast::<u32>().read_unaligned())),
            _ => vdupq_n_u8(0),
        };
        (vld1q_u8(upper), lower)
    };
    let upper = [vandq_u8(upper, vdupq_n_u8(15)), vshrq_n_u8::<4>(upper)];
    if LOWER == 0 {
        return upper;
    }
    let bits = vdupq_n_u8((1 << LOWER) - 1);
    [0, 1].map(|half| {
        // How far the bits of each value are to be moved to the right; the lower bits of 16 values
        // take `2·LOWER` bytes.
        let places: [i8; 16] = arrays::from_fn(|i| -((i / (4 * LOWER) * LOWER + 4 * half) as i8));
        // SAFETY: 16 bytes.
        let places = unsafe { vld1q_s8(places.as_ptr()) };
        let lower = vandq_u8(vshlq_u8(lower, places), bits);
        vorrq_u8(vshlq_u8(upper[half], vdupq_n_s8(LOWER as i8)), lower)
    })
}

/// See [`Steps::add_scores`].
#[target_feature(enable = "neon")]
unsafe fn add_scores(room: *mut Room, r: usize, n_groups: usize, ahead: &mut Ahead<'_>) {
    // SAFETY: addresses of parts of the room, which are initialised by the caller's promise.
    let (q, codes, scales, scores): (&Query, *const i16, *const f32, *mut f32) = unsafe {
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
        let mut score = vdupq_n_f32(0.0);
        for g in 0..n_groups {
            // No closures, which would stay calls.
            let (words, mut sums) = (q.words[g].as_ptr(), [vdupq_n_s32(0); 4]);
            for w in 0..WORDS {
                // SAFETY: the words of a group.
                let q = unsafe { vld1q_s16(words.add(8 * w)) };
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: codes of the block.
                    let code = unsafe {
                        vld1q_s16(codes.add(((4 * t + i) * n_groups + g) * GROUP + 8 * w))
                    };
                    *sum = vmlal_s16(*sum, vget_low_s16(code), vget_low_s16(q));
                    *sum = vmlal_high_s16(*sum, code, q);
                }
            }
            let sum = vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
            let sum = vcvtq_f32_s32(vaddq_s32(sum, vdupq_n_s32(q.start[g])));
            // SAFETY: scales of the block.
            let scale = unsafe { vld1q_f32(scales.add(g * BLOCK + 4 * t)) };
            score = vfmaq_f32(score, sum, vmulq_n_f32(scale, q.scale));
        }
        // SAFETY: there is room for the scores of each row.
        unsafe { vst1q_f32(scores.add(4 * t), score) };
    }
}

/// See [`Steps::add_weighted`].
#[target_feature(enable = "neon")]
unsafe fn add_weighted(room: *const Room, n_groups: usize, out: *mut f32, ahead: &mut Ahead<'_>) {
    // SAFETY: parts of the room, which are initialised by the caller's promise.
    let (codes, w): (*const i16, &Weights) =
        unsafe { ((&raw const (*room).codes).cast(), &(*room).weights) };
    for g in 0..n_groups {
        let mut sums = [vdupq_n_s32(0); 2 * WORDS];
        for (t, words) in w.words[g].chunks_exact(8).enumerate() {
            ahead.point();
            // SAFETY: eight words.
            let words = unsafe { vld1q_s16(words.as_ptr()) };
            let keys = codes.wrapping_add((g * BLOCK + 8 * t) * GROUP);
            // SAFETY: codes of the block.
            unsafe {
                add_key::<0>(&mut sums, keys, words);
                add_key::<1>(&mut sums, keys, words);
                add_key::<2>(&mut sums, keys, words);
                add_key::<3>(&mut sums, keys, words);
                add_key::<4>(&mut sums, keys, words);
                add_key::<5>(&mut sums, keys, words);
                add_key::<6>(&mut sums, keys, words);
                add_key::<7>(&mut sums, keys, words);
            }
        }
        let (unit, start) = (vdupq_n_f32(w.unit[g]), vdupq_n_s32(w.start[g]));
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: four columns of the row.
            unsafe {
                let to = out.add(g * GROUP + 4 * i);
                vst1q_f32(
                    to,
                    vfmaq_f32(vld1q_f32(to), vcvtq_f32_s32(vaddq_s32(sum, start)), unit),
                );
            }
        }
    }
}

/// Adds a group of key `J` of eight, times its weight.
///
/// # Safety
/// The codes must be readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_key<const J: i32>(
    sums: &mut [int32x4_t; 2 * WORDS],
    keys: *const i16,
    words: int16x8_t,
) {
    for i in 0..WORDS {
        // SAFETY: the caller's promise.
        let code = unsafe { vld1q_s16(keys.add(J as usize * GROUP + 8 * i)) };
        sums[2 * i] = vmlal_laneq_s16::<J>(sums[2 * i], vget_low_s16(code), words);
        sums[2 * i + 1] = vmlal_high_laneq_s16::<J>(sums[2 * i + 1], code, words);
    }
}
