//! Weights as tiles of bf16 need them: 32 values of a row in 64 bytes, in order.
//!
//! A group of 32 weights of 4 bits has only 16 values (of 5 bits, 32): they are computed and
//! rounded once, and the weights look theirs up. `vpermb` looks up in 64 bytes, 32 numbers or two
//! tables of 16, and a byte of its indices is made of a nibble by a rotation and a mask; the two
//! bytes of a number have indices that differ in the lowest bit. Other formats go through `f32`.

use crate::arch::arrays;
use crate::arch::x86::avx2::unpack::{
    Factors, Groups, f16_value, load128, load256, scales_mins_bytes,
};
use crate::arch::x86::avx512_bf16::gemm::{self as avx512_bf16, bf16_pairs};
use crate::quant::*;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Values of a row of a tile.
pub(super) const GROUP: usize = 32;
/// Words per tile row, and rows per tile.
pub(super) const LANES: usize = 16;

/// Values per super-block, which are unpacked at a time.
pub(super) const DEPTH: usize = 256;
/// A row of a panel: groups of bf16 pairs.
pub(super) type PanelRow = [[u32; LANES]; DEPTH / GROUP];

/// A format as operands of tile products.
pub(super) trait UnpackTile {
    /// Number of bf16 numbers that sum up to a weight: one or two.
    const PARTS: usize;
    /// Number of bf16 numbers that sum up to an activation: one, or three, which represent an `f32`
    /// exactly.
    const X_PARTS: usize;

    /// Values that are unpacked at a time and fill a [`PanelRow`].
    const VALUES: usize = DEPTH / Self::PARTS;

    /// Writes the values of `bytes`, `VALUES` of them; part `p` of group `g` to the words of group
    /// `g·PARTS + p`.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut PanelRow);
}

/// Blocks with scales computed for 256 values at a time.
pub(super) trait Scaled: Groups {
    /// Values that share a scale and an offset, in halves of a group.
    const HALVES: usize;

    /// Factors of one super-block, or of eight blocks of one group, in their order.
    ///
    /// # Safety
    /// The CPU must have the level's features.
    unsafe fn scales(blocks: &[Self]) -> Factors;
}

/// Blocks with a scale and perhaps an offset in f16.
macro_rules! small {
    ($($block:ident: $offset:tt;)*) => {$(
        impl Scaled for $block {
            const HALVES: usize = 2;

            #[inline]
            #[target_feature(enable = "avx512f,f16c")]
            unsafe fn scales(blocks: &[Self]) -> Factors {
                let scale = f16_values(blocks, |b| b.d);
                let offset = small!(offset $offset, scale, blocks);
                Factors { scale: floats(scale), offset: floats(offset) }
            }
        }
    )*};
    (offset m, $scale:ident, $blocks:ident) => { f16_values($blocks, |b| b.m) };
    (offset ($zero:expr), $scale:ident, $blocks:ident) => { _mm512_mul_ps($scale, _mm512_set1_ps($zero)) };
}
small! {
    BlockQ4_0: (-8.0);
    BlockQ4_1: m;
    BlockQ5_0: (-16.0);
    BlockQ5_1: m;
}

/// Formats without offsets.
macro_rules! unshifted {
    ($($block:ident: $halves:literal, |$blocks:ident| $scale:expr;)*) => {$(
        impl Scaled for $block {
            const HALVES: usize = $halves;

            #[inline]
            #[target_feature(enable = "avx512f,f16c")]
            unsafe fn scales($blocks: &[Self]) -> Factors {
                Factors { scale: $scale, offset: [0.0; 16] }
            }
        }
    )*};
}
unshifted! {
    BlockQ8_0: 2, |blocks| floats(f16_values(blocks, |b| b.d));
    BlockIq4Nl: 2, |blocks| floats(f16_values(blocks, |b| b.d));
    BlockMxfp4: 2, |blocks| arrays::from_fn(|i| blocks[i % 8].half_scale());
}

