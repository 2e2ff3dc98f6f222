// Norms, one threadgroup of 256 per row. `_add` first adds a branch to the residual stream and stores the sum there.
#include "common.h"

struct NormArgs {
    uint n;
    uint n_rows;
    float eps;
};

struct NormAddArgs {
    uint n;
    uint n_rows;
    float eps;
    float branch_scale;
};

// `1 / sqrt(mean of x^2 + eps)` of a row.
inline float rms_scale(device const float* x, uint n, float eps, threadgroup float* sums, uint t, uint lane,
                       uint simdgroup) {
    float sum = 0.0f;
    for (uint i = t; i < n; i += 256) sum += x[i] * x[i];
    return 1.0f / sqrt(threadgroup_sum(sum, sums, lane, simdgroup) / float(n) + eps);
}

// Mean of a row, and `1 / sqrt(variance + eps)`.
inline float2 mean_scale(device const float* x, uint n, float eps, threadgroup float* sums, uint t, uint lane,
                         uint simdgroup) {
    float sum = 0.0f;
    for (uint i = t; i < n; i += 256) sum += x[i];
    const float mean = threadgroup_sum(sum, sums, lane, simdgroup) / float(n);
    float squares = 0.0f;
    for (uint i = t; i < n; i += 256) squares += (x[i] - mean) * (x[i] - mean);
    return float2(mean, 1.0f / sqrt(threadgroup_sum(squares, sums, lane, simdgroup) / float(n) + eps));
}

// `y = x / rms(x) * w`.
kernel void rms_norm(device const float* x [[buffer(0)]],
                     device const float* w [[buffer(1)]],
                     device float* y [[buffer(2)]],
                     constant NormArgs& p [[buffer(3)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint t [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    device const float* from = x + ulong(row) * p.n;
    const float scale = rms_scale(from, p.n, p.eps, sums, t, lane, simdgroup);
    for (uint i = t; i < p.n; i += 256) y[ulong(row) * p.n + i] = from[i] * scale * w[i];
}

// `x += branch_scale * branch; y = x / rms(x) * w`.
kernel void rms_norm_add(device float* x [[buffer(0)]],
                         device const float* branch [[buffer(1)]],
                         device const float* w [[buffer(2)]],
                         device float* y [[buffer(3)]],
                         constant NormAddArgs& p [[buffer(4)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    const ulong at = ulong(row) * p.n;
    // Each thread reads again only what it wrote.
    for (uint i = t; i < p.n; i += 256) x[at + i] += p.branch_scale * branch[at + i];
    const float scale = rms_scale(x + at, p.n, p.eps, sums, t, lane, simdgroup);
    for (uint i = t; i < p.n; i += 256) y[at + i] = x[at + i] * scale * w[i];
}

// `y = (x - mean) / deviation * w + b`.
kernel void layer_norm(device const float* x [[buffer(0)]],
                       device const float* w [[buffer(1)]],
                       device const float* b [[buffer(2)]],
                       device float* y [[buffer(3)]],
                       constant NormArgs& p [[buffer(4)]],
                       uint row [[threadgroup_position_in_grid]],
                       uint t [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    device const float* from = x + ulong(row) * p.n;
    const float2 norm = mean_scale(from, p.n, p.eps, sums, t, lane, simdgroup);
    for (uint i = t; i < p.n; i += 256) y[ulong(row) * p.n + i] = (from[i] - norm.x) * norm.y * w[i] + b[i];
}

// `x += branch_scale * branch; y = (x - mean) / deviation * w + b`.
kernel void layer_norm_add(device float* x [[buffer(0)]],
                           device const float* branch [[buffer(1)]],
                           device const float* w [[buffer(2)]],
                           device const float* b [[buffer(3)]],
                           device float* y [[buffer(4)]],
                           constant NormAddArgs& p [[buffer(5)]],
                           uint row [[threadgroup_position_in_grid]],
                           uint t [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    const ulong at = ulong(row) * p.n;
    for (uint i = t; i < p.n; i += 256) x[at + i] += p.branch_scale * branch[at + i];
    const float2 norm = mean_scale(x + at, p.n, p.eps, sums, t, lane, simdgroup);
    for (uint i = t; i < p.n; i += 256) y[at + i] = (x[at + i] - norm.x) * norm.y * w[i] + b[i];
}

// Norms of single query or key heads, in place: `n_rows` heads of `n` values, one simdgroup each.
kernel void rms_norm_heads(device float* x [[buffer(0)]],
                           device const float* w [[buffer(1)]],
                           constant NormArgs& p [[buffer(2)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint row = group * 4 + simdgroup;
    if (row >= p.n_rows) return; // whole simdgroups
    device float* head = x + ulong(row) * p.n;
    float sum = 0.0f;
    for (uint i = lane; i < p.n; i += 32) sum += head[i] * head[i];
    const float scale = 1.0f / sqrt(simd_sum(sum) / float(p.n) + p.eps);
    for (uint i = lane; i < p.n; i += 32) head[i] *= scale * w[i];
}
