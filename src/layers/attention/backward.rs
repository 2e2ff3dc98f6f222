//! Attention, backwards.

use crate::arch::{Arch, AttnBackward, MAX_HEAD_DIM};
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::SeqKv;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::attention::{MAX_GROUP, attn_params, attn_tiles};
use crate::layers::norm::head_norms;
use crate::layers::rope::Rotation;
use crate::layers::tape::{BackwardText, Tape};
use crate::threads::PoolHandle;
use std::ops::Range;

/// Keys whose gradient one task computes.
const KEYS: usize = 32;

/// Rows of a layer.
pub(crate) struct Buffers<'a> {
    pub(crate) q: &'a mut [f32],
    pub(crate) k: &'a mut [f32],
    pub(crate) dq: &'a mut [f32],
    pub(crate) dk: &'a mut [f32],
    pub(crate) dv: &'a mut [f32],
    pub(crate) dattn: &'a mut [f32],
    /// Of one text at a time. By KV head: `(n_head_kv, m_padded, n_group, …)`.
    pub(crate) q_by_head: &'a mut [f32],
    pub(crate) dq_by_head: &'a mut [f32],
    pub(crate) dout_by_head: &'a mut [f32],
    pub(crate) delta: &'a mut [f32],
    pub(crate) lse: &'a mut [f32],
    /// `(n_head_kv, pos + m, …)`.
    pub(crate) k_by_head: &'a mut [f32],
    pub(crate) v_by_head: &'a mut [f32],
    /// `(n_head_kv, m, …)`, `m` rounded up to [`KEYS`].
    pub(crate) dk_by_head: &'a mut [f32],
    pub(crate) dv_by_head: &'a mut [f32],
}
impl<'a> Buffers<'a> {
    /// Those of `m` rows, of which the longest text has `longest`, behind `pos` keys.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        spec: &AttnSpec,
        (m, longest): (usize, usize),
        pos: usize,
    ) -> Buffers<'a> {
        let (n_q, n_k, n_v, n_attn) = (spec.n_q(), spec.n_k(), spec.n_v(), spec.n_out());
        let m_padded = attn_tiles(spec, longest).1;
        let (m_keys, n_kv) = (longest.next_multiple_of(KEYS), pos + longest);
        Buffers {
            q: frame.take(m * n_q),
            k: frame.take(m * n_k),
            dq: frame.take(m * n_q),
            dk: frame.take(m * n_k),
            dv: frame.take(m * n_v),
            dattn: frame.take(m * n_attn),
            q_by_head: frame.take(m_padded * n_q),
            dq_by_head: frame.take(m_padded * n_q),
            dout_by_head: frame.take(m_padded * n_attn),
            delta: frame.take(m_padded * spec.n_head),
            lse: frame.take(m_padded * spec.n_head),
            k_by_head: frame.take(n_kv * n_k),
            v_by_head: frame.take(n_kv * n_v),
            dk_by_head: frame.take(m_keys * n_k),
            dv_by_head: frame.take(m_keys * n_v),
        }
    }
}

impl Buffers<'_> {
    /// Those of one text, whose tokens have the rows `rows`.
    fn of_text(&mut self, spec: &AttnSpec, rows: Range<usize>, pos: usize) -> Buffers<'_> {
        let (n_q, n_k, n_v, n_attn) = (spec.n_q(), spec.n_k(), spec.n_v(), spec.n_out());
        let of = |n: usize| rows.start * n..rows.end * n;
        let m = rows.len();
        let m_padded = attn_tiles(spec, m).1;
        let (m_keys, n_kv) = (m.next_multiple_of(KEYS), pos + m);
        Buffers {
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

/// Rows that the forward pass kept.
#[derive(Clone, Copy)]
pub(crate) struct KeptRows<'a> {
    /// Queries before norm and rotation, if they were kept.
    pub(crate) q: Option<&'a [f32]>,
    /// What attention gave, before `wo`.
    pub(crate) attn: &'a [f32],
}

