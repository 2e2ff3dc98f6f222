//! Norms and rotations of queries, keys and values, and the cache.

use crate::arch::{Arch, MAX_HEAD_DIM};
use crate::compute::ComputeError;
use crate::compute::probe::HookPoint;
use crate::layers::attention::Attention;
use crate::layers::attention::attend::groups;
use crate::layers::attention::buffers::AttnBuffers;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::context::Context;
use crate::layers::norm::{head_norms, rms_factor};
use crate::layers::rope::Rotation;
use crate::layers::rows::{Rows, SlotView};
use crate::threads::PoolHandle;

impl Attention<'_> {
    /// Takes queries, keys and values through their norms and rotations: keys and values to the
    /// cache, queries to the form that attention reads.
    pub(crate) fn place(
        self,
        cx: &mut Context<'_, '_>,
        inner: &mut [u8],
    ) -> Result<(), ComputeError> {
        let Attention { spec, w, .. } = self;
        let AttnBuffers {
            q,
            k,
            v,
            q_by_head,
            gate,
            q_gate,
            mut index,
            ..
        } = AttnBuffers::of(cx, spec, inner);
        let (arch, threads, eps) = (cx.arch, cx.threads, cx.h.norm_eps);
        let m_kv = Rows::All.n_of(&cx.slots);
        if spec.gate_in_q {
            split_gate(spec.head_dim, q_gate, q, gate);
        }
        cx.tap(HookPoint::Qcur, q);
        if let Some(clip) = spec.clip {
            for x in [&mut *q, k, v] {
                x.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
        if spec.value_scale != 1.0 {
            v.iter_mut().for_each(|v| *v *= spec.value_scale);
        }
        let biases = w.qk_norm_biases.as_ref();
        let rows = [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)];
        for (i, (x, norm)) in rows.into_iter().enumerate() {
            if let Some(norm) = norm {
                let bias = biases.map_or(&[][..], |biases| &biases[i]);
                norm_rows((arch, threads), spec, eps, (norm, bias), x);
            }
        }
        let (q_norm, k_norm) = head_norms(spec, w);
        // The model decides which dimensions form pairs; a session's angles are already in `cos` and
        // `sin`.
        let (cos, sin) = (&*cx.buffers.cos, &*cx.buffers.sin);
        let heads = Heads {
            arch,
            spec,
            eps,
            rotation: spec
                .rope
                .map(|id| cx.slots[0].rope.rotation(arch, id, m_kv, cos, sin)),
        };
        if !spec.shares_kv {
            let workers = threads.when(m_kv > 1);
            if spec.value_norm {
                workers.for_chunks(v, spec.head_dim_v, |_, v| {
                    let factor = rms_factor(arch, v, eps);
                    v.iter_mut().for_each(|v| *v *= factor);
                });
            }
            workers.for_chunks(k, spec.n_k(), |row, k| {
                let mut buffer = [0.0; MAX_HEAD_DIM];
                let buffer = &mut buffer[..spec.head_dim];
                for k in k.chunks_exact_mut(spec.head_dim) {
                    heads.place(row, k, k_norm, buffer);
                    k.copy_from_slice(buffer);
                }
            });
            cx.probe.tensor(HookPoint::K, cx.layer, k);
            cx.probe.tensor(HookPoint::V, cx.layer, v);
            let kv_layer = cx.h.kv_layers[cx.layer];
            for slot in &mut *cx.slots {
                let (pos, range) = (slot.pos(), Rows::All.range(slot));
                let [k, v] = [(&*k, spec.n_k()), (&*v, spec.n_v())]
                    .map(|(x, n)| &x[range.start * n..range.end * n]);
                slot.kv.append(&workers, arch, kv_layer, pos, k, v)?;
                slot.kv.convert(threads, arch, kv_layer);
            }
        }
        let queries = Queries {
            values: q,
            norm: q_norm,
            gains: w.q_gains.as_deref(),
            heads,
            i: cx.h.kv_layers[cx.layer],
            rows: cx.rows,
        };
        queries.write(threads, &cx.slots, q_by_head);
        match (&spec.index, w.index.as_deref()) {
            (Some(spec), Some(w)) => {
                let kv_layer = cx.h.index_kv_layer(cx.layer);
                index.place(cx, (spec, w), kv_layer)?;
            }
            (Some(_), None) if cx.rows == Rows::Outputs => {
                cx.buffers.selection.gather(&cx.slots);
            }
            _ => {}
        }
        cx.tap(HookPoint::QByHead, q_by_head);
        Ok(())
    }
}

/// Splits what comes from a matrix of queries and gates, head by head of `d` values.
fn split_gate(d: usize, q_gate: &[f32], q: &mut [f32], gate: &mut [f32]) {
    let to = q.chunks_exact_mut(d).zip(gate.chunks_exact_mut(d));
    for ((q, gate), from) in to.zip(q_gate.chunks_exact(2 * d)) {
        q.copy_from_slice(&from[..d]);
        gate.copy_from_slice(&from[d..]);
    }
}

