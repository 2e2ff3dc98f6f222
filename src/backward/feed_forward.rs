//! Feed-forward layers and experts, backwards.

use crate::backward::buffers::LayerBuffers;
use crate::backward::tape::Tape;
use crate::compute::linear::{Ctx, Product};
use crate::compute::weight::Weight;
use crate::layers::activation::spec::Activation;
use crate::layers::activation::{sigmoid, squared_relu};
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::moe::spec::{Gating, MoeSpec};
use crate::layers::moe::weights::Moe;
use crate::layers::moe::{choose_experts, divisor};

/// Rows of a feed-forward layer; `y` for its output, if it is needed.
pub(super) struct FfnBuffers<'b> {
    pub(super) gate: &'b mut [f32],
    pub(super) up: &'b mut [f32],
    pub(super) inner: &'b mut [f32],
    pub(super) dinner: &'b mut [f32],
    pub(super) y: Option<&'b mut [f32]>,
    /// Whether `gate` and `up` are computed already.
    pub(super) kept: bool,
}

/// Computes `dx` of `y = down(act(gate(x))·up(x))`, or of `down(act(up(x)))`.
pub(super) fn feed_forward_backward(
    tape: &mut Tape<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    dy: &[f32],
    dx: Option<&mut [f32]>,
    b: FfnBuffers<'_>,
) {
    let Ctx { arch, threads, .. } = tape.ctx;
    let n_ff = ffn.up.w.n_out;
    let [gate, up, inner, dinner] = [b.gate, b.up, b.inner, b.dinner].map(|b| &mut b[..m * n_ff]);
    let workers = threads.when(m > 1);
    match &ffn.gate {
        _ if b.kept => {}
        Some(w_gate) => tape.linear(
            x,
            m,
            &mut [Product::of(w_gate, gate, m), Product::of(&ffn.up, up, m)],
        ),
        None => tape.linear(x, m, &mut [Product::of(&ffn.up, up, m)]),
    }
    workers.for_chunks(inner, n_ff, |i, inner| {
        let (gate, up) = (&gate[i * n_ff..][..n_ff], &up[i * n_ff..][..n_ff]);
        inner.copy_from_slice(if ffn.activation.is_gated() { gate } else { up });
        match ffn.activation {
            Activation::SwiGlu => arch.silu_mul(inner, up),
            Activation::GeGlu => arch.gelu_mul(inner, up),
            Activation::Gelu => arch.gelu(inner),
            Activation::SquaredRelu => squared_relu(inner),
            _ => refused(),
        }
    });
    if let Some(y) = b.y {
        tape.linear(inner, m, &mut [Product::of(&ffn.down, y, m)]);
    }
    tape.linear_backward(inner, m, &[(&ffn.down.w, dy)], Some(dinner));
    let dinner = &*dinner;
    workers.for_chunk_pairs(gate, n_ff, up, n_ff, |i, gate, up| {
        let dinner = &dinner[i * n_ff..][..n_ff];
        match ffn.activation {
            Activation::SwiGlu => arch.silu_mul_backward(gate, up, dinner),
            Activation::GeGlu => arch.gelu_mul_backward(gate, up, dinner),
            Activation::Gelu => arch.gelu_backward(up, dinner),
            Activation::SquaredRelu => up
                .iter_mut()
                .zip(dinner)
                .for_each(|(x, dy)| *x = 2.0 * x.max(0.0) * dy),
            _ => refused(),
        }
    });
    match &ffn.gate {
        Some(w_gate) => tape.linear_backward(x, m, &[(&w_gate.w, gate), (&ffn.up.w, up)], dx),
        None => tape.linear_backward(x, m, &[(&ffn.up.w, up)], dx),
    }
}

/// Called for features that [`supports`](crate::backward::supports::supports) has refused before.
pub(super) fn refused() {
    unreachable!("SessionTraining::gradient refuses this model");
}

