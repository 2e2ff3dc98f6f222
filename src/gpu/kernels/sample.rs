//! Kernels of sampling.

use crate::gpu::kernels::{
    Element, Kernel, NO_VARIANTS, SORTED, SampleArgs, TopKArgs, changes, product, reads, writes,
};

/// Index of the largest value of each row.
pub static ARGMAX: Kernel<SampleArgs> = Kernel {
    name: "argmax",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        writes("index", Element::U32, |a| a.n_rows.into()),
    ],
    threads: 256,
    threadgroup_bytes: |_| 64,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Softmax of each row.
pub static SOFTMAX: Kernel<SampleArgs> = Kernel {
    name: "softmax",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| product(&[a.n_rows, a.n]))],
    threads: 256,
    threadgroup_bytes: |_| 64,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// The `k` largest of each [`SORTED`] values. If `k` is at most half of that, [`TOP_K_PAIRS`] can
/// then reduce their number.
pub static TOP_K: Kernel<TopKArgs> = Kernel {
    name: "top_k",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        writes("top_values", Element::F32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
        writes("top_indices", Element::U32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
    ],
    threads: 256,
    threadgroup_bytes: |_| 2 * SORTED * 4,
    grid: |a, _| [a.n.div_ceil(SORTED), a.n_rows, 1],
};

/// The `k` largest of each [`SORTED`] pairs of value and index.
pub static TOP_K_PAIRS: Kernel<TopKArgs> = Kernel {
    name: "top_k_pairs",
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("x_indices", Element::U32, |a| product(&[a.n_rows, a.n])),
        writes("top_values", Element::F32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
        writes("top_indices", Element::U32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
    ],
    ..TOP_K
};
