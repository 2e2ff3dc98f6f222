//! Activations without kernels at any level: plain code, with the same bits at all levels. NaN stays NaN, unlike with
//! `f32::max` and `min`.

/// `max(x, 0)²`.
pub(super) fn squared_relu(x: &mut [f32]) {
    for x in x {
        let positive = x.clamp(0.0, f32::INFINITY);
        *x = positive * positive;
    }
}

/// `x = max(x − (mean + n·deviation), 0)`, by the mean and standard deviation of `x` itself: few are left, as if the
/// largest were chosen (arXiv 2506.06644).
pub(super) fn gaussian_top_k(x: &mut [f32], n: f32) {
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64;
    let square = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let cutoff = (mean + f64::from(n) * square.sqrt()) as f32;
    x.iter_mut().for_each(|x| *x = (*x - cutoff).clamp(0.0, f32::INFINITY));
}

/// `gate = max(gate, 0)·up`.
pub(super) fn relu_mul(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = gate.clamp(0.0, f32::INFINITY) * up);
}

/// `gate = g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7.
pub(super) fn swiglu_oai(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        let g = gate.clamp(f32::NEG_INFINITY, 7.0);
        *gate = g / (1.0 + (-1.702 * g).exp()) * (up.clamp(-7.0, 7.0) + 1.0);
    }
}

/// `gate = gelu(gate)·up`, by the error function.
pub(super) fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
    gelu_erf(gate);
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate *= up);
}

/// `x/2·(1 + erf(x/√2)) = x/2·erfc(−x/√2)` (arXiv 1606.08415).
pub(super) fn gelu_erf(x: &mut [f32]) {
    for x in x {
        // Farther out the tail is 0, also for infinities.
        let near = x.clamp(-40.0, 40.0);
        let tail = 0.5 * near * erfc(near.abs() * std::f32::consts::FRAC_1_SQRT_2);
        *x = if *x < 0.0 { tail } else { *x - tail };
    }
}

/// `1 − erf(x)` for `x ≥ 0`, with a relative error below 1.2e-7, except for rounding to `f32` (W. J. Press et al.,
/// Numerical Recipes in C, 2nd edition, §6.2).
fn erfc(x: f32) -> f32 {
    const C: [f32; 10] = [
        -1.265_512_2,
        1.000_023_7,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_204,
        1.488_515_9,
        -0.822_152_23,
        0.170_872_77,
    ];
    let t = 1.0 / (1.0 + 0.5 * x);
    let sum = C.iter().rev().fold(0.0, |sum, c| sum * t + c);
    t * (sum - x * x).exp()
}

/// See [`Activation::Xielu`](crate::model::Activation::Xielu).
pub(super) fn xielu(x: &mut [f32], (alpha_p, alpha_n, beta, eps): (f32, f32, f32, f32)) {
    for x in x {
        let curve = if *x > 0.0 { *x * *x * alpha_p } else { (x.min(eps).exp_m1() - *x) * alpha_n };
        *x = curve + beta * *x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `erf` in double precision, by its series.
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    /// The largest rounding error is that of the exponent, up to 8 here: 2⁻²⁴ of it.
    #[test]
    fn gelu_by_the_error_function() {
        for i in -400..=400 {
            let x = i as f32 / 100.0;
            let mut y = [x];
            gelu_erf(&mut y);
            let truth = 0.5 * f64::from(x) * (1.0 + erf(f64::from(x) / std::f64::consts::SQRT_2));
            let bound = (2e-6 * truth.abs()).max(1e-12);
            assert!((f64::from(y[0]) - truth).abs() <= bound, "gelu({x}) is {}, not {truth}", y[0]);
        }
        for (x, expected) in [(f32::INFINITY, f32::INFINITY), (0.0, 0.0), (-40.0, -0.0)] {
            let mut y = [x];
            gelu_erf(&mut y);
            assert_eq!(y, [expected]);
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        let all: [fn(&mut [f32]); 5] = [
            squared_relu,
            |x| relu_mul(x, &[1.0]),
            |x| swiglu_oai(x, &[1.0]),
            |x| gelu_erf_mul(x, &[1.0]),
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
        let expected = [2.5, (-1e-6f32).exp_m1() * 0.75, e * 0.75 - 0.25, 49.0 * 0.75 - 12.5];
        assert!(x.iter().zip(expected).all(|(x, y)| (x - y).abs() <= 1e-6 * y.abs().max(1.0)), "{x:?} {expected:?}");
    }
}
