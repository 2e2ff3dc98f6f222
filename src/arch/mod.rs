//! Kernels, one complete table of them per instruction-set level.
//!
//! [`Arch`] is a token that only detection can make: holding one proves that the CPU has the
//! features its kernels need, so its methods are safe. They check lengths once; the kernels behind
//! them trust those lengths. `scalar` is complete and reads like the maths; every other level is a
//! constant that overrides fields of the level below it, or takes them from it.
//!
//! Kernels know slices and blocks, nothing of models, threads or allocation. Files are mirrored
//! across levels: `matmul.rs` (generated rows, or all rows of plain floats), `gemm.rs` (prompt
//! rows), `unpack.rs` (block formats), `attention.rs`, `elementwise.rs`; `generic` has the source
//! that levels share.
//!
//! # Five words
//!
//! A **panel** is weights, unpacked from their blocks, that stay in the L1 or L2 cache while all
//! activation rows go by (`gemm.rs`; `B̃` and `Ã` of Goto and van de Geijn). Activations are packed
//! once, interleaved, so that a register takes one word of each of its rows:
//!
//! ```text
//!  panel        word 0   word 1        word 255     packed activations, 16 rows a register
//!  row  0     │ w₀[0]  │ w₀[1]  │ … │ w₀[255] │     word 0   │ x₀[0]    x₁[0]    …  x₁₅[0]   │
//!  row  1     │ w₁[0]  │ w₁[1]  │ … │ w₁[255] │     word 1   │ x₀[1]    x₁[1]    …  x₁₅[1]   │
//!    …        │   …    │        │   │         │       …
//!  row 31     │ w₃₁[0] │        │   │         │     word 255 │ x₀[255]  x₁[255]  …  x₁₅[255] │
//! ```
//!
//! A word is an `f32`, or two or four narrower integers. A *transposed* panel is interleaved as
//! activations are: then a lane is a weight row, and a small batch of activations is broadcast.
//!
//! A **tile** is the sums that registers hold while a loop runs over words: some weight rows by
//! some registers of activations. (AMX has registers that are tiles themselves, of 16 rows of 64
//! bytes.)
//!
//! ```text
//!  tile 2 × 2        lanes 0 … 15       lanes 16 … 31       for each word i:
//!  weight row r    │ y₀[r] … y₁₅[r]   │ y₁₆[r] … y₃₁[r]   │     load the words i of 2 × 16 rows
//!  weight row r+1  │ y₀[r+1] …        │ y₁₆[r+1] …        │     for each weight row:
//!                                                                broadcast its word i, 2 multiply-adds
//! ```
//!
//! A **plane** is one byte of each of some 16-bit integers, `q = 256·high + low`, both bytes
//! signed: instructions that multiply bytes by bytes then take 16-bit activations, a plane at a
//! time ([`BlockP16`], [`BlockQ16`]). Stored keys and values have planes, too, of four bits
//! (`kv.rs`).
//!
//! ```text
//!  integers     q₀  q₁  q₂  …  q₂₅₅
//!  high plane │ h₀ │ h₁ │ h₂ │ … │ h₂₅₅ │       Σ w·q = 256·Σ w·h + Σ w·l
//!  low plane  │ l₀ │ l₁ │ l₂ │ … │ l₂₅₅ │
//! ```
//!
//! A **stream** is memory that is read from one address on to the end, which a CPU's prefetcher
//! recognises. A small batch at the AVX-512 level reads a task's weights as 16 long streams, a lane
//! each, instead of 16 rows side by side (`small_batch/transposed_weights.rs`):
//!
//! ```text
//!  memory   │ row 0 │ row 1 │ … │ row 8 │ row 9 │ … │ row 17 │ row 18 │ …       144 rows
//!  lane 0     ►───────────────────────►
//!  lane 1                                 ►────────────────►
//!  lane 2                                                      ►──── …
//! ```
//!
//! A **coded** format is one whose weights are looked up: a block stores signs and the number of an
//! entry of a fixed grid, and an entry stores a code of few bits for each of its 4 or 8 values
//! ([`Coded`](crate::quant::Coded), `avx512/unpack/grids.rs`):
//!
//! ```text
//!  block    │ entry 5 │ entry 200 │ … │ signs │ scales │
//!               │
//!  grid[5]    │ 1 │ 0 │ 1 │ 0 │ 0 │ 0 │ 0 │ 0 │       codes of two bits: 0, 1, 2 are 8, 25, 43
//!               │   │
//!  values      25   8  25   8   8   8   8   8          times sign, times scale (IQ2_XXS)
//! ```

#![allow(unsafe_code)] // the kernels: intrinsics and their proof token
#![allow(clippy::type_complexity)] // signatures are spelt out where they are read
#![allow(clippy::multiple_unsafe_ops_per_block)] // a load at an offset is two operations with one reason

/// Incremented when a change of a kernel, or of the order in which they are called, changes the
/// bits of keys and values: stored ones of another version are not reused.
pub const ARITHMETIC_VERSION: u32 = 9;

/// Coefficients of the exponent of `1 − erf(x)` for `x ≥ 0`: with `t = 1/(1 + x/2)` it is
/// `t·exp(c₀ + c₁t + … + c₉t⁹ − x²)`, with a relative error below 1.2e-7, except for rounding to
/// `f32` (W. J. Press et al., Numerical Recipes in C, 2nd edition, §6.2).
const ERFC: [f32; 10] = [
    -1.265_512_2,
    1.000_023_7,
    0.374_091_96,
    0.096_784_18,
    -0.186_288_06,
    0.278_868_07,
    -1.135_204,
    1.488_515_9,
    -0.822_152_23,
    0.170_872_77,
];

