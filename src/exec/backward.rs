//! One backward pass: from what the logits should have been to gradients of an adapter.
//!
//! It mirrors `forward.rs` function for function, and goes through the layers from the last one to
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

use super::activation::squared_relu;
use super::arena::{Arena, Frame, counted};
use super::forward::{
    MAX_GROUP, RopeTables, Rotation, attn_params, attn_tiles, choose_experts, divisor, head_norms,
    norm, sigmoid,
};
use super::linear::{
    Ctx, Product, RowAdapters, Scratch, ScratchBackward, Sizes, Wanted, linear, linear_backward,
};
use super::probe::{Probe, Tap};
use crate::arch::{AttnBackward, MAX_HEAD_DIM};
use crate::cache::SeqKv;
use crate::exec::SessionError;
use crate::lora::{Adapter, Attached, Gradients};
use crate::model::{
    Activation, Attn, AttnSpec, FeedForward, Ffn, Gating, Hparams, Layer, LayerSpec, Linear, Model,
    Moe, MoeSpec, Norm, NormKind, Norms, QkNorm, Site, Weight,
};
use crate::quant::DType;
use crate::team::Crew;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of logits that are computed at a time, about as much as a layer of a 1B model needs for
/// 512 tokens.
const LOGIT_BYTES: usize = 64 << 20;
/// Keys whose gradient one task computes.
const KEYS: usize = 32;

/// Replaces the logits of token `i` of text `t` by the gradient of the loss with respect to them,
/// and returns the loss.
pub(crate) type Objective<'a> = dyn Fn(usize, usize, &mut [f32]) -> f64 + Sync + 'a;

/// The lowest part of a layer with a requested gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Below,
    Qkv,
    Output,
    FeedForward,
}

impl Stage {
    fn of(site: &Site) -> Stage {
        match site.part() {
            "attn_q" | "attn_k" | "attn_v" | "attn_qkv" => Stage::Qkv,
            "attn_output" => Stage::Output,
            _ => Stage::FeedForward,
        }
    }
}

/// The lowest layer with a requested gradient, and its lowest such part; the number of layers if
/// only the head has one.
fn lowest<'a>(sites: impl Iterator<Item = &'a Site>, n_layer: usize) -> (usize, Stage) {
    let place = |site: &Site| match site.layer() {
        Some(layer) => (layer, Stage::of(site)),
        None if site.is_embedding() => (0, Stage::Below),
        None => (n_layer, Stage::Below),
    };
    sites.map(place).min().unwrap_or((n_layer, Stage::Below))
}

/// Limit on the bytes of the outputs of `gate`, `up` and `wq` that are kept instead of recomputed,
/// which is the most expensive part of recomputation: as much as four layers of a 1B model have for
/// 512 tokens, and about as much as one layer's buffers.
const KEPT_BYTES: usize = 144 << 20;

/// Rows that a forward pass keeps for the backward pass, for each layer from `lowest` on. A session
/// reuses the memory.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    lowest: usize,
    /// Inputs of the layers, and the output of the last one.
    x: Vec<Vec<f32>>,
    layers: Vec<SavedLayer>,
    /// Of the backward pass itself: the gradient of the output of the layer that comes next.
    dx: Vec<f32>,
}

#[derive(Debug, Default)]
struct SavedLayer {
    /// Output of attention, before `wo`.
    attn: Vec<f32>,
    /// Between attention and feed-forward.
    mid: Vec<f32>,
    /// Output of either branch, if a norm follows it.
    attn_out: Vec<f32>,
    ffn_out: Vec<f32>,
    has_post_norms: (bool, bool),
    /// Outputs of `gate`, `up` and `wq`, if they are kept.
    gate: Vec<f32>,
    up: Vec<f32>,
    q: Vec<f32>,
    keeps_products: bool,
    /// Values of these per token.
    n_products: usize,
}

impl Saved {
    /// Clears the memory for the gradients at `sites` of `m` tokens.
    pub(crate) fn prepare<'a>(
        &mut self,
        model: &Model,
        sites: impl Iterator<Item = &'a Site>,
        m: usize,
    ) {
        let layers = &model.weights().layers;
        let (lowest, _) = lowest(sites, layers.len());
        self.lowest = lowest;
        self.x.resize_with(layers.len() + 1 - lowest, Vec::new);
        self.x.iter_mut().for_each(Vec::clear);
        self.layers
            .resize_with(layers.len() - lowest, SavedLayer::default);
        let mut room = KEPT_BYTES / size_of::<f32>();
        for (saved, layer) in self.layers.iter_mut().zip(&layers[lowest..]) {
            saved.has_post_norms = (
                layer.post_attn_norm.is_some(),
                layer.post_ffn_norm.is_some(),
            );
            saved.n_products = match &layer.ffn {
                FeedForward::Dense(ffn) => {
                    let n_q = layer.attn.as_ref().map_or(0, |attn| attn.wq.w.n_out);
                    (1 + usize::from(ffn.gate.is_some())) * ffn.up.w.n_out + n_q
                }
                FeedForward::Moe(_) | FeedForward::Both(_) | FeedForward::None => usize::MAX,
            };
            let products = saved.n_products.saturating_mul(m);
            saved.keeps_products = products <= room;
            if saved.keeps_products {
                room -= products;
            }
            let SavedLayer {
                attn,
                mid,
                attn_out,
                ffn_out,
                gate,
                up,
                q,
                ..
            } = saved;
            [attn, mid, attn_out, ffn_out, gate, up, q]
                .into_iter()
                .for_each(Vec::clear);
        }
    }
}

