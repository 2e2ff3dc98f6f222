//! Block formats as bytes in the order of the values, with scales and offsets. Scales have so few
//! bits that their products with the bytes are exact: with one sum they are the values of
//! `dequantize`.

use super::elementwise::{array, widen_f16};
use crate::arch::arrays;
use crate::quant::*;
use bytemuck::Pod;
use std::arch::wasm32::*;

/// Factors of 256 weights. If each 32 share theirs, only the first two vectors are used.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) scale: [v128; 4],
    pub(super) offset: [v128; 4],
}

/// A format with 256 weights, `scale·q + offset`, in `N` blocks.
pub(super) trait UnpackBlocks<const N: usize>: Pod {
    /// Whether each 16 weights have factors of their own; otherwise each 32 share them.
    const FACTORS_PER_16: bool = false;
    /// Whether there are offsets, and `q` is not negative; otherwise they are zero, and `q` is
    /// signed.
    const OFFSETS: bool = true;

    fn factors(blocks: &[Self; N]) -> Factors;

    /// The bytes `q` of group `b` of 32.
    fn bytes(blocks: &[Self; N], b: usize) -> [v128; 2];
}

/// Calls `$do!(Block)` for the block structure of `$dtype`, or evaluates to `$other` if the level
/// does not know the format. Those that it knows are listed here.
macro_rules! with_weights {
    ($dtype:expr, $do:ident, $other:expr) => {
        with_weights! { $dtype, $do, $other,
            BlockQ4_0 BlockQ4_1 BlockQ5_0 BlockQ5_1 BlockQ8_0 BlockQ2K BlockQ3K BlockQ4K
            BlockQ5K BlockQ6K BlockIq4Nl BlockIq4Xs BlockMxfp4 BlockNvfp4 BlockIq1S BlockIq1M
            BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S BlockTq1_0 BlockTq2_0
            BlockQ1_0 BlockQ2_0
        }
    };
    ($dtype:expr, $do:ident, $other:expr, $($block:ident)*) => {
        match $dtype {
            $($block::DTYPE => $do!($block),)*
            _ => $other,
        }
    };
}
pub(super) use with_weights;

/// Whether the level has kernels for a format.
pub(super) fn knows(dtype: DType) -> bool {
    macro_rules! known {
        ($block:ident) => {
            true
        };
    }
    let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    plain || with_weights!(dtype, known, false)
}

/// One format: its constants, its factors, its bytes.
macro_rules! weights {
    ($block:ident, $n:literal, { $($const:ident = $value:literal),* }, |$f:pat_param| $factors:expr, |$w:pat_param, $b:ident| $bytes:expr) => {
        impl UnpackBlocks<$n> for $block {
            $(const $const: bool = $value;)*

            #[inline(always)]
            fn factors($f: &[Self; $n]) -> Factors {
                $factors
            }

            #[inline(always)]
            fn bytes($w: &[Self; $n], $b: usize) -> [v128; 2] {
                $bytes
            }
        }
    };
}