/// Builds a table of kernels; its element-wise ones are those of the level's `elementwise.rs`.
macro_rules! kernels {
    ($($field:ident $(: $kernel:expr)?,)*) => {
        $crate::arch::Kernels {
            $($field $(: $kernel)?,)*
            dot: elementwise::dot,
            add: elementwise::add,
            add_scaled: elementwise::add_scaled,
            add_product: elementwise::add_product,
            add_product_f16: elementwise::add_product_f16,
            rms_norm: elementwise::rms_norm,
            layer_norm: elementwise::layer_norm,
            rms_norm_backward: elementwise::rms_norm_backward,
            layer_norm_backward: elementwise::layer_norm_backward,
            softmax: elementwise::softmax,
            rope_angles: elementwise::rope_angles,
            rope_norm: elementwise::rope_norm,
            rope_neox: elementwise::rope_neox,
            silu_mul: elementwise::silu_mul,
            gelu_mul: elementwise::gelu_mul,
            gelu: elementwise::gelu,
            gelu_erf_mul: elementwise::gelu_erf_mul,
            gelu_erf: elementwise::gelu_erf,
            swiglu_oai: elementwise::swiglu_oai,
            sigmoid_mul: elementwise::sigmoid_mul,
            silu_mul_backward: elementwise::silu_mul_backward,
            gelu_mul_backward: elementwise::gelu_mul_backward,
            gelu_backward: elementwise::gelu_backward,
            f32_to_f16: elementwise::f32_to_f16,
            f16_to_f32: elementwise::f16_to_f32,
            delta_rule: elementwise::delta_rule,
            ssm_step: elementwise::ssm_step,
            ssm_step_by_state: elementwise::ssm_step_by_state,
            rwkv6_step: elementwise::rwkv6_step,
            rwkv7_step: elementwise::rwkv7_step,
            causal_conv: elementwise::causal_conv,
        }
    };
}

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod acts;
mod attention;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod gemm;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod generic;
mod kv;
mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod transposed;
mod view;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::quant::DType;

pub use acts::{Acts, BlockP16, BlockQ16};
pub use attention::{AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvElement, KvSpan};
pub(crate) use kv::drop_bits;
pub use kv::{KvStored, KvType};
pub use view::{CacheLine, ColumnsMut};

/// Form in which a product kernel reads activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActForm {
    /// The `f32` rows themselves.
    F32,
    /// Rows rounded to 16-bit integers with a scale per 32 values ([`BlockQ16`]).
    Q16,
    /// The same as two planes of bytes ([`BlockP16`]).
    P16,
}

/// `y[i][r] = Σ_k W[r][k]·x[i][k]` for the weight rows in `w` (row-major blocks, one row per column
/// of `y`) and every activation row of `x`. The result of a row depends neither on the other rows
/// of the call nor on what `x`'s other rows hold.
pub(crate) type MatvecFn = unsafe fn(y: &mut ColumnsMut<'_>, dtype: DType, w: &[u8], x: &Acts<'_>);

/// How a level multiplies one format by rows of generated tokens.
#[derive(Clone, Copy)]
pub(crate) struct Matvec {
    pub(crate) form: ActForm,
    pub(crate) kernel: MatvecFn,
}

/// How a level multiplies one format by rows of prompts: all of `x` is packed once, then each task
/// unpacks panels of its weight rows and multiplies them by every activation row. The result of a
/// row does not depend on the others.
#[derive(Clone, Copy)]
pub(crate) struct Gemm {
    /// Element type that it multiplies, and products of it per product of a weight.
    pub(crate) element: (PanelElement, u64),
    /// Weight rows one task should take at most (a multiple of the panel's height).
    pub(crate) tile: usize,
    /// Most activation rows that take time for each, not for a panel of them, so that reading
    /// weights may be what limits: then a task may take any number of weight rows.
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

/// How a level multiplies one format by a mixed batch, of generated rows and prompt rows, unpacking
/// weights once.
#[derive(Clone, Copy)]
pub(crate) struct MixedBatch {
    /// Most generated rows, and most prompt rows.
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

/// How a level multiplies by the transpose of one format: all of `y` is packed once, then each task
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

/// The product with a transposed matrix, see [`Arch::transposed`].
#[derive(Clone, Copy)]
pub struct TransposedProduct {
    table: Transposed,
    dtype: DType,
    n_in: usize,
    n_out: usize,
}

impl std::fmt::Debug for TransposedProduct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "TransposedProduct({}, {} × {})",
            self.dtype, self.n_out, self.n_in
        )
    }
}

impl TransposedProduct {
    /// Columns one [`TransposedProduct::multiply`] call takes; the last one may take fewer.
    pub fn tile(&self) -> usize {
        self.table.tile
    }

    /// Rows that [`TransposedProduct::pack`] takes at a time.
    pub fn group(&self) -> usize {
        self.table.group
    }

    /// Size of the workspace that [`TransposedProduct::multiply`] needs, in cache lines; the same
    /// for all formats.
    pub fn workspace(&self) -> usize {
        self.table.workspace
    }

    /// Bytes that `m` packed rows take.
    pub fn packed_len(&self, m: usize) -> usize {
        (self.table.packed_len)(m, self.n_out)
    }

