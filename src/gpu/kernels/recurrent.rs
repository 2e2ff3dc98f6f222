//! Kernels of recurrent layers.
//!
//! Each takes a sequence's rows in order, from the state in its first page on, see
//! [`BatchSlot::states`](crate::gpu::BatchSlot::states). `state` and `feeds` are the first values of
//! the recurrence in pages of states and of inputs.

use crate::gpu::kernels::{
    CausalConvArgs, ChannelScanArgs, DeltaFeedArgs, Element, GatedGroupsArgs, GatedNormArgs,
    KeepFeedsArgs, Kernel, NO_MEMORY, NO_VARIANTS, ScanArgs, TimeStepsArgs, changes, product,
    reads, writes,
};

/// Rows of a sequence per threadgroup of [`CAUSAL_CONV`]; the first ones alone see earlier tokens.
pub const CONV_ROWS: u32 = 32;
/// Variant numbers of kernels of states: each takes heads with up to so many values of keys.
pub const KEY_DIMS: &[u32] = &[128, 256];
/// Columns of a head's state per threadgroup.
pub const STATE_COLUMNS: u32 = 16;

/// Convolution of each channel with its values at earlier tokens, and its new state. `x` are rows of
/// `n_in` values, of which the channels are those from `first` on; so is `out` with rows of `n_out`.
/// Given out is `silu` of the sums; or, if `gated`, their product with what stands `n_channel` values
/// before the channels, which are multiplied by what stands twice as far before them. A part of the
/// state has `part` channels. `n_longest` is the largest number of rows of a sequence.
pub static CAUSAL_CONV: Kernel<CausalConvArgs> = Kernel {
    name: "causal_conv",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        reads("taps", Element::F32, |a| product(&[a.n_tap, a.n_channel])),
        reads("bias", Element::F32, |a| a.n_bias.into()),
        reads("slots", Element::Slot, |a| a.n_slots.into()),
        reads("states", Element::State, |a| a.n_states.into()),
        writes("out", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 64,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| {
        [
            a.n_channel.div_ceil(64),
            a.n_slots,
            a.n_longest.div_ceil(CONV_ROWS),
        ]
    },
};

/// Keeps the inputs of each sequence's last tokens, rows of `n_feed` values.
pub static KEEP_FEEDS: Kernel<KeepFeedsArgs> = Kernel {
    name: "keep_feeds",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_feed])),
        reads("slots", Element::Slot, |a| a.n_slots.into()),
        reads("states", Element::State, |a| a.n_states.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_feed.div_ceil(256), a.n_slots, 1],
};

/// Completes the inputs of [`DELTA_RULE`], rows of `n_feed` values: normalises the heads of queries
/// and keys, which come first, and writes strengths and rates, which come last. `beta` and `rate` are
/// products with the layer's input, `(n_rows, n_head)` and `(n_rows, n_rate)`; or, if `fused`, the
/// same `(n_rows, n_head_k, 2, n_head / n_head_k)`. Rates are bounded by `bound` unless that is 0.
pub static DELTA_FEED: Kernel<DeltaFeedArgs> = Kernel {
    name: "delta_feed",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_feed])),
        reads("beta", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, 1 + a.fused])
        }),
        reads("rate", Element::F32, |a| {
            product(&[a.n_rows, a.n_rate, 1 + a.fused])
        }),
        reads("a", Element::F32, |a| a.n_head.into()),
        reads("dt_bias", Element::F32, |a| a.n_rate.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| {
        let teams = 2 * a.n_head_k + (a.n_head + a.n_rate).div_ceil(32);
        [teams.div_ceil(4), a.n_rows, 1]
    },
};

/// Gated delta rule: each head has a state `(head_dim_k, head_dim_v)`, of which some columns are a
/// threadgroup's. `q`, `k`, `v`, `beta` and `rate` are where these are in rows of `n_feed` values.
/// Parts of `columns` columns of the state are stored one after the other.
pub static DELTA_RULE: Kernel<ScanArgs> = Kernel {
    name: "delta_rule",
    source: "recurrent.metal",
    per_format: false,
    variants: KEY_DIMS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_feed])),
        reads("slots", Element::Slot, |a| a.n_slots.into()),
        reads("states", Element::State, |a| a.n_states.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    threads: 128,
    threadgroup_bytes: |d| (3 * d + 2 * 128) * 4,
    grid: |a, _| {
        [
            a.n_head * a.head_dim_v.div_ceil(STATE_COLUMNS),
            a.n_slots,
            1,
        ]
    },
};

/// State space of Mamba 2: as [`DELTA_RULE`], where `k` goes into the state, `q` out of it, and `beta`
/// are time steps, each of which is a strength, and, times the head's `a`, a rate's logarithm; the
/// value, times the head's `d`, bypasses the state.
pub static SSM_SCAN: Kernel<ScanArgs> = Kernel {
    name: "ssm_scan",
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_feed])),
        reads("a", Element::F32, |a| a.n_head.into()),
        reads("d", Element::F32, |a| a.n_head.into()),
        reads("slots", Element::Slot, |a| a.n_slots.into()),
        reads("states", Element::State, |a| a.n_states.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    ..DELTA_RULE
};

/// Most values of a channel's state of [`CHANNEL_SCAN`].
pub const CHANNEL_STATES: u32 = 64;

/// State space of Mamba 1, a thread per channel. Rows of `x` are channels, their time steps, and
/// `n_state` values each that go into the state and out of it. States, and `a`, lie transposed for each
/// `n_block` channels; a channel, times its `d`, bypasses its state.
pub static CHANNEL_SCAN: Kernel<ChannelScanArgs> = Kernel {
    name: "channel_scan",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| {
            product(&[a.n_rows, 2, a.n_channel + a.n_state])
        }),
        reads("a", Element::F32, |a| product(&[a.n_channel, a.n_state])),
        reads("d", Element::F32, |a| a.n_channel.into()),
        reads("slots", Element::Slot, |a| a.n_slots.into()),
        reads("states", Element::State, |a| a.n_states.into()),
        writes("out", Element::F32, |a| product(&[a.n_rows, a.n_channel])),
    ],
    threads: 64,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_channel.div_ceil(64), a.n_slots, 1],
};

/// Time steps `ln(1 + e^(dt + bias))` of heads, the last of rows of `n_in` values, which become the
/// last of rows of `n_feed`.
pub static TIME_STEPS: Kernel<TimeStepsArgs> = Kernel {
    name: "time_steps",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("input", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        reads("dt_bias", Element::F32, |a| a.n_head.into()),
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_feed])),
    ],
    threads: 64,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_head.div_ceil(64), a.n_rows, 1],
};

/// Multiplies groups of `n` values by `silu` of their gates, which are the first of rows of `n_in`
/// values, and then, if there are weights (`n_norm` of them), takes their RMS norm, in place.
pub static GATED_GROUPS: Kernel<GatedGroupsArgs> = Kernel {
    name: "gated_groups",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_group, a.n])),
        reads("gate", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        reads("w", Element::F32, |a| a.n_norm.into()),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_group, a.n_rows, 1],
};

/// RMS norm of single heads, in place, each value then multiplied by `silu` of its gate, or by the
/// sigmoid of it.
pub static GATED_NORM_HEADS: Kernel<GatedNormArgs> = Kernel {
    name: "gated_norm_heads",
    source: "recurrent.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("gate", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_rows.div_ceil(4), 1, 1],
};
