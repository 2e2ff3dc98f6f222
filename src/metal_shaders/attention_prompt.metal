// Attention of prompts. A threadgroup of four simdgroups takes one query head of up to ROWS rows of one sequence, and
// the keys a page at a time, all as 8 x 8 matrices. SHARE simdgroups work on the same eight rows, and divide their keys
// and the columns of their outputs. Keys and values in f16 are read from the pages as they are; others are dequantised
// to a panel of eight rows and 64 columns per share. The order of a row's sums does not depend on what it sees.
#include "attention.h"

// Rows first .. first + n of a batch, all of one sequence.
struct Tile {
    uint first;
    uint n;
};

// `q` is `(n_rows, n_head, head_dim)`, `out` `(n_rows, n_head, head_dim_v)`; sinks as in `attention_merge`. `D` is the
// largest head width, 128, 256, 512 or, with up to 512 values, 576.
template <uint D>
kernel void attention_prompt(device const float* q [[buffer(0)]],
                             device const Row* rows [[buffer(1)]],
                             device const Page* pages [[buffer(2)]],
                             device const Tile* tiles [[buffer(3)]],
                             device const float* sinks [[buffer(4)]],
                             device float* out [[buffer(5)]],
                             constant AttentionArgs& p [[buffer(6)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint t [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint SHARE = D / 128, ROWS = 32 / SHARE, KEY_TILES = 8 / SHARE;
    threadgroup float queries[ROWS * D];
    threadgroup float scores[ROWS * PAGE_POSITIONS];
    threadgroup float4 panel[D];
    threadgroup float factors[ROWS * 8]; // eight rows' factors as a diagonal matrix
    constexpr uint BYTES = (ROWS * (D + PAGE_POSITIONS + 8) + 4 * D) * sizeof(float);
    static_assert(BYTES <= THREADGROUP_MEMORY, "threadgroup memory");
    threadgroup half* tail = (threadgroup half*)panel;          // f16: the last rows of a page, completed with zeros
    threadgroup float* expanded = (threadgroup float*)panel;    // others: `(SHARE, 8, 64)`

    const uint first = tiles[group.x].first, n_rows = tiles[group.x].n, head = group.y;
    const uint kv_head = head / (p.n_head / p.n_head_kv), table = rows[first].table;
    uint start = ~0u, stop = 0;
    for (uint i = 0; i < n_rows; i++) {
        start = min(start, first_seen(rows[first + i].pos, p.window, p.chunked));
        stop = max(stop, rows[first + i].pos + 1);
    }
    for (uint i = t; i < ROWS * p.head_dim; i += 128) {
        const uint row = i / p.head_dim, c = i % p.head_dim;
        const float x = row < n_rows ? q[(ulong(first + row) * p.n_head + head) * p.head_dim + c] : 0.0f;
        queries[row * D + c] = p.scale * x;
    }
    for (uint i = t; i < ROWS * 8; i += 128) factors[i] = 0.0f;

    const uint block = simdgroup / SHARE * 8, share = simdgroup % SHARE;
    const float slope = slope_of(head, p.n_head, p.alibi);
    // For rows simdgroup * KEY_TILES + i, the same in all lanes.
    float largest[KEY_TILES], total[KEY_TILES];
    for (uint i = 0; i < KEY_TILES; i++) {
        largest[i] = MASKED;
        total[i] = 0.0f;
    }
    // Columns (share * 16 + n) * 8 of eight rows: up to 512 values of a head.
    simdgroup_float8x8 sums[16];
    for (uint n = 0; n < 16; n++) sums[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_float8x8 factor;

    for (uint page = start / PAGE_POSITIONS; page * PAGE_POSITIONS < stop; page++) {
        device uchar* data = pages[table + page].data;
        device uchar* key_block = data + p.key_offset + kv_head * block_bytes(p.key_bits, p.head_dim);
        device uchar* value_block = data + p.value_offset + kv_head * block_bytes(p.value_bits, p.head_dim_v);
        device const half* keys = (device const half*)key_block;
        device const half* values = (device const half*)value_block;
        // Tiles of eight keys: full ones, then possibly a partial one.
        const uint filled = min(stop - page * PAGE_POSITIONS, PAGE_POSITIONS), whole = filled / 8, rest = filled % 8;
        simdgroup_float8x8 products[KEY_TILES];
        for (uint j = 0; j < KEY_TILES; j++) products[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        if (p.key_bits == F16_BITS) {
            for (uint i = t; rest != 0 && i < 8 * p.head_dim; i += 128) {
                tail[i] = i < rest * p.head_dim ? keys[whole * 8 * p.head_dim + i] : half(0.0f);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint c = 0; c < p.head_dim; c += 8) {
                simdgroup_float8x8 a;
                simdgroup_load(a, queries + block * D + c, D);
                for (uint j = 0; j < KEY_TILES; j++) {
                    const uint tile = share * KEY_TILES + j;
                    simdgroup_half8x8 b;
                    if (tile < whole) {
                        simdgroup_load(b, keys + tile * 8 * p.head_dim + c, p.head_dim, ulong2(0, 0), true);
                    } else if (tile == whole && rest != 0) {
                        simdgroup_load(b, tail + c, p.head_dim, ulong2(0, 0), true);
                    } else {
                        break;
                    }
                    simdgroup_multiply_accumulate(products[j], a, b, products[j]);
                }
            }
        } else {
            for (uint j = 0; j < KEY_TILES; j++) {
                for (uint first_c = 0; 8 * j < filled && first_c < p.head_dim; first_c += 64) {
                    for (uint i = t; i < D; i += 128) {
                        const uint row = (i / 128 * KEY_TILES + j) * 8 + i % 128 / 16, c = first_c + i % 16 * 4;
                        const bool stored = row < filled && c < p.head_dim;
                        panel[i] = stored ? load4(key_block, p.key_bits, p.head_dim, row, c) : float4(0.0f);
                    }
                    threadgroup_barrier(mem_flags::mem_threadgroup); // the panel of keys is filled
                    for (uint c = 0; c < 64 && first_c + c < p.head_dim; c += 8) {
                        simdgroup_float8x8 a, b;
                        simdgroup_load(a, queries + block * D + first_c + c, D);
                        simdgroup_load(b, expanded + share * 512 + c, 64, ulong2(0, 0), true);
                        simdgroup_multiply_accumulate(products[j], a, b, products[j]);
                    }
                    threadgroup_barrier(mem_flags::mem_threadgroup); // the panel of keys is read
                }
            }
        }
        for (uint j = 0; j < KEY_TILES; j++) {
            simdgroup_store(products[j], scores + block * PAGE_POSITIONS + (share * KEY_TILES + j) * 8, PAGE_POSITIONS);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (uint i = 0; i < KEY_TILES; i++) {
            const uint row = simdgroup * KEY_TILES + i;
            const uint pos = rows[first + min(row, n_rows - 1)].pos, seen = first_seen(pos, p.window, p.chunked);
            threadgroup float* s = scores + row * PAGE_POSITIONS;
            const uint key = page * PAGE_POSITIONS + lane;
            const bool sees_a = row < n_rows && seen <= key && key <= pos;
            const bool sees_b = row < n_rows && seen <= key + 32 && key + 32 <= pos;
            const float a = sees_a ? softcapped(s[lane], p.softcap) - slope * float(pos - key) : MASKED;
            const float b = sees_b ? softcapped(s[lane + 32], p.softcap) - slope * float(pos - key - 32) : MASKED;
            const float new_largest = max(largest[i], simd_max(max(a, b)));
            const float weight_a = sees_a ? exp(a - new_largest) : 0.0f;
            const float weight_b = sees_b ? exp(b - new_largest) : 0.0f;
            const float shrink = exp(largest[i] - new_largest);
            total[i] = total[i] * shrink + simd_sum(weight_a + weight_b);
            largest[i] = new_largest;
            s[lane] = weight_a;
            s[lane + 32] = weight_b;
            if (lane == 0) factors[row * 8 + row % 8] = shrink;
        }
        for (uint i = t; p.value_bits == F16_BITS && rest != 0 && i < 8 * p.head_dim_v; i += 128) {
            tail[i] = i < rest * p.head_dim_v ? values[whole * 8 * p.head_dim_v + i] : half(0.0f);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        simdgroup_load(factor, factors + block * 8, 8);
        for (uint n = 0; n < 16; n++) {
            const uint c = (share * 16 + n) * 8;
            if (c >= p.head_dim_v) break;
            simdgroup_float8x8 scaled;
            simdgroup_multiply(scaled, factor, sums[n]);
            sums[n] = scaled;
        }
        for (uint tile = 0; 8 * tile < filled; tile++) {
            simdgroup_float8x8 a;
            simdgroup_load(a, scores + block * PAGE_POSITIONS + tile * 8, PAGE_POSITIONS);
            for (uint n = 0; p.value_bits == F16_BITS && n < 16; n++) {
                const uint c = (share * 16 + n) * 8;
                if (c >= p.head_dim_v) break;
                simdgroup_half8x8 b;
                if (tile < whole) {
                    simdgroup_load(b, values + tile * 8 * p.head_dim_v + c, p.head_dim_v);
                } else {
                    simdgroup_load(b, tail + c, p.head_dim_v);
                }
                simdgroup_multiply_accumulate(sums[n], a, b, sums[n]);
            }
            // Of quantised values half of each share's columns at a time.
            for (uint first_n = 0; p.value_bits != F16_BITS && first_n < 16; first_n += 8) {
                for (uint i = t; i < D; i += 128) {
                    const uint row = tile * 8 + i % 128 / 16, c = (i / 128 * 16 + first_n) * 8 + i % 16 * 4;
                    const bool stored = row < filled && c < p.head_dim_v;
                    panel[i] = stored ? load4(value_block, p.value_bits, p.head_dim_v, row, c) : float4(0.0f);
                }
                threadgroup_barrier(mem_flags::mem_threadgroup); // the panel of values is filled
                for (uint n = first_n; n < first_n + 8; n++) {
                    if ((share * 16 + n) * 8 >= p.head_dim_v) break;
                    simdgroup_float8x8 b;
                    simdgroup_load(b, expanded + share * 512 + n % 8 * 8, 64);
                    simdgroup_multiply_accumulate(sums[n], a, b, sums[n]);
                }
                threadgroup_barrier(mem_flags::mem_threadgroup); // the panel of values is read
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // scores, factors and panel are read
    }

    for (uint i = 0; i < KEY_TILES; i++) {
        const uint row = simdgroup * KEY_TILES + i;
        const float sink = sinks[head], most = max(largest[i], sink), weight = exp(largest[i] - most);
        if (lane == 0) factors[row * 8 + row % 8] = weight / (total[i] * weight + exp(sink - most));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(factor, factors + block * 8, 8);
    for (uint n = 0; n < 16; n++) {
        const uint c = (share * 16 + n) * 8;
        if (c >= p.head_dim_v) break;
        simdgroup_float8x8 scaled;
        simdgroup_multiply(scaled, factor, sums[n]);
        simdgroup_store(scaled, queries + block * D + c, D);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < n_rows * p.head_dim_v; i += 128) {
        const uint row = i / p.head_dim_v, c = i % p.head_dim_v;
        out[(ulong(first + row) * p.n_head + head) * p.head_dim_v + c] = queries[row * D + c];
    }
}

INSTANTIATE("attention_prompt_128", attention_prompt, 128)
INSTANTIATE("attention_prompt_256", attention_prompt, 256)
INSTANTIATE("attention_prompt_512", attention_prompt, 512)
INSTANTIATE("attention_prompt_576", attention_prompt, 576)
