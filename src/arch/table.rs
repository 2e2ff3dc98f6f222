//! Instruction-set level: a table of functions.

use super::acts::{ActForm, Acts, BlockP16, BlockQ16};
use super::attention::{AttnParams, AttnPartial, KvSpan};
use super::declared::for_each_slice_kernel;
use super::kv::{KvStored, KvType};
use super::view::{CacheLine, ColumnsMut};
use crate::quant::DType;

/// `y[i][r] = Σ_k W[r][k]·x[i][k]` for the weight rows in `w` (row-major blocks, one row per column
/// of `y`) and every activation row of `x`. The result of a row depends neither on the other rows
/// of the call nor on what `x`'s other rows hold.
pub(crate) type MatvecFn = unsafe fn(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &Acts<'_>);

/// A level's products of one format with decode rows.
#[derive(Clone, Copy)]
pub(crate) struct Matvec {
    pub(crate) form: ActForm,
    pub(crate) kernel: MatvecFn,
}

/// A level's products of one format with prefill rows: all of `x` is packed once, then each task
/// unpacks panels of its weight rows and multiplies them by every activation row. The result of a
/// row does not depend on the others.
#[derive(Clone, Copy)]
pub(crate) struct Gemm {
    /// Element type that it multiplies, and products of it per product of a weight.
    pub(crate) element: (PanelElement, u64),
    /// Weight rows one task should take at most (a multiple of the panel's height).
    pub(crate) tile: usize,
    /// Largest batch that uses the small-batch kernels, with a cost per row rather than per full
    /// panel. Reading weights may limit it: then a task may take any number of weight rows.
    pub(crate) small_batch: usize,
    /// Rows that [`Gemm::pack`] takes at a time, so that threads can share the packing.
    pub(crate) group: usize,
    /// Bytes [`Gemm::pack`] needs for `m` rows of `k` values; groups of rows lie one after the
    /// other: `packed_len(m) = packed_len(group) + packed_len(m − group)` for `m > group`.
    pub(crate) packed_len: fn(m: usize, k: usize) -> usize,
    /// Packs `x` (rows of `k` values, at most a group of the `m` rows of a product) for
    /// [`Gemm::kernel`].
    pub(crate) pack: unsafe fn(x: &[f32], m: usize, k: usize, packed: &mut [u8]),
    /// Size of the workspace that [`Gemm::kernel`] needs for panels and sums, in cache lines.
    pub(crate) workspace: usize,
    /// `y[i][r] = Σ_k W[r][k]·x[i][k]`, all of `k`, which is not 0, and all `m` rows of the packed
    /// activations.
    pub(crate) kernel: unsafe fn(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        packed: &[u8],
        k: usize,
        workspace: &mut [CacheLine],
    ),
    /// Both kinds of rows together, where weights are unpacked to the same integers for them.
    pub(crate) mixed: Option<MixedBatch>,
}

/// A level's products of one format with a mixed batch of decode and prefill rows, unpacking
/// weights once.
#[derive(Clone, Copy)]
pub(crate) struct MixedBatch {
    /// Maximum decode rows, and maximum prefill rows.
    pub(crate) max_rows: (usize, usize),
    /// The first rows of `y` are those of [`Matvec::kernel`] with `generated`, the others those of
    /// [`Gemm::kernel`] with `packed`.
    pub(crate) kernel: unsafe fn(
        y: &mut ColumnsMut<'_>,
        dtype: DType,
        w: &[u8],
        generated: &Acts<'_>,
        packed: &[u8],
        k: usize,
    ),
}

/// Element type of a panel, which decides the instructions that multiply it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanelElement {
    /// 32-bit floating point.
    F32,
    /// bfloat16: the upper half of an `f32`.
    Bf16,
    /// 16-bit integers.
    I16,
    /// 8-bit integers.
    I8,
}

