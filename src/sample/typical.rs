//! Locally typical sampling.

use crate::sample::candidates::Candidates;

/// Keeps the candidates whose surprise is closest to the expected one: in ascending order of `|−ln
/// p_i − H|`, with the entropy `H = −Σ p ln p`, the smallest set whose probability exceeds `p`
/// (Meister et al., "Locally typical sampling", arXiv:2202.00666). `p ≥ 1` is off.
pub(super) fn apply(candidates: &mut Candidates, p: f32) {
    if p >= 1.0 {
        return;
    }
    candidates.softmax();
    let entropy = candidates.entropy();
    candidates.keep_scored_mass(|c| (-c.p.ln() - entropy).abs(), |sum| sum > f64::from(p));
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::typical::*;

    #[test]
    fn by_hand() {
        // p = 1/2, 1/4, 1/8, 1/8: H = 1.75 bits; |surprise − H| = 0.75, 0.25, 1.25, 1.25 bits.
        let logits = [8f32.ln(), 4f32.ln(), 2f32.ln(), 2f32.ln()];
        for (p, kept) in [
            (0.2, &[1][..]),
            (0.5, &[0, 1]),
            (0.8, &[0, 1, 2]),
            (0.9, &[0, 1, 2, 3]),
            (1.0, &[0, 1, 2, 3]),
        ] {
            let mut c = candidates(&logits);
            apply(&mut c, p);
            assert_eq!(ids(&c), kept, "p = {p}");
        }
    }
}
