// Rotary positions, in place, of `n_dims` dimensions of each head from `first` on. The host computes cosines and sines of a
// pass's rows, `(n_rows, n_dims / 2)`; a thread rotates one pair.

// Pair i of a head is at `first` and `second`.
fn rotate_pair(first: u32, second: u32, angle: vec2<f32>) {
    let a = x[first];
    let b = x[second];
    x[first] = fma(a, angle.x, -(b * angle.y));
    x[second] = fma(a, angle.y, b * angle.x);
}

//! kernel rope_norm
// Pairs of adjacent dimensions.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let n = p.n_dims / 2u;
    let i = group.x * 128u + t;
    if (i < p.n_head * n) {
        let at = p.x_at + (group.y * p.n_head + i / n) * p.head_dim + p.first + i % n * 2u;
        rotate_pair(at, at + 1u, angles[p.angles_at + group.y * n + i % n]);
    }
}

//! kernel rope_neox
// Pairs that are half of the rotated dimensions apart.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let n = p.n_dims / 2u;
    let i = group.x * 128u + t;
    if (i < p.n_head * n) {
        let at = p.x_at + (group.y * p.n_head + i / n) * p.head_dim + p.first + i % n;
        rotate_pair(at, at + n, angles[p.angles_at + group.y * n + i % n]);
    }
}
