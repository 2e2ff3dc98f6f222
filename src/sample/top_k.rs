//! Top-k.

use crate::sample::candidates::Candidates;

/// Keeps the `k` candidates with the highest logits (Fan et al., "Hierarchical neural story
/// generation", arXiv:1805.04833); 0 is off.
pub(super) fn apply(candidates: &mut Candidates, k: usize) {
    if k > 0 {
        candidates.keep_best(k);
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::top_k::*;

    #[test]
    fn by_hand() {
        let logits = [1.0, 5.0, 3.0, 5.0, 4.0];
        for (k, kept) in [
            (0, &[0, 1, 2, 3, 4][..]),
            (1, &[1]),
            (3, &[1, 3, 4]),
            (9, &[0, 1, 2, 3, 4]),
        ] {
            let mut c = candidates(&logits);
            apply(&mut c, k);
            assert_eq!(ids(&c), kept, "k = {k}");
        }
    }
}
