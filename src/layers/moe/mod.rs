//! Mixtures of experts: products by expert.

mod adjugate;
pub(crate) mod backward;
mod routing;
pub(crate) mod spec;
pub(crate) mod weights;

pub(crate) use routing::{choose_experts, divisor};

use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, MAX_EXPERTS, Product, RowAdapters, RowCtx};
use crate::layers::activation::sigmoid;
use crate::layers::context::{Context, Ends};
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::dense_ffn::{FfnBuffers, act, feed_forward};
use crate::layers::hparams::Hparams;
use crate::layers::layer::weights::{Beside, Both};
use crate::layers::moe::spec::{MAX_EXPERT, MoeSpec};
use crate::layers::moe::weights::Moe;
use crate::layers::residual::Residual;
use crate::layers::rows::Rows;
use crate::layers::sizes::single_rows;

/// Rows of a sum of experts' outputs that one task handles.
const SUM_ROWS: usize = 16;

/// Buffers of a mixture of experts.
pub(crate) struct MoeBuffers<'a> {
    /// `(m, n_expert)`.
    router: &'a mut [f32],
    /// `(m, n_used)`.
    chosen: &'a mut [u32],
    weights: &'a mut [f32],
    /// Indices in `chosen`, in the order in which their experts are computed.
    order: &'a mut [u32],
    x: &'a mut [f32],
    y: &'a mut [f32],
    /// What experts read, and the sum of what they write, if those are shorter vectors.
    latent: &'a mut [f32],
}

impl<'a> MoeBuffers<'a> {
    /// For `m` rows of any mixture of the model.
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> MoeBuffers<'a> {
        let most = |size: fn(&MoeSpec) -> usize| h.mixtures().map(size).max().unwrap_or(0);
        let (n_expert, n_used) = (most(|x| x.n_expert), most(|x| x.n_used));
        let n_latent = most(|x| x.latent.unwrap_or(0));
        let n_expert_io = h.n_embd.max(n_latent);
        let m = if n_expert > 0 { m } else { 0 };
        MoeBuffers {
            router: frame.take(m * n_expert),
            chosen: frame.take(m * n_used),
            weights: frame.take(m * n_used),
            order: frame.take(m * n_used),
            x: frame.take(m * n_expert_io),
            y: frame.take(m.max(single_rows(h)) * n_expert_io),
            latent: frame.take(2 * m * n_latent),
        }
    }
}

/// Computes the outputs of a mixture's router for the rows `x`.
pub(crate) fn route(cx: &mut Context<'_, '_>, moe: &Moe, b: &mut MoeBuffers<'_>, x: &[f32]) {
    let m = cx.n_rows();
    let router = &mut b.router[..m * moe.spec.n_expert];
    cx.of_rows()
        .linear(x, m, &mut [Product::of(&moe.router, router, m)]);
}

/// Mixture of experts on `s.normed`; leaves its output in `s.branch`. Experts are processed in their
/// order, so a token's sum does not depend on the other tokens of the pass.
pub(crate) fn experts(
    cx: &mut Context<'_, '_>,
    moe: &Moe,
    b: &mut MoeBuffers<'_>,
    s: &mut Residual<'_>,
    inner: &mut [u8],
) {
    let (m, n_expert, n_used) = (cx.n_rows(), moe.spec.n_expert, moe.spec.n_used);
    if let Some(of_router) = &moe.router_norm {
        // Nothing is in this buffer yet.
        cx.norm(Some(of_router), s.x, s.branch);
        route(cx, moe, b, s.branch);
    } else if !moe.spec.routes_early {
        route(cx, moe, b, s.normed);
    }
    if let Some(of_token) = &moe.by_token {
        for slot in &*cx.slots {
            let (first, row, n) = cx.rows.of(slot);
            let to = b.chosen[row * n_used..(row + n) * n_used].chunks_exact_mut(n_used);
            for (to, &token) in to.zip(&slot.tokens[first..]) {
                to.copy_from_slice(&of_token[token as usize * n_used..][..n_used]);
            }
        }
    }
    choose_experts(
        cx.plain(),
        moe,
        &mut b.router[..m * n_expert],
        &mut b.chosen[..m * n_used],
        &mut b.weights[..m * n_used],
    );
    match &moe.latent {
        None => sum_experts(cx, moe, b, (s.normed, s.branch), inner),
        Some((down, up)) => {
            let latent = std::mem::take(&mut b.latent);
            let (x, sum) = latent[..2 * m * down.w.n_out].split_at_mut(m * down.w.n_out);
            cx.of_rows()
                .linear(s.normed, m, &mut [Product::of(down, x, m)]);
            sum_experts(cx, moe, b, (x, sum), inner);
            let sum = match &moe.latent_norm {
                None => &*sum,
                Some(norm) => {
                    let (arch, n, eps) = (cx.arch, norm.len(), cx.h.norm_eps);
                    cx.threads.when(m > 1).for_chunks(x, n, |row, x| {
                        arch.rms_norm(x, &sum[row * n..][..n], norm, eps);
                    });
                    &*x
                }
            };
            cx.of_rows()
                .linear(sum, m, &mut [Product::of(up, s.branch, m)]);
            b.latent = latent;
        }
    }
    if let (Some(spec), Some(experts)) = (&moe.spec.adjugate, &moe.adjugate) {
        adjugate::choose(moe, spec, (b.router, b.chosen, b.weights), m);
        sum_experts(cx, experts, b, (s.branch, s.normed), inner);
        cx.arch.add_scaled(s.branch, s.normed, spec.scale);
    }
    if let Some(shared) = &moe.shared {
        add_shared(cx, (moe, shared), b, s, inner);
    }
}

