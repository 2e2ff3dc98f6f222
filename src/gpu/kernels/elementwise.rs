//! Kernels of norms, ropes, activations and sums.

use crate::gpu::kernels::{
    AddBiasArgs, AddGatedArgs, AddScaledArgs, Buffer, CopyHeadsArgs, Element, ElementwiseArgs,
    FinishLogitsArgs, FunctionArgs, GateHeadsArgs, Kernel, NO_MEMORY, NO_VARIANTS, NormAddArgs,
    NormArgs, RopeArgs, changes, product, reads, writes,
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

/// Rotates pairs of adjacent dimensions, of each head those from `first` on.
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

/// Functions of [`UNARY`], with their arguments in `FunctionArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum UnaryFunction {
    /// `a·x`.
    Scale,
    /// `x`, clamped to `a..=b`: with 0 and [`f32::MAX`], `max(x, 0)`.
    Clamp,
    /// `gelu(x)`, by the error function.
    GeluErf,
    /// `x²·a + x·c` for positive values, `(e^min(x, d) − 1 − x)·b + x·c` for others.
    Xielu,
    /// `ln(1 + eˣ)`.
    Softplus,
}

/// Functions of [`GATED`].
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum GatedFunction {
    /// `max(gate, 0)·up`.
    Relu,
    /// `gelu(gate)·up`, by the error function.
    GeluErf,
    /// `silu(min(gate, a))·u`, where `u` is `up` clamped to `±a`.
    SiluClamped,
    /// `min(silu(gate), a)·u`, with the same `u`.
    SiluClampedAfter,
    /// `a·tanh(gate/a)·σ(gate)·u`, where `u` is `b·tanh(up/b)`, or `up` if `b` is 0.
    Situ,
}

/// `x = f(x)`.
pub static UNARY: Kernel<FunctionArgs> = Kernel {
    name: "unary",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| a.n.into())],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// `gate = f(gate, up)`.
pub static GATED: Kernel<FunctionArgs> = Kernel {
    name: "gated",
    buffers: &[
        changes("gate", Element::F32, |a| a.n.into()),
        reads("up", Element::F32, |a| a.n.into()),
    ],
    ..UNARY
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

/// Last element of what a kernel accesses with these distances, plus one.
fn extent(counts: [u32; 3], distances: [u32; 3]) -> u64 {
    let last = counts.into_iter().zip(distances);
    1 + last
        .map(|(n, distance)| product(&[n.saturating_sub(1), distance]))
        .sum::<u64>()
}

/// What [`GATE_HEADS`] makes of a gate, `GateHeadsArgs::function`.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum GateFunction {
    /// Its sigmoid.
    Sigmoid,
    /// `ln(1 + eˣ)`.
    Softplus,
    /// The gate itself.
    Identity,
}

/// Multiplies each of `n` values of heads by its gate, `gate_value`, `gate_head` and `gate_row` of
/// which are the distances from a value's, a head's and a row's to the next; 0 where all share one.
pub static GATE_HEADS: Kernel<GateHeadsArgs> = Kernel {
    name: "gate_heads",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_head, a.n])),
        reads("gate", Element::F32, |a| {
            extent(
                [a.n_rows, a.n_head, a.n],
                [a.gate_row, a.gate_head, a.gate_value],
            )
        }),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [(a.n_head * a.n).div_ceil(256), a.n_rows, 1],
};

/// Copies `n` values of heads; the other arguments are distances from a head, and from a row, to the
/// next one.
pub static COPY_HEADS: Kernel<CopyHeadsArgs> = Kernel {
    name: "copy_heads",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| {
            extent([a.n_rows, a.n_head, a.n], [a.x_row, a.x_head, 1])
        }),
        changes("y", Element::F32, |a| {
            extent([a.n_rows, a.n_head, a.n], [a.y_row, a.y_head, 1])
        }),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [(a.n_head * a.n).div_ceil(256), a.n_rows, 1],
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
