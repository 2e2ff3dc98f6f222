//! [`Gemm`] table entries of formats with kernels for small batches, and the choice between these
//! and panels by the number of rows.

use super::rounded::{Halves, Record, Spans, VALUES};
use super::transposed_sums::{MAX_GENERATED_ROWS, Rounded, small_batch};
use super::transposed_weights::{self, Small};
use crate::arch::acts::Acts;
use crate::arch::gemm;
use crate::arch::table::{Gemm, MixedBatch};
use crate::arch::view::{CacheLine, ColumnsMut};
use crate::arch::x86::avx2::gemm::round_halves;
use crate::arch::x86::avx512::panels::integers::IntPanels;
use crate::quant::*;
use bytemuck::Pod;

/// The [`Gemm`] table entry for a K-quant with a scale per `SPAN` weights, 16 or 32.
pub(in crate::arch) const fn spans<const SPAN: usize>() -> Gemm
where
    Spans<SPAN>: Rounded,
{
    table::<Spans<SPAN>>()
}

/// The [`Gemm`] table entry for a format with blocks of 256 and no minimum.
pub(in crate::arch) const fn halves() -> Gemm {
    table::<Halves>()
}

const fn table<X: Rounded>() -> Gemm {
    let panels = gemm::table::<X::Panels>();
    let small_batch = if panels.small_batch > X::MAX_ROWS {
        panels.small_batch
    } else {
        X::MAX_ROWS
    };
    let mixed = Some(MixedBatch {
        max_rows: (MAX_GENERATED_ROWS, X::MAX_MIXED_ROWS),
        kernel: mixed::<X>,
    });
    Gemm {
        small_batch,
        pack: pack::<X>,
        kernel: kernel::<X>,
        mixed,
        ..panels
    }
}

/// The [`Gemm`] table entry for a format with blocks of 32 and no minimum.
pub(in crate::arch) const fn blocks_of_32() -> Gemm {
    Gemm {
        small_batch: transposed_weights::MAX_ROWS,
        pack: pack_records,
        kernel: kernel_of_32,
        ..gemm::table::<Panels32>()
    }
}

type Panels32 = IntPanels<true, 32, true>;

/// As [`pack`], for blocks of 32.
///
/// # Safety
/// As for [`Gemm::pack`].
unsafe fn pack_records(x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
    if m > transposed_weights::MAX_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { gemm::pack::<Panels32>(x, m, k, packed) };
    }
    pack_blocks(x, m, k, packed, |x| -> Record {
        // SAFETY: this level includes AVX2.
        let record = unsafe { round_halves(x) };
        *bytemuck::cast_ref::<_, [u32; 24]>(&record)
            .first_chunk()
            .expect("12 of 24")
    });
}

/// Implements [`Gemm::kernel`] for blocks of 32.
///
/// # Safety
/// As for [`Gemm::kernel`].
unsafe fn kernel_of_32(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    let m = y.rows();
    if m > transposed_weights::MAX_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { gemm::kernel::<Panels32>(y, dtype, w, packed, k, workspace) };
    }
    let x = bytemuck::cast_slice(&packed[..m * (k / 32) * size_of::<Record>()]);
    macro_rules! multiply {
        ($block:ty) => {
            // SAFETY: the CPU has this level's features.
            unsafe { transposed_weights::multiply::<Small<$block>>(y, w, x) }
        };
    }
    match dtype {
        DType::Q8_0 => multiply!(BlockQ8_0),
        DType::Q4_0 => multiply!(BlockQ4_0),
        DType::Q5_0 => multiply!(BlockQ5_0),
        DType::IQ4_NL => multiply!(BlockIq4Nl),
        DType::MXFP4 => multiply!(BlockMxfp4),
        _ => unreachable!("{dtype} has no blocks of 32 without a minimum"),
    }
}

/// Implements [`Gemm::pack`]; a small batch becomes `[block][row]`.
///
/// # Safety
/// As for [`Gemm::pack`].
unsafe fn pack<X: Rounded>(x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
    if m > X::MAX_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { gemm::pack::<X::Panels>(x, m, k, packed) };
    }
    // SAFETY: this level includes AVX2.
    pack_blocks(x, m, k, packed, |x| unsafe { X::round(x) });
}

/// Writes `[block][row]` of `m` rows, a block for each `N` of `k` values.
fn pack_blocks<const N: usize, B: Pod>(
    x: &[f32],
    m: usize,
    k: usize,
    packed: &mut [u8],
    block: impl Fn(&[f32; N]) -> B,
) {
    let blocks = bytemuck::cast_slice_mut::<_, B>(&mut packed[..m * (k / N) * size_of::<B>()]);
    for (i, x) in x.chunks_exact(k).enumerate() {
        for (x, blocks) in x.as_chunks().0.iter().zip(blocks.chunks_exact_mut(m)) {
            blocks[i] = block(x);
        }
    }
}

/// Implements [`Gemm::kernel`].
///
/// # Safety
/// As for [`Gemm::kernel`].
unsafe fn kernel<X: Rounded>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    packed: &[u8],
    k: usize,
    workspace: &mut [CacheLine],
) {
    if y.rows() > X::MAX_ROWS {
        // SAFETY: the caller's promise.
        return unsafe { gemm::kernel::<X::Panels>(y, dtype, w, packed, k, workspace) };
    }
    // SAFETY: the CPU has this level's features.
    unsafe { X::alone(y, dtype, w, packed_blocks(packed, y.rows(), k)) }
}

/// Implements [`MixedBatch::kernel`].
///
/// # Safety
/// As for [`MixedBatch::kernel`].
unsafe fn mixed<X: Rounded>(
    y: &mut ColumnsMut<'_>,
    dtype: DType,
    w: &[u8],
    generated: &Acts<'_>,
    packed: &[u8],
    k: usize,
) {
    let Acts::P16 { x, .. } = *generated else {
        unreachable!("the form this level asks for")
    };
    let packed = packed_blocks::<X>(packed, y.rows() - generated.m(), k);
    // SAFETY: the CPU has this level's features.
    unsafe { small_batch::<X, true>(y, dtype, w, x, packed) }
}

/// Output of [`pack`] for `m` rows.
fn packed_blocks<X: Rounded>(packed: &[u8], m: usize, k: usize) -> &[X] {
    bytemuck::cast_slice(&packed[..m * (k / VALUES) * size_of::<X>()])
}