impl Saved {
    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> u64 {
        let of_layers = self.layers.iter().flat_map(|saved| {
            let SavedLayer {
                attn,
                mid,
                attn_out,
                ffn_out,
                gate,
                up,
                q,
                ..
            } = saved;
            [attn, mid, attn_out, ffn_out, gate, up, q]
        });
        self.x
            .iter()
            .chain(of_layers)
            .chain([&self.dx])
            .map(|rows| (rows.capacity() * size_of::<f32>()) as u64)
            .sum()
    }
}

/// Bytes that the gradient of an adapter takes with all tokens of a text of `m` at position `pos`
/// as targets: buffers of the backward pass, and rows that the forward pass keeps for it. `rank` is
/// that of all adapters together.
pub(super) fn gradient_bytes(
    (model, n_threads): (&Model, usize),
    adapter: &Adapter,
    rank: usize,
    (m, pos): (usize, usize),
) -> [u64; 2] {
    let h = model.hparams();
    let rows = RowCounts {
        m,
        longest: m,
        n_outputs: m,
    };
    let buffers = counted(|frame| {
        Buffers::take(frame, model, rows, pos);
        Tape::scratch(frame, model, n_threads, rank, rows);
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

impl Probe for Saved {
    fn tensor(&mut self, tap: Tap, layer: usize, values: &[f32]) {
        let saved = layer
            .checked_sub(self.lowest)
            .and_then(|i| self.layers.get_mut(i));
        match (tap, saved) {
            (Tap::InpEmbd, _) if self.lowest == 0 => self.x[0].extend_from_slice(values),
            (Tap::LOut, _) if layer + 1 >= self.lowest => {
                self.x[layer + 1 - self.lowest].extend_from_slice(values)
            }
            (Tap::KqvOut, Some(saved)) => saved.attn.extend_from_slice(values),
            (Tap::FfnInp, Some(saved)) => saved.mid.extend_from_slice(values),
            (Tap::AttnOut, Some(saved)) if saved.has_post_norms.0 => {
                saved.attn_out.extend_from_slice(values)
            }
            (Tap::FfnGate, Some(saved)) if saved.keeps_products => {
                saved.gate.extend_from_slice(values)
            }
            (Tap::FfnUp, Some(saved)) if saved.keeps_products => saved.up.extend_from_slice(values),
            (Tap::Qcur, Some(saved)) if saved.keeps_products => saved.q.extend_from_slice(values),
            (Tap::FfnOut, Some(saved)) if saved.has_post_norms.1 => {
                saved.ffn_out.extend_from_slice(values)
            }
            _ => {}
        }
    }
}

/// A text of a backward pass.
pub(crate) struct BackwardText<'a> {
    pub(crate) tokens: &'a [u32],
    /// The loss depends on the logits from this token on.
    pub(crate) first_output: usize,
    pub(crate) kv: &'a SeqKv,
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

/// Numbers of rows of a pass.
#[derive(Clone, Copy)]
struct RowCounts {
    m: usize,
    /// Of the longest text.
    longest: usize,
    n_outputs: usize,
}

/// The buffers of a pass.
struct Buffers<'a> {
    /// Memory for [`HeadBuffers`] or [`LayerBuffers`].
    inner: &'a mut [u8],
    /// See [`RopeTables::angles`], of the longest text; `back` are the negative sines, which
    /// rotate back.
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    back: &'a mut [f32],
}

/// Buffers for some rows of logits.
struct HeadBuffers<'a> {
    normed: &'a mut [f32],
    dnormed: &'a mut [f32],
    logits: &'a mut [f32],
}

/// Buffers of a layer.
struct LayerBuffers<'a> {
    normed: &'a mut [f32],
    /// Gradients of the inputs of feed-forward and attention.
    dnormed: &'a mut [f32],
    dnormed_attn: &'a mut [f32],
    dbranch: &'a mut [f32],
    attn: AttnBuffers<'a>,
    gate: &'a mut [f32],
    up: &'a mut [f32],
    inner: &'a mut [f32],
    dinner: &'a mut [f32],
    moe: MoeBuffers<'a>,
}

struct AttnBuffers<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dattn: &'a mut [f32],
    /// Of one text at a time. By KV head: `(n_head_kv, m_padded, n_group, …)`.
    q_by_head: &'a mut [f32],
    dq_by_head: &'a mut [f32],
    dout_by_head: &'a mut [f32],
    delta: &'a mut [f32],
    lse: &'a mut [f32],
    /// `(n_head_kv, pos + m, …)`.
    k_by_head: &'a mut [f32],
    v_by_head: &'a mut [f32],
    /// `(n_head_kv, m, …)`, `m` rounded up to [`KEYS`].
    dk_by_head: &'a mut [f32],
    dv_by_head: &'a mut [f32],
}

