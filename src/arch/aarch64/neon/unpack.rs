//! Block formats as signed bytes in the order of the values, with scales and offsets: the source of
//! the products of all Arm levels. Scales have so few bits that one multiply-add gives exactly the
//! values of `dequantize`.

use super::elementwise::widen_f16;
use crate::quant::*;
use bytemuck::Pod;
use std::arch::aarch64::*;

/// Factors of 256 weights. If each 32 share theirs, only the first two registers are used.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Factors {
    pub(in crate::arch) scale: [float32x4_t; 4],
    pub(in crate::arch) offset: [float32x4_t; 4],
}

/// A format with 256 weights, `scale·q + offset`, in `N` blocks.
pub(in crate::arch) trait UnpackBlocks<const N: usize>: Pod {
    /// Whether each 16 weights have factors of their own; otherwise each 32 share them.
    const FACTORS_PER_16: bool = false;
    /// Whether there are offsets; otherwise they are zero.
    const OFFSETS: bool = true;
    /// Whether `q` may be −128.
    const WHOLE_BYTES: bool = false;

    /// # Safety
    /// The CPU must have NEON.
    unsafe fn factors(blocks: &[Self; N]) -> Factors;

    /// The bytes `q` of group `b` of 32.
    ///
    /// # Safety
    /// The CPU must have NEON.
    unsafe fn bytes(blocks: &[Self; N], b: usize) -> [int8x16_t; 2];
}

/// Calls `$do!(Block)` for the block structure of `$dtype`, or evaluates to `$other` if the Arm
/// levels do not know the format. Those that they know are listed here.
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
pub(in crate::arch) use with_weights;

/// Whether the Arm levels have kernels for a format.
pub(in crate::arch) fn knows(dtype: DType) -> bool {
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

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn factors($f: &[Self; $n]) -> Factors {
                $factors
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn bytes($w: &[Self; $n], $b: usize) -> [int8x16_t; 2] {
                $bytes
            }
        }
    };
}

/// The first bytes of a field of each of eight blocks, which begin with it. (Not `map`: its
/// closures are not compiled for this level.)
macro_rules! heads {
    ($blocks:ident, $bytes:ty) => {{
        let heads: [&$bytes; 8] = [
            head(&$blocks[0]),
            head(&$blocks[1]),
            head(&$blocks[2]),
            head(&$blocks[3]),
            head(&$blocks[4]),
            head(&$blocks[5]),
            head(&$blocks[6]),
            head(&$blocks[7]),
        ];
        heads
    }};
}

