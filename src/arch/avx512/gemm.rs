//! Products with many activation rows: the packing, unpacking and register tiles of this level.
//!
//! Block-quantised weights are multiplied as bf16: `vdpbf16ps` does twice the products of an `f32`
//! multiply-add, and rounding weights and activations to 2⁻⁹ costs a fraction of what 8-bit
//! activations do. Intel's cores run it at a quarter of the rate of `f32` multiply-adds (measured
//! on Sapphire Rapids), so there the same weights go through `f32` panels, as do F32, F16 and BF16
//! weights everywhere, to stay exact.

use crate::arch::Gemm;
use crate::arch::gemm::{BLOCK, Panels, table};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;
use std::sync::OnceLock;

pub(super) fn gemm_for(dtype: DType) -> Gemm {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => const { table::<F32>(MIN_ROWS) },
        _ if fast_bf16() => const { table::<Bf16>(MIN_ROWS) },
        _ => const { table::<F32>(MIN_ROWS) },
    }
}

/// Whether `vdpbf16ps` issues as often as an `f32` multiply-add. By vendor instead of by timing, so
/// that results do not depend on a clock; asked once, as a virtual machine traps the question.
fn fast_bf16() -> bool {
    static FAST: OnceLock<bool> = OnceLock::new();
    *FAST.get_or_init(|| {
        #[allow(unused_unsafe)] // unsafe up to Rust 1.93
        // SAFETY: every x86-64 CPU has the instruction.
        let vendor = unsafe { __cpuid(0) };
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() != b"GenuineIntel"
    })
}

/// From here on panels beat the integer products of `matmul.rs`.
const MIN_ROWS: usize = 16;

/// Panels of bf16 pairs.
enum Bf16 {}

/// Panels of `f32`.
enum F32 {}

macro_rules! panels {
    ($name:ident, $bf16:literal, $per_word:literal) => {
        impl Panels for $name {
            const PER_WORD: usize = $per_word;
            const LANES: usize = LANES;
            const VECS: usize = 3;
            const DEPTH: usize = 128;

            fn rows(vecs: usize) -> usize {
                if vecs == 1 { 16 } else { 8 }
            }

            unsafe fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
                // SAFETY: the caller's promise.
                unsafe { pack::<$bf16>(x, k, packed) }
            }

            unsafe fn unpack(dtype: DType, blocks: &[u8], out: *mut u32) {
                // SAFETY: the caller's promise.
                unsafe { unpack::<$bf16>(dtype, blocks, out) }
            }

            unsafe fn tile(
                vecs: usize,
                w: *const u32,
                x: *const u32,
                x_stride: usize,
                words: usize,
                sums: *mut f32,
                first: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match vecs {
                        1 => tile::<$bf16, 1, 16>(w, x, x_stride, words, sums, first),
                        2 => tile::<$bf16, 2, 8>(w, x, x_stride, words, sums, first),
                        _ => tile::<$bf16, 3, 8>(w, x, x_stride, words, sums, first),
                    }
                }
            }

            unsafe fn transpose(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
                // SAFETY: the caller's promise.
                unsafe { store_transposed(sums, y, stride, rows, cols) }
            }
        }
    };
}
panels!(Bf16, true, 2);
panels!(F32, false, 1);

/// 32-bit words of a register.
const LANES: usize = 16;
/// Weight rows between two registers of activations in the sums.
const TILE: usize = crate::arch::gemm::TILE;

/// Words between rows of a panel.
const fn row_words(bf16: bool) -> usize {
    if bf16 { BLOCK / 2 } else { BLOCK }
}

