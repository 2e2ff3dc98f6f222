//! XTC, "exclude top choices".

use crate::sample::candidates::Candidates;
use crate::sample::rng::Rng;

/// With the given `probability`, drops every candidate of probability `threshold` or more except
/// the least probable of them (p-e-w, text-generation-webui pull request 6335). Off for
/// `probability ≤ 0` and for `threshold > 0.5`, which two candidates cannot reach; a random
/// number is drawn only when it is on.
pub(super) fn apply(candidates: &mut Candidates, probability: f32, threshold: f32, rng: &mut Rng) {
    if probability <= 0.0 || threshold > 0.5 || candidates.len() < 2 {
        return;
    }
    if rng.uniform() >= f64::from(probability) {
        return;
    }
    candidates.softmax();
    candidates.sort();
    let above = candidates.as_slice().partition_point(|c| c.p >= threshold);
    candidates.drop_best(above.saturating_sub(1));
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::xtc::*;

    #[test]
    fn by_hand() {
        // p = 0.1, 0.4, 0.2, 0.3
        let logits = [1f32.ln(), 4f32.ln(), 2f32.ln(), 3f32.ln()];
        let cases = [
            (0.05, &[0][..]),
            (0.15, &[0, 2]),
            (0.25, &[0, 2, 3]),
            (0.35, &[0, 1, 2, 3]),
            (0.45, &[0, 1, 2, 3]),
        ];
        for (threshold, kept) in cases {
            let mut c = candidates(&logits);
            apply(&mut c, 1.0, threshold, &mut Rng::new(1));
            assert_eq!(ids(&c), kept, "threshold = {threshold}");
        }
    }

    #[test]
    fn happens_as_often_as_asked() {
        let mut rng = Rng::new(7);
        let n = 10_000;
        let hits = (0..n)
            .filter(|_| {
                let mut c = candidates(&[0.0, 0.0]);
                apply(&mut c, 0.3, 0.1, &mut rng);
                c.len() == 1
            })
            .count();
        // Binomial: mean 3000, σ = √(n · 0.3 · 0.7) ≈ 46; five σ either way.
        assert!((2770..=3230).contains(&hits), "{hits}");
    }
}