/// Norms that whole rows of queries or keys have.
fn norm_rows(
    (arch, threads): (Arch, &PoolHandle<'_>),
    spec: &AttnSpec,
    eps: f32,
    (norm, bias): (&[f32], &[f32]),
    x: &mut [f32],
) {
    let workers = threads.when(x.len() > norm.len());
    match spec.qk_norm {
        Some(QkNorm::Full) => workers.for_chunks(x, norm.len(), |_, row| {
            let factor = rms_factor(arch, row, eps);
            row.iter_mut()
                .zip(norm)
                .for_each(|(x, w)| *x = *x * factor * w);
        }),
        Some(QkNorm::LayerFull) => workers.for_chunks(x, norm.len(), |_, row| {
            // Mean and variance in the kernel's place: it writes elsewhere than it reads.
            let n = row.len() as f32;
            let mean = row.iter().sum::<f32>() / n;
            row.iter_mut().for_each(|x| *x -= mean);
            let factor = 1.0 / (arch.dot(row, row) / n + eps).sqrt();
            let of = norm.iter().zip(bias);
            row.iter_mut()
                .zip(of)
                .for_each(|(x, (w, b))| *x = *x * factor * w + b);
        }),
        Some(QkNorm::RmsByHead) => workers.for_chunks(x, norm.len(), |_, row| {
            for (x, w) in row
                .chunks_exact_mut(spec.head_dim)
                .zip(norm.chunks_exact(spec.head_dim))
            {
                let factor = rms_factor(arch, x, eps);
                x.iter_mut().zip(w).for_each(|(x, w)| *x = *x * factor * w);
            }
        }),
        Some(QkNorm::LayerByHead) => workers.for_chunks(x, norm.len(), |_, row| {
            let (mut from, no_bias) = ([0.0; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
            let (from, no_bias) = (&mut from[..spec.head_dim], &no_bias[..spec.head_dim]);
            for (x, w) in row
                .chunks_exact_mut(spec.head_dim)
                .zip(norm.chunks_exact(spec.head_dim))
            {
                from.copy_from_slice(x);
                arch.layer_norm(x, from, w, no_bias, eps);
            }
        }),
        _ => {}
    }
}

/// Norm and rotation of single heads.
struct Heads<'a> {
    arch: Arch,
    spec: &'a AttnSpec,
    eps: f32,
    rotation: Option<Rotation<'a>>,
}

impl Heads<'_> {
    /// Writes a head of row `row` of the pass to `to`, after norm and rotation.
    fn place(&self, row: usize, from: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]) {
        let norm_last = matches!(
            self.spec.qk_norm,
            Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated)
        );
        match norm {
            Some(w) if norm_last => {
                let mut buffer = [0.0; MAX_HEAD_DIM];
                let buffer = &mut buffer[..from.len()];
                buffer.copy_from_slice(from);
                self.rotate(row, buffer);
                self.arch.rms_norm(to, buffer, w, self.eps);
            }
            Some(w) => {
                self.arch.rms_norm(to, from, w, self.eps);
                self.rotate(row, to);
            }
            None => {
                to.copy_from_slice(from);
                self.rotate(row, to);
            }
        }
    }

    fn rotate(&self, row: usize, head: &mut [f32]) {
        if let Some(rotation) = &self.rotation {
            let spec = self.spec;
            let first = spec.latent.map_or(0, |latent| spec.head_dim - latent.n_rot);
            rotation.apply(row, &mut head[first..]);
        }
    }
}

/// Queries of a layer.
struct Queries<'a> {
    /// `(m, n_head·head_dim)`.
    values: &'a [f32],
    norm: Option<&'a Vec<f32>>,
    /// Factors on heads.
    gains: Option<&'a [f32]>,
    heads: Heads<'a>,
    /// Layer whose keys are read.
    i: usize,
    rows: Rows,
}

impl Queries<'_> {
    /// Writes the queries of all slots, see [`AttnBuffers::q_by_head`].
    fn write(&self, threads: &PoolHandle<'_>, slots: &[SlotView<'_>], q_by_head: &mut [f32]) {
        let spec = self.heads.spec;
        let (n_together, d) = (spec.n_together(), spec.head_dim);
        let mut rest = q_by_head;
        for group in groups(spec, self.rows, slots) {
            let (to, tail) = rest.split_at_mut(group.m_padded * spec.n_q());
            rest = tail;
            match group.slots {
                [slot] if group.n_rows > 1 => {
                    let size = group.m_padded * n_together * d;
                    threads.for_chunks(to, size, |set, to| {
                        let to = to.chunks_exact_mut(d).take(group.n_rows * n_together);
                        for (j, to) in to.enumerate() {
                            let (token, q_head) =
                                (j / n_together, set * n_together + j % n_together);
                            self.head(slot, token, q_head, to);
                        }
                    });
                }
                slots => {
                    let workers = threads.when(slots.len() > 1);
                    workers.for_chunks(to, spec.n_q(), |s, to| {
                        for (head, to) in to.chunks_exact_mut(d).enumerate() {
                            self.head(&slots[s], 0, head, to);
                        }
                    });
                }
            }
        }
    }

    /// Writes head `head` of row `j` of a slot.
    fn head(&self, slot: &SlotView<'_>, j: usize, head: usize, to: &mut [f32]) {
        let (spec, (first, row, _)) = (self.heads.spec, self.rows.of(slot));
        let from = &self.values[(row + j) * spec.n_q() + head * spec.head_dim..][..spec.head_dim];
        let token = first + j;
        self.heads.place(slot.row + token, from, self.norm, to);
        if let Some(gains) = self.gains {
            to.iter_mut().for_each(|x| *x *= gains[head]);
        }
        if let Some(temperature) = spec.temperature {
            let factor = temperature.at(slot.pos() + token);
            to.iter_mut().for_each(|x| *x *= factor);
        }
        slot.kv.transform_query(self.heads.arch, self.i, to);
    }
}