struct MoeBuffers<'a> {
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

/// Rows of logits that are computed at a time.
fn logit_rows(h: &Hparams, n_outputs: usize) -> usize {
    (LOGIT_BYTES / size_of::<f32>() / h.n_vocab).clamp(1, n_outputs.max(1))
}

impl<'a> Buffers<'a> {
    fn take(frame: &mut Frame<'a>, model: &Model, rows: RowCounts, pos: usize) -> Buffers<'a> {
        let (
            h,
            RowCounts {
                m,
                longest,
                n_outputs,
            },
        ) = (model.hparams(), rows);
        let head = counted(|frame| HeadBuffers::take(frame, h, n_outputs));
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
    fn take(frame: &mut Frame<'a>, h: &Hparams, n_outputs: usize) -> HeadBuffers<'a> {
        let rows = logit_rows(h, n_outputs);
        HeadBuffers {
            normed: frame.take(rows * h.n_embd),
            dnormed: frame.take(rows * h.n_embd),
            logits: frame.take(rows * h.n_vocab),
        }
    }
}

impl AttnBuffers<'_> {
    /// Those of one text, whose tokens have the rows `rows`.
    fn of_text(&mut self, spec: &AttnSpec, rows: Range<usize>, pos: usize) -> AttnBuffers<'_> {
        let (n_q, n_k, n_v, n_attn) = (spec.n_q(), spec.n_k(), spec.n_v(), spec.n_out());
        let of = |n: usize| rows.start * n..rows.end * n;
        let m = rows.len();
        let m_padded = attn_tiles(spec, m).1;
        let (m_keys, n_kv) = (m.next_multiple_of(KEYS), pos + m);
        AttnBuffers {
            q: &mut self.q[of(n_q)],
            k: &mut self.k[of(n_k)],
            dq: &mut self.dq[of(n_q)],
            dk: &mut self.dk[of(n_k)],
            dv: &mut self.dv[of(n_v)],
            dattn: &mut self.dattn[of(n_attn)],
            q_by_head: &mut self.q_by_head[..m_padded * n_q],
            dq_by_head: &mut self.dq_by_head[..m_padded * n_q],
            dout_by_head: &mut self.dout_by_head[..m_padded * n_attn],
            delta: &mut self.delta[..m_padded * spec.n_head],
            lse: &mut self.lse[..m_padded * spec.n_head],
            k_by_head: &mut self.k_by_head[..n_kv * n_k],
            v_by_head: &mut self.v_by_head[..n_kv * n_v],
            dk_by_head: &mut self.dk_by_head[..m_keys * n_k],
            dv_by_head: &mut self.dv_by_head[..m_keys * n_v],
        }
    }
}

impl<'a> LayerBuffers<'a> {
    fn take(
        frame: &mut Frame<'a>,
        h: &Hparams,
        (spec, attn): (&LayerSpec, &AttnSpec),
        (m, longest): (usize, usize),
        pos: usize,
    ) -> LayerBuffers<'a> {
        let n_ff = spec.ffn.n_ff();
        let (n_q, n_k, n_v, n_attn) = (attn.n_q(), attn.n_k(), attn.n_v(), attn.n_out());
        let m_padded = attn_tiles(attn, longest).1;
        let (m_keys, n_kv) = (longest.next_multiple_of(KEYS), pos + longest);
        let (n_expert, n_used, m_moe) = spec
            .ffn
            .moe()
            .map_or((0, 0, 0), |x| (x.n_expert, x.n_used, m));
        LayerBuffers {
            normed: frame.take(m * h.n_embd),
            dnormed: frame.take(m * h.n_embd),
            dnormed_attn: frame.take(m * h.n_embd),
            dbranch: frame.take(m * h.n_embd),
            attn: AttnBuffers {
                q: frame.take(m * n_q),
                k: frame.take(m * n_k),
                dq: frame.take(m * n_q),
                dk: frame.take(m * n_k),
                dv: frame.take(m * n_v),
                dattn: frame.take(m * n_attn),
                q_by_head: frame.take(m_padded * n_q),
                dq_by_head: frame.take(m_padded * n_q),
                dout_by_head: frame.take(m_padded * n_attn),
                delta: frame.take(m_padded * attn.n_head),
                lse: frame.take(m_padded * attn.n_head),
                k_by_head: frame.take(n_kv * n_k),
                v_by_head: frame.take(n_kv * n_v),
                dk_by_head: frame.take(m_keys * n_k),
                dv_by_head: frame.take(m_keys * n_v),
            },
            gate: frame.take(m * n_ff),
            up: frame.take(m * n_ff),
            inner: frame.take(m * n_ff),
            dinner: frame.take(m * n_ff),
            moe: MoeBuffers {
                router: frame.take(m_moe * n_expert),
                drouter: frame.take(m_moe * n_expert),
                chosen: frame.take(m_moe * n_used),
                weights: frame.take(m_moe * n_used),
                dweights: frame.take(m_moe * n_used),
                rows: frame.take(m_moe),
                x: frame.take(m_moe * h.n_embd),
                y: frame.take(m_moe * h.n_embd),
                dx: frame.take(m_moe * h.n_embd),
                dy: frame.take(m_moe * h.n_embd),
            },
        }
    }
}

