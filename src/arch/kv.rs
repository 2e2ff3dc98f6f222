//! Storage of keys and values: precisions, and conversion of rows to them and back.
//!
//! A *block* is 64 rows (positions) of one head. Below 16 bits a row is cut into groups of 32
//! values, each with a scale. A value becomes an 8-bit code, `floor(x / scale) + 128`; a precision
//! keeps its upper bits. A code stands for the middle of its interval, so the error is at most half
//! a step. Dropping bits of q8 therefore gives exactly the same as storing with fewer bits: nothing
//! is rounded twice.
//!
//! Bits lie in planes, so that dropping some means copying fewer planes: `upper` has the four upper
//! bits of all rows, `lower` the others, `scales` the scales. Rows end in an incomplete group if
//! their width is no multiple of 32.

use super::attention::{KV_BLOCK, KvSpan};
use crate::arch::arrays;
use half::f16;

/// Values per scale.
pub(in crate::arch) const GROUP: usize = 32;
/// Bytes of a group's upper bits: byte `i` has value `i` in its low nibble and value `i + 16` in
/// its high one.
const UPPER: usize = GROUP / 2;
/// Bytes of a scale.
const SCALE: usize = size_of::<u16>();
/// Groups with only smaller values are stored as zeros.
const TINY: f32 = 1e-30;

/// Precision of keys or of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvType {
    /// 32 bits per value: exact.
    F32,
    /// 16 bits per value: the default, as in other engines.
    #[default]
    F16,
    /// 16 bits per value with the range of `F32`, and eight bits of precision.
    Bf16,
    /// 8 bits per value and a scale per 32.
    Q8,
    /// 6 bits per value and a scale per 32.
    Q6,
    /// 5 bits per value and a scale per 32.
    Q5,
    /// 4 bits per value and a scale per 32.
    Q4,
}

impl KvType {
    /// All types, the most precise first.
    pub const ALL: [KvType; 7] = [
        KvType::F32,
        KvType::F16,
        KvType::Bf16,
        KvType::Q8,
        KvType::Q6,
        KvType::Q5,
        KvType::Q4,
    ];

    /// Name in llama.cpp.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Bf16 => "bf16",
            KvType::Q8 => "q8_0",
            KvType::Q6 => "q6_0",
            KvType::Q5 => "q5_0",
            KvType::Q4 => "q4_0",
        }
    }

    /// Bits per value, without its share of a scale.
    pub fn bits(self) -> usize {
        match self {
            KvType::F32 => 32,
            KvType::F16 | KvType::Bf16 => 16,
            KvType::Q8 => 8,
            KvType::Q6 => 6,
            KvType::Q5 => 5,
            KvType::Q4 => 4,
        }
    }

    /// Whether values have a scale per 32.
    #[inline]
    pub fn is_quantized(self) -> bool {
        self.bits() <= 8
    }

    /// Bytes per row of `dim` values in each plane of a block; 0 for planes that the precision
    /// lacks.
    #[inline]
    pub(crate) fn row_bytes(self, dim: usize) -> [usize; 3] {
        if self.is_quantized() {
            let groups = dim.div_ceil(GROUP);
            [groups * UPPER, groups * self.lower(), groups * SCALE]
        } else {
            [dim * self.bits() / 8, 0, 0]
        }
    }

    /// Bytes of a block, [`KV_BLOCK`] rows of `dim` values: a multiple of 64.
    pub fn block_bytes(self, dim: usize) -> usize {
        self.row_bytes(dim)
            .iter()
            .map(|bytes| bytes * KV_BLOCK)
            .sum()
    }

    /// Bytes of a group's lower bits.
    #[inline]
    fn lower(self) -> usize {
        GROUP * self.bits().saturating_sub(4) / 8
    }
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for KvType {
    type Err = &'static str;
    fn from_str(s: &str) -> Result<KvType, &'static str> {
        match s {
            "f32" => Ok(KvType::F32),
            "f16" => Ok(KvType::F16),
            "bf16" => Ok(KvType::Bf16),
            "q8" | "q8_0" => Ok(KvType::Q8),
            "q6" | "q6_0" => Ok(KvType::Q6),
            "q5" | "q5_0" | "q5_1" => Ok(KvType::Q5),
            "q4" | "q4_0" | "q4_1" => Ok(KvType::Q4),
            _ => Err("expected f32, f16, bf16, q8_0, q6_0, q5_0, q5_1, q4_0 or q4_1"),
        }
    }
}

