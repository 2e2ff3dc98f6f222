//! The shared attention over codes, by products of words ([`Dot`]): 16 multiply-adds, where an
//! `f32` instruction does 8.
//!
//! Halves of a vector hold two keys, four apart, so that a group of 32 values fills four vectors of
//! words of two keys. A score is the sum of a half; for values, words of two adjacent keys
//! alternate.
//!
//! The budget for 64 keys of 64 values and a query, in instructions besides loads: 660 for scores,
//! 600 for values, 400 for softmax and weights; once for all queries 1,300 (`q4_0`) to 2,300
//! (`q8_0`). `docs/lab/memory.md` has the measured times.

#![allow(clippy::multiple_unsafe_ops_per_block)] // an address and the access to it are one step

use super::attention;
use super::dot::Dot;
use super::elementwise::zero;
use super::gemm::lane_sum;
use crate::arch::arrays;
use crate::arch::attention::{AttnParams, AttnPartial};
use crate::arch::generic::attention_codes::{Query, Room, Steps, Weights, attention_codes, fits};
use crate::arch::generic::kv_blocks::{Ahead, BLOCK};
use crate::arch::kv::{GROUP, widen};
use crate::arch::kv::{KvStored, KvType};
use std::arch::x86_64::*;

/// Keys that are taken together.
const LANES: usize = 8;
const N_VECTORS: usize = BLOCK / LANES;
/// Vectors of words of a group of two keys: eight values of each.
const WORDS: usize = 4;
/// Vectors of words of a group of eight keys.
const CODES: usize = LANES / 2 * WORDS;

/// See [`crate::arch::Arch::attention_stored`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::arch::x86) fn attention_stored<D: Dot>(
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
        add_scores: add_scores::<D>,
        add_weighted: add_weighted::<D>,
    };
    // SAFETY: they fit, and the steps are this level's.
    unsafe { attention_codes(zero(), steps, to, q, stored, ranges, p) }
}

/// See [`Steps::round`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn round(x: &[f32], words: &mut [i16]) -> i32 {
    let mut sum = _mm256_setzero_si256();
    for (x, words) in x.chunks_exact(16).zip(words.chunks_exact_mut(16)) {
        // SAFETY: 16 numbers, and room for as many words.
        unsafe {
            let [a, b] = arrays::map([0, 8], |i| {
                _mm256_cvtps_epi32(_mm256_loadu_ps(x[i..].as_ptr()))
            });
            // Alternating quarters of both.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(packed, _mm256_set1_epi16(1)));
            _mm256_storeu_si256(words.as_mut_ptr().cast(), packed);
        }
    }
    lane_sum(sum)
}

/// A plane of a block, and the bytes of its rows.
#[derive(Clone, Copy)]
struct Plane {
    first: *const u8,
    row: usize,
}

/// See [`Steps::unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(
    kind: KvType,
    block: &[u8],
    n_groups: usize,
    keys: bool,
    room: *mut Room,
    ahead: &mut Ahead<'_>,
) {
    let [upper, lower, scales] = kind.row_bytes(n_groups * GROUP);
    let from = |at: usize, row: usize| Plane {
        first: block[at..].as_ptr(),
        row,
    };
    // SAFETY: an address of a part of the room.
    let to: *mut __m256i = unsafe { (&raw mut (*room).codes).cast() };
    let planes = [from(0, upper), from(BLOCK * upper, lower)];
    // SAFETY: the planes have rows of that many groups, and there is room for their codes.
    unsafe {
        match kind {
            KvType::Q8 => unpack_codes::<4>(planes, n_groups, keys, to, ahead),
            KvType::Q6 => unpack_codes::<2>(planes, n_groups, keys, to, ahead),
            KvType::Q5 => unpack_codes::<1>(planes, n_groups, keys, to, ahead),
            _ => unpack_codes::<0>(planes, n_groups, keys, to, ahead),
        }
        let step = (1 << (8 - kind.bits())) as f32;
        unpack_scales(
            from(BLOCK * (upper + lower), scales),
            n_groups,
            step,
            (&raw mut (*room).scales).cast(),
        );
    }
}

