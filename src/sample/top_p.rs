//! Top-p, nucleus sampling.

use crate::sample::candidates::Candidates;

/// Keeps the smallest set of most probable candidates whose probabilities sum to at least `p`
/// (Holtzman et al., "The curious case of neural text degeneration", arXiv:1904.09751).
/// `p ≥ 1` is off; one candidate always stays.
pub(super) fn apply(candidates: &mut Candidates, p: f32) {
    if p < 1.0 {
        candidates.softmax();
        candidates.keep_best_mass(|sum| sum >= f64::from(p));
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::top_p::*;

    #[test]
    fn by_hand() {
        // p = 0.1, 0.4, 0.2, 0.3
        let logits = [1f32.ln(), 4f32.ln(), 2f32.ln(), 3f32.ln()];
        for (p, kept) in [
            (0.0, &[1][..]),
            (0.35, &[1]),
            (0.6, &[1, 3]),
            (0.85, &[1, 2, 3]),
            (0.95, &[0, 1, 2, 3]),
        ] {
            let mut c = candidates(&logits);
            apply(&mut c, p);
            assert_eq!(ids(&c), kept, "p = {p}");
        }
    }
}
