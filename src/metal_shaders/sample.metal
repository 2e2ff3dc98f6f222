// Reductions of logits for sampling, so that only a few values go to the CPU.
#include "common.h"

struct SampleArgs {
    uint n;
    uint n_rows;
};

// Index of the largest value of each row, the lowest among equals; NaN is never chosen.
kernel void argmax(device const float* x [[buffer(0)]],
                   device uint* index [[buffer(1)]],
                   constant SampleArgs& p [[buffer(2)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint t [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[8];
    threadgroup uint indices[8];
    float best = -FLT_MAX;
    uint at = ~0u;
    for (uint i = t; i < p.n; i += 256) {
        const float value = x[ulong(row) * p.n + i];
        if (value > best || (value == best && at == ~0u)) {
            best = value;
            at = i;
        }
    }
    const float most = simd_max(best);
    at = simd_min(best == most ? at : ~0u);
    if (lane == 0) {
        values[simdgroup] = most;
        indices[simdgroup] = at;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t != 0) return;
    best = most;
    for (uint i = 1; i < 8; i++) {
        if (values[i] > best) {
            best = values[i];
            at = indices[i];
        } else if (values[i] == best) {
            at = min(at, indices[i]);
        }
    }
    index[row] = at == ~0u ? 0 : at;
}

// `x = exp(x - max) / sum` of each row, in place.
kernel void softmax(device float* x [[buffer(0)]],
                    constant SampleArgs& p [[buffer(1)]],
                    uint row [[threadgroup_position_in_grid]],
                    uint t [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    threadgroup float largests[8];
    device float* at = x + ulong(row) * p.n;
    float largest = MASKED;
    for (uint i = t; i < p.n; i += 256) largest = max(largest, at[i]);
    largest = simd_max(largest);
    if (lane == 0) largests[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < 8; i++) largest = max(largest, largests[i]);
    float sum = 0.0f;
    for (uint i = t; i < p.n; i += 256) {
        at[i] = exp(at[i] - largest);
        sum += at[i];
    }
    sum = threadgroup_sum(sum, sums, lane, simdgroup);
    for (uint i = t; i < p.n; i += 256) at[i] /= sum;
}

// Number of pairs that a threadgroup sorts.
constant constexpr uint SORTED = 1024;
static_assert(2 * SORTED * sizeof(uint) <= THREADGROUP_MEMORY, "threadgroup memory");

struct TopKArgs {
    uint n;
    uint n_rows;
    uint k;
};

// Sorts SORTED pairs by descending value, then ascending index (bitonic sort).
inline void sort_pairs(threadgroup float* values, threadgroup uint* indices, uint t) {
    for (uint size = 2; size <= SORTED; size *= 2) {
        for (uint distance = size / 2; distance > 0; distance /= 2) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = t; i < SORTED / 2; i += 256) {
                const uint a = i / distance * 2 * distance + i % distance, b = a + distance;
                const bool swapped = values[b] > values[a] || (values[b] == values[a] && indices[b] < indices[a]);
                if (swapped == ((a & size) == 0)) {
                    const float value = values[a];
                    const uint index = indices[a];
                    values[a] = values[b];
                    indices[a] = indices[b];
                    values[b] = value;
                    indices[b] = index;
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The k largest of each 1024 values of a row, in order: `(n_rows, chunks, k)`; missing ones have index 2^32 - 1.
kernel void top_k(device const float* x [[buffer(0)]],
                  device float* top_values [[buffer(1)]],
                  device uint* top_indices [[buffer(2)]],
                  constant TopKArgs& p [[buffer(3)]],
                  uint2 group [[threadgroup_position_in_grid]],
                  uint2 groups [[threadgroups_per_grid]],
                  uint t [[thread_index_in_threadgroup]]) {
    threadgroup float values[SORTED];
    threadgroup uint indices[SORTED];
    for (uint i = t; i < SORTED; i += 256) {
        const uint at = group.x * SORTED + i;
        const float value = at < p.n ? x[ulong(group.y) * p.n + at] : -FLT_MAX;
        values[i] = value == value ? value : -FLT_MAX;
        indices[i] = at < p.n ? at : ~0u;
    }
    sort_pairs(values, indices, t);
    for (uint i = t; i < p.k; i += 256) {
        top_values[(group.y * groups.x + group.x) * p.k + i] = values[i];
        top_indices[(group.y * groups.x + group.x) * p.k + i] = indices[i];
    }
}

// The k largest pairs of each 1024 pairs that an earlier pass wrote.
kernel void top_k_pairs(device const float* x [[buffer(0)]],
                        device const uint* x_indices [[buffer(1)]],
                        device float* top_values [[buffer(2)]],
                        device uint* top_indices [[buffer(3)]],
                        constant TopKArgs& p [[buffer(4)]],
                        uint2 group [[threadgroup_position_in_grid]],
                        uint2 groups [[threadgroups_per_grid]],
                        uint t [[thread_index_in_threadgroup]]) {
    threadgroup float values[SORTED];
    threadgroup uint indices[SORTED];
    for (uint i = t; i < SORTED; i += 256) {
        const uint at = group.x * SORTED + i;
        values[i] = at < p.n ? x[ulong(group.y) * p.n + at] : -FLT_MAX;
        indices[i] = at < p.n ? x_indices[ulong(group.y) * p.n + at] : ~0u;
    }
    sort_pairs(values, indices, t);
    for (uint i = t; i < p.k; i += 256) {
        top_values[(group.y * groups.x + group.x) * p.k + i] = values[i];
        top_indices[(group.y * groups.x + group.x) * p.k + i] = indices[i];
    }
}
