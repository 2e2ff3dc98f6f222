// Rotary positions, in place, of `n_dims` dimensions of each head from `first` on. The host computes cosines and sines of a
// pass's rows; a thread rotates one pair.
#include "common.h"

struct RopeArgs {
    uint n_rows;
    uint n_head;
    uint head_dim;
    uint first;
    uint n_dims;
};

// Pair i of a head is at `first` and `second`; `angles` has (cosine, sine) as `(n_rows, n_dims / 2)`.
inline void rotate_pair(device float* x, uint first, uint second, float2 angle) {
    const float a = x[first], b = x[second];
    x[first] = a * angle.x - b * angle.y;
    x[second] = a * angle.y + b * angle.x;
}

// Pairs of adjacent dimensions.
kernel void rope_norm(device float* x [[buffer(0)]],
                      device const float2* angles [[buffer(1)]],
                      constant RopeArgs& p [[buffer(2)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
    const uint n = p.n_dims / 2, i = group.x * 128 + t, head = i / n, pair = i % n;
    if (head >= p.n_head) return;
    device float* at = x + (ulong(group.y) * p.n_head + head) * p.head_dim + p.first;
    rotate_pair(at, 2 * pair, 2 * pair + 1, angles[ulong(group.y) * n + pair]);
}

// Pairs that are half of the rotated dimensions apart.
kernel void rope_neox(device float* x [[buffer(0)]],
                      device const float2* angles [[buffer(1)]],
                      constant RopeArgs& p [[buffer(2)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
    const uint n = p.n_dims / 2, i = group.x * 128 + t, head = i / n, pair = i % n;
    if (head >= p.n_head) return;
    device float* at = x + (ulong(group.y) * p.n_head + head) * p.head_dim + p.first;
    rotate_pair(at, pair, pair + n, angles[ulong(group.y) * n + pair]);
}
