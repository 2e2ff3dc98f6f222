//! Block formats as 32 signed bytes with a scale and an offset for each 16: the source of panels,
//! at this level and those above, and of one row's products for coded formats. Scales have so few
//! bits that one multiply-add gives exactly the values of `dequantize`.

use crate::arch::arrays;
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;
use std::ops::Range;

/// Value `i` of group `g` is `scale[2g + i/16]·q + offset[2g + i/16]`.
pub(in crate::arch) struct Factors {
    pub(in crate::arch) scale: [f32; 16],
    pub(in crate::arch) offset: [f32; 16],
}

/// A block of `GROUPS` groups of 32 values.
pub(in crate::arch) trait Groups: Pod {
    const GROUPS: usize;
    /// Blocks that hold 256 values: `Self`, or an array.
    type Of256: Pod;
    /// For formats without a minimum: `offset = −ZERO_POINT·scale`.
    const ZERO_POINT: u8 = 0;

    /// # Safety
    /// The CPU must have AVX2 and F16C.
    unsafe fn factors(&self) -> Factors;

    /// The bytes `q` of group `g`.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    unsafe fn bytes(&self, g: usize) -> __m256i;
}

/// The groups of block `i` that have some of the values `wanted`.
#[inline]
pub(in crate::arch) fn wanted_groups<B: Groups>(i: usize, wanted: &Range<usize>) -> Range<usize> {
    let before = i * B::GROUPS;
    (wanted.start / 32).saturating_sub(before)
        ..wanted
            .end
            .div_ceil(32)
            .saturating_sub(before)
            .min(B::GROUPS)
}