/// Blocks of stored keys and values of one KV head, see [`super::Arch::attention_stored`].
#[derive(Clone, Copy, Debug)]
pub struct KvStored<'a> {
    /// Precision of the keys.
    pub k: KvType,
    /// Precision of the values.
    pub v: KvType,
    /// Their bytes, [`KvType::block_bytes`] each.
    pub span: KvSpan<'a, u8>,
}

/// Side of the largest Hadamard matrix that divides a head of `dim` values.
#[inline]
fn hadamard_block(dim: usize) -> usize {
    dim & dim.wrapping_neg()
}

/// Drops the lower four bits of a Q8 block with rows of `dim` values, which makes it a Q4 block.
///
/// # Panics
/// If the precisions are not Q8 and Q4, or the sizes disagree.
pub(crate) fn drop_bits(
    (from_kind, from): (KvType, &[u8]),
    (to_kind, to): (KvType, &mut [u8]),
    dim: usize,
) {
    assert!(
        from_kind == KvType::Q8 && to_kind == KvType::Q4,
        "drop_bits: from {from_kind} to {to_kind}"
    );
    let [upper, lower, scales] = from_kind.row_bytes(dim).map(|bytes| bytes * KV_BLOCK);
    assert!(
        from.len() == upper + lower + scales && to.len() == upper + scales,
        "drop_bits: sizes"
    );
    to[..upper].copy_from_slice(&from[..upper]);
    to[upper..].copy_from_slice(&from[upper + lower..]);
}

/// Copies a row of a block with rows of `dim` values to a row of another one of the same precision.
///
/// # Panics
/// If a block is too small.
pub(crate) fn copy_row(
    kind: KvType,
    dim: usize,
    (from, i): (&[u8], usize),
    (to, j): (&mut [u8], usize),
) {
    let mut plane = 0;
    for row in kind.row_bytes(dim) {
        to[plane + j * row..][..row].copy_from_slice(&from[plane + i * row..][..row]);
        plane += KV_BLOCK * row;
    }
}

/// The kernels of this file for one level: the same source, compiled for its instructions.
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
macro_rules! kv_kernels {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(in crate::arch) fn hadamard(row: &mut [f32]) {
            $crate::arch::kv::hadamard(row);
        }
        #[target_feature(enable = $features)]
        pub(in crate::arch) fn quantize_kv(
            kind: $crate::arch::kv::KvType,
            block: &mut [u8],
            i: usize,
            row: &[f32],
        ) {
            $crate::arch::kv::quantize(kind, block, i, row);
        }
    };
}

/// [`load`] for one level.
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
macro_rules! load_kernel {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(in crate::arch) fn load_kv(
            kind: $crate::arch::kv::KvType,
            block: &[u8],
            dim: usize,
            rows: &mut [f32],
        ) {
            $crate::arch::kv::load(kind, block, dim, rows);
        }
    };
}
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
pub(super) use {kv_kernels, load_kernel};