weights!(
    BlockQ4_0,
    8,
    {},
    |blocks| {
        let scale = scales(blocks);
        Factors {
            scale,
            offset: times(scale, -8.0),
        }
    },
    |blocks, b| nibbles(&blocks[b].qs)
);
weights!(
    BlockQ4_1,
    8,
    {},
    |blocks| Factors {
        scale: scales(blocks),
        offset: second_scales(blocks)
    },
    |blocks, b| nibbles(&blocks[b].qs)
);
weights!(
    BlockQ5_0,
    8,
    {},
    |blocks| {
        let scale = scales(blocks);
        Factors {
            scale,
            offset: times(scale, -16.0),
        }
    },
    |blocks, b| with_fifth_bits(nibbles(&blocks[b].qs), blocks[b].qh)
);
weights!(
    BlockQ5_1,
    8,
    {},
    |blocks| Factors {
        scale: scales(blocks),
        offset: second_scales(blocks)
    },
    |blocks, b| with_fifth_bits(nibbles(&blocks[b].qs), blocks[b].qh)
);
weights!(
    BlockQ8_0,
    8,
    { OFFSETS = false },
    |blocks| without_offsets(scales(blocks)),
    |blocks, b| {
        let [low, high]: &[[u8; 16]; 2] = bytemuck::cast_ref(&blocks[b].qs);
        [load(low), load(high)]
    }
);
weights!(
    BlockIq4Nl,
    8,
    { OFFSETS = false },
    |blocks| without_offsets(scales(blocks)),
    |blocks, b| look_up(&IQ4_VALUES, nibbles(&blocks[b].qs))
);
weights!(
    BlockMxfp4,
    8,
    { OFFSETS = false },
    |blocks| {
        let scale = |i: usize| blocks[i].half_scale();
        without_offsets(two(
            [scale(0), scale(1), scale(2), scale(3)],
            [scale(4), scale(5), scale(6), scale(7)],
        ))
    },
    |blocks, b| look_up(&MXFP4_VALUES, nibbles(&blocks[b].qs))
);
weights!(
    BlockNvfp4,
    4,
    { FACTORS_PER_16 = true, OFFSETS = false },
    |[a, b, c, d]| without_offsets([
        four(a.half_scales()),
        four(b.half_scales()),
        four(c.half_scales()),
        four(d.half_scales())
    ]),
    |blocks, b| {
        // Each eight bytes hold eight values and the eight after them.
        let [low, high] = nibbles(blocks[b / 2].half(b % 2));
        look_up(
            &MXFP4_VALUES,
            [i64x2_shuffle::<0, 2>(low, high), i64x2_shuffle::<1, 3>(low, high)],
        )
    }
);
weights!(
    BlockQ2K,
    1,
    { FACTORS_PER_16 = true },
    |[block]| {
        let (packed, [d, dmin]) = (load(&block.scales), halves(block.d, block.dmin));
        let (scale, min) = (v128_and(packed, u8x16_splat(15)), u8x16_shr(packed, 4));
        Factors {
            scale: times(widened(scale), d),
            offset: times(widened(min), -dmin),
        }
    },
    |[block], b| two_bits(&block.qs, b)
);
weights!(
    BlockQ3K,
    1,
    { FACTORS_PER_16 = true },
    |[block]| {
        let scales = load_signed(&unpack_scales_q3_k(&block.scales));
        let scale = times(widened_signed(scales), halves(block.d, block.d)[0]);
        Factors {
            scale,
            offset: times(scale, -4.0),
        }
    },
    |[block], b| {
        let ([low, high], bit) = (two_bits(&block.qs, b), u8x16_splat(1));
        let [first, second]: &[[u8; 16]; 2] = bytemuck::cast_ref(&block.hmask);
        let third = |x: &[u8; 16]| u8x16_shl(v128_and(u8x16_shr(load(x), b as u32), bit), 2);
        [v128_or(low, third(first)), v128_or(high, third(second))]
    }
);
weights!(
    BlockQ4K,
    1,
    {},
    |[block]| scales_mins(head(block)),
    |[block], b| nibble_pairs(&block.qs, b)
);
weights!(
    BlockQ5K,
    1,
    {},
    |[block]| scales_mins(head(block)),
    |[block], b| {
        let ([low, high], bit) = (nibble_pairs(&block.qs, b), u8x16_splat(1));
        let [first, second]: &[[u8; 16]; 2] = bytemuck::cast_ref(&block.qh);
        let fifth = |x: &[u8; 16]| u8x16_shl(v128_and(u8x16_shr(load(x), b as u32), bit), 4);
        [v128_or(low, fifth(first)), v128_or(high, fifth(second))]
    }
);
weights!(
    BlockQ6K,
    1,
    { FACTORS_PER_16 = true },
    |[block]| {
        let d = halves(block.d, block.d)[0];
        let scale = times(widened_signed(load_signed(&block.scales)), d);
        Factors {
            scale,
            offset: times(scale, -32.0),
        }
    },
    |[block], b| {
        let (ql, qh): (&[[u8; 16]; 8], &[[u8; 16]; 4]) =
            (bytemuck::cast_ref(&block.ql), bytemuck::cast_ref(&block.qh));
        let (low, high) = (4 * (b / 4) + 2 * (b % 2), 2 * (b / 4));
        let six_bits = |low: &[u8; 16], high: &[u8; 16]| {
            let upper = v128_and(u8x16_shr(load(high), 2 * (b as u32 % 4)), u8x16_splat(3));
            v128_or(half_bytes(load(low), b / 2 % 2), u8x16_shl(upper, 4))
        };
        [
            six_bits(&ql[low], &qh[high]),
            six_bits(&ql[low + 1], &qh[high + 1]),
        ]
    }
);
weights!(
    BlockIq4Xs,
    1,
    { OFFSETS = false },
    |[block]| {
        // Scale `b` is in nibble `b` of one number, and in bits `2b` and `2b + 1` of another.
        let (low, high) = (
            u32::from_le_bytes(block.scales_l),
            u16::from_le_bytes(block.scales_h),
        );
        let d = halves(block.d, block.d)[0];
        let scale = |b: usize| {
            let integer = low >> (4 * b) & 15 | u32::from(high >> (2 * b) & 3) << 4;
            (integer as i32 - 32) as f32 * d
        };
        without_offsets(two(
            [scale(0), scale(1), scale(2), scale(3)],
            [scale(4), scale(5), scale(6), scale(7)],
        ))
    },
    |[block], b| {
        let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(&block.qs);
        look_up(&IQ4_VALUES, nibbles(&qs[b]))
    }
);
weights!(
    BlockTq2_0,
    1,
    { OFFSETS = false },
    |[block]| without_offsets([f32x4_splat(halves(block.d, block.d)[0]); 4]),
    |[block], b| arrays::map(two_bits(&block.qs, b), less_one)
);
weights!(
    BlockQ1_0,
    2,
    { OFFSETS = false },
    |[a, b]| {
        let [a, b] = halves(a.d, b.d);
        without_offsets(two([a; 4], [b; 4]))
    },
    |blocks, b| {
        let (qs, first) = (&blocks[b / 4].qs, b % 4 * 4);
        // 1 where a bit is set, −1 where not.
        let signs = |i: usize| v128_or(v128_not(set_bits([qs[i], qs[i + 1]])), u8x16_splat(1));
        [signs(first), signs(first + 2)]
    }
);
weights!(
    BlockQ2_0,
    4,
    { OFFSETS = false },
    |[a, b, c, d]| {
        let ([a, b], [c, d]) = (halves(a.d, b.d), halves(c.d, d.d));
        without_offsets(two([a, a, b, b], [c, c, d, d]))
    },
    |blocks, b| {
        let words: &[[u8; 4]; 4] = bytemuck::cast_ref(&blocks[b / 2].qs);
        let first = b % 2 * 2;
        [sixteen_pairs(words[first]), sixteen_pairs(words[first + 1])]
    }
);