/// Calls `$do!(Block)` for the block structure of `$dtype`, or evaluates to `$other` if the x86
/// levels do not know the format. Those that they know are listed here.
macro_rules! with_groups {
    ($dtype:expr, $do:ident, $other:expr) => {
        with_groups! { $dtype, $do, $other,
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
pub(in crate::arch) use with_groups;

/// Whether the x86 levels have kernels for a format.
pub(in crate::arch) fn knows(dtype: DType) -> bool {
    macro_rules! known {
        ($block:ident) => {
            true
        };
    }
    let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    plain || with_groups!(dtype, known, false)
}

/// Blocks of one group with one scale and one offset.
macro_rules! small {
    ($block:ident, zero: $zero:literal, |$b:ident| $scale:expr, $offset:expr, $bytes:expr) => {
        impl Groups for $block {
            const GROUPS: usize = 1;
            type Of256 = [Self; 8];
            const ZERO_POINT: u8 = $zero;

            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn factors(&self) -> Factors {
                let $b = self;
                Factors {
                    scale: [$scale; 16],
                    offset: [$offset; 16],
                }
            }

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn bytes(&self, _g: usize) -> __m256i {
                let $b = self;
                $bytes
            }
        }
    };
}
small!(BlockQ4_0, zero: 8, |b| f16_value(b.d), -8.0 * f16_value(b.d), halves(&b.qs));
small!(BlockQ4_1, zero: 0, |b| f16_value(b.d), f16_value(b.m), halves(&b.qs));
small!(BlockQ5_0, zero: 16, |b| f16_value(b.d), -16.0 * f16_value(b.d), _mm256_or_si256(halves(&b.qs), bits(b.qh, 16)));
small!(BlockQ5_1, zero: 0, |b| f16_value(b.d), f16_value(b.m), _mm256_or_si256(halves(&b.qs), bits(b.qh, 16)));
small!(BlockQ8_0, zero: 0, |b| f16_value(b.d), 0.0, load256(&b.qs));
small!(BlockIq4Nl, zero: 0, |b| f16_value(b.d), 0.0, look_up(&IQ4_VALUES, halves(&b.qs)));
small!(BlockMxfp4, zero: 0, |b| b.half_scale(), 0.0, look_up(&MXFP4_VALUES, halves(&b.qs)));

impl Groups for BlockNvfp4 {
    const GROUPS: usize = 2;
    type Of256 = [Self; 4];

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn factors(&self) -> Factors {
        let mut scale = [0.0; 16];
        arrays::store(self.half_scales(), &mut scale);
        Factors {
            scale,
            offset: [0.0; 16],
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn bytes(&self, g: usize) -> __m256i {
        // Each eight bytes hold eight values and the eight after them.
        look_up(
            &MXFP4_VALUES,
            _mm256_permute4x64_epi64::<0b11_01_10_00>(halves(self.half(g))),
        )
    }
}

/// Blocks of several groups with one scale.
macro_rules! medium {
    ($block:ident, groups: $groups:literal, of_256: $n:literal, |$b:ident, $g:ident| $bytes:expr) => {
        impl Groups for $block {
            const GROUPS: usize = $groups;
            type Of256 = [Self; $n];

            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn factors(&self) -> Factors {
                Factors {
                    scale: [f16_value(self.d); 16],
                    offset: [0.0; 16],
                }
            }

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn bytes(&self, $g: usize) -> __m256i {
                let $b = self;
                $bytes
            }
        }
    };
}
medium!(BlockQ1_0, groups: 4, of_256: 2, |b, g| {
    let signs = [b.qs[4 * g], b.qs[4 * g + 1], b.qs[4 * g + 2], b.qs[4 * g + 3]];
    _mm256_sub_epi8(bits(signs, 2), _mm256_set1_epi8(1))
});
medium!(BlockQ2_0, groups: 2, of_256: 4, |b, g| {
    let halves: &[[u8; 8]; 2] = bytemuck::cast_ref(&b.qs);
    bit_pairs_in_order(u64::from_le_bytes(halves[g]))
});

/// Super-blocks of 256.
macro_rules! large {
    ($block:ident, $(zero: $zero:literal,)? |$b:ident| $factors:expr, |$g:ident| $bytes:expr) => {
        impl Groups for $block {
            const GROUPS: usize = 8;
            type Of256 = Self;
            $(const ZERO_POINT: u8 = $zero;)?

            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn factors(&self) -> Factors {
                let $b = self;
                $factors
            }

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn bytes(&self, $g: usize) -> __m256i {
                let $b = self;
                $bytes
            }
        }
    };
}
large!(
    BlockQ2K,
    |b| {
        let packed = load128(&b.scales);
        let (low, high) = (_mm_set1_epi8(15), _mm_srli_epi16::<4>(packed));
        Factors {
            scale: times(f16_value(b.d), _mm_and_si128(packed, low)),
            offset: times(-f16_value(b.dmin), _mm_and_si128(high, low)),
        }
    },
    |g| two_bits(&b.qs, g)
);
large!(
    BlockQ3K,
    zero: 4,
    |b| {
        let (d, scales) = (f16_value(b.d), load128(&unpack_scales_q3_k(&b.scales)));
        Factors {
            scale: times(d, scales),
            offset: times(-4.0 * d, scales),
        }
    },
    |g| _mm256_or_si256(two_bits(&b.qs, g), byte_bit(&b.hmask, g, 4))
);
large!(BlockQ4K, |b| scales_mins(b.d, b.dmin, &b.scales), |g| {
    nibbles(&b.qs[g / 2 * 32..][..32], g % 2)
});
large!(BlockQ5K, |b| scales_mins(b.d, b.dmin, &b.scales), |g| {
    _mm256_or_si256(
        nibbles(&b.qs[g / 2 * 32..][..32], g % 2),
        byte_bit(&b.qh, g, 16),
    )
});
large!(
    BlockQ6K,
    zero: 32,
    |b| {
        let (d, scales) = (f16_value(b.d), load128(&b.scales));
        Factors {
            scale: times(d, scales),
            offset: times(-32.0 * d, scales),
        }
    },
    |g| {
        let low = nibbles(&b.ql[g / 4 * 64 + g % 2 * 32..][..32], g / 2 % 2);
        _mm256_or_si256(low, _mm256_slli_epi16::<4>(two_bits(&b.qh, g)))
    }
);
large!(
    BlockIq4Xs,
    |b| {
        let (d, high) = (f16_value(b.d), u16::from_le_bytes(b.scales_h));
        let scale = arrays::from_fn(|i| {
            let s = i / 2;
            let sc =
                b.scales_l[s / 2] as u32 >> (s % 2 * 4) & 15 | (high as u32 >> (2 * s) & 3) << 4;
            d * (sc as f32 - 32.0)
        });
        Factors {
            scale,
            offset: [0.0; 16],
        }
    },
    |g| look_up(
        &IQ4_VALUES,
        halves(b.qs[16 * g..].first_chunk().unwrap_or(&[0; 16]))
    )
);
large!(
    BlockTq2_0,
    |b| Factors {
        scale: [f16_value(b.d); 16],
        offset: [0.0; 16]
    },
    |g| _mm256_sub_epi8(two_bits(&b.qs, g), _mm256_set1_epi8(1))
);

/// Coded formats: values are looked up.
macro_rules! coded {
    ($($block:ident)*) => {$(
        large!(
            $block,
            |b| {
                let CodedScales { d, nibbles } = b.scales();
                Factors { scale: times(Self::UNIT * f16_value(d), odd_numbers(nibbles)), offset: [0.0; 16] }
            },
            |g| integers(b, g)
        );
    )*};
}
coded!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S BlockTq1_0);

/// `2n + 1` for each nibble `n`.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch) fn odd_numbers(nibbles: u64) -> __m128i {
    let (nibbles, mask) = (_mm_cvtsi64_si128(nibbles.cast_signed()), _mm_set1_epi8(15));
    let (even, odd) = (
        _mm_and_si128(nibbles, mask),
        _mm_and_si128(_mm_srli_epi16::<4>(nibbles), mask),
    );
    let n = _mm_unpacklo_epi8(even, odd);
    _mm_add_epi8(_mm_add_epi8(n, n), _mm_set1_epi8(1))
}

/// The integers of group `g`.
#[inline]
#[target_feature(enable = "avx2")]
fn integers<B: Coded>(block: &B, g: usize) -> __m256i {
    let (a, b, c, d) = (
        block.grid(g, 0),
        block.grid(g, 1),
        block.grid(g, 2),
        block.grid(g, 3),
    );
    let grid = _mm256_set_epi64x(
        d.cast_signed(),
        c.cast_signed(),
        b.cast_signed(),
        a.cast_signed(),
    );
    let negative = bits(block.signs(g).to_le_bytes(), -1);
    if B::EIGHTHS {
        // The shift of words brings bits of one byte to the next.
        let eights = _mm256_and_si256(_mm256_slli_epi16::<3>(grid), _mm256_set1_epi8(-8));
        _mm256_add_epi8(eights, _mm256_or_si256(negative, _mm256_set1_epi8(1)))
    } else {
        _mm256_sub_epi8(_mm256_xor_si256(grid, negative), negative)
    }
}

/// The sub-blocks' `(d·sc, −dmin·m)`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> Factors {
    let twice = |x: u64| {
        let x = _mm_cvtsi64_si128(x as i64);
        _mm_unpacklo_epi8(x, x)
    };
    let [sc, m] = scales_mins_bytes(packed);
    Factors {
        scale: times(f16_value(d), twice(sc)),
        offset: times(-f16_value(dmin), twice(m)),
    }
}

/// `unpack_scales_mins` on four bytes at a time.
#[inline]
pub(in crate::arch) fn scales_mins_bytes(packed: &[u8; 12]) -> [u64; 2] {
    let [a, b, c] = arrays::map(
        bytemuck::cast::<_, [[u8; 4]; 3]>(*packed),
        u32::from_le_bytes,
    );
    let six = |low: u32, high: u32| {
        (low & 0x3f3f3f3f) as u64 | ((high & 0x0f0f0f0f | low >> 2 & 0x30303030) as u64) << 32
    };
    [six(a, c), six(b, c >> 4)]
}

/// `d·q` of 16 signed bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn times(d: f32, q: __m128i) -> [f32; 16] {
    let eight = |q| {
        _mm256_mul_ps(
            _mm256_set1_ps(d),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)),
        )
    };
    let halves = [eight(q), eight(_mm_srli_si128::<8>(q))];
    // SAFETY: the same values.
    unsafe { std::mem::transmute(halves) }
}

