//! The buffers of a backward pass.

use crate::compute::arena::{Frame, counted};
use crate::compute::linear::{Scratch, ScratchBackward};
use crate::forward::sizes::sizes;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::rope::RopeTables;
use crate::layers::{attention, dense_ffn, moe};
use crate::model::Model;
use crate::quant::DType;

/// Bytes of logits that are computed at a time, about as much as a layer of a 1B model needs for
/// 512 tokens.
const LOGIT_BYTES: usize = 64 << 20;

/// Numbers of rows of a pass.
#[derive(Clone, Copy)]
pub(super) struct RowCounts {
    pub(super) m: usize,
    /// Of the longest text.
    pub(super) longest: usize,
    pub(super) n_outputs: usize,
    /// Whether every row of logits has another beside it, that of a reference.
    pub(super) pairs: bool,
}

/// The buffers of a pass.
pub(super) struct Buffers<'a> {
    /// Memory for [`HeadBuffers`] or [`LayerBuffers`].
    pub(super) inner: &'a mut [u8],
    /// See [`RopeTables::angles`], of the longest text; `back` are the negative sines, which
    /// rotate back.
    pub(super) cos: &'a mut [f32],
    pub(super) sin: &'a mut [f32],
    pub(super) back: &'a mut [f32],
}

/// Buffers for some rows of logits.
pub(super) struct HeadBuffers<'a> {
    pub(super) normed: &'a mut [f32],
    pub(super) dnormed: &'a mut [f32],
    pub(super) logits: &'a mut [f32],
    /// Those of the reference, if there is one.
    pub(super) reference: &'a mut [f32],
}

/// Buffers of a layer.
pub(super) struct LayerBuffers<'a> {
    pub(super) normed: &'a mut [f32],
    /// Gradients of the inputs of feed-forward and attention.
    pub(super) dnormed: &'a mut [f32],
    pub(super) dnormed_attn: &'a mut [f32],
    pub(super) dbranch: &'a mut [f32],
    pub(super) attn: attention::backward::Buffers<'a>,
    pub(super) ffn: dense_ffn::backward::Buffers<'a>,
    pub(super) moe: moe::backward::Buffers<'a>,
}

/// Rows of logits that are computed at a time.
pub(super) fn logit_rows(h: &Hparams, rows: RowCounts) -> usize {
    let width = h.n_vocab << u32::from(rows.pairs);
    (LOGIT_BYTES / size_of::<f32>() / width).clamp(1, rows.n_outputs.max(1))
}

impl<'a> Buffers<'a> {
    pub(super) fn take(
        frame: &mut Frame<'a>,
        model: &Model,
        rows: RowCounts,
        pos: usize,
    ) -> Buffers<'a> {
        let (h, m, longest) = (model.hparams(), rows.m, rows.longest);
        let head = counted(|frame| HeadBuffers::take(frame, h, rows));
        let layers = h
            .layers
            .iter()
            .filter_map(|spec| Some((spec, spec.attention()?)));
        let layers = layers
            .map(|spec| counted(|frame| LayerBuffers::take(frame, h, spec, (m, longest), pos)));
        let n_angles = RopeTables::n_angles(h, longest);
        Buffers {
            inner: frame.take(layers.fold(head, usize::max)),
            cos: frame.take(n_angles),
            sin: frame.take(n_angles),
            back: frame.take(n_angles),
        }
    }
}

impl<'a> HeadBuffers<'a> {
    pub(super) fn take(frame: &mut Frame<'a>, h: &Hparams, counts: RowCounts) -> HeadBuffers<'a> {
        let rows = logit_rows(h, counts);
        HeadBuffers {
            normed: frame.take(rows * h.n_embd),
            dnormed: frame.take(rows * h.n_embd),
            logits: frame.take(rows * h.n_vocab),
            reference: frame.take(if counts.pairs { rows * h.n_vocab } else { 0 }),
        }
    }
}

impl<'a> LayerBuffers<'a> {
    pub(super) fn take(
        frame: &mut Frame<'a>,
        h: &Hparams,
        (spec, attn): (&LayerSpec, &AttnSpec),
        (m, longest): (usize, usize),
        pos: usize,
    ) -> LayerBuffers<'a> {
        LayerBuffers {
            normed: frame.take(m * h.n_embd),
            dnormed: frame.take(m * h.n_embd),
            dnormed_attn: frame.take(m * h.n_embd),
            dbranch: frame.take(m * h.n_embd),
            attn: attention::backward::Buffers::take(frame, attn, (m, longest), pos),
            ffn: dense_ffn::backward::Buffers::take(frame, m * spec.ffn.n_ff()),
            moe: moe::backward::Buffers::take(frame, spec.ffn.moe(), m, h.n_embd),
        }
    }
}

/// Memory for products, forward and backward.
pub(super) fn scratch<'a>(
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
