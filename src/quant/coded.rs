//! Formats whose values are looked up in a grid, or are trits, as the kernels of the vector levels
//! read them: bytes, signs and scales, apart. Their definition is `dequantize`.

use super::iq::{BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs};
use super::iq_grids::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
use super::ternary::BlockTq1_0;
use bytemuck::Pod;

/// The scales of a block: that of values `16·i..16·i + 16` is [`Coded::UNIT`]`·d·(2·nibble + 1)`,
/// with nibble `i`.
#[derive(Clone, Copy, Debug)]
pub struct CodedScales {
    /// An f16.
    pub d: [u8; 2],
    /// The nibbles, the lowest first.
    pub nibbles: u64,
}

/// A block of 256 values that are an integer of a byte times a scale for each 16.
pub trait Coded: Pod {
    /// The largest magnitude of the integers.
    const LARGEST: i8;
    /// A power of two, see [`CodedScales`].
    const UNIT: f32;
    /// The integer that a byte `g` of the grid stands for: `g`, or `−g` where the sign bit is set;
    /// with `EIGHTHS` `8g + 1`, or `8g − 1` where it is set.
    const EIGHTHS: bool = false;

    /// The scales of the block.
    fn scales(&self) -> CodedScales;

    /// Bytes of the grid for the eight values from `32·group + 8·part` on, the first one lowest.
    fn grid(&self, group: usize, part: usize) -> u64;

    /// A sign bit for each of the 32 values from `32·group` on.
    fn signs(&self, group: usize) -> u32;
}

impl Coded for BlockIq2Xxs {
    const LARGEST: i8 = 43;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: each_twice(gathered(self.qs.map(|qs| qs[7] >> 4))),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        eight(IQ2_XXS_GRID[usize::from(self.qs[group][part])])
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        let [_, _, _, _, signs @ ..] = self.qs[group];
        even_signs(spread(u32::from_le_bytes(signs)))
    }
}

impl Coded for BlockIq2Xs {
    const LARGEST: i8 = 43;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: u64::from_le_bytes(self.scales),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        eight(IQ2_XS_GRID[usize::from(u16::from_le_bytes(self.qs[4 * group + part]) & 511)])
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        let seven = |part: usize| u32::from(self.qs[4 * group + part][1] >> 1) << (8 * part);
        even_signs(seven(0) | seven(1) | seven(2) | seven(3))
    }
}

impl Coded for BlockIq2S {
    const LARGEST: i8 = 43;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: u64::from_le_bytes(self.scales),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        let high = usize::from(self.qh[group]) >> (2 * part) & 3;
        eight(IQ2_S_GRID[usize::from(self.qs[4 * group + part]) | high << 8])
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        four_bytes(&self.signs, group)
    }
}

impl Coded for BlockIq3Xxs {
    const LARGEST: i8 = 62;
    const UNIT: f32 = 0.25;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: each_twice(gathered(self.scales_and_signs.map(|bits| bits[3] >> 4))),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        let four = |half: usize| IQ3_XXS_GRID[usize::from(self.qs[8 * group + 2 * part + half])];
        joined(four(0), four(1))
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        even_signs(spread(u32::from_le_bytes(self.scales_and_signs[group])))
    }
}

impl Coded for BlockIq3S {
    const LARGEST: i8 = 15;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: each_twice(u32::from_le_bytes(self.scales)),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        let high = usize::from(self.qh[group]) >> (2 * part);
        let four = |half: usize| {
            IQ3_S_GRID[usize::from(self.qs[8 * group + 2 * part + half]) | (high >> half & 1) << 8]
        };
        joined(four(0), four(1))
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        four_bytes(&self.signs, group)
    }
}

impl Coded for BlockIq1S {
    const LARGEST: i8 = 9;
    const UNIT: f32 = 0.125;
    const EIGHTHS: bool = true;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: each_twice(gathered(self.qh.map(|qh| qh[1] >> 4 & 7))),
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        let high = usize::from(u16::from_le_bytes(self.qh[group])) >> (3 * part) & 7;
        eight(IQ1_GRID[usize::from(self.qs[4 * group + part]) | high << 8])
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        u32::from(self.qh[group][1] >> 7) * u32::MAX
    }
}

impl Coded for BlockIq1M {
    const LARGEST: i8 = 9;
    const UNIT: f32 = 0.125;
    const EIGHTHS: bool = true;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        let (mut d, mut nibbles) = (0, 0);
        for (j, word) in self.scales.iter().enumerate() {
            let word = u16::from_le_bytes(*word);
            d |= word >> 12 << (4 * j);
            let four =
                word & 7 | (word >> 3 & 7) << 4 | (word >> 6 & 7) << 8 | (word >> 9 & 7) << 12;
            nibbles |= u64::from(four) << (16 * j);
        }
        CodedScales {
            d: d.to_le_bytes(),
            nibbles,
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        let high = usize::from(self.qh[2 * group + part / 2]) >> (4 * (part % 2)) & 7;
        eight(IQ1_GRID[usize::from(self.qs[4 * group + part]) | high << 8])
    }

    #[inline(always)]
    fn signs(&self, group: usize) -> u32 {
        let (a, b) = (
            u32::from(self.qh[2 * group]),
            u32::from(self.qh[2 * group + 1]),
        );
        (a >> 3 & 1 | (a >> 7) << 8 | (b >> 3 & 1) << 16 | (b >> 7) << 24) * 0xFF
    }
}