#[inline]
#[target_feature(enable = "f16c")]
pub(in crate::arch) fn f16_value(bytes: [u8; 2]) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(bytes) as i32
    )))
}

/// The low nibbles of 16 bytes, then the high ones.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(qs: &[u8; 16]) -> __m256i {
    let qs = load128(qs);
    _mm256_and_si256(
        _mm256_set_m128i(_mm_srli_epi16::<4>(qs), qs),
        _mm256_set1_epi8(15),
    )
}

/// The low (0) or high (1) nibbles of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(qs: &[u8], high: usize) -> __m256i {
    let shifted = _mm256_srl_epi16(load256(qs), _mm_cvtsi32_si128(4 * high as i32));
    _mm256_and_si256(shifted, _mm256_set1_epi8(15))
}

/// Group `g` in the two-bit layout of Q2_K, Q3_K, Q6_K and TQ2_0.
#[inline]
#[target_feature(enable = "avx2")]
fn two_bits(qs: &[u8; 64], g: usize) -> __m256i {
    let shifted = _mm256_srl_epi16(
        load256(&qs[g / 4 * 32..][..32]),
        _mm_cvtsi32_si128(g as i32 % 4 * 2),
    );
    _mm256_and_si256(shifted, _mm256_set1_epi8(3))
}

/// The pairs of bits of a number, the lowest first, less 1.
#[inline]
#[target_feature(enable = "avx2")]
fn bit_pairs_in_order(pairs: u64) -> __m256i {
    // Nibbles with the lower pairs of each byte, then those with the higher ones.
    let bytes = _mm_cvtsi64_si128(pairs.cast_signed());
    let nibbles = _mm_and_si128(
        _mm_unpacklo_epi64(bytes, _mm_srli_epi16::<4>(bytes)),
        _mm_set1_epi8(15),
    );
    let nibbles = _mm256_broadcastsi128_si256(nibbles);
    // Each nibble twice, of which the first byte keeps the low pair and the second the high one.
    let each_twice = _mm256_setr_epi64x(
        0x0909_0101_0808_0000,
        0x0B0B_0303_0A0A_0202,
        0x0D0D_0505_0C0C_0404,
        0x0F0F_0707_0E0E_0606,
    );
    let pairs = _mm256_and_si256(
        _mm256_shuffle_epi8(nibbles, each_twice),
        _mm256_set1_epi16(0x0C03),
    );
    look_up(&PAIR_IN_NIBBLE, pairs)
}

