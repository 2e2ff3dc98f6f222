// Products of weights with many activation rows: a threadgroup of four simdgroups computes a tile of 32 activation rows
// by 64 weight rows. 32 columns at a time are expanded to floats in threadgroup memory and multiplied as 8 x 8
// matrices.
#include "blocks.h"

constant constexpr uint TILE_ROWS = 32, TILE_OUTS = 64, TILE_COLUMNS = 32;
// Floats between rows of a panel, padded to avoid bank conflicts.
constant constexpr uint PANEL_STRIDE = TILE_COLUMNS + 4;
// At the end, the tile is stored in place of the panels.
constant constexpr uint TILE_STRIDE = TILE_OUTS + 4;
constant constexpr uint TILE_FLOATS = (TILE_ROWS + TILE_OUTS) * PANEL_STRIDE;
static_assert(TILE_FLOATS >= TILE_ROWS * TILE_STRIDE, "the tile fits into the panels");
static_assert(TILE_FLOATS * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");

// Computes a tile and leaves it in `memory`, rows TILE_STRIDE apart. Thread t expands parts of weight row t / 2 of the
// tile, at `w`, and of activation row t / 4, at `x`; for missing rows (`has_w`, `has_x`) it writes zeros.
template <typename F>
inline void tile_product(threadgroup float* memory,
                         device const uchar* w,
                         bool has_w,
                         device const float* x,
                         bool has_x,
                         uint n_in,
                         uint t,
                         uint simdgroup) {
    threadgroup float* x_panel = memory + TILE_OUTS * PANEL_STRIDE;
    threadgroup float4* w_to = (threadgroup float4*)(memory + t / 2 * PANEL_STRIDE + t % 2 * 16);
    threadgroup float4* x_to = (threadgroup float4*)(x_panel + t / 4 * PANEL_STRIDE + t % 4 * 8);
    const uint first_row = simdgroup / 2 * 16, first_out = simdgroup % 2 * 32;
    simdgroup_float8x8 sums[2][4];
    for (uint i = 0; i < 2; i++) {
        for (uint j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint column = 0; column < n_in; column += TILE_COLUMNS) {
        threadgroup_barrier(mem_flags::mem_threadgroup); // the panels before are read
        const uint part = column / 16 + t % 2, x_part = column / 16 + t % 4 / 2;
        const float4x4 weights = has_w && 16 * part < n_in ? F::part(w, part, n_in) : float4x4(0.0f);
        for (uint i = 0; i < 4; i++) w_to[i] = weights[i];
        const float4x4 acts = has_x && 16 * x_part < n_in ? values(x, x_part, n_in) : float4x4(0.0f);
        for (uint i = 0; i < 2; i++) x_to[i] = acts[t % 2 * 2 + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < TILE_COLUMNS; k += 8) {
            simdgroup_float8x8 a[2], b[4];
            for (uint i = 0; i < 2; i++) {
                simdgroup_load(a[i], x_panel + (first_row + 8 * i) * PANEL_STRIDE + k, PANEL_STRIDE);
            }
            for (uint j = 0; j < 4; j++) {
                simdgroup_load(b[j], memory + (first_out + 8 * j) * PANEL_STRIDE + k, PANEL_STRIDE, ulong2(0, 0), true);
            }
            for (uint i = 0; i < 2; i++) {
                for (uint j = 0; j < 4; j++) simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < 2; i++) {
        for (uint j = 0; j < 4; j++) {
            simdgroup_store(sums[i][j], memory + (first_row + 8 * i) * TILE_STRIDE + first_out + 8 * j, TILE_STRIDE);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

struct MatmulArgs {
    uint n_in;
    uint n_out;
    uint n_rows;
    uint row_bytes;
};

// `y[i][o] = sum over k of W[o][k] x[i][k]`.
template <typename F>
kernel void matmul(device const uchar* w [[buffer(0)]],
                   device const float* x [[buffer(1)]],
                   device float* y [[buffer(2)]],
                   constant MatmulArgs& p [[buffer(3)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint t [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panels[TILE_FLOATS / 4];
    threadgroup float* memory = (threadgroup float*)panels;
    const uint out = group.x * TILE_OUTS, row = group.y * TILE_ROWS;
    const uint my_out = out + t / 2, my_row = row + t / 4;
    tile_product<F>(memory, w + ulong(my_out) * p.row_bytes, my_out < p.n_out, x + ulong(my_row) * p.n_in,
                    my_row < p.n_rows, p.n_in, t, simdgroup);
    for (uint i = t; i < TILE_ROWS * TILE_OUTS; i += 128) {
        const uint r = row + i / TILE_OUTS, o = out + i % TILE_OUTS;
        if (r < p.n_rows && o < p.n_out) {
            y[ulong(r) * p.n_out + o] = memory[i / TILE_OUTS * TILE_STRIDE + i % TILE_OUTS];
        }
    }
}

struct MatmulExpertsArgs {
    uint n_in;
    uint n_out;
    uint n_rows;
    uint n_chosen;
    uint n_expert;
    uint choices_per_row;
    uint row_bytes;
};

// The product of expert `group.z` with the rows that chose it: `y[c] = W[e] x[c / choices_per_row]` for the choices `c`
// in the first `counts[e]` of `lists[e]`, `(n_expert, n_chosen)`.
template <typename F>
kernel void matmul_experts(device const uchar* w [[buffer(0)]],
                           device const float* x [[buffer(1)]],
                           device const uint* counts [[buffer(2)]],
                           device const uint* lists [[buffer(3)]],
                           device float* y [[buffer(4)]],
                           constant MatmulExpertsArgs& p [[buffer(5)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint t [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panels[TILE_FLOATS / 4];
    threadgroup float* memory = (threadgroup float*)panels;
    const uint out = group.x * TILE_OUTS, first = group.y * TILE_ROWS, count = counts[group.z];
    if (first >= count) return; // all threads alike
    device const uint* list = lists + ulong(group.z) * p.n_chosen;
    const uint my_out = out + t / 2, mine = first + t / 4;
    const ulong weight_row = ulong(group.z) * p.n_out + my_out;
    const ulong my_row = mine < count ? list[mine] / p.choices_per_row : 0;
    tile_product<F>(memory, w + weight_row * p.row_bytes, my_out < p.n_out, x + my_row * p.n_in, mine < count, p.n_in,
                    t, simdgroup);
    for (uint i = t; i < TILE_ROWS * TILE_OUTS; i += 128) {
        const uint r = first + i / TILE_OUTS, o = out + i % TILE_OUTS;
        if (r < count && o < p.n_out) {
            y[ulong(list[r]) * p.n_out + o] = memory[i / TILE_OUTS * TILE_STRIDE + i % TILE_OUTS];
        }
    }
}

#define MATMUL(F)                            \
    INSTANTIATE("matmul_" #F, matmul, F)     \
    INSTANTIATE("matmul_experts_" #F, matmul_experts, F)
FOR_FORMATS(MATMUL)
