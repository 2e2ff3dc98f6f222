//! Which adjugate experts a token uses: those of the groups of its experts.

use crate::layers::moe::divisor;
use crate::layers::moe::spec::{AdjugateSpec, MoeSpec};
use crate::layers::moe::weights::Moe;

/// Replaces the experts of `m` tokens by the adjugate ones of their groups, best first, and their
/// weights by the scores of the experts of the groups' numbers, divided by their sum. A group that
/// was chosen again adds to the weight of its first place; its other places hold the number of
/// groups, which stands for none.
pub(super) fn choose(
    moe: &Moe,
    spec: &AdjugateSpec,
    (scores, chosen, weights): (&[f32], &mut [u32], &mut [f32]),
    m: usize,
) {
    let &MoeSpec {
        n_expert, n_used, ..
    } = &moe.spec;
    let n_adjugate = n_expert / spec.n_group;
    let n = n_used.min(n_adjugate);
    for token in 0..m {
        let scores = &scores[token * n_expert..][..n_expert];
        let mut sum = 0.0;
        for i in 0..n {
            let group = chosen[token * n_used + i] / spec.n_group as u32;
            let score = scores[group as usize];
            sum += score;
            // The places of earlier tokens end before those that are read here.
            let places = token * n..token * n + i;
            let earlier = chosen[places.clone()].iter().position(|&e| e == group);
            let (to, add) = match earlier {
                Some(first) => {
                    weights[places.start + first] += score;
                    (n_adjugate as u32, 0.0)
                }
                None => (group, score),
            };
            (chosen[places.end], weights[places.end]) = (to, add);
        }
        let sum = divisor(sum);
        weights[token * n..][..n]
            .iter_mut()
            .for_each(|weight| *weight /= sum);
    }
}