/// See [`super::Arch::hadamard`].
#[inline(always)]
pub(super) fn hadamard(row: &mut [f32]) {
    let n = hadamard_block(row.len());
    if n < 2 {
        return;
    }
    let factor = 1.0 / (n as f32).sqrt();
    for row in row.chunks_exact_mut(n) {
        let mut half = 1;
        if n >= 16 {
            for x in row.chunks_exact_mut(16) {
                let mut y: [f32; 16] = arrays::from_fn(|i| x[i]);
                y = butterflies::<1>(y);
                y = butterflies::<2>(y);
                y = butterflies::<4>(y);
                y = butterflies::<8>(y);
                x.copy_from_slice(&y);
            }
            half = 16;
        }
        while half < n {
            for pair in row.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Sums and differences of values `HALF` apart.
#[inline(always)]
fn butterflies<const HALF: usize>(x: [f32; 16]) -> [f32; 16] {
    let mut y = x;
    for i in 0..16 {
        y[i] = if i & HALF == 0 {
            x[i] + x[i ^ HALF]
        } else {
            x[i ^ HALF] - x[i]
        };
    }
    y
}

/// The scale of a group that has a value which is not finite: NaN.
pub(super) const NO_NUMBER: u16 = 0x7fc0;

/// Scale of a group whose largest magnitude is `largest`: a 128th of it, rounded up to bf16. 0 if
/// all values count as zeros.
#[inline(always)]
pub(super) fn scale_of(largest: f32) -> u16 {
    if !largest.is_finite() {
        NO_NUMBER
    } else if largest < TINY {
        0
    } else {
        (((largest / 128.0).to_bits() + 0xffff) >> 16) as u16
    }
}

/// See [`super::Arch::store_kv`].
#[inline(always)]
pub(super) fn quantize(kind: KvType, block: &mut [u8], i: usize, row: &[f32]) {
    let [upper_row, lower_row, scale_row] = kind.row_bytes(row.len());
    let (upper, rest) = block.split_at_mut(KV_BLOCK * upper_row);
    let (lower, scales) = rest.split_at_mut(KV_BLOCK * lower_row);
    let upper = upper[i * upper_row..][..upper_row].chunks_exact_mut(UPPER);
    let scales = scales[i * scale_row..][..scale_row].chunks_exact_mut(SCALE);
    let mut lower = lower[i * lower_row..][..lower_row].chunks_exact_mut(kind.lower().max(1));
    for ((values, upper), scale) in row.chunks(GROUP).zip(upper).zip(scales) {
        let mut x = [0.0f32; GROUP];
        x[..values.len()].copy_from_slice(values);
        let mut largest = 0;
        for x in x {
            largest = largest.max(x.to_bits() & 0x7fff_ffff);
        }
        let largest = f32::from_bits(largest);
        let (mut codes, bits) = ([0x80u8; GROUP], scale_of(largest));
        if bits != 0 && bits != NO_NUMBER {
            let inverse = 1.0 / widen(bits);
            for (code, x) in codes.iter_mut().zip(x) {
                // `largest` itself would be code 256. Adding 2²³ leaves the integer in the low
                // bits.
                *code = ((x * inverse + 128.0).min(255.0).floor() + 8_388_608.0).to_bits() as u8;
            }
        }
        scale.copy_from_slice(&bits.to_le_bytes());
        for j in 0..UPPER {
            upper[j] = codes[j] >> 4 | codes[j + UPPER] & 0xf0;
        }
        let Some(lower) = lower.next() else { continue };
        match kind {
            KvType::Q8 => {
                for j in 0..16 {
                    lower[j] = codes[j] & 15 | codes[j + 16] << 4;
                }
            }
            KvType::Q6 => {
                for j in 0..8 {
                    let part = |at: usize| codes[j + 8 * at] >> 2 & 3;
                    lower[j] = part(0) | part(1) << 2 | part(2) << 4 | part(3) << 6;
                }
            }
            _ => {
                for j in 0..4 {
                    lower[j] = (0..8).fold(0, |byte, at| byte | (codes[j + 4 * at] >> 3 & 1) << at);
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// See [`super::Arch::load_kv`].
#[inline(always)]
pub(super) fn load(kind: KvType, block: &[u8], dim: usize, rows: &mut [f32]) {
    match kind {
        KvType::F32 => rows.copy_from_slice(&bytemuck::cast_slice(block)[..rows.len()]),
        KvType::F16 => {
            let from: &[f16] = bytemuck::cast_slice(block);
            rows.iter_mut()
                .zip(from)
                .for_each(|(x, y)| *x = f16_to_f32(*y));
        }
        KvType::Bf16 => {
            let from: &[u16] = bytemuck::cast_slice(block);
            rows.iter_mut().zip(from).for_each(|(x, y)| *x = widen(*y));
        }
        KvType::Q8 => dequantize(kind, block, dim, rows, |upper, lower: &[u8; 16], half| {
            arrays::from_fn(|j| {
                let (u, l) = (upper[j], lower[j]);
                if half == 0 {
                    u << 4 | l & 15
                } else {
                    u & 0xf0 | l >> 4
                }
            })
        }),
        KvType::Q6 => dequantize(kind, block, dim, rows, |upper, lower: &[u8; 8], half| {
            arrays::from_fn(|j| {
                let l = lower[j % 8] >> (4 * half + 2 * (j / 8)) & 3;
                (upper[j] >> (4 * half) & 15) << 2 | l
            })
        }),
        KvType::Q5 => dequantize(kind, block, dim, rows, |upper, lower: &[u8; 4], half| {
            arrays::from_fn(|j| {
                let l = lower[j % 4] >> (4 * half + j / 4) & 1;
                (upper[j] >> (4 * half) & 15) << 1 | l
            })
        }),
        KvType::Q4 => dequantize(kind, block, dim, rows, |upper, _: &[u8; 0], half| {
            arrays::from_fn(|j| upper[j] >> (4 * half) & 15)
        }),
    }
}

/// Widens a number inline; `half` would make a function call.
#[inline(always)]
fn f16_to_f32(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7fff);
    // The factor 2¹¹² corrects the exponent, and normalises denormals.
    let x = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let x = if magnitude >= 0x7c00 {
        f32::from_bits(0x7f80_0000 | magnitude << 13)
    } else {
        x
    };
    f32::from_bits(x.to_bits() | sign)
}

/// Dequantises `rows`; `codes` extracts half a group's codes from its planes.
#[inline(always)]
fn dequantize<const LOWER: usize>(
    kind: KvType,
    block: &[u8],
    dim: usize,
    rows: &mut [f32],
    codes: impl Fn(&[u8; UPPER], &[u8; LOWER], usize) -> [u8; UPPER],
) {
    let [upper_row, lower_row, scale_row] = kind.row_bytes(dim);
    let (upper, rest) = block.split_at(KV_BLOCK * upper_row);
    let (lower, scales) = rest.split_at(KV_BLOCK * lower_row);
    let unit = (1 << (8 - kind.bits())) as f32;
    let middle = ((1 << kind.bits()) - 1) as f32 / 2.0;
    for (i, row) in rows.chunks_exact_mut(dim).enumerate() {
        let (upper, lower) = (&upper[i * upper_row..], &lower[i * lower_row..]);
        let scales = &scales[i * scale_row..][..scale_row];
        for (g, (x, scale)) in row
            .chunks_mut(GROUP)
            .zip(scales.chunks_exact(SCALE))
            .enumerate()
        {
            let scale = widen(u16::from_le_bytes([scale[0], scale[1]])) * unit;
            let upper = upper[g * UPPER..][..UPPER].try_into().expect("a group");
            let lower = lower[g * LOWER..][..LOWER].try_into().expect("a group");
            if let Ok(x) = <&mut [f32; GROUP]>::try_from(&mut *x) {
                for half in 0..2 {
                    let codes = codes(upper, lower, half);
                    for j in 0..UPPER {
                        x[half * UPPER + j] = (f32::from(codes[j]) - middle) * scale;
                    }
                }
            } else {
                for (j, x) in x.iter_mut().enumerate() {
                    *x = (f32::from(codes(upper, lower, j / UPPER)[j % UPPER]) - middle) * scale;
                }
            }
        }
    }
}