    /// Packs one group of rows, `y` (`m × n_out`). Group `g` of many rows begins at
    /// `g·packed_len(group)`.
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn pack(&self, y: &[f32], m: usize, packed: &mut [u8]) {
        assert!(
            Some(y.len()) == m.checked_mul(self.n_out) && m <= self.table.group,
            "transposed: {m} rows to pack"
        );
        assert_eq!(packed.len(), self.packed_len(m), "transposed: buffer");
        if y.is_empty() {
            return;
        }
        // SAFETY: `Arch` proved the CPU features; shapes were checked above.
        unsafe { (self.table.pack)(y, m, self.n_out, packed) }
    }

    /// `x[i][c] = Σ_r W[r][first + c]·y[i][r]` with `packed` made from `x.rows()` rows; `w` is the
    /// whole matrix. The contents of `workspace` do not matter.
    ///
    /// # Panics
    /// If the lengths disagree, or the columns are not a tile.
    pub fn multiply(
        &self,
        x: &mut ColumnsMut<'_>,
        first: usize,
        w: &[u8],
        packed: &[u8],
        workspace: &mut [CacheLine],
    ) {
        let f = self.dtype.float_format();
        let (cols, tile) = (x.cols(), self.table.tile);
        assert_eq!(
            Some(w.len()),
            f.bytes_of(self.n_out, self.n_in),
            "transposed: weight bytes"
        );
        assert_eq!(
            packed.len(),
            self.packed_len(x.rows()),
            "transposed: packed rows"
        );
        let rest = self.n_in.checked_sub(first);
        assert!(
            first.is_multiple_of(tile) && rest.map(|rest| rest.min(tile)) == Some(cols),
            "transposed: columns {first}+{cols} of {}",
            self.n_in
        );
        assert!(
            workspace.len() >= self.table.workspace,
            "transposed: workspace"
        );
        if self.n_out == 0 {
            return x.fill(0.0);
        }
        // SAFETY: `Arch` proved the CPU features; shapes were checked above.
        unsafe {
            (self.table.kernel)(
                x, first, self.n_in, self.dtype, w, packed, self.n_out, workspace,
            )
        }
    }
}