/// Writes the sums of what the chosen experts make of `input` to `sum`.
fn sum_experts(
    cx: &mut Context<'_, '_>,
    moe: &Moe,
    b: &mut MoeBuffers<'_>,
    (input, sum): (&[f32], &mut [f32]),
    inner: &mut [u8],
) {
    sum.fill(0.0);
    if (cx.n_rows(), cx.n_generated()) == (1, 1) && !moe.spec.weighs_inputs {
        let rows = cx.rows;
        let slot = cx.slots.iter().find(|slot| rows.of(slot).2 == 1);
        let adapters = slot.map_or(&[][..], |slot| slot.adapters);
        let mut on = cx.of_rows();
        on.ctx.adapters = RowAdapters::All(adapters);
        experts_of_one(&mut on, moe, b, (input, sum), inner);
    } else {
        experts_of_many(cx, moe, b, (input, sum), inner);
    }
}

/// The experts of several tokens, one expert after the other.
fn experts_of_many(
    cx: &mut Context<'_, '_>,
    moe: &Moe,
    b: &mut MoeBuffers<'_>,
    (input, sum): (&[f32], &mut [f32]),
    inner: &mut [u8],
) {
    let (m, n_used, weighs_inputs) = (cx.n_rows(), moe.spec.n_used, moe.spec.weighs_inputs);
    let (n, n_generated) = (input.len() / m, cx.n_generated());
    let MoeBuffers {
        chosen,
        weights,
        order,
        x,
        y,
        ..
    } = b;
    let (chosen, weights) = (&chosen[..m * n_used], &weights[..m * n_used]);
    let ends_by_expert = sort_by_expert(chosen, order);
    let mut first = 0;
    for (e, &end) in ends_by_expert[..moe.spec.n_expert].iter().enumerate() {
        let of_expert = &order[std::mem::replace(&mut first, end)..end];
        let n_rows = of_expert.len();
        if n_rows == 0 {
            continue;
        }
        let token = |i: usize| of_expert[i] as usize / n_used;
        let weight = |i: usize| weights[of_expert[i] as usize];
        let rows_before =
            |token: usize| of_expert.partition_point(|&i| (i as usize) < token * n_used);
        let buffers = &mut cx.buffers;
        let ends = match cx.rows {
            Rows::All => buffers.ends,
            Rows::Outputs => buffers.output_ends,
        };
        for (to, &end) in buffers.some_ends.iter_mut().zip(ends) {
            *to = rows_before(end as usize) as u32;
        }
        let mut on = cx.of(Ends::Some, rows_before(n_generated));
        let (x, y) = (&mut x[..n_rows * n], &mut y[..n_rows * n]);
        let (arch, workers) = (on.arch, on.threads.when(n_rows > 1));
        workers.for_chunks(x, n, |i, x| {
            x.copy_from_slice(&input[token(i) * n..][..n]);
            if weighs_inputs {
                let weight = weight(i);
                x.iter_mut().for_each(|x| *x *= weight);
            }
        });
        feed_forward(&mut on, &moe.expert(e), x, n_rows, inner, y);
        let y = &*y;
        workers.for_chunks(sum, SUM_ROWS * n, |chunk, sum| {
            let tokens = chunk * SUM_ROWS..chunk * SUM_ROWS + sum.len() / n;
            for i in rows_before(tokens.start)..rows_before(tokens.end) {
                let sum = &mut sum[(token(i) - tokens.start) * n..][..n];
                let factor = if weighs_inputs { 1.0 } else { weight(i) };
                arch.add_scaled(sum, &y[i * n..][..n], factor);
            }
        });
    }
}

