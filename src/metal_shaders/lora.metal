// Low-rank terms of one adapter for rows that share it: `y += scale * B (A x)`.
#include "common.h"

struct LoraArgs {
    uint n_in;
    uint n_out;
    uint rank;
    uint n_rows;
    float scale;
};

// `t[i][r] = A[r] x[i]` with A as `(rank, n_in)`, one simdgroup per value.
kernel void lora_a(device const float* a [[buffer(0)]],
                   device const float* x [[buffer(1)]],
                   device float* t [[buffer(2)]],
                   constant LoraArgs& p [[buffer(3)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]]) {
    float sum = 0.0f;
    for (uint i = lane; i < p.n_in; i += 32) sum += a[ulong(group.x) * p.n_in + i] * x[ulong(group.y) * p.n_in + i];
    sum = simd_sum(sum);
    if (lane == 0) t[group.y * p.rank + group.x] = sum;
}

// `y[i][o] += scale * (sum over r of t[i][r] B[r][o])` with B as `(rank, n_out)`.
kernel void lora_b(device const float* b [[buffer(0)]],
                   device const float* t [[buffer(1)]],
                   device float* y [[buffer(2)]],
                   constant LoraArgs& p [[buffer(3)]],
                   uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_out) return;
    float sum = 0.0f;
    for (uint r = 0; r < p.rank; r++) sum += t[at.y * p.rank + r] * b[ulong(r) * p.n_out + at.x];
    y[ulong(at.y) * p.n_out + at.x] += p.scale * sum;
}
