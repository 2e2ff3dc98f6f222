// Products of weights with up to eight activation rows. A team of LANES threads takes OUTS weight rows, a thread every
// LANES-th part of them, UNROLL at a time, so that enough reads are under way; a part is unpacked once for all activation
// rows. The order of a sum depends on no number of activation rows, but on LANES, which the host chooses by the weights'
// shape.
//! use blocks acts

// Partial sums: that of thread `lane` of a team for result r is at `LANES * r + (lane ^ (r % 32))`, so that threads which
// add those of successive results use different banks.
var<workgroup> partial: array<f32, $SUMS>;

// Sum of the LANES partial sums of a result.
fn partial_sum(r: u32) -> f32 {
//! for k < 4
    var sum_$k = partial[$LANESu * r + ($ku ^ (r % 32u))];
//! end
    for (var i = 4u; i < $LANESu; i += 4u) {
//! for k < 4
        sum_$k += partial[$LANESu * r + ((i + $ku) ^ (r % 32u))];
//! end
    }
    return (sum_0 + sum_1) + (sum_2 + sum_3);
}

//! kernel matvec
// `y[i][o] = sum over k of W[o][k] x[i][k]` for ROWS activation rows and OUTS weight rows per team. Workgroups with the
// same weights come one after the other, so that memory is read once.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % $LANESu;
    let team = t / $LANESu;
    let first = (group.y * $TEAMSu + team) * $OUTSu;
    let row = group.x * $ROWSu;
//! for o < OUTS
    let w_$o = p.w_at + min(first + $ou, p.n_out - 1u) * p.row_bytes;
//! end
//! for i < ROWS
    let x_$i = p.x_at + min(row + $iu, p.n_rows - 1u) * p.n_in;
//! for o < OUTS
    var sum_$i_$o = 0.0;
//! end
//! end
    let n_parts = (p.n_in + 15u) / 16u;
    for (var at = lane; at < n_parts; at += $LANESu * $UNROLLu) {
//! for u < UNROLL
        // A part behind the end is read as the last one, and not used.
        let at_$u = min(at + $LANESu * $uu, n_parts - 1u);
//! for o < OUTS
        let weights_$u_$o = part(w_$o, at_$u, p.n_in);
//! end
//! end
//! for u < UNROLL
        if (at + $LANESu * $uu < n_parts) {
//! for i < ROWS
            {
                let values = acts(x_$i, at_$u, p.n_in);
//! for o < OUTS
                sum_$i_$o = dot16(weights_$u_$o, values, sum_$i_$o);
//! end
            }
//! end
        }
//! end
    }
//! for i < ROWS
//! for o < OUTS
    {
        let r = (team * $ROWSu + $iu) * $OUTSu + $ou;
        partial[$LANESu * r + (lane ^ (r % 32u))] = sum_$i_$o;
    }
//! end
//! end
    workgroupBarrier();
    if (t < $TEAMSu * $ROWSu * $OUTSu) {
        let out = (group.y * $TEAMSu + t / ($ROWSu * $OUTSu)) * $OUTSu + t % $OUTSu;
        let to = row + t / $OUTSu % $ROWSu;
        if (out < p.n_out && to < p.n_rows) {
            y[p.y_at + to * p.n_out + out] = partial_sum(t);
        }
    }
}

//! kernel matvec_experts
// One product per chosen expert: `y[c] = W[chosen[c]] x[c / choices_per_row]`. The weights of all experts are contiguous.
// An expert that does not exist yields zeros.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % $LANESu;
    let team = t / $LANESu;
    let first = (group.x * $TEAMSu + team) * $OUTSu;
    let expert = chosen[p.chosen_at + group.y];
    let exists = expert < p.n_expert;
    let matrix = select(0u, expert, exists) * p.n_out;
    let x_0 = p.x_at + group.y / p.choices_per_row * p.n_in;
//! for o < OUTS
    let w_$o = p.w_at + (matrix + min(first + $ou, p.n_out - 1u)) * p.row_bytes;
    var sum_$o = 0.0;
//! end
    let n_parts = (p.n_in + 15u) / 16u;
    for (var at = lane; at < n_parts; at += $LANESu * $UNROLLu) {
//! for u < UNROLL
        let at_$u = min(at + $LANESu * $uu, n_parts - 1u);
//! for o < OUTS
        let weights_$u_$o = part(w_$o, at_$u, p.n_in);
//! end
//! end
//! for u < UNROLL
        if (at + $LANESu * $uu < n_parts) {
            let values = acts(x_0, at_$u, p.n_in);
//! for o < OUTS
            sum_$o = dot16(weights_$u_$o, values, sum_$o);
//! end
        }
//! end
    }
//! for o < OUTS
    {
        let r = team * $OUTSu + $ou;
        partial[$LANESu * r + (lane ^ (r % 32u))] = sum_$o;
    }
//! end
    workgroupBarrier();
    if (t < $TEAMSu * $OUTSu) {
        let out = group.x * $TEAMSu * $OUTSu + t;
        if (out < p.n_out) {
            y[p.y_at + group.y * p.n_out + out] = select(0.0, partial_sum(t), exists);
        }
    }
}