weights!(
    BlockQ4_0,
    8,
    {},
    |blocks| {
        let scale = scales(heads!(blocks, [u8; 8]));
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
    |blocks| {
        let (scale, offset) = scales_minima(heads!(blocks, [u8; 8]));
        Factors { scale, offset }
    },
    |blocks, b| nibbles(&blocks[b].qs)
);
weights!(
    BlockQ5_0,
    8,
    {},
    |blocks| {
        let scale = scales(heads!(blocks, [u8; 8]));
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
    |blocks| {
        let (scale, offset) = scales_minima(heads!(blocks, [u8; 8]));
        Factors { scale, offset }
    },
    |blocks, b| with_fifth_bits(nibbles(&blocks[b].qs), blocks[b].qh)
);
weights!(
    BlockQ8_0,
    8,
    { OFFSETS = false, WHOLE_BYTES = true },
    |blocks| Factors { scale: scales(heads!(blocks, [u8; 8])), offset: [vdupq_n_f32(0.0); 4] },
    |blocks, b| {
        let [low, high]: &[[u8; 16]; 2] = bytemuck::cast_ref(&blocks[b].qs);
        [vreinterpretq_s8_u8(load(low)), vreinterpretq_s8_u8(load(high))]
    }
);
weights!(
    BlockIq4Nl,
    8,
    { OFFSETS = false },
    |blocks| Factors {
        scale: scales(heads!(blocks, [u8; 8])),
        offset: [vdupq_n_f32(0.0); 4]
    },
    |blocks, b| look_up(&IQ4_VALUES, nibbles(&blocks[b].qs))
);
weights!(
    BlockMxfp4,
    8,
    { OFFSETS = false },
    |blocks| {
        let zero = vdupq_n_f32(0.0);
        Factors {
            scale: [
                half_scales(&blocks[..4]),
                half_scales(&blocks[4..]),
                zero,
                zero,
            ],
            offset: [zero; 4],
        }
    },
    |blocks, b| look_up(&MXFP4_VALUES, nibbles(&blocks[b].qs))
);
weights!(
    BlockNvfp4,
    4,
    { FACTORS_PER_16 = true, OFFSETS = false },
    |[a, b, c, d]| {
        let scale = [four(a.half_scales()), four(b.half_scales()), four(c.half_scales()), four(d.half_scales())];
        Factors { scale, offset: [vdupq_n_f32(0.0); 4] }
    },
    |blocks, b| {
        // Each eight bytes hold eight values and the eight after them.
        let [low, high] = nibbles(blocks[b / 2].half(b % 2));
        let (low, high) = (vreinterpretq_s64_s8(low), vreinterpretq_s64_s8(high));
        let (first, second) = (vzip1q_s64(low, high), vzip2q_s64(low, high));
        look_up(&MXFP4_VALUES, [vreinterpretq_s8_s64(first), vreinterpretq_s8_s64(second)])
    }
);
weights!(
    BlockQ2K,
    1,
    { FACTORS_PER_16 = true },
    |[block]| {
        let (packed, [d, dmin]) = (load(&block.scales), halves(block.d, block.dmin));
        let (scale, min) = (vandq_u8(packed, vdupq_n_u8(15)), vshrq_n_u8::<4>(packed));
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
        let ([low, high], bit) = (two_bits(&block.qs, b), vdupq_n_u8(1));
        let [first, second]: &[[u8; 16]; 2] = bytemuck::cast_ref(&block.hmask);
        let (first, second) = (
            vandq_u8(shifted(load(first), b), bit),
            vandq_u8(shifted(load(second), b), bit),
        );
        [
            vsliq_n_s8::<2>(low, vreinterpretq_s8_u8(first)),
            vsliq_n_s8::<2>(high, vreinterpretq_s8_u8(second)),
        ]
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
        let ([low, high], bit) = (nibble_pairs(&block.qs, b), vdupq_n_u8(16));
        let [first, second]: &[[u8; 16]; 2] = bytemuck::cast_ref(&block.qh);
        let (first, second) = (
            vandq_u8(shifted_to::<4>(load(first), b), bit),
            vandq_u8(shifted_to::<4>(load(second), b), bit),
        );
        [
            vorrq_s8(low, vreinterpretq_s8_u8(first)),
            vorrq_s8(high, vreinterpretq_s8_u8(second)),
        ]
    }
);
weights!(
    BlockQ6K,
    1,
    { FACTORS_PER_16 = true },
    |[block]| {
        let scale = times(
            widened_signed(load_signed(&block.scales)),
            halves(block.d, block.d)[0],
        );
        Factors {
            scale,
            offset: times(scale, -32.0),
        }
    },
    |[block], b| {
        let (ql, qh): (&[[u8; 16]; 8], &[[u8; 16]; 4]) =
            (bytemuck::cast_ref(&block.ql), bytemuck::cast_ref(&block.qh));
        let (low, high) = (4 * (b / 4) + 2 * (b % 2), 2 * (b / 4));
        [
            six_bits(load(&ql[low]), load(&qh[high]), b % 4),
            six_bits(load(&ql[low + 1]), load(&qh[high + 1]), b % 4),
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
            vcreate_u8(u32::from_le_bytes(block.scales_l).into()),
            u16::from_le_bytes(block.scales_h),
        );
        let low = vmovl_u8(vzip1_u8(vand_u8(low, vdup_n_u8(15)), vshr_n_u8::<4>(low)));
        let right = vcombine_s16(
            vcreate_s16(0xFFFA_FFFC_FFFE_0000),
            vcreate_s16(0xFFF2_FFF4_FFF6_FFF8),
        );
        let high = vandq_u16(vshlq_u16(vdupq_n_u16(high), right), vdupq_n_u16(3));
        let scale = vsubq_s16(
            vreinterpretq_s16_u16(vsliq_n_u16::<4>(low, high)),
            vdupq_n_s16(32),
        );
        let (zero, d) = (vdupq_n_f32(0.0), halves(block.d, block.d)[0]);
        let first = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(scale))), d);
        let second = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(scale)), d);
        Factors {
            scale: [first, second, zero, zero],
            offset: [zero; 4],
        }
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
    |[block]| Factors {
        scale: [vdupq_n_f32(halves(block.d, block.d)[0]); 4],
        offset: [vdupq_n_f32(0.0); 4]
    },
    |[block], b| {
        let ([low, high], one) = (two_bits(&block.qs, b), vdupq_n_s8(1));
        [vsubq_s8(low, one), vsubq_s8(high, one)]
    }
);

