// Definitions shared by all kernels. `src/gpu/webgpu/shaders.rs` composes a module per kernel instance: it writes the
// bindings and the arguments' structure from the table of kernels, then these files. Lines that begin with `//!` are its
// directives; a dollar sign marks what it replaces. A buffer `b` begins at element `p.b_at` of its binding (weights: at that byte).
//
// Sums are written as `fma` wherever a product is added, so that no compiler decides about a rounding.

// Used as minus infinity: finite, and `exp_negative(MASKED - x)` is 0 for every score x.
const MASKED: f32 = -1e30;

// `e^x` for x up to 0, with an error below 2 units in the last place; 0 below -87. Written out, as the language allows
// the built-in function errors that grow with |x|.
fn exp_negative(x: f32) -> f32 {
    if (x < -87.0) {
        return 0.0;
    }
    let n = floor(fma(x, 1.44269504, 0.5));
    // ln 2 in two parts, of which the first has few bits.
    let r = fma(n, -1.42860677e-6, fma(n, -0.693145752, x));
    return exp_reduced(r) * bitcast<f32>(u32(i32(n) + 127) << 23u);
}

// Taylor polynomial of `e^r` for |r| up to ln(2) / 2.
fn exp_reduced(r: f32) -> f32 {
    var sum = fma(r, 1.98412698e-4, 1.38888889e-3);
    sum = fma(r, sum, 8.33333333e-3);
    sum = fma(r, sum, 4.16666667e-2);
    sum = fma(r, sum, 1.66666667e-1);
    sum = fma(r, sum, 0.5);
    sum = fma(r, sum, 1.0);
    return fma(r, sum, 1.0);
}

// `x / (1 + e^-t)`, with an exponential that cannot overflow.
fn times_sigmoid(x: f32, t: f32) -> f32 {
    let e = exp_negative(-abs(t));
    return select(x, x * e, t < 0.0) / (1.0 + e);
}

// `ln(1 + e^x)`; the logarithm is a series of `e / (2 + e)`, which is at most 1/3.
fn softplus(x: f32) -> f32 {
    let e = exp_negative(-abs(x));
    let s = e / (2.0 + e);
    let square = s * s;
    var sum = fma(square, 0.0666666667, 0.0769230769);
    sum = fma(square, sum, 0.0909090909);
    sum = fma(square, sum, 0.111111111);
    sum = fma(square, sum, 0.142857143);
    sum = fma(square, sum, 0.2);
    sum = fma(square, sum, 0.333333333);
    sum = fma(square, sum, 1.0);
    return fma(2.0 * s, sum, max(x, 0.0));
}

// `cap * tanh(x / cap)`; x if cap is 0.
fn softcapped(x: f32, cap: f32) -> f32 {
    if (cap <= 0.0) {
        return x;
    }
    let t = x / cap;
    if (abs(t) < 0.25) { // where `1 - e` would cancel
        let s = t * t;
        return fma(cap * t * s, fma(s, fma(s, fma(s, 0.0218694885, -0.0539682540), 0.133333333), -0.333333333), cap * t);
    }
    let e = exp_negative(-2.0 * abs(t));
    return select(cap, -cap, t < 0.0) * ((1.0 - e) / (1.0 + e));
}

// Number of a workgroup in a grid of one dimension, which the host folds where it is longer than a dimension may be.
fn folded(group: vec3<u32>) -> u32 {
    return group.y * 65535u + group.x;
}
