//! Products with many activation rows: the packing, unpacking and register tiles of this level. All
//! weights go through `f32` panels.

use super::unpack::{Factors, Groups, load128, load256, with_groups};
use crate::arch::Gemm;
use crate::arch::gemm::{BLOCK, Panels, TILE, table};
use crate::quant::*;
use bytemuck::Pod;
use std::arch::x86_64::*;

pub(super) fn gemm_for(_: DType) -> Gemm {
    const { table::<F32>(MIN_ROWS) }
}

/// From here on panels beat the products of `matmul.rs`.
const MIN_ROWS: usize = 16;

/// Words of a register.
const LANES: usize = 8;

/// Panels of `f32`.
enum F32 {}

impl Panels for F32 {
    const PER_WORD: usize = 1;
    const LANES: usize = LANES;
    const VECS: usize = 3;
    const DEPTH: usize = BLOCK;

    fn rows(vecs: usize) -> usize {
        if vecs == 1 { 8 } else { 4 }
    }

    unsafe fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
        // SAFETY: the caller's promise.
        unsafe { pack(x, k, bytemuck::cast_slice_mut(packed)) }
    }

    unsafe fn unpack(dtype: DType, blocks: &[u8], out: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { unpack(dtype, blocks, out.cast()) }
    }

    unsafe fn tile(
        vecs: usize,
        w: *const u32,
        x: *const u32,
        words: usize,
        sums: *mut f32,
        first: bool,
        ahead: *const u32,
    ) {
        let (w, x) = (w.cast(), x.cast());
        let tile = match vecs {
            1 => tile::<1, 8>,
            2 => tile::<2, 4>,
            _ => tile::<3, 4>,
        };
        // SAFETY: the caller's promise.
        unsafe { tile(w, x, words, sums, first, ahead) }
    }

    unsafe fn transpose(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
        // SAFETY: the caller's promise.
        unsafe { store_transposed(sums, y, stride, rows, cols) }
    }
}