/// A level's products with the transpose of one format: all of `y` is packed once, then each task
/// multiplies some columns of the weights.
#[derive(Clone, Copy)]
pub(crate) struct Transposed {
    /// Columns per task; a task begins at a multiple of it. It divides the widest blocks' length,
    /// or is a multiple of it.
    pub(crate) tile: usize,
    /// As in [`Gemm`], for rows of `k` = `n_out` values.
    pub(crate) group: usize,
    pub(crate) packed_len: fn(m: usize, k: usize) -> usize,
    pub(crate) pack: unsafe fn(y: &[f32], m: usize, k: usize, packed: &mut [u8]),
    pub(crate) workspace: usize,
    /// `x[i][c] = Σ_r W[r][first + c]·y[i][r]`, over all `k > 0` rows of `w`, for all `m` rows of
    /// the packed `y`.
    pub(crate) kernel: unsafe fn(
        x: &mut ColumnsMut<'_>,
        first: usize,
        n_in: usize,
        dtype: DType,
        w: &[u8],
        packed: &[u8],
        k: usize,
        workspace: &mut [CacheLine],
    ),
}

/// The kernels of one level.
pub(crate) struct Kernels {
    pub(crate) name: &'static str,
    pub(crate) supported: fn() -> bool,

    pub(crate) matvec: fn(DType) -> Matvec,
    pub(crate) gemm: fn(DType) -> Gemm,
    pub(crate) transposed: fn(DType) -> Transposed,
    /// Expands whole blocks, finite ones to exactly the values of their format's `dequantize`.
    pub(crate) dequantize: unsafe fn(DType, blocks: &[u8], x: &mut [f32]),
    pub(crate) quantize_q16: unsafe fn(x: &[f32], blocks: &mut [BlockQ16]),
    pub(crate) quantize_p16: unsafe fn(x: &[f32], blocks: &mut [BlockP16]),

    /// Runs `rounds` of the level's fastest products of an element without touching memory;
    /// returns the number of operations.
    pub(crate) peak: unsafe fn(element: PanelElement, rounds: u64) -> u64,
    pub(crate) slices: SliceKernels,
    pub(crate) attention_f32: AttentionFn<f32>,
    pub(crate) attention_f16: AttentionFn<half::f16>,
    pub(crate) attention_stored: AttentionStoredFn,
    /// See [`crate::arch::Arch::hadamard`].
    pub(crate) hadamard: unsafe fn(row: &mut [f32]),
    /// Stores row `i` of a block of quantised keys or values.
    pub(crate) quantize_kv: unsafe fn(kind: KvType, block: &mut [u8], i: usize, row: &[f32]),
    /// Reads the first rows of a block of keys or values.
    pub(crate) load_kv: LoadKvFn,
    pub(crate) attention_merge:
        unsafe fn(to: &mut AttnPartial<'_>, from: &AttnPartial<'_>, head_dim_v: usize),
    pub(crate) attention_finish: unsafe fn(to: &mut AttnPartial<'_>, head_dim_v: usize),
    /// Element type that attention multiplies where many query rows see the keys, and products of
    /// it per product.
    pub(crate) attention_element: (PanelElement, u64),
    pub(crate) attention_queries: unsafe fn(
        dq: &mut [f32],
        lse: &mut [f32],
        q: &[f32],
        dout: &[f32],
        delta: &[f32],
        k: &[f32],
        v: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ),
    pub(crate) attention_keys: unsafe fn(
        dk: &mut [f32],
        dv: &mut [f32],
        k: &[f32],
        v: &[f32],
        q: &[f32],
        dout: &[f32],
        lse: &[f32],
        delta: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ),
}

/// Makes the table's type.
macro_rules! table {
    ([] $($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? { $($checks:tt)* })*) => {
        /// The kernels of `declared.rs`, of one level.
        #[derive(Clone, Copy)]
        pub(crate) struct SliceKernels {
            $(pub(crate) $name: unsafe fn($($arg: $type),*) $(-> $ret)?,)*
        }
    };
}
for_each_slice_kernel!(table []);

/// Adds keys to the partial results of query rows, see [`crate::arch::Arch::attention`].
pub(crate) type AttentionFn<T> = unsafe fn(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, T>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
);

/// Adds stored keys to the partial results of query rows, see
/// [`crate::arch::Arch::attention_stored`].
pub(crate) type AttentionStoredFn = unsafe fn(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
);

/// Reads the first rows of a block of keys or values, see [`crate::arch::Arch::load_kv`].
pub(crate) type LoadKvFn = unsafe fn(kind: KvType, block: &[u8], dim: usize, rows: &mut [f32]);
