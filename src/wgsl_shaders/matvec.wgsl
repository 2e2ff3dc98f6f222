// Products of weights with up to eight activation rows. A team of 32 threads takes some weight rows, a thread every 32nd
// part of them; a part is unpacked once for all activation rows. The order of a sum depends on neither number of rows.
//! use blocks acts

// Partial sums of the four teams, 33 apart to avoid bank conflicts.
var<workgroup> partial: array<f32, $SUMS>;

// Sum of the 32 partial sums of a row.
fn partial_sum(first: u32) -> f32 {
//! for k < 4
    var sum_$k = partial[first + $ku];
//! end
    for (var i = 4u; i < 32u; i += 4u) {
//! for k < 4
        sum_$k += partial[first + i + $ku];
//! end
    }
    return (sum_0 + sum_1) + (sum_2 + sum_3);
}

//! kernel matvec
// `y[i][o] = sum over k of W[o][k] x[i][k]` for ROWS activation rows and OUTS weight rows per team.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % 32u;
    let team = t / 32u;
    let first = (group.x * 4u + team) * $OUTSu;
    let row = group.y * $ROWSu;
//! for o < OUTS
    let w_$o = p.w_at + min(first + $ou, p.n_out - 1u) * p.row_bytes;
//! end
//! for i < ROWS
    let x_$i = p.x_at + min(row + $iu, p.n_rows - 1u) * p.n_in;
//! for o < OUTS
    var sum_$i_$o = 0.0;
//! end
//! end
    for (var at = lane; 16u * at < p.n_in; at += 32u) {
//! for o < OUTS
        let weights_$o = part(w_$o, at, p.n_in);
//! end
//! for i < ROWS
        {
            let values = acts(x_$i, at, p.n_in);
//! for o < OUTS
            sum_$i_$o = dot16(weights_$o, values, sum_$i_$o);
//! end
        }
//! end
    }
//! for i < ROWS
//! for o < OUTS
    partial[((team * $ROWSu + $iu) * $OUTSu + $ou) * 33u + lane] = sum_$i_$o;
//! end
//! end
    workgroupBarrier();
    if (t < 4u * $ROWSu * $OUTSu) {
        let out = (group.x * 4u + t / ($ROWSu * $OUTSu)) * $OUTSu + t % $OUTSu;
        let to = row + t / $OUTSu % $ROWSu;
        if (out < p.n_out && to < p.n_rows) {
            y[p.y_at + to * p.n_out + out] = partial_sum(t * 33u);
        }
    }
}

//! kernel matvec_experts
// One product per chosen expert: `y[c] = W[chosen[c]] x[c / choices_per_row]`, in the order of `matvec`. The weights of
// all experts are contiguous. An expert that does not exist yields zeros.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % 32u;
    let team = t / 32u;
    let first = (group.x * 4u + team) * $OUTSu;
    let expert = chosen[p.chosen_at + group.y];
    let exists = expert < p.n_expert;
    let matrix = select(0u, expert, exists) * p.n_out;
    let x_0 = p.x_at + group.y / p.choices_per_row * p.n_in;
//! for o < OUTS
    let w_$o = p.w_at + (matrix + min(first + $ou, p.n_out - 1u)) * p.row_bytes;
    var sum_$o = 0.0;
//! end
    for (var at = lane; 16u * at < p.n_in; at += 32u) {
        let values = acts(x_0, at, p.n_in);
//! for o < OUTS
        sum_$o = dot16(part(w_$o, at, p.n_in), values, sum_$o);
//! end
    }
//! for o < OUTS
    partial[(team * $OUTSu + $ou) * 33u + lane] = sum_$o;
//! end
    workgroupBarrier();
    if (t < 4u * $OUTSu) {
        let out = group.x * 4u * $OUTSu + t;
        if (out < p.n_out) {
            y[p.y_at + group.y * p.n_out + out] = select(0.0, partial_sum(t * 33u), exists);
        }
    }
}
