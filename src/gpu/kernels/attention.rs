//! Kernels of attention and of pages.

#[cfg(feature = "webgpu")]
use crate::gpu::kernels::HeadsArgs;
use crate::gpu::kernels::{
    AppendArgs, AttentionArgs, Element, HadamardArgs, Kernel, NO_MEMORY, NO_VARIANTS, changes,
    product, reads, writes,
};

/// Variant numbers of attention kernels: each takes heads up to this width, the last one values up to
/// [`MAX_VALUES`].
pub const HEAD_DIMS: &[u32] = &[128, 256, 512, 576];
/// Most values of a value head.
pub const MAX_VALUES: u32 = 512;

/// Query heads that [`ATTENTION_DECODE`] takes in a threadgroup.
fn heads_each(variant: u32) -> u32 {
    1024 / variant.min(MAX_VALUES)
}

/// Attention of generated tokens, one split of the keys per threadgroup. `n_splits` is the largest
/// number of splits of a row in the batch, `n_pages` the length of all page tables.
pub static ATTENTION_DECODE: Kernel<AttentionArgs> = Kernel {
    name: "attention_decode",
    source: "attention_decode.metal",
    per_format: false,
    variants: HEAD_DIMS,
    buffers: &[
        reads("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
        writes("partial", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.n_splits, a.head_dim_v + 2])
        }),
    ],
    threads: 128,
    threadgroup_bytes: |d| heads_each(d) * (2 * d + 65) * 4,
    grid: |a, d| {
        [
            a.n_splits,
            a.n_head_kv * (a.n_head / a.n_head_kv).div_ceil(heads_each(d)),
            a.n_rows,
        ]
    },
};

/// Merges the splits of [`ATTENTION_DECODE`].
pub static ATTENTION_MERGE: Kernel<AttentionArgs> = Kernel {
    name: "attention_merge",
    source: "attention_decode.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("partial", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.n_splits, a.head_dim_v + 2])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("sinks", Element::F32, |a| a.n_head.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_head, a.n_rows, 1],
};

/// [`ATTENTION_DECODE`] with [`ATTENTION_MERGE`], where no row has a second split.
#[cfg(feature = "webgpu")]
pub static ATTENTION_SINGLE: Kernel<AttentionArgs> = Kernel {
    name: "attention_single",
    buffers: &[
        reads("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
        reads("sinks", Element::F32, |a| a.n_head.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    ..ATTENTION_DECODE
};

/// Variants of [`HEADS`]: pairs of adjacent dimensions or of distant ones are rotated, without and
/// with norms of heads.
#[cfg(feature = "webgpu")]
pub const HEADS_VARIANTS: &[u32] = &[0, 1, 2, 3];

/// Norms (of `n_norm` values, or 0), rotations and [`APPEND`] of a row's heads, with keys and values
/// in f16.
#[cfg(feature = "webgpu")]
pub static HEADS: Kernel<HeadsArgs> = Kernel {
    name: "heads",
    source: "heads.wgsl",
    per_format: false,
    variants: HEADS_VARIANTS,
    buffers: &[
        changes("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        changes("k", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim])
        }),
        reads("v", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim_v])
        }),
        reads("q_norm", Element::F32, |a| a.n_norm.into()),
        reads("k_norm", Element::F32, |a| a.n_norm.into()),
        reads("angles", Element::F32x2, |a| {
            product(&[a.n_rows, a.n_dims / 2])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_head + 2 * a.n_head_kv, a.n_rows, 1],
};

/// Largest number of rows in a tile of [`ATTENTION_PROMPT`], given its variant number.
pub fn prompt_tile_rows(variant: u32) -> u32 {
    4096 / variant.min(MAX_VALUES)
}

/// Attention of prompts, one tile of rows per threadgroup.
pub static ATTENTION_PROMPT: Kernel<AttentionArgs> = Kernel {
    name: "attention_prompt",
    source: "attention_prompt.metal",
    per_format: false,
    variants: HEAD_DIMS,
    buffers: &[
        reads("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
        reads("tiles", Element::Tile, |a| a.n_tiles.into()),
        reads("sinks", Element::F32, |a| a.n_head.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    threads: 128,
    threadgroup_bytes: |d| prompt_tile_rows(d) * (d + 64 + 8) * 4 + d * 16,
    grid: |a, _| [a.n_tiles, a.n_head, 1],
};

/// Appends keys and values to pages, in f16 or quantised; a simdgroup takes up to 32 values of a
/// head.
pub static APPEND: Kernel<AppendArgs> = Kernel {
    name: "append",
    source: "pages.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("keys", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim])
        }),
        reads("values", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim_v])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| {
        [
            (a.n_head_kv * (a.head_dim.div_ceil(32) + a.head_dim_v.div_ceil(32))).div_ceil(4),
            a.n_rows,
            1,
        ]
    },
};

/// Transforms keys below 8 bits, and their queries, in place: each row is a head of at most 576
/// values.
pub static HADAMARD: Kernel<HadamardArgs> = Kernel {
    name: "hadamard",
    source: "pages.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| product(&[a.n_rows, a.n]))],
    threads: 128,
    threadgroup_bytes: |_| 4 * 576 * 4,
    grid: |a, _| [a.n_rows.div_ceil(4), 1, 1],
};
