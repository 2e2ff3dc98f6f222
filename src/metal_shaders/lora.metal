// Low-rank terms of one adapter for rows that share it: `y += scale * B (A x)`, of matrices, the embedding table and
// experts.
#include "common.h"

struct LoraArgs {
    uint n_in;
    uint n_out;
    uint rank;
    uint n_rows;
    uint b_stride;
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

// `y[i][o] += scale * (sum over r of t[i][r] B[r][o])`; rows of B are `b_stride` apart, of which a product of some
// rows of the matrix takes `n_out` columns.
kernel void lora_b(device const float* b [[buffer(0)]],
                   device const float* t [[buffer(1)]],
                   device float* y [[buffer(2)]],
                   constant LoraArgs& p [[buffer(3)]],
                   uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_out) return;
    float sum = 0.0f;
    for (uint r = 0; r < p.rank; r++) sum += t[at.y * p.rank + r] * b[ulong(r) * p.b_stride + at.x];
    y[ulong(at.y) * p.n_out + at.x] += p.scale * sum;
}

// `x[i] += scale * (sum over r of A[r][token] B[r])`, which is the product with a one-hot vector. A token that does not
// exist adds nothing.
kernel void lora_embed(device const float* a [[buffer(0)]],
                       device const float* b [[buffer(1)]],
                       device const uint* tokens [[buffer(2)]],
                       device float* x [[buffer(3)]],
                       constant LoraArgs& p [[buffer(4)]],
                       uint2 at [[thread_position_in_grid]]) {
    const uint token = tokens[at.y];
    if (at.x >= p.n_out || token >= p.n_in) return;
    float sum = 0.0f;
    for (uint r = 0; r < p.rank; r++) sum += a[ulong(r) * p.n_in + token] * b[ulong(r) * p.b_stride + at.x];
    x[ulong(at.y) * p.n_out + at.x] += p.scale * sum;
}

struct LoraExpertsArgs {
    uint n_in;
    uint n_out;
    uint n_chosen;
    uint n_expert;
    uint choices_per_row;
    uint n_values;
};

// `y[c] += scale * B (A x)` with the term of the expert of choice c, one threadgroup per choice. `terms[e]`: index of A
// in `values`, index of B, rank, bits of the scale. Nothing where the expert does not exist or has no term.
kernel void lora_experts(device const float* values [[buffer(0)]],
                         device const float* x [[buffer(1)]],
                         device const uint* chosen [[buffer(2)]],
                         device const uint* terms [[buffer(3)]],
                         device float* y [[buffer(4)]],
                         constant LoraExpertsArgs& p [[buffer(5)]],
                         uint c [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    const uint expert = chosen[c];
    if (expert >= p.n_expert) return;
    device const uint* term = terms + 4 * expert;
    device const float* a = values + term[0];
    device const float* b = values + term[1];
    const uint rank = term[2];
    const float scale = as_type<float>(term[3]);
    device const float* from = x + ulong(c / p.choices_per_row) * p.n_in;
    device float* to = y + ulong(c) * p.n_out;
    for (uint r = 0; r < rank; r++) {
        float sum = 0.0f;
        for (uint i = t; i < p.n_in; i += 256) sum += a[ulong(r) * p.n_in + i] * from[i];
        sum = scale * threadgroup_sum(sum, sums, lane, simdgroup);
        for (uint o = t; o < p.n_out; o += 256) to[o] += sum * b[ulong(r) * p.n_out + o];
    }
}