weights!(
    BlockQ1_0,
    2,
    { OFFSETS = false },
    |[a, b]| {
        let (d, zero) = (halves(a.d, b.d), vdupq_n_f32(0.0));
        Factors {
            scale: [vdupq_n_f32(d[0]), vdupq_n_f32(d[1]), zero, zero],
            offset: [zero; 4],
        }
    },
    |blocks, b| {
        let (qs, first) = (&blocks[b / 4].qs, b % 4 * 4);
        [
            sixteen_signs([qs[first], qs[first + 1]]),
            sixteen_signs([qs[first + 2], qs[first + 3]]),
        ]
    }
);
weights!(
    BlockQ2_0,
    4,
    { OFFSETS = false },
    |[a, b, c, d]| {
        let zero = vdupq_n_f32(0.0);
        let ([a, b], [c, d]) = (halves(a.d, b.d), halves(c.d, d.d));
        Factors {
            scale: [four([a, a, b, b]), four([c, c, d, d]), zero, zero],
            offset: [zero; 4],
        }
    },
    |blocks, b| {
        let words: &[[u8; 4]; 4] = bytemuck::cast_ref(&blocks[b / 2].qs);
        let first = b % 2 * 2;
        [sixteen_pairs(words[first]), sixteen_pairs(words[first + 1])]
    }
);

/// 1 where a bit is set, −1 where not.
#[inline]
#[target_feature(enable = "neon")]
fn sixteen_signs(signs: [u8; 2]) -> int8x16_t {
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let set = vtstq_u8(vcombine_u8(vdup_n_u8(signs[0]), vdup_n_u8(signs[1])), bit);
    vreinterpretq_s8_u8(vorrq_u8(vmvnq_u8(set), vdupq_n_u8(1)))
}

/// The pairs of bits of a number, the lowest first, less 1.
#[inline]
#[target_feature(enable = "neon")]
fn sixteen_pairs(pairs: [u8; 4]) -> int8x16_t {
    let bytes = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(pairs)));
    let each = vcombine_u8(
        vcreate_u8(0x0101_0101_0000_0000),
        vcreate_u8(0x0303_0303_0202_0202),
    );
    // Shifts by 0, −2, −4 and −6.
    let right = vreinterpretq_s8_u32(vdupq_n_u32(0xFAFC_FE00));
    let pairs = vshlq_u8(vqtbl1q_u8(bytes, each), right);
    let pairs = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(3)));
    vsubq_s8(pairs, vdupq_n_s8(1))
}

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

#[inline]
#[target_feature(enable = "neon")]
fn coded_factors<B: Coded>(block: &B) -> Factors {
    let CodedScales { d, nibbles } = block.scales();
    let nibbles = vcreate_u8(nibbles);
    let (even, odd) = (vand_u8(nibbles, vdup_n_u8(15)), vshr_n_u8::<4>(nibbles));
    let n = vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
    let odd_numbers = vaddq_u8(vaddq_u8(n, n), vdupq_n_u8(1));
    Factors {
        scale: times(widened(odd_numbers), B::UNIT * halves(d, d)[0]),
        offset: [vdupq_n_f32(0.0); 4],
    }
}

