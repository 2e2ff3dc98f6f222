//! What a backward pass carries from layer to layer.

use crate::backward::buffers::{RowCounts, logit_rows};
use crate::compute::arena::Frame;
use crate::compute::linear::{
    Ctx, Product, Scratch, ScratchBackward, Wanted, linear, linear_backward,
};
use crate::compute::weight::Weight;
use crate::forward::sizes::sizes;
use crate::kv::SeqKv;
use crate::layers::hparams::Hparams;
use crate::lora::TargetModule;
use crate::model::Model;
use crate::quant::DType;

/// The lowest part of a layer with a requested gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Below,
    Qkv,
    Output,
    FeedForward,
}

impl Stage {
    pub(super) fn of(site: &TargetModule) -> Stage {
        match site.part() {
            "attn_q" | "attn_k" | "attn_v" | "attn_qkv" => Stage::Qkv,
            "attn_output" => Stage::Output,
            _ => Stage::FeedForward,
        }
    }
}

/// The lowest layer with a requested gradient, and its lowest such part; the number of layers if
/// only the head has one.
pub(super) fn lowest<'a>(
    sites: impl Iterator<Item = &'a TargetModule>,
    n_layer: usize,
) -> (usize, Stage) {
    let place = |site: &TargetModule| match site.layer() {
        Some(layer) => (layer, Stage::of(site)),
        None if site.is_embedding() => (0, Stage::Below),
        None => (n_layer, Stage::Below),
    };
    sites.map(place).min().unwrap_or((n_layer, Stage::Below))
}

/// Shared state of the parts of a backward pass.
pub(super) struct Tape<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) h: &'a Hparams,
    pub(super) pos: usize,
    pub(super) m: usize,
    pub(super) longest: usize,
    pub(super) texts: &'a [BackwardText<'a>],
    pub(super) wanted: Wanted<'a>,
    pub(super) scratch: Scratch<'a>,
    pub(super) scratch_backward: ScratchBackward<'a>,
}

impl<'a> Tape<'a> {
    /// Memory for products, forward and backward.
    pub(super) fn scratch(
        frame: &mut Frame<'a>,
        model: &Model,
        n_threads: usize,
        rank: usize,
        rows: RowCounts,
    ) -> (Scratch<'a>, ScratchBackward<'a>) {
        let (h, arch, m) = (model.hparams(), model.arch(), rows.m);
        let layers = h
            .layers
            .iter()
            .filter_map(|layer| Some((layer, layer.attention()?)));
        let widths = layers.flat_map(|(layer, attn)| {
            let n_expert = layer.ffn.moe().map_or(1, |x| x.n_expert);
            [
                attn.n_q(),
                attn.n_k(),
                attn.n_v(),
                h.n_embd,
                layer.ffn.n_ff(),
                n_expert,
            ]
        });
        // No activations are packed wider than `f32`; for the head that would be too much.
        let widths = widths.map(|n_out| (DType::F32, m, n_out));
        let logits = (
            model.weights().output.w.dtype,
            logit_rows(h, rows),
            h.n_vocab,
        );
        let outputs = widths.chain([logits]);
        let forward = Scratch::take(frame, sizes(model, n_threads).products(), (0, m), rank);
        (
            forward,
            ScratchBackward::take(frame, arch, n_threads, m, h.n_embd, outputs, rank),
        )
    }

    pub(super) fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        linear(self.ctx, &mut self.scratch, x, m, products);
    }

    pub(super) fn linear_backward(
        &mut self,
        x: &[f32],
        m: usize,
        products: &[(&Weight, &[f32])],
        dx: Option<&mut [f32]>,
    ) {
        linear_backward(
            self.ctx,
            &mut self.scratch_backward,
            &mut self.wanted,
            x,
            m,
            products,
            dx,
        );
    }
}

/// A text of a backward pass.
pub(crate) struct BackwardText<'a> {
    pub(crate) tokens: &'a [u32],
    /// The loss depends on the logits from this token on.
    pub(crate) first_output: usize,
    /// Its weight of each token's logits, if it is known: none are computed where it is 0.
    pub(crate) weights: Option<&'a [f32]>,
    pub(crate) kv: &'a SeqKv,
}
