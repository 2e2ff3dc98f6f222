//! Temperature, fixed or following the entropy.

use crate::sample::candidates::Candidates;

/// `l ← l / t`; at `t = 0` only the best candidate stays, which makes the choice greedy.
pub(super) fn apply(candidates: &mut Candidates, t: f32) {
    if t <= 0.0 {
        candidates.keep_best(1);
    } else if t != 1.0 {
        candidates.divide(t);
    }
}

/// Dynamic temperature: with the entropy `H` of `n` candidates,
///
/// `t = t_min + (t_max − t_min) · (H / ln n)^exponent`, `t_min = max(0, t − range)`,
/// `t_max = t + range`:
///
/// low where the model is certain and high where it is not (kalomaze's "entropy sampling"). `range
/// ≤ 0` is the plain temperature.
pub(super) fn apply_dynamic(candidates: &mut Candidates, t: f32, range: f32, exponent: f32) {
    if range <= 0.0 {
        return apply(candidates, t);
    }
    if candidates.len() > 1 {
        candidates.softmax();
        let uncertainty = candidates.entropy() / (candidates.len() as f32).ln();
        let (min, max) = ((t - range).max(0.0), t + range);
        apply(candidates, min + (max - min) * uncertainty.powf(exponent));
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::temperature::*;

    fn logits(c: &Candidates) -> Vec<f32> {
        c.as_slice().iter().map(|c| c.logit).collect()
    }

    #[test]
    fn divides() {
        let mut c = candidates(&[1.0, -3.0]);
        apply(&mut c, 0.5);
        assert_eq!(logits(&c), [2.0, -6.0]);
    }

    #[test]
    fn next_to_zero_is_greedy() {
        let mut c = candidates(&[20.0, 19.0, -20.0]);
        apply(&mut c, f32::MIN_POSITIVE);
        c.softmax();
        assert_eq!(
            c.as_slice().iter().map(|c| c.p).collect::<Vec<_>>(),
            [1.0, 0.0, 0.0]
        );
    }

    #[test]
    fn zero_is_greedy() {
        let mut c = candidates(&[1.0, 3.0, 3.0]);
        apply(&mut c, 0.0);
        assert_eq!(ids(&c), [1]);
    }

    #[test]
    fn dynamic_range_by_hand() {
        // All equal: H / ln n = 1, t = 1 + 0.5. The entropy of two halves is exactly ln 2 up to
        // rounding, hence the four ulp.
        let mut c = candidates(&[3.0, 3.0]);
        apply_dynamic(&mut c, 1.0, 0.5, 1.0);
        for l in logits(&c) {
            assert!((l - 2.0).abs() <= 4.0 * f32::EPSILON * 2.0, "{l}");
        }
        // p = 1/2, 1/4, 1/4: H = 1.5 bits of log2 3; exponent 2.
        let mut c = candidates(&[2f32.ln(), 0.0, 0.0]);
        apply_dynamic(&mut c, 1.0, 0.5, 2.0);
        let t = 0.5 + (1.5 / 3f32.log2()).powi(2);
        assert!((logits(&c)[0] - 2f32.ln() / t).abs() <= 8.0 * f32::EPSILON);
        // Certain: H = 0, t = max(0, 0.3 − 0.5) = 0, greedy.
        let mut c = candidates(&[200.0, 0.0]);
        apply_dynamic(&mut c, 0.3, 0.5, 1.0);
        assert_eq!(ids(&c), [0]);
    }
}
