//! Experts, backwards.

use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::compute::weight::Weight;
use crate::layers::activation::sigmoid;
use crate::layers::dense_ffn;
use crate::layers::dense_ffn::backward::{FfnBuffers, feed_forward_backward};
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::moe::spec::{Gating, MoeSpec};
use crate::layers::moe::weights::Moe;
use crate::layers::moe::{choose_experts, divisor};
use crate::layers::tape::{BranchRows, Tape};

/// Rows of a layer.
pub(crate) struct Buffers<'a> {
    router: &'a mut [f32],
    drouter: &'a mut [f32],
    chosen: &'a mut [u32],
    weights: &'a mut [f32],
    dweights: &'a mut [f32],
    rows: &'a mut [u32],
    x: &'a mut [f32],
    y: &'a mut [f32],
    dx: &'a mut [f32],
    dy: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    /// Those of `m` rows; of a layer without experts, none.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        spec: Option<&MoeSpec>,
        m: usize,
        n_embd: usize,
    ) -> Buffers<'a> {
        let (n_expert, n_used, m) = spec.map_or((0, 0, 0), |x| (x.n_expert, x.n_used, m));
        Buffers {
            router: frame.take(m * n_expert),
            drouter: frame.take(m * n_expert),
            chosen: frame.take(m * n_used),
            weights: frame.take(m * n_used),
            dweights: frame.take(m * n_used),
            rows: frame.take(m),
            x: frame.take(m * n_embd),
            y: frame.take(m * n_embd),
            dx: frame.take(m * n_embd),
            dy: frame.take(m * n_embd),
        }
    }
}

/// Computes the gradient of the input, through the experts and through the router's weights. The
/// choice of experts is a constant.
pub(crate) fn experts_backward(
    tape: &mut Tape<'_>,
    moe: &Moe,
    mut b: BranchRows<'_>,
    ffn: &mut dense_ffn::backward::Buffers<'_>,
    e: &mut Buffers<'_>,
) {
    let (x, m) = (&moe.spec, tape.m);
    tape.linear(b.x, m, &mut [Product::of(&moe.router, e.router, m)]);
    choose_experts(tape.ctx, moe, e.router, e.chosen, e.weights);
    b.dx.fill(0.0);
    for index in 0..x.n_expert {
        expert_backward(tape, moe, index, &mut b, ffn, e);
    }
    for token in 0..m {
        let slots = token * x.n_used..(token + 1) * x.n_used;
        choice_backward(
            x,
            &e.router[token * x.n_expert..][..x.n_expert],
            (
                &e.chosen[slots.clone()],
                &e.weights[slots.clone()],
                &e.dweights[slots],
            ),
            &mut e.drouter[token * x.n_expert..][..x.n_expert],
        );
    }
    tape.linear_backward(b.x, m, &[(&moe.router.w, e.drouter)], Some(e.dx));
    tape.ctx.arch.add(b.dx, e.dx);
    if let Some(shared) = &moe.shared {
        let gate = moe.shared_gate.as_ref();
        shared_expert_backward(tape, (shared, gate), b, ffn, e);
    }
}

/// Adds to `b.dx` what comes through expert `index`, and computes the gradient of its weights.
fn expert_backward(
    tape: &mut Tape<'_>,
    moe: &Moe,
    index: usize,
    b: &mut BranchRows<'_>,
    ffn: &mut dense_ffn::backward::Buffers<'_>,
    e: &mut Buffers<'_>,
) {
    let (n_used, arch, n) = (moe.spec.n_used, tape.ctx.arch, tape.h.n_embd);
    let slots = e
        .chosen
        .iter()
        .enumerate()
        .filter(|&(_, &chosen)| chosen == index as u32)
        .map(|(slot, _)| slot);
    let mut n_rows = 0;
    for slot in slots {
        let token = slot / n_used;
        e.rows[n_rows] = slot as u32;
        e.x[n_rows * n..][..n].copy_from_slice(&b.x[token * n..][..n]);
        let dy = e.dy[n_rows * n..][..n]
            .iter_mut()
            .zip(&b.dy[token * n..][..n]);
        dy.for_each(|(dy, dbranch)| *dy = e.weights[slot] * dbranch);
        n_rows += 1;
    }
    if n_rows == 0 {
        return;
    }
    let values = n_rows * n;
    let io = FfnBuffers {
        y: Some(&mut e.y[..values]),
        ..ffn.rows()
    };
    let dx = Some(&mut e.dx[..values]);
    feed_forward_backward(
        tape,
        &moe.expert(index),
        &e.x[..values],
        n_rows,
        &e.dy[..values],
        dx,
        io,
    );
    for (j, &slot) in e.rows[..n_rows].iter().enumerate() {
        let token = slot as usize / n_used;
        e.dweights[slot as usize] = arch.dot(&e.y[j * n..][..n], &b.dy[token * n..][..n]);
        arch.add(&mut b.dx[token * n..][..n], &e.dx[j * n..][..n]);
    }
}

