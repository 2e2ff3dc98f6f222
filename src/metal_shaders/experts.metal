// Mixtures of experts: selection of a row's experts, lists of an expert's rows, and the weighted sum of the experts'
// outputs.
#include "common.h"

// Most experts of a layer.
constant constexpr uint MAX_EXPERTS = 512;
// Most groups of experts.
constant constexpr uint MAX_GROUPS = 32;

// Lower bound of the sum that divides weights: the smallest normal f16.
constant constexpr float MIN_WEIGHT_SUM = 6.1035156e-5f;

struct RouteArgs {
    uint n_rows;
    uint n_expert;
    uint n_used;
    uint n_group;
    uint n_group_used;
    uint gating;
    uint normalise;
    float scale;
};

// How router outputs become weights (`gating`).
constant constexpr uint SOFTMAX = 0;        // over all experts
constant constexpr uint SOFTMAX_CHOSEN = 1; // over the chosen ones
constant constexpr uint SIGMOID = 2;
constant constexpr uint SQRT_SOFTPLUS = 3;

// Chooses the experts with the `n_used` largest sums of probability and bias, the lower index first among equals; one
// simdgroup per row. Weights do not include the bias, but a factor of each expert.
kernel void route(device const float* router [[buffer(0)]],
                  device const float* bias [[buffer(1)]],
                  device const float* scales [[buffer(2)]],
                  device uint* chosen [[buffer(3)]],
                  device float* weights [[buffer(4)]],
                  constant RouteArgs& p [[buffer(5)]],
                  uint row [[threadgroup_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float probabilities[MAX_EXPERTS];
    threadgroup float ranks[MAX_EXPERTS];
    threadgroup float groups[MAX_GROUPS];
    static_assert((2 * MAX_EXPERTS + MAX_GROUPS) * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");
    device const float* x = router + ulong(row) * p.n_expert;
    float largest = MASKED;
    for (uint e = lane; e < p.n_expert; e += 32) largest = max(largest, x[e]);
    largest = simd_max(largest);
    float sum = 0.0f;
    for (uint e = lane; e < p.n_expert; e += 32) {
        probabilities[e] = p.gating == SIGMOID         ? times_sigmoid(1.0f, x[e])
                           : p.gating == SQRT_SOFTPLUS ? sqrt(softplus(x[e]))
                                                       : exp(x[e] - largest);
        sum += probabilities[e];
    }
    sum = simd_sum(sum);
    for (uint e = lane; e < p.n_expert; e += 32) {
        if (p.gating == SOFTMAX) probabilities[e] /= sum;
        ranks[e] = probabilities[e] + bias[e];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (p.n_group > 1) {
        // A group counts as much as its two best experts or, where ranks are probabilities, its best one.
        const uint size = p.n_expert / p.n_group;
        float best = MASKED, second = MASKED;
        for (uint i = 0; lane < p.n_group && i < size; i++) {
            const float rank = ranks[lane * size + i];
            second = max(second, min(rank, best));
            best = max(best, rank);
        }
        groups[lane] = p.gating == SOFTMAX || size == 1 ? best : best + second;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        uint open = 0;
        for (uint j = 0; j < p.n_group_used; j++) {
            float most = 2.0f * MASKED;
            uint index = 0;
            for (uint g = 0; g < p.n_group; g++) {
                if ((open >> g & 1) == 0 && groups[g] > most) {
                    most = groups[g];
                    index = g;
                }
            }
            open |= 1u << index;
        }
        for (uint e = lane; e < p.n_expert; e += 32) {
            if ((open >> e / size & 1) == 0) ranks[e] = MASKED;
        }
    }

    float chosen_sum = 0.0f;
    for (uint j = 0; j < p.n_used; j++) {
        float best = MASKED;
        uint index = ~0u;
        for (uint e = lane; e < p.n_expert; e += 32) {
            if (ranks[e] > best) {
                best = ranks[e];
                index = e;
            }
        }
        const float most = simd_max(best);
        index = min(simd_min(best == most ? index : ~0u), p.n_expert - 1);
        chosen_sum += probabilities[index];
        if (lane == 0) chosen[row * p.n_used + j] = index;
        if (lane == index % 32) ranks[index] = MASKED; // only this lane reads it
    }
    const bool normalise = p.normalise != 0 || p.gating == SOFTMAX_CHOSEN;
    const float factor = normalise ? p.scale / max(chosen_sum, MIN_WEIGHT_SUM) : p.scale;
    simdgroup_barrier(mem_flags::mem_device); // lane 0 wrote the choice
    for (uint j = lane; j < p.n_used; j += 32) {
        const uint index = chosen[row * p.n_used + j];
        weights[row * p.n_used + j] = factor * probabilities[index] * scales[index];
    }
}

struct ExpertRowsArgs {
    uint n_chosen;
    uint n_expert;
};

// Lists the choices of each expert in order, one simdgroup per expert: `counts[e]` of them in `lists[e]`,
// `(n_expert, n_chosen)`.
kernel void expert_rows(device const uint* chosen [[buffer(0)]],
                        device uint* counts [[buffer(1)]],
                        device uint* lists [[buffer(2)]],
                        constant ExpertRowsArgs& p [[buffer(3)]],
                        uint expert [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
    uint count = 0;
    for (uint first = 0; first < p.n_chosen; first += 32) {
        const uint c = first + lane;
        const uint mine = c < p.n_chosen && chosen[c] == expert ? 1 : 0;
        const uint before = simd_prefix_exclusive_sum(mine);
        if (mine != 0) lists[ulong(expert) * p.n_chosen + count + before] = c;
        count += simd_sum(mine);
    }
    if (lane == 0) counts[expert] = count;
}

struct AddExpertBiasArgs {
    uint n;
    uint n_chosen;
    uint n_expert;
};

// `y[c] += bias[chosen[c]]`, nothing where that expert does not exist.
kernel void add_expert_bias(device float* y [[buffer(0)]],
                            device const float* bias [[buffer(1)]],
                            device const uint* chosen [[buffer(2)]],
                            constant AddExpertBiasArgs& p [[buffer(3)]],
                            uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n) return;
    const uint expert = chosen[at.y];
    if (expert < p.n_expert) y[ulong(at.y) * p.n + at.x] += bias[ulong(expert) * p.n + at.x];
}

struct CombineExpertsArgs {
    uint n;
    uint n_rows;
    uint n_used;
};

// `y[r] = sum over j of weights[r][j] x[r][j]`, in order.
kernel void combine_experts(device const float* x [[buffer(0)]],
                            device const float* weights [[buffer(1)]],
                            device float* y [[buffer(2)]],
                            constant CombineExpertsArgs& p [[buffer(3)]],
                            uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n) return;
    float sum = 0.0f;
    for (uint j = 0; j < p.n_used; j++) {
        const ulong c = ulong(at.y) * p.n_used + j;
        sum += weights[c] * x[c * p.n + at.x];
    }
    y[ulong(at.y) * p.n + at.x] = sum;
}
