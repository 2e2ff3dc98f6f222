//! Kernels of products, and of the embedding table.

use crate::gpu::kernels::{
    Element, EmbedArgs, Kernel, MatmulArgs, MatmulExpertsArgs, MatvecArgs, MatvecExpertsArgs,
    NO_MEMORY, NO_VARIANTS, product, reads, writes,
};

/// Weight rows per simdgroup of [`MATVEC`] when there are `rows` activation rows.
fn outs_of(rows: u32) -> u32 {
    if rows <= 2 { 4 } else { 2 }
}

/// `y = x·Wᵀ` for up to as many activation rows as the variant number (more take several
/// threadgroups).
pub static MATVEC: Kernel<MatvecArgs> = Kernel {
    name: "matvec",
    source: "matvec.metal",
    per_format: true,
    variants: &[1, 2, 4, 8],
    buffers: &[
        reads("w", Element::Weights, |a| product(&[a.n_out, a.row_bytes])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, rows| {
        [
            a.n_out.div_ceil(4 * outs_of(rows)),
            a.n_rows.div_ceil(rows),
            1,
        ]
    },
};

/// One product per chosen expert.
pub static MATVEC_EXPERTS: Kernel<MatvecExpertsArgs> = Kernel {
    name: "matvec_experts",
    source: "matvec.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_expert, a.n_out, a.row_bytes])
        }),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        writes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_out.div_ceil(4 * outs_of(1)), a.n_chosen, 1],
};

/// Activation rows and weight rows of a tile, and bytes of its panels.
const TILE: (u32, u32, u32) = (32, 64, (32 + 64) * 36 * 4);

/// `y = x·Wᵀ` for many activation rows.
pub static MATMUL: Kernel<MatmulArgs> = Kernel {
    name: "matmul",
    source: "matmul.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| product(&[a.n_out, a.row_bytes])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: |_| TILE.2,
    grid: |a, _| [a.n_out.div_ceil(TILE.1), a.n_rows.div_ceil(TILE.0), 1],
};

/// Products of all experts with the rows that chose them, at most `n_rows` each, from the lists of
/// [`EXPERT_ROWS`](crate::gpu::kernels::EXPERT_ROWS).
pub static MATMUL_EXPERTS: Kernel<MatmulExpertsArgs> = Kernel {
    name: "matmul_experts",
    source: "matmul.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_expert, a.n_out, a.row_bytes])
        }),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("counts", Element::U32, |a| a.n_expert.into()),
        reads("lists", Element::U32, |a| {
            product(&[a.n_expert, a.n_chosen])
        }),
        writes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: |_| TILE.2,
    grid: |a, _| {
        [
            a.n_out.div_ceil(TILE.1),
            a.n_rows.div_ceil(TILE.0),
            a.n_expert,
        ]
    },
};

/// Looks up rows of the embedding table.
pub static EMBED: Kernel<EmbedArgs> = Kernel {
    name: "embed",
    source: "embed.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_vocab, a.row_bytes])
        }),
        reads("tokens", Element::U32, |a| a.n_rows.into()),
        writes("x", Element::F32, |a| product(&[a.n_rows, a.n_embd])),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_embd.div_ceil(16 * 32), a.n_rows, 1],
};