/// Blocks of several groups with one scale.
macro_rules! medium {
    ($($block:ident: $halves:literal;)*) => {$(
        impl Scaled for $block {
            const HALVES: usize = $halves;

            #[inline]
            #[target_feature(enable = "avx512f,f16c")]
            unsafe fn scales(blocks: &[Self]) -> Factors {
                let mut scale = [0.0; 16];
                for (scale, b) in scale.iter_mut().zip(blocks) {
                    *scale = f16_value(b.d);
                }
                Factors { scale, offset: [0.0; 16] }
            }
        }
    )*};
}
medium! {
    BlockQ1_0: 8;
    BlockQ2_0: 4;
}

/// Super-blocks.
macro_rules! large {
    ($($block:ident: $halves:literal, $scales:expr;)*) => {$(
        impl Scaled for $block {
            const HALVES: usize = $halves;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,f16c")]
            unsafe fn scales(blocks: &[Self]) -> Factors {
                // SAFETY: this level includes AVX2 and F16C.
                unsafe { $scales(&blocks[0]) }
            }
        }
    )*};
}
large! {
    BlockQ2K: 1, Groups::factors;
    BlockQ3K: 1, Groups::factors;
    BlockQ6K: 1, Groups::factors;
    BlockIq4Xs: 1, Groups::factors;
    BlockTq2_0: 1, Groups::factors;
}

/// The f16 numbers of eight blocks, combined in general registers: the vector units are busy
/// enough.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
fn f16_values<B>(blocks: &[B], field: impl Fn(&B) -> [u8; 2]) -> __m512 {
    let mut words = [0u64; 2];
    for (i, b) in blocks[..8].iter().enumerate() {
        words[i / 4] |= u64::from(u16::from_le_bytes(field(b))) << (16 * (i % 4));
    }
    _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_set_epi64x(
        words[1] as i64,
        words[0] as i64,
    )))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn floats(x: __m512) -> [f32; 16] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}

/// `*x` in all lanes, loaded from memory: that needs none of the ports that shuffles and lookups
/// wait for. The compiler would shuffle.
#[inline]
#[target_feature(enable = "avx512f")]
fn splat(x: &f32) -> __m512 {
    let all;
    // SAFETY: the address of a number.
    unsafe {
        std::arch::asm!("vbroadcastss {all}, dword ptr [{x}]", all = lateout(zmm_reg) all, x = in(reg) x,
            options(pure, readonly, nostack, preserves_flags));
    }
    all
}

/// Formats that are expanded to `f32` first.
pub(super) struct Widened<B>(PhantomData<B>);

impl<B: Scaled> UnpackTile for Widened<B> {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        let blocks: &[B] = &bytemuck::cast_slice(bytes)[..8 / B::GROUPS];
        // SAFETY: the caller's promise.
        let Factors { scale, offset } = unsafe { B::scales(blocks) };
        for g in 0..8 {
            // SAFETY: this level includes AVX2.
            let q = unsafe { blocks[g / B::GROUPS].bytes(g % B::GROUPS) };
            let halves = [_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q)];
            let mut values = [_mm512_setzero_ps(); 2];
            for (half, value) in values.iter_mut().enumerate() {
                let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[half]));
                let at = (2 * g + half) / B::HALVES;
                *value = _mm512_fmadd_ps(splat(&scale[at]), q, splat(&offset[at]));
            }
            store(&mut out[g], bf16_pairs(values));
        }
    }
}

/// Any format of blocks, through `f32`.
pub(super) enum Dequantized {}

impl UnpackTile for Dequantized {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
    unsafe fn unpack(dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        avx512_bf16::unpack(dtype, bytes, out.as_flattened_mut());
    }
}

/// Groups with the first 16 weights in low nibbles and the others in high ones.
pub(super) struct Halves<B>(PhantomData<B>);

/// Value of a nibble, before scale and offset, and the place of group `g`'s nibbles.
pub(super) trait Nibbles: Scaled {
    const VALUES: [i8; 16];
    fn nibbles(&self, g: usize) -> &[u8; 16];
}