/// `VECS` registers of activations times `ROWS` weight rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const VECS: usize, const ROWS: usize>(
    w: *const f32,
    x: *const f32,
    words: usize,
    sums: *mut f32,
    first: bool,
    ahead: *const u32,
) {
    let mut acc = [[_mm256_setzero_ps(); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { _mm256_loadu_ps(sums.wrapping_add((v * TILE + r) * LANES)) };
            }
        }
    }
    for i in 0..words {
        _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(i * VECS * LANES).cast());
        let mut xs = [_mm256_setzero_ps(); VECS];
        for v in 0..VECS {
            // SAFETY: word `i` of the rows in register `v`.
            xs[v] = unsafe { _mm256_loadu_ps(x.wrapping_add((i * VECS + v) * LANES)) };
        }
        for r in 0..ROWS {
            // SAFETY: word `i` of row `r`.
            let w = _mm256_set1_ps(unsafe { w.wrapping_add(r * BLOCK + i).read() });
            for v in 0..VECS {
                acc[r][v] = _mm256_fmadd_ps(w, xs[v], acc[r][v]);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

#[target_feature(enable = "avx2")]
fn pack(x: &[f32], k: usize, packed: &mut [f32]) {
    let n_vecs = (x.len() / k).div_ceil(LANES);
    for (v, x) in x.chunks(LANES * k).enumerate() {
        for (c, packed) in packed.chunks_mut(LANES * n_vecs * LANES).enumerate() {
            let mut rows = [_mm256_setzero_ps(); LANES];
            for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
                let start = c * LANES;
                let mut values = [0.0; LANES];
                let x = &x[start..(start + LANES).min(k)];
                values[..x.len()].copy_from_slice(x);
                *row = load(&values);
            }
            for (word, out) in transpose(rows).into_iter().zip(packed.chunks_exact_mut(n_vecs * LANES)) {
                out[v * LANES..][..LANES].copy_from_slice(&array(word));
            }
        }
    }
}

#[target_feature(enable = "avx2")]
unsafe fn store_transposed(sums: *const f32, y: *mut f32, stride: usize, rows: usize, cols: usize) {
    let mut tile = [_mm256_setzero_ps(); LANES];
    for (r, row) in tile.iter_mut().enumerate().take(cols) {
        // SAFETY: a row of the sums.
        *row = unsafe { _mm256_loadu_ps(sums.wrapping_add(r * LANES)) };
    }
    for (i, row) in transpose(tile).into_iter().enumerate().take(rows) {
        // SAFETY: `cols` values of row `i`.
        let y = unsafe { std::slice::from_raw_parts_mut(y.wrapping_add(i * stride), cols) };
        y.copy_from_slice(&array(row)[..cols]);
    }
}

/// Value `i` of row `j` becomes value `j` of row `i`.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(a: [__m256; 8]) -> [__m256; 8] {
    let mut b = a;
    for i in (0..8).step_by(2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    // In each 128-bit half `l`, `c[4g + j]` has value `4l + j` of the rows `4g..4g + 4`.
    let mut c = b;
    for i in [0, 4] {
        c[i] = _mm256_shuffle_ps::<0b01_00_01_00>(b[i], b[i + 2]);
        c[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(b[i], b[i + 2]);
        c[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(b[i + 1], b[i + 3]);
        c[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(b[i + 1], b[i + 3]);
    }
    let mut d = c;
    for j in 0..4 {
        d[j] = _mm256_permute2f128_ps::<0x20>(c[j], c[4 + j]);
        d[4 + j] = _mm256_permute2f128_ps::<0x31>(c[j], c[4 + j]);
    }
    d
}

/// Expands a row's blocks.
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(dtype: DType, bytes: &[u8], out: *mut f32) {
    macro_rules! blocks {
        ($block:ident) => {
            blocks::<$block>(bytes, out)
        };
    }
    match dtype {
        DType::F16 => plain(dtype, bytes, out, |x: &[[u8; 2]; 8]| _mm256_cvtph_ps(load128(x))),
        DType::BF16 => plain(dtype, bytes, out, |x: &[[u8; 2]; 8]| {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load128(x))))
        }),
        DType::F32 => plain(dtype, bytes, out, |x: &[[u8; 4]; 8]| _mm256_castsi256_ps(load256(x))),
        _ => with_groups!(dtype, blocks, dequantized(dtype, bytes, out)),
    }
}

/// Blocks of signed bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn blocks<B: Groups>(bytes: &[u8], out: *mut f32) {
    for (i, block) in bytemuck::cast_slice::<u8, B>(bytes).iter().enumerate() {
        // SAFETY: this level has AVX2 and F16C.
        let Factors { scale, offset } = unsafe { block.factors() };
        for g in 0..B::GROUPS {
            // SAFETY: as above.
            let q = unsafe { block.bytes(g) };
            let (low, high) = (_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q));
            let eights = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
            for (e, q) in eights.into_iter().enumerate() {
                let factor = 2 * g + e / 2;
                let q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
                let value = _mm256_fmadd_ps(_mm256_set1_ps(scale[factor]), q, _mm256_set1_ps(offset[factor]));
                let out = out.wrapping_add((i * B::GROUPS + g) * 32 + e * LANES);
                // SAFETY: the panel has room for the blocks that are unpacked.
                unsafe { _mm256_storeu_ps(out, value) };
            }
        }
    }
}

/// Values without blocks, 8 at a time; their number need not be a multiple of that.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn plain<T: Pod>(dtype: DType, bytes: &[u8], out: *mut f32, value: impl Fn(&[T; 8]) -> __m256)
where
    [T; 8]: Pod,
{
    let (whole, rest) = bytes.split_at(bytes.len() / size_of::<[T; 8]>() * size_of::<[T; 8]>());
    let whole: &[[T; 8]] = bytemuck::cast_slice(whole);
    for (g, x) in whole.iter().enumerate() {
        // SAFETY: the panel has room for the values that are unpacked.
        unsafe { _mm256_storeu_ps(out.wrapping_add(g * LANES), value(x)) };
    }
    dequantized(dtype, rest, out.wrapping_add(whole.len() * LANES));
}

/// Any format, slowly.
fn dequantized(dtype: DType, bytes: &[u8], out: *mut f32) {
    let format = dtype.float_format();
    let n = bytes.len() / format.block_bytes * format.block_elems;
    // SAFETY: the panel has room for the values that are unpacked.
    unsafe { out.write_bytes(0, n) };
    // SAFETY: they were just initialised, and nobody else looks at the panel.
    let out = unsafe { std::slice::from_raw_parts_mut(out, n) };
    (format.dequantize)(bytes, out);
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: as many bytes.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn array(x: __m256) -> [f32; 8] {
    // SAFETY: the same values.
    unsafe { std::mem::transmute(x) }
}
