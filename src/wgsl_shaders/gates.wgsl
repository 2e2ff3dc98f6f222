// Activations of gated layers, which are kernels of their own or the end of two products.

// `x / 2 * (1 + tanh(u / 2))` with `u = 2 sqrt(2 / pi) (x + 0.044715 x^3)`, as `x / (1 + e^-u)`, which does not cancel.
fn gelu_tanh(x: f32) -> f32 {
    return times_sigmoid(x, 1.595769122 * x * fma(0.044715 * x, x, 1.0));
}

fn of_silu_mul(gate: f32, up: f32) -> f32 {
    return times_sigmoid(gate, gate) * up;
}

fn of_gelu_mul(gate: f32, up: f32) -> f32 {
    return gelu_tanh(gate) * up;
}

// Comparisons instead of `min` and `max` keep NaN.
fn of_swiglu_oai(gate: f32, up: f32) -> f32 {
    let g = select(gate, 7.0, gate > 7.0);
    let below = select(up, 7.0, up > 7.0);
    let u = select(below, -7.0, below < -7.0);
    return times_sigmoid(g, 1.702 * g) * (u + 1.0);
}