/// `VECS` registers of activations times `ROWS` weight rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const BF16: bool, const VECS: usize, const ROWS: usize>(
    w: *const u32,
    x: *const u32,
    x_stride: usize,
    words: usize,
    sums: *mut f32,
    first: bool,
) {
    let mut acc = [[_mm512_setzero_ps(); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { _mm512_loadu_ps(sums.add((v * TILE + r) * LANES)) };
            }
        }
    }
    for i in 0..words {
        let mut xs = [_mm512_setzero_si512(); VECS];
        for v in 0..VECS {
            // SAFETY: word `i` of the rows in register `v`.
            xs[v] = unsafe { _mm512_loadu_si512(x.add(v * x_stride + i * LANES).cast()) };
        }
        for r in 0..ROWS {
            // SAFETY: word `i` of row `r`.
            let w = _mm512_set1_epi32(unsafe { *w.add(r * row_words(BF16) + i) } as i32);
            for v in 0..VECS {
                acc[r][v] = multiply_add::<BF16>(w, xs[v], acc[r][v]);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_add<const BF16: bool>(a: __m512i, b: __m512i, sum: __m512) -> __m512 {
    if BF16 {
        // SAFETY: all three are 512 bits.
        let (a, b) = unsafe { (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b)) };
        _mm512_dpbf16_ps(sum, a, b)
    } else {
        _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack<const BF16: bool>(x: &[f32], k: usize, packed: &mut [u32]) {
    let per_word = if BF16 { 2 } else { 1 };
    let words = k / per_word;
    for (c, packed) in packed.chunks_mut(LANES * LANES).enumerate() {
        let mut rows = [_mm512_setzero_si512(); LANES];
        let n = LANES.min(words - c * LANES) * per_word;
        for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
            let x = &x[c * LANES * per_word..][..n];
            let [low, high] = load_f32(x);
            *row = if BF16 { bf16_pairs(low, high) } else { _mm512_castps_si512(low) };
        }
        for (word, out) in transpose(rows).into_iter().zip(packed.as_chunks_mut::<LANES>().0) {
            // SAFETY: as many bytes.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), word) };
        }
    }
}

/// At most 32 values, zeros behind them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_f32(x: &[f32]) -> [__m512; 2] {
    let mask = ((1u64 << x.len().min(32)) - 1) as u32;
    // SAFETY: the masks leave out what lies behind `x`.
    unsafe {
        let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, x.as_ptr().wrapping_add(16));
        [_mm512_maskz_loadu_ps(mask as u16, x.as_ptr()), high]
    }
}

/// Rounds to nearest even.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_pairs(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both are 512 bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn store_transposed(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
    let mut tile = [_mm512_setzero_si512(); LANES];
    for (r, row) in tile.iter_mut().enumerate().take(cols) {
        // SAFETY: a row of the sums.
        *row = unsafe { _mm512_loadu_si512(sums.add(r * LANES).cast()) };
    }
    let mask = ((1u32 << cols) - 1) as u16;
    for (i, row) in transpose(tile).into_iter().enumerate().take(rows) {
        // SAFETY: `cols` values of row `i`.
        unsafe { _mm512_mask_storeu_ps(y.add(i * stride), mask, _mm512_castsi512_ps(row)) };
    }
}

