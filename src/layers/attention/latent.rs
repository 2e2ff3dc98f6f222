//! Queries, keys and values of latent attention; the attention itself is the usual one. See
//! [`LatentSpec`](crate::model::LatentSpec).

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::MAX_HEAD_DIM;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowCtx};
use crate::compute::weight::Weight;
use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::latent::weights::Latent;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;

/// Intermediate results: `m_kv` rows for keys and values, `m` rows for the rest.
pub(crate) struct LatentBuffers<'a> {
    /// Low-rank queries `(m, q_rank)`, before and after their norm.
    q_low: &'a mut [f32],
    q_normed: &'a mut [f32],
    /// Queries as computed by their matrix, `(m, n_head, n_plain + n_rot)`.
    q: &'a mut [f32],
    /// Latents and rotated parts, `(m_kv, kv_rank + n_rot)`.
    kv: &'a mut [f32],
    /// Latents after their norm, `(m_kv, kv_rank)`; and, unless absorbed, all heads' keys and
    /// values, `(m_kv, n_head, n_plain + head_dim_v)`.
    normed: &'a mut [f32],
    wide: &'a mut [f32],
    /// If absorbed, operands and results of a head's matrix, and the output of all heads.
    x: &'a mut [f32],
    y: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> LatentBuffers<'a> {
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        spec: &AttnSpec,
        m_kv: usize,
        m: usize,
    ) -> LatentBuffers<'a> {
        let sizes = spec.latent.map_or([0; 9], |latent| {
            let LatentSpec {
                q_rank,
                kv_rank,
                n_plain,
                n_rot,
                head_dim_v,
                absorbed,
                rot_norm: _,
            } = latent;
            let (q_rank, n) = (q_rank.unwrap_or(0), spec.n_head);
            let [whole, by_head] = if absorbed { [0, m] } else { [m_kv, 0] };
            [
                m * q_rank,
                m * q_rank,
                m * n * latent.head_dim(),
                m_kv * (kv_rank + n_rot),
                whole * kv_rank,
                whole * n * (n_plain + head_dim_v),
                by_head * n_plain.max(kv_rank),
                by_head * kv_rank.max(head_dim_v),
                by_head * n * head_dim_v,
            ]
        });
        let [q_low, q_normed, q, kv, normed, wide, x, y, out] = sizes.map(|n| frame.take(n));
        LatentBuffers {
            q_low,
            q_normed,
            q,
            kv,
            normed,
            wide,
            x,
            y,
            out,
        }
    }

    /// Keys and values of `m` rows of `x`; keys are not rotated yet.
    pub(crate) fn keys_values(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        (spec, latent, w, weights): (&AttnSpec, &LatentSpec, &Attn, &Latent),
        eps: f32,
        (x, m): (&[f32], usize),
        k: &mut [f32],
        v: &mut [f32],
    ) {
        let &LatentSpec {
            kv_rank,
            n_plain,
            n_rot,
            head_dim_v,
            absorbed,
            ..
        } = latent;
        let (arch, workers, n_kv) = (on.arch, on.threads.when(m > 1), kv_rank + n_rot);
        on.linear(x, m, &mut [Product::of(&w.wk, self.kv, m)]);
        let kv = &*self.kv;
        let latents = if absorbed { &mut *v } else { &mut *self.normed };
        workers.for_chunks(latents, kv_rank, |row, to| {
            arch.rms_norm(to, &kv[row * n_kv..][..kv_rank], &weights.kv_norm, eps);
        });
        if let Some(norm) = &weights.rot_norm {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            for kv in self.kv[..m * n_kv].chunks_exact_mut(n_kv) {
                let (rotated, buffer) = (&mut kv[kv_rank..], &mut buffer[..n_rot]);
                buffer.copy_from_slice(rotated);
                arch.rms_norm(rotated, buffer, norm, eps);
            }
        }
        let (kv, latents) = (&*self.kv, &*latents);
        if absorbed {
            workers.for_chunks(k, n_kv, |row, k| {
                k[..kv_rank].copy_from_slice(&latents[row * kv_rank..][..kv_rank]);
                k[kv_rank..].copy_from_slice(&kv[row * n_kv + kv_rank..][..n_rot]);
            });
            return;
        }
        on.linear(latents, m, &mut [Product::of(&w.wv, self.wide, m)]);
        let wide = &*self.wide;
        workers.for_chunk_pairs(k, spec.n_k(), v, spec.n_v(), |row, k, v| {
            let heads = k
                .chunks_exact_mut(n_plain + n_rot)
                .zip(v.chunks_exact_mut(head_dim_v));
            let wide = wide[row * spec.n_head * (n_plain + head_dim_v)..]
                .chunks_exact(n_plain + head_dim_v);
            for ((k, v), wide) in heads.zip(wide) {
                k[..n_plain].copy_from_slice(&wide[..n_plain]);
                k[n_plain..].copy_from_slice(&kv[row * n_kv + kv_rank..][..n_rot]);
                v.copy_from_slice(&wide[n_plain..]);
            }
        });
    }

    /// Queries of `m` rows of `x`, not rotated yet.
    pub(crate) fn queries(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        (spec, latent, w, weights): (&AttnSpec, &LatentSpec, &Attn, &Latent),
        eps: f32,
        (x, m): (&[f32], usize),
        q: &mut [f32],
    ) {
        let (arch, workers) = (on.arch, on.threads.when(m > 1));
        let x = match &weights.q_a {
            Some((q_a, norm)) => {
                let (low, n) = (&mut *self.q_low, norm.len());
                on.linear(x, m, &mut [Product::of(q_a, low, m)]);
                let low = &*low;
                let normed =
                    |row: usize, to: &mut [f32]| arch.rms_norm(to, &low[row * n..][..n], norm, eps);
                workers.for_chunks(self.q_normed, n, normed);
                &*self.q_normed
            }
            None => x,
        };
        let Some(k_b) = &weights.k_b else {
            return on.linear(x, m, &mut [Product::of(&w.wq, q, m)]);
        };
        on.linear(x, m, &mut [Product::of(&w.wq, self.q, m)]);
        let &LatentSpec {
            kv_rank,
            n_plain,
            n_rot,
            ..
        } = latent;
        let from = &*self.q;
        workers.for_chunks(q, spec.n_q(), |row, q| {
            let from =
                from[row * spec.n_head * latent.head_dim()..].chunks_exact(latent.head_dim());
            for (q, from) in q.chunks_exact_mut(kv_rank + n_rot).zip(from) {
                q[kv_rank..].copy_from_slice(&from[n_plain..]);
            }
        });
        let (from, to) = ((from, latent.head_dim()), (q, kv_rank + n_rot));
        by_head(on, (k_b, spec.n_head, m), from, to, (self.x, self.y));
    }

    /// The low-rank vectors from which queries of `m` rows were computed, `(m, n)`.
    pub(crate) fn queries_low(&self, n: usize, m: usize) -> &[f32] {
        &self.q_normed[..m * n]
    }

    /// From `m` rows of latents, the output of attention in the absorbed form, to values: `(m,
    /// n_head·head_dim_v)`.
    pub(crate) fn values(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        (spec, latent, w): (&AttnSpec, &LatentSpec, &Attn),
        m: usize,
        latents: &[f32],
    ) -> &[f32] {
        let (from, to) = (
            (latents, latent.kv_rank),
            (&mut *self.out, latent.head_dim_v),
        );
        by_head(on, (&w.wv.w, spec.n_head, m), from, to, (self.x, self.y));
        self.out
    }
}

/// Multiplies each head of `from` by its own matrix. Operands and results are at the beginning of
/// each head's values in `from` and `to`.
fn by_head(
    on: &mut RowCtx<'_, '_>,
    (stack, n_head, m): (&Weight, usize, usize),
    (from, from_dim): (&[f32], usize),
    (to, to_dim): (&mut [f32], usize),
    (x, y): (&mut [f32], &mut [f32]),
) {
    let workers = on.threads.when(m > 1);
    for head in 0..n_head {
        let w = stack.matrix(head, n_head);
        let (x, y) = (&mut x[..m * w.n_in], &mut y[..m * w.n_out]);
        workers.for_chunks(x, w.n_in, |row, x| {
            x.copy_from_slice(&from[(row * n_head + head) * from_dim..][..w.n_in]);
        });
        on.linear(x, m, &mut [Product::of_weight(&w, y, m)]);
        let y = &*y;
        workers.for_chunks(to, n_head * to_dim, |row, to| {
            to[head * to_dim..][..w.n_out].copy_from_slice(&y[row * w.n_out..][..w.n_out]);
        });
    }
}
