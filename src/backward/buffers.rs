//! The buffers of a backward pass.

use crate::compute::arena::{Frame, counted};
use crate::layers::attention::attn_tiles;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::rope::RopeTables;
use crate::model::Model;
use std::ops::Range;

/// Keys whose gradient one task computes.
pub(super) const KEYS: usize = 32;

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
    pub(super) attn: AttnBuffers<'a>,
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a mut [f32],
    pub(super) inner: &'a mut [f32],
    pub(super) dinner: &'a mut [f32],
    pub(super) moe: MoeBuffers<'a>,
}

pub(super) struct AttnBuffers<'a> {
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
    pub(super) dattn: &'a mut [f32],
    /// Of one text at a time. By KV head: `(n_head_kv, m_padded, n_group, …)`.
    pub(super) q_by_head: &'a mut [f32],
    pub(super) dq_by_head: &'a mut [f32],
    pub(super) dout_by_head: &'a mut [f32],
    pub(super) delta: &'a mut [f32],
    pub(super) lse: &'a mut [f32],
    /// `(n_head_kv, pos + m, …)`.
    pub(super) k_by_head: &'a mut [f32],
    pub(super) v_by_head: &'a mut [f32],
    /// `(n_head_kv, m, …)`, `m` rounded up to [`KEYS`].
    pub(super) dk_by_head: &'a mut [f32],
    pub(super) dv_by_head: &'a mut [f32],
}

pub(super) struct MoeBuffers<'a> {
    pub(super) router: &'a mut [f32],
    pub(super) drouter: &'a mut [f32],
    pub(super) chosen: &'a mut [u32],
    pub(super) weights: &'a mut [f32],
    pub(super) dweights: &'a mut [f32],
    pub(super) rows: &'a mut [u32],
    pub(super) x: &'a mut [f32],
    pub(super) y: &'a mut [f32],
    pub(super) dx: &'a mut [f32],
    pub(super) dy: &'a mut [f32],
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

impl AttnBuffers<'_> {
    /// Those of one text, whose tokens have the rows `rows`.
    pub(super) fn of_text(
        &mut self,
        spec: &AttnSpec,
        rows: Range<usize>,
        pos: usize,
    ) -> AttnBuffers<'_> {
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
    pub(super) fn take(
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