/// Word `i` of row `j` becomes word `j` of row `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(a: [__m512i; 16]) -> [__m512i; 16] {
    let mut b = a;
    for i in (0..16).step_by(2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    // In each 128-bit lane `l`, `c[4g + j]` has word `4l + j` of the rows `4g..4g + 4`.
    let mut c = b;
    for i in (0..16).step_by(4) {
        c[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // What is left is to transpose the 4 × 4 lanes of the registers `j, 4 + j, 8 + j, 12 + j`.
    let mut d = c;
    for j in 0..4 {
        let (even_low, odd_low) =
            (_mm512_shuffle_i32x4::<0b10_00_10_00>(c[j], c[4 + j]), _mm512_shuffle_i32x4::<0b11_01_11_01>(c[j], c[4 + j]));
        let (even_high, odd_high) = (
            _mm512_shuffle_i32x4::<0b10_00_10_00>(c[8 + j], c[12 + j]),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(c[8 + j], c[12 + j]),
        );
        d[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high);
        d[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high);
        d[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high);
        d[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high);
    }
    d
}

/// Where a row of the panel goes.
#[derive(Clone, Copy)]
struct Out<const BF16: bool>(*mut u32);

impl<const BF16: bool> Out<BF16> {
    /// Words of 32 values.
    const GROUP: usize = if BF16 { 16 } else { 32 };

    /// Writes the values `32·g..32·g + 32`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn put(self, g: usize, [low, high]: [__m512; 2]) {
        let out = self.0.wrapping_add(g * Self::GROUP);
        // SAFETY: the panel has room for the blocks that are unpacked.
        unsafe {
            if BF16 {
                _mm512_storeu_si512(out.cast(), bf16_pairs(low, high));
            } else {
                _mm512_storeu_ps(out.cast(), low);
                _mm512_storeu_ps(out.wrapping_add(16).cast(), high);
            }
        }
    }
}

/// Expands a row's blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn unpack<const BF16: bool>(dtype: DType, bytes: &[u8], out: *mut u32) {
    let out = Out::<BF16>(out);
    match dtype {
        DType::F32 => plain(dtype, bytes, out, |x: &[[u8; 4]; 32], out| {
            let (low, high) = x.split_at(16);
            out.put(0, [_mm512_castsi512_ps(load512(low)), _mm512_castsi512_ps(load512(high))]);
        }),
        DType::F16 => plain(dtype, bytes, out, |x: &[[u8; 2]; 32], out| {
            let (low, high) = x.split_at(16);
            out.put(0, [_mm512_cvtph_ps(load256(low)), _mm512_cvtph_ps(load256(high))]);
        }),
        DType::BF16 => plain(dtype, bytes, out, |x: &[[u8; 2]; 32], out| {
            let (low, high) = x.split_at(16);
            let widen = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)));
            out.put(0, [widen(load256(low)), widen(load256(high))]);
        }),
        DType::Q4_0 => each::<BF16, 1, _>(bytes, out, |b: &BlockQ4_0, out| {
            let q = _mm512_sub_ps(sixteen(&IOTA), _mm512_set1_ps(8.0));
            out.put(0, nibbles(&b.qs, _mm512_mul_ps(_mm512_set1_ps(f16_value(b.d)), q)));
        }),
        DType::Q4_1 => each::<BF16, 1, _>(bytes, out, |b: &BlockQ4_1, out| {
            out.put(0, nibbles(&b.qs, affine(sixteen(&IOTA), f16_value(b.d), f16_value(b.m))));
        }),
        DType::Q5_0 => each::<BF16, 1, _>(bytes, out, |b: &BlockQ5_0, out| {
            let d = f16_value(b.d);
            out.put(0, scaled(five_bits(&b.qs, b.qh), [d; 2], [-16.0 * d; 2]));
        }),
        DType::Q5_1 => each::<BF16, 1, _>(bytes, out, |b: &BlockQ5_1, out| {
            out.put(0, scaled(five_bits(&b.qs, b.qh), [f16_value(b.d); 2], [f16_value(b.m); 2]));
        }),
        DType::Q8_0 => each::<BF16, 1, _>(bytes, out, |b: &BlockQ8_0, out| {
            let d = _mm512_set1_ps(f16_value(b.d));
            let (low, high) = b.qs.split_at(16);
            let value = |q| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)));
            out.put(0, [value(load128(low)), value(load128(high))]);
        }),
        DType::IQ4_NL => each::<BF16, 1, _>(bytes, out, |b: &BlockIq4Nl, out| {
            out.put(0, nibbles(&b.qs, affine(sixteen(&IQ4_VALUES), f16_value(b.d), 0.0)));
        }),
        DType::MXFP4 => each::<BF16, 1, _>(bytes, out, |b: &BlockMxfp4, out| {
            out.put(0, nibbles(&b.qs, affine(sixteen(&MXFP4_VALUES), b.half_scale(), 0.0)));
        }),
        DType::IQ4_XS => each::<BF16, 8, _>(bytes, out, |b: &BlockIq4Xs, out| {
            let (d, high) = (f16_value(b.d), u16::from_le_bytes(b.scales_h));
            for (s, qs) in b.qs.as_chunks().0.iter().enumerate() {
                let sc = b.scales_l[s / 2] as u32 >> (s % 2 * 4) & 15 | (high as u32 >> (2 * s) & 3) << 4;
                out.put(s, nibbles(qs, affine(sixteen(&IQ4_VALUES), d * (sc as f32 - 32.0), 0.0)));
            }
        }),
        DType::Q2_K => each::<BF16, 8, _>(bytes, out, |b: &BlockQ2K, out| {
            let (d, dmin) = (f16_value(b.d), -f16_value(b.dmin));
            for g in 0..8 {
                let q = two_bits(&b.qs, g);
                let sc = |i: usize| b.scales[2 * g + i];
                let scale = [d * (sc(0) & 15) as f32, d * (sc(1) & 15) as f32];
                out.put(g, scaled(q, scale, [dmin * (sc(0) >> 4) as f32, dmin * (sc(1) >> 4) as f32]));
            }
        }),
        DType::Q3_K => each::<BF16, 8, _>(bytes, out, |b: &BlockQ3K, out| {
            let d = f16_value(b.d);
            let sc = unpack_scales_q3_k(&b.scales);
            for g in 0..8 {
                let high = _mm256_test_epi8_mask(load256(&b.hmask), _mm256_set1_epi8(1 << g));
                let q = _mm256_or_si256(two_bits(&b.qs, g), _mm256_maskz_set1_epi8(high, 4));
                let scale = [d * sc[2 * g] as f32, d * sc[2 * g + 1] as f32];
                out.put(g, scaled(q, scale, scale.map(|s| -4.0 * s)));
            }
        }),
        DType::Q4_K => each::<BF16, 8, _>(bytes, out, |b: &BlockQ4K, out| {
            let (scale, min) = scales_mins(b.d, b.dmin, &b.scales);
            for (p, qs) in b.qs.as_chunks::<32>().0.iter().enumerate() {
                let (low, high) = qs.split_at(16);
                let (low, high) = (_mm512_cvtepu8_epi32(load128(low)), _mm512_cvtepu8_epi32(load128(high)));
                let table = |s: usize| affine(sixteen(&IOTA), scale[s], min[s]);
                let (even, odd) = (table(2 * p), table(2 * p + 1));
                // The permutation looks at no more than four bits.
                out.put(2 * p, [_mm512_permutexvar_ps(low, even), _mm512_permutexvar_ps(high, even)]);
                let (low, high) = (_mm512_srli_epi32::<4>(low), _mm512_srli_epi32::<4>(high));
                out.put(2 * p + 1, [_mm512_permutexvar_ps(low, odd), _mm512_permutexvar_ps(high, odd)]);
            }
        }),
        DType::Q5_K => each::<BF16, 8, _>(bytes, out, |b: &BlockQ5K, out| {
            let (scale, min) = scales_mins(b.d, b.dmin, &b.scales);
            for g in 0..8 {
                let high = _mm256_test_epi8_mask(load256(&b.qh), _mm256_set1_epi8(1 << g));
                let qs = load256(&b.qs[g / 2 * 32..][..32]);
                let low = if g % 2 == 0 { qs } else { _mm256_srli_epi16::<4>(qs) };
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let q = _mm256_or_si256(low, _mm256_maskz_set1_epi8(high, 16));
                out.put(g, scaled(q, [scale[g]; 2], [min[g]; 2]));
            }
        }),
        DType::Q6_K => each::<BF16, 8, _>(bytes, out, |b: &BlockQ6K, out| {
            let sc = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(&b.scales)));
            let scale: [f32; 16] = array(_mm512_mul_ps(sc, _mm512_set1_ps(f16_value(b.d))));
            for g in 0..8 {
                let ql = load256(&b.ql[g / 4 * 64 + g % 2 * 32..][..32]);
                let low = if g % 4 < 2 { ql } else { _mm256_srli_epi16::<4>(ql) };
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let q = _mm256_or_si256(low, _mm256_slli_epi16::<4>(two_bits(&b.qh, g)));
                let q = _mm256_sub_epi8(q, _mm256_set1_epi8(32));
                out.put(g, scaled(q, [scale[2 * g], scale[2 * g + 1]], [0.0; 2]));
            }
        }),
        _ => dequantized(dtype, bytes, out),
    }
}

