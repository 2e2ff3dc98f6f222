// Element-wise kernels, one thread per value.
#include "common.h"

struct ElementwiseArgs {
    uint n;
};

// `gate = silu(gate) * up`.
kernel void silu_mul(device float* gate [[buffer(0)]],
                     device const float* up [[buffer(1)]],
                     constant ElementwiseArgs& p [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {
    if (i < p.n) gate[i] = times_sigmoid(gate[i], gate[i]) * up[i];
}

// `x / 2 * (1 + tanh(u / 2))` with `u = 2 sqrt(2 / pi) (x + 0.044715 x^3)`, as `x / (1 + exp(-u))`, which does not
// cancel.
inline float gelu_tanh(float x) {
    return times_sigmoid(x, 1.595769122f * x * (1.0f + 0.044715f * x * x));
}

// `gate = gelu(gate) * up`.
kernel void gelu_mul(device float* gate [[buffer(0)]],
                     device const float* up [[buffer(1)]],
                     constant ElementwiseArgs& p [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {
    if (i < p.n) gate[i] = gelu_tanh(gate[i]) * up[i];
}

// `gate = g / (1 + exp(-1.702 g)) * (u + 1)` with `g = min(gate, 7)` and `u` the values of `up` clamped to -7..7.
// Comparisons instead of `min` and `max` keep NaN.
kernel void swiglu_oai(device float* gate [[buffer(0)]],
                       device const float* up [[buffer(1)]],
                       constant ElementwiseArgs& p [[buffer(2)]],
                       uint i [[thread_position_in_grid]]) {
    if (i >= p.n) return;
    const float g = gate[i] > 7.0f ? 7.0f : gate[i];
    const float u = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
    gate[i] = times_sigmoid(g, 1.702f * g) * (u + 1.0f);
}

// `x = gelu(x)`.
kernel void gelu(device float* x [[buffer(0)]],
                 constant ElementwiseArgs& p [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
    if (i < p.n) x[i] = gelu_tanh(x[i]);
}

// `x = max(x, 0)^2`.
kernel void squared_relu(device float* x [[buffer(0)]],
                         constant ElementwiseArgs& p [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
    if (i < p.n) x[i] *= max(x[i], 0.0f);
}

struct AddScaledArgs {
    uint n;
    float scale;
};

// `y += scale * x`.
kernel void add_scaled(device float* y [[buffer(0)]],
                       device const float* x [[buffer(1)]],
                       constant AddScaledArgs& p [[buffer(2)]],
                       uint i [[thread_position_in_grid]]) {
    if (i < p.n) y[i] += p.scale * x[i];
}

struct AddBiasArgs {
    uint n;
    uint n_rows;
};

// `y[r] += bias`.
kernel void add_bias(device float* y [[buffer(0)]],
                     device const float* bias [[buffer(1)]],
                     constant AddBiasArgs& p [[buffer(2)]],
                     uint2 at [[thread_position_in_grid]]) {
    if (at.x < p.n) y[ulong(at.y) * p.n + at.x] += bias[at.x];
}

struct AddGatedArgs {
    uint n;
    uint n_rows;
};

// Adds a shared expert's output: `y[r] += x[r] / (1 + exp(-gate[r]))`.
kernel void add_gated(device float* y [[buffer(0)]],
                      device const float* x [[buffer(1)]],
                      device const float* gate [[buffer(2)]],
                      constant AddGatedArgs& p [[buffer(3)]],
                      uint2 at [[thread_position_in_grid]]) {
    const ulong i = ulong(at.y) * p.n + at.x;
    if (at.x < p.n) y[i] += times_sigmoid(x[i], gate[at.y]);
}

struct FinishLogitsArgs {
    uint n;
    float scale;
    float softcap;
};

// `x = softcap * tanh(scale * x / softcap)`, or `scale * x` where softcap is 0.
kernel void finish_logits(device float* x [[buffer(0)]],
                          constant FinishLogitsArgs& p [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
    if (i < p.n) x[i] = softcapped(p.scale * x[i], p.softcap);
}
