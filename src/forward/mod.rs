//! One forward pass: tokens of some sequences in, logits out. Read this file first.
//!
//! A batch has slots, one for each sequence, and each slot has some tokens at adjacent positions.
//! Every matrix is row-major with one row per token, slot by slot. Products and norms process all
//! rows together; everything that depends on a sequence (positions, keys and values, adapters) is
//! processed slot by slot.
//!
//! A pass is a list of [`steps`]. [`forward`] walks it; [`Run`] computes a step, with the components
//! in [`layers`](crate::layers). If it is asked to, a pass pauses before a piece ([`Step::piece`]),
//! or between tiles in the middle of a step.

mod buffers;
mod embedding;
mod head;
mod optional;
pub(crate) mod sizes;
mod steps;

pub(crate) use buffers::buffer_bytes;
pub(crate) use steps::{Cursor, N_PARTS, Part, Step};

use crate::compute::ComputeError;
use crate::compute::arena::Arena;
use crate::compute::probe::{EvalCallback, HookPoint};
use crate::compute::tiles::Tiles;
use crate::forward::buffers::Buffers;
use crate::forward::embedding::embed;
use crate::forward::head::head;
use crate::forward::sizes::sizes;
use crate::forward::steps::steps;
use crate::layers::attention::Attention;
use crate::layers::context::Context;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer};
use crate::layers::layer::weights::{FeedForward, Layer};
use crate::layers::norm::spec::Norms;
use crate::layers::outputs::{Outputs, Wanted};
use crate::layers::rows::{Rows, SlotView};
use crate::layers::{compressed, dense_ffn, moe, recurrent, switch};
use crate::model::{Model, Weights};
use crate::threads::PoolHandle;
use std::sync::atomic::AtomicU64;

/// Inputs and outputs of a pass.
pub(crate) struct Pass<'a, 's> {
    pub(crate) model: &'a Model,
    /// Slots, whose rows are already numbered.
    pub(crate) slots: &'a mut [SlotView<'s>],
    /// Has memory for the rows with logits.
    pub(crate) outputs: &'a mut Outputs,
    /// Outputs requested for rows with outputs.
    pub(crate) wanted: Wanted,
    /// Called before every step; `true` cancels the pass.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
    /// See [`Ctx::adapter_nanos`](crate::compute::linear::Ctx::adapter_nanos).
    pub(crate) adapter_nanos: &'a AtomicU64,
    /// Where to go on, and where the pass paused. What was left in the arena before is still there:
    /// a pass of the same size takes the same buffers.
    pub(crate) cursor: &'a mut Cursor,
    /// Number of layers to compute.
    pub(crate) end: usize,
    /// If it may pause.
    pub(crate) pause: Option<Pause<'a>>,
    /// If layers are left to a device, the destination of the residual stream, `(rows, n_embd)`.
    pub(crate) hidden: Option<&'a mut [f32]>,
}

/// Called between two pieces of a pass, and between tiles, with the piece that comes next (see
/// [`Step::piece`]); `true` pauses the pass.
pub(crate) type Pause<'a> = &'a dyn Fn(Step) -> bool;

/// Runs a pass and writes the requested logits into `outputs`; returns whether it is complete, or
/// paused otherwise. After an error the cache contains nothing new that is valid.
pub(crate) fn forward(
    pass: Pass<'_, '_>,
    threads: &PoolHandle<'_>,
    arena: &mut Arena,
    probe: &mut dyn EvalCallback,
) -> Result<bool, ComputeError> {
    let Pass {
        model,
        slots,
        outputs,
        wanted,
        cancelled,
        adapter_nanos,
        cursor,
        end,
        pause,
        hidden,
    } = pass;
    let h = model.hparams();
    let all_rows = probe.sees_all_rows();
    let n_outputs = Rows::Outputs.n_of(slots);
    let n_last = if all_rows {
        Rows::All.n_of(slots)
    } else {
        n_outputs
    };
    let products = probe.products();
    let sizes = sizes(model, threads.n_threads());
    let (of_context, buffers) = arena
        .plan(|frame| buffers::take(frame, sizes, slots.iter().map(SlotView::size), n_last))?;
    let mut cx = Context::new(
        (model.arch(), model.gguf(), h),
        threads,
        slots,
        of_context,
        adapter_nanos,
        probe,
    );
    cx.cell = cursor.cell;
    cx.products = products.as_deref();
    let mut run = Run {
        cx,
        b: buffers,
        w: model.weights(),
        all_rows,
    };
    let first = *cursor;
    let steps = steps(h, end, all_rows || n_outputs > 0);
    for step in steps.skip_while(|&step| step != first.step) {
        let pause_before = |next: Step| pause.is_some_and(|pause| pause(next));
        let piece = step.piece(h.n_layer);
        // `pause` is asked before every piece, as it measures their times; but before the head a
        // pass goes on whatever the answer, since the rows of the last layer are not kept.
        let is_due = step != first.step && step == piece && pause_before(piece);
        if is_due && step != Step::Head {
            *cursor = run.cursor(step, 0);
            return Ok(false);
        }
        if cancelled() {
            return Err(ComputeError::Cancelled);
        }
        let between = || pause_before(piece);
        let between: Option<&dyn Fn() -> bool> = match pause {
            Some(_) if step.layer() < h.n_layer.saturating_sub(1) => Some(&between),
            _ => None,
        };
        let n_done = if step == first.step { first.n_tiles } else { 0 };
        let mut tiles = Tiles::after(n_done, between);
        match step {
            Step::Embed => run.embed(),
            Step::Layer(layer, part) => run.layer(layer, part, &mut tiles)?,
            Step::Head => run.head(outputs, wanted),
        }
        if tiles.is_paused() {
            *cursor = run.cursor(step, tiles.n_done());
            return Ok(false);
        }
    }
    if let Some(hidden) = hidden {
        hidden.copy_from_slice(run.b.residual.x);
    }
    Ok(true)
}

