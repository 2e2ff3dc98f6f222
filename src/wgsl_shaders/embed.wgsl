// Looks up rows of the embedding table.
//! use blocks

//! kernel embed
// `x[i] = scale * W[tokens[i]]`, one thread per part. A token that does not exist yields zeros.
@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 32u + t;
    if (16u * i >= p.n_embd) {
        return;
    }
    let token = tokens[p.tokens_at + group.y];
    var weights = mat4x4<f32>();
    if (token < p.n_vocab) {
        weights = part(p.w_at + token * p.row_bytes, i, p.n_embd);
    }
    let to = p.x_at + group.y * p.n_embd + 16u * i;
//! for v < 4
//! for c < 4
    if (16u * i + 4u * $vu + $cu < p.n_embd) {
        x[to + 4u * $vu + $cu] = p.scale * weights[$v][$c];
    }
//! end
//! end
}
