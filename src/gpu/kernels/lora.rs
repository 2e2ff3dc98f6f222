//! Kernels of adapters.

use crate::gpu::kernels::{
    Element, Kernel, LoraArgs, LoraExpertsArgs, NO_MEMORY, NO_VARIANTS, changes, product, reads,
    writes,
};

/// `t = x·Aᵀ` of an adapter.
pub static LORA_A: Kernel<LoraArgs> = Kernel {
    name: "lora_a",
    source: "lora.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("a", Element::F32, |a| product(&[a.rank, a.n_in])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("t", Element::F32, |a| product(&[a.n_rows, a.rank])),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.rank, a.n_rows, 1],
};

/// Values of the columns that a product computes of all rows of `B`, which are `b_stride` apart.
fn b_len(a: &LoraArgs) -> u64 {
    product(&[a.rank - 1, a.b_stride]) + u64::from(a.n_out)
}

/// `y += scale·t·B` of an adapter.
pub static LORA_B: Kernel<LoraArgs> = Kernel {
    name: "lora_b",
    buffers: &[
        reads("b", Element::F32, b_len),
        reads("t", Element::F32, |a| product(&[a.n_rows, a.rank])),
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 256,
    grid: |a, _| [a.n_out.div_ceil(256), a.n_rows, 1],
    ..LORA_A
};

/// Adds an adapter's terms to rows of the embedding table, `n_in` is the number of tokens.
pub static LORA_EMBED: Kernel<LoraArgs> = Kernel {
    name: "lora_embed",
    buffers: &[
        reads("a", Element::F32, |a| product(&[a.rank, a.n_in])),
        reads("b", Element::F32, b_len),
        reads("tokens", Element::U32, |a| a.n_rows.into()),
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    ..LORA_B
};

/// Adds the terms of chosen experts to their products. `terms` has four numbers per expert: the
/// index of its `A` among the adapter's values, that of its `B`, the rank (0 without a term), and
/// the bits of the scale.
pub static LORA_EXPERTS: Kernel<LoraExpertsArgs> = Kernel {
    name: "lora_experts",
    source: "lora.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("values", Element::F32, |a| a.n_values.into()),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        reads("terms", Element::U32, |a| product(&[4, a.n_expert])),
        changes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_chosen, 1, 1],
};
