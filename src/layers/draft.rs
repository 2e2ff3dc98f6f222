//! Layers of a model that drafts for another: they see keys and values of their own, or the other
//! model's.

pub(crate) mod memory;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::AttnPartial;
use crate::compute::linear::{Product, RowCtx};
use crate::kv::SeqKv;
use crate::layers::attention::attn_params;
use crate::layers::cross;
use crate::layers::dense_ffn;
use crate::layers::draft::memory::DraftMemory;
use crate::layers::draft::weights::DraftLayer;
use crate::layers::hparams::Hparams;
use crate::layers::norm::weights::Norm;
use crate::layers::norm::{norm_row, rms_factor};
use crate::layers::rope::RopeTables;
use std::ops::Range;

/// Most rows that are multiplied as generated ones: with few of them that takes less time than a
/// prompt's panels.
pub(crate) const FEW: usize = 32;
/// Most tokens that are drafted for one pass of a sequence: kernels take 16 rows at a time.
pub(crate) const MAX_DRAFT: usize = 15;

/// Buffers of a layer for some rows, reused by the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftBuffers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    normed: Vec<f32>,
    branch: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// What `m` rows of a drafter are computed with.
pub(crate) struct DraftRows<'a, 'b> {
    pub(crate) on: RowCtx<'a, 'b>,
    pub(crate) h: &'a Hparams,
    pub(crate) rope: &'a RopeTables,
    pub(crate) m: usize,
    /// For a feed-forward layer, [`dense_ffn::bytes`].
    pub(crate) inner: &'a mut [u8],
    pub(crate) buffers: &'a mut DraftBuffers,
}

impl DraftBuffers {
    /// Bytes that they take.
    pub(crate) fn bytes(&self) -> u64 {
        let DraftBuffers {
            q,
            k,
            v,
            out,
            normed,
            branch,
            cos,
            sin,
        } = self;
        let all = [q, k, v, out, normed, branch, cos, sin];
        all.into_iter().map(vec_bytes).sum()
    }
}

/// `n` values of a buffer, which has room for no more than were ever wanted.
pub(crate) fn room(buffer: &mut Vec<f32>, n: usize) -> &mut [f32] {
    buffer.reserve_exact(n.saturating_sub(buffer.len()));
    buffer.resize(n, 0.0);
    buffer
}

/// Bytes that a buffer takes.
pub(crate) fn vec_bytes(buffer: &Vec<f32>) -> u64 {
    (buffer.capacity() * size_of::<f32>()) as u64
}

