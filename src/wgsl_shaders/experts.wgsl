// Mixtures of experts: selection of a row's experts, lists of an expert's rows, and the weighted sum of the experts'
// outputs.

//! kernel route
// Chooses the experts with the `n_used` largest sums of probability and bias, the lower index first among equals; a
// workgroup per row. Weights do not include the bias, but a factor of each expert. `gating`: how router outputs become weights.
const SOFTMAX: u32 = 0u; // over all experts
const SOFTMAX_CHOSEN: u32 = 1u; // over the chosen ones
const SIGMOID: u32 = 2u;
const SQRT_SOFTPLUS: u32 = 3u;

// Lower bound of the sum that divides weights: the smallest normal f16.
const MIN_WEIGHT_SUM: f32 = 6.1035156e-5;

var<workgroup> probabilities: array<f32, 512>;
var<workgroup> ranks: array<f32, 512>;
var<workgroup> values: array<f32, 32>;
var<workgroup> indices: array<u32, 32>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = group.x;
    let origin = p.router_at + row * p.n_expert;
    var largest = MASKED;
    for (var e = t; e < p.n_expert; e += 32u) {
        largest = max(largest, router[origin + e]);
    }
    values[t] = largest;
    workgroupBarrier();
    for (var i = 0u; i < 32u; i++) {
        largest = max(largest, values[i]);
    }
    workgroupBarrier(); // `values` are read
    var sum = 0.0;
    for (var e = t; e < p.n_expert; e += 32u) {
        let x = router[origin + e];
        var probability = 0.0;
        if (p.gating == SIGMOID) {
            probability = times_sigmoid(1.0, x);
        } else if (p.gating == SQRT_SOFTPLUS) {
            probability = sqrt(softplus(x));
        } else {
            probability = exp_negative(x - largest);
        }
        probabilities[e] = probability;
        sum += probability;
    }
    values[t] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < 32u; i++) {
        sum += values[i];
    }
    for (var e = t; e < p.n_expert; e += 32u) {
        if (p.gating == SOFTMAX) {
            probabilities[e] /= sum;
        }
        ranks[e] = probabilities[e] + bias[p.bias_at + e];
    }

    if (p.n_group > 1u) {
        // A group counts as much as its two best experts or, where ranks are probabilities, its best one.
        let size = p.n_expert / p.n_group;
        workgroupBarrier(); // ranks are written, `values` are read
        var best = MASKED;
        var second = MASKED;
        for (var i = 0u; t < p.n_group && i < size; i++) {
            let rank = ranks[t * size + i];
            second = max(second, min(rank, best));
            best = max(best, rank);
        }
        values[t] = select(best + second, best, p.gating == SOFTMAX || size == 1u);
        workgroupBarrier();
        var open = 0u;
        for (var j = 0u; j < p.n_group_used; j++) {
            var most = 2.0 * MASKED;
            var index = 0u;
            for (var g = 0u; g < p.n_group; g++) {
                if (((open >> g) & 1u) == 0u && values[g] > most) {
                    most = values[g];
                    index = g;
                }
            }
            open |= 1u << index;
        }
        for (var e = t; e < p.n_expert; e += 32u) {
            if (((open >> (e / size)) & 1u) == 0u) {
                ranks[e] = MASKED;
            }
        }
    }

    let to = row * p.n_used;
    var chosen_sum = 0.0;
    for (var j = 0u; j < p.n_used; j++) {
        var best = MASKED;
        var index = 0xFFFFFFFFu;
        for (var e = t; e < p.n_expert; e += 32u) {
            if (ranks[e] > best) {
                best = ranks[e];
                index = e;
            }
        }
        workgroupBarrier(); // what the choice before wrote is read
        values[t] = best;
        indices[t] = index;
        workgroupBarrier();
        for (var i = 0u; i < 32u; i++) {
            if (values[i] > best || (values[i] == best && indices[i] < index)) {
                best = values[i];
                index = indices[i];
            }
        }
        index = min(index, p.n_expert - 1u);
        chosen_sum += probabilities[index];
        if (t == 0u) {
            chosen[p.chosen_at + to + j] = index;
        }
        if (t == index % 32u) {
            ranks[index] = MASKED; // only this thread reads it
        }
    }
    let normalise = p.normalise != 0u || p.gating == SOFTMAX_CHOSEN;
    let factor = select(p.scale, p.scale / max(chosen_sum, MIN_WEIGHT_SUM), normalise);
    if (t == 0u) { // which wrote the choice
        for (var j = 0u; j < p.n_used; j++) {
            let index = chosen[p.chosen_at + to + j];
            weights[p.weights_at + to + j] = factor * probabilities[index] * scales[p.scales_at + index];
        }
    }
}

//! kernel expert_rows
// Lists the choices of each expert in order, a workgroup per expert: `counts[e]` of them in `lists[e]`, `(n_expert,
// n_chosen)`.
var<workgroup> before: array<u32, 64>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let expert = group.x;
    var count = 0u;
    for (var first = 0u; first < p.n_chosen; first += 32u) {
        let c = first + t;
        var mine = 0u;
        if (c < p.n_chosen) {
            mine = u32(chosen[p.chosen_at + c] == expert);
        }
        workgroupBarrier(); // sums of the step before are read
        before[t] = mine;
        // Sums of 1, 2, 4, ... numbers, from one half of `before` to the other.
        var half = 0u;
        for (var distance = 1u; distance < 32u; distance *= 2u) {
            workgroupBarrier();
            var sum = before[half + t];
            if (t >= distance) {
                sum += before[half + t - distance];
            }
            half = 32u - half;
            before[half + t] = sum;
        }
        workgroupBarrier();
        if (mine != 0u) {
            lists[p.lists_at + expert * p.n_chosen + count + before[half + t] - 1u] = c;
        }
        count += before[half + 31u];
    }
    if (t == 0u) {
        counts[p.counts_at + expert] = count;
    }
}

//! kernel add_expert_bias
// `y[c] += bias[chosen[c]]`, nothing where that expert does not exist.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    let expert = chosen[p.chosen_at + group.y];
    if (i < p.n && expert < p.n_expert) {
        y[p.y_at + group.y * p.n + i] += bias[p.bias_at + expert * p.n + i];
    }
}

//! kernel combine_experts
// `y[r] = sum over j of weights[r][j] x[r][j]`, in order.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i >= p.n) {
        return;
    }
    var sum = 0.0;
    for (var j = 0u; j < p.n_used; j++) {
        let c = group.y * p.n_used + j;
        sum = fma(weights[p.weights_at + c], x[p.x_at + c * p.n + i], sum);
    }
    y[p.y_at + group.y * p.n + i] = sum;
}