/// [`unpack`] for codes with `LOWER` bits below the upper four. Keys lie as `[8
/// keys][group][i][word]`, key `i` in the lower half and `i + 4` in the upper; values as `[group][8
/// keys][word, half][pair]`: keys 0 and 1, or 2 and 3, of four columns, and in the upper half the
/// keys four positions later.
///
/// # Safety
/// The planes must be those of a block, and there must be room for its codes.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_codes<const LOWER: usize>(
    [upper, lower]: [Plane; 2],
    n_groups: usize,
    keys: bool,
    to: *mut __m256i,
    ahead: &mut Ahead<'_>,
) {
    for t in 0..N_VECTORS {
        for g in 0..n_groups {
            ahead.point();
            let at = |plane: Plane, bytes: usize| {
                plane.first.wrapping_add(t * LANES * plane.row + g * bytes)
            };
            let (upper_at, lower_at) = (at(upper, GROUP / 2), at(lower, 4 * LOWER));
            let mut words = [[_mm256_setzero_si256(); WORDS]; 4];
            for (i, words) in words.iter_mut().enumerate() {
                // SAFETY: a group of two rows of the planes.
                *words = unsafe {
                    let upper = arrays::map([0, 4], |j| {
                        _mm_loadu_si128(upper_at.add((i + j) * upper.row).cast())
                    });
                    let lower = arrays::map([0, 4], |j| {
                        lower_bits::<LOWER>(lower_at.wrapping_add((i + j) * lower.row))
                    });
                    words_of(codes::<LOWER>(both(upper), both(lower)))
                };
            }
            if keys {
                // SAFETY: there is room for all codes of the block.
                unsafe {
                    to.add((t * n_groups + g) * CODES)
                        .cast::<[[__m256i; WORDS]; 4]>()
                        .write(words)
                };
                continue;
            }
            let [a, b, c, d] = words;
            for w in 0..WORDS {
                let pairs = [
                    _mm256_unpacklo_epi16(a[w], b[w]),
                    _mm256_unpacklo_epi16(c[w], d[w]),
                    _mm256_unpackhi_epi16(a[w], b[w]),
                    _mm256_unpackhi_epi16(c[w], d[w]),
                ];
                // SAFETY: as above.
                unsafe {
                    to.add((g * N_VECTORS + t) * CODES + 4 * w)
                        .cast::<[__m256i; 4]>()
                        .write(pairs)
                };
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn both([a, b]: [__m128i; 2]) -> __m256i {
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b)
}

/// The lower bits of a group, repeated.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn lower_bits<const LOWER: usize>(p: *const u8) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        match LOWER {
            4 => _mm_loadu_si128(p.cast()),
            2 => _mm_set1_epi64x(p.cast::<i64>().read_unaligned()),
            1 => _mm_set1_epi32(p.cast::<i32>().read_unaligned()),
            _ => _mm_setzero_si128(),
        }
    }
}

/// Codes of a group of two keys, its lower values first, from their four upper bits and the `LOWER`
/// bits below these (layout: `kv.rs`).
#[inline]
#[target_feature(enable = "avx2")]
fn codes<const LOWER: usize>(upper: __m256i, lower: __m256i) -> [__m256i; 2] {
    let nibble = _mm256_set1_epi8(15);
    let upper = [
        _mm256_and_si256(upper, nibble),
        _mm256_and_si256(_mm256_srli_epi16::<4>(upper), nibble),
    ];
    let lower = match LOWER {
        4 => [lower, _mm256_srli_epi16::<4>(lower)],
        2 => [
            _mm256_srlv_epi64(lower, _mm256_setr_epi64x(0, 2, 0, 2)),
            _mm256_srlv_epi64(lower, _mm256_setr_epi64x(4, 6, 4, 6)),
        ],
        1 => [
            _mm256_srlv_epi32(lower, _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3)),
            _mm256_srlv_epi32(lower, _mm256_setr_epi32(4, 5, 6, 7, 4, 5, 6, 7)),
        ],
        _ => return upper,
    };
    let bits = _mm256_set1_epi8((1 << LOWER) - 1);
    let joined = |upper, lower| {
        _mm256_or_si256(
            _mm256_sll_epi16(upper, _mm_cvtsi32_si128(LOWER as i32)),
            _mm256_and_si256(lower, bits),
        )
    };
    [joined(upper[0], lower[0]), joined(upper[1], lower[1])]
}

/// Widens bytes to words.
#[inline]
#[target_feature(enable = "avx2")]
fn words_of([a, b]: [__m256i; 2]) -> [__m256i; WORDS] {
    let zero = _mm256_setzero_si256();
    [
        _mm256_unpacklo_epi8(a, zero),
        _mm256_unpackhi_epi8(a, zero),
        _mm256_unpacklo_epi8(b, zero),
        _mm256_unpackhi_epi8(b, zero),
    ]
}

/// Scales of a block, times `step`, `[group][key]`.
///
/// # Safety
/// The plane must have 64 rows of as many scales, and `to` room for them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_scales(plane: Plane, n_groups: usize, step: f32, to: *mut f32) {
    for t in 0..N_VECTORS {
        let first = plane.first.wrapping_add(t * LANES * plane.row);
        for g in (0..n_groups / 2 * 2).step_by(2) {
            // SAFETY: two scales of eight rows.
            let pairs = unsafe {
                let at = |i: usize| {
                    first
                        .add(i * plane.row + 2 * g)
                        .cast::<i32>()
                        .read_unaligned()
                };
                if n_groups == 2 {
                    _mm256_loadu_si256(first.cast())
                } else {
                    _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7))
                }
            };
            let scales = [
                _mm256_slli_epi32::<16>(pairs),
                _mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff)),
            ];
            for (i, scales) in scales.into_iter().enumerate() {
                // SAFETY: there is room for 64 scales of each group.
                unsafe {
                    let scales = _mm256_mul_ps(_mm256_castsi256_ps(scales), _mm256_set1_ps(step));
                    _mm256_storeu_ps(to.add((g + i) * BLOCK + t * LANES), scales);
                }
            }
        }
        if n_groups % 2 == 1 {
            for i in 0..LANES {
                // SAFETY: the last scale of a row, and room for it.
                unsafe {
                    let bits = first
                        .add(i * plane.row + 2 * (n_groups - 1))
                        .cast::<u16>()
                        .read_unaligned();
                    to.add((n_groups - 1) * BLOCK + t * LANES + i)
                        .write(widen(bits) * step);
                }
            }
        }
    }
}