/// Calls `f` with each block of `32·GROUPS` values and where they go.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn each<const BF16: bool, const GROUPS: usize, B: Pod>(bytes: &[u8], out: Out<BF16>, f: impl Fn(&B, Out<BF16>)) {
    for (i, block) in bytemuck::cast_slice(bytes).iter().enumerate() {
        f(block, Out(out.0.wrapping_add(i * GROUPS * Out::<BF16>::GROUP)));
    }
}

/// The same for values without blocks, 32 at a time; their number need not be a multiple of that.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,f16c")]
fn plain<const BF16: bool, T: Pod>(dtype: DType, bytes: &[u8], out: Out<BF16>, f: impl Fn(&[T; 32], Out<BF16>))
where
    [T; 32]: Pod,
{
    let (whole, rest) = bytes.split_at(bytes.len() / size_of::<[T; 32]>() * size_of::<[T; 32]>());
    each::<BF16, 1, [T; 32]>(whole, out, f);
    let n_groups = whole.len() / size_of::<[T; 32]>();
    dequantized(dtype, rest, Out::<BF16>(out.0.wrapping_add(n_groups * Out::<BF16>::GROUP)));
}

/// Expands any format, slowly.
#[target_feature(enable = "avx512f,avx512bf16")]
fn dequantized<const BF16: bool>(dtype: DType, bytes: &[u8], out: Out<BF16>) {
    let format = dtype.float_format();
    let n = bytes.len() / format.block_bytes * format.block_elems;
    let mut values = [0.0; BLOCK];
    (format.dequantize)(bytes, &mut values[..n]);
    for (g, values) in values[..n.next_multiple_of(32)].as_chunks::<32>().0.iter().enumerate() {
        let (low, high) = values.split_at(16);
        out.put(g, [_mm512_castsi512_ps(load512(low)), _mm512_castsi512_ps(load512(high))]);
    }
}

