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

//! kernel-group unary gated
// Clamps `x` to `low..high`; comparisons instead of `min` and `max` keep NaN.
fn bounded(x: f32, low: f32, high: f32) -> f32 {
    let below = select(x, high, x > high);
    return select(below, low, below < low);
}

// `x / 2 * (1 + erf(x / sqrt(2))) = x / 2 * erfc(-x / sqrt(2))`, with the approximation of `erfc` in src/arch/scalar.
fn gelu_erf(x: f32) -> f32 {
    let near = bounded(x, -40.0, 40.0); // farther out the tail is 0
    let z = abs(near) * 0.70710678;
    let t = 1.0 / fma(0.5, z, 1.0);
    var sum = 0.17087277;
    sum = fma(sum, t, -0.82215223);
    sum = fma(sum, t, 1.4885159);
    sum = fma(sum, t, -1.135204);
    sum = fma(sum, t, 0.27886807);
    sum = fma(sum, t, -0.18628806);
    sum = fma(sum, t, 0.09678418);
    sum = fma(sum, t, 0.37409196);
    sum = fma(sum, t, 1.0000237);
    sum = fma(sum, t, -1.2655122);
    let tail = 0.5 * near * t * exp_negative(fma(-z, z, sum));
    return select(x - tail, tail, x < 0.0);
}

//! kernel unary
const UNARY_SCALE: u32 = 0u; // a x
const UNARY_CLAMP: u32 = 1u; // x, clamped to a..b
const UNARY_GELU_ERF: u32 = 2u;
const UNARY_SOFTPLUS: u32 = 4u; // otherwise xIELU

// `x = f(x)`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i >= p.n) {
        return;
    }
    let v = x[p.x_at + i];
    var y = 0.0;
    if (p.function == UNARY_SCALE) {
        y = p.a * v;
    } else if (p.function == UNARY_CLAMP) {
        y = bounded(v, p.a, p.b);
    } else if (p.function == UNARY_GELU_ERF) {
        y = gelu_erf(v);
    } else if (p.function == UNARY_SOFTPLUS) {
        y = softplus(v);
    } else if (v > 0.0) {
        y = fma(p.c, v, v * v * p.a);
    } else {
        y = fma(p.c, v, (exp_negative(select(v, p.d, v > p.d)) - 1.0 - v) * p.b);
    }
    x[p.x_at + i] = y;
}

//! kernel gated
const GATED_RELU: u32 = 0u; // max(gate, 0) up
const GATED_GELU_ERF: u32 = 1u; // gelu(gate) up
const GATED_SILU_CLAMPED: u32 = 2u; // silu(min(gate, a)) u, where u is up clamped to -a..a
const GATED_SILU_CLAMPED_AFTER: u32 = 3u; // min(silu(gate), a) u, otherwise SiTU

// `gate = f(gate, up)`.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = folded(group) * 256u + t;
    if (i >= p.n) {
        return;
    }
    let g = gate[p.gate_at + i];
    let u = up[p.up_at + i];
    var y = 0.0;
    if (p.function == GATED_RELU) {
        y = select(g, 0.0, g < 0.0) * u;
    } else if (p.function == GATED_GELU_ERF) {
        y = gelu_erf(g) * u;
    } else if (p.function == GATED_SILU_CLAMPED) {
        let below = select(g, p.a, g > p.a);
        y = times_sigmoid(below, below) * bounded(u, -p.a, p.a);
    } else if (p.function == GATED_SILU_CLAMPED_AFTER) {
        let silu = times_sigmoid(g, g);
        y = select(silu, p.a, silu > p.a) * bounded(u, -p.a, p.a);
    } else {
        y = times_sigmoid(softcapped(g, p.a), g) * softcapped(u, p.b);
    }
    gate[p.gate_at + i] = y;
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

//! kernel gate_heads
// What becomes of a gate.
const GATE_SIGMOID: u32 = 0u;
const GATE_SOFTPLUS: u32 = 1u; // ln(1 + e^x)

// Multiplies `n` values of each head by their gates, whose distances are given: from a value's to the next, a head's, a row's.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i >= p.n_head * p.n) {
        return;
    }
    let at = p.x_at + group.y * p.n_head * p.n + i;
    let g = gate[p.gate_at + group.y * p.gate_row + i / p.n * p.gate_head + i % p.n * p.gate_value];
    if (p.function == GATE_SIGMOID) {
        x[at] = times_sigmoid(x[at], g);
    } else if (p.function == GATE_SOFTPLUS) {
        x[at] *= softplus(g);
    } else {
        x[at] *= g;
    }
}

//! kernel copy_heads
// Copies `n` values of each head; the distances from a head to the next, and from a row to the next, are given.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i < p.n_head * p.n) {
        let at = p.x_at + group.y * p.x_row + i / p.n * p.x_head + i % p.n;
        y[p.y_at + group.y * p.y_row + i / p.n * p.y_head + i % p.n] = x[at];
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
