//! Feed-forward layers of experts: routing, and products by expert.

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, MAX_EXPERTS, Product, RowAdapters, Scratch, linear};
use crate::forward::buffers::{Buffers, FfnBuffers, MoeBuffers};
use crate::forward::feed_forward::{activate, feed_forward};
use crate::forward::{MIN_WEIGHT_SUM, SUM_ROWS};
use crate::layers::activation::sigmoid;
use crate::layers::norm::norm;
use crate::layers::rows::{Adapters, Base, Rows, row_adapters};
use crate::model::{Both, Ffn, Gating, Hparams, MAX_EXPERT, Moe, MoeSpec};

/// Computes the outputs of a mixture's router for `m` rows of `x`, in `moe`.
pub(super) fn route(
    base: Base<'_>,
    moe: &Moe,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    ends: &[u32],
    x: &[f32],
    (to, scratch): (&mut MoeBuffers<'_>, &mut Scratch<'_>),
) {
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    let router = &mut to.router[..m * moe.spec.n_expert];
    linear(
        ctx,
        scratch,
        x,
        m,
        &mut [Product::of(&moe.router, router, m)],
    );
}

/// Mixture of experts on `b.normed`, `m` rows of `n`; leaves its output in `b.branch`. Experts are
/// processed in their order, so a token's sum does not depend on the other tokens of the pass.
pub(super) fn experts(
    base: Base<'_>,
    h: &Hparams,
    moe: &Moe,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    rows: Rows,
    b: &mut Buffers<'_>,
) {
    let (n_expert, n_used) = (moe.spec.n_expert, moe.spec.n_used);
    let crew = base.crew.when(m > 1);
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    if let Some(of_router) = &moe.router_norm {
        // Nobody reads this buffer yet.
        let normed = &mut b.branch[..m * h.n_embd];
        norm(ctx, h, Some(of_router), b.x, normed);
        route(
            base,
            moe,
            (n_generated, m),
            slots,
            ends,
            normed,
            (&mut b.moe, &mut b.scratch),
        );
    } else if !moe.spec.routes_early {
        route(
            base,
            moe,
            (n_generated, m),
            slots,
            ends,
            b.normed,
            (&mut b.moe, &mut b.scratch),
        );
    }
    let router = &mut b.moe.router[..m * n_expert];
    let (chosen, weights) = (
        &mut b.moe.chosen[..m * n_used],
        &mut b.moe.weights[..m * n_used],
    );
    choose_experts(ctx, moe, router, chosen, weights);
    // What experts read, and where their outputs are added up.
    let latent = std::mem::take(&mut b.moe.latent);
    let (n, input, sum) = match &moe.latent {
        None => (h.n_embd, &*b.normed, &mut *b.branch),
        Some((down, _)) => {
            let n = down.w.n_out;
            let (input, sum) = latent[..2 * m * n].split_at_mut(m * n);
            linear(
                ctx,
                &mut b.scratch,
                b.normed,
                m,
                &mut [Product::of(down, input, m)],
            );
            (n, &*input, sum)
        }
    };
    sum.fill(0.0);
    let weighs_inputs = moe.spec.weighs_inputs;
    if m == 1 && n_generated == 1 && !weighs_inputs {
        let slot = slots.0.iter().find(|slot| rows.of(slot).2 == 1);
        let adapters = slot.map_or(&[][..], |slot| slot.adapters);
        let ctx = base.with(RowAdapters::All(adapters), 1);
        experts_of_one(
            ctx,
            moe,
            (&input[..n], &mut sum[..n]),
            (&mut b.moe, b.inner, &mut b.scratch),
        );
    } else {
        let (chosen, weights) = (&*chosen, &*weights);
        let ends_by_expert = sort_by_expert(chosen, b.moe.slots);
        let mut first = 0;
        for (e, &end) in ends_by_expert[..n_expert].iter().enumerate() {
            let slots_of_expert = &b.moe.slots[std::mem::replace(&mut first, end)..end];
            let n_rows = slots_of_expert.len();
            if n_rows == 0 {
                continue;
            }
            let token = |i: usize| slots_of_expert[i] as usize / n_used;
            let rows_before = |token: usize| {
                slots_of_expert.partition_point(|&slot| (slot as usize) < token * n_used)
            };
            for (of_expert, &end) in b.expert_ends.iter_mut().zip(ends) {
                *of_expert = rows_before(end as usize) as u32;
            }
            let ctx = base.with(row_adapters(slots, b.expert_ends), rows_before(n_generated));
            let (x, y) = (&mut b.moe.x[..n_rows * n], &mut b.moe.y[..n_rows * n]);
            let workers = ctx.crew.when(n_rows > 1);
            let weight = |i: usize| weights[slots_of_expert[i] as usize];
            workers.for_chunks(x, n, |i, x| {
                x.copy_from_slice(&input[token(i) * n..][..n]);
                if weighs_inputs {
                    let weight = weight(i);
                    x.iter_mut().for_each(|x| *x *= weight);
                }
            });
            let expert = moe.expert(e);
            let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, expert.up.w.n_out);
            feed_forward(ctx, &mut b.scratch, &expert, x, n_rows, inner, y, |_, _| ());
            let y = &*y;
            workers.for_chunks(sum, SUM_ROWS * n, |chunk, sum| {
                let tokens = chunk * SUM_ROWS..chunk * SUM_ROWS + sum.len() / n;
                for i in rows_before(tokens.start)..rows_before(tokens.end) {
                    let sum = &mut sum[(token(i) - tokens.start) * n..][..n];
                    ctx.arch.add_scaled(
                        sum,
                        &y[i * n..][..n],
                        if weighs_inputs { 1.0 } else { weight(i) },
                    );
                }
            });
        }
    }
    if let Some((_, up)) = &moe.latent {
        linear(
            ctx,
            &mut b.scratch,
            &latent[m * n..2 * m * n],
            m,
            &mut [Product::of(up, b.branch, m)],
        );
    }
    b.moe.latent = latent;
    let Some(shared) = &moe.shared else { return };
    let n = h.n_embd;
    let strength = moe.shared_gate.as_ref().map(|gate| {
        let strength = &mut b.moe.router[..m];
        linear(
            ctx,
            &mut b.scratch,
            b.normed,
            m,
            &mut [Product::of_weight(gate, strength, m)],
        );
        &*strength
    });
    let y = &mut b.moe.y[..m * n];
    let inner = FfnBuffers::take(&mut Frame::of(b.inner), m, shared.up.w.n_out);
    feed_forward(
        ctx,
        &mut b.scratch,
        shared,
        b.normed,
        m,
        inner,
        y,
        |_, _| (),
    );
    let y = &*y;
    crew.for_chunks(b.branch, n, |i, branch| {
        let y = &y[i * n..][..n];
        match strength {
            Some(strength) => ctx.arch.add_scaled(branch, y, sigmoid(strength[i])),
            None => ctx.arch.add(branch, y),
        }
    });
}

