// Transform of keys below 8 bits and of their queries.

// Four heads of up to 576 values.
var<workgroup> heads: array<f32, 2304>;

//! kernel hadamard
// Multiplies runs of `2^log_side` values of `n_rows` heads of `n` by the Hadamard matrix, in place, a team of 32 threads
// per head; `factor` makes the matrix orthonormal.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % 32u;
    let row = folded(group) * 4u + t / 32u;
    let exists = row < p.n_rows;
    let head = p.x_at + row * p.n;
    let v = t / 32u * 576u;
    for (var i = lane; i < p.n && exists; i += 32u) {
        heads[v + i] = x[head + i];
    }
    for (var s = 0u; s < p.log_side; s++) {
        workgroupBarrier();
        for (var i = lane; i < p.n / 2u && exists; i += 32u) {
            let first = v + ((i >> s) << (s + 1u)) + (i & ((1u << s) - 1u));
            let second = first + (1u << s);
            let a = heads[first];
            let b = heads[second];
            heads[first] = a + b;
            heads[second] = a - b;
        }
    }
    workgroupBarrier();
    for (var i = lane; i < p.n && exists; i += 32u) {
        x[head + i] = p.factor * heads[v + i];
    }
}
