//! Components that few models have, and their places in a pass. Each function does nothing for
//! models without them.

use crate::compute::arena::Frame;
use crate::layers::altup::Streams;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::layer::weights::Layer;
use crate::layers::mtp::MtpBuffers;
use crate::layers::per_layer_embedding::PerLayerBuffers;
use crate::layers::residual::Residual;
use crate::layers::stacks::StackStates;
use crate::model::Weights;

/// Buffers of optional components.
pub(super) struct Optional<'a> {
    mtp: MtpBuffers<'a>,
    per_layer: PerLayerBuffers<'a>,
    streams: Streams<'a>,
    stacks: StackStates<'a>,
}

impl<'a> Optional<'a> {
    pub(super) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> Optional<'a> {
        Optional {
            mtp: MtpBuffers::take(frame, h, m),
            per_layer: PerLayerBuffers::take(frame, h, m),
            streams: Streams::take(frame, h, m),
            stacks: StackStates::take(frame, h, m),
        }
    }

    /// Behind the embeddings of tokens, which are in `x`.
    pub(super) fn after_embedding(&mut self, cx: &mut Context<'_, '_>, w: &Weights, x: &mut [f32]) {
        if let Some(w) = &w.mtp {
            self.mtp.begin(cx, w, x);
        }
        if let Some(w) = &w.per_layer {
            self.per_layer.begin(cx, w, x);
        }
        if let Some(w) = &w.alt_up {
            self.streams.begin(cx, w, x);
        }
        if let Some(w) = &w.stacks {
            self.stacks.begin(w, x);
        }
    }

    /// Before the norm of what the mixer reads.
    pub(super) fn before_mixer(&mut self, cx: &mut Context<'_, '_>, w: &Layer, x: &mut [f32]) {
        if let Some(w) = &w.alt_up {
            self.streams.predict(cx, w, x);
        }
        self.stacks.enter(cx, x);
    }

    /// Beside the mixer, which reads `s.normed`.
    pub(super) fn beside_mixer(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Layer,
        s: &mut Residual<'_>,
    ) {
        if let Some(w) = &w.alt_up {
            self.streams.side_path(cx, &w.laurel, s.normed, s.branch);
        }
    }

    /// Before all buffers are reduced to the rows that the last layer computes.
    pub(super) fn gather(&mut self, cx: &Context<'_, '_>) {
        self.per_layer.gather(cx);
        self.streams.gather(cx);
    }

    /// Behind the mixer, whose output was added to `x`.
    pub(super) fn after_mixer(&self, w: &Layer, x: &mut [f32]) {
        if w.alt_up.is_some() {
            self.streams.join(x);
        }
    }

    /// Behind the feed-forward layer, whose output was added to `s.x`.
    pub(super) fn after_ffn(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w, all): (&LayerSpec, &Layer, &Weights),
        s: &mut Residual<'_>,
    ) {
        if let Some(w) = &all.stacks {
            self.stacks.leave(cx, w, s.x);
        }
        let Some(of_layer) = &w.per_layer else { return };
        if let Some(w) = &w.alt_up {
            self.streams.correct(cx, w, s.x);
        }
        self.per_layer.branch(cx, of_layer, s.x, s.branch);
        if w.alt_up.is_some() {
            cx.norm(Some(&of_layer.norm), s.branch, s.normed);
            self.streams.add(cx, s.normed);
        } else {
            s.add(cx, spec, Some(&of_layer.norm));
        }
    }

    /// Behind the last layer.
    pub(super) fn before_head(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Weights,
        s: &mut Residual<'_>,
    ) {
        if let Some(w) = &w.alt_up {
            self.streams.end(cx, w, (s.x, s.branch));
        }
    }
}
