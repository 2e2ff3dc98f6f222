//! Kernels of mixtures of experts.

use crate::gpu::kernels::{
    AddExpertBiasArgs, CombineExpertsArgs, Element, ExpertRowsArgs, Kernel, MAX_EXPERTS,
    MAX_GROUPS, NO_MEMORY, NO_VARIANTS, RouteArgs, changes, product, reads, writes,
};

/// Chooses experts and their weights, where there are several groups those of the best groups.
pub static ROUTE: Kernel<RouteArgs> = Kernel {
    name: "route",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("router", Element::F32, |a| product(&[a.n_rows, a.n_expert])),
        reads("bias", Element::F32, |a| a.n_expert.into()),
        reads("scales", Element::F32, |a| a.n_expert.into()),
        changes("chosen", Element::U32, |a| product(&[a.n_rows, a.n_used])),
        writes("weights", Element::F32, |a| product(&[a.n_rows, a.n_used])),
    ],
    threads: 32,
    threadgroup_bytes: |_| (2 * MAX_EXPERTS + MAX_GROUPS) * 4,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Lists the rows of each expert.
pub static EXPERT_ROWS: Kernel<ExpertRowsArgs> = Kernel {
    name: "expert_rows",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        writes("counts", Element::U32, |a| a.n_expert.into()),
        writes("lists", Element::U32, |a| {
            product(&[a.n_expert, a.n_chosen])
        }),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_expert, 1, 1],
};

/// Adds to each product of an expert that expert's bias.
pub static ADD_EXPERT_BIAS: Kernel<AddExpertBiasArgs> = Kernel {
    name: "add_expert_bias",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_chosen, a.n])),
        reads("bias", Element::F32, |a| product(&[a.n_expert, a.n])),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_chosen, 1],
};

/// Sums the outputs of a row's experts.
pub static COMBINE_EXPERTS: Kernel<CombineExpertsArgs> = Kernel {
    name: "combine_experts",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_used, a.n])),
        reads("weights", Element::F32, |a| product(&[a.n_rows, a.n_used])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};