/// The experts of a single generated token, [`MAX_EXPERTS`] at a time: their gates and ups are one
/// parallel region, their downs another.
pub(super) fn experts_of_one(
    ctx: Ctx<'_>,
    moe: &Moe,
    (input, sum): (&[f32], &mut [f32]),
    (buffers, inner, scratch): (&mut MoeBuffers<'_>, &mut [u8], &mut Scratch<'_>),
) {
    let MoeBuffers {
        chosen,
        weights,
        slots,
        y,
        ..
    } = buffers;
    let n = input.len();
    let slots = &mut slots[..moe.spec.n_used];
    slots.iter_mut().zip(0..).for_each(|(slot, i)| *slot = i);
    slots.sort_unstable_by_key(|&slot| (chosen[slot as usize], slot));
    for slots in slots.chunks(MAX_EXPERTS) {
        let m = slots.len();
        let experts: [Ffn; MAX_EXPERTS] =
            std::array::from_fn(|i| moe.expert(chosen[slots[i.min(m - 1)] as usize] as usize));
        let n_ff = moe.spec.n_ff;
        let FfnBuffers { gate, up } = FfnBuffers::take(&mut Frame::of(inner), m, n_ff);
        let mut n_products = 0;
        let mut products: [Product<'_>; 2 * MAX_EXPERTS] = {
            let outputs = experts
                .iter()
                .zip(gate.chunks_exact_mut(n_ff).zip(up.chunks_exact_mut(n_ff)));
            let mut products = outputs.flat_map(|(ffn, (gate, up))| {
                let gate = ffn.gate.as_ref().map(|w| Product::of(w, gate, 1));
                gate.into_iter().chain([Product::of(&ffn.up, up, 1)])
            });
            std::array::from_fn(|_| {
                let product = products.next();
                n_products += usize::from(product.is_some());
                product.unwrap_or_else(|| Product::of(&experts[0].up, &mut [], 0))
            })
        };
        linear(ctx, scratch, input, 1, &mut products[..n_products]);
        let inner = activate(
            Ctx {
                crew: &ctx.crew.when(false),
                ..ctx
            },
            &experts[0],
            m,
            gate,
            up,
        );
        let y = &mut y[..m * n];
        let mut outputs = y.chunks_exact_mut(n);
        let mut products: [Product<'_>; MAX_EXPERTS] = std::array::from_fn(|i| {
            Product::of_row(&experts[i].down, outputs.next().unwrap_or_default(), i)
        });
        linear(
            Ctx {
                n_generated: m,
                ..ctx
            },
            scratch,
            inner,
            m,
            &mut products[..m],
        );
        for (&slot, y) in slots.iter().zip(y.chunks_exact(n)) {
            ctx.arch.add_scaled(sum, y, weights[slot as usize]);
        }
    }
}

