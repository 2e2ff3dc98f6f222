// Products of weights with many activation rows, where the GPU has cooperative matrices: of f16, with sums in f32. Four
// subgroups compute a tile, each a half of its weight rows by a half of its activation rows, as `BLOCK_OUTS` by
// `BLOCK_ROWS` matrices. 32 columns at a time are rounded to f16 in workgroup memory; the next ones are read meanwhile.
// A sum is in the order of the columns, wherever its row is in a tile.
//! use blocks acts

// Vectors of a row of a panel: 32 columns, and 16 bytes so that rows begin in different banks.
const STRIDE = 10u;
// Activations are multiplied by it before they are rounded, so that they overflow from 4e6 on only.
const SCALE = 0.015625;

var<workgroup> w_panel: array<vec4<f16>, $W_PANEL>;
var<workgroup> x_panel: array<vec4<f16>, $X_PANEL>;
// A matrix of each subgroup.
var<workgroup> results: array<f32, $RESULTS>;

fn to_w_panel(at: u32, values: mat4x4<f32>) {
//! for v < 4
    w_panel[at + $vu] = vec4<f16>(values[$v]);
//! end
}

fn to_x_panel(at: u32, values: mat4x4<f32>) {
//! for v < 4
    x_panel[at + $vu] = vec4<f16>(SCALE * values[$v]);
//! end
}

// Part i of a row of weights, which is at a byte, or zeros after its end.
fn weights_of(row: u32, i: u32) -> mat4x4<f32> {
    if (16u * i >= p.n_in) {
        return mat4x4<f32>();
    }
    return part(row, i, p.n_in);
}

// Likewise of a row of activations.
fn values_of(row: u32, i: u32) -> mat4x4<f32> {
    if (16u * i >= p.n_in) {
        return mat4x4<f32>();
    }
    return acts(row, i, p.n_in);
}

//! kernel matmul
// `y[i][o] = sum over k of W[o][k] x[i][k]`: where rows `o` or `i` begin.
fn w_row(expert: u32, o: u32) -> u32 {
    return p.w_at + o * p.row_bytes;
}

fn x_row(expert: u32, i: u32) -> u32 {
    return p.x_at + i * p.n_in;
}

fn y_row(expert: u32, i: u32) -> u32 {
    return p.y_at + i * p.n_out;
}

//! kernel matmul_experts
// The product of an expert with the rows that chose it: `y[c] = W[e] x[c / choices_per_row]` for the choices `c` in the
// first `counts[e]` of `lists[e]`, `(n_expert, n_chosen)`.
fn w_row(expert: u32, o: u32) -> u32 {
    return p.w_at + (expert * p.n_out + o) * p.row_bytes;
}

fn x_row(expert: u32, i: u32) -> u32 {
    return p.x_at + lists[p.lists_at + expert * p.n_chosen + i] / p.choices_per_row * p.n_in;
}

fn y_row(expert: u32, i: u32) -> u32 {
    return p.y_at + lists[p.lists_at + expert * p.n_chosen + i] * p.n_out;
}

//! kernel matmul matmul_experts
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let first_out = group.x * $PANEL_OUTSu;
    let first_row = group.y * $PANEL_ROWSu;
//! kernel matmul
    let n_rows = p.n_rows;
//! kernel matmul_experts
    let n_rows = counts[p.counts_at + group.z];
//! kernel matmul matmul_experts
    if (first_row >= n_rows) {
        return;
    }
    let lane = t % $SUBGROUPu;
    let subgroup = t / $SUBGROUPu;
    // Where the subgroup's part of the tile begins.
    let my_out = subgroup % 2u * ($PANEL_OUTSu / 2u);
    let my_row = subgroup / 2u * ($PANEL_ROWSu / 2u);
    // Two threads read a row of a panel. Behind the last row, that is read again.
    let to = t / 2u * STRIDE + t % 2u * 4u;
//! for l < W_LOADS
    let w_row_$l = w_row(group.z, min(first_out + t / 2u + $lu * ($THREADSu / 2u), p.n_out - 1u));
    var weights_$l = weights_of(w_row_$l, t % 2u);
//! end
//! for l < X_LOADS
    let x_row_$l = x_row(group.z, min(first_row + t / 2u + $lu * ($THREADSu / 2u), n_rows - 1u));
    var values_$l = values_of(x_row_$l, t % 2u);
//! end
//! for a < BLOCK_OUTS
//! for b < BLOCK_ROWS
    var sum_$a_$b = coop_mat$SIDEx$SIDE<f32, C>();
//! end
//! end
    for (var column = 0u; column < p.n_in; column += 32u) {
        workgroupBarrier(); // the panels before are read
//! for l < W_LOADS
        to_w_panel(to + $lu * ($THREADSu / 2u) * STRIDE, weights_$l);
//! end
//! for l < X_LOADS
        to_x_panel(to + $lu * ($THREADSu / 2u) * STRIDE, values_$l);
//! end
        workgroupBarrier();
        let next = column / 16u + 2u + t % 2u;
//! for l < W_LOADS
        weights_$l = weights_of(w_row_$l, next);
//! end
//! for l < X_LOADS
        values_$l = values_of(x_row_$l, next);
//! end
        for (var c = 0u; c < 8u; c += $SIDEu / 4u) {
//! for a < BLOCK_OUTS
            let w_$a = coopLoadT<coop_mat$SIDEx$SIDE<f16, A>>(&w_panel[(my_out + $au * $SIDEu) * STRIDE + c], STRIDE);
//! end
//! for b < BLOCK_ROWS
            let x_$b = coopLoad<coop_mat$SIDEx$SIDE<f16, B>>(&x_panel[(my_row + $bu * $SIDEu) * STRIDE + c], STRIDE);
//! for a < BLOCK_OUTS
            sum_$a_$b = coopMultiplyAdd(w_$a, x_$b, sum_$a_$b);
//! end
//! end
        }
    }
//! for b < BLOCK_ROWS
//! for a < BLOCK_OUTS
    coopStore(sum_$a_$b, &results[subgroup * ($SIDEu * $SIDEu)], $SIDEu);
    workgroupBarrier();
    for (var i = lane; i < $SIDEu * $SIDEu; i += $SUBGROUPu) {
        let out = first_out + my_out + $au * $SIDEu + i % $SIDEu;
        let row = first_row + my_row + $bu * $SIDEu + i / $SIDEu;
        if (out < p.n_out && row < n_rows) {
            y[y_row(group.z, row) + out] = results[subgroup * ($SIDEu * $SIDEu) + i] / SCALE;
        }
    }
    workgroupBarrier(); // the results are read
//! end
//! end
}
