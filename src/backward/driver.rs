//! One backward pass: from what the logits should have been to gradients of an adapter.
//!
//! It mirrors `forward/` function for function, and goes through the layers from the last one to
//! the lowest with a requested gradient. The forward pass has saved a few rows per token and layer
//! ([`Saved`]); everything else is recomputed, layer by layer, unless it was small enough to keep.
//! Weights are frozen: they are only needed for `dx = Wᵀ·dy`. Keys and values of tokens before the
//! pass are constants.
//!
//! A pass has texts, each of which follows the same tokens; rows are stored text by text. Only
//! attention goes through them one by one.
//!
//! `dx` is the gradient of the loss with respect to `x`. Every matrix is row-major with one row per
//! token.

use crate::backward::buffers::{
    Buffers, HeadBuffers, LayerBuffers, RowCounts, logit_rows, scratch,
};
use crate::backward::objective::{Divergence, Objective, through_transform};
use crate::backward::saved::{Saved, SavedLayer};
use crate::backward::stage::{Stage, lowest};
use crate::compute::ComputeError;
use crate::compute::arena::{Arena, Frame, counted};
use crate::compute::linear::{Ctx, Product, RowAdapters, Wanted, linear};
use crate::compute::weight::Weight;
use crate::layers::attention::backward::{KeptRows, attention_backward};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;
use crate::layers::dense_ffn::backward::feed_forward_backward;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::layer::weights::{FeedForward, Layer};
use crate::layers::moe::backward::experts_backward;
use crate::layers::norm::backward::norm_backward;
use crate::layers::norm::norm;
use crate::layers::norm::spec::Norms;
use crate::layers::norm::weights::Norm;
use crate::layers::rope::{RopeTables, Rotation};
use crate::layers::tape::{BackwardText, BranchRows, Tape};
use crate::lora::{Adapter, Attached, Gradients};
use crate::model::Model;
use crate::threads::PoolHandle;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that the gradient of an adapter takes with all tokens of a text of `m` at position `pos`
/// as targets: buffers of the backward pass, and rows that the forward pass keeps for it. `rank` is
/// that of all adapters together; `pairs` tells of divergences, whose rows of logits come in pairs.
pub(crate) fn gradient_bytes(
    (model, n_threads): (&Model, usize),
    adapter: &Adapter,
    rank: usize,
    (m, pos): (usize, usize),
    pairs: bool,
) -> [u64; 2] {
    let h = model.hparams();
    let rows = RowCounts {
        m,
        longest: m,
        n_outputs: m,
        pairs,
    };
    let buffers = counted(|frame| {
        Buffers::take(frame, model, rows, pos);
        scratch(frame, model, n_threads, rank, rows);
    });
    let mut saved = Saved::default();
    saved.prepare(model, adapter.terms().map(|(i, _)| &adapter.sites()[i]), m);
    let of_layers = saved
        .layers
        .iter()
        .zip(&h.layers[saved.lowest..])
        .map(|(saved, spec)| {
            let n_out = spec.attention().map_or(0, |attn| attn.n_out());
            let norms = usize::from(saved.has_post_norms.0) + usize::from(saved.has_post_norms.1);
            n_out
                + (1 + norms) * h.n_embd
                + if saved.keeps_products {
                    saved.n_products
                } else {
                    0
                }
        });
    let per_token = (saved.x.len() + 1) * h.n_embd + of_layers.sum::<usize>();
    [buffers as u64, (m * per_token * size_of::<f32>()) as u64]
}

/// Inputs of a backward pass: the tokens of a forward pass that has just ended.
pub(crate) struct BackwardPass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) adapters: &'a [Attached],
    /// Index of the attached adapter whose gradients are computed.
    pub(crate) target: usize,
    pub(crate) rope: &'a RopeTables,
    pub(crate) texts: &'a [BackwardText<'a>],
    /// Position of the first token of each text.
    pub(crate) pos: usize,
    /// Position by which ropes turn it: behind images that have rows and columns, an earlier one.
    pub(crate) turn: usize,
    pub(crate) saved: &'a mut Saved,
    pub(crate) objective: &'a Objective<'a>,
    /// Called before every layer; `true` cancels the pass.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
    pub(crate) at: &'a mut BackwardAt,
    /// Whether it pauses after the head and after each layer.
    pub(crate) pauses: bool,
}