/// The integers of group `b`.
#[inline]
#[target_feature(enable = "neon")]
fn integers<B: Coded>(block: &B, b: usize) -> [int8x16_t; 2] {
    let [s0, s1, s2, s3] = block.signs(b).to_le_bytes();
    let (first, second) = (
        [block.grid(b, 0), block.grid(b, 1)],
        [block.grid(b, 2), block.grid(b, 3)],
    );
    [
        sixteen_integers::<B>(first, [s0, s1]),
        sixteen_integers::<B>(second, [s2, s3]),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn sixteen_integers<B: Coded>(grid: [u64; 2], signs: [u8; 2]) -> int8x16_t {
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let signs = vcombine_u8(vdup_n_u8(signs[0]), vdup_n_u8(signs[1]));
    let negative = vreinterpretq_s8_u8(vtstq_u8(signs, bit));
    let grid = vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(grid[0]), vcreate_u64(grid[1])));
    if B::EIGHTHS {
        vaddq_s8(vshlq_n_s8::<3>(grid), vorrq_s8(negative, vdupq_n_s8(1)))
    } else {
        vsubq_s8(veorq_s8(grid, negative), negative)
    }
}

/// The first bytes of a block.
fn head<B: Pod, H: Pod>(block: &B) -> &H {
    bytemuck::from_bytes(&bytemuck::bytes_of(block)[..size_of::<H>()])
}

/// The f16 in front of eight heads, widened.
#[inline]
#[target_feature(enable = "neon")]
fn scales(x: [&[u8; 8]; 8]) -> [float32x4_t; 4] {
    let zero = vdupq_n_f32(0.0);
    [
        first_of(x[0], x[1], x[2], x[3]).0,
        first_of(x[4], x[5], x[6], x[7]).0,
        zero,
        zero,
    ]
}

/// The two f16 in front of eight heads, widened.
#[inline]
#[target_feature(enable = "neon")]
fn scales_minima(x: [&[u8; 8]; 8]) -> ([float32x4_t; 4], [float32x4_t; 4]) {
    let zero = vdupq_n_f32(0.0);
    let (d0, m0) = first_of(x[0], x[1], x[2], x[3]);
    let (d1, m1) = first_of(x[4], x[5], x[6], x[7]);
    ([d0, d1, zero, zero], [m0, m1, zero, zero])
}

/// The first f16 of each, and the second.
#[inline]
#[target_feature(enable = "neon")]
fn first_of(a: &[u8; 8], b: &[u8; 8], c: &[u8; 8], d: &[u8; 8]) -> (float32x4_t, float32x4_t) {
    let (a, b, c, d) = (load_u16(a), load_u16(b), load_u16(c), load_u16(d));
    // a₀ b₀ a₁ b₁ and c₀ d₀ c₁ d₁
    let (ab, cd) = (
        vreinterpret_u32_u16(vzip1_u16(a, b)),
        vreinterpret_u32_u16(vzip1_u16(c, d)),
    );
    let (first, second) = (
        vreinterpret_u16_u32(vzip1_u32(ab, cd)),
        vreinterpret_u16_u32(vzip2_u32(ab, cd)),
    );
    (widen_f16(first), widen_f16(second))
}

/// Two f16.
#[inline]
#[target_feature(enable = "neon")]
fn halves(a: [u8; 2], b: [u8; 2]) -> [f32; 2] {
    let bits = u32::from(u16::from_le_bytes(a)) | u32::from(u16::from_le_bytes(b)) << 16;
    let x = widen_f16(vcreate_u16(bits.into()));
    [vgetq_lane_f32::<0>(x), vgetq_lane_f32::<1>(x)]
}

/// [`BlockMxfp4::half_scale`] of four blocks.
#[inline]
#[target_feature(enable = "neon")]
fn half_scales(blocks: &[BlockMxfp4]) -> float32x4_t {
    let e = u32::from_le_bytes([blocks[0].e, blocks[1].e, blocks[2].e, blocks[3].e]);
    let e = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(e.into()))));
    let normal = vshlq_n_u32::<23>(vsubq_u32(e, vdupq_n_u32(1)));
    let small = vshlq_u32(vdupq_n_u32(0x0020_0000), vreinterpretq_s32_u32(e));
    vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), small, normal))
}