/// Widest attention head the kernels take; wider models are refused when opened.
pub const MAX_HEAD_DIM: usize = 576;

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
    pub(crate) dot: unsafe fn(a: &[f32], b: &[f32]) -> f32,
    pub(crate) add: unsafe fn(y: &mut [f32], x: &[f32]),
    pub(crate) add_scaled: unsafe fn(y: &mut [f32], x: &[f32], a: f32),
    pub(crate) add_product: unsafe fn(y: &mut ColumnsMut<'_>, t: &[f32], b: &[f32], stride: usize),
    pub(crate) add_product_f16:
        unsafe fn(y: &mut ColumnsMut<'_>, t: &[f32], b: &[half::f16], stride: usize),
    pub(crate) rms_norm: unsafe fn(y: &mut [f32], x: &[f32], w: &[f32], eps: f32),
    pub(crate) layer_norm: unsafe fn(y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32),
    pub(crate) rms_norm_backward:
        unsafe fn(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32),
    pub(crate) layer_norm_backward:
        unsafe fn(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32),
    pub(crate) softmax: unsafe fn(x: &mut [f32]),
    pub(crate) rope_angles:
        unsafe fn(cos: &mut [f32], sin: &mut [f32], frequencies: &[f32], pos: f32, factor: f32),
    pub(crate) rope_norm: unsafe fn(x: &mut [f32], cos: &[f32], sin: &[f32]),
    pub(crate) rope_neox: unsafe fn(x: &mut [f32], cos: &[f32], sin: &[f32]),
    pub(crate) silu_mul: unsafe fn(gate: &mut [f32], up: &[f32]),
    pub(crate) gelu_mul: unsafe fn(gate: &mut [f32], up: &[f32]),
    pub(crate) gelu: unsafe fn(x: &mut [f32]),
    pub(crate) gelu_erf_mul: unsafe fn(gate: &mut [f32], up: &[f32]),
    pub(crate) gelu_erf: unsafe fn(x: &mut [f32]),
    pub(crate) swiglu_oai: unsafe fn(gate: &mut [f32], up: &[f32]),
    pub(crate) sigmoid_mul: unsafe fn(gate: &mut [f32], x: &[f32]),
    pub(crate) silu_mul_backward: unsafe fn(gate: &mut [f32], up: &mut [f32], dy: &[f32]),
    pub(crate) gelu_mul_backward: unsafe fn(gate: &mut [f32], up: &mut [f32], dy: &[f32]),
    pub(crate) gelu_backward: unsafe fn(x: &mut [f32], dy: &[f32]),
    pub(crate) f32_to_f16: unsafe fn(x: &[f32], y: &mut [half::f16]),
    pub(crate) f16_to_f32: unsafe fn(x: &[half::f16], y: &mut [f32]),
    pub(crate) delta_rule: unsafe fn(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        beta: f32,
        rate: &[f32],
        out: &mut [f32],
    ),
    pub(crate) ssm_step: unsafe fn(
        state: &mut [f32],
        b: &[f32],
        c: &[f32],
        decay: f32,
        dt: f32,
        x: &[f32],
        out: &mut [f32],
    ),
    pub(crate) ssm_step_by_state: unsafe fn(
        state: &mut [f32],
        a: &[f32],
        b: &[f32],
        c: &[f32],
        dt: &[f32],
        x: &[f32],
        out: &mut [f32],
    ),
    pub(crate) rwkv6_step: unsafe fn(
        state: &mut [f32],
        r: &[f32],
        k: &[f32],
        v: &[f32],
        w: &[f32],
        first: &[f32],
        out: &mut [f32],
    ),
    pub(crate) rwkv7_step:
        unsafe fn(state: &mut [f32], key: [&[f32]; 5], v: &[f32], out: &mut [f32]),
    pub(crate) causal_conv:
        unsafe fn(past: &mut [f32], taps: (&[f32], usize), x: &[f32], out: &mut [f32]),
    pub(crate) attention_f32: AttentionFn<f32>,
    pub(crate) attention_f16: AttentionFn<half::f16>,
    pub(crate) attention_stored: AttentionStoredFn,
    /// See [`Arch::hadamard`].
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

/// Adds keys to the partial results of query rows, see [`Arch::attention`].
pub(crate) type AttentionFn<T> = unsafe fn(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, T>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
);

/// Adds stored keys to the partial results of query rows, see [`Arch::attention_stored`].
pub(crate) type AttentionStoredFn = unsafe fn(
    to: &mut AttnPartial<'_>,
    q: &[f32],
    stored: KvStored<'_>,
    ranges: &[(u32, u32)],
    p: &AttnParams,
);

/// Reads the first rows of a block of keys or values, see [`Arch::load_kv`].
pub(crate) type LoadKvFn = unsafe fn(kind: KvType, block: &[u8], dim: usize, rows: &mut [f32]);

/// Levels this build has, best first.
static LEVELS: &[&Kernels] = &[
    #[cfg(target_arch = "x86_64")]
    &x86::amx::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx512_bf16::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx512::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx2::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::i8mm::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::dotprod::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::neon::KERNELS,
    &scalar::KERNELS,
];

/// The kernels of one instruction-set level that this CPU has.
#[derive(Clone, Copy)]
pub struct Arch(&'static Kernels);

impl std::fmt::Debug for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arch({})", self.0.name)
    }
}

/// Whether `rows`, which lie so many values apart, are `n` of `width` values.
fn has_rows((rows, stride): (&[f32], usize), n: usize, width: usize) -> bool {
    let end = stride
        .checked_mul(n - 1)
        .and_then(|last| last.checked_add(width));
    width <= stride && end.is_some_and(|end| end <= rows.len())
}

/// Checks the arguments of [`Arch::add_product`]; returns whether there is anything to do.
fn check_product(y: &ColumnsMut<'_>, t: &[f32], len: usize, stride: usize) -> bool {
    if t.is_empty() || y.cols() == 0 {
        return false;
    }
    let rank = t.len() / y.rows();
    assert_eq!(t.len(), y.rows() * rank, "add_product: {} rows", y.rows());
    let end = stride
        .checked_mul(rank - 1)
        .and_then(|last| last.checked_add(y.cols()));
    assert!(
        y.cols() <= stride && end.is_some_and(|end| end <= len),
        "add_product: {rank} rows of {stride}"
    );
    true
}

impl Arch {
    /// The best level this CPU has.
    pub fn detect() -> Arch {
        Arch::available().next().unwrap_or(Arch::scalar())
    }

    /// The level called `name`, if this CPU has it.
    ///
    /// # Errors
    /// If it does not; lists the levels it has.
    pub fn named(name: &str) -> Result<Arch, ArchError> {
        Arch::available()
            .find(|a| a.name() == name)
            .ok_or_else(|| ArchError {
                name: name.to_owned(),
                available: Arch::available().map(Arch::name).collect(),
                known: LEVELS.iter().any(|k| k.name == name),
            })
    }

    /// Every level this CPU has, best first.
    pub fn available() -> impl Iterator<Item = Arch> {
        LEVELS.iter().copied().filter(|k| (k.supported)()).map(Arch)
    }

    /// The portable level.
    pub fn scalar() -> Arch {
        Arch(&scalar::KERNELS)
    }

    /// The level's name: `avx2`, `neon`, …
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Form in which [`Arch::matvec`] reads activations for weights of `dtype`.
    pub fn act_form(self, dtype: DType) -> ActForm {
        (self.0.matvec)(dtype).form
    }

    /// `y[i][r] = Σ_k W[r][k]·x[i][k]`: `w` holds `y.cols()` rows of `x.n()` values. A row's bits
    /// do not depend on how many rows there are, here or in [`Arch::gemm`]; the two round
    /// differently.
    ///
    /// # Panics
    /// If the lengths disagree or `x` is not in the form that [`Arch::act_form`] names.
    pub fn matvec(self, dtype: DType, y: &mut ColumnsMut<'_>, w: &[u8], x: &Acts<'_>) {
        let f = dtype.float_format();
        assert_eq!(
            Some(w.len()),
            f.bytes_of(y.cols(), x.n()),
            "matvec: {dtype:?} weight bytes"
        );
        assert_eq!(y.rows(), x.m(), "matvec: rows of activations");
        let matvec = (self.0.matvec)(dtype);
        assert_eq!(matvec.form, x.form(), "matvec: activation form");
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (matvec.kernel)(y, dtype, w, x) }
    }

    /// Element type that [`Arch::gemm`] multiplies for weights of `dtype`, and products of it per
    /// product of a weight.
    pub fn gemm_element(self, dtype: DType) -> (PanelElement, u64) {
        (self.0.gemm)(dtype).element
    }

    /// Multiplies and adds as fast as the level can, for measurements: `rounds` of some hundred
    /// operations that touch no memory. Returns the number of operations.
    pub fn peak(self, element: PanelElement, rounds: u64) -> u64 {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.peak)(element, rounds) }
    }

    /// Weight rows one [`Arch::gemm`] call should cover at most, a multiple of 32; smaller
    /// multiples of 32 work, too.
    pub fn gemm_tile(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).tile
    }

    /// Most activation rows for which an [`Arch::gemm`] call had better cover as many weight rows
    /// as one of [`Arch::matvec`], not only [`Arch::gemm_tile`].
    pub fn gemm_few(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).small_batch
    }

    /// Size of the workspace that [`Arch::gemm`] needs for weights of `dtype`, in cache lines.
    pub fn gemm_workspace(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).workspace
    }

    /// Bytes of packed activations for [`Arch::gemm`].
    ///
    /// # Panics
    /// If the number overflows `usize`.
    pub fn packed_len(self, dtype: DType, m: usize, k: usize) -> usize {
        ((self.0.gemm)(dtype).packed_len)(m, k)
    }

    /// Rows of activations that [`Arch::pack`] takes at a time.
    pub fn pack_group(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).group
    }

    /// Packs one group of the `m` rows of a product for [`Arch::gemm`] with weights of `dtype`: `x`
    /// has at most [`Arch::pack_group`] rows of `k` values. Group `g` begins at
    /// `g·packed_len(group)`. Few rows are packed otherwise than many: `m` has to be that of
    /// [`Arch::gemm`].
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn pack(self, dtype: DType, x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
        let gemm = (self.0.gemm)(dtype);
        let rows = x.len().checked_div(k).unwrap_or(0);
        assert!(
            x.len() == rows * k && (rows == m || m > gemm.group && rows <= gemm.group),
            "pack: {} activations, {m} rows of {k}",
            x.len()
        );
        assert_eq!(packed.len(), (gemm.packed_len)(rows, k), "pack: buffer");
        if x.is_empty() {
            return;
        }
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (gemm.pack)(x, m, k, packed) }
    }

    /// Whether activations packed for `a` serve weights of `b` too.
    pub fn same_packing(self, a: DType, b: DType) -> bool {
        std::ptr::fn_addr_eq((self.0.gemm)(a).pack, (self.0.gemm)(b).pack)
    }

    /// `y[i][r] = Σ_k W[r][k]·x[i][k]` with `packed` made by [`Arch::pack`] from `y.rows()` rows.
    /// The contents of `workspace` do not matter.
    ///
    /// # Panics
    /// If the lengths disagree or `workspace` is smaller than [`Arch::gemm_workspace`] says.
    pub fn gemm(
        self,
        dtype: DType,
        y: &mut ColumnsMut<'_>,
        w: &[u8],
        packed: &[u8],
        k: usize,
        workspace: &mut [CacheLine],
    ) {
        let f = dtype.float_format();
        let gemm = (self.0.gemm)(dtype);
        assert_eq!(
            Some(w.len()),
            f.bytes_of(y.cols(), k),
            "gemm: {dtype:?} weight bytes"
        );
        assert_eq!(
            packed.len(),
            (gemm.packed_len)(y.rows(), k),
            "gemm: packed activations"
        );
        assert!(workspace.len() >= gemm.workspace, "gemm: workspace");
        if k == 0 || y.rows() == 0 {
            return y.fill(0.0);
        }
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (gemm.kernel)(y, dtype, w, packed, k, workspace) }
    }

    /// Whether weights of `dtype` are unpacked once for so many rows of both kinds by
    /// [`Arch::both`].
    pub fn has_both(self, dtype: DType, n_generated: usize, n_prompt: usize) -> bool {
        let fits =
            |mixed: MixedBatch| n_generated <= mixed.max_rows.0 && n_prompt <= mixed.max_rows.1;
        n_generated > 0 && n_prompt > 0 && (self.0.gemm)(dtype).mixed.is_some_and(fits)
    }

    /// [`Arch::matvec`] of the first rows of `y`, and [`Arch::gemm`] of the others, with the same
    /// bits.
    ///
    /// # Panics
    /// If the lengths disagree, `generated` is not in the form that [`Arch::act_form`] names, or
    /// [`Arch::has_both`] is not true.
    pub fn both(
        self,
        dtype: DType,
        y: &mut ColumnsMut<'_>,
        w: &[u8],
        generated: &Acts<'_>,
        packed: &[u8],
        k: usize,
    ) {
        let gemm = (self.0.gemm)(dtype);
        let n_prompt = y.rows().checked_sub(generated.m()).expect("both: rows");
        assert!(self.has_both(dtype, generated.m(), n_prompt), "both: rows");
        assert_eq!(
            Some(w.len()),
            dtype.float_format().bytes_of(y.cols(), k),
            "both: {dtype:?} weight bytes"
        );
        assert_eq!(
            (generated.form(), generated.n()),
            (self.act_form(dtype), k),
            "both: generated rows"
        );
        assert_eq!(
            packed.len(),
            (gemm.packed_len)(n_prompt, k),
            "both: packed activations"
        );
        let mixed = gemm.mixed.expect("has_both");
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (mixed.kernel)(y, dtype, w, generated, packed, k) }
    }

    /// The product with the transpose of a matrix `(n_out, n_in)` of `dtype`: turns gradients with
    /// respect to its outputs into gradients with respect to its inputs.
    pub fn transposed(self, dtype: DType, n_out: usize, n_in: usize) -> TransposedProduct {
        TransposedProduct {
            table: (self.0.transposed)(dtype),
            dtype,
            n_in,
            n_out,
        }
    }

    /// Expands whole blocks, finite ones to exactly the values of
    /// [`Format::dequantize`](crate::quant::Format::dequantize).
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn dequantize(self, dtype: DType, blocks: &[u8], x: &mut [f32]) {
        assert_eq!(
            dtype.float_format().bytes_of(1, x.len()),
            Some(blocks.len()),
            "dequantize: {dtype:?} bytes"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.dequantize)(dtype, blocks, x) }
    }

    /// Prefetches `bytes` into the L2 cache, on CPUs that have an instruction for it.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(unused_variables)
    )]
    pub fn prefetch(self, bytes: &[u8]) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        gemm::prefetch(bytes);
    }

    /// Rounds a row of activations to 16-bit integers.
    ///
    /// # Panics
    /// If `blocks` has another length than [`BlockQ16::per_row`] says.
    pub fn quantize_q16(self, x: &[f32], blocks: &mut [BlockQ16]) {
        assert_eq!(
            blocks.len(),
            BlockQ16::per_row(x.len()),
            "quantize_q16: {} values",
            x.len()
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.quantize_q16)(x, blocks) }
    }

    /// Rounds a row of activations to 16-bit integers in two planes of bytes.
    ///
    /// # Panics
    /// If `blocks` has another length than [`BlockP16::per_row`] says.
    pub fn quantize_p16(self, x: &[f32], blocks: &mut [BlockP16]) {
        assert_eq!(
            blocks.len(),
            BlockP16::per_row(x.len()),
            "quantize_p16: {} values",
            x.len()
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.quantize_p16)(x, blocks) }
    }

    /// `Σ a·b`.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "dot");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.dot)(a, b) }
    }

    /// `y += x`.
    pub fn add(self, y: &mut [f32], x: &[f32]) {
        assert_eq!(y.len(), x.len(), "add");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.add)(y, x) }
    }

    /// `y += a·x`.
    pub fn add_scaled(self, y: &mut [f32], x: &[f32], a: f32) {
        assert_eq!(y.len(), x.len(), "add_scaled");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.add_scaled)(y, x, a) }
    }

    /// `y[i][c] += Σ_j t[i][j]·b[j·stride + c]`: a product of low rank, `t: (y.rows(), rank)` with
    /// columns of `B: (rank, stride)`, of which `b` begins at the first. Every sum goes in the
    /// order of `j`, whatever the other rows and columns.
    pub fn add_product(self, y: &mut ColumnsMut<'_>, t: &[f32], b: &[f32], stride: usize) {
        if check_product(y, t, b.len(), stride) {
            // SAFETY: `self` proves the CPU features; shapes were checked above.
            unsafe { (self.0.add_product)(y, t, b, stride) }
        }
    }

    /// [`Arch::add_product`] with the same bits, of columns that are held in 16 bits.
    pub fn add_product_f16(
        self,
        y: &mut ColumnsMut<'_>,
        t: &[f32],
        b: &[half::f16],
        stride: usize,
    ) {
        if check_product(y, t, b.len(), stride) {
            // SAFETY: `self` proves the CPU features; shapes were checked above.
            unsafe { (self.0.add_product_f16)(y, t, b, stride) }
        }
    }

    /// A step of the gated delta rule (arXiv 2412.06464) for a head's `state`, `(k.len(),
    /// v.len())`: `S = rate·S; S = S + k·(β·(v − Sᵀ·k))ᵀ; out = Sᵀ·q`. There is one `rate`, or
    /// one per row of the state.
    pub fn delta_rule(
        self,
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        beta: f32,
        rate: &[f32],
        out: &mut [f32],
    ) {
        assert!(q.len() == k.len() && out.len() == v.len(), "delta_rule");
        assert!(
            Some(state.len()) == k.len().checked_mul(v.len()),
            "delta_rule: the state"
        );
        assert!(
            rate.len() == 1 || rate.len() == k.len(),
            "delta_rule: {} rates",
            rate.len()
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.delta_rule)(state, q, k, v, beta, rate, out) }
    }

    /// A step of a selective state space with one decay (Mamba 2, arXiv 2405.21060) for a head's
    /// `state`, `(b.len(), x.len())`: `S = decay·S + dt·b·xᵀ; out = cᵀ·S`.
    pub fn ssm_step(
        self,
        state: &mut [f32],
        b: &[f32],
        c: &[f32],
        decay: f32,
        dt: f32,
        x: &[f32],
        out: &mut [f32],
    ) {
        assert!(b.len() == c.len() && out.len() == x.len(), "ssm_step");
        assert!(
            Some(state.len()) == x.len().checked_mul(b.len()) && !state.is_empty(),
            "ssm_step: the state"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.ssm_step)(state, b, c, decay, dt, x, out) }
    }

    /// A step of a selective state space whose states have decays of their own (Mamba 1, arXiv
    /// 2312.00752) for the channels of `x`, with `state` and `a` `(b.len(), x.len())`: `s =
    /// exp(dt·a)·s + dt·x·b; out = s·c`.
    pub fn ssm_step_by_state(
        self,
        state: &mut [f32],
        a: &[f32],
        b: &[f32],
        c: &[f32],
        dt: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) {
        assert!(
            b.len() == c.len() && out.len() == x.len() && dt.len() == x.len(),
            "ssm_step_by_state"
        );
        assert!(
            Some(state.len()) == x.len().checked_mul(b.len()) && !state.is_empty(),
            "ssm_step_by_state: the state"
        );
        assert!(a.len() == state.len(), "ssm_step_by_state: the decays");
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.ssm_step_by_state)(state, a, b, c, dt, x, out) }
    }

    /// A step of a causal convolution of each channel of `x` by itself: adds the products of taps
    /// and values, of which those of the tokens before are `past`, `(n, x.len())`, to `out`;
    /// then `x` follows there, and the oldest leave. The rows of the `n + 1` taps lie so many
    /// values apart.
    pub fn causal_conv(self, past: &mut [f32], taps: (&[f32], usize), x: &[f32], out: &mut [f32]) {
        assert!(
            !x.is_empty() && past.len().is_multiple_of(x.len()) && out.len() == x.len(),
            "causal_conv"
        );
        assert!(
            has_rows(taps, past.len() / x.len() + 1, x.len()),
            "causal_conv: the taps"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.causal_conv)(past, taps, x, out) }
    }

    /// A step of RWKV 6 (arXiv 2404.05892) for a head's `state`, `(k.len(), v.len())`:
    /// `out = (S + (first·k)·vᵀ)ᵀ·r; S = diag(w)·S + k·vᵀ`.
    pub fn rwkv6_step(
        self,
        state: &mut [f32],
        r: &[f32],
        k: &[f32],
        v: &[f32],
        w: &[f32],
        first: &[f32],
        out: &mut [f32],
    ) {
        assert!(
            [r, w, first].iter().all(|x| x.len() == k.len()) && out.len() == v.len(),
            "rwkv6_step"
        );
        assert!(
            Some(state.len()) == k.len().checked_mul(v.len()),
            "rwkv6_step: the state"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.rwkv6_step)(state, r, k, v, w, first, out) }
    }

    /// A step of RWKV 7 (arXiv 2503.14456) for a head's `state`, `(v.len(), r.len())`:
    /// `S = S·diag(w) + (S·a)·bᵀ + v·kᵀ; out = S·r`.
    pub fn rwkv7_step(
        self,
        state: &mut [f32],
        [r, k, w, a, b]: [&[f32]; 5],
        v: &[f32],
        out: &mut [f32],
    ) {
        assert!(
            [k, w, a, b].iter().all(|x| x.len() == r.len()) && out.len() == v.len(),
            "rwkv7_step"
        );
        assert!(
            Some(state.len()) == r.len().checked_mul(v.len()) && !r.is_empty(),
            "rwkv7_step: the state"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.rwkv7_step)(state, [r, k, w, a, b], v, out) }
    }

    /// `y = x / sqrt(mean(x²) + eps) · w` (Zhang & Sennrich, arXiv 1910.07467).
    pub fn rms_norm(self, y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
        assert!(y.len() == x.len() && w.len() == x.len(), "rms_norm");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.rms_norm)(y, x, w, eps) }
    }

    /// `y = (x − mean) / sqrt(var + eps) · w + b` (Ba et al., arXiv 1607.06450).
    pub fn layer_norm(self, y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
        assert!(
            y.len() == x.len() && w.len() == x.len() && b.len() == x.len(),
            "layer_norm"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.layer_norm)(y, x, w, b, eps) }
    }

    /// Adds to `dx` the gradient with respect to the `x` of [`Arch::rms_norm`]; `dy` is that with
    /// respect to its `y`.
    pub fn rms_norm_backward(self, dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
        assert!(
            dx.len() == x.len() && dy.len() == x.len() && w.len() == x.len(),
            "rms_norm_backward"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.rms_norm_backward)(dx, dy, x, w, eps) }
    }

    /// Adds to `dx` the gradient with respect to the `x` of [`Arch::layer_norm`]; `dy` is that with
    /// respect to its `y`.
    pub fn layer_norm_backward(self, dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
        assert!(
            dx.len() == x.len() && dy.len() == x.len() && w.len() == x.len(),
            "layer_norm_backward"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.layer_norm_backward)(dx, dy, x, w, eps) }
    }

    /// Softmax in place.
    pub fn softmax(self, x: &mut [f32]) {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.softmax)(x) }
    }

    /// `cos[i] = factor·cos(pos·frequencies[i])`, and `sin` likewise: the angles of RoPE for the
    /// token at `pos`.
    pub fn rope_angles(
        self,
        cos: &mut [f32],
        sin: &mut [f32],
        frequencies: &[f32],
        pos: f32,
        factor: f32,
    ) {
        assert!(
            cos.len() == frequencies.len() && sin.len() == frequencies.len(),
            "rope_angles"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.rope_angles)(cos, sin, frequencies, pos, factor) }
    }

    /// Rotates adjacent pairs `(x[2i], x[2i+1])` of one head by `cos[i], sin[i]` (RoFormer, arXiv
    /// 2104.09864); `x.len() == 2·cos.len()`.
    pub fn rope_norm(self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert!(
            Some(x.len()) == cos.len().checked_mul(2) && sin.len() == cos.len(),
            "rope_norm"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked.
        unsafe { (self.0.rope_norm)(x, cos, sin) }
    }

    /// Rotates the pairs `(x[i], x[i + n/2])` of one head (GPT-NeoX order).
    pub fn rope_neox(self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert!(
            Some(x.len()) == cos.len().checked_mul(2) && sin.len() == cos.len(),
            "rope_neox"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked.
        unsafe { (self.0.rope_neox)(x, cos, sin) }
    }

    /// `gate = silu(gate)·up` (SwiGLU, arXiv 2002.05202).
    pub fn silu_mul(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "silu_mul");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.silu_mul)(gate, up) }
    }

    /// `gate = gelu(gate)·up`, with the tanh form of GELU (arXiv 1606.08415).
    pub fn gelu_mul(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gelu_mul");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.gelu_mul)(gate, up) }
    }

    /// `gate = gelu(gate)·up`, by the error function.
    pub fn gelu_erf_mul(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gelu_erf_mul");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.gelu_erf_mul)(gate, up) }
    }

    /// `x = gelu(x) = x/2·(1 + erf(x/√2))`.
    pub fn gelu_erf(self, x: &mut [f32]) {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.gelu_erf)(x) }
    }

    /// `gate = g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7
    /// (gpt-oss).
    pub fn swiglu_oai(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "swiglu_oai");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.swiglu_oai)(gate, up) }
    }

    /// `gate = σ(gate)·x`.
    pub fn sigmoid_mul(self, gate: &mut [f32], x: &[f32]) {
        assert_eq!(gate.len(), x.len(), "sigmoid_mul");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.sigmoid_mul)(gate, x) }
    }

    /// `x = gelu(x)`, tanh form.
    pub fn gelu(self, x: &mut [f32]) {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.gelu)(x) }
    }

    /// Replaces the operands of [`Arch::silu_mul`] by their gradients; `dy` is that of its result.
    pub fn silu_mul_backward(self, gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        assert!(
            gate.len() == up.len() && gate.len() == dy.len(),
            "silu_mul_backward"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.silu_mul_backward)(gate, up, dy) }
    }

    /// Replaces the operands of [`Arch::gelu_mul`] by their gradients; `dy` is that of its result.
    pub fn gelu_mul_backward(self, gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        assert!(
            gate.len() == up.len() && gate.len() == dy.len(),
            "gelu_mul_backward"
        );
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.gelu_mul_backward)(gate, up, dy) }
    }

    /// Replaces the operand of [`Arch::gelu`] by its gradient; `dy` is that of its result.
    pub fn gelu_backward(self, x: &mut [f32], dy: &[f32]) {
        assert_eq!(x.len(), dy.len(), "gelu_backward");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.gelu_backward)(x, dy) }
    }

    /// Rounds to half precision, ties to even.
    pub fn f32_to_f16(self, x: &[f32], y: &mut [half::f16]) {
        assert_eq!(x.len(), y.len(), "f32_to_f16");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.f32_to_f16)(x, y) }
    }

    /// Widens half precision; exact.
    pub fn f16_to_f32(self, x: &[half::f16], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "f16_to_f32");
        // SAFETY: `self` proves the CPU features; lengths are equal.
        unsafe { (self.0.f16_to_f32)(x, y) }
    }
}

