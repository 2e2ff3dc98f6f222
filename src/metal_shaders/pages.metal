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
};

// `keys` is `(n_rows, n_head_kv, head_dim)`, `values` likewise; both are rounded to f16. The layer's offsets within a
// page are in values.
kernel void append(device const float* keys [[buffer(0)]],
                   device const float* values [[buffer(1)]],
                   device const Row* rows [[buffer(2)]],
                   device const Page* pages [[buffer(3)]],
                   constant AppendArgs& p [[buffer(4)]],
                   uint2 at [[thread_position_in_grid]]) {
    const uint n_keys = p.n_head_kv * p.head_dim, n_values = p.n_head_kv * p.head_dim_v;
    const uint pos = rows[at.y].pos, slot = pos % PAGE_POSITIONS;
    device half* page = pages[rows[at.y].table + pos / PAGE_POSITIONS].data;
    if (at.x < n_keys) {
        const uint head = at.x / p.head_dim, i = at.x % p.head_dim;
        page[p.key_offset + (head * PAGE_POSITIONS + slot) * p.head_dim + i] = half(keys[ulong(at.y) * n_keys + at.x]);
    }
    if (at.x < n_values) {
        const uint head = at.x / p.head_dim_v, i = at.x % p.head_dim_v;
        const half value = half(values[ulong(at.y) * n_values + at.x]);
        page[p.value_offset + (head * PAGE_POSITIONS + slot) * p.head_dim_v + i] = value;
    }
}