/// Scales and offsets of Q4_K and Q5_K; their blocks begin with `d`, `dmin` and the packed scales
/// of [`unpack_scales_mins`].
#[inline]
#[target_feature(enable = "neon")]
fn scales_mins(head: &[u8; 16]) -> Factors {
    let [d, a, b, c]: [[u8; 4]; 4] = bytemuck::cast(*head);
    let ab = u64::from(u32::from_le_bytes(a)) | u64::from(u32::from_le_bytes(b)) << 32;
    let c = u64::from(u32::from_le_bytes(c));
    // Four scales in the low half, four minima in the high one.
    let first = ab & 0x3F3F_3F3F_3F3F_3F3F;
    let last = (c | c << 28) & 0x0F0F_0F0F_0F0F_0F0F | ab >> 2 & 0x3030_3030_3030_3030;
    let (first, last) = (vcreate_u32(first), vcreate_u32(last));
    let scale = vmovl_u8(vreinterpret_u8_u32(vzip1_u32(first, last)));
    let min = vmovl_u8(vreinterpret_u8_u32(vzip2_u32(first, last)));
    let d = widen_f16(vcreate_u16(u32::from_le_bytes(d).into()));
    Factors {
        scale: eight_times::<0>(scale, d),
        offset: eight_times::<1>(min, vnegq_f32(d)),
    }
}

/// `d·q` of eight numbers.
#[inline]
#[target_feature(enable = "neon")]
fn eight_times<const D: i32>(q: uint16x8_t, d: float32x4_t) -> [float32x4_t; 4] {
    let (first, second) = (
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(q))),
        vcvtq_f32_u32(vmovl_high_u16(q)),
    );
    let zero = vdupq_n_f32(0.0);
    [
        vmulq_laneq_f32::<D>(first, d),
        vmulq_laneq_f32::<D>(second, d),
        zero,
        zero,
    ]
}

/// Unsigned bytes as numbers.
#[inline]
#[target_feature(enable = "neon")]
fn widened(q: uint8x16_t) -> [float32x4_t; 4] {
    let (low, high) = (vmovl_u8(vget_low_u8(q)), vmovl_high_u8(q));
    [
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
        vcvtq_f32_u32(vmovl_high_u16(low)),
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
        vcvtq_f32_u32(vmovl_high_u16(high)),
    ]
}

/// Signed bytes as numbers.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widened_signed(q: int8x16_t) -> [float32x4_t; 4] {
    let (low, high) = (vmovl_s8(vget_low_s8(q)), vmovl_high_s8(q));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn times(x: [float32x4_t; 4], factor: f32) -> [float32x4_t; 4] {
    [
        vmulq_n_f32(x[0], factor),
        vmulq_n_f32(x[1], factor),
        vmulq_n_f32(x[2], factor),
        vmulq_n_f32(x[3], factor),
    ]
}

/// Low nibbles of 16 bytes, then the high ones.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(qs: &[u8; 16]) -> [int8x16_t; 2] {
    let qs = load(qs);
    [
        vreinterpretq_s8_u8(half_bytes(qs, 0)),
        vreinterpretq_s8_u8(half_bytes(qs, 1)),
    ]
}

/// Group `b` of pairs: the low nibbles of 32 bytes are one group, the high ones the next.
#[inline]
#[target_feature(enable = "neon")]
fn nibble_pairs(qs: &[u8; 128], b: usize) -> [int8x16_t; 2] {
    let qs: &[[u8; 16]; 8] = bytemuck::cast_ref(qs);
    let (first, second) = (load(&qs[b / 2 * 2]), load(&qs[b / 2 * 2 + 1]));
    [
        vreinterpretq_s8_u8(half_bytes(first, b % 2)),
        vreinterpretq_s8_u8(half_bytes(second, b % 2)),
    ]
}

/// Low (0) or high (1) nibbles.
#[inline]
#[target_feature(enable = "neon")]
fn half_bytes(qs: uint8x16_t, high: usize) -> uint8x16_t {
    if high == 0 {
        vandq_u8(qs, vdupq_n_u8(15))
    } else {
        vshrq_n_u8::<4>(qs)
    }
}