/// Sorts the indices of `chosen` by the expert chosen there, and returns where those of each expert
/// end.
pub(super) fn sort_by_expert(chosen: &[u32], slots: &mut [u32]) -> [usize; MAX_EXPERT] {
    let mut ends = [0; MAX_EXPERT];
    chosen.iter().for_each(|&e| ends[e as usize] += 1);
    let mut sum = 0;
    for end in &mut ends {
        (*end, sum) = (sum, sum + *end);
    }
    for (slot, &e) in (0..).zip(chosen) {
        slots[ends[e as usize]] = slot;
        ends[e as usize] += 1;
    }
    ends
}

/// Turns the router's outputs into scores, and the scores of each token's experts into weights.
pub(crate) fn choose_experts(
    ctx: Ctx<'_>,
    moe: &Moe,
    router: &mut [f32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let spec = &moe.spec;
    let (arch, n_expert) = (ctx.arch, spec.n_expert);
    let workers = ctx.crew.when(router.len() > n_expert);
    workers.for_chunks(router, n_expert, |_, scores| match spec.gating {
        Gating::Softmax => arch.softmax(scores),
        Gating::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
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
            choose(spec, scores, moe.bias.as_deref(), chosen);
            weigh(arch, spec, scores, chosen, weights);
            if let Some(scales) = &moe.output_scales {
                weights
                    .iter_mut()
                    .zip(chosen)
                    .for_each(|(weight, e)| *weight *= scales[*e as usize]);
            }
        },
    );
}

/// The weights of the chosen experts.
pub(super) fn weigh(
    arch: Arch,
    spec: &MoeSpec,
    scores: &[f32],
    chosen: &[u32],
    weights: &mut [f32],
) {
    chosen
        .iter()
        .zip(&mut *weights)
        .for_each(|(&e, weight)| *weight = scores[e as usize]);
    match spec.gating {
        Gating::SoftmaxAfterTopK => arch.softmax(weights),
        Gating::SparseMixer => sparse_mixer(scores, chosen, weights),
        Gating::Softmax | Gating::Sigmoid => {}
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
pub(super) fn sparse_mixer(scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
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
pub(super) fn choose(spec: &MoeSpec, scores: &[f32], bias: Option<&[f32]>, chosen: &mut [u32]) {
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
pub(super) fn largest(items: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32) -> usize {
    let mut best = None;
    for item in items {
        let score = score(item);
        if best.is_none_or(|(_, max)| score > max) {
            best = Some((item, score));
        }
    }
    best.map_or(0, |(item, _)| item)
}

/// A dense layer on `b.normed` beside a mixture on the residual stream; leaves the sum of their
/// outputs in `b.branch`.
pub(super) fn both(
    base: Base<'_>,
    h: &Hparams,
    w: &Both,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    rows: Rows,
    b: &mut Buffers<'_>,
) {
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    let inner = FfnBuffers::take(&mut Frame::of(b.inner), m, w.dense.up.w.n_out);
    feed_forward(
        ctx,
        &mut b.scratch,
        &w.dense,
        b.normed,
        m,
        inner,
        b.branch,
        |_, _| (),
    );
    let dense = &mut b.beside[..m * h.n_embd];
    norm(ctx, h, Some(&w.post_dense_norm), b.branch, dense);
    norm(ctx, h, Some(&w.moe_norm), b.x, b.normed);
    experts(base, h, &w.moe, (n_generated, m), slots, rows, b);
    norm(ctx, h, Some(&w.post_moe_norm), b.branch, b.normed);
    b.branch.copy_from_slice(b.normed);
    base.arch.add(b.branch, &b.beside[..m * h.n_embd]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Activation, ExpertGroups};

    fn spec(gating: Gating, groups: Option<(usize, usize)>) -> MoeSpec {
        MoeSpec {
            n_expert: 6,
            n_used: 2,
            n_ff: 1,
            activation: Activation::SwiGlu,
            gating,
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