macro_rules! nibbles {
    ($($block:ident: $values:expr, |$b:ident, $g:ident| $nibbles:expr;)*) => {$(
        impl Nibbles for $block {
            const VALUES: [i8; 16] = $values;

            #[inline]
            fn nibbles(&self, $g: usize) -> &[u8; 16] {
                let $b = self;
                $nibbles
            }
        }
    )*};
}
const COUNT: [i8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
nibbles! {
    BlockQ4_0: COUNT, |b, _g| &b.qs;
    BlockQ4_1: COUNT, |b, _g| &b.qs;
    BlockIq4Nl: IQ4_VALUES, |b, _g| &b.qs;
    BlockMxfp4: MXFP4_VALUES, |b, _g| &b.qs;
    BlockIq4Xs: IQ4_VALUES, |b, g| b.qs[16 * g..].first_chunk().unwrap_or(&[0; 16]);
}

impl<B: Nibbles> UnpackTile for Halves<B> {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        let values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(&B::VALUES)));
        let twice = load_bytes(&const { twice(16) });
        // The low nibbles go up by a bit, the high ones down by three.
        let rotation = _mm512_mask_mov_epi32(_mm512_set1_epi32(1), 0xff00, _mm512_set1_epi32(29));
        let blocks: &[B] = &bytemuck::cast_slice(bytes)[..8 / B::GROUPS];
        // SAFETY: the caller's promise.
        let Factors { scale, offset } = unsafe { B::scales(blocks) };
        for pair in 0..4 {
            let mut tables = [values; 2];
            for (j, table) in tables.iter_mut().enumerate() {
                let at = 2 * (2 * pair + j) / B::HALVES;
                *table = _mm512_fmadd_ps(splat(&scale[at]), values, splat(&offset[at]));
            }
            let table = bf16_pairs(tables);
            for j in 0..2 {
                let g = 2 * pair + j;
                let qs = load128(blocks[g / B::GROUPS].nibbles(g % B::GROUPS));
                let qs = _mm512_permutexvar_epi8(twice, _mm512_castsi128_si512(qs));
                let qs = indices(_mm512_rolv_epi32(qs, rotation), j);
                store(&mut out[g], _mm512_permutexvar_epi8(qs, table));
            }
        }
    }
}

/// Byte `i` is `i/2`, counted modulo `n`: each index byte, twice.
const fn twice(n: usize) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < 64 {
        bytes[i] = (i / 2 % n) as u8;
        i += 1;
    }
    bytes
}

/// Byte indices into table `which` of the numbers that bits 1 to 4 of each byte select.
#[inline]
#[target_feature(enable = "avx512f")]
fn indices(x: __m512i, which: usize) -> __m512i {
    let rest = _mm512_set1_epi16(if which == 0 { 0x0100 } else { 0x2120 });
    // (x & mask) | rest
    _mm512_ternarylogic_epi32::<0xEA>(x, _mm512_set1_epi8(0x1e), rest)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_bytes(x: &[u8; 64]) -> __m512i {
    // SAFETY: array and register have the same size.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [u32; LANES], x: __m512i) {
    // SAFETY: array and register have the same size.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) };
}

/// `0, 1, … 15`, plus `first`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn count(first: f32) -> __m512 {
    let count = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(&COUNT)));
    _mm512_add_ps(count, _mm512_set1_ps(first))
}

/// The sub-blocks' `d·sc` and `−dmin·m`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> Factors {
    let [sc, m] = scales_mins_bytes(packed);
    let (sc, m) = (_mm_cvtsi64_si128(sc as i64), _mm_cvtsi64_si128(m as i64));
    let sc = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sc));
    let m = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(m));
    Factors {
        scale: floats(_mm512_mul_ps(_mm512_set1_ps(f16_value(d)), sc)),
        offset: floats(_mm512_mul_ps(_mm512_set1_ps(-f16_value(dmin)), m)),
    }
}