/// Group `b` in the two-bit layout of Q2_K, Q3_K, Q6_K and TQ2_0.
#[inline]
#[target_feature(enable = "neon")]
fn two_bits(qs: &[u8; 64], b: usize) -> [int8x16_t; 2] {
    let qs: &[[u8; 16]; 4] = bytemuck::cast_ref(qs);
    let mask = vdupq_n_u8(3);
    let (first, second) = (
        shifted(load(&qs[b / 4 * 2]), 2 * (b % 4)),
        shifted(load(&qs[b / 4 * 2 + 1]), 2 * (b % 4)),
    );
    [
        vreinterpretq_s8_u8(vandq_u8(first, mask)),
        vreinterpretq_s8_u8(vandq_u8(second, mask)),
    ]
}

/// Moves bit `from` of each byte to bit 0.
#[inline]
#[target_feature(enable = "neon")]
fn shifted(x: uint8x16_t, from: usize) -> uint8x16_t {
    shifted_to::<0>(x, from)
}

/// Moves bit `from` of each byte to bit `TO`.
#[inline]
#[target_feature(enable = "neon")]
fn shifted_to<const TO: i32>(x: uint8x16_t, from: usize) -> uint8x16_t {
    // `from` is a constant once this is inlined; the instruction takes an immediate.
    match TO - from as i32 {
        4 => vshlq_n_u8::<4>(x),
        3 => vshlq_n_u8::<3>(x),
        2 => vshlq_n_u8::<2>(x),
        1 => vshlq_n_u8::<1>(x),
        0 => x,
        -1 => vshrq_n_u8::<1>(x),
        -2 => vshrq_n_u8::<2>(x),
        -3 => vshrq_n_u8::<3>(x),
        -4 => vshrq_n_u8::<4>(x),
        -5 => vshrq_n_u8::<5>(x),
        -6 => vshrq_n_u8::<6>(x),
        _ => vshrq_n_u8::<7>(x),
    }
}

/// Low or high nibbles, with bits `2j` and `2j + 1` of `high` above them.
#[inline]
#[target_feature(enable = "neon")]
fn six_bits(nibbles: uint8x16_t, high: uint8x16_t, j: usize) -> int8x16_t {
    vreinterpretq_s8_u8(if j < 2 {
        let high = vandq_u8(shifted(high, 2 * j), vdupq_n_u8(3));
        vsliq_n_u8::<4>(vandq_u8(nibbles, vdupq_n_u8(15)), high)
    } else {
        let high = vandq_u8(shifted_to::<4>(high, 2 * j), vdupq_n_u8(0x30));
        vsraq_n_u8::<4>(high, nibbles)
    })
}

/// Adds bit `i` of `qh` as bit 4 of value `i`.
#[inline]
#[target_feature(enable = "neon")]
fn with_fifth_bits(low: [int8x16_t; 2], qh: [u8; 4]) -> [int8x16_t; 2] {
    let qh = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(qh)));
    let eight = |i: usize| 0x0101_0101_0101_0101 * i as u64;
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let mut w = low;
    for (h, w) in w.iter_mut().enumerate() {
        // Each byte gets the byte of `qh` that holds its bit.
        let bytes = vqtbl1q_u8(
            qh,
            vcombine_u8(vcreate_u8(eight(2 * h)), vcreate_u8(eight(2 * h + 1))),
        );
        let high = vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16));
        *w = vorrq_s8(*w, vreinterpretq_s8_u8(high));
    }
    w
}

/// `values[i]` for each byte `i` below 16.
#[inline]
#[target_feature(enable = "neon")]
fn look_up(values: &[i8; 16], codes: [int8x16_t; 2]) -> [int8x16_t; 2] {
    let values = load_signed(values);
    let [a, b] = codes;
    [
        vqtbl1q_s8(values, vreinterpretq_u8_s8(a)),
        vqtbl1q_s8(values, vreinterpretq_u8_s8(b)),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn four(x: [f32; 4]) -> float32x4_t {
    // SAFETY: four readable numbers.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[u8; 16]) -> uint8x16_t {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { vld1q_u8(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_signed(x: &[i8; 16]) -> int8x16_t {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { vld1q_s8(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_u16(x: &[u8; 8]) -> uint16x4_t {
    // SAFETY: 8 readable bytes.
    vreinterpret_u16_u8(unsafe { vld1_u8(x.as_ptr()) })
}