/// How far a backward pass is.
#[derive(Debug, Default)]
pub(crate) struct BackwardAt {
    /// The loss of each text, once the head has been gone through.
    pub(crate) losses: Option<Vec<f64>>,
    /// The layers from this one on have been gone through.
    layer: usize,
}

/// Runs a backward pass after its forward pass up to where it pauses, and adds to `gradients`;
/// returns whether it is complete. What is computed in between does not matter to it.
pub(crate) fn backward(
    mut pass: BackwardPass<'_>,
    threads: &PoolHandle<'_>,
    arena: &mut Arena,
    gradients: &mut Gradients,
) -> Result<bool, ComputeError> {
    let (model, texts, pos) = (pass.model, pass.texts, pass.pos);
    let (h, adapters) = (model.hparams(), pass.adapters);
    let ctx = Ctx {
        arch: model.arch(),
        threads,
        gguf: model.gguf(),
        adapters: RowAdapters::All(adapters),
        n_generated: 0,
        adapter_nanos: None,
        products: None,
    };
    let lengths = texts.iter().map(|text| text.tokens.len());
    let (m, longest) = (lengths.clone().sum(), lengths.max().unwrap_or(0));
    let outputs = outputs_of(texts);
    let rows = RowCounts {
        m,
        longest,
        n_outputs: outputs.len(),
        pairs: matches!(pass.objective, Objective::Divergence { .. }),
    };
    let lowest = lowest(
        gradients.terms().map(|(i, _)| &gradients.sites()[i]),
        h.n_layer,
    );
    let rank = adapters.iter().map(|attached| attached.max_rank).sum();
    let (mut b, (scratch, scratch_backward)) = arena.plan(|frame| {
        (
            Buffers::take(frame, model, rows, pos),
            scratch(frame, model, threads.n_threads(), rank, rows),
        )
    })?;
    let wanted = Wanted {
        adapters,
        adapter: pass.target,
        gradients,
    };
    let mut tape = Tape {
        ctx,
        h,
        pos,
        m,
        longest,
        texts,
        wanted,
        scratch,
        scratch_backward,
    };
    let angles = (0..longest, longest);
    pass.rope.angles(ctx.arch, pass.turn, angles, b.cos, b.sin);
    b.back
        .iter_mut()
        .zip(&*b.sin)
        .for_each(|(back, sin)| *back = -sin);

    let head_alone = lowest.0 == h.n_layer;
    if pass.at.losses.is_none() {
        let losses = head(&mut tape, &mut pass, (&outputs, rows), &mut b, !head_alone);
        *pass.at = BackwardAt {
            losses: Some(losses.ok_or(ComputeError::Cancelled)?),
            layer: h.n_layer,
        };
        if pass.pauses && !head_alone {
            return Ok(false);
        }
    }
    if !layers_backward(&mut tape, &mut pass, lowest, &mut b)? {
        return Ok(false);
    }
    if !head_alone {
        embed_backward(&mut tape, &model.weights().token_embd, &pass.saved.dx);
    }
    Ok(true)
}

