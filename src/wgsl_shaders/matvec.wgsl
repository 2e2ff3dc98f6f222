// Products of weights with up to eight activation rows. A team of LANES threads takes OUTS weight rows, a thread every
// LANES-th part of them, so that enough reads are under way; a part is unpacked once for all activation rows. The order of a
// sum depends on no number of activation rows, but on LANES, which the host chooses by the length of rows.
//! use acts

// See `unscaled.wgsl`.
struct Unscaled {
    numbers: mat4x4<f32>,
    scale: f32,
    offset: f32,
}

// Sum of 16 values.
fn total16(a: mat4x4<f32>) -> f32 {
    let four = (a[0] + a[1]) + (a[2] + a[3]);
    return (four.x + four.y) + (four.z + four.w);
}

// Partial sums: that of thread `lane` of a team for result r is at `slot(r, lane)`.
var<workgroup> sums: array<f32, $SUMS>;

// Threads with successive lanes use different banks, and so do those that add the sums of successive results.
fn slot(r: u32, lane: u32) -> u32 {
    return $LANESu * r + (lane ^ (r % 4u * 8u + r / 4u % 8u));
}

fn partial(r: u32, lane: u32) -> f32 {
    return sums[slot(r, lane)];
}

fn put(r: u32, lane: u32, sum: f32) {
    sums[slot(r, lane)] = sum;
}

// Adds the partial sums of `n` results to eight each, those of every eighth thread.
fn add_up(n: u32, t: u32) {
    workgroupBarrier();
    for (var i = t; i < 8u * n; i += 128u) {
        var sum = partial(i / 8u, i % 8u);
        for (var lane = i % 8u + 8u; lane < $LANESu; lane += 8u) {
            sum += partial(i / 8u, lane);
        }
        put(i / 8u, i % 8u, sum);
    }
    workgroupBarrier();
}

// A result after `add_up`.
fn result(r: u32) -> f32 {
    return ((partial(r, 0u) + partial(r, 1u)) + (partial(r, 2u) + partial(r, 3u)))
        + ((partial(r, 4u) + partial(r, 5u)) + (partial(r, 6u) + partial(r, 7u)));
}

//! kernel matvec
//! each product
//! if GATED
//! use gates
//! end

// Up to three matrices, whose products have the same activations: workgroups of the second follow those of the first. Or
// two, of which the first product is a gate of the second.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = group.x * $ROWSu;
    var tile = group.z * 65535u + group.y;
//! if GATED
    let given = product(tile, row, t);
    workgroupBarrier(); // sums are read
    let up = product_1(tile, row, t);
    store(tile, row, t, $GATE(given, up));
    store_1(tile, row, t, up);
//! else
//! if SECOND
    if (tile >= tiles()) {
        tile -= tiles();
//! if THIRD
        if (tile >= tiles_1()) {
            tile -= tiles_1();
            store_2(tile, row, t, product_2(tile, row, t));
            return;
        }
//! end
        store_1(tile, row, t, product_1(tile, row, t));
        return;
    }
//! end
    store(tile, row, t, product(tile, row, t));
//! end
}

//! kernel matvec_experts
//! use blocks
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
    for (var at = lane; at < n_parts; at += $LANESu) {
        let values = acts(x_0, at, p.n_in);
//! for o < OUTS
        let weights_$o = part(w_$o, at, p.n_in);
//! end
//! for o < OUTS
        sum_$o = dot16(weights_$o, values, sum_$o);
//! end
    }
//! for o < OUTS
    put(team * $OUTSu + $ou, lane, sum_$o);
//! end
    add_up($TEAMSu * $OUTSu, t);
    if (t < $TEAMSu * $OUTSu) {
        let out = group.x * $TEAMSu * $OUTSu + t;
        if (out < p.n_out) {
            y[p.y_at + group.y * p.n_out + out] = select(0.0, result(t), exists);
        }
    }
}
