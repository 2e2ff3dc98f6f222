// Product with one of the matrices of a matvec.
//! use blocks

// Number of workgroups for all of its rows.
fn tiles() -> u32 {
    return (p.n_out + $TEAMSu * $OUTSu - 1u) / ($TEAMSu * $OUTSu);
}

// `y[i][o] = sum over k of W[o][k] x[i][k]` for ROWS activation rows and OUTS weight rows per team. Workgroups with the
// same weights come one after the other, so that memory is read once. Activations of four or more rows are copied to
// workgroup memory, of which threads read their parts faster.
fn product(tile: u32, row: u32, t: u32) {
    let lane = t % $LANESu;
    let team = t / $LANESu;
    let first = (tile * $TEAMSu + team) * $OUTSu;
//! for o < OUTS
    let w_$o = p.w_at + min(first + $ou, p.n_out - 1u) * p.row_bytes;
//! end
//! for s < STAGES
//! for i < STAGE_ROWS
//! for o < OUTS
    var sum_$s_$i_$o = 0.0;
//! end
//! end
//! end
    let n_parts = (p.n_in + 15u) / 16u;
//! if STAGED
    for (var begin = 0u; begin < n_parts; begin += $LANESu) {
        let at = min(begin + lane, n_parts - 1u);
//! for o < OUTS
        let weights_$o = part(w_$o, at, p.n_in);
//! end
//! for s < STAGES
        workgroupBarrier(); // activations before are read
        for (var j = t; j < $STAGE_ROWSu * $LANESu * 4u; j += 128u) {
            let source = min(row + $su * $STAGE_ROWSu + j / ($LANESu * 4u), p.n_rows - 1u);
            let i = 4u * begin + j % ($LANESu * 4u);
            if (i < 4u * n_parts) {
                memory[spread_out(j)] = act4(p.x_at + source * p.n_in, i, p.n_in);
            }
        }
        workgroupBarrier();
        if (begin + lane < n_parts) {
//! for i < STAGE_ROWS
            {
                let j = $iu * $LANESu * 4u + 4u * lane;
                let values = mat4x4<f32>(
                    memory[spread_out(j)],
                    memory[spread_out(j + 1u)],
                    memory[spread_out(j + 2u)],
                    memory[spread_out(j + 3u)],
                );
//! for o < OUTS
                sum_$s_$i_$o = dot16(weights_$o, values, sum_$s_$i_$o);
//! end
            }
//! end
        }
//! end
    }
    workgroupBarrier(); // activations are read
//! else
//! for i < ROWS
    let x_$i = p.x_at + min(row + $iu, p.n_rows - 1u) * p.n_in;
//! end
    for (var at = lane; at < n_parts; at += $LANESu) {
//! for i < ROWS
        let values_$i = acts(x_$i, at, p.n_in);
//! end
//! for o < OUTS
        let weights_$o = part(w_$o, at, p.n_in);
//! end
//! for i < ROWS
//! for o < OUTS
        sum_0_$i_$o = dot16(weights_$o, values_$i, sum_0_$i_$o);
//! end
//! end
    }
//! end
//! for s < STAGES
//! for i < STAGE_ROWS
//! for o < OUTS
    put((team * $ROWSu + $su * $STAGE_ROWSu + $iu) * $OUTSu + $ou, lane, sum_$s_$i_$o);
//! end
//! end
//! end
    add_up($TEAMSu * $ROWSu * $OUTSu, t);
    if (t < $TEAMSu * $ROWSu * $OUTSu) {
        let out = (tile * $TEAMSu + t / ($ROWSu * $OUTSu)) * $OUTSu + t % $OUTSu;
        let to = row + t / $OUTSu % $ROWSu;
        if (out < p.n_out && to < p.n_rows) {
            y[p.y_at + to * p.n_out + out] = result(t);
        }
    }
}