/// Row, text and token of each output.
fn outputs_of(texts: &[BackwardText<'_>]) -> Vec<(usize, usize, usize)> {
    let mut start = 0;
    let mut outputs = Vec::new();
    for (t, text) in texts.iter().enumerate() {
        let counts = |i: &usize| text.weights.is_none_or(|weights| weights[*i] != 0.0);
        let counted = (text.first_output..text.tokens.len()).filter(counts);
        outputs.extend(counted.map(|i| (start + i, t, i)));
        start += text.tokens.len();
    }
    outputs
}

/// Computes the loss of each text, and its gradient with respect to the output of the last layer in
/// `saved.dx`, if that is needed. Logits are computed some rows at a time.
fn head(
    tape: &mut Tape<'_>,
    pass: &mut BackwardPass<'_>,
    (outputs, rows): (&[(usize, usize, usize)], RowCounts),
    b: &mut Buffers<'_>,
    want_dx: bool,
) -> Option<Vec<f64>> {
    let (objective, weights) = (pass.objective, pass.model.weights());
    let (output_norm, output) = (weights.output_norm.as_ref(), &weights.output);
    let (h, ctx) = (tape.h, tape.ctx);
    let n = h.n_embd;
    let mut sums = vec![0.0; tape.texts.len()];
    let Saved { x, dx, .. } = &mut *pass.saved;
    let Some(x) = x.last() else { return Some(sums) };
    dx.clear();
    dx.resize(tape.m * n, 0.0);
    let HeadBuffers {
        normed,
        dnormed,
        logits,
        reference,
    } = HeadBuffers::take(&mut Frame::of(b.inner), h, rows);
    let has_gradient = tape.wanted.gradients.terms().next().is_some();
    for outputs in outputs.chunks(logit_rows(h, rows)) {
        if (pass.cancelled)() {
            return None;
        }
        let m = outputs.len();
        // Where adjacent rows lie in the residual stream, and among the outputs.
        let mut end = 0;
        let runs = outputs.chunk_by(|a, b| a.0 + 1 == b.0).map(|run| {
            end += run.len();
            (
                run[0].0 * n..(run[0].0 + run.len()) * n,
                (end - run.len()) * n..end * n,
            )
        });
        let runs: Vec<_> = runs.collect();
        let (normed, logits) = (&mut normed[..m * n], &mut logits[..m * h.n_vocab]);
        for (from, to) in &runs {
            norm(
                ctx,
                h,
                output_norm,
                &x[from.clone()],
                &mut normed[to.clone()],
            );
        }
        tape.linear(normed, m, &mut [Product::of(output, logits, m)]);
        let reference = if let Objective::Divergence { reference: x, .. } = objective {
            let reference = &mut reference[..m * h.n_vocab];
            // Its norm takes the place that the gradient of the other one has afterwards.
            for (from, to) in &runs {
                let (x, normed) = (&x[from.clone()], &mut dnormed[to.clone()]);
                norm(ctx, h, output_norm, x, normed);
            }
            let plain = Ctx {
                adapters: RowAdapters::All(&[]),
                ..ctx
            };
            let product = Product::of(output, reference, m);
            linear(
                plain,
                &mut tape.scratch,
                &dnormed[..m * n],
                m,
                &mut [product],
            );
            &*reference
        } else {
            &[]
        };
        let losses: Vec<AtomicU64> = (0..m).map(|_| AtomicU64::new(0)).collect();
        ctx.threads.for_chunks(logits, h.n_vocab, |i, logits| {
            let (_, text, token) = outputs[i];
            let loss = match objective {
                Objective::Logits(objective) => {
                    through_transform(h.logit_transform(), logits, |logits| {
                        objective(text, token, logits)
                    })
                }
                Objective::Divergence { weight, .. } => {
                    let row = &reference[i * h.n_vocab..][..h.n_vocab];
                    let parts = Divergence {
                        transform: h.logit_transform(),
                        weight: *weight,
                        has_gradient,
                    };
                    parts.of_rows(ctx.arch, logits, row)
                }
            };
            losses[i].store(loss.to_bits(), Ordering::Relaxed);
        });
        for (loss, &(_, text, _)) in losses.iter().zip(outputs) {
            sums[text] += f64::from_bits(loss.load(Ordering::Relaxed));
        }
        let dnormed = &mut dnormed[..m * n];
        tape.linear_backward(
            normed,
            m,
            &[(&output.w, logits)],
            want_dx.then_some(&mut *dnormed),
        );
        for (from, to) in runs.into_iter().filter(|_| want_dx) {
            norm_backward(
                ctx,
                h,
                output_norm,
                &x[from.clone()],
                &dnormed[to],
                &mut dx[from],
            );
        }
    }
    Some(sums)
}

/// Goes through the layers from where the pass is down to the lowest one; `false` if it pauses.
fn layers_backward(
    tape: &mut Tape<'_>,
    pass: &mut BackwardPass<'_>,
    (lowest, lowest_stage): (usize, Stage),
    b: &mut Buffers<'_>,
) -> Result<bool, ComputeError> {
    let (h, w) = (pass.model.hparams(), pass.model.weights());
    while pass.at.layer > lowest {
        if (pass.cancelled)() {
            return Err(ComputeError::Cancelled);
        }
        pass.at.layer -= 1;
        let i = pass.at.layer;
        let Saved { x, layers, dx, .. } = &mut *pass.saved;
        let step = LayerStep {
            spec: &h.layers[i],
            layer: &w.layers[i],
            i,
            x: &x[i - lowest],
            stage: if i == lowest {
                lowest_stage
            } else {
                Stage::Below
            },
        };
        layer_backward(tape, step, &mut layers[i - lowest], pass.rope, dx, b);
        if pass.pauses && i > lowest {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A layer to go through.
struct LayerStep<'a> {
    spec: &'a LayerSpec,
    layer: &'a Layer,
    i: usize,
    /// Its input.
    x: &'a [f32],
    /// Where to stop.
    stage: Stage,
}

/// Turns `dx` from the gradient of a layer's output into that of its input, or stops at its stage.
fn layer_backward(
    tape: &mut Tape<'_>,
    step: LayerStep<'_>,
    saved: &mut SavedLayer,
    rope: &RopeTables,
    dx: &mut [f32],
    Buffers {
        inner,
        cos,
        sin,
        back,
    }: &mut Buffers<'_>,
) {
    // What `supports` refuses does not come here.
    let (Some(attn), Some(weights)) = (step.spec.attention(), &step.layer.attn) else {
        return;
    };
    let (rows, frame) = ((tape.m, tape.longest), &mut Frame::of(inner));
    let mut b = LayerBuffers::take(frame, tape.h, (step.spec, attn), rows, tape.pos);
    feed_forward_branch(tape, &step, saved, dx, &mut b);
    if step.stage < Stage::FeedForward {
        let (arch, n) = (tape.ctx.arch, tape.longest);
        let rotations = attn
            .rope
            .map(|id| [&**sin, &**back].map(|sin| rope.rotation(arch, id, n, cos, sin)));
        attention_branch(tape, &step, (attn, weights), saved, rotations, dx, &mut b);
    }
}

/// Adds to `dx` what comes through the feed-forward part. In a layer whose parts share a norm,
/// `b.dnormed` is left for [`attention_branch`].
fn feed_forward_branch(
    tape: &mut Tape<'_>,
    step: &LayerStep<'_>,
    saved: &mut SavedLayer,
    dx: &mut [f32],
    b: &mut LayerBuffers<'_>,
) {
    let (ctx, h, m) = (tape.ctx, tape.h, tape.m);
    let LayerStep { spec, layer, .. } = step;
    let post = layer.post_ffn_norm.as_ref();
    let scale = spec.residual_scale;
    branch_backward(ctx, h, scale, post, &saved.ffn_out, dx, b.dbranch);
    let parallel = spec.norms == Norms::Shared;
    if parallel {
        norm(ctx, h, layer.attn_norm.as_ref(), step.x, b.normed);
    } else {
        norm(ctx, h, layer.ffn_norm.as_ref(), &saved.mid, b.normed);
    }
    let below = step.stage < Stage::FeedForward;
    match &layer.ffn {
        FeedForward::Dense(ffn) => {
            let kept = saved.keeps_products;
            let mut io = b.ffn.rows();
            if kept {
                (io.up, io.kept) = (&mut saved.up, true);
                if ffn.gate.is_some() {
                    io.gate = &mut saved.gate;
                }
            }
            let dnormed = below.then_some(&mut *b.dnormed);
            feed_forward_backward(tape, ffn, b.normed, m, b.dbranch, dnormed, io);
        }
        FeedForward::Moe(moe) => {
            let rows = BranchRows {
                x: b.normed,
                dy: b.dbranch,
                dx: b.dnormed,
            };
            experts_backward(tape, moe, rows, &mut b.ffn, &mut b.moe);
        }
        FeedForward::Both(_) | FeedForward::Beside(_) | FeedForward::None => {}
    }
    if below && !parallel {
        norm_backward(ctx, h, layer.ffn_norm.as_ref(), &saved.mid, b.dnormed, dx);
    }
}

/// Adds to `dx` what comes through attention.
fn attention_branch(
    tape: &mut Tape<'_>,
    step: &LayerStep<'_>,
    (attn, weights): (&AttnSpec, &Attn),
    saved: &SavedLayer,
    rotations: Option<[Rotation<'_>; 2]>,
    dx: &mut [f32],
    b: &mut LayerBuffers<'_>,
) {
    let (ctx, h, m) = (tape.ctx, tape.h, tape.m);
    let LayerStep { spec, layer, .. } = step;
    let post = layer.post_attn_norm.as_ref();
    let scale = spec.residual_scale;
    branch_backward(ctx, h, scale, post, &saved.attn_out, dx, b.dbranch);
    let below = step.stage < Stage::Output;
    let dattn = below.then_some(&mut *b.attn.dattn);
    tape.linear_backward(&saved.attn, m, &[(&weights.wo.w, b.dbranch)], dattn);
    if !below {
        return;
    }
    let (parallel, attn_norm) = (spec.norms == Norms::Shared, layer.attn_norm.as_ref());
    if !parallel {
        norm(ctx, h, attn_norm, step.x, b.normed);
    }
    let of_layer = (attn, weights);
    let kept = KeptRows {
        q: saved.keeps_products.then_some(&saved.q[..]),
        attn: &saved.attn,
    };
    attention_backward(
        tape,
        of_layer,
        step.i,
        kept,
        b.normed,
        &mut b.attn,
        rotations,
    );
    let a = &b.attn;
    let (wq, wk, wv) = (&weights.wq.w, &weights.wk.w, &weights.wv.w);
    let products = [(wq, &*a.dq), (wk, &*a.dk), (wv, &*a.dv)];
    let below = step.stage < Stage::Qkv;
    let dnormed_attn = below.then_some(&mut *b.dnormed_attn);
    tape.linear_backward(b.normed, m, &products, dnormed_attn);
    if below {
        if parallel {
            let dnormed = &*b.dnormed;
            ctx.threads.for_chunks(b.dnormed_attn, h.n_embd, |i, dx| {
                ctx.arch.add(dx, &dnormed[i * h.n_embd..][..h.n_embd])
            });
        }
        norm_backward(ctx, h, attn_norm, step.x, b.dnormed_attn, dx);
    }
}

/// Computes `dbranch` from the gradient `dx` of the residual stream to which the branch was added.
fn branch_backward(
    ctx: Ctx<'_>,
    h: &Hparams,
    scale: f32,
    post: Option<&Norm>,
    branch: &[f32],
    dx: &[f32],
    dbranch: &mut [f32],
) {
    let n = h.n_embd;
    ctx.threads.for_chunks(dbranch, n, |i, dbranch| match post {
        Some(_) => dbranch.fill(0.0),
        None => dbranch.copy_from_slice(&dx[i * n..][..n]),
    });
    if post.is_some() {
        norm_backward(ctx, h, post, branch, dx, dbranch);
    }
    if scale != 1.0 {
        dbranch.iter_mut().for_each(|dx| *dx *= scale);
    }
}

/// Gradients of an adapter of the embedding table.
fn embed_backward(tape: &mut Tape<'_>, table: &Weight, dx: &[f32]) {
    let (h, arch) = (tape.h, tape.ctx.arch);
    let attached = &tape.wanted.adapters[tape.wanted.adapter];
    let Some(term) = attached.adapter.term(table.site) else {
        return;
    };
    let Some(gradient) = tape.wanted.gradients.term_mut(table.site) else {
        return;
    };
    let factor = attached.scale * attached.adapter.scale(term) * h.embd_scale;
    let (da, db) = gradient.parts_mut();
    let tokens = tape.texts.iter().flat_map(|text| text.tokens);
    for (&token, dx) in tokens.zip(dx.chunks_exact(h.n_embd)) {
        let rows = term
            .a()
            .chunks_exact(h.n_vocab)
            .zip(term.b().chunks_exact(h.n_embd));
        let sums = da
            .chunks_exact_mut(h.n_vocab)
            .zip(db.chunks_exact_mut(h.n_embd));
        for ((a, b), (da, db)) in rows.zip(sums) {
            da[token as usize] += factor * arch.dot(b, dx);
            arch.add_scaled(db, dx, factor * a[token as usize]);
        }
    }
}
