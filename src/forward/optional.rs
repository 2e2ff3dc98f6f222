//! Components that few models have, and their places in a pass. Each function does nothing for
//! models without them.

use crate::compute::arena::Frame;
use crate::layers::altup::Streams;
use crate::layers::context::Context;
use crate::layers::cross::CrossBuffers;
use crate::layers::embedding_skip::EmbeddingSkip;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::HyperStreams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::layer::weights::Layer;
use crate::layers::mtp::MtpBuffers;
use crate::layers::ngram::NgramBuffers;
use crate::layers::per_layer_embedding::PerLayerBuffers;
use crate::layers::residual::Residual;
use crate::layers::residual_attention::Checkpoints;
use crate::layers::stacks::StackStates;
use crate::model::Weights;

/// Buffers of optional components.
pub(super) struct Optional<'a> {
    mtp: MtpBuffers<'a>,
    per_layer: PerLayerBuffers<'a>,
    streams: Streams<'a>,
    skip: EmbeddingSkip<'a>,
    hyper: HyperStreams<'a>,
    ngrams: NgramBuffers<'a>,
    checkpoints: Checkpoints<'a>,
    stacks: StackStates<'a>,
    cross: CrossBuffers<'a>,
}

impl<'a> Optional<'a> {
    pub(super) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> Optional<'a> {
        Optional {
            mtp: MtpBuffers::take(frame, h, m),
            per_layer: PerLayerBuffers::take(frame, h, m),
            streams: Streams::take(frame, h, m),
            skip: EmbeddingSkip::take(frame, h, m),
            hyper: HyperStreams::take(frame, h, m),
            ngrams: NgramBuffers::take(frame, h, m),
            checkpoints: Checkpoints::take(frame, h, m),
            stacks: StackStates::take(frame, h, m),
            cross: CrossBuffers::take(frame, h, m),
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
        self.skip.begin(x);
        if cx.h.hyper.is_some() {
            self.hyper.begin(cx.h, x);
        }
        if let Some(w) = &w.stacks {
            self.stacks.begin(w, x);
        }
    }

    /// Before the norm of what the mixer reads: of `s.branch` with residual attention, else of
    /// `s.x`.
    pub(super) fn before_mixer(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Layer,
        s: &mut Residual<'_>,
    ) {
        if let Some(w) = &w.alt_up {
            self.streams.predict(cx, w, s.x);
        }
        self.stacks.enter(cx, s.x);
        if let (Some(w), Some(spec)) = (w.ngrams.as_deref(), &cx.h.ngrams) {
            self.ngrams.add(cx, (spec, w), self.hyper.all_mut());
        }
        if let (Some(w), Some(spec)) = (&w.hyper, &cx.h.hyper) {
            let h = cx.h;
            self.hyper.read(cx.of_all(), (h, spec, &w.mixer), s.x);
        }
        if let Some(w) = &w.residual_scores {
            self.checkpoints.begin_layer(cx, w, s.x, s.branch);
        }
    }

    /// Adds the mixer's output to streams, if that is all there is to it.
    pub(super) fn takes_mixer(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Layer,
        s: &mut Residual<'_>,
    ) -> bool {
        let (Some(w), Some(spec)) = (&w.hyper, &cx.h.hyper) else {
            return false;
        };
        let h = cx.h;
        self.hyper.write(cx, spec, s.branch);
        self.hyper.read(cx.of_rows(), (h, spec, &w.ffn), s.x);
        true
    }

    /// Before the norm of what the feed-forward layer reads: of `s.branch` with residual attention,
    /// else of `s.x`.
    pub(super) fn before_ffn(&self, cx: &Context<'_, '_>, w: &Layer, s: &mut Residual<'_>) {
        if let Some(w) = &w.residual_scores {
            self.checkpoints.read(cx, &w.ffn, s.x, s.branch);
        }
    }

    /// Adds the feed-forward layer's output to streams, if that is all there is to it.
    pub(super) fn takes_ffn(&mut self, cx: &Context<'_, '_>, w: &Layer, s: &Residual<'_>) -> bool {
        match (&w.hyper, &cx.h.hyper) {
            (Some(_), Some(spec)) => {
                self.hyper.write(cx, spec, s.branch);
                true
            }
            _ => false,
        }
    }

    /// Behind the last layer: makes the residual stream of what there was instead.
    pub(super) fn after_layers(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Weights,
        s: &mut Residual<'_>,
    ) {
        if let Some(spec) = &cx.h.hyper {
            let h = cx.h;
            self.hyper
                .end(cx.of_rows(), (h, spec, w.hyper.as_ref()), s.x);
        }
        if let Some(w) = &w.residual_scores {
            self.checkpoints.read(cx, w, s.x, s.branch);
            s.x.copy_from_slice(s.branch);
        }
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
        self.skip.gather(cx);
        self.hyper.gather(cx);
        self.checkpoints.gather(cx);
    }

    /// Behind the mixer, whose output was added to `s.x`.
    pub(super) fn after_mixer(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w): (&LayerSpec, &Layer),
        s: &mut Residual<'_>,
    ) {
        if w.alt_up.is_some() {
            self.streams.join(s.x);
        }
        if let Some(w) = &w.cross {
            self.cross.add(cx, (spec, w), s);
        }
    }

    /// Behind the feed-forward layer, whose output was added to `s.x`.
    pub(super) fn after_ffn(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w, all): (&LayerSpec, &Layer, &Weights),
        s: &mut Residual<'_>,
    ) {
        if let Some(factor) = w.embd_skip {
            self.skip.add(cx, factor, s.x);
        }
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