/// Operands of the backward pass of [`Arch::attention`], all of one KV head.
#[derive(Clone, Copy, Debug)]
pub struct AttnBackward<'a> {
    /// Queries, `(n_q, head_dim)`.
    pub q: &'a [f32],
    /// Gradient of the output, `(n_q, head_dim_v)`.
    pub dout: &'a [f32],
    /// `Σ dout·out` of each query.
    pub delta: &'a [f32],
    /// Keys, `(n_kv, head_dim)`.
    pub k: &'a [f32],
    /// Values, `(n_kv, head_dim_v)`.
    pub v: &'a [f32],
}

impl AttnBackward<'_> {
    fn check(&self, n_q: usize, n_kv: usize, p: &AttnParams) {
        assert!(
            p.head_dim.max(p.head_dim_v) <= MAX_HEAD_DIM,
            "attention: heads at most {MAX_HEAD_DIM} wide"
        );
        assert!(
            self.q.len() == n_q * p.head_dim && self.dout.len() == n_q * p.head_dim_v,
            "attention: queries"
        );
        assert!(self.delta.len() == n_q, "attention: delta");
        assert!(
            self.k.len() == n_kv * p.head_dim && self.v.len() == n_kv * p.head_dim_v,
            "attention: keys and values"
        );
    }
}

