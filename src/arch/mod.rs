//! Kernels, one complete table of them per instruction-set level.
//!
//! [`Arch`] is a token that only detection can make: it proves that the CPU has the features its
//! kernels need, so its methods are safe. They check lengths once; the kernels trust those lengths.
//! `scalar` is complete and reads like the maths; every other level is a constant that overrides
//! fields of the level below it, or takes them from it.
//!
//! Kernels know slices and blocks, nothing of models, threads or allocation. Files are mirrored
//! across levels: `matmul.rs` (decode rows, or all rows of plain floats), `gemm.rs` (prefill rows),
//! `unpack.rs` (block formats), `attention.rs`, `elementwise.rs`; `generic` has the source that
//! levels share.
//!
//! # Five words
//!
//! A **panel** is weights, unpacked from their blocks, that stay in the L1 or L2 cache while all
//! activation rows are multiplied (`gemm.rs`; `B̃` and `Ã` of Goto and van de Geijn). Activations
//! are packed once, interleaved, so that a register takes one word of each of its rows:
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
//! A **coded** format looks its weights up: a block stores signs and the number of an entry of a
//! fixed grid, and an entry stores a code of few bits for each of its 4 or 8 values
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
pub const ARITHMETIC_VERSION: u32 = 12;

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod acts;
mod arrays;
mod attention;
mod declared;
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
mod gemm;
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
mod generic;
pub(crate) mod kv;
mod level;
mod methods;
mod scalar;
mod table;
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
mod transposed;
mod view;
#[cfg(target_feature = "simd128")]
mod wasm32;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use acts::{ActForm, Acts, BlockP16, BlockQ16};
pub use attention::{AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvSpan, MAX_HEAD_DIM};
pub use kv::KvStored;
pub(crate) use kv::KvType;
pub(crate) use kv::drop_bits;
pub use level::{Arch, ArchError};
pub use methods::{AttnBackward, KvElement, TransposedProduct};
pub use table::PanelElement;
pub use view::{CacheLine, ColumnsMut};

#[cfg(test)]
mod tests;