/// Coded formats: values are looked up.
macro_rules! coded {
    ($($block:ident)*) => {$(
        weights!(
            $block,
            1,
            { FACTORS_PER_16 = true, OFFSETS = false },
            |[block]| coded_factors(block),
            |[block], b| integers(block, b)
        );
    )*};
}
coded!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S BlockTq1_0);

#[inline(always)]
fn coded_factors<B: Coded>(block: &B) -> Factors {
    let CodedScales { d, nibbles } = block.scales();
    let nibbles = u64x2(nibbles, 0);
    let (even, odd) = (v128_and(nibbles, u8x16_splat(15)), u8x16_shr(nibbles, 4));
    let n = i8x16_shuffle::<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(even, odd);
    let odd_numbers = i8x16_add(i8x16_add(n, n), u8x16_splat(1));
    without_offsets(times(widened(odd_numbers), B::UNIT * halves(d, d)[0]))
}

/// The integers of group `b`.
#[inline(always)]
fn integers<B: Coded>(block: &B, b: usize) -> [v128; 2] {
    let [s0, s1, s2, s3] = block.signs(b).to_le_bytes();
    [
        sixteen_integers::<B>([block.grid(b, 0), block.grid(b, 1)], [s0, s1]),
        sixteen_integers::<B>([block.grid(b, 2), block.grid(b, 3)], [s2, s3]),
    ]
}

#[inline(always)]
fn sixteen_integers<B: Coded>(grid: [u64; 2], signs: [u8; 2]) -> v128 {
    let (negative, grid) = (set_bits(signs), u64x2(grid[0], grid[1]));
    if B::EIGHTHS {
        i8x16_add(i8x16_shl(grid, 3), v128_or(negative, i8x16_splat(1)))
    } else {
        i8x16_sub(v128_xor(grid, negative), negative)
    }
}

/// All ones where bit `i` of 16 is set.
#[inline(always)]
fn set_bits([a, b]: [u8; 2]) -> v128 {
    let bit = u64x2_splat(0x8040_2010_0804_0201);
    let bytes = i64x2_shuffle::<0, 2>(u8x16_splat(a), u8x16_splat(b));
    i8x16_eq(v128_and(bytes, bit), bit)
}

