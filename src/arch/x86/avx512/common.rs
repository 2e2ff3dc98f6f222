//! Loads, stores, conversions and transpositions that the kernels of this level share.

use crate::arch::gemm::TILE;
use bytemuck::Pod;
use std::arch::x86_64::*;

/// 32-bit words per register.
pub(in crate::arch) const LANES: usize = 16;

#[inline]
#[target_feature(enable = "sse2")]
pub(in crate::arch) fn load_16(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn load_64(x: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn load_128(x: &[u8; 128]) -> [__m512i; 2] {
    let [a, b]: &[[u8; 64]; 2] = bytemuck::cast_ref(x);
    [load_64(a), load_64(b)]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn load_f32(x: &[f32; 16]) -> __m512 {
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx")]
pub(in crate::arch) fn load_32(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn store_64(to: &mut [u8; 64], x: __m512i) {
    // SAFETY: 64 writable bytes; the store asks for no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn store_f32(to: &mut [f32; 16], x: __m512) {
    // SAFETY: 64 writable bytes; the store asks for no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn load_i32(x: &[i32; 16]) -> __m512i {
    load_64(bytemuck::cast_ref(x))
}

/// Loads the sums of a tile: `VECS` registers of activations by `ROWS` rows of a panel.
///
/// # Safety
/// `sums` must be readable there.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) unsafe fn load_sums<const VECS: usize, const ROWS: usize>(
    sums: *const f32,
    first: bool,
) -> [[__m512; VECS]; ROWS] {
    let mut acc = [[_mm512_setzero_ps(); VECS]; ROWS];
    if !first {
        for r in 0..ROWS {
            for v in 0..VECS {
                // SAFETY: the sums of register `v` and row `r`.
                acc[r][v] = unsafe { _mm512_loadu_ps(sums.wrapping_add((v * TILE + r) * LANES)) };
            }
        }
    }
    acc
}

/// Stores the sums of a tile.
///
/// # Safety
/// As [`load_sums`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) unsafe fn store_sums<const VECS: usize, const ROWS: usize>(
    sums: *mut f32,
    acc: [[__m512; VECS]; ROWS],
) {
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: as in `load_sums`.
            unsafe { _mm512_storeu_ps(sums.wrapping_add((v * TILE + r) * LANES), acc[r][v]) };
        }
    }
}

/// Stores a register per row.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn store_all<const N: usize>(to: &mut [[u32; LANES]; N], x: [__m512i; N]) {
    for i in 0..N {
        // SAFETY: array and register have the same size.
        unsafe { _mm512_storeu_si512(to[i].as_mut_ptr().cast(), x[i]) };
    }
}

/// Writes the words of register `v` of the activations to their places in `packed`, among those of
/// all `n_vecs` registers; stops at the end of `packed`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn interleave(
    words: impl IntoIterator<Item = __m512i>,
    packed: &mut [u32],
    v: usize,
    n_vecs: usize,
) {
    for (word, out) in words
        .into_iter()
        .zip(packed.chunks_exact_mut(n_vecs * LANES))
    {
        let out: &mut [u32] = &mut out[v * LANES..][..LANES];
        // SAFETY: array and register have the same size.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), word) };
    }
}

/// Loads at most 32 values, padded with zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::arch) fn load_up_to_32(x: &[f32]) -> [__m512; 2] {
    let mask = ((1u64 << x.len().min(32)) - 1) as u32;
    // SAFETY: the mask excludes everything after `x`.
    let low = unsafe { _mm512_maskz_loadu_ps(mask as u16, x.as_ptr()) };
    // SAFETY: as above.
    let high = unsafe { _mm512_maskz_loadu_ps((mask >> 16) as u16, x.as_ptr().wrapping_add(16)) };
    [low, high]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn load512<T: Pod>(x: &[T]) -> __m512i {
    assert_eq!(size_of_val(x), 64);
    // SAFETY: the length was checked.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

/// [`BlockMxfp4::half_scale`] of exponents.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn power_of_two(e: __m512i) -> __m512 {
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_sllv_epi32(
        normal,
        small,
        _mm512_set1_epi32(0x0020_0000),
        e,
    ))
}

/// An f16 in all lanes.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
pub(in crate::arch) fn half(x: [u8; 2]) -> __m512 {
    _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(
        u16::from_le_bytes(x).into(),
    )))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn negated(x: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_setzero_ps(), x)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn pair(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// [`transpose`] of 16 rows in memory, `stride` words apart: quarters of rows go to their lanes as
/// they are read, which takes half of the shuffles.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) unsafe fn read_transposed(p: *const u32, stride: usize) -> [__m512i; 16] {
    let mut quarters = [_mm512_setzero_si512(); 16];
    for q in 0..4 {
        for j in 0..4 {
            // SAFETY: the caller's promise.
            let quarter =
                |r: usize| unsafe { _mm_loadu_si128(p.wrapping_add(r * stride + 4 * q).cast()) };
            let first = _mm512_castsi128_si512(quarter(j));
            let two = _mm512_inserti32x4::<1>(first, quarter(4 + j));
            let three = _mm512_inserti32x4::<2>(two, quarter(8 + j));
            quarters[4 * q + j] = _mm512_inserti32x4::<3>(three, quarter(12 + j));
        }
    }
    transpose_lanes(quarters)
}

/// Transposes the 128-bit lanes of each four registers: in lane `l`, `c[4g + j]` has word `4l + j`
/// of `a[4g..4g + 4]`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn transpose_lanes<const N: usize>(a: [__m512i; N]) -> [__m512i; N] {
    let mut b = a;
    for i in (0..N).step_by(2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    let mut c = b;
    for i in (0..N).step_by(4) {
        c[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    c
}

/// Transposes: word `i` of row `j` becomes word `j` of row `i`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn transpose(a: [__m512i; 16]) -> [__m512i; 16] {
    let c = transpose_lanes(a);
    let mut d = c;
    for j in 0..4 {
        [d[j], d[4 + j], d[8 + j], d[12 + j]] =
            transpose_quarters([c[j], c[4 + j], c[8 + j], c[12 + j]]);
    }
    d
}

/// Transposes 128-bit lanes: lane `i` of register `j` becomes lane `j` of register `i`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::arch) fn transpose_quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let even_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    let odd_low = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
    let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
    let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high),
    ]
}
