//! Activations without kernels at any level: plain code, with the same bits at all levels. NaN
//! stays NaN, unlike with `f32::max` and `min`.

pub(crate) mod spec;

/// `max(x, 0)²`.
pub(crate) fn squared_relu(x: &mut [f32]) {
    for x in x {
        let positive = x.clamp(0.0, f32::INFINITY);
        *x = positive * positive;
    }
}

/// `x = max(x − (mean + n·deviation), 0)`, by the mean and standard deviation of `x` itself: few
/// are left, as if the largest were chosen (arXiv 2506.06644).
pub(crate) fn gaussian_top_k(x: &mut [f32], n: f32) {
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64;
    let square = x
        .iter()
        .map(|&x| (f64::from(x) - mean).powi(2))
        .sum::<f64>()
        / x.len() as f64;
    let cutoff = (mean + f64::from(n) * square.sqrt()) as f32;
    x.iter_mut()
        .for_each(|x| *x = (*x - cutoff).clamp(0.0, f32::INFINITY));
}

/// `gate = max(gate, 0)·up`.
pub(crate) fn relu_mul(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut()
        .zip(up)
        .for_each(|(gate, up)| *gate = gate.clamp(0.0, f32::INFINITY) * up);
}

/// Clamps values to `low..=high`.
pub(crate) fn clamp(x: &mut [f32], low: f32, high: f32) {
    x.iter_mut().for_each(|x| *x = x.clamp(low, high));
}

/// `gate = min(silu(gate), limit)·up`.
pub(crate) fn silu_clamped_mul(gate: &mut [f32], up: &[f32], limit: f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = (*gate * sigmoid(*gate)).clamp(f32::NEG_INFINITY, limit) * up;
    }
}

/// See [`Activation::Situ`](spec::Activation::Situ).
pub(crate) fn situ(gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
    let bounded = |x: f32, bound: f32| bound * (x / bound).tanh();
    for (gate, up) in gate.iter_mut().zip(up) {
        let up = linear.map_or(*up, |linear| bounded(*up, linear));
        *gate = bounded(*gate, beta) * sigmoid(*gate) * up;
    }
}

/// See [`Activation::Xielu`](spec::Activation::Xielu).
pub(crate) fn xielu(x: &mut [f32], (alpha_p, alpha_n, beta, eps): (f32, f32, f32, f32)) {
    for x in x {
        let curve = if *x > 0.0 {
            *x * *x * alpha_p
        } else {
            (x.min(eps).exp_m1() - *x) * alpha_n
        };
        *x = curve + beta * *x;
    }
}

/// `1/(1 + exp(−x))`.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_stays_so() {
        let all: [fn(&mut [f32]); 3] = [
            squared_relu,
            |x| relu_mul(x, &[1.0]),
            |x| xielu(x, (1.0, 1.0, 0.5, -1e-6)),
        ];
        for activation in all {
            let mut x = [f32::NAN];
            activation(&mut x);
            assert!(x[0].is_nan());
        }
    }

    /// Values of Hugging Face's `XIELUActivation`, from its formula, near 0 and far from it.
    #[test]
    fn xielu_on_both_sides_of_zero() {
        let mut x = [2.0, 0.0, -1.0, -50.0];
        xielu(&mut x, (0.5, 0.75, 0.25, -1e-6));
        let e = (-1.0f32).exp_m1() + 1.0;
        let expected = [
            2.5,
            (-1e-6f32).exp_m1() * 0.75,
            e * 0.75 - 0.25,
            49.0 * 0.75 - 12.5,
        ];
        assert!(
            x.iter()
                .zip(expected)
                .all(|(x, y)| (x - y).abs() <= 1e-6 * y.abs().max(1.0)),
            "{x:?} {expected:?}"
        );
    }
}