impl Coded for BlockTq1_0 {
    const LARGEST: i8 = 1;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn scales(&self) -> CodedScales {
        CodedScales {
            d: self.d,
            nibbles: 0,
        }
    }

    #[inline(always)]
    fn grid(&self, group: usize, part: usize) -> u64 {
        match (group, part) {
            (..5, _) => trits(word(&self.qs, 8 * part), group),
            (7, 2..) => {
                let last = u64::from(u32::from_le_bytes(self.qh));
                trits(last, 2 * part - 4) & 0xFFFF_FFFF | trits(last, 2 * part - 3) << 32
            }
            _ => trits(
                word(&self.qs, 32 + 8 * (part % 2)),
                2 * (group - 5) + part / 2,
            ),
        }
    }

    #[inline(always)]
    fn signs(&self, _group: usize) -> u32 {
        0
    }
}

/// Trit `n` of each of eight bytes, less 1: the integer part of `3·frac(3ⁿ·byte/256)`.
#[inline(always)]
fn trits(bytes: u64, n: usize) -> u64 {
    let power = [1, 3, 9, 27, 81][n];
    const LOW: u64 = 0x00FF_00FF_00FF_00FF;
    let trit = |bytes: u64| ((((bytes * power) & LOW) * 3) >> 8) & LOW;
    let t = trit(bytes & LOW) | trit(bytes >> 8 & LOW) << 8;
    // With the top bit of each byte set, nothing is borrowed from the next byte.
    ((t | 0x8080_8080_8080_8080) - 0x0101_0101_0101_0101) ^ 0x8080_8080_8080_8080
}

/// Eight bytes in one word.
#[inline(always)]
fn eight(bytes: [i8; 8]) -> u64 {
    u64::from_le_bytes(bytemuck::cast(bytes))
}

/// Two groups of four.
#[inline(always)]
fn joined(first: [i8; 4], second: [i8; 4]) -> u64 {
    let word = |bytes: [i8; 4]| u64::from(u32::from_le_bytes(bytemuck::cast(bytes)));
    word(first) | word(second) << 32
}

/// Eight of the bytes, from `at` on.
#[inline(always)]
fn word(bytes: &[u8; 48], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("eight bytes are left"))
}

/// Word `i` of the bytes.
#[inline(always)]
fn four_bytes(bytes: &[u8; 32], i: usize) -> u32 {
    u32::from_le_bytes([
        bytes[4 * i],
        bytes[4 * i + 1],
        bytes[4 * i + 2],
        bytes[4 * i + 3],
    ])
}

/// Four times seven bits as the low bits of bytes.
#[inline(always)]
fn spread(bits: u32) -> u32 {
    bits & 0x7F | bits << 1 & 0x7F00 | bits << 2 & 0x7F_0000 | bits << 3 & 0x7F00_0000
}

/// Sets the top bit of each byte so that the number of set bits is even.
#[inline(always)]
fn even_signs(sevens: u32) -> u32 {
    let parity = sevens ^ sevens >> 4;
    let parity = parity ^ parity >> 2;
    let parity = (parity ^ parity >> 1) & 0x0101_0101;
    sevens | parity << 7
}

/// Eight nibbles in one word, the first one lowest.
#[inline(always)]
fn gathered(nibbles: [u8; 8]) -> u32 {
    nibbles
        .iter()
        .rev()
        .fold(0, |word, &nibble| word << 4 | u32::from(nibble))
}

/// Each nibble twice.
#[inline(always)]
fn each_twice(nibbles: u32) -> u64 {
    let x = u64::from(nibbles);
    let x = (x | x << 16) & 0x0000_FFFF_0000_FFFF;
    let x = (x | x << 8) & 0x00FF_00FF_00FF_00FF;
    let x = (x | x << 4) & 0x0F0F_0F0F_0F0F_0F0F;
    x | x << 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::block::Block;

    /// What the parts of a block say, against its definition.
    fn check<B: Coded + Block<Values = [f32; 256]>>() {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for _ in 0..200 {
            let mut block = B::zeroed();
            for byte in bytemuck::bytes_of_mut(&mut block) {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                *byte = (state >> 56) as u8;
            }
            let mut expected = [0.0; 256];
            block.dequantize(&mut expected);
            let CodedScales { d, nibbles } = block.scales();
            let d = half::f16::from_le_bytes(d).to_f32();
            if !d.is_finite() {
                continue;
            }
            for (i, expected) in expected.into_iter().enumerate() {
                let g = i32::from((block.grid(i / 32, i % 32 / 8) >> (i % 8 * 8)) as i8);
                let q = match (B::EIGHTHS, block.signs(i / 32) >> (i % 32) & 1) {
                    (false, 0) => g,
                    (false, _) => -g,
                    (true, 0) => 8 * g + 1,
                    (true, _) => 8 * g - 1,
                };
                assert!(q.abs() <= i32::from(B::LARGEST), "{q}");
                let scale = B::UNIT * d * (2 * (nibbles >> (i / 16 * 4) & 15) + 1) as f32;
                assert_eq!(scale * q as f32, expected, "value {i}");
            }
        }
    }

    #[test]
    fn parts_make_the_values_of_dequantize() {
        check::<BlockIq1M>();
        check::<BlockIq1S>();
        check::<BlockIq2S>();
        check::<BlockIq2Xs>();
        check::<BlockIq2Xxs>();
        check::<BlockIq3S>();
        check::<BlockIq3Xxs>();
        check::<BlockTq1_0>();
    }
}
