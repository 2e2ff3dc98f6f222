//! One forward pass: tokens of some sequences in, logits out. Read this file first.
//!
//! A batch has slots, one for each sequence, and each slot has some tokens at adjacent positions.
//! Every matrix is row-major with one row per token, slot by slot. Products and norms process all
//! rows together; everything that depends on a sequence (positions, keys and values, adapters) is
//! processed slot by slot.

mod attention;
mod buffers;
mod experts;
mod feed_forward;
mod inputs;

pub(crate) use attention::attn_params;
pub(crate) use buffers::{attn_tiles, buffer_bytes};
pub(crate) use experts::{choose_experts, divisor};

use crate::arch::Arch;
use crate::compute::ComputeError;
use crate::compute::arena::{Arena, Frame};
use crate::compute::linear::{Ctx, Product, RowAdapters, Sizes, linear};
use crate::compute::probe::{Probe, Tap};
use crate::forward::attention::attention;
use crate::forward::buffers::{Buffers, FfnBuffers};
use crate::forward::experts::{both, experts, route};
use crate::forward::feed_forward::feed_forward_from;
use crate::forward::inputs::{embed, mtp_inputs, per_layer_inputs};
use crate::layers::norm::norm;
use crate::layers::outputs::{Outputs, Wanted};
use crate::layers::recurrence::Mixing;
use crate::layers::recurrent;
use crate::layers::rows::{Adapters, Base, Rows, SlotView, row_adapters};
use crate::model::{
    FeedForward, FfnSpec, Hparams, Laurel, Layer, LayerSpec, Mixer, Model, Norm, Norms, PerLayer,
    Recurrent, RecurrentSpec,
};
use crate::threads::Crew;
use std::sync::atomic::AtomicU64;

/// Query rows that one attention task handles at a time.
const ATTN_ROWS: usize = 128;
/// Pieces of one token's keys that one task merges: a few microseconds of work.
const FEW_PIECES: usize = 16;
/// Logits that one task caps: some ten microseconds of work.
const LOGITS: usize = 4096;
/// Most query heads that can share a key/value head: bounds the rows of a task.
pub(crate) const MAX_GROUP: usize = 1024;

/// Rows of a sum of experts' outputs that one task handles.
const SUM_ROWS: usize = 16;
/// Lower bound of the sum that divides the weights of a token's experts: the smallest normal `f16`,
/// as in llama.cpp.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

/// Inputs and outputs of a pass.
pub(crate) struct Pass<'a, 's> {
    pub(crate) model: &'a Model,
    /// Slots, whose rows are already numbered.
    pub(crate) slots: &'a mut [SlotView<'s>],
    /// Has memory for the rows with logits.
    pub(crate) outputs: &'a mut Outputs,
    /// Outputs requested for rows with outputs.
    pub(crate) wanted: Wanted,
    /// Called before every layer; `true` cancels the pass.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
    /// See [`Ctx::adapter_nanos`].
    pub(crate) adapter_nanos: &'a AtomicU64,
    /// What comes next; it is computed from there to layer `end`, or to where it pauses, and moved
    /// there. What was left in the arena before is still there: a pass of the same size takes
    /// the same buffers.
    pub(crate) at: &'a mut LayerAt,
    pub(crate) end: usize,
    /// If it may pause.
    pub(crate) pause: Option<Pause<'a>>,
    /// If layers are left to a device, the destination of the residual stream, `(rows, n_embd)`.
    pub(crate) hidden: Option<&'a mut [f32]>,
}

/// Parts of a layer: products before attention, attention, the product behind it, the first
/// products of a dense feed-forward layer, its last one. Other mixers and feed-forward layers are
/// one part, and so is the whole last layer of the model, as little of it is computed for a prompt.
pub(crate) const N_PARTS: usize = 5;
const ATTEND: usize = 1;
const ATTENDED: usize = 2;
const FFN: usize = 3;
const FFN_DOWN: usize = 4;
/// Regions of a slot's attention that may pause, at most, and tiles per thread in each of them, at
/// least.
const N_PIECES: usize = 16;
const LEAST_TILES: usize = 2;

