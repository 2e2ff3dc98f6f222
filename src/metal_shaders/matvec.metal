// Products of weights with up to eight activation rows. A simdgroup takes some weight rows, a lane every 32nd part of
// them; a part is unpacked once for all activation rows. The order of a sum depends on neither number of rows.
#include "blocks.h"

struct MatvecArgs {
    uint n_in;
    uint n_out;
    uint n_rows;
    uint row_bytes;
};

// Weight rows per simdgroup for `rows` activation rows: as many as fit the registers.
constexpr uint outs_of(uint rows) { return rows <= 2 ? 4 : 2; }

// `y[i][o] = sum over k of W[o][k] x[i][k]` for four simdgroups' weight rows and `ROWS` activation rows.
template <typename F, uint ROWS>
kernel void matvec(device const uchar* w [[buffer(0)]],
                   device const float* x [[buffer(1)]],
                   device float* y [[buffer(2)]],
                   constant MatvecArgs& p [[buffer(3)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint OUTS = outs_of(ROWS);
    const uint first = (4 * group.x + simdgroup) * OUTS, row = group.y * ROWS;
    float sums[ROWS][OUTS] = {};
    for (uint part = lane; 16 * part < p.n_in; part += 32) {
        float4x4 weights[OUTS];
        for (uint o = 0; o < OUTS; o++) {
            weights[o] = F::part(w + ulong(min(first + o, p.n_out - 1)) * p.row_bytes, part, p.n_in);
        }
        for (uint i = 0; i < ROWS; i++) {
            const float4x4 acts = values(x + ulong(min(row + i, p.n_rows - 1)) * p.n_in, part, p.n_in);
            for (uint o = 0; o < OUTS; o++) sums[i][o] += dot16(weights[o], acts);
        }
    }
    for (uint i = 0; i < ROWS; i++) {
        for (uint o = 0; o < OUTS; o++) {
            const float sum = simd_sum(sums[i][o]);
            if (lane == 0 && first + o < p.n_out && row + i < p.n_rows) {
                y[ulong(row + i) * p.n_out + first + o] = sum;
            }
        }
    }
}

struct MatvecExpertsArgs {
    uint n_in;
    uint n_out;
    uint n_chosen;
    uint n_expert;
    uint choices_per_row;
    uint row_bytes;
};

// One product per chosen expert: `y[c] = W[chosen[c]] x[c / choices_per_row]`, in the order of `matvec`. The weights of
// all experts are contiguous. An expert that does not exist yields zeros.
template <typename F>
kernel void matvec_experts(device const uchar* w [[buffer(0)]],
                           device const float* x [[buffer(1)]],
                           device const uint* chosen [[buffer(2)]],
                           device float* y [[buffer(3)]],
                           constant MatvecExpertsArgs& p [[buffer(4)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint OUTS = outs_of(1);
    const uint first = (4 * group.x + simdgroup) * OUTS, expert = chosen[group.y];
    const bool exists = expert < p.n_expert;
    device const uchar* matrix = w + ulong(exists ? expert : 0) * p.n_out * p.row_bytes;
    device const float* row = x + ulong(group.y / p.choices_per_row) * p.n_in;
    float sums[OUTS] = {};
    for (uint part = lane; 16 * part < p.n_in; part += 32) {
        const float4x4 acts = values(row, part, p.n_in);
        for (uint o = 0; o < OUTS; o++) {
            device const uchar* weights = matrix + ulong(min(first + o, p.n_out - 1)) * p.row_bytes;
            sums[o] += dot16(F::part(weights, part, p.n_in), acts);
        }
    }
    for (uint o = 0; o < OUTS; o++) {
        const float sum = simd_sum(sums[o]);
        if (lane == 0 && first + o < p.n_out) y[ulong(group.y) * p.n_out + first + o] = exists ? sum : 0.0f;
    }
}

#define MATVEC(F)                                 \
    INSTANTIATE("matvec_" #F "_1", matvec, F, 1)  \
    INSTANTIATE("matvec_" #F "_2", matvec, F, 2)  \
    INSTANTIATE("matvec_" #F "_4", matvec, F, 4)  \
    INSTANTIATE("matvec_" #F "_8", matvec, F, 8)  \
    INSTANTIATE("matvec_experts_" #F, matvec_experts, F)
FOR_FORMATS(MATVEC)