impl UnpackTile for BlockQ4K {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        let (values, twice) = (count(0.0), load_bytes(&const { twice(64) }));
        let b: &BlockQ4K = bytemuck::from_bytes(bytes);
        {
            let Factors { scale, offset } = scales_mins(b.d, b.dmin, &b.scales);
            for pair in 0..4 {
                let mut tables = [values; 2];
                for (j, table) in tables.iter_mut().enumerate() {
                    let g = 2 * pair + j;
                    *table = _mm512_fmadd_ps(splat(&scale[g]), values, splat(&offset[g]));
                }
                let table = bf16_pairs(tables);
                let qs = _mm512_castsi256_si512(load256(&b.qs[32 * pair..][..32]));
                let qs = _mm512_permutexvar_epi8(twice, qs);
                let low = _mm512_permutexvar_epi8(indices(_mm512_rol_epi32::<1>(qs), 0), table);
                let high = _mm512_permutexvar_epi8(indices(_mm512_rol_epi32::<29>(qs), 1), table);
                store(&mut out[2 * pair], low);
                store(&mut out[2 * pair + 1], high);
            }
        }
    }
}

impl UnpackTile for BlockQ5K {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        let (values, twice) = ([count(0.0), count(16.0)], load_bytes(&const { twice(64) }));
        let b: &BlockQ5K = bytemuck::from_bytes(bytes);
        {
            let Factors { scale, offset } = scales_mins(b.d, b.dmin, &b.scales);
            let fifths = _mm512_permutexvar_epi8(twice, _mm512_castsi256_si512(load256(&b.qh)));
            for g in 0..8 {
                let qs = _mm512_castsi256_si512(load256(&b.qs[g / 2 * 32..][..32]));
                let qs = _mm512_permutexvar_epi8(twice, qs);
                let rotation = if g % 2 == 0 { 1 } else { 29 };
                let qs = indices(_mm512_rolv_epi32(qs, _mm512_set1_epi32(rotation)), 0);
                // Bit `g` of the fifths goes to bit 5.
                let fifths = _mm512_rolv_epi32(fifths, _mm512_set1_epi32((5 - g as i32) & 31));
                // qs | (fifths & mask)
                let qs = _mm512_ternarylogic_epi32::<0xF8>(qs, fifths, _mm512_set1_epi8(0x20));
                store(&mut out[g], look_up_32(qs, &scale[g], &offset[g], values));
            }
        }
    }
}

/// One group with a table of its own.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
fn look_up_32(indices: __m512i, scale: &f32, offset: &f32, values: [__m512; 2]) -> __m512i {
    let (scale, offset) = (splat(scale), splat(offset));
    let (low, high) = (
        _mm512_fmadd_ps(scale, values[0], offset),
        _mm512_fmadd_ps(scale, values[1], offset),
    );
    _mm512_permutexvar_epi8(indices, bf16_pairs([low, high]))
}

/// Groups of [`Halves`] with a fifth bit of each weight.
pub(super) struct FiveBits<B>(PhantomData<B>);

pub(super) trait Fifths: Scaled {
    fn parts(&self) -> (&[u8; 16], [u8; 4]);
}

impl Fifths for BlockQ5_0 {
    #[inline]
    fn parts(&self) -> (&[u8; 16], [u8; 4]) {
        (&self.qs, self.qh)
    }
}

impl Fifths for BlockQ5_1 {
    #[inline]
    fn parts(&self) -> (&[u8; 16], [u8; 4]) {
        (&self.qs, self.qh)
    }
}

impl<B: Fifths> UnpackTile for FiveBits<B> {
    const PARTS: usize = 1;
    const X_PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,f16c")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        let (values, bytes_twice) = ([count(0.0), count(16.0)], load_bytes(&const { twice(16) }));
        let rotation = _mm512_mask_mov_epi32(_mm512_set1_epi32(1), 0xff00, _mm512_set1_epi32(29));
        let blocks: &[B] = &bytemuck::cast_slice(bytes)[..8];
        // SAFETY: the caller's promise.
        let Factors { scale, offset } = unsafe { B::scales(blocks) };
        for (g, b) in blocks.iter().enumerate() {
            let (qs, qh) = b.parts();
            let qs = _mm512_permutexvar_epi8(bytes_twice, _mm512_castsi128_si512(load128(qs)));
            let qs = indices(_mm512_rolv_epi32(qs, rotation), 0);
            let qs =
                _mm512_mask_add_epi16(qs, u32::from_le_bytes(qh), qs, _mm512_set1_epi16(0x2020));
            store(&mut out[g], look_up_32(qs, &scale[g], &offset[g], values));
        }
    }
}