/// Adds to `b.dx` what comes through the shared expert and through the weight that its `gate`
/// computes, if it has one.
fn shared_expert_backward(
    tape: &mut Tape<'_>,
    (shared, gate): (&Ffn, Option<&Weight>),
    b: BranchRows<'_>,
    ffn: &mut dense_ffn::backward::Buffers<'_>,
    e: &mut Buffers<'_>,
) {
    let (arch, n, m) = (tape.ctx.arch, tape.h.n_embd, tape.m);
    let io = FfnBuffers {
        y: Some(e.y),
        ..ffn.rows()
    };
    if let Some(gate) = gate {
        let strength = &mut e.router[..m];
        tape.linear(b.x, m, &mut [Product::of_weight(gate, strength, m)]);
        strength.iter_mut().for_each(|s| *s = sigmoid(*s));
        for ((dy, dbranch), s) in
            e.dy.chunks_exact_mut(n)
                .zip(b.dy.chunks_exact(n))
                .zip(&*strength)
        {
            dy.iter_mut()
                .zip(dbranch)
                .for_each(|(dy, dbranch)| *dy = s * dbranch);
        }
        feed_forward_backward(tape, shared, b.x, m, e.dy, Some(e.dx), io);
        arch.add(b.dx, e.dx);
        let dstrength = &mut e.drouter[..m];
        let outputs = e.y.chunks_exact(n).zip(b.dy.chunks_exact(n));
        for ((ds, s), (y, dbranch)) in dstrength.iter_mut().zip(&*strength).zip(outputs) {
            *ds = arch.dot(y, dbranch) * s * (1.0 - s);
        }
        tape.linear_backward(b.x, m, &[(gate, dstrength)], Some(e.dx));
    } else {
        feed_forward_backward(
            tape,
            shared,
            b.x,
            m,
            b.dy,
            Some(e.dx),
            FfnBuffers { y: None, ..io },
        );
    }
    arch.add(b.dx, e.dx);
}

/// The gradient of a router's outputs, from that of the weights of the chosen experts.
pub(crate) fn choice_backward(
    spec: &MoeSpec,
    scores: &[f32],
    (chosen, weights, dweights): (&[u32], &[f32], &[f32]),
    drouter: &mut [f32],
) {
    drouter.fill(0.0);
    // Softmax and division by a sum: `dx = w·(dw − Σ w·dw)`, except for the factor before or after.
    let mean: f32 = weights.iter().zip(dweights).map(|(w, dw)| w * dw).sum();
    if spec.gating == Gating::SoftmaxAfterTopK {
        let sum: f32 = weights.iter().sum();
        for ((&e, dw), w) in chosen.iter().zip(dweights).zip(weights) {
            drouter[e as usize] = w * (dw - mean / sum);
        }
        return;
    }
    let total: f32 = chosen.iter().map(|&e| scores[e as usize]).sum();
    let sum = if spec.normalise { divisor(total) } else { 1.0 };
    // Below its lower bound the sum is a constant.
    let mean = if spec.normalise && sum == total {
        mean
    } else {
        0.0
    };
    for (&e, dw) in chosen.iter().zip(dweights) {
        drouter[e as usize] = (spec.scale * dw - mean) / sum;
    }
    if spec.gating == Gating::Sigmoid {
        drouter
            .iter_mut()
            .zip(scores)
            .for_each(|(dx, p)| *dx *= p * (1.0 - p));
        return;
    }
    let mean: f32 = scores.iter().zip(&*drouter).map(|(p, dp)| p * dp).sum();
    drouter
        .iter_mut()
        .zip(scores)
        .for_each(|(dx, p)| *dx = p * (*dx - mean));
}
