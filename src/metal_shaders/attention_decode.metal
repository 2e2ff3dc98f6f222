// Attention of generated tokens. A threadgroup of four simdgroups takes one row, up to G query heads of one key/value
// head, and one split of the keys; a second kernel merges the splits in order. Within a page, eight lanes share the
// products of a key, and each simdgroup sums a quarter of the values.
#include "attention.h"

// Writes for each head and split the weighted sum of values, the largest score and the sum of weights: `partial` is
// `(n_rows, n_head, n_splits, head_dim_v + 2)`. `D` is the largest head width, 128, 256, 512 or, with up to
// 512 values, 576.
template <uint D>
kernel void attention_decode(device const float* q [[buffer(0)]],
                             device const Row* rows [[buffer(1)]],
                             device const Page* pages [[buffer(2)]],
                             device float* partial [[buffer(3)]],
                             constant AttentionArgs& p [[buffer(4)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint t [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
    // Query heads, vectors of a lane, heads of a simdgroup's softmax.
    constexpr uint G = 1024 / (D < 512 ? D : 512), WIDE = D / 128, MINE = (G + 3) / 4;
    threadgroup float4 query_vectors[G * D / 4];
    threadgroup float scores[G * PAGE_POSITIONS];
    threadgroup float shrink[G];
    threadgroup float4 out[G * D / 4];
    static_assert((2 * G * D + G * PAGE_POSITIONS + G) * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");

    threadgroup float* queries = (threadgroup float*)query_vectors;
    const uint row = group.z, pos = rows[row].pos, seen = first_seen(pos, p.window, p.chunked);
    const uint split = seen / SPLIT + group.x;
    const uint start = max(seen, split * SPLIT), stop = min(pos + 1, (split + 1) * SPLIT);
    if (start >= stop) return; // all threads alike
    const uint n_group = p.n_head / p.n_head_kv, chunks = (n_group + G - 1) / G;
    const uint kv_head = group.y / chunks, chunk = group.y % chunks;
    const uint head = kv_head * n_group + chunk * G, heads = min(G, n_group - chunk * G);
    const ulong first = ulong(row) * p.n_head + head;

    for (uint i = t; i < heads * p.head_dim; i += 128) {
        queries[i / p.head_dim * D + i % p.head_dim] = p.scale * q[first * p.head_dim + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // For heads simdgroup, simdgroup + 4, ...
    float largest[MINE], total[MINE], slopes[MINE];
    for (uint i = 0; i < MINE; i++) {
        slopes[i] = slope_of(head + simdgroup + 4 * i, p.n_head, p.alibi);
        largest[i] = MASKED;
        total[i] = 0.0f;
    }
    // Columns 4 * (lane + 32 * w) of a head, summed over this simdgroup's keys.
    float4 sums[G][WIDE] = {};

    for (uint page = start / PAGE_POSITIONS; page * PAGE_POSITIONS < stop; page++) {
        device uchar* data = pages[rows[row].table + page].data;
        device uchar* keys = data + p.key_offset + kv_head * block_bytes(p.key_bits, p.head_dim);
        device uchar* values = data + p.value_offset + kv_head * block_bytes(p.value_bits, p.head_dim_v);
        const uint low = max(start, page * PAGE_POSITIONS) - page * PAGE_POSITIONS;
        const uint high = min(stop - page * PAGE_POSITIONS, PAGE_POSITIONS);

        for (uint step = 0; step < 4; step++) {
            const uint key = 16 * simdgroup + 4 * step + lane / 8;
            const bool visible = low <= key && key < high;
            float products[G] = {};
            for (uint c = lane % 8 * 4; visible && c < p.head_dim; c += 32) {
                const float4 k = load4(keys, p.key_bits, p.head_dim, key, c);
                for (uint g = 0; g < G; g++) {
                    if (g < heads) products[g] += dot(query_vectors[(g * D + c) / 4], k);
                }
            }
            for (uint g = 0; g < G; g++) {
                float score = products[g];
                score += simd_shuffle_xor(score, 1);
                score += simd_shuffle_xor(score, 2);
                score += simd_shuffle_xor(score, 4);
                if (lane % 8 == 0) scores[g * PAGE_POSITIONS + key] = visible ? softcapped(score, p.softcap) : MASKED;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (uint i = 0; i < MINE; i++) {
            const uint g = simdgroup + 4 * i;
            if (g >= heads) break; // whole simdgroups
            threadgroup float* s = scores + g * PAGE_POSITIONS;
            // Keys behind `pos` are masked.
            const uint a_key = page * PAGE_POSITIONS + lane, b_key = a_key + 32;
            const float a = s[lane] - slopes[i] * float(pos - min(a_key, pos));
            const float b = s[lane + 32] - slopes[i] * float(pos - min(b_key, pos));
            const float new_largest = max(largest[i], simd_max(max(a, b)));
            const float weight_a = exp(a - new_largest), weight_b = exp(b - new_largest);
            const float factor = exp(largest[i] - new_largest);
            total[i] = total[i] * factor + simd_sum(weight_a + weight_b);
            largest[i] = new_largest;
            s[lane] = weight_a;
            s[lane + 32] = weight_b;
            if (lane == 0) shrink[g] = factor;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (uint g = 0; g < G; g++) {
            for (uint w = 0; w < WIDE; w++) {
                if (g < heads) sums[g][w] *= shrink[g];
            }
        }
        for (uint key = max(low, 16 * simdgroup); key < min(high, 16 * simdgroup + 16); key++) {
            for (uint w = 0; w < WIDE; w++) {
                const uint c = 4 * (lane + 32 * w);
                if (c >= p.head_dim_v) continue;
                const float4 v = load4(values, p.value_bits, p.head_dim_v, key, c);
                for (uint g = 0; g < G; g++) {
                    if (g < heads) sums[g][w] += scores[g * PAGE_POSITIONS + key] * v;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // scores are read
    }

    // Adds the four simdgroups' sums, one after the other.
    for (uint s = 0; s < 4; s++) {
        if (s == simdgroup) {
            for (uint g = 0; g < G; g++) {
                for (uint w = 0; w < WIDE; w++) {
                    const uint c = 4 * (lane + 32 * w);
                    if (g >= heads || c >= p.head_dim_v) continue;
                    threadgroup float4& to = out[(g * D + c) / 4];
                    to = s == 0 ? sums[g][w] : to + sums[g][w];
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = t; i < heads * p.head_dim_v; i += 128) {
        const uint g = i / p.head_dim_v, c = i % p.head_dim_v;
        partial[((first + g) * p.n_splits + group.x) * (p.head_dim_v + 2) + c] = ((threadgroup float*)out)[g * D + c];
    }
    for (uint i = 0; i < MINE; i++) {
        const uint g = simdgroup + 4 * i;
        if (g >= heads || lane != 0) break;
        device float* to = partial + ((first + g) * p.n_splits + group.x) * (p.head_dim_v + 2) + p.head_dim_v;
        to[0] = largest[i];
        to[1] = total[i];
    }
}

// Merges the splits to `out`, `(n_rows, n_head, head_dim_v)`. A sink is a score without a value that takes part in the
// softmax; a head without one has -1e30.
kernel void attention_merge(device const float* partial [[buffer(0)]],
                            device const Row* rows [[buffer(1)]],
                            device const float* sinks [[buffer(2)]],
                            device float* out [[buffer(3)]],
                            constant AttentionArgs& p [[buffer(4)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint t [[thread_index_in_threadgroup]]) {
    const uint pos = rows[group.y].pos;
    const uint n = pos / SPLIT - first_seen(pos, p.window, p.chunked) / SPLIT + 1, stride = p.head_dim_v + 2;
    const ulong head = ulong(group.y) * p.n_head + group.x;
    device const float* from = partial + head * p.n_splits * stride;
    float largest = sinks[group.x];
    for (uint s = 0; s < n; s++) largest = max(largest, from[s * stride + p.head_dim_v]);
    float total = exp(sinks[group.x] - largest);
    for (uint s = 0; s < n; s++) {
        total += exp(from[s * stride + p.head_dim_v] - largest) * from[s * stride + p.head_dim_v + 1];
    }
    for (uint c = t; c < p.head_dim_v; c += 128) {
        float sum = 0.0f;
        for (uint s = 0; s < n; s++) sum += exp(from[s * stride + p.head_dim_v] - largest) * from[s * stride + c];
        out[head * p.head_dim_v + c] = sum / total;
    }
}

INSTANTIATE("attention_decode_128", attention_decode, 128)
INSTANTIATE("attention_decode_256", attention_decode, 256)
INSTANTIATE("attention_decode_512", attention_decode, 512)
INSTANTIATE("attention_decode_576", attention_decode, 576)