/// The experts of a single generated token, [`MAX_EXPERTS`] at a time: their gates and ups are one
/// parallel region, their downs another.
fn experts_of_one(
    on: &mut RowCtx<'_, '_>,
    moe: &Moe,
    b: &mut MoeBuffers<'_>,
    (input, sum): (&[f32], &mut [f32]),
    inner: &mut [u8],
) {
    let MoeBuffers {
        chosen,
        weights,
        order,
        y,
        ..
    } = b;
    let n = input.len();
    let order = &mut order[..moe.spec.n_used];
    order.iter_mut().zip(0..).for_each(|(to, i)| *to = i);
    order.sort_unstable_by_key(|&i| (chosen[i as usize], i));
    // Places without an expert are the last ones, see `adjugate`.
    let n_chosen = order.partition_point(|&i| (chosen[i as usize] as usize) < moe.spec.n_expert);
    for order in order[..n_chosen].chunks(MAX_EXPERTS) {
        let m = order.len();
        let experts: [Ffn; MAX_EXPERTS] =
            std::array::from_fn(|i| moe.expert(chosen[order[i.min(m - 1)] as usize] as usize));
        let n_ff = moe.spec.n_ff;
        let FfnBuffers { gate, up } = FfnBuffers::of(inner, m, n_ff);
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
        on.linear(input, 1, &mut products[..n_products]);
        let ctx = Ctx {
            threads: &on.threads.when(false),
            ..on.ctx
        };
        let inner = act(ctx, &experts[0], m, gate, up);
        let y = &mut y[..m * n];
        let mut outputs = y.chunks_exact_mut(n);
        let mut products: [Product<'_>; MAX_EXPERTS] = std::array::from_fn(|i| {
            Product::of_row(&experts[i].down, outputs.next().unwrap_or_default(), i)
        });
        on.generated(m).linear(inner, m, &mut products[..m]);
        for (&i, y) in order.iter().zip(y.chunks_exact(n)) {
            on.arch.add_scaled(sum, y, weights[i as usize]);
        }
    }
}

/// Adds to `s.branch` what the shared expert makes of `s.normed`.
fn add_shared(
    cx: &mut Context<'_, '_>,
    (moe, shared): (&Moe, &Ffn),
    b: &mut MoeBuffers<'_>,
    s: &mut Residual<'_>,
    inner: &mut [u8],
) {
    let (m, n) = (cx.n_rows(), cx.h.n_embd);
    let mut on = cx.of_rows();
    let strength = moe.shared_gate.as_ref().map(|gate| {
        let strength = &mut b.router[..m];
        on.linear(s.normed, m, &mut [Product::of_weight(gate, strength, m)]);
        &*strength
    });
    let y = &mut b.y[..m * n];
    feed_forward(&mut on, shared, s.normed, m, inner, y);
    let (arch, y) = (on.arch, &*y);
    on.threads.when(m > 1).for_chunks(s.branch, n, |i, branch| {
        let y = &y[i * n..][..n];
        match strength {
            Some(strength) => arch.add_scaled(branch, y, sigmoid(strength[i])),
            None => arch.add(branch, y),
        }
    });
}

/// A dense layer on `s.normed` beside a mixture on the residual stream; leaves the sum of their
/// outputs in `s.branch`. `beside` has as much room.
pub(crate) fn both(
    cx: &mut Context<'_, '_>,
    w: &Both,
    b: &mut MoeBuffers<'_>,
    s: &mut Residual<'_>,
    beside: &mut [f32],
    inner: &mut [u8],
) {
    let m = cx.n_rows();
    feed_forward(&mut cx.of_rows(), &w.dense, s.normed, m, inner, s.branch);
    let dense = &mut beside[..m * cx.h.n_embd];
    cx.norm(Some(&w.post_dense_norm), s.branch, dense);
    cx.norm(Some(&w.moe_norm), s.x, s.normed);
    experts(cx, &w.moe, b, s, inner);
    cx.norm(Some(&w.post_moe_norm), s.branch, s.normed);
    s.branch.copy_from_slice(s.normed);
    cx.arch.add(s.branch, dense);
}

/// A dense layer on `s.normed` beside a mixture on the same rows, or on those that `beside` holds if
/// the mixture has a norm of its own; leaves the sum of their outputs in `s.branch`. `beside` has as
/// much room.
pub(crate) fn beside(
    cx: &mut Context<'_, '_>,
    w: &Beside,
    b: &mut MoeBuffers<'_>,
    s: &mut Residual<'_>,
    beside: &mut [f32],
    inner: &mut [u8],
) {
    let m = cx.n_rows();
    let beside = &mut beside[..m * cx.h.n_embd];
    feed_forward(&mut cx.of_rows(), &w.dense, s.normed, m, inner, s.branch);
    if w.moe_norm.is_some() {
        s.normed.copy_from_slice(beside);
    }
    beside.copy_from_slice(s.branch);
    experts(cx, &w.moe, b, s, inner);
    cx.arch.add(s.branch, beside);
    if w.scale != 1.0 {
        s.branch.iter_mut().for_each(|x| *x *= w.scale);
    }
}

/// Sorts the indices of `chosen` into `order`, by the expert chosen there, and returns where those of each expert
/// end.
fn sort_by_expert(chosen: &[u32], order: &mut [u32]) -> [usize; MAX_EXPERT] {
    let mut ends = [0; MAX_EXPERT];
    chosen.iter().for_each(|&e| ends[e as usize] += 1);
    let mut sum = 0;
    for end in &mut ends {
        (*end, sum) = (sum, sum + *end);
    }
    for (i, &e) in (0..).zip(chosen) {
        order[ends[e as usize]] = i;
        ends[e as usize] += 1;
    }
    ends
}