/// What pairs of bits stand for that are the low or the high half of a nibble whose other half is
/// zero.
const PAIR_IN_NIBBLE: [i8; 16] = [-1, 0, 1, 2, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1];

/// `value` where bit `i` of the byte is set.
#[inline]
#[target_feature(enable = "avx2")]
fn byte_bit(bytes: &[u8; 32], i: usize, value: i8) -> __m256i {
    let bit = _mm256_set1_epi8((1u8 << i) as i8);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(load256(bytes), bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

/// `value` where bit `i` of the little-endian number is set, for byte `i`.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(number: [u8; 4], value: i8) -> __m256i {
    let bytes = _mm256_set1_epi32(i32::from_le_bytes(number));
    // Byte `i` of the result gets byte `i / 8` of the number.
    let of_eight = _mm256_setr_epi64x(
        0,
        0x0101010101010101,
        0x0202020202020202,
        0x0303030303030303,
    );
    let bit = _mm256_set1_epi64x(0x8040201008040201u64 as i64);
    let set = _mm256_cmpeq_epi8(
        _mm256_and_si256(_mm256_shuffle_epi8(bytes, of_eight), bit),
        bit,
    );
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

/// `table[i]` for each byte `i` below 16.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(table: &[i8; 16], i: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(table)), i)
}

#[inline]
#[target_feature(enable = "sse2")]
pub(in crate::arch) fn load128<T: Pod>(x: &[T]) -> __m128i {
    assert_eq!(size_of_val(x), 16);
    // SAFETY: the length was checked.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch) fn load256<T: Pod>(x: &[T]) -> __m256i {
    assert_eq!(size_of_val(x), 32);
    // SAFETY: the length was checked.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch) fn store256<T: Pod>(to: &mut [T], x: __m256i) {
    assert_eq!(size_of_val(to), 32);
    // SAFETY: the length was checked.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
}
