//! Top-nσ: keeps logits within `n` standard deviations of the best one.

use crate::sample::candidates::Candidates;

/// Keeps `l_i ≥ l_max − n · σ`, σ being the standard deviation of all candidates' logits
/// (Tang et al., "Top-nσ: not all logits are you need", arXiv:2411.07641). `n ≤ 0` is off.
///
/// The set does not depend on the temperature: scaling the logits scales both sides.
pub(super) fn apply(candidates: &mut Candidates, n: f32) {
    if n <= 0.0 || candidates.len() == 1 {
        return;
    }
    let Some(best) = candidates.best() else {
        return;
    };
    let logits = || candidates.as_slice().iter().map(|c| f64::from(c.logit));
    let count = candidates.len() as f64;
    let mean = logits().sum::<f64>() / count;
    let variance = logits().map(|l| (l - mean).powi(2)).sum::<f64>() / count;
    // With infinite logits the deviation is NaN: only they are kept then.
    let distance = f64::from(n) * variance.sqrt();
    let min = if distance.is_nan() {
        best.logit
    } else {
        (f64::from(best.logit) - distance) as f32
    };
    candidates.retain_logit(min);
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::{candidates, ids};
    use crate::sample::top_n_sigma::*;

    #[test]
    fn by_hand() {
        // Mean 3, deviations ±1 and ±3: σ = √((9 + 1 + 1 + 9) / 4) = √5 ≈ 2.236.
        let logits = [0.0, 2.0, 4.0, 6.0];
        for (n, kept) in [
            (0.5, &[3][..]),
            (0.9, &[2, 3]),
            (1.8, &[1, 2, 3]),
            (2.7, &[0, 1, 2, 3]),
        ] {
            let mut c = candidates(&logits);
            apply(&mut c, n);
            assert_eq!(ids(&c), kept, "n = {n}");
        }
    }

    #[test]
    fn off_and_infinite() {
        let mut c = candidates(&[0.0, 9.0]);
        apply(&mut c, -1.0);
        assert_eq!(c.len(), 2);
        let mut c = candidates(&[0.0, f32::INFINITY, f32::INFINITY]);
        apply(&mut c, 1.0);
        assert_eq!(ids(&c), [1, 2]);
    }
}
