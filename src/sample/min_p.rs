//! Min-p.

use crate::sample::candidates::Candidates;

/// Keeps the candidates with `p_i ≥ p · p_max`, that is `l_i ≥ l_max + ln p` (Nguyen et al.,
/// "Turning up the heat: min-p sampling", arXiv:2407.01082). `p ≤ 0` is off.
pub(super) fn apply(candidates: &mut Candidates, p: f32) {
    if p > 0.0
        && let Some(best) = candidates.best()
    {
        candidates.retain_logit(best.logit + p.ln());
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::min_p::*;

    #[test]
    fn by_hand() {
        // p / p_max = 1/8, 1, 1/2, 1/4
        let logits = [0.0, 8f32.ln(), 4f32.ln(), 2f32.ln()];
        for (p, kept) in [
            (0.0, &[0, 1, 2, 3][..]),
            (0.2, &[1, 2, 3]),
            (0.4, &[1, 2]),
            (0.6, &[1]),
            (1.0, &[1]),
        ] {
            let mut c = candidates(&logits);
            apply(&mut c, p);
            assert_eq!(ids(&c), kept, "p = {p}");
            let mut c = candidates(&logits);
            c.sort();
            apply(&mut c, p);
            assert_eq!(ids(&c), kept, "sorted, p = {p}");
        }
    }
}
