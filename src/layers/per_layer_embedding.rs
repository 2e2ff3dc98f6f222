//! Embeddings for each layer (Gemma 3n and 4): a layer adds a vector of the token, of its own, to the
//! residual stream.

use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::compute::weight::{Linear, Weight};
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::norm::rms_factor;
use crate::layers::norm::weights::Norm;

/// Weights that compute each layer's vector per token: `(norm(proj·x) + table)/√2` from the
/// embeddings `x`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayerInputs {
    /// Embeddings per token, `n_layer·n` values.
    pub(crate) table: Weight,
    pub(crate) proj: Weight,
    /// Norm of the `n` values of a layer.
    pub(crate) norm: Vec<f32>,
}

/// Weights that add such a vector in a layer: `norm(proj·(gelu(gate·x)·vector))`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayer {
    pub(crate) gate: Linear,
    pub(crate) proj: Linear,
    pub(crate) norm: Norm,
}

/// Buffers of embeddings of `n` values for each layer.
pub(crate) struct PerLayerBuffers<'a> {
    /// Of all tokens, `(m, n_layer·n)`, and the rows of their table.
    of_tokens: &'a mut [f32],
    table: &'a mut [f32],
    /// `(m, n)`.
    gate: &'a mut [f32],
}

impl<'a> PerLayerBuffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> PerLayerBuffers<'a> {
        let n = h.per_layer_embd.unwrap_or(0);
        PerLayerBuffers {
            of_tokens: frame.take(m * h.n_layer * n),
            table: frame.take(m * h.n_layer * n),
            gate: frame.take(m * n),
        }
    }

    /// Computes the vectors of all tokens, whose embeddings are `x`: `(norm(proj·x) + table)/√2`.
    pub(crate) fn begin(&mut self, cx: &mut Context<'_, '_>, w: &PerLayerInputs, x: &[f32]) {
        let (arch, h, n) = (cx.arch, cx.h, w.proj.n_out);
        let m = x.len() / h.n_embd;
        let products = &mut [Product::of_weight(&w.proj, self.of_tokens, m)];
        cx.of_all().linear(x, m, products);
        let gguf = cx.gguf;
        let (scale, table_scale) = (1.0 / (h.n_embd as f32).sqrt(), (w.norm.len() as f32).sqrt());
        let (workers, slots) = (cx.threads.when(m > 1), &cx.slots);
        workers.for_chunk_pairs(self.of_tokens, n, self.table, n, |row, x, of_token| {
            // Images have the vectors of the first token, the one that pads.
            let token = slots.image(row).map_or_else(|| slots.token(row).1, |_| 0);
            let table = w.table.data_of_rows(gguf, token..token + 1);
            arch.dequantize(w.table.dtype, table, of_token);
            let layers = x
                .chunks_exact_mut(w.norm.len())
                .zip(of_token.chunks_exact(w.norm.len()));
            for (x, of_token) in layers {
                x.iter_mut().for_each(|x| *x *= scale);
                let factor = rms_factor(arch, x, h.norm_eps);
                for ((x, w), of_token) in x.iter_mut().zip(&w.norm).zip(of_token) {
                    *x = (*x * factor * w + of_token * table_scale)
                        * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        });
    }

    /// Keeps the rows that the last layer computes.
    pub(crate) fn gather(&mut self, cx: &Context<'_, '_>) {
        let n = cx.h.n_layer * cx.h.per_layer_embd.unwrap_or(0);
        cx.gather(self.of_tokens, n);
    }

    /// What the layer adds to the residual stream `x`, before its norm: `proj·(gelu(gate·x)·vector)`.
    pub(crate) fn branch(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &PerLayer,
        x: &[f32],
        branch: &mut [f32],
    ) {
        let (arch, h, layer, n) = (cx.arch, cx.h, cx.layer, w.gate.w.n_out);
        let m = x.len() / h.n_embd;
        let (gate, of_tokens) = (&mut self.gate[..m * n], &*self.of_tokens);
        let mut on = cx.of_rows();
        on.linear(x, m, &mut [Product::of(&w.gate, gate, m)]);
        on.threads.when(m > 1).for_chunks(gate, n, |row, gate| {
            let of_token = &of_tokens[(row * h.n_layer + layer) * n..][..n];
            arch.gelu_mul(gate, of_token);
        });
        on.linear(gate, m, &mut [Product::of(&w.proj, branch, m)]);
    }
}
