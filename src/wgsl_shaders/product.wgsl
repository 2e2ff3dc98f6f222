// Product with one of the matrices of a matvec.
//! use blocks unscaled

// Number of workgroups for all of its rows.
fn tiles() -> u32 {
    return (p.n_out + $TEAMSu * $OUTSu - 1u) / ($TEAMSu * $OUTSu);
}

// `y[i][o] = sum over k of W[o][k] x[i][k]` for ROWS activation rows and OUTS weight rows per team: the sum that thread `t`
// stores. Workgroups with the same weights come one after the other, so that memory is read once.
fn product(tile: u32, row: u32, t: u32) -> f32 {
    let lane = t % $LANESu;
    let team = t / $LANESu;
    let first = (tile * $TEAMSu + team) * $OUTSu;
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
//! if UNSCALED
    for (var unit = lane; unit < n_parts / $UNITu; unit += $LANESu) {
//! for h < UNIT
        {
            let at = part_of(unit, $hu);
//! for o < OUTS
            let weights_$o = unscaled(w_$o, unit, $hu);
//! end
//! for i < ROWS
            {
                let values = acts(x_$i, at, p.n_in);
                let all = total16(values);
//! for o < OUTS
                sum_$i_$o = fma(weights_$o.offset, all, sum_$i_$o);
                sum_$i_$o = fma(weights_$o.scale, dot16(weights_$o.numbers, values, 0.0), sum_$i_$o);
//! end
            }
//! end
        }
//! end
    }
//! else
    for (var at = lane; at < n_parts; at += $LANESu) {
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
//! end
//! for i < ROWS
//! for o < OUTS
    put((team * $ROWSu + $iu) * $OUTSu + $ou, lane, sum_$i_$o);
//! end
//! end
    add_up($TEAMSu * $ROWSu * $OUTSu, t);
    if (t < $TEAMSu * $ROWSu * $OUTSu) {
        return result(t);
    }
    return 0.0;
}

// Stores the sum of a thread.
fn store(tile: u32, row: u32, t: u32, sum: f32) {
    if (t < $TEAMSu * $ROWSu * $OUTSu) {
        let out = (tile * $TEAMSu + t / ($ROWSu * $OUTSu)) * $OUTSu + t % $OUTSu;
        let to = row + t / $OUTSu % $ROWSu;
        if (out < p.n_out && to < p.n_rows) {
            y[p.y_at + to * p.n_out + out] = sum;
        }
    }
}
