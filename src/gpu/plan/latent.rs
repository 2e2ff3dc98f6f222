//! Latent attention in a plan: its queries, keys and values. Attention itself is the usual one.

use crate::compute::weight::Weight;
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::choices::Choices;
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::{Input, Intermediate, Name, Planner, size};
use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::latent::weights::Latent;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;

impl<'m> Planner<'m, '_> {
    /// Multiplies each of `n_head` heads of the current rows by its own matrix of a stack.
    pub(super) fn by_head(
        &mut self,
        stack: &Weight,
        n_head: usize,
        x: Name<'m>,
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        let n_head = size(n_head)?;
        let runs = self.choose(Choices {
            n_used: n_head,
            n_expert: n_head,
            most_each: 1,
            chosen: Name::Input(Input::Heads(n_head)),
            counts: Left(Intermediate::HeadCounts),
            lists: Left(Intermediate::HeadLists),
        });
        let of = Some((self.rows.set, n_head));
        if self.heads_listed != of {
            self.list_rows(&runs);
            self.heads_listed = of;
        }
        self.stacked_product(&runs, stack, (x, 1), y)?;
        self.expert_terms(stack, (x, 1), runs.choices, y)
    }

    /// Queries of the current rows, not rotated yet.
    pub(super) fn latent_queries(
        &mut self,
        (spec, latent): (&AttnSpec, &LatentSpec),
        (w, weights): (&'m Attn, &'m Latent),
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        use Intermediate::{HeadsIn, HeadsOut, Q, QLow, QLowNormed, QWhole};
        let x = match &weights.q_a {
            Some((q_a, norm)) => {
                self.linear(q_a, normed, Left(QLow))?;
                self.row_norm(norm, self.h.norm_eps, Left(QLow), Left(QLowNormed))?;
                Left(QLowNormed)
            }
            None => normed,
        };
        let Some(k_b) = &weights.k_b else {
            return self.linear(&w.wq, x, Left(Q));
        };
        let &LatentSpec {
            kv_rank,
            n_plain,
            n_rot,
            ..
        } = latent;
        self.linear(&w.wq, x, Left(QWhole))?;
        let n_head = spec.n_head;
        let part = |buffer, head_dim, first| HeadPart::of(Left(buffer), (n_head, head_dim), first);
        let whole = |first| part(QWhole, latent.head_dim(), first);
        let q = |first| part(Q, spec.head_dim, first);
        self.copy_heads((n_head, n_plain), whole(0), part(HeadsIn, n_plain, 0))?;
        self.by_head(k_b, n_head, Left(HeadsIn), Left(HeadsOut))?;
        self.copy_heads((n_head, kv_rank), part(HeadsOut, kv_rank, 0), q(0))?;
        self.copy_heads((n_head, n_rot), whole(n_plain), q(kv_rank))
    }

    /// Keys with their rotation, and values of all rows.
    pub(super) fn latent_keys_values(
        &mut self,
        (spec, latent): (&AttnSpec, &LatentSpec),
        (w, weights): (&'m Attn, &'m Latent),
        normed: Name<'m>,
    ) -> Result<[Name<'m>; 2], GpuError> {
        use Intermediate::{K, KRotated, KvLatent, KvLow, KvNormed, KvWhole, V};
        let &LatentSpec {
            kv_rank,
            n_plain,
            n_rot,
            head_dim_v,
            absorbed,
            ..
        } = latent;
        self.linear(&w.wk, normed, Left(KvLow))?;
        let row = |buffer, n, first| HeadPart::of(Left(buffer), (1, n), first);
        let low = |first| row(KvLow, kv_rank + n_rot, first);
        self.copy_heads((1, kv_rank), low(0), row(KvLatent, kv_rank, 0))?;
        let (latents, eps) = (Left(KvLatent), self.h.norm_eps);
        self.row_norm(&weights.kv_norm, eps, latents, Left(KvNormed))?;
        self.copy_heads((1, n_rot), low(kv_rank), row(KRotated, n_rot, 0))?;
        if let Some(norm) = &weights.rot_norm {
            let args = NormArgs {
                n: size(n_rot)?,
                n_rows: self.rows.n,
                eps,
            };
            let buffers = [Left(KRotated), Name::Constant(norm)];
            self.plain(&RMS_NORM_HEADS, &args, &buffers);
        }
        self.rotate(spec, Left(KRotated), 1, [n_rot, 0])?;
        if absorbed {
            let key = |first| row(K, kv_rank + n_rot, first);
            self.copy_heads((1, kv_rank), row(KvNormed, kv_rank, 0), key(0))?;
            self.copy_heads((1, n_rot), row(KRotated, n_rot, 0), key(kv_rank))?;
            return Ok([Left(K), Left(KvNormed)]);
        }
        self.linear(&w.wv, Left(KvNormed), Left(KvWhole))?;
        let n_head = spec.n_head;
        let part = |buffer, head_dim, first| HeadPart::of(Left(buffer), (n_head, head_dim), first);
        let whole = |first| part(KvWhole, n_plain + head_dim_v, first);
        let key = |first| part(K, n_plain + n_rot, first);
        let of_all = HeadPart {
            head: 0,
            ..row(KRotated, n_rot, 0)
        };
        self.copy_heads((n_head, n_plain), whole(0), key(0))?;
        self.copy_heads((n_head, n_rot), of_all, key(n_plain))?;
        self.copy_heads((n_head, head_dim_v), whole(n_plain), part(V, head_dim_v, 0))?;
        Ok([Left(K), Left(V)])
    }
}