/// The pairs of bits of a number, the lowest first, less 1.
#[inline(always)]
fn sixteen_pairs(pairs: [u8; 4]) -> v128 {
    let bytes = u32x4_splat(u32::from_le_bytes(pairs));
    let each = i8x16_shuffle::<0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3>(bytes, bytes);
    // Byte `j` of four keeps pair `j`, then it is moved to the lowest bits.
    let first = v128_and(each, u32x4_splat(0x0000_0003));
    let second = u8x16_shr(v128_and(each, u32x4_splat(0x0000_0C00)), 2);
    let third = u8x16_shr(v128_and(each, u32x4_splat(0x0030_0000)), 4);
    let fourth = u8x16_shr(v128_and(each, u32x4_splat(0xC000_0000)), 6);
    less_one(v128_or(v128_or(first, second), v128_or(third, fourth)))
}

#[inline(always)]
fn less_one(x: v128) -> v128 {
    i8x16_sub(x, i8x16_splat(1))
}

/// The first bytes of a block.
#[inline(always)]
fn head<B: Pod, H: Pod>(block: &B) -> &H {
    bytemuck::from_bytes(&bytemuck::bytes_of(block)[..size_of::<H>()])
}

/// The f16 at byte `AT` of eight blocks, widened.
#[inline(always)]
fn numbers<B: Pod, const AT: usize>(blocks: &[B; 8]) -> [v128; 4] {
    let half = |i: usize| {
        let bytes = bytemuck::bytes_of(&blocks[i]);
        u16::from_le_bytes([bytes[AT], bytes[AT + 1]])
    };
    let bits = u16x8(
        half(0),
        half(1),
        half(2),
        half(3),
        half(4),
        half(5),
        half(6),
        half(7),
    );
    let zero = f32x4_splat(0.0);
    [
        widen_f16(u32x4_extend_low_u16x8(bits)),
        widen_f16(u32x4_extend_high_u16x8(bits)),
        zero,
        zero,
    ]
}

/// The scales in front of eight blocks.
#[inline(always)]
fn scales<B: Pod>(blocks: &[B; 8]) -> [v128; 4] {
    numbers::<B, 0>(blocks)
}

/// The minima after the scales of eight blocks.
#[inline(always)]
fn second_scales<B: Pod>(blocks: &[B; 8]) -> [v128; 4] {
    numbers::<B, 2>(blocks)
}

#[inline(always)]
fn without_offsets(scale: [v128; 4]) -> Factors {
    Factors {
        scale,
        offset: [f32x4_splat(0.0); 4],
    }
}

/// Two f16.
#[inline(always)]
fn halves(a: [u8; 2], b: [u8; 2]) -> [f32; 2] {
    let half = |x| u32::from(u16::from_le_bytes(x));
    let [a, b, ..] = array(widen_f16(u32x4(half(a), half(b), 0, 0)));
    [a, b]
}

/// Scales and offsets of Q4_K and Q5_K; their blocks begin with `d`, `dmin` and the packed scales
/// of [`unpack_scales_mins`].
#[inline(always)]
fn scales_mins(head: &[u8; 16]) -> Factors {
    let [d, a, b, c]: [[u8; 4]; 4] = bytemuck::cast(*head);
    let ab = u64::from(u32::from_le_bytes(a)) | u64::from(u32::from_le_bytes(b)) << 32;
    let c = u64::from(u32::from_le_bytes(c));
    // Four scales in the low half, four minima in the high one.
    let first = ab & 0x3F3F_3F3F_3F3F_3F3F;
    let last = (c | c << 28) & 0x0F0F_0F0F_0F0F_0F0F | ab >> 2 & 0x3030_3030_3030_3030;
    let both = u64x2(first, last);
    // Scales, then minima.
    let [s0, s1, m0, m1] = widened(i32x4_shuffle::<0, 2, 1, 3>(both, both));
    let [d, dmin] = halves([d[0], d[1]], [d[2], d[3]]);
    let (zero, d, dmin) = (f32x4_splat(0.0), f32x4_splat(d), f32x4_splat(-dmin));
    Factors {
        scale: [f32x4_mul(s0, d), f32x4_mul(s1, d), zero, zero],
        offset: [f32x4_mul(m0, dmin), f32x4_mul(m1, dmin), zero, zero],
    }
}