/// Computes `b.dq`, `b.dk` and `b.dv` from `b.dattn`: the gradients of the results of `wq`, `wk`
/// and `wv`.
pub(crate) fn attention_backward(
    tape: &mut Tape<'_>,
    (spec, w): (&AttnSpec, &Attn),
    i: usize,
    kept: KeptRows<'_>,
    normed: &[f32],
    b: &mut Buffers<'_>,
    rotations: Option<[Rotation<'_>; 2]>,
) {
    let m = tape.m;

    // Recomputes queries, if they were not kept; of the keys only what a norm needs, as they are in
    // the cache.
    if kept.q.is_none() {
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
        let attn = &kept.attn[of(spec.n_out())];
        let kept = kept.q.map(|q| &q[of(spec.n_q())]);
        let buffers = b.of_text(spec, rows, tape.pos);
        TextAttention::new(tape, (spec, w), text, rotations).backward(
            (i, text.kv),
            (kept, attn),
            buffers,
        );
    }
}

/// Attention of one text. Rows by KV head are those of its tokens, `n_group` each, padded to whole
/// tiles.
struct TextAttention<'a> {
    arch: Arch,
    threads: &'a PoolHandle<'a>,
    spec: &'a AttnSpec,
    w: &'a Attn,
    norm_eps: f32,
    /// Position of the first token, and number of tokens.
    pos: usize,
    m: usize,
    /// Tokens of a tile, and of all tiles.
    tile: usize,
    m_padded: usize,
    /// There and back.
    rotations: Option<[Rotation<'a>; 2]>,
}

impl<'a> TextAttention<'a> {
    fn new(
        tape: &Tape<'a>,
        (spec, w): (&'a AttnSpec, &'a Attn),
        text: &BackwardText<'_>,
        rotations: Option<[Rotation<'a>; 2]>,
    ) -> TextAttention<'a> {
        let m = text.tokens.len();
        let (tile, m_padded) = attn_tiles(spec, m);
        TextAttention {
            arch: tape.ctx.arch,
            threads: tape.ctx.threads,
            spec,
            w,
            norm_eps: tape.h.norm_eps,
            pos: tape.pos,
            m,
            tile,
            m_padded,
            rotations,
        }
    }

    /// [`attention_backward`] of the text with keys and values `kv` in layer `i`, once the products
    /// are recomputed: `kept` are its queries, if they were kept, and `attn` is what attention
    /// gave.
    fn backward(
        &self,
        (i, kv): (usize, &SeqKv),
        (kept, attn): (Option<&[f32]>, &[f32]),
        mut b: Buffers<'_>,
    ) {
        let recomputed: &mut [f32] = std::mem::take(&mut b.q);
        let q = kept.unwrap_or(recomputed);
        self.recompute_queries(q, &mut b);
        let (n_kv, arch) = (self.pos + self.m, self.arch);
        let (d, d_v) = (self.spec.head_dim, self.spec.head_dim_v);
        self.threads.for_chunk_pairs(
            b.k_by_head,
            n_kv * d,
            b.v_by_head,
            n_kv * d_v,
            |head, k, v| kv.read(arch, (i, head), k, v),
        );
        self.sort_outputs(attn, &mut b);
        self.query_gradients(&mut b);
        self.key_gradients(&mut b);
        self.place_gradients(q, &mut b);
        self.full_norms_backward(q, &mut b);
    }

    /// Norms of all heads of queries and of keys together, if the layer has them.
    fn full_norms(&self) -> [Option<&'a Vec<f32>>; 2] {
        let is_full = self.spec.qk_norm == Some(QkNorm::Full);
        [&self.w.q_norm, &self.w.k_norm].map(|w| w.as_ref().filter(|_| is_full))
    }

    /// Computes `b.q_by_head`, normalised and rotated, from the products `q`.
    fn recompute_queries(&self, q: &[f32], b: &mut Buffers<'_>) {
        let (arch, eps, spec) = (self.arch, self.norm_eps, self.spec);
        let (m, n_group, d) = (self.m, spec.n_group(), spec.head_dim);
        let (q_norm, _) = head_norms(spec, self.w);
        let placed = match self.full_norms()[0] {
            Some(w) => {
                let n = spec.n_q();
                self.threads.for_chunks(b.dq, n, |token, y| {
                    arch.rms_norm(y, &q[token * n..][..n], w, eps)
                });
                &*b.dq
            }
            None => q,
        };
        let rotations = &self.rotations;
        let n_by_head = self.m_padded * n_group * d;
        self.threads.for_chunks(b.q_by_head, n_by_head, |head, to| {
            for (j, to) in to.chunks_exact_mut(d).take(m * n_group).enumerate() {
                let (token, q_head) = (j / n_group, head * n_group + j % n_group);
                let from = &placed[(token * spec.n_head + q_head) * d..][..d];
                match q_norm {
                    Some(w) => arch.rms_norm(to, from, w, eps),
                    None => to.copy_from_slice(from),
                }
                if let Some([there, _]) = rotations {
                    there.apply(token, to);
                }
            }
        });
    }

    /// Computes `b.dout_by_head`, and `b.delta`, its products with the outputs `attn`.
    fn sort_outputs(&self, attn: &[f32], b: &mut Buffers<'_>) {
        let (arch, m, n_group) = (self.arch, self.m, self.spec.n_group());
        let (n_head, d_v) = (self.spec.n_head, self.spec.head_dim_v);
        let dattn = &*b.dattn;
        self.threads.for_chunk_pairs(
            b.dout_by_head,
            self.m_padded * n_group * d_v,
            b.delta,
            self.m_padded * n_group,
            |head, to, delta| {
                let rows = to.chunks_exact_mut(d_v).zip(delta).take(m * n_group);
                for (j, (to, delta)) in rows.enumerate() {
                    let row = (j / n_group * n_head + head * n_group + j % n_group) * d_v;
                    to.copy_from_slice(&dattn[row..][..d_v]);
                    *delta = arch.dot(to, &attn[row..][..d_v]);
                }
            },
        );
    }

    /// Computes `b.dq_by_head` and `b.lse` tile by tile.
    fn query_gradients(&self, b: &mut Buffers<'_>) {
        let &TextAttention {
            arch, pos, m, tile, ..
        } = self;
        let (m_padded, window, params) = (
            self.m_padded,
            self.spec.window,
            attn_params(self.spec, 0, true),
        );
        let (n_group, d, d_v) = (
            self.spec.n_group(),
            self.spec.head_dim,
            self.spec.head_dim_v,
        );
        let (q_by_head, dout_by_head, delta) = (&*b.q_by_head, &*b.dout_by_head, &*b.delta);
        let (k_by_head, v_by_head) = (&*b.k_by_head, &*b.v_by_head);
        let (n_kv, n_tiles) = (pos + m, m_padded / tile);
        self.threads.for_chunk_pairs(
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
    }

    /// Computes `b.dk_by_head` and `b.dv_by_head` for [`KEYS`] tokens at a time.
    fn key_gradients(&self, b: &mut Buffers<'_>) {
        let &TextAttention {
            arch,
            pos,
            m,
            m_padded,
            ..
        } = self;
        let (window, params) = (self.spec.window, attn_params(self.spec, 0, true));
        let (n_group, d, d_v) = (
            self.spec.n_group(),
            self.spec.head_dim,
            self.spec.head_dim_v,
        );
        let (q_by_head, dout_by_head, delta) = (&*b.q_by_head, &*b.dout_by_head, &*b.delta);
        let (k_by_head, v_by_head, lse) = (&*b.k_by_head, &*b.v_by_head, &*b.lse);
        let (n_kv, n_key_tiles) = (pos + m, m.div_ceil(KEYS));
        self.threads.for_chunk_pairs(
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
    }

    /// Gradients by KV head back to rows by token, through rotation and norms of heads.
    fn place_gradients(&self, q: &[f32], b: &mut Buffers<'_>) {
        let (arch, eps, spec) = (self.arch, self.norm_eps, self.spec);
        let (m_padded, rotations) = (self.m_padded, &self.rotations);
        let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let (q_norm, k_norm) = head_norms(spec, self.w);
        let rotate_back = |token: usize, x: &mut [f32]| {
            if let Some([_, back]) = rotations {
                back.apply(token, x);
            }
        };
        let place =
            |token: usize, from: &[f32], x: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]| {
                match norm {
                    Some(w) => {
                        let mut buffer = [0.0; MAX_HEAD_DIM];
                        buffer[..d].copy_from_slice(from);
                        rotate_back(token, &mut buffer[..d]);
                        to.fill(0.0);
                        arch.rms_norm_backward(to, &buffer[..d], x, w, eps);
                    }
                    None => {
                        to.copy_from_slice(from);
                        rotate_back(token, to);
                    }
                }
            };
        let (k, dq_by_head) = (&*b.k, &*b.dq_by_head);
        self.threads.for_chunks(b.dq, spec.n_q(), |token, dq| {
            for (q_head, dq) in dq.chunks_exact_mut(d).enumerate() {
                let row = (q_head / n_group * m_padded + token) * n_group + q_head % n_group;
                let x = &q[(token * spec.n_head + q_head) * d..][..d];
                place(token, &dq_by_head[row * d..][..d], x, q_norm, dq);
            }
        });
        let m_keys = self.m.next_multiple_of(KEYS);
        let (dk_by_head, dv_by_head) = (&*b.dk_by_head, &*b.dv_by_head);
        self.threads
            .for_chunk_pairs(b.dk, spec.n_k(), b.dv, spec.n_v(), |token, dk, dv| {
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
    }

    /// Through the norms of all heads together; the buffers by head are free for this.
    fn full_norms_backward(&self, q: &[f32], b: &mut Buffers<'_>) {
        let (arch, eps, m) = (self.arch, self.norm_eps, self.m);
        let [of_queries, of_keys] = self.full_norms();
        let of_queries = (of_queries, q, &mut *b.dq, &mut *b.dq_by_head);
        let of_keys = (of_keys, &*b.k, &mut *b.dk, &mut *b.dk_by_head);
        for (w, x, dx, buffer) in [of_queries, of_keys] {
            let Some(w) = w else { continue };
            let (n, dy) = (w.len(), &*dx);
            self.threads
                .for_chunks(&mut buffer[..m * n], n, |token, dx| {
                    dx.fill(0.0);
                    arch.rms_norm_backward(dx, &dy[token * n..][..n], &x[token * n..][..n], w, eps);
                });
            dx.copy_from_slice(&buffer[..m * n]);
        }
    }
}
