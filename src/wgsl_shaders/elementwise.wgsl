// Element-wise kernels, one thread per value.

//! use gates

//! kernel silu_mul
// `gate = silu(gate) * up`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        gate[p.gate_at + i] = of_silu_mul(gate[p.gate_at + i], up[p.up_at + i]);
    }
}

//! kernel gelu_mul
// `gate = gelu(gate) * up`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        gate[p.gate_at + i] = of_gelu_mul(gate[p.gate_at + i], up[p.up_at + i]);
    }
}

//! kernel swiglu_oai
// `gate = g / (1 + e^(-1.702 g)) * (u + 1)` with `g = min(gate, 7)` and `u` the values of `up` clamped to -7..7.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        gate[p.gate_at + i] = of_swiglu_oai(gate[p.gate_at + i], up[p.up_at + i]);
    }
}

//! kernel gelu
// `x = gelu(x)`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        x[p.x_at + i] = gelu_tanh(x[p.x_at + i]);
    }
}

//! kernel squared_relu
// `x = max(x, 0)^2`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        let value = x[p.x_at + i];
        x[p.x_at + i] = value * max(value, 0.0);
    }
}

//! kernel add_scaled
// `y += scale * x`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        y[p.y_at + i] = fma(p.scale, x[p.x_at + i], y[p.y_at + i]);
    }
}

//! kernel add_bias
// `y[r] += bias`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i < p.n) {
        y[p.y_at + group.y * p.n + i] += bias[p.bias_at + i];
    }
}

//! kernel add_gated
// Adds a shared expert's output: `y[r] += x[r] / (1 + e^-gate[r])`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i < p.n) {
        let at = group.y * p.n + i;
        y[p.y_at + at] += times_sigmoid(x[p.x_at + at], gate[p.gate_at + group.y]);
    }
}

//! kernel finish_logits
// `x = softcap * tanh(scale * x / softcap)`, or `scale * x` where softcap is 0.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i < p.n) {
        x[p.x_at + i] = softcapped(p.scale * x[p.x_at + i], p.softcap);
    }
}