const IOTA: [i8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

#[inline]
#[target_feature(enable = "avx512f")]
fn sixteen(values: &[i8; 16]) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(values)))
}

/// `scale·x + offset`.
#[inline]
#[target_feature(enable = "avx512f")]
fn affine(x: __m512, scale: f32, offset: f32) -> __m512 {
    _mm512_fmadd_ps(_mm512_set1_ps(scale), x, _mm512_set1_ps(offset))
}

/// `scale·q + offset` for 32 signed bytes; each half has its own factors.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn scaled(q: __m256i, scale: [f32; 2], offset: [f32; 2]) -> [__m512; 2] {
    let low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
    let high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256::<1>(q)));
    [affine(low, scale[0], offset[0]), affine(high, scale[1], offset[1])]
}

/// What `table` has for the low nibbles of 16 bytes, and for the high ones.
#[inline]
#[target_feature(enable = "avx512f")]
fn nibbles(bytes: &[u8; 16], table: __m512) -> [__m512; 2] {
    // The permutation looks at no more than four bits.
    let low = _mm512_cvtepu8_epi32(load128(bytes));
    [_mm512_permutexvar_ps(low, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(low), table)]
}

/// The 5-bit values of Q5_0 and Q5_1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> __m256i {
    let qs = load128(qs);
    let low = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(qs), qs), _mm256_set1_epi8(15));
    _mm256_or_si256(low, _mm256_maskz_set1_epi8(u32::from_le_bytes(qh), 16))
}

/// Group `g` of 32 values in the two-bit layout of Q2_K, Q3_K and Q6_K.
#[inline]
#[target_feature(enable = "avx2")]
fn two_bits(qs: &[u8; 64], g: usize) -> __m256i {
    let bytes = load256(&qs[g / 4 * 32..][..32]);
    // Words are shifted; what crosses a byte is masked away.
    let shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(g as i32 % 4 * 2));
    _mm256_and_si256(shifted, _mm256_set1_epi8(3))
}

/// `(d·sc, −dmin·m)` of the sub-blocks of Q4_K and Q5_K.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn scales_mins(d: [u8; 2], dmin: [u8; 2], packed: &[u8; 12]) -> ([f32; 8], [f32; 8]) {
    let (sc, m) = unpack_scales_mins(packed);
    let (d, dmin) = (f16_value(d), -f16_value(dmin));
    (sc.map(|sc| d * sc as f32), m.map(|m| dmin * m as f32))
}

#[inline]
#[target_feature(enable = "f16c")]
fn f16_value(bytes: [u8; 2]) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(bytes) as i32)))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn array(x: __m512) -> [f32; 16] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}

#[inline]
#[target_feature(enable = "sse2")]
fn load128<T: Pod>(x: &[T]) -> __m128i {
    assert_eq!(size_of_val(x), 16);
    // SAFETY: the length was checked.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load256<T: Pod>(x: &[T]) -> __m256i {
    assert_eq!(size_of_val(x), 32);
    // SAFETY: the length was checked.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load512<T: Pod>(x: &[T]) -> __m512i {
    assert_eq!(size_of_val(x), 64);
    // SAFETY: the length was checked.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}