/// Computes `b.dnormed` from `b.dbranch`, through the experts of `b.normed` and through the
/// router's weights. The choice of experts is a constant.
pub(super) fn experts_backward(tape: &mut Tape<'_>, moe: &Moe, b: &mut LayerBuffers<'_>) {
    let (x, m, e) = (&moe.spec, tape.m, &mut b.moe);
    tape.linear(b.normed, m, &mut [Product::of(&moe.router, e.router, m)]);
    choose_experts(tape.ctx, moe, e.router, e.chosen, e.weights);
    b.dnormed.fill(0.0);
    for index in 0..x.n_expert {
        expert_backward(tape, moe, index, b);
    }
    let e = &mut b.moe;
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
    tape.linear_backward(b.normed, m, &[(&moe.router.w, e.drouter)], Some(e.dx));
    tape.ctx.arch.add(b.dnormed, e.dx);
    if let Some(shared) = &moe.shared {
        shared_expert_backward(tape, shared, moe.shared_gate.as_ref(), b);
    }
}

/// Adds to `b.dnormed` what comes through expert `index`, and computes the gradient of its weights.
fn expert_backward(tape: &mut Tape<'_>, moe: &Moe, index: usize, b: &mut LayerBuffers<'_>) {
    let (n_used, arch, n) = (moe.spec.n_used, tape.ctx.arch, tape.h.n_embd);
    let e = &mut b.moe;
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
        e.x[n_rows * n..][..n].copy_from_slice(&b.normed[token * n..][..n]);
        let dy = e.dy[n_rows * n..][..n]
            .iter_mut()
            .zip(&b.dbranch[token * n..][..n]);
        dy.for_each(|(dy, dbranch)| *dy = e.weights[slot] * dbranch);
        n_rows += 1;
    }
    if n_rows == 0 {
        return;
    }
    let values = n_rows * n;
    let y = Some(&mut e.y[..values]);
    let io = FfnBuffers {
        gate: b.gate,
        up: b.up,
        inner: b.inner,
        dinner: b.dinner,
        y,
        kept: false,
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
        e.dweights[slot as usize] = arch.dot(&e.y[j * n..][..n], &b.dbranch[token * n..][..n]);
        arch.add(&mut b.dnormed[token * n..][..n], &e.dx[j * n..][..n]);
    }
}

/// Adds to `b.dnormed` what comes through the shared expert and through the weight that its `gate`
/// computes, if it has one.
fn shared_expert_backward(
    tape: &mut Tape<'_>,
    shared: &Ffn,
    gate: Option<&Weight>,
    b: &mut LayerBuffers<'_>,
) {
    let (arch, n, m) = (tape.ctx.arch, tape.h.n_embd, tape.m);
    let e = &mut b.moe;
    let io = FfnBuffers {
        gate: b.gate,
        up: b.up,
        inner: b.inner,
        dinner: b.dinner,
        y: Some(e.y),
        kept: false,
    };
    if let Some(gate) = gate {
        let strength = &mut e.router[..m];
        tape.linear(b.normed, m, &mut [Product::of_weight(gate, strength, m)]);
        strength.iter_mut().for_each(|s| *s = sigmoid(*s));
        for ((dy, dbranch), s) in
            e.dy.chunks_exact_mut(n)
                .zip(b.dbranch.chunks_exact(n))
                .zip(&*strength)
        {
            dy.iter_mut()
                .zip(dbranch)
                .for_each(|(dy, dbranch)| *dy = s * dbranch);
        }
        feed_forward_backward(tape, shared, b.normed, m, e.dy, Some(e.dx), io);
        arch.add(b.dnormed, e.dx);
        let dstrength = &mut e.drouter[..m];
        let outputs = e.y.chunks_exact(n).zip(b.dbranch.chunks_exact(n));
        for ((ds, s), (y, dbranch)) in dstrength.iter_mut().zip(&*strength).zip(outputs) {
            *ds = arch.dot(y, dbranch) * s * (1.0 - s);
        }
        tape.linear_backward(b.normed, m, &[(gate, dstrength)], Some(e.dx));
    } else {
        feed_forward_backward(
            tape,
            shared,
            b.normed,
            m,
            b.dbranch,
            Some(e.dx),
            FfnBuffers { y: None, ..io },
        );
    }
    arch.add(b.dnormed, e.dx);
}

/// The gradient of a router's outputs, from that of the weights of the chosen experts.
pub(super) fn choice_backward(
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
