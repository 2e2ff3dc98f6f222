// Products of weights with many activation rows: a workgroup of 128 computes a tile of 64 activation rows by 64 weight
// rows, a thread 8 by 4 of it. 32 columns at a time are expanded to floats in workgroup memory. A sum is in the order of
// the columns.
//! use blocks acts

// 64 rows of 8 vectors of four columns each; vector c of row r is at `8 * r + (c ^ (r % 8))`, so that threads which read
// the same columns of successive rows use different banks.
var<workgroup> w_panel: array<vec4<f32>, 512>;
var<workgroup> x_panel: array<vec4<f32>, 512>;

fn to_w_panel(at: u32, turn: u32, values: mat4x4<f32>) {
//! for v < 4
    w_panel[at ^ ($vu ^ turn)] = values[$v];
//! end
}

fn to_x_panel(at: u32, turn: u32, values: mat4x4<f32>) {
//! for v < 4
    x_panel[at ^ ($vu ^ turn)] = values[$v];
//! end
}

//! kernel matmul
// `y[i][o] = sum over k of W[o][k] x[i][k]`.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let my_out = group.x * 64u + t / 2u;
    let my_row = group.y * 64u + t / 2u;
    let has_w = my_out < p.n_out;
    let has_x = my_row < p.n_rows;
    let w_row = p.w_at + my_out * p.row_bytes;
    let x_row = p.x_at + my_row * p.n_in;
//! include tile
//! for i < 8
//! for j < 4
    if (group.y * 64u + 8u * ty + $iu < p.n_rows && group.x * 64u + tx + 16u * $ju < p.n_out) {
        y[p.y_at + (group.y * 64u + 8u * ty + $iu) * p.n_out + group.x * 64u + tx + 16u * $ju] = sum_$i_$j;
    }
//! end
//! end
}

//! kernel matmul_experts
// The product of expert `group.z` with the rows that chose it: `y[c] = W[e] x[c / choices_per_row]` for the choices `c`
// in the first `counts[e]` of `lists[e]`, `(n_expert, n_chosen)`.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let first = group.y * 64u;
    let count = counts[p.counts_at + group.z];
    let list = p.lists_at + group.z * p.n_chosen;
    let my_out = group.x * 64u + t / 2u;
    let has_w = my_out < p.n_out && first < count;
    let has_x = first + t / 2u < count;
    let w_row = p.w_at + (group.z * p.n_out + my_out) * p.row_bytes;
    var x_row = p.x_at;
    if (has_x) {
        x_row += lists[list + first + t / 2u] / p.choices_per_row * p.n_in;
    }
//! include tile
//! for i < 8
    if (first + 8u * ty + $iu < count) {
        let to = p.y_at + lists[list + first + 8u * ty + $iu] * p.n_out;
//! for j < 4
        if (group.x * 64u + tx + 16u * $ju < p.n_out) {
            y[to + group.x * 64u + tx + 16u * $ju] = sum_$i_$j;
        }
//! end
    }
//! end
}
