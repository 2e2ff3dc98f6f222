// Appends keys and values of a pass to the pages of its sequences.
#include "pages.h"

struct AppendArgs {
    uint n_rows;
    uint n_pages;
    uint n_head_kv;
    uint head_dim;
    uint head_dim_v;
    uint key_offset;
    uint value_offset;
    uint key_bits;
    uint value_bits;
};

// Groups of smaller values are stored as zeros.
constant constexpr float TINY = 1e-30f;

// Packs the lanes' numbers of `width` bits: lane i gets bytes i .. i + 4 of a group, where i is a multiple of 4 below
// 4 * width. See `unpacked`.
inline uint packed(uint number, uint width, uint lane) {
    uint bytes = number << (width * (lane / 4 >> width / 2));
    for (uint distance = 4 * width; distance < GROUP; distance *= 2) bytes |= simd_shuffle_xor(bytes, ushort(distance));
    bytes |= simd_shuffle_xor(bytes, 1) << 8;
    return bytes | simd_shuffle_xor(bytes, 2) << 16;
}

// Stores a group of 32 values, one per lane. If one of them is not finite, the group becomes NaN.
inline void store_group(Planes to, uint bits, uint group, float x, uint lane) {
    const uint largest = simd_max(as_type<uint>(x) & 0x7FFFFFFFu);
    // A 128th of the largest magnitude, rounded up to bf16.
    ushort scale = ushort((as_type<uint>(as_type<float>(largest) / 128.0f) + 0xFFFFu) >> 16);
    uint code = 128;
    if (largest >= 0x7F800000u) {
        scale = 0x7FC0;
    } else if (as_type<float>(largest) < TINY) {
        scale = 0;
    } else {
        // The largest value itself would be code 256.
        code = uint(min(x * (1.0f / as_type<float>(uint(scale) << 16)) + 128.0f, 255.0f));
    }
    const uint width = bits - 4;
    const uint upper = packed(code >> 4, 4, lane);
    if (lane % 4 == 0 && lane < 16) *(device uint*)(to.upper + 16 * group + lane) = upper;
    if (lane == 0) to.scales[group] = scale;
    if (width == 0) return; // all lanes alike
    const uint lower = packed(code >> (8 - bits) & ((1u << width) - 1), width, lane);
    if (lane % 4 == 0 && lane < 4 * width) *(device uint*)(to.lower + 4 * width * group + lane) = lower;
}

// `keys` is `(n_rows, n_head_kv, head_dim)`, `values` likewise. A simdgroup takes 32 values of a head. The layer's offsets
// within a page are in bytes.
kernel void append(device const float* keys [[buffer(0)]],
                   device const float* values [[buffer(1)]],
                   device const Row* rows [[buffer(2)]],
                   device const Page* pages [[buffer(3)]],
                   constant AppendArgs& p [[buffer(4)]],
                   uint2 at [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    const uint key_groups = (p.head_dim + GROUP - 1) / GROUP, value_groups = (p.head_dim_v + GROUP - 1) / GROUP;
    const uint i = 4 * at.x + simdgroup, n_keys = p.n_head_kv * key_groups;
    if (i >= n_keys + p.n_head_kv * value_groups) return; // whole simdgroups
    const bool of_keys = i < n_keys;
    const uint groups = of_keys ? key_groups : value_groups, dim = of_keys ? p.head_dim : p.head_dim_v;
    const uint head = (of_keys ? i : i - n_keys) / groups, group = (of_keys ? i : i - n_keys) % groups;
    const uint bits = of_keys ? p.key_bits : p.value_bits, c = GROUP * group + lane;
    device const float* from = (of_keys ? keys : values) + (ulong(at.y) * p.n_head_kv + head) * dim;
    const float x = c < dim ? from[c] : 0.0f;

    const uint pos = rows[at.y].pos, slot = pos % PAGE_POSITIONS;
    device uchar* page = pages[rows[at.y].table + pos / PAGE_POSITIONS].data;
    device uchar* block = page + (of_keys ? p.key_offset : p.value_offset) + head * block_bytes(bits, dim);
    if (bits == F16_BITS) {
        if (c < dim) ((device half*)block)[slot * dim + c] = half(x);
    } else {
        store_group(planes(block, bits, dim), bits, slot * groups + group, x, lane);
    }
}

// Widest head.
constant constexpr uint MAX_HEAD_DIM = 576;

struct HadamardArgs {
    uint n;
    uint n_rows;
    uint log_side;
    float factor;
};

// Multiplies runs of `2^log_side` values of `n_rows` heads of `n` by the Hadamard matrix, in place, one simdgroup per
// head; `factor` makes the matrix orthonormal. Keys below 8 bits and their queries are stored and read so.
kernel void hadamard(device float* x [[buffer(0)]],
                     constant HadamardArgs& p [[buffer(1)]],
                     uint group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float heads[4 * MAX_HEAD_DIM];
    static_assert(4 * MAX_HEAD_DIM * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");
    const uint row = group * 4 + simdgroup;
    if (row >= p.n_rows) return; // whole simdgroups
    device float* head = x + ulong(row) * p.n;
    threadgroup float* v = heads + simdgroup * MAX_HEAD_DIM;
    for (uint i = lane; i < p.n; i += 32) v[i] = head[i];
    for (uint s = 0; s < p.log_side; s++) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < p.n / 2; i += 32) {
            const uint first = (i >> s << (s + 1)) + (i & ((1u << s) - 1)), second = first + (1u << s);
            const float a = v[first], b = v[second];
            v[first] = a + b;
            v[second] = a - b;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < p.n; i += 32) head[i] = p.factor * v[i];
}