/// Unsigned bytes as numbers.
#[inline(always)]
fn widened(q: v128) -> [v128; 4] {
    let (low, high) = (u16x8_extend_low_u8x16(q), u16x8_extend_high_u8x16(q));
    [
        f32x4_convert_i32x4(u32x4_extend_low_u16x8(low)),
        f32x4_convert_i32x4(u32x4_extend_high_u16x8(low)),
        f32x4_convert_i32x4(u32x4_extend_low_u16x8(high)),
        f32x4_convert_i32x4(u32x4_extend_high_u16x8(high)),
    ]
}

/// Signed bytes as numbers.
#[inline(always)]
pub(super) fn widened_signed(q: v128) -> [v128; 4] {
    let (low, high) = (i16x8_extend_low_i8x16(q), i16x8_extend_high_i8x16(q));
    [
        f32x4_convert_i32x4(i32x4_extend_low_i16x8(low)),
        f32x4_convert_i32x4(i32x4_extend_high_i16x8(low)),
        f32x4_convert_i32x4(i32x4_extend_low_i16x8(high)),
        f32x4_convert_i32x4(i32x4_extend_high_i16x8(high)),
    ]
}

#[inline(always)]
fn times(x: [v128; 4], factor: f32) -> [v128; 4] {
    let factor = f32x4_splat(factor);
    [
        f32x4_mul(x[0], factor),
        f32x4_mul(x[1], factor),
        f32x4_mul(x[2], factor),
        f32x4_mul(x[3], factor),
    ]
}

/// Low nibbles of 16 bytes, then the high ones.
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [v128; 2] {
    let qs = load(qs);
    [half_bytes(qs, 0), half_bytes(qs, 1)]
}

/// Group `b` of pairs: the low nibbles of 32 bytes are one group, the high ones the next.
#[inline(always)]
fn nibble_pairs(qs: &[u8; 128], b: usize) -> [v128; 2] {
    let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(qs);
    let (first, second) = (load(&qs[b / 2 * 2]), load(&qs[b / 2 * 2 + 1]));
    [half_bytes(first, b % 2), half_bytes(second, b % 2)]
}

/// Low (0) or high (1) nibbles.
#[inline(always)]
fn half_bytes(qs: v128, high: usize) -> v128 {
    if high == 0 {
        v128_and(qs, u8x16_splat(15))
    } else {
        u8x16_shr(qs, 4)
    }
}

/// Group `b` in the two-bit layout of Q2_K, Q3_K and TQ2_0.
#[inline(always)]
fn two_bits(qs: &[u8; 64], b: usize) -> [v128; 2] {
    let qs: &[[u8; 16]; 4] = bytemuck::cast_ref(qs);
    let (mask, from) = (u8x16_splat(3), 2 * (b as u32 % 4));
    [
        v128_and(u8x16_shr(load(&qs[b / 4 * 2]), from), mask),
        v128_and(u8x16_shr(load(&qs[b / 4 * 2 + 1]), from), mask),
    ]
}

/// Adds bit `i` of `qh` as bit 4 of value `i`.
#[inline(always)]
fn with_fifth_bits([low, high]: [v128; 2], [a, b, c, d]: [u8; 4]) -> [v128; 2] {
    let bit = u8x16_splat(16);
    [
        v128_or(low, v128_and(set_bits([a, b]), bit)),
        v128_or(high, v128_and(set_bits([c, d]), bit)),
    ]
}

/// `values[i]` for each byte `i` below 16.
#[inline(always)]
fn look_up(values: &[i8; 16], [a, b]: [v128; 2]) -> [v128; 2] {
    let values = load_signed(values);
    [i8x16_swizzle(values, a), i8x16_swizzle(values, b)]
}

#[inline(always)]
fn two(a: [f32; 4], b: [f32; 4]) -> [v128; 4] {
    let zero = f32x4_splat(0.0);
    [four(a), four(b), zero, zero]
}

#[inline(always)]
fn four([a, b, c, d]: [f32; 4]) -> v128 {
    f32x4(a, b, c, d)
}

#[inline(always)]
fn load(x: &[u8; 16]) -> v128 {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { v128_load(x.as_ptr().cast()) }
}

#[inline(always)]
fn load_signed(x: &[i8; 16]) -> v128 {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { v128_load(x.as_ptr().cast()) }
}
