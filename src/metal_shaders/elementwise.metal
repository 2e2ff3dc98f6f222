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

struct FunctionArgs {
    uint n;
    uint function;
    float a;
    float b;
    float c;
    float d;
};

// Clamps `x` to `low..high`; comparisons instead of `min` and `max` keep NaN.
inline float bounded(float x, float low, float high) { return x > high ? high : x < low ? low : x; }

// `x / 2 * (1 + erf(x / sqrt(2))) = x / 2 * erfc(-x / sqrt(2))`, with the approximation of `erfc` in src/arch/scalar.
inline float gelu_erf(float x) {
    const float near = bounded(x, -40.0f, 40.0f); // farther out the tail is 0
    const float z = fabs(near) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    float sum = 0.17087277f;
    sum = sum * t - 0.82215223f;
    sum = sum * t + 1.4885159f;
    sum = sum * t - 1.135204f;
    sum = sum * t + 0.27886807f;
    sum = sum * t - 0.18628806f;
    sum = sum * t + 0.09678418f;
    sum = sum * t + 0.37409196f;
    sum = sum * t + 1.0000237f;
    sum = sum * t - 1.2655122f;
    const float tail = 0.5f * near * t * exp(sum - z * z);
    return x < 0.0f ? tail : x - tail;
}

constant constexpr uint UNARY_SCALE = 0;    // a x
constant constexpr uint UNARY_CLAMP = 1;    // x, clamped to a..b
constant constexpr uint UNARY_GELU_ERF = 2;
constant constexpr uint UNARY_SOFTPLUS = 4; // otherwise xIELU

// `x = f(x)`.
kernel void unary(device float* x [[buffer(0)]],
                  constant FunctionArgs& p [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
    if (i >= p.n) return;
    const float v = x[i];
    if (p.function == UNARY_SCALE) {
        x[i] = p.a * v;
    } else if (p.function == UNARY_CLAMP) {
        x[i] = bounded(v, p.a, p.b);
    } else if (p.function == UNARY_GELU_ERF) {
        x[i] = gelu_erf(v);
    } else if (p.function == UNARY_SOFTPLUS) {
        x[i] = softplus(v);
    } else {
        const float curve = v > 0.0f ? v * v * p.a : (exp(min(v, p.d)) - 1.0f - v) * p.b;
        x[i] = curve + p.c * v;
    }
}

constant constexpr uint GATED_RELU = 0;               // max(gate, 0) up
constant constexpr uint GATED_GELU_ERF = 1;           // gelu(gate) up
constant constexpr uint GATED_SILU_CLAMPED = 2;       // silu(min(gate, a)) u, where u is up clamped to -a..a
constant constexpr uint GATED_SILU_CLAMPED_AFTER = 3; // min(silu(gate), a) u, otherwise SiTU

// `gate = f(gate, up)`.
kernel void gated(device float* gate [[buffer(0)]],
                  device const float* up [[buffer(1)]],
                  constant FunctionArgs& p [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
    if (i >= p.n) return;
    const float g = gate[i], u = up[i];
    if (p.function == GATED_RELU) {
        gate[i] = (g < 0.0f ? 0.0f : g) * u;
    } else if (p.function == GATED_GELU_ERF) {
        gate[i] = gelu_erf(g) * u;
    } else if (p.function == GATED_SILU_CLAMPED) {
        const float below = g > p.a ? p.a : g;
        gate[i] = times_sigmoid(below, below) * bounded(u, -p.a, p.a);
    } else if (p.function == GATED_SILU_CLAMPED_AFTER) {
        const float silu = times_sigmoid(g, g);
        gate[i] = (silu > p.a ? p.a : silu) * bounded(u, -p.a, p.a);
    } else {
        gate[i] = times_sigmoid(softcapped(g, p.a), g) * softcapped(u, p.b);
    }
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

struct GateHeadsArgs {
    uint n;
    uint n_head;
    uint n_rows;
    uint gate_value;
    uint gate_head;
    uint gate_row;
    uint function;
};

// What becomes of a gate.
constant constexpr uint GATE_SIGMOID = 0;
constant constexpr uint GATE_SOFTPLUS = 1; // ln(1 + e^x)

// Multiplies `n` values of each head by their gates, whose distances are given: from a value's to the next, a head's, a row's.
kernel void gate_heads(device float* x [[buffer(0)]],
                       device const float* gate [[buffer(1)]],
                       constant GateHeadsArgs& p [[buffer(2)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_head * p.n) return;
    const ulong i = ulong(at.y) * p.n_head * p.n + at.x;
    const float g = gate[ulong(at.y) * p.gate_row + at.x / p.n * p.gate_head + at.x % p.n * p.gate_value];
    if (p.function == GATE_SIGMOID) {
        x[i] = times_sigmoid(x[i], g);
    } else if (p.function == GATE_SOFTPLUS) {
        x[i] *= softplus(g);
    } else {
        x[i] *= g;
    }
}

struct CopyHeadsArgs {
    uint n;
    uint n_head;
    uint n_rows;
    uint x_head;
    uint x_row;
    uint y_head;
    uint y_row;
};

// Copies `n` values of each head; the distances from a head to the next, and from a row to the next, are given.
kernel void copy_heads(device const float* x [[buffer(0)]],
                       device float* y [[buffer(1)]],
                       constant CopyHeadsArgs& p [[buffer(2)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_head * p.n) return;
    const uint head = at.x / p.n, c = at.x % p.n;
    y[ulong(at.y) * p.y_row + head * p.y_head + c] = x[ulong(at.y) * p.x_row + head * p.x_head + c];
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