/// A pass that is computed.
struct Run<'a, 's> {
    cx: Context<'a, 's>,
    b: Buffers<'a>,
    w: &'a Weights,
    /// Whether all rows of the last layer are computed, not only those with outputs.
    all_rows: bool,
}

impl<'a> Run<'a, '_> {
    fn cursor(&self, step: Step, n_tiles: usize) -> Cursor {
        let cell = self.cx.cell;
        Cursor {
            step,
            n_tiles,
            cell,
        }
    }

    /// Computes what the first layer reads.
    fn embed(&mut self) {
        let Run { cx, b, w, .. } = self;
        let s = &mut b.residual;
        cx.angles();
        if let Some(spec) = &cx.h.switch {
            switch::choose(cx, spec);
        }
        embed(cx, w, s.x, s.normed);
        b.optional.after_embedding(cx, w, s.x);
        cx.tap(HookPoint::InpEmbd, s.x);
    }

    /// Computes a part of layer `i`.
    fn layer(&mut self, i: usize, part: Part, tiles: &mut Tiles<'_>) -> Result<(), ComputeError> {
        let Run { cx, b, w, all_rows } = self;
        let (spec, w) = (&cx.h.layers[i], &w.layers[i]);
        cx.layer = i;
        // Of tokens without logits only keys and values, or a state, are read of the last layer.
        if cx.is_last() && !*all_rows {
            cx.rows = Rows::Outputs;
        }
        let attention = || Attention::of(spec, w).expect("weights are bound by specification");
        let (s, inner, m) = (&mut b.residual, &mut *b.inner, cx.n_rows());
        match (part, &w.ffn) {
            (Part::MixerInput, _) => self.mixer_input(spec, w),
            (Part::Project, _) => attention().project(cx, s, inner, tiles),
            (Part::Place, _) => attention().place(cx, inner)?,
            (Part::Attend, _) => attention().attend(cx, inner, tiles),
            (Part::AttnOutput, _) => attention().output(cx, s, inner),
            (Part::Mixer, _) => self.mixer(spec, w)?,
            (Part::FfnInput, _) => self.ffn_input(spec, w),
            (Part::FfnUp, FeedForward::Dense(ffn)) => {
                dense_ffn::up(&mut cx.of_rows(), ffn, s.normed, m, inner, tiles);
            }
            (Part::FfnActivate, FeedForward::Dense(ffn)) => {
                if let Some(of_layer) = &w.switch {
                    dense_ffn::add_switch(cx, ffn, of_layer, s.normed, inner);
                }
                dense_ffn::show(cx, ffn, inner);
                dense_ffn::activate(cx.plain(), ffn, m, inner);
            }
            (Part::FfnDown, FeedForward::Dense(ffn)) => {
                dense_ffn::down(&mut cx.of_rows(), ffn, m, inner, s.branch, tiles);
            }
            (Part::Experts, FeedForward::Moe(w)) => moe::experts(cx, w, &mut b.moe, s, inner),
            (Part::Experts, FeedForward::Both(w)) => {
                moe::both(cx, w, &mut b.moe, s, b.beside, inner);
            }
            (Part::Experts, FeedForward::Beside(w)) => {
                moe::beside(cx, w, &mut b.moe, s, b.beside, inner);
            }
            (Part::LayerOutput, ffn) => {
                if let (Some(of_layer), FeedForward::Dense(ffn)) = (&w.switch, ffn) {
                    dense_ffn::add_switch_down(cx, ffn, of_layer, inner, s.branch);
                }
                self.layer_output(spec, w);
            }
            _ => unreachable!("steps and weights are those of the specification"),
        }
        Ok(())
    }

    fn mixer_input(&mut self, spec: &LayerSpec, w: &Layer) {
        let Run { cx, b, .. } = self;
        let s = &mut b.residual;
        cx.keep_inputs(Rows::All, cx.layer, s.x);
        b.optional.before_mixer(cx, w, s);
        if spec.mixer != Mixer::None {
            s.enter(cx, (spec, w), w.attn_norm.as_ref());
            cx.tap(HookPoint::AttnNorm, s.normed);
            b.optional.beside_mixer(cx, w, s);
        }
        if let FeedForward::Beside(w) = &w.ffn
            && w.moe_norm.is_some()
        {
            cx.norm(w.moe_norm.as_ref(), s.x, b.beside);
        }
    }

    /// A recurrence, alone or beside attention, or attention to compressed blocks.
    fn mixer(&mut self, spec: &LayerSpec, w: &Layer) -> Result<(), ComputeError> {
        let Run { cx, b, .. } = self;
        let s = &mut b.residual;
        if let (Some(spec), Some(w)) = (spec.recurrent(), &w.recurrent) {
            recurrent::mixer(cx, (spec, w), s, b.inner, b.first_values);
        }
        if let (Some(spec), Some(w)) = (spec.compressed(), w.compressed.as_deref()) {
            let first = cx.h.compressed_kv_layer(cx.layer);
            compressed::mixer(cx, (spec, w), first, s, b.inner)?;
        }
        if let Some(attention) = Attention::of(spec, w) {
            b.beside.copy_from_slice(s.branch);
            attention.compute(cx, s, b.inner)?;
            cx.arch.add(s.branch, b.beside);
        }
        Ok(())
    }

    fn ffn_input(&mut self, spec: &LayerSpec, w: &Layer) {
        let Run { cx, b, .. } = self;
        let s = &mut b.residual;
        if cx.rows == Rows::Outputs {
            b.optional.gather(cx);
            if let FeedForward::Beside(_) = &w.ffn {
                cx.gather(b.beside, cx.h.n_embd);
            }
            cx.gather(s.x, cx.h.n_embd);
            s.keep(cx.n_rows() * cx.h.n_embd);
        }
        if let FeedForward::Moe(w) = &w.ffn
            && w.spec.routes_early
        {
            moe::route(cx, w, &mut b.moe, s.x);
        }
        if spec.norms == Norms::Parallel {
            cx.norm(w.ffn_norm.as_ref(), s.x, s.normed);
        }
        if spec.mixer != Mixer::None && !b.optional.takes_mixer(cx, w, s) {
            let post = w.post_attn_norm.as_ref();
            match &w.input_norm {
                Some(second) => s.add_twice(cx, post, second),
                None => s.add(cx, spec, post),
            }
        }
        b.optional.after_mixer(cx, (spec, w), s);
        cx.tap(HookPoint::FfnInp, s.x);
        if spec.ffn != FfnSpec::None && !matches!(spec.norms, Norms::Shared | Norms::Parallel) {
            b.optional.before_ffn(cx, w, s);
            s.enter(cx, (spec, w), w.ffn_norm.as_ref());
            cx.tap(HookPoint::FfnNorm, s.normed);
        }
    }

    fn layer_output(&mut self, spec: &LayerSpec, w: &Layer) {
        let Run {
            cx, b, w: model, ..
        } = self;
        let s = &mut b.residual;
        if spec.ffn != FfnSpec::None {
            cx.tap(HookPoint::FfnOut, s.branch);
            if !b.optional.takes_ffn(cx, w, s) {
                s.add(cx, spec, w.post_ffn_norm.as_ref());
            }
        }
        if cx.is_last() {
            b.optional.after_layers(cx, model, s);
        }
        b.optional.after_ffn(cx, (spec, w, model), s);
        cx.add_deep(s.x);
        if let Some(scale) = w.output_scale {
            s.x.iter_mut().for_each(|x| *x *= scale);
        }
        cx.tap(HookPoint::LOut, s.x);
        if cx.is_last() {
            cx.keep_inputs(cx.rows, cx.h.n_layer, s.x);
        }
        if cx.rows == Rows::All {
            cx.pool(s.x);
        }
    }

    fn head(&mut self, outputs: &mut Outputs, wanted: Wanted) {
        let Run { cx, b, w, .. } = self;
        if Rows::Outputs.n_of(&cx.slots) > 0 {
            b.optional.before_head(cx, w, &mut b.residual);
            head(cx, w, &mut b.residual, (outputs, wanted));
        }
    }
}
