//! Cross attention: a second attention of a layer, to the memory that an encoder left of another
//! text (T5, arXiv 1910.10683).

pub(crate) mod memory;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::context::Context;
use crate::layers::cross::weights::CrossAttn;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::residual::Residual;

/// Queries and outputs of all heads.
pub(crate) struct CrossBuffers<'a> {
    q: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> CrossBuffers<'a> {
    /// For `m` rows.
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> CrossBuffers<'a> {
        let of_layers = h.layers.iter().filter(|layer| layer.cross);
        let widths = of_layers.filter_map(LayerSpec::attention);
        let [q, out] = [AttnSpec::n_q, AttnSpec::n_out]
            .map(|width| frame.take(m * widths.clone().map(width).max().unwrap_or(0)));
        CrossBuffers { q, out }
    }

    /// Adds what the layer's rows find in the memory of their sequence to the residual stream.
    pub(crate) fn add(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w): (&LayerSpec, &CrossAttn),
        s: &mut Residual<'_>,
    ) {
        let Some(attn) = spec.attention() else { return };
        let (m, rows) = (cx.n_rows(), cx.rows);
        cx.norm(Some(&w.norm), s.x, s.normed);
        let q = &mut self.q[..m * attn.n_q()];
        cx.of_rows()
            .linear(s.normed, m, &mut [Product::of(&w.q, q, m)]);
        let out = &mut self.out[..m * attn.n_out()];
        for slot in &*cx.slots {
            let Some(memory) = slot.memory.map(|memory| &memory.layers[cx.layer]) else {
                continue;
            };
            let rows = rows.range(slot);
            let q = &q[rows.start * attn.n_q()..rows.end * attn.n_q()];
            let out = &mut out[rows.start * attn.n_out()..rows.end * attn.n_out()];
            cx.threads.for_chunks(out, attn.head_dim_v, |task, out| {
                let q = &q[task * attn.head_dim..][..attn.head_dim];
                let head = task % attn.n_head / attn.n_group();
                attend(cx.arch, attn, (&memory.k, &memory.v), (head, None), q, out);
            });
        }
        cx.of_rows()
            .linear(out, m, &mut [Product::of(&w.output, s.branch, m)]);
        s.add(cx, spec, None);
    }
}

/// `out = softmax(scale·q·Kᵀ)·V` of key/value head `head`; a sink is a score of no key.
pub(crate) fn attend(
    arch: Arch,
    spec: &AttnSpec,
    (k, v): (&[f32], &[f32]),
    (head, sink): (usize, Option<f32>),
    q: &[f32],
    out: &mut [f32],
) {
    let (d, d_v) = (spec.head_dim, spec.head_dim_v);
    let (mut max, mut sum) = sink.map_or((f32::NEG_INFINITY, 0.0), |sink| (sink, 1.0));
    out.fill(0.0);
    let keys = k.chunks_exact(spec.n_k());
    for (k, v) in keys.zip(v.chunks_exact(spec.n_v())) {
        let score = spec.scale * arch.dot(q, &k[head * d..][..d]);
        if score > max || score.is_nan() {
            let factor = (max - score).exp();
            out.iter_mut().for_each(|x| *x *= factor);
            (max, sum) = (score, sum * factor);
        }
        let weight = (score - max).exp();
        sum += weight;
        arch.add_scaled(out, &v[head * d_v..][..d_v], weight);
    }
    out.iter_mut().for_each(|x| *x /= sum);
}
