//! Attention, backwards.

use crate::arch::{AttnBackward, MAX_HEAD_DIM};
use crate::backward::buffers::{AttnBuffers, KEYS};
use crate::backward::saved::SavedLayer;
use crate::backward::tape::{BackwardText, Tape};
use crate::compute::linear::{Ctx, Product};
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::attention::{MAX_GROUP, attn_params, attn_tiles};
use crate::layers::norm::head_norms;
use crate::layers::rope::Rotation;

/// Computes `b.dq`, `b.dk` and `b.dv` from `b.dattn`: the gradients of the results of `wq`, `wk`
/// and `wv`.
pub(super) fn attention_backward(
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
pub(super) fn text_attention_backward(
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