/// What of a pass is to be computed next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerAt {
    pub(crate) layer: usize,
    pub(crate) part: usize,
    /// Tiles of that part's products, or of attention, that are computed.
    n_tiles: usize,
    /// The layer's first recurrence.
    cell: usize,
}

impl LayerAt {
    /// Whether something was computed.
    pub(crate) fn is_begun(self) -> bool {
        (self.layer, self.part, self.n_tiles) != (0, 0, 0)
    }

    /// Goes on to a part; returns whether the pass pauses before it.
    fn pauses_before(&mut self, layer: usize, part: usize, pause: Option<Pause<'_>>) -> bool {
        *self = LayerAt {
            layer,
            part,
            n_tiles: 0,
            cell: self.cell,
        };
        pause.is_some_and(|pause| pause(*self))
    }
}

/// Is called between two parts of a pass, or pieces of a part's products, with what comes next;
/// `true` pauses the pass.
pub(crate) type Pause<'a> = &'a dyn Fn(LayerAt) -> bool;

/// Moves the rows that the last layer computes to the front.
fn gather(slots: &[SlotView<'_>], rows: &mut [f32], n: usize) {
    for slot in slots {
        let from = slot.row + slot.first_last();
        rows.copy_within(from * n..(from + slot.n_outputs()) * n, slot.output * n);
    }
}

/// Of those, moves the rows with logits to the front.
fn gather_logits(slots: &[SlotView<'_>], rows: &mut [f32], n: usize) {
    let mut to = 0;
    for slot in slots {
        let from = slot.outputs(slot.first_output);
        to += from.len();
        rows.copy_within(from.start * n..from.end * n, (to - from.len()) * n);
    }
}

/// Runs a pass and writes the requested logits into `outputs`. After an error the cache contains
/// nothing new that is valid.
pub(crate) fn forward(
    pass: Pass<'_, '_>,
    crew: &Crew<'_>,
    arena: &mut Arena,
    probe: &mut dyn Probe,
) -> Result<(), ComputeError> {
    let Pass {
        model,
        slots,
        outputs,
        wanted,
        cancelled,
        adapter_nanos,
        at,
        end,
        pause,
        hidden,
    } = pass;
    let (h, w) = (model.hparams(), model.weights());
    let products = probe.products();
    let base = Base {
        arch: model.arch(),
        crew,
        gguf: model.gguf(),
        adapter_nanos,
        products: products.as_deref(),
    };
    let n_outputs = slots.iter().map(|slot| slot.n_outputs()).sum();
    let m: usize = slots.iter().map(|slot| slot.tokens.len()).sum();
    let n_last = if probe.sees_all_rows() { m } else { n_outputs };
    let sizes = Sizes::of(model, crew.n_threads());
    let mut b = arena
        .plan(|frame| Buffers::take(frame, sizes, slots.iter().map(SlotView::size), n_last))?;
    if !at.is_begun() {
        for slot in &*slots {
            slot.rope.angles(
                base.arch,
                slot.pos(),
                (Rows::All.range(slot), m),
                b.cos,
                b.sin,
            );
        }

        embed(base, h, w, slots, b.x, b.normed);
        if let Some(w) = &w.mtp {
            mtp_inputs(base, h, w, slots, &mut b);
        }
        probe.tensor(Tap::InpEmbd, 0, b.x);

        if let Some(w) = &w.per_layer {
            per_layer_inputs(base, h, w, slots, &mut b);
        }

        if let Some(w) = &w.alt_up {
            let slots = Adapters(slots);
            let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
            b.streams.begin(ctx, &mut b.scratch, h, w, b.x);
        }
    }

    // Which rows are left; once only those with logits are, all of them.
    let mut rows = Rows::All;
    for (i, (spec, layer)) in h
        .layers
        .iter()
        .zip(&w.layers)
        .enumerate()
        .take(end)
        .skip(at.layer)
    {
        if cancelled() {
            return Err(ComputeError::Cancelled);
        }
        let (ctx, is_last) = (base.with(RowAdapters::All(&[]), 0), i + 1 == w.layers.len());
        // Of tokens without logits nobody reads more of the last layer than keys and values, or a
        // state.
        if is_last && !probe.sees_all_rows() {
            rows = Rows::Outputs;
        }
        let pause_here = pause.filter(|_| !is_last);
        if at.part < FFN {
            if !first_half(
                base,
                h,
                (spec, layer),
                rows,
                slots,
                &mut b,
                (&mut *at, pause_here),
                probe,
            )? {
                return Ok(());
            }
            if rows == Rows::Outputs && n_outputs == 0 {
                at.pauses_before(h.n_layer, 0, pause);
                return Ok(());
            }
            if at.pauses_before(i, FFN, pause_here) {
                return Ok(());
            }
        }
        let n_rows = b.x.len() / h.n_embd;
        match &layer.ffn {
            FeedForward::Dense(ffn) => {
                let show = |tap: Tap, values: &[f32]| probe.tensor(tap, i, values);
                let (n_generated, slots) = (n_generated(is_last, rows, slots), Adapters(slots));
                let adapters = row_adapters(
                    &slots,
                    if rows == Rows::All {
                        b.ends
                    } else {
                        b.output_ends
                    },
                );
                let ctx = base.with(adapters, n_generated);
                let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, ffn.up.w.n_out);
                let steps = (&mut *at, pause_here);
                if !feed_forward_from(
                    ctx,
                    &mut b.scratch,
                    ffn,
                    b.normed,
                    n_rows,
                    inner,
                    b.branch,
                    steps,
                    show,
                ) {
                    return Ok(());
                }
            }
            FeedForward::Moe(moe) => {
                let n_generated = n_generated(is_last, rows, slots);
                experts(
                    base,
                    h,
                    moe,
                    (n_generated, n_rows),
                    &Adapters(slots),
                    rows,
                    &mut b,
                );
            }
            FeedForward::Both(ffn) => {
                let n_generated = n_generated(is_last, rows, slots);
                both(
                    base,
                    h,
                    ffn,
                    (n_generated, n_rows),
                    &Adapters(slots),
                    rows,
                    &mut b,
                );
            }
            FeedForward::None => {}
        }
        if spec.ffn != FfnSpec::None {
            probe.tensor(Tap::FfnOut, i, b.branch);
            add_branch(
                ctx,
                h,
                spec,
                layer.post_ffn_norm.as_ref(),
                b.x,
                b.branch,
                b.normed,
            );
        }
        if let Some(w) = &layer.per_layer {
            let (n_generated, slots) = (n_generated(is_last, rows, slots), Adapters(slots));
            let adapters = row_adapters(
                &slots,
                if rows == Rows::All {
                    b.ends
                } else {
                    b.output_ends
                },
            );
            let with_adapters = base.with(adapters, n_generated);
            if let Some(w) = &layer.alt_up {
                b.streams.correct(with_adapters, &mut b.scratch, h, w, b.x);
            }
            per_layer(with_adapters, h, w, i, &mut b);
            if layer.alt_up.is_some() {
                norm(ctx, h, Some(&w.norm), b.branch, b.normed);
                b.streams.add(ctx, h, b.normed);
            } else {
                add_branch(ctx, h, spec, Some(&w.norm), b.x, b.branch, b.normed);
            }
        }
        if let Some(scale) = layer.output_scale {
            b.x.iter_mut().for_each(|x| *x *= scale);
        }
        probe.tensor(Tap::LOut, i, b.x);
        if rows == Rows::All {
            pool(base.arch, slots, i, b.x, h.n_embd);
        }
        if at.pauses_before(i + 1, 0, pause) && !is_last {
            return Ok(());
        }
    }

    if end < h.n_layer {
        hidden
            .into_iter()
            .for_each(|hidden| hidden.copy_from_slice(b.x));
        return Ok(());
    }
    if let Some(w) = &w.alt_up {
        let (n_generated, slots) = (n_generated(true, rows, slots), Adapters(slots));
        let ends = if rows == Rows::All {
            b.ends
        } else {
            b.output_ends
        };
        let ctx = base.with(row_adapters(&slots, ends), n_generated);
        b.streams.end(ctx, &mut b.scratch, h, w, (b.x, b.branch));
    }
    if n_outputs > 0 {
        if rows == Rows::All {
            gather(slots, b.x, h.n_embd);
        }
        let (x, normed) = (
            &b.x[..n_outputs * h.n_embd],
            &mut b.normed[..n_outputs * h.n_embd],
        );
        let slots = Adapters(slots);
        let ctx = base.with(row_adapters(&slots, b.output_ends), n_outputs);
        norm(ctx, h, w.output_norm.as_ref(), x, normed);
        probe.tensor(Tap::ResultNorm, 0, normed);
        if wanted != Wanted::Logits {
            outputs.states.extend_from_slice(normed);
        }
        if wanted == Wanted::States {
            return Ok(());
        }
        let n_logits = slots.0.iter().map(|slot| slot.n_logits()).sum();
        if n_logits == 0 {
            return Ok(());
        }
        gather_logits(slots.0, normed, h.n_embd);
        let mut last = 0;
        for (end, slot) in b.expert_ends.iter_mut().zip(slots.0) {
            last += slot.n_logits() as u32;
            *end = last;
        }
        let ctx = base.with(row_adapters(&slots, b.expert_ends), n_logits);
        let (logits, normed) = (&mut *outputs.logits, &normed[..n_logits * h.n_embd]);
        linear(
            ctx,
            &mut b.scratch,
            normed,
            n_logits,
            &mut [Product::of(&w.output, logits, n_logits)],
        );
        if wanted != Wanted::Raw {
            let (finish, capped) = (h.logit_transform(), h.final_softcap.is_some());
            ctx.crew
                .when(capped)
                .for_chunks(logits, LOGITS, |_, logits| finish.row(logits));
        }
        probe.tensor(Tap::ResultOutput, 0, logits);
    }
    Ok(())
}

/// A layer up to what its feed-forward layer reads, in `b.normed` and `b.x`; returns whether it did
/// not pause. Of the rows that nobody reads it only leaves keys and values, or a state.
fn first_half(
    base: Base<'_>,
    h: &Hparams,
    (spec, layer): (&LayerSpec, &Layer),
    rows: Rows,
    slots: &mut [SlotView<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, ComputeError> {
    let i = at.layer;
    let (ctx, is_last) = (base.with(RowAdapters::All(&[]), 0), i + 1 == h.n_layer);
    let (has_mixer, has_ffn) = (spec.mixer != Mixer::None, spec.ffn != FfnSpec::None);
    if (at.part, at.n_tiles) == (0, 0) {
        if let Some(w) = &layer.alt_up {
            let slots = Adapters(slots);
            let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
            b.streams.predict(ctx, &mut b.scratch, h, w, b.x);
        }
        if has_mixer {
            norm(ctx, h, layer.attn_norm.as_ref(), b.x, b.normed);
            probe.tensor(Tap::AttnNorm, i, b.normed);
            if let Some(w) = &layer.alt_up {
                let slots = Adapters(slots);
                let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
                laurel(ctx, h, &w.laurel, b);
            }
        }
    }
    if has_mixer && !mixer(base, h, (spec, layer), rows, slots, b, (at, pause), probe)? {
        return Ok(false);
    }
    if rows == Rows::Outputs {
        let n_outputs = slots.iter().map(|slot| slot.n_outputs()).sum();
        if n_outputs == 0 {
            return Ok(true);
        }
        gather(slots, b.x, h.n_embd);
        gather(
            slots,
            b.per_layer,
            h.n_layer * h.per_layer_embd.unwrap_or(0),
        );
        if let Some(spec) = h.streams {
            gather(slots, b.streams.all, spec.n_stream * h.n_embd);
            gather(slots, b.beside, h.n_embd);
            b.streams.all =
                &mut std::mem::take(&mut b.streams.all)[..n_outputs * spec.n_stream * h.n_embd];
        }
        b.keep_rows(n_outputs, h.n_embd);
    }
    let n_rows = b.x.len() / h.n_embd;
    if let FeedForward::Moe(moe) = &layer.ffn
        && moe.spec.routes_early
    {
        let n_generated = n_generated(is_last, rows, slots);
        let ends = if rows == Rows::All {
            b.ends
        } else {
            b.output_ends
        };
        route(
            base,
            moe,
            (n_generated, n_rows),
            &Adapters(slots),
            ends,
            b.x,
            (&mut b.moe, &mut b.scratch),
        );
    }
    if spec.norms == Norms::Parallel {
        norm(ctx, h, layer.ffn_norm.as_ref(), b.x, b.normed);
    }
    if has_mixer {
        add_branch(
            ctx,
            h,
            spec,
            layer.post_attn_norm.as_ref(),
            b.x,
            b.branch,
            b.normed,
        );
    }
    if layer.alt_up.is_some() {
        let side = &b.beside[..b.x.len()];
        b.x.iter_mut()
            .zip(side)
            .for_each(|(x, side)| *x = (*x + side) * std::f32::consts::FRAC_1_SQRT_2);
    }
    probe.tensor(Tap::FfnInp, i, b.x);

    if has_ffn && !matches!(spec.norms, Norms::Shared | Norms::Parallel) {
        norm(ctx, h, layer.ffn_norm.as_ref(), b.x, b.normed);
        probe.tensor(Tap::FfnNorm, i, b.normed);
    }
    Ok(true)
}

/// Adds the rows of sequences whose hidden states are pooled after layer `i`.
fn pool(arch: Arch, slots: &mut [SlotView<'_>], i: usize, x: &[f32], n: usize) {
    for slot in slots {
        let (position, rows) = (slot.pos(), Rows::All.range(slot));
        let kind = slot.kind;
        if let Some(pooling) = slot.pooling.as_mut().filter(|pooling| pooling.layer == i) {
            pooling.add(arch, kind, position, &x[rows.start * n..rows.end * n], n);
        }
    }
}

/// Number of rows computed as generated tokens, which come first. In the last layer, except for its
/// keys and values, and in the head these are all rows, as usually one row of a prompt is left;
/// unless there are no outputs and only a probe sees the rows, as before a backward pass, or only
/// hidden states of whole texts are wanted.
fn n_generated(is_last: bool, rows: Rows, slots: &[SlotView<'_>]) -> usize {
    let has_outputs = slots
        .iter()
        .any(|slot| slot.n_outputs() > 0 && !slot.keeps_kind);
    if is_last && has_outputs {
        slots.iter().map(|slot| rows.of(slot).2).sum()
    } else {
        rows.n_generated(slots)
    }
}

/// Computes in `b.branch` what layer `i` adds from its vectors for tokens.
fn per_layer(ctx: Ctx<'_>, h: &Hparams, w: &PerLayer, i: usize, b: &mut Buffers<'_>) {
    let (n, m) = (w.gate.w.n_out, b.x.len() / h.n_embd);
    let gate = &mut b.per_layer_gate[..m * n];
    linear(
        ctx,
        &mut b.scratch,
        b.x,
        m,
        &mut [Product::of(&w.gate, gate, m)],
    );
    let of_tokens = &*b.per_layer;
    let times = |row: usize, gate: &mut [f32]| {
        ctx.arch
            .gelu_mul(gate, &of_tokens[(row * h.n_layer + i) * n..][..n])
    };
    ctx.crew.when(m > 1).for_chunks(gate, n, times);
    linear(
        ctx,
        &mut b.scratch,
        gate,
        m,
        &mut [Product::of(&w.proj, b.branch, m)],
    );
}

/// Computes in `b.beside` a layer's side path on `b.normed`.
fn laurel(ctx: Ctx<'_>, h: &Hparams, w: &Laurel, b: &mut Buffers<'_>) {
    let m = b.normed.len() / h.n_embd;
    let (low, side) = (
        &mut b.laurel[..m * w.left.w.n_out],
        &mut b.beside[..m * h.n_embd],
    );
    linear(
        ctx,
        &mut b.scratch,
        b.normed,
        m,
        &mut [Product::of(&w.left, low, m)],
    );
    linear(
        ctx,
        &mut b.scratch,
        low,
        m,
        &mut [Product::of(&w.right, b.branch, m)],
    );
    norm(ctx, h, Some(&w.norm), b.branch, side);
    ctx.arch.add(side, b.normed);
}

/// `x += scale · norm(branch)`, or `x = norm(x + scale · branch)`.
fn add_branch(
    ctx: Ctx<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    post: Option<&Norm>,
    x: &mut [f32],
    branch: &[f32],
    normed: &mut [f32],
) {
    let (scale, of_stream) = (spec.residual_scale, spec.norms == Norms::Residual);
    let branch = match post {
        Some(_) if !of_stream => {
            norm(ctx, h, post, branch, normed);
            &*normed
        }
        _ => branch,
    };
    ctx.crew
        .when(x.len() > h.n_embd)
        .for_chunks(x, h.n_embd, |i, x| {
            let branch = &branch[i * h.n_embd..][..h.n_embd];
            match scale {
                1.0 => ctx.arch.add(x, branch),
                scale => ctx.arch.add_scaled(x, branch, scale),
            }
        });
    if of_stream {
        norm(ctx, h, post, x, normed);
        x.copy_from_slice(normed);
    }
}

/// Mixer of a layer on `b.normed`; leaves its output for `rows` in `b.branch`. Returns whether it
/// did not pause.
fn mixer(
    base: Base<'_>,
    h: &Hparams,
    (spec, layer): (&LayerSpec, &Layer),
    rows: Rows,
    slots: &mut [SlotView<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, ComputeError> {
    if let (Some(spec), Some(w)) = (spec.recurrent(), &layer.recurrent) {
        recurrent(base, h, (spec, w), (at.layer, &mut at.cell), rows, slots, b);
    }
    let (Some(attn), Some(w)) = (spec.attention(), &layer.attn) else {
        return Ok(true);
    };
    let is_both = matches!(spec.mixer, Mixer::Both(..));
    if is_both {
        b.beside.copy_from_slice(b.branch);
    }
    let is_complete = attention(
        base,
        h,
        (attn, w),
        rows,
        slots,
        b,
        (at, pause.filter(|_| !is_both)),
        probe,
    )?;
    if is_both {
        base.arch.add(b.branch, b.beside);
    }
    Ok(is_complete)
}

/// Recurrent mixer of layer `i`, as [`mixer`]. All rows change the state.
fn recurrent(
    base: Base<'_>,
    h: &Hparams,
    (spec, w): (&RecurrentSpec, &Recurrent),
    (i, cell): (usize, &mut usize),
    rows: Rows,
    slots: &mut [SlotView<'_>],
    b: &mut Buffers<'_>,
) {
    let m = b.normed.len() / h.n_embd;
    let (scratch, eps) = (&mut b.scratch, h.norm_eps);
    let first_values = &mut *b.first_values;
    let mut pass = Mixing {
        base,
        slots: &mut *slots,
        ends: b.ends,
        scratch,
        eps,
        cell: *cell,
        first_values,
    };
    let mixed = recurrent::mix(&mut pass, (spec, w), (b.normed, m), &mut Frame::of(b.inner));
    *cell = pass.cell;
    let n_generated = n_generated(i + 1 == h.n_layer, rows, slots);
    let n_in = w.output().map_or(h.n_embd, |output| output.w.n_in);
    if rows == Rows::Outputs {
        gather(slots, mixed, n_in);
    }
    let m = slots.iter().map(|slot| rows.of(slot).2).sum();
    if m > 0 {
        let (slots, ends) = (
            Adapters(slots),
            if rows == Rows::All {
                b.ends
            } else {
                b.output_ends
            },
        );
        let ctx = base.with(row_adapters(&slots, ends), n_generated);
        let branch = &mut b.branch[..m * h.n_embd];
        match w.output() {
            Some(w) => linear(
                ctx,
                &mut b.scratch,
                &mixed[..m * n_in],
                m,
                &mut [Product::of(w, branch, m)],
            ),
            None => branch.copy_from_slice(&mixed[..m * n_in]),
        }
    }
}