/// Shared state of the parts of a backward pass.
struct Tape<'a> {
    ctx: Ctx<'a>,
    h: &'a Hparams,
    pos: usize,
    m: usize,
    longest: usize,
    texts: &'a [BackwardText<'a>],
    wanted: Wanted<'a>,
    scratch: Scratch<'a>,
    scratch_backward: ScratchBackward<'a>,
}

impl<'a> Tape<'a> {
    /// Memory for products, forward and backward.
    fn scratch(
        frame: &mut Frame<'a>,
        model: &Model,
        n_threads: usize,
        rank: usize,
        RowCounts { m, n_outputs, .. }: RowCounts,
    ) -> (Scratch<'a>, ScratchBackward<'a>) {
        let (h, arch) = (model.hparams(), model.arch());
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
            logit_rows(h, n_outputs),
            h.n_vocab,
        );
        let outputs = widths.chain([logits]);
        let forward = Scratch::take(frame, Sizes::of(model, n_threads), (0, m), rank);
        (
            forward,
            ScratchBackward::take(frame, arch, n_threads, m, h.n_embd, outputs, rank),
        )
    }

    fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        linear(self.ctx, &mut self.scratch, x, m, products);
    }

    fn linear_backward(
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

/// Runs a backward pass after its forward pass up to where it pauses, and adds to `gradients`;
/// returns whether it is complete. What is computed in between does not matter to it.
pub(crate) fn backward(
    pass: BackwardPass<'_>,
    crew: &Crew<'_>,
    arena: &mut Arena,
    gradients: &mut Gradients,
) -> Result<bool, SessionError> {
    let BackwardPass {
        model,
        adapters,
        target,
        rope,
        texts,
        pos,
        saved,
        objective,
        cancelled,
        at,
        pauses,
    } = pass;
    let (h, w) = (model.hparams(), model.weights());
    let ctx = Ctx {
        arch: model.arch(),
        crew,
        gguf: model.gguf(),
        adapters: RowAdapters::All(adapters),
        n_generated: 0,
        adapter_nanos: None,
    };
    let lengths = texts.iter().map(|text| text.tokens.len());
    let (m, longest) = (lengths.clone().sum(), lengths.clone().max().unwrap_or(0));
    let starts = lengths.scan(0, |end, n| Some(std::mem::replace(end, *end + n)));
    // Row, text and token of each output.
    let outputs = texts.iter().zip(starts).enumerate();
    let outputs = outputs.flat_map(|(t, (text, start))| {
        (text.first_output..text.tokens.len()).map(move |i| (start + i, t, i))
    });
    let outputs: Vec<(usize, usize, usize)> = outputs.collect();
    let rows = RowCounts {
        m,
        longest,
        n_outputs: outputs.len(),
    };
    let (lowest, lowest_stage) = lowest(
        gradients.terms().map(|(i, _)| &gradients.sites()[i]),
        h.n_layer,
    );
    let rank = adapters.iter().map(|attached| attached.max_rank).sum();
    let (mut b, (scratch, scratch_backward)) = arena.plan(|frame| {
        (
            Buffers::take(frame, model, rows, pos),
            Tape::scratch(frame, model, crew.n_threads(), rank, rows),
        )
    })?;
    let wanted = Wanted {
        adapters,
        adapter: target,
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
    rope.angles(ctx.arch, pos, (0..longest, longest), b.cos, b.sin);
    b.back
        .iter_mut()
        .zip(&*b.sin)
        .for_each(|(back, sin)| *back = -sin);

    let head_alone = lowest == h.n_layer;
    if at.losses.is_none() {
        let output = (w.output_norm.as_ref(), &w.output);
        let losses = head(
            &mut tape,
            output,
            saved,
            &outputs,
            objective,
            cancelled,
            &mut b,
            !head_alone,
        );
        *at = BackwardAt {
            losses: Some(losses.ok_or(SessionError::Cancelled)?),
            layer: h.n_layer,
        };
        if pauses && !head_alone {
            return Ok(false);
        }
    }
    while at.layer > lowest {
        if cancelled() {
            return Err(SessionError::Cancelled);
        }
        at.layer -= 1;
        let i = at.layer;
        let (x, kept) = (&saved.x[i - lowest], &mut saved.layers[i - lowest]);
        let stage = if i == lowest {
            lowest_stage
        } else {
            Stage::Below
        };
        layer_backward(
            &mut tape,
            (&h.layers[i], &w.layers[i]),
            i,
            x,
            kept,
            rope,
            stage,
            &mut saved.dx,
            &mut b,
        );
        if pauses && i > lowest {
            return Ok(false);
        }
    }
    if !head_alone {
        embed_backward(&mut tape, &w.token_embd, &saved.dx);
    }
    Ok(true)
}

/// Computes the loss of each text, and its gradient with respect to the output of the last layer in
/// `saved.dx`, if that is needed. Logits are computed some rows at a time.
fn head(
    tape: &mut Tape<'_>,
    (output_norm, output): (Option<&Norm>, &Linear),
    saved: &mut Saved,
    outputs: &[(usize, usize, usize)],
    objective: &Objective<'_>,
    cancelled: &dyn Fn() -> bool,
    b: &mut Buffers<'_>,
    want_dx: bool,
) -> Option<Vec<f64>> {
    let (h, ctx) = (tape.h, tape.ctx);
    let n = h.n_embd;
    let mut sums = vec![0.0; tape.texts.len()];
    let Saved { x, dx, .. } = saved;
    let Some(x) = x.last() else { return Some(sums) };
    dx.clear();
    dx.resize(tape.m * n, 0.0);
    let HeadBuffers {
        normed,
        dnormed,
        logits,
    } = HeadBuffers::take(&mut Frame::of(b.inner), h, outputs.len());
    for outputs in outputs.chunks(logit_rows(h, outputs.len())) {
        if cancelled() {
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
        let losses: Vec<AtomicU64> = (0..m).map(|_| AtomicU64::new(0)).collect();
        ctx.crew.for_chunks(logits, h.n_vocab, |i, logits| {
            let (scale, cap) = (h.logit_scale, h.final_softcap.unwrap_or(0.0));
            if scale != 1.0 {
                logits.iter_mut().for_each(|x| *x *= scale);
            }
            let mut slopes = Vec::new();
            if cap > 0.0 {
                logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
                slopes.extend(logits.iter().map(|x| 1.0 - (x / cap) * (x / cap)));
            }
            let (_, text, token) = outputs[i];
            let loss = objective(text, token, logits);
            losses[i].store(loss.to_bits(), Ordering::Relaxed);
            logits
                .iter_mut()
                .zip(slopes)
                .for_each(|(dx, slope)| *dx *= slope);
            if scale != 1.0 {
                logits.iter_mut().for_each(|dx| *dx *= scale);
            }
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

/// Turns `dx` from the gradient of a layer's output into that of its input `x`, or stops at
/// `stage`.
fn layer_backward(
    tape: &mut Tape<'_>,
    (spec, layer): (&LayerSpec, &Layer),
    i: usize,
    x: &[f32],
    saved: &mut SavedLayer,
    rope: &RopeTables,
    stage: Stage,
    dx: &mut [f32],
    Buffers {
        inner,
        cos,
        sin,
        back,
    }: &mut Buffers<'_>,
) {
    let (ctx, h, m) = (tape.ctx, tape.h, tape.m);
    // What `Hparams::without_gradient` names does not come here.
    let (Some(attn), Some(attn_weights)) = (spec.attention(), &layer.attn) else {
        return;
    };
    let mut b = LayerBuffers::take(
        &mut Frame::of(inner),
        h,
        (spec, attn),
        (m, tape.longest),
        tape.pos,
    );
    let parallel = spec.norms == Norms::Shared;
    let scale = spec.residual_scale;
    branch_backward(
        ctx,
        h,
        scale,
        layer.post_ffn_norm.as_ref(),
        &saved.ffn_out,
        dx,
        b.dbranch,
    );
    if parallel {
        norm(ctx, h, layer.attn_norm.as_ref(), x, b.normed);
    } else {
        norm(ctx, h, layer.ffn_norm.as_ref(), &saved.mid, b.normed);
    }
    let below = stage < Stage::FeedForward;
    match &layer.ffn {
        FeedForward::Dense(ffn) => {
            let kept = saved.keeps_products;
            let up = if kept { &mut *saved.up } else { &mut *b.up };
            let gate = if kept && ffn.gate.is_some() {
                &mut *saved.gate
            } else {
                &mut *b.gate
            };
            let io = FfnBuffers {
                gate,
                up,
                inner: b.inner,
                dinner: b.dinner,
                y: None,
                kept,
            };
            let dnormed = below.then_some(&mut *b.dnormed);
            feed_forward_backward(tape, ffn, b.normed, m, b.dbranch, dnormed, io);
        }
        FeedForward::Moe(moe) => experts_backward(tape, moe, &mut b),
        FeedForward::Both(_) | FeedForward::None => {}
    }
    if !below {
        return;
    }
    if !parallel {
        norm_backward(ctx, h, layer.ffn_norm.as_ref(), &saved.mid, b.dnormed, dx);
    }

    branch_backward(
        ctx,
        h,
        scale,
        layer.post_attn_norm.as_ref(),
        &saved.attn_out,
        dx,
        b.dbranch,
    );
    let below = stage < Stage::Output;
    let dattn = below.then_some(&mut *b.attn.dattn);
    tape.linear_backward(&saved.attn, m, &[(&attn_weights.wo.w, b.dbranch)], dattn);
    if !below {
        return;
    }
    if !parallel {
        norm(ctx, h, layer.attn_norm.as_ref(), x, b.normed);
    }
    let rotations = attn
        .rope
        .map(|id| [&**sin, &**back].map(|sin| rope.rotation(ctx.arch, id, tape.longest, cos, sin)));
    attention_backward(
        tape,
        (attn, attn_weights),
        i,
        saved,
        b.normed,
        &mut b.attn,
        rotations,
    );
    let a = &b.attn;
    let (wq, wk, wv) = (&attn_weights.wq.w, &attn_weights.wk.w, &attn_weights.wv.w);
    let products = [(wq, &*a.dq), (wk, &*a.dk), (wv, &*a.dv)];
    let below = stage < Stage::Qkv;
    tape.linear_backward(
        b.normed,
        m,
        &products,
        below.then_some(&mut *b.dnormed_attn),
    );
    if below {
        if parallel {
            let dnormed = &*b.dnormed;
            ctx.crew.for_chunks(b.dnormed_attn, h.n_embd, |i, dx| {
                ctx.arch.add(dx, &dnormed[i * h.n_embd..][..h.n_embd])
            });
        }
        norm_backward(ctx, h, layer.attn_norm.as_ref(), x, b.dnormed_attn, dx);
    }
}

/// Adds to `dx` the gradient of the `x` of [`norm`].
fn norm_backward(
    ctx: Ctx<'_>,
    h: &Hparams,
    norm: Option<&Norm>,
    x: &[f32],
    dy: &[f32],
    dx: &mut [f32],
) {
    let n = h.n_embd;
    ctx.crew.when(dx.len() > n).for_chunks(dx, n, |i, dx| {
        let (x, dy) = (&x[i * n..][..n], &dy[i * n..][..n]);
        match (norm, h.norm) {
            (None, _) => ctx.arch.add(dx, dy),
            (Some(norm), NormKind::Rms) => {
                ctx.arch.rms_norm_backward(dx, dy, x, &norm.w, h.norm_eps)
            }
            (Some(norm), NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain) => {
                ctx.arch.layer_norm_backward(dx, dy, x, &norm.w, h.norm_eps)
            }
        }
    });
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
    ctx.crew.for_chunks(dbranch, n, |i, dbranch| match post {
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

/// Computes `b.dq`, `b.dk` and `b.dv` from `b.dattn`: the gradients of the results of `wq`, `wk`
/// and `wv`.
fn attention_backward(
    tape: &mut Tape<'_>,
    (spec, w): (&AttnSpec, &Attn),
    i: usize,
    saved: &SavedLayer,
    normed: &[f32],
    b: &mut AttnBuffers<'_>,
    rotations: Option<[Rotation<'_>; 2]>,
) {
    let m = tape.m;

    // Recomputes queries, if they were not kept; of the keys only what a norm needs, as they are in
    // the cache.
    if !saved.keeps_products {
        tape.linear(normed, m, &mut [Product::of(&w.wq, b.q, m)]);
    }
    if w.k_norm.is_some() {
        tape.linear(normed, m, &mut [Product::of(&w.wk, b.k, m)]);
    }
    let mut first = 0;
    for text in tape.texts {
        let rows = first..first + text.tokens.len();
        first = rows.end;
        let of = |n: usize| rows.start * n..rows.end * n;
        let attn = &saved.attn[of(spec.n_out())];
        let kept = saved.keeps_products.then(|| &saved.q[of(spec.n_q())]);
        text_attention_backward(
            tape,
            (spec, w),
            i,
            text,
            (kept, attn),
            b.of_text(spec, rows, tape.pos),
            rotations,
        );
    }
}

/// [`attention_backward`] of one text, once the products are recomputed.
fn text_attention_backward(
    tape: &Tape<'_>,
    (spec, w): (&AttnSpec, &Attn),
    i: usize,
    text: &BackwardText<'_>,
    (kept, attn): (Option<&[f32]>, &[f32]),
    b: AttnBuffers<'_>,
    rotations: Option<[Rotation<'_>; 2]>,
) {
    let (Ctx { arch, crew, .. }, h, pos) = (tape.ctx, tape.h, tape.pos);
    let (m, kv, window) = (text.tokens.len(), text.kv, spec.window);
    let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
    let (tile, m_padded) = attn_tiles(spec, m);
    let rotate = |token: usize, x: &mut [f32]| {
        rotations
            .iter()
            .for_each(|[there, _]| there.apply(token, x))
    };
    let rotate_back =
        |token: usize, x: &mut [f32]| rotations.iter().for_each(|[_, back]| back.apply(token, x));
    let (q_norm, k_norm) = head_norms(spec, w);
    let params = attn_params(spec, 0, true);
    let full_norms = if spec.qk_norm == Some(QkNorm::Full) {
        (&w.q_norm, &w.k_norm)
    } else {
        (&None, &None)
    };
    let q = kept.unwrap_or(b.q);
    let placed = match full_norms.0 {
        Some(w) => {
            let n = spec.n_q();
            crew.for_chunks(b.dq, n, |token, y| {
                arch.rms_norm(y, &q[token * n..][..n], w, h.norm_eps)
            });
            &*b.dq
        }
        None => q,
    };
    crew.for_chunks(b.q_by_head, m_padded * n_group * d, |head, to| {
        for (j, to) in to.chunks_exact_mut(d).take(m * n_group).enumerate() {
            let (token, q_head) = (j / n_group, head * n_group + j % n_group);
            let from = &placed[(token * spec.n_head + q_head) * d..][..d];
            match q_norm {
                Some(w) => arch.rms_norm(to, from, w, h.norm_eps),
                None => to.copy_from_slice(from),
            }
            rotate(token, to);
        }
    });
    let n_kv = pos + m;
    crew.for_chunk_pairs(
        b.k_by_head,
        n_kv * d,
        b.v_by_head,
        n_kv * d_v,
        |head, k, v| kv.read(arch, (i, head), k, v),
    );
    let dattn = &*b.dattn;
    crew.for_chunk_pairs(
        b.dout_by_head,
        m_padded * n_group * d_v,
        b.delta,
        m_padded * n_group,
        |head, to, delta| {
            let rows = to.chunks_exact_mut(d_v).zip(delta).take(m * n_group);
            for (j, (to, delta)) in rows.enumerate() {
                let row = (j / n_group * spec.n_head + head * n_group + j % n_group) * d_v;
                to.copy_from_slice(&dattn[row..][..d_v]);
                *delta = arch.dot(to, &attn[row..][..d_v]);
            }
        },
    );

    let (q_by_head, dout_by_head, delta) = (&*b.q_by_head, &*b.dout_by_head, &*b.delta);
    let (k_by_head, v_by_head) = (&*b.k_by_head, &*b.v_by_head);
    let n_tiles = m_padded / tile;
    crew.for_chunk_pairs(
        b.dq_by_head,
        tile * n_group * d,
        b.lse,
        tile * n_group,
        |task, dq, lse| {
            let (head, first) = (task / n_tiles, task % n_tiles * tile);
            let n_rows = tile.min(m - first) * n_group;
            let mut ranges = [(0, 0); MAX_GROUP];
            for (j, range) in ranges[..n_rows].iter_mut().enumerate() {
                let end = pos + first + j / n_group + 1;
                *range = (
                    window.map_or(0, |size| end.saturating_sub(size)) as u32,
                    end as u32,
                );
            }
            let row = (head * m_padded + first) * n_group;
            let x = AttnBackward {
                q: &q_by_head[row * d..][..n_rows * d],
                dout: &dout_by_head[row * d_v..][..n_rows * d_v],
                delta: &delta[row..][..n_rows],
                k: &k_by_head[head * n_kv * d..][..n_kv * d],
                v: &v_by_head[head * n_kv * d_v..][..n_kv * d_v],
            };
            arch.attention_queries(
                &mut dq[..n_rows * d],
                &mut lse[..n_rows],
                x,
                &ranges[..n_rows],
                &params,
            );
        },
    );
    let lse = &*b.lse;
    let n_key_tiles = m.div_ceil(KEYS);
    crew.for_chunk_pairs(
        b.dk_by_head,
        KEYS * d,
        b.dv_by_head,
        KEYS * d_v,
        |task, dk, dv| {
            let (head, first) = (task / n_key_tiles, task % n_key_tiles * KEYS);
            let n_rows = KEYS.min(m - first);
            let mut ranges = [(0, 0); KEYS];
            for (j, range) in ranges[..n_rows].iter_mut().enumerate() {
                let end = window.map_or(m, |size| m.min((first + j).saturating_add(size)));
                *range = (((first + j) * n_group) as u32, (end * n_group) as u32);
            }
            let rows = head * m_padded * n_group..(head * m_padded + m) * n_group;
            let x = AttnBackward {
                q: &q_by_head[rows.start * d..rows.end * d],
                dout: &dout_by_head[rows.start * d_v..rows.end * d_v],
                delta: &delta[rows.clone()],
                k: &k_by_head[(head * n_kv + pos + first) * d..][..n_rows * d],
                v: &v_by_head[(head * n_kv + pos + first) * d_v..][..n_rows * d_v],
            };
            let (dk, dv) = (&mut dk[..n_rows * d], &mut dv[..n_rows * d_v]);
            arch.attention_keys(dk, dv, x, &lse[rows], &ranges[..n_rows], &params);
        },
    );

    // Back to rows by token, inverting the rotation and through the norms of heads.
    let place =
        |token: usize, from: &[f32], x: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]| match norm
        {
            Some(w) => {
                let mut buffer = [0.0; MAX_HEAD_DIM];
                buffer[..d].copy_from_slice(from);
                rotate_back(token, &mut buffer[..d]);
                to.fill(0.0);
                arch.rms_norm_backward(to, &buffer[..d], x, w, h.norm_eps);
            }
            None => {
                to.copy_from_slice(from);
                rotate_back(token, to);
            }
        };
    let (k, dq_by_head) = (&*b.k, &*b.dq_by_head);
    crew.for_chunks(b.dq, spec.n_q(), |token, dq| {
        for (q_head, dq) in dq.chunks_exact_mut(d).enumerate() {
            let row = (q_head / n_group * m_padded + token) * n_group + q_head % n_group;
            let x = &q[(token * spec.n_head + q_head) * d..][..d];
            place(token, &dq_by_head[row * d..][..d], x, q_norm, dq);
        }
    });
    let m_keys = m.next_multiple_of(KEYS);
    let (dk_by_head, dv_by_head) = (&*b.dk_by_head, &*b.dv_by_head);
    crew.for_chunk_pairs(b.dk, spec.n_k(), b.dv, spec.n_v(), |token, dk, dv| {
        for (head, (dk, dv)) in dk
            .chunks_exact_mut(d)
            .zip(dv.chunks_exact_mut(d_v))
            .enumerate()
        {
            let (row, x) = (
                head * m_keys + token,
                &k[(token * spec.n_head_kv + head) * d..][..d],
            );
            place(token, &dk_by_head[row * d..][..d], x, k_norm, dk);
            dv.copy_from_slice(&dv_by_head[row * d_v..][..d_v]);
        }
    });
    // Through the norms of all heads together; the buffers by head are free for this.
    let of_queries = (full_norms.0, q, &mut *b.dq, &mut *b.dq_by_head);
    let of_keys = (full_norms.1, k, &mut *b.dk, &mut *b.dk_by_head);
    for (w, x, dx, buffer) in [of_queries, of_keys] {
        let Some(w) = w else { continue };
        let (n, dy) = (w.len(), &*dx);
        crew.for_chunks(&mut buffer[..m * n], n, |token, dx| {
            dx.fill(0.0);
            arch.rms_norm_backward(
                dx,
                &dy[token * n..][..n],
                &x[token * n..][..n],
                w,
                h.norm_eps,
            );
        });
        dx.copy_from_slice(&buffer[..m * n]);
    }
}

/// Rows of a feed-forward layer; `y` for its output, if it is needed.
struct FfnBuffers<'b> {
    gate: &'b mut [f32],
    up: &'b mut [f32],
    inner: &'b mut [f32],
    dinner: &'b mut [f32],
    y: Option<&'b mut [f32]>,
    /// Whether `gate` and `up` are computed already.
    kept: bool,
}

/// Computes `dx` of `y = down(act(gate(x))·up(x))`, or of `down(act(up(x)))`.
fn feed_forward_backward(
    tape: &mut Tape<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    dy: &[f32],
    dx: Option<&mut [f32]>,
    b: FfnBuffers<'_>,
) {
    let Ctx { arch, crew, .. } = tape.ctx;
    let n_ff = ffn.up.w.n_out;
    let [gate, up, inner, dinner] = [b.gate, b.up, b.inner, b.dinner].map(|b| &mut b[..m * n_ff]);
    let workers = crew.when(m > 1);
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
            Activation::ReGlu
            | Activation::SwiGluOai
            | Activation::GeGluErf
            | Activation::GeluErf
            | Activation::Xielu { .. } => refused(),
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
            Activation::ReGlu
            | Activation::SwiGluOai
            | Activation::GeGluErf
            | Activation::GeluErf
            | Activation::Xielu { .. } => refused(),
        }
    });
    match &ffn.gate {
        Some(w_gate) => tape.linear_backward(x, m, &[(&w_gate.w, gate), (&ffn.up.w, up)], dx),
        None => tape.linear_backward(x, m, &[(&ffn.up.w, up)], dx),
    }
}

/// Called for features that [`Hparams::without_gradient`] names, which were refused before.
fn refused() {
    unreachable!("Session::gradient refuses this model");
}

/// Computes `b.dnormed` from `b.dbranch`, through the experts of `b.normed` and through the
/// router's weights. The choice of experts is a constant.
fn experts_backward(tape: &mut Tape<'_>, moe: &Moe, b: &mut LayerBuffers<'_>) {
    let x = &moe.spec;
    let (arch, n, m) = (tape.ctx.arch, tape.h.n_embd, tape.m);
    let e = &mut b.moe;
    tape.linear(b.normed, m, &mut [Product::of(&moe.router, e.router, m)]);
    choose_experts(tape.ctx, moe, e.router, e.chosen, e.weights);
    b.dnormed.fill(0.0);
    for index in 0..x.n_expert {
        let slots = e
            .chosen
            .iter()
            .enumerate()
            .filter(|&(_, &chosen)| chosen == index as u32)
            .map(|(slot, _)| slot);
        let mut n_rows = 0;
        for slot in slots {
            let token = slot / x.n_used;
            e.rows[n_rows] = slot as u32;
            e.x[n_rows * n..][..n].copy_from_slice(&b.normed[token * n..][..n]);
            let dy = e.dy[n_rows * n..][..n]
                .iter_mut()
                .zip(&b.dbranch[token * n..][..n]);
            dy.for_each(|(dy, dbranch)| *dy = e.weights[slot] * dbranch);
            n_rows += 1;
        }
        if n_rows == 0 {
            continue;
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
            let token = slot as usize / x.n_used;
            e.dweights[slot as usize] = arch.dot(&e.y[j * n..][..n], &b.dbranch[token * n..][..n]);
            arch.add(&mut b.dnormed[token * n..][..n], &e.dx[j * n..][..n]);
        }
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
    tape.linear_backward(b.normed, m, &[(&moe.router.w, e.drouter)], Some(e.dx));
    arch.add(b.dnormed, e.dx);

    let Some(shared) = &moe.shared else { return };
    let io = FfnBuffers {
        gate: b.gate,
        up: b.up,
        inner: b.inner,
        dinner: b.dinner,
        y: Some(e.y),
        kept: false,
    };
    if let Some(gate) = &moe.shared_gate {
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
fn choice_backward(
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
