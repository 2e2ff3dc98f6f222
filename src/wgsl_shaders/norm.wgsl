// Norms, one workgroup of 256 per row. `_add` first adds a branch to the residual stream and stores the sum there. Values are
// read eight at a time, as there are few threads for a row, each of which would wait for every one.

//! kernel-group rms_norm rms_norm_add layer_norm layer_norm_add
var<workgroup> sums: array<f32, 272>;

// Sum of `value` over a workgroup of 256, of sixteen sums of sixteen: the same in all threads.
fn workgroup_sum(value: f32, t: u32) -> f32 {
    workgroupBarrier(); // `sums` may still be read from the call before
    sums[t] = value;
    workgroupBarrier();
    if (t < 16u) {
        var sum = 0.0;
//! for k < 16
        sum += sums[t + 16u * $ku];
//! end
        sums[256u + t] = sum;
    }
    workgroupBarrier();
    var sum = 0.0;
//! for k < 16
    sum += sums[256u + $ku];
//! end
    return sum;
}

// `1 / sqrt(mean of x^2 + eps)` of the row at `at`.
fn rms_scale(at: u32, t: u32) -> f32 {
    var sum = 0.0;
    for (var i = t; i < p.n; i += 2048u) {
//! for k < 8
        let value_$k = x[at + min(i + 256u * $ku, p.n - 1u)];
//! end
//! for k < 8
        sum = fma(value_$k, select(0.0, value_$k, i + 256u * $ku < p.n), sum);
//! end
    }
    return 1.0 / sqrt(workgroup_sum(sum, t) / f32(p.n) + p.eps);
}

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

//! kernel rms_norm
// `y = x / rms(x) * w`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    let at = p.x_at + row * p.n;
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    let scale = rms_scale(at, t);
    for (var i = t; i < p.n; i += 2048u) {
//! for k < 8
        let j_$k = min(i + 256u * $ku, p.n - 1u);
        let value_$k = x[at + j_$k] * scale * w[p.w_at + j_$k];
//! end
//! for k < 8
        if (i + 256u * $ku < p.n) {
            y[p.y_at + row * p.n + j_$k] = value_$k;
        }
//! end
    }
}

//! kernel rms_norm_add
// `x += branch_scale * branch; y = x / rms(x) * w`. Each thread reads again only what it wrote.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group);
    let at = p.x_at + row * p.n;
    if (row >= p.n_rows) {
        return; // all threads alike
    }
    var sum = 0.0;
    for (var i = t; i < p.n; i += 2048u) {
//! for k < 8
        // Behind the end a thread reads again what is its own: others may still be written.
        let j_$k = select(i, i + 256u * $ku, i + 256u * $ku < p.n);
        let value_$k = fma(p.branch_scale, branch[p.branch_at + row * p.n + j_$k], x[at + j_$k]);
//! end
//! for k < 8
        if (i + 256u * $ku < p.n) {
            x[at + j_$k] = value_$k;
            sum = fma(value_$k, value_$k, sum);
        }
//! end
    }
    let scale = 1.0 / sqrt(workgroup_sum(sum, t) / f32(p.n) + p.eps);
    for (var i = t; i < p.n; i += 2048u) {
//! for k < 8
        let j_$k = select(i, i + 256u * $ku, i + 256u * $ku < p.n);
        let value_$k = x[at + j_$k] * scale * w[p.w_at + j_$k];
//! end
//! for k < 8
        if (i + 256u * $ku < p.n) {
            y[p.y_at + row * p.n + j_$k] = value_$k;
        }
//! end
    }
}

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
