//! Kernels of norms, ropes, activations and sums.

use crate::gpu::kernels::{
    AddBiasArgs, AddGatedArgs, AddScaledArgs, Buffer, Element, ElementwiseArgs, FinishLogitsArgs,
    Kernel, NO_MEMORY, NO_VARIANTS, NormAddArgs, NormArgs, RopeArgs, changes, product, reads,
    writes,
};

/// RMS norm of rows.
pub static RMS_NORM: Kernel<NormArgs> = Kernel {
    name: "rms_norm",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Adds a branch to the residual stream, then RMS norm.
pub static RMS_NORM_ADD: Kernel<NormAddArgs> = Kernel {
    name: "rms_norm_add",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("branch", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Layer norm of rows.
pub static LAYER_NORM: Kernel<NormArgs> = Kernel {
    name: "layer_norm",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        reads("b", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Adds a branch to the residual stream, then layer norm.
pub static LAYER_NORM_ADD: Kernel<NormAddArgs> = Kernel {
    name: "layer_norm_add",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("branch", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        reads("b", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// RMS norm of single heads, in place: each row is a head.
pub static RMS_NORM_HEADS: Kernel<NormArgs> = Kernel {
    name: "rms_norm_heads",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_rows.div_ceil(4), 1, 1],
};

const ROPE_BUFFERS: &[Buffer<RopeArgs>] = &[
    changes("x", Element::F32, |a| {
        product(&[a.n_rows, a.n_head, a.head_dim])
    }),
    reads("angles", Element::F32x2, |a| {
        product(&[a.n_rows, a.n_dims / 2])
    }),
];

/// Rotates pairs of adjacent dimensions.
pub static ROPE_NORM: Kernel<RopeArgs> = Kernel {
    name: "rope_norm",
    source: "rope.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: ROPE_BUFFERS,
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [(a.n_head * (a.n_dims / 2)).div_ceil(128), a.n_rows, 1],
};

/// Rotates pairs that are half of the rotated dimensions apart.
pub static ROPE_NEOX: Kernel<RopeArgs> = Kernel {
    name: "rope_neox",
    ..ROPE_NORM
};

const GATE_BUFFERS: &[Buffer<ElementwiseArgs>] = &[
    changes("gate", Element::F32, |a| a.n.into()),
    reads("up", Element::F32, |a| a.n.into()),
];

/// `gate = silu(gate)·up`.
pub static SILU_MUL: Kernel<ElementwiseArgs> = Kernel {
    name: "silu_mul",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: GATE_BUFFERS,
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// `gate = gelu(gate)·up`.
pub static GELU_MUL: Kernel<ElementwiseArgs> = Kernel {
    name: "gelu_mul",
    ..SILU_MUL
};

/// `gate = g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7.
pub static SWIGLU_OAI: Kernel<ElementwiseArgs> = Kernel {
    name: "swiglu_oai",
    ..SILU_MUL
};

/// `x = gelu(x)`.
pub static GELU: Kernel<ElementwiseArgs> = Kernel {
    name: "gelu",
    buffers: &[changes("x", Element::F32, |a| a.n.into())],
    ..SILU_MUL
};

/// `x = max(x, 0)²`.
pub static SQUARED_RELU: Kernel<ElementwiseArgs> = Kernel {
    name: "squared_relu",
    ..GELU
};

/// `y += scale·x`.
pub static ADD_SCALED: Kernel<AddScaledArgs> = Kernel {
    name: "add_scaled",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| a.n.into()),
        reads("x", Element::F32, |a| a.n.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// Adds a bias to every row.
pub static ADD_BIAS: Kernel<AddBiasArgs> = Kernel {
    name: "add_bias",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("bias", Element::F32, |a| a.n.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};

/// Adds rows, each multiplied by the sigmoid of its gate.
pub static ADD_GATED: Kernel<AddGatedArgs> = Kernel {
    name: "add_gated",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("gate", Element::F32, |a| a.n_rows.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};

/// Scales and caps logits, see `LogitTransform`.
pub static FINISH_LOGITS: Kernel<FinishLogitsArgs> = Kernel {
    name: "finish_logits",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| a.n.into())],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};
