// Low-rank terms of one adapter for rows that share it: `y += scale * B (A x)`, of matrices, the embedding table and
// experts.

//! kernel lora_a
// `t[i][r] = A[r] x[i]` with A as `(rank, n_in)`, a workgroup of 32 per value.
var<workgroup> sums: array<f32, 32>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var i = lane; i < p.n_in; i += 32u) {
        sum = fma(a[p.a_at + group.x * p.n_in + i], x[p.x_at + group.y * p.n_in + i], sum);
    }
    sums[lane] = sum;
    for (var width = 16u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (lane < width) {
            sums[lane] += sums[lane + width];
        }
    }
    if (lane == 0u) {
        t[p.t_at + group.y * p.rank + group.x] = sums[0];
    }
}

//! kernel lora_b
// `y[i][o] += scale * (sum over r of t[i][r] B[r][o])`; rows of B are `b_stride` apart, of which a product of some rows
// of the matrix takes `n_out` columns.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let o = group.x * 256u + lane;
    if (o >= p.n_out) {
        return;
    }
    var sum = 0.0;
    for (var r = 0u; r < p.rank; r++) {
        sum = fma(t[p.t_at + group.y * p.rank + r], b[p.b_at + r * p.b_stride + o], sum);
    }
    let to = p.y_at + group.y * p.n_out + o;
    y[to] = fma(p.scale, sum, y[to]);
}

//! kernel lora_embed
// `x[i] += scale * (sum over r of A[r][token] B[r])`, which is the product with a one-hot vector. A token that does not
// exist adds nothing.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let o = group.x * 256u + lane;
    let token = tokens[p.tokens_at + group.y];
    if (o >= p.n_out || token >= p.n_in) {
        return;
    }
    var sum = 0.0;
    for (var r = 0u; r < p.rank; r++) {
        sum = fma(a[p.a_at + r * p.n_in + token], b[p.b_at + r * p.b_stride + o], sum);
    }
    let to = p.x_at + group.y * p.n_out + o;
    x[to] = fma(p.scale, sum, x[to]);
}

//! kernel lora_experts
// `y[c] += scale * B (A x)` with the term of the expert of choice c, a workgroup per choice. `terms[e]`: index of A in
// `values`, index of B, rank, bits of the scale. Nothing where the expert does not exist or has no term.
var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let c = group.x;
    let expert = chosen[p.chosen_at + c];
    let term = p.terms_at + 4u * min(expert, p.n_expert - 1u);
    let rank = select(0u, terms[term + 2u], expert < p.n_expert);
    let a = p.values_at + terms[term];
    let b = p.values_at + terms[term + 1u];
    let scale = bitcast<f32>(terms[term + 3u]);
    let origin = p.x_at + c / p.choices_per_row * p.n_in;
    let to = p.y_at + c * p.n_out;
    for (var r = 0u; r < rank; r++) {
        var sum = 0.0;
        for (var i = t; i < p.n_in; i += 256u) {
            sum = fma(values[a + r * p.n_in + i], x[origin + i], sum);
        }
        workgroupBarrier(); // the sum before is read
        sums[t] = sum;
        for (var width = 128u; width > 0u; width /= 2u) {
            workgroupBarrier();
            if (t < width) {
                sums[t] += sums[t + width];
            }
        }
        workgroupBarrier();
        sum = scale * sums[0];
        for (var o = t; o < p.n_out; o += 256u) {
            y[to + o] = fma(sum, values[b + r * p.n_out + o], y[to + o]);
        }
    }
}
