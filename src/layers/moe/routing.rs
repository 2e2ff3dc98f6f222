//! Which experts a token uses, and how much each counts.

use crate::arch::Arch;
use crate::compute::linear::Ctx;
use crate::layers::activation::sigmoid;
use crate::layers::mamba2::softplus;
use crate::layers::moe::spec::{Gating, MAX_EXPERT, MoeSpec};
use crate::layers::moe::weights::Moe;

/// Lower bound of the sum that divides the weights of a token's experts: the smallest normal `f16`,
/// as in llama.cpp.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

/// Turns the router's outputs into scores, and the scores of each token's experts into weights. If
/// the file says which experts these are, they are in `chosen` already.
pub(crate) fn choose_experts(
    ctx: Ctx<'_>,
    moe: &Moe,
    router: &mut [f32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let spec = &moe.spec;
    let (arch, n_expert) = (ctx.arch, spec.n_expert);
    let workers = ctx.threads.when(router.len() > n_expert);
    workers.for_chunks(router, n_expert, |_, scores| match spec.gating {
        Gating::Softmax => arch.softmax(scores),
        Gating::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
        Gating::SqrtSoftplus => scores
            .iter_mut()
            .for_each(|score| *score = softplus(*score).sqrt()),
        Gating::SoftmaxAfterTopK | Gating::SparseMixer => {}
    });
    let router = &*router;
    workers.for_chunk_pairs(
        chosen,
        spec.n_used,
        weights,
        spec.n_used,
        |token, chosen, weights| {
            let scores = &router[token * n_expert..][..n_expert];
            if moe.by_token.is_none() {
                choose(spec, scores, moe.bias.as_deref(), chosen);
            }
            weigh(arch, spec, scores, chosen, weights);
            if moe.by_token.is_some() {
                part(chosen, weights);
            }
            if let Some(scales) = &moe.output_scales {
                weights
                    .iter_mut()
                    .zip(chosen)
                    .for_each(|(weight, e)| *weight *= scales[*e as usize]);
            }
        },
    );
}

/// Lets an expert that a token uses several times count once, with all its weights; others, which do
/// not count, take the places that become free.
fn part(chosen: &mut [u32], weights: &mut [f32]) {
    for i in 1..chosen.len() {
        let (before, rest) = chosen.split_at_mut(i);
        if let Some(first) = before.iter().position(|e| *e == rest[0]) {
            weights[first] += std::mem::take(&mut weights[i]);
            let is_free = |e: &u32| !before.contains(e) && !rest[1..].contains(e);
            rest[0] = (0..).find(is_free).expect("fewer are used than there are");
        }
    }
}

/// The weights of the chosen experts.
fn weigh(arch: Arch, spec: &MoeSpec, scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
    chosen
        .iter()
        .zip(&mut *weights)
        .for_each(|(&e, weight)| *weight = scores[e as usize]);
    match spec.gating {
        Gating::SoftmaxAfterTopK => arch.softmax(weights),
        Gating::SparseMixer => sparse_mixer(scores, chosen, weights),
        Gating::Softmax | Gating::Sigmoid | Gating::SqrtSoftplus => {}
    }
    if spec.normalise {
        let sum = divisor(weights.iter().sum());
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    if spec.scale != 1.0 {
        weights.iter_mut().for_each(|w| *w *= spec.scale);
    }
}

/// The weight of each pick among the experts that were not picked before it and whose scores are
/// close to its own.
fn sparse_mixer(scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
    /// `2·router_jitter_noise` of Phi 3.5 MoE, which is not in its files.
    const DISTANCE: f32 = 0.02;
    for (i, weight) in weights.iter_mut().enumerate() {
        let best = scores[chosen[i] as usize];
        let left = (0..scores.len())
            .filter(|&e| !chosen[..i].contains(&(e as u32)))
            .map(|e| scores[e]);
        let close = left.filter(|score| best - score <= DISTANCE * score.abs().max(best));
        *weight = 1.0 / close.map(|score| (score - best).exp()).sum::<f32>();
    }
}

/// The divisor of the weights of a token's experts, which sum to `sum`.
pub(crate) fn divisor(sum: f32) -> f32 {
    sum.max(MIN_WEIGHT_SUM)
}

/// The experts with the largest sums of score and `bias`, best first, the first among equals; NaN
/// is less than any number. A group counts as much as its two best experts, or, where scores are
/// probabilities (DeepSeek 2), its best one.
fn choose(spec: &MoeSpec, scores: &[f32], bias: Option<&[f32]>, chosen: &mut [u32]) {
    let score = |e: usize| {
        let score = scores[e] + bias.map_or(0.0, |bias| bias[e]);
        if score.is_nan() {
            f32::NEG_INFINITY
        } else {
            score
        }
    };
    let mut open = [true; MAX_EXPERT];
    let mut group_size = scores.len();
    if let Some(groups) = spec.groups {
        group_size /= groups.n_group;
        open = [false; MAX_EXPERT];
        let group_score = |group: usize| {
            let mut best = [f32::NEG_INFINITY; 2];
            for e in group * group_size..(group + 1) * group_size {
                let score = score(e);
                if score > best[0] {
                    best = [score, best[0]];
                } else if score > best[1] {
                    best[1] = score;
                }
            }
            if group_size > 1 && spec.gating != Gating::Softmax {
                best[0] + best[1]
            } else {
                best[0]
            }
        };
        for _ in 0..groups.n_used {
            open[largest(
                (0..groups.n_group).filter(|&group| !open[group]),
                group_score,
            )] = true;
        }
    }
    let candidates = (0..scores.len())
        .step_by(group_size)
        .zip(open)
        .filter(|(_, open)| *open);
    let mut n = 0;
    for e in candidates.flat_map(|(first, _)| first..first + group_size) {
        let is_less = |other: &u32| score(*other as usize) < score(e);
        if n < chosen.len() {
            n += 1;
        } else if !is_less(&chosen[n - 1]) {
            continue;
        }
        // It takes its place among the best so far, of which the last makes room.
        let at = chosen[..n - 1].iter().position(is_less).unwrap_or(n - 1);
        chosen.copy_within(at..n - 1, at + 1);
        chosen[at] = e as u32;
    }
}

/// The one of `items` with the largest score, the first among equals.
fn largest(items: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32) -> usize {
    let mut best = None;
    for item in items {
        let score = score(item);
        if best.is_none_or(|(_, max)| score > max) {
            best = Some((item, score));
        }
    }
    best.map_or(0, |(item, _)| item)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::activation::spec::Activation;
    use crate::layers::moe::spec::ExpertGroups;

    fn spec(gating: Gating, groups: Option<(usize, usize)>) -> MoeSpec {
        MoeSpec {
            n_expert: 6,
            n_used: 2,
            n_ff: 1,
            activation: Activation::SwiGlu,
            gating,
            by_token: false,
            bias: false,
            groups: groups.map(|(n_group, n_used)| ExpertGroups { n_group, n_used }),
            normalise: true,
            scale: 3.0,
            routes_early: false,
            router_norm: false,
            output_scales: false,
            weighs_inputs: false,
            fused: false,
            latent: None,
            latent_norm: false,
            adjugate: None,
            shared: None,
        }
    }

    fn weights(spec: &MoeSpec, scores: &[f32], chosen: &[u32]) -> Vec<f32> {
        let mut weights = vec![0.0; chosen.len()];
        weigh(Arch::scalar(), spec, scores, chosen, &mut weights);
        weights
    }

    #[test]
    fn weights_are_divided_by_no_less_than_the_least_f16() {
        let spec = spec(Gating::Sigmoid, None);
        let floor = half::f16::MIN_POSITIVE.to_f32();
        assert_eq!(
            weights(&spec, &[0.0, 1e-5, 2e-5, 0.0, 0.0, 0.0], &[2, 1]),
            [2e-5 / floor * 3.0, 1e-5 / floor * 3.0]
        );
        assert_eq!(
            weights(&spec, &[0.0, 0.25, 0.75, 0.0, 0.0, 0.0], &[2, 1]),
            [0.75 * 3.0, 0.25 * 3.0]
        );
        let of_chosen = weights(
            &self::spec(Gating::SoftmaxAfterTopK, None),
            &[9.0, 1.0, 1.0, 9.0, 9.0, 9.0],
            &[2, 1],
        );
        assert_eq!(of_chosen, [1.5, 1.5]);
    }

    #[test]
    fn experts_that_are_used_several_times_count_once() {
        let (mut chosen, mut weights) = ([4, 0, 4, 0, 4], [1.0, 2.0, 4.0, 8.0, 16.0]);
        part(&mut chosen, &mut weights);
        assert_eq!(chosen, [4, 0, 1, 2, 3]);
        assert_eq!(weights, [21.0, 10.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn experts_of_the_best_groups_are_chosen() {
        let mut chosen = [0; 2];
        let scores = [0.9, 0.1, 0.6, 0.5, 0.4, 0.7];
        choose(&spec(Gating::Sigmoid, None), &scores, None, &mut chosen);
        assert_eq!(chosen, [0, 5]);
        // Groups weigh 1.0, 1.1 and 1.1.
        choose(
            &spec(Gating::Sigmoid, Some((3, 1))),
            &scores,
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [2, 3]);
        choose(
            &spec(Gating::Sigmoid, Some((3, 2))),
            &scores,
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [5, 2]);
        choose(
            &spec(Gating::Sigmoid, Some((3, 1))),
            &scores,
            Some(&[0.3, 0.0, 0.0, 0.0, 0.0, 0.0]),
            &mut chosen,
        );
        assert_eq!(chosen, [0, 1]);
        choose(
            &spec(Gating::Softmax, Some((3, 1))),
            &[f32::NAN; 6],
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [0, 1]);
        choose(
            &spec(Gating::Softmax, None),
            &[0.1, f32::NAN, 0.2, 0.2, 0.1, 0.1],
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [2, 3]);
    }
}
