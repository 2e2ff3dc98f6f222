// Norms, one workgroup of 256 per row. `_add` first adds a branch to the residual stream and stores the sum there.

//! kernel-group rms_norm rms_norm_add layer_norm layer_norm_add
var<workgroup> sums: array<vec4<f32>, 68>;

fn added(four: vec4<f32>) -> f32 {
    return (four.x + four.y) + (four.z + four.w);
}

// Sum of `value` over a workgroup of 256, of sixteen sums of sixteen: the same in all threads.
fn workgroup_sum(value: f32, t: u32) -> f32 {
    workgroupBarrier(); // `sums` may still be read from the call before
    sums[t / 4u][t % 4u] = value;
    workgroupBarrier();
    if (t < 16u) {
        let sum = added((sums[4u * t] + sums[4u * t + 1u]) + (sums[4u * t + 2u] + sums[4u * t + 3u]));
        sums[64u + t / 4u][t % 4u] = sum;
    }
    workgroupBarrier();
    return added((sums[64] + sums[65]) + (sums[66] + sums[67]));
}

//! kernel-group layer_norm layer_norm_add
// Mean of the row at `at`, and `1 / sqrt(variance + eps)`.
fn mean_scale(at: u32, t: u32) -> vec2<f32> {
    var sum = 0.0;
    for (var i = t; i < p.n; i += 256u) {
        sum += x[at + i];
    }
    let mean = workgroup_sum(sum, t) / f32(p.n);
    var squares = 0.0;
    for (var i = t; i < p.n; i += 256u) {
        let difference = x[at + i] - mean;
        squares = fma(difference, difference, squares);
    }
    return vec2<f32>(mean, 1.0 / sqrt(workgroup_sum(squares, t) / f32(p.n) + p.eps));
}

//! kernel-group rms_norm rms_norm_add
//! if WIDE
fn stream(row: u32, j: u32) -> vec4<f32> {
    let at = (p.x_at + row * p.n) / 4u + j;
//! if ADDS
    return fma(vec4<f32>(p.branch_scale), branch[(p.branch_at + row * p.n) / 4u + j], x[at]);
//! else
    return x[at];
//! end
}

fn keep(row: u32, j: u32, value: vec4<f32>) {
//! if ADDS
    x[(p.x_at + row * p.n) / 4u + j] = value;
//! end
}

// `x += branch_scale * branch; y = x / rms(x) * w`. A thread has four vectors in registers, as many as rows of 4096 values
// have; for longer rows it reads again what it wrote. Behind the end it reads what it does not use.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    let n = p.n / 4u;
//! for k < 4
    let j_$k = min(t + 256u * $ku, n - 1u);
    let value_$k = stream(row, j_$k);
    let weight_$k = w[p.w_at / 4u + j_$k];
//! end
    var squares = vec4<f32>();
//! for k < 4
    if (t + 256u * $ku < n) {
        keep(row, j_$k, value_$k);
        squares = fma(value_$k, value_$k, squares);
    }
//! end
    for (var j = t + 1024u; j < n; j += 256u) {
        let value = stream(row, j);
        keep(row, j, value);
        squares = fma(value, value, squares);
    }
    let scale = 1.0 / sqrt(workgroup_sum(added(squares), t) / f32(p.n) + p.eps);
    let to = (p.y_at + row * p.n) / 4u;
//! for k < 4
    if (t + 256u * $ku < n) {
        y[to + j_$k] = value_$k * scale * weight_$k;
    }
//! end
    for (var j = t + 1024u; j < n; j += 256u) {
        y[to + j] = x[(p.x_at + row * p.n) / 4u + j] * scale * w[p.w_at / 4u + j];
    }
}
//! else
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    let at = p.x_at + row * p.n;
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    var squares = 0.0;
    for (var i = t; i < p.n; i += 256u) {
//! if ADDS
        x[at + i] = fma(p.branch_scale, branch[p.branch_at + row * p.n + i], x[at + i]);
//! end
        squares = fma(x[at + i], x[at + i], squares);
    }
    let scale = 1.0 / sqrt(workgroup_sum(squares, t) / f32(p.n) + p.eps);
    for (var i = t; i < p.n; i += 256u) {
        y[p.y_at + row * p.n + i] = x[at + i] * scale * w[p.w_at + i];
    }
}
//! end

//! kernel layer_norm
// `y = (x - mean) / deviation * w + b`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    let at = p.x_at + row * p.n;
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    let norm = mean_scale(at, t);
    for (var i = t; i < p.n; i += 256u) {
        y[p.y_at + row * p.n + i] = fma((x[at + i] - norm.x) * norm.y, w[p.w_at + i], b[p.b_at + i]);
    }
}

//! kernel layer_norm_add
// `x += branch_scale * branch; y = (x - mean) / deviation * w + b`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    let at = p.x_at + row * p.n;
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    for (var i = t; i < p.n; i += 256u) {
        x[at + i] = fma(p.branch_scale, branch[p.branch_at + row * p.n + i], x[at + i]);
    }
    let norm = mean_scale(at, t);
    for (var i = t; i < p.n; i += 256u) {
        y[p.y_at + row * p.n + i] = fma((x[at + i] - norm.x) * norm.y, w[p.w_at + i], b[p.b_at + i]);
    }
}

//! kernel rms_norm_heads
// Norms of single query or key heads, in place: `n_rows` heads of `n` values, a team of 32 threads each.
var<workgroup> sums: array<f32, 128>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group) * 4u + t / 32u;
    let lane = t % 32u;
    let at = p.x_at + row * p.n;
    var sum = 0.0;
    if (row < p.n_rows) {
        for (var i = lane; i < p.n; i += 32u) {
            let value = x[at + i];
            sum = fma(value, value, sum);
        }
    }
    sums[t] = sum;
    for (var width = 16u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (lane < width) {
            sums[t] += sums[t + width];
        }
    }
    workgroupBarrier();
    if (row < p.n_rows) {
        let scale = 1.0 / sqrt(sums[t - lane] / f32(p.n) + p.eps);
        for (var i = lane; i < p.n; i += 32u) {
            x[at + i] *= scale * w[p.w_at + i];
        }
    }
}