impl Arch {
    /// The gradient of the queries of [`Arch::attention`], `dq: (n_q, head_dim)`, and `lse: (n_q)`,
    /// the log-sum-exp of each query's scores. `ranges` are the keys that each query sees.
    ///
    /// # Panics
    /// If the shapes disagree, or a range is empty or ends after the keys.
    pub fn attention_queries(
        self,
        dq: &mut [f32],
        lse: &mut [f32],
        x: AttnBackward<'_>,
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let n_kv = x.k.len() / p.head_dim;
        x.check(ranges.len(), n_kv, p);
        assert!(
            dq.len() == x.q.len() && lse.len() == ranges.len(),
            "attention_queries"
        );
        assert!(
            ranges.iter().all(|&(a, b)| a < b && b as usize <= n_kv),
            "attention_queries: ranges"
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_queries)(dq, lse, x.q, x.dout, x.delta, x.k, x.v, ranges, p) }
    }

    /// The gradients of the keys and values of [`Arch::attention`], `dk: (n_kv, head_dim)` and
    /// `dv: (n_kv, head_dim_v)`, with `lse` of [`Arch::attention_queries`]. `ranges` are the
    /// queries that see each key.
    ///
    /// # Panics
    /// If the shapes disagree, or a range is empty or ends after the queries.
    pub fn attention_keys(
        self,
        dk: &mut [f32],
        dv: &mut [f32],
        x: AttnBackward<'_>,
        lse: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let n_q = x.q.len() / p.head_dim;
        x.check(n_q, ranges.len(), p);
        assert!(
            dk.len() == x.k.len() && dv.len() == x.v.len() && lse.len() == n_q,
            "attention_keys"
        );
        assert!(
            ranges.iter().all(|&(a, b)| a < b && b as usize <= n_q),
            "attention_keys: ranges"
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_keys)(dk, dv, x.k, x.v, x.q, x.dout, lse, x.delta, ranges, p) }
    }
}

/// A level that cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "instruction-set level {name:?} is {}; this CPU has: {}",
    if *.known { "not supported by this CPU" } else { "not known" },
    .available.join(", ")
)]
pub struct ArchError {
    /// Name of the requested level.
    pub name: String,
    /// Levels that can be used, best first.
    pub available: Vec<&'static str>,
    /// Whether this build knows the level at all.
    pub known: bool,
}

#[cfg(test)]
mod tests;