/// Weights that are bf16 themselves.
pub(super) enum Bf16 {}

impl UnpackTile for Bf16 {
    const PARTS: usize = 1;
    const X_PARTS: usize = 3;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        for (i, x) in bytes.as_chunks::<64>().0.iter().enumerate() {
            store(&mut out[i], load_bytes(x));
        }
    }
}

pub(super) enum F16 {}

impl UnpackTile for F16 {
    const PARTS: usize = 2;
    const X_PARTS: usize = 3;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn unpack(_dtype: DType, bytes: &[u8], out: &mut PanelRow) {
        for (x, out) in bytes
            .as_chunks::<64>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<2>().0)
        {
            let x = load_bytes(x);
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(x));
            let [hi, lo] = split([low, high]);
            store(&mut out[0], hi);
            store(&mut out[1], lo);
        }
    }
}

/// 32 values as sums of bf16 numbers, the largest part first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn split<const PARTS: usize>(mut rest: [__m512; 2]) -> [__m512i; PARTS] {
    let mut parts = [_mm512_setzero_si512(); PARTS];
    for part in &mut parts {
        *part = bf16_pairs(rest);
        let widened = [
            _mm512_castsi512_si256(*part),
            _mm512_extracti64x4_epi64::<1>(*part),
        ];
        for i in 0..2 {
            let part = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(widened[i]));
            rest[i] = _mm512_sub_ps(rest[i], _mm512_castsi512_ps(part));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounded values of any bytes.
    #[test]
    fn as_rounded_from_f32() {
        let has_bf16 = (crate::arch::x86::avx512::KERNELS.supported)()
            && is_x86_feature_detected!("avx512bf16");
        if !has_bf16 || !is_x86_feature_detected!("avx512vbmi") {
            return;
        }
        let cases: [(DType, unsafe fn(DType, &[u8], &mut PanelRow)); 15] = [
            (DType::Q4_0, Halves::<BlockQ4_0>::unpack),
            (DType::Q4_1, Halves::<BlockQ4_1>::unpack),
            (DType::IQ4_NL, Halves::<BlockIq4Nl>::unpack),
            (DType::IQ4_XS, Halves::<BlockIq4Xs>::unpack),
            (DType::MXFP4, Halves::<BlockMxfp4>::unpack),
            (DType::Q4_K, BlockQ4K::unpack),
            (DType::Q5_K, BlockQ5K::unpack),
            (DType::Q5_0, FiveBits::<BlockQ5_0>::unpack),
            (DType::Q5_1, FiveBits::<BlockQ5_1>::unpack),
            (DType::Q8_0, Widened::<BlockQ8_0>::unpack),
            (DType::Q6_K, Widened::<BlockQ6K>::unpack),
            (DType::TQ2_0, Widened::<BlockTq2_0>::unpack),
            (DType::Q1_0, Widened::<BlockQ1_0>::unpack),
            (DType::Q2_0, Widened::<BlockQ2_0>::unpack),
            (DType::IQ2_S, Dequantized::unpack),
        ];
        let mut seed = 1u64;
        let mut random = || {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        };
        for (dtype, unpack) in cases {
            let f = dtype.float_format();
            for _ in 0..1000 {
                let bytes: Vec<u8> = (0..DEPTH / f.block_elems * f.block_bytes)
                    .map(|_| random())
                    .collect();
                let (mut found, mut expected) =
                    ([[0; LANES]; DEPTH / GROUP], [[0; LANES]; DEPTH / GROUP]);
                // SAFETY: the CPU has the features.
                unsafe { unpack(dtype, &bytes, &mut found) };
                // SAFETY: as above.
                unsafe { avx512_bf16::unpack(dtype, &bytes, expected.as_flattened_mut()) };
                assert_eq!(found, expected, "{dtype}");
            }
        }
    }
}