/// See [`Steps::add_scores`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_scores<D: Dot>(room: *mut Room, r: usize, n_groups: usize, ahead: &mut Ahead<'_>) {
    // SAFETY: addresses of parts of the room, which are initialised by the caller's promise.
    let (q, codes, scales, scores): (&Query, *const __m256i, *const f32, *mut f32) = unsafe {
        (
            &(*room).queries[r],
            (&raw const (*room).codes).cast(),
            (&raw const (*room).scales).cast(),
            (&raw mut (*room).scores[r]).cast(),
        )
    };
    let factor = _mm256_set1_ps(q.scale);
    for t in 0..N_VECTORS {
        ahead.point();
        let mut score = _mm256_setzero_ps();
        for g in 0..n_groups {
            // SAFETY: eight words each.
            let words = |w: usize| unsafe { _mm_loadu_si128(q.words[g][8 * w..].as_ptr().cast()) };
            let [q0, q1, q2, q3] =
                arrays::map([0, 1, 2, 3], |w| _mm256_broadcastsi128_si256(words(w)));
            let mut sums = [_mm256_setzero_si256(); 4];
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: codes of the block.
                let at = |w: usize| unsafe {
                    _mm256_load_si256(codes.add((t * n_groups + g) * CODES + i * WORDS + w))
                };
                // SAFETY: the level has the instructions of `D`.
                *sum = unsafe {
                    let low = D::words(_mm256_madd_epi16(at(0), q0), at(1), q1);
                    let high = D::words(_mm256_madd_epi16(at(2), q2), at(3), q3);
                    _mm256_add_epi32(low, high)
                };
            }
            let sum = _mm256_add_epi32(sums_of_halves(sums), _mm256_set1_epi32(q.start[g]));
            // SAFETY: scales of the block.
            let scale = unsafe { _mm256_loadu_ps(scales.add(g * BLOCK + t * LANES)) };
            score = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, factor), score);
        }
        // SAFETY: there is room for the scores of each row.
        unsafe { _mm256_storeu_ps(scores.add(t * LANES), score) };
    }
}

/// Sums of the halves of four vectors: those of lower halves, then those of upper ones.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_halves([a, b, c, d]: [__m256i; 4]) -> __m256i {
    let pairs = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (ab, cd) = (pairs(a, b), pairs(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
}

/// See [`Steps::add_weighted`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_weighted<D: Dot>(
    room: *const Room,
    n_groups: usize,
    out: *mut f32,
    ahead: &mut Ahead<'_>,
) {
    // SAFETY: parts of the room, which are initialised by the caller's promise.
    let (codes, w): (*const __m256i, &Weights) =
        unsafe { ((&raw const (*room).codes).cast(), &(*room).weights) };
    for g in 0..n_groups {
        let mut sums = [_mm256_setzero_si256(); 2 * WORDS];
        for (t, words) in w.words[g].chunks_exact(LANES).enumerate() {
            ahead.point();
            // SAFETY: eight words.
            let words = _mm256_castsi128_si256(unsafe { _mm_loadu_si128(words.as_ptr().cast()) });
            let pair = |lanes| _mm256_permutevar8x32_epi32(words, lanes);
            let first = pair(_mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
            let second = pair(_mm256_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3));
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: codes of the block.
                let at = |i: usize| unsafe {
                    _mm256_load_si256(codes.add((g * N_VECTORS + t) * CODES + i))
                };
                // SAFETY: the level has the instructions of `D`.
                *sum = unsafe { D::words(D::words(*sum, at(2 * i), first), at(2 * i + 1), second) };
            }
        }
        let (unit, start) = (_mm256_set1_ps(w.unit[g]), _mm256_set1_epi32(w.start[g]));
        for i in 0..WORDS {
            let (low, high) = (sums[2 * i], sums[2 * i + 1]);
            let sum = _mm256_add_epi32(
                _mm256_permute2x128_si256::<0x20>(low, high),
                _mm256_permute2x128_si256::<0x31>(low, high),
            );
            let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, start));
            // SAFETY: eight columns of the row.
            unsafe {
                let to = out.add(g * GROUP + i * LANES);
                _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, unit, _mm256_loadu_ps(to)));
            }
        }
    }
}