impl DraftRows<'_, '_> {
    /// The norm of each row.
    pub(crate) fn norm(&self, norm: &Norm, x: &[f32], y: &mut [f32]) {
        let n = norm.w.len();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            norm_row(self.on.arch, self.h, norm, x, y);
        }
    }

    /// The rows are those of positions from `position` on.
    pub(crate) fn turn_from(&mut self, position: usize) {
        let n = RopeTables::n_angles(self.h, self.m);
        let DraftBuffers { cos, sin, .. } = &mut *self.buffers;
        let (cos, sin) = (room(cos, n), room(sin, n));
        self.rope
            .angles(self.on.arch, position, (0..self.m, self.m), cos, sin);
    }

    /// Norms heads, and rotates them.
    fn place(&self, layer: &DraftLayer, norm: Option<&[f32]>, x: &mut [f32]) {
        let (arch, d) = (self.on.arch, layer.attn.head_dim);
        let (cos, sin) = (&self.buffers.cos[..], &self.buffers.sin[..]);
        let rotation = layer
            .attn
            .rope
            .map(|id| self.rope.rotation(arch, id, self.m, cos, sin));
        let n_head = x.len() / self.m / d;
        for (i, head) in x.chunks_exact_mut(d).enumerate() {
            if let Some(norm) = norm {
                let factor = rms_factor(arch, head, self.h.norm_eps);
                let scaled = head.iter_mut().zip(norm);
                scaled.for_each(|(x, w)| *x = *x * factor * w);
            }
            if let Some(rotation) = rotation {
                rotation.apply(i / n_head, head);
            }
        }
    }

    /// Appends keys and values of `y`, `(m, n_in)`, to the layer's memory.
    pub(crate) fn remember(&mut self, layer: &DraftLayer, y: &[f32], memory: &mut DraftMemory) {
        let Some(w) = &layer.kv else { return };
        let (m, spec) = (self.m, &layer.attn);
        let [mut k, mut v] = [&mut self.buffers.k, &mut self.buffers.v].map(std::mem::take);
        let (keys, values) = (room(&mut k, m * spec.n_k()), room(&mut v, m * spec.n_v()));
        match &w.wv {
            Some(wv) => {
                let products = &mut [Product::of(&w.wk, keys, m), Product::of(wv, values, m)];
                self.on.linear(y, m, products);
            }
            None => {
                self.on.linear(y, m, &mut [Product::of(&w.wk, keys, m)]);
                values.copy_from_slice(keys);
                for head in values.chunks_exact_mut(spec.head_dim_v) {
                    let factor = rms_factor(self.on.arch, head, self.h.norm_eps);
                    head.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
        if spec.value_scale != 1.0 {
            values.iter_mut().for_each(|x| *x *= spec.value_scale);
        }
        self.place(layer, w.k_norm.as_deref(), keys);
        memory.append(m, keys, values);
        (self.buffers.k, self.buffers.v) = (k, v);
    }

    /// Queries of `y`, `(m, n_in)`.
    fn queries(&mut self, layer: &DraftLayer, y: &[f32]) -> Vec<f32> {
        let mut q = std::mem::take(&mut self.buffers.q);
        let queries = room(&mut q, self.m * layer.attn.n_q());
        let product = Product::of(&layer.wq, queries, self.m);
        self.on.linear(y, self.m, &mut [product]);
        self.place(layer, layer.q_norm.as_deref(), queries);
        q
    }

    /// Adds what the rows of `y` find in the layer's memory to `x`, then the feed-forward layer;
    /// row `i` sees the positions `seen(i)`.
    pub(crate) fn layer(
        &mut self,
        layer: &DraftLayer,
        (memory, seen): (&DraftMemory, &(dyn Fn(usize) -> Range<usize> + Sync)),
        y: &[f32],
        x: &mut [f32],
    ) {
        let (arch, spec) = (self.on.arch, &layer.attn);
        let q = self.queries(layer, y);
        let mut out = std::mem::take(&mut self.buffers.out);
        let outputs = room(&mut out, self.m * spec.n_out());
        self.on
            .threads
            .for_chunks(outputs, spec.head_dim_v, |task, out| {
                let (row, head) = (task / spec.n_head, task % spec.n_head);
                let found = memory.rows(seen(row));
                let sink = layer.sinks.as_ref().map(|sinks| sinks[head]);
                let q = &q[task * spec.head_dim..][..spec.head_dim];
                cross::attend(arch, spec, found, (head / spec.n_group(), sink), q, out);
            });
        (self.buffers.q, self.buffers.out) = (q, out);
        self.finish(layer, x);
    }

    /// The same of one row, in keys and values that another model has at `seen`.
    pub(crate) fn layer_of_other(
        &mut self,
        layer: &DraftLayer,
        (kv, of, seen): (&SeqKv, usize, Range<usize>),
        y: &[f32],
        x: &mut [f32],
    ) {
        let (arch, spec) = (self.on.arch, &layer.attn);
        let mut q = self.queries(layer, y);
        let mut out = std::mem::take(&mut self.buffers.out);
        let (n, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let outputs = room(&mut out, spec.n_out());
        for query in q.chunks_exact_mut(d) {
            kv.transform_query(arch, of, query);
        }
        let (params, range) = (
            attn_params(spec, 0, true),
            (seen.start as u32, seen.end as u32),
        );
        let ranges = vec![range; n];
        self.on.threads.for_chunks(outputs, n * d_v, |head, out| {
            let [mut max, mut sum] = [vec![f32::NEG_INFINITY; n], vec![0.0; n]];
            out.fill(0.0);
            let mut total = AttnPartial {
                out,
                max: &mut max,
                sum: &mut sum,
            };
            let q = &q[head * n * d..][..n * d];
            for piece in kv.pieces(of, range) {
                kv.attention(arch, (of, head), piece, &mut total, q, &ranges, &params);
            }
            kv.finish_attention(arch, of, &mut total, &params);
        });
        (self.buffers.q, self.buffers.out) = (q, out);
        self.finish(layer, x);
    }

    /// The product with attention's output, and the feed-forward layer.
    fn finish(&mut self, layer: &DraftLayer, x: &mut [f32]) {
        let m = self.m;
        let [mut normed, mut branch] =
            [&mut self.buffers.normed, &mut self.buffers.branch].map(std::mem::take);
        let (b, y) = (room(&mut branch, x.len()), room(&mut normed, x.len()));
        self.on
            .linear(&self.buffers.out, m, &mut [Product::of(&layer.wo, b, m)]);
        self.add(layer.post_attn_norm.as_ref(), (b, y), x);
        self.norm(&layer.ffn_norm, x, y);
        dense_ffn::feed_forward(&mut self.on, &layer.ffn, y, m, self.inner, b);
        self.add(layer.post_ffn_norm.as_ref(), (b, y), x);
        if layer.scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= layer.scale);
        }
        (self.buffers.normed, self.buffers.branch) = (normed, branch);
    }

    /// Adds a branch, behind its norm, to the residual stream.
    fn add(&self, norm: Option<&Norm>, (branch, buffer): (&mut [f32], &mut [f32]), x: &mut [f32]) {
        match norm {
            Some(norm) => {
                self.norm(norm, branch, buffer);
                self.on.arch.add(x, buffer);
            }
            None => self.on.arch.add(x, branch),
        }
    }
}
