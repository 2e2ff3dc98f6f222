//! Attention to a window of positions and to compressed blocks of earlier ones.
//!
//! The cache has several layers for it: keys of the window; what tokens give to entries, as long as
//! a block may need it; entries, at the last position of their block (other positions hold zeros);
//! and the same two of an index, if it chooses entries.

mod blocks;
mod buffers;
pub(crate) mod cache;
mod see;
pub(crate) mod spec;
pub(crate) mod weights;

pub(crate) use buffers::bytes;

use crate::compute::ComputeError;
use crate::compute::linear::Product;
use crate::compute::probe::HookPoint;
use crate::layers::compressed::buffers::Buffers;
use crate::layers::compressed::see::Queries;
use crate::layers::compressed::spec::CompressedSpec;
use crate::layers::compressed::weights::Compressed;
use crate::layers::context::Context;
use crate::layers::residual::Residual;
use crate::layers::rope::Rotation;
use crate::layers::rows::Rows;

/// The mixer on `s.normed`; leaves its output for the rows of the layer in `s.branch`. The layer's
/// part of the cache begins at its layer `first`.
pub(crate) fn mixer(
    cx: &mut Context<'_, '_>,
    (spec, w): (&CompressedSpec, &Compressed),
    first: usize,
    s: &mut Residual<'_>,
    inner: &mut [u8],
) -> Result<(), ComputeError> {
    let mut buffers = Buffers::of(cx, spec, inner);
    project(cx, (spec, w), &mut buffers, s);
    let Buffers {
        kv,
        raw,
        q,
        out,
        grouped,
        of_group,
        mixed,
        mut blocks,
        mut index,
        index_q,
        index_weights,
        scores,
        chosen,
        ..
    } = buffers;
    let (arch, threads, eps, d) = (cx.arch, cx.threads, cx.h.norm_eps, spec.head_dim);
    let (m, m_kv) = (cx.n_rows(), Rows::All.n_of(&cx.slots));
    let (cos, sin) = (&*cx.buffers.cos, &*cx.buffers.sin);
    let rotation = cx.slots[0].rope.rotation(arch, spec.rope, m_kv, cos, sin);
    let n_rot = cx.h.rope(spec.rope).n_dims;
    let raw = &*raw;
    threads.when(m_kv > 1).for_chunks(kv, d, |row, kv| {
        arch.rms_norm(kv, &raw[row * d..][..d], &w.kv_norm, eps);
        rotation.apply(row, &mut kv[d - n_rot..]);
    });
    let turn = Turn { rotation, n_rot };
    turn_queries(cx, spec, &turn, q, d, Some(eps));
    if let Some(of_index) = spec.blocks.and_then(|blocks| blocks.index) {
        turn_queries(cx, spec, &turn, index_q, of_index.head_dim, None);
    }
    for slot in &mut *cx.slots {
        let (pos, rows) = (slot.pos(), Rows::All.range(slot));
        let kv = &kv[rows.start * d..rows.end * d];
        slot.kv.append(threads, arch, first, pos, kv, kv)?;
    }
    if let (Some(of), Some(w)) = (&spec.blocks, &w.blocks) {
        let of = (of, spec.rope, d, n_rot);
        blocks.place(cx, of, w, (first + 1, true))?;
    }
    if let (Some(of), Some(w)) = (&spec.blocks, &w.index) {
        let n = of.index.map_or(0, |index| index.head_dim);
        let of = (of, spec.rope, n, n_rot);
        index.place(cx, of, &w.keys, (first + 3, false))?;
    }
    if m == 0 {
        return Ok(());
    }
    let queries = Queries {
        arch,
        threads,
        spec,
        first,
        rows: cx.rows,
        sinks: &w.sinks,
        q,
        index_q,
        index_weights,
    };
    for slot in &*cx.slots {
        queries.slot(slot, scores, chosen, out);
    }
    turn_back(cx, spec, n_rot, out);
    output(cx, (spec, w), (out, grouped, of_group, mixed), s, m);
    Ok(())
}

/// Products of all rows of `s.normed` for keys and entries, and of the layer's rows for queries.
fn project(
    cx: &mut Context<'_, '_>,
    (spec, w): (&CompressedSpec, &Compressed),
    b: &mut Buffers<'_>,
    s: &mut Residual<'_>,
) {
    let (arch, threads, eps) = (cx.arch, cx.threads, cx.h.norm_eps);
    let (m, m_kv) = (cx.n_rows(), Rows::All.n_of(&cx.slots));
    let mut on = cx.of_all();
    on.linear(s.normed, m_kv, &mut [Product::of(&w.kv, b.raw, m_kv)]);
    if let Some(w) = &w.blocks {
        b.blocks.project(&mut on, w, s.normed, m_kv);
    }
    if let Some(w) = &w.index {
        b.index.project(&mut on, &w.keys, s.normed, m_kv);
    }
    if cx.rows == Rows::Outputs {
        cx.gather(s.normed, cx.h.n_embd);
    }
    if m == 0 {
        return;
    }
    let x = &s.normed[..m * cx.h.n_embd];
    let mut on = cx.of_rows();
    on.linear(x, m, &mut [Product::of(&w.q_a, b.low, m)]);
    let (low, n) = (&*b.low, spec.q_rank);
    threads.when(m > 1).for_chunks(b.low_normed, n, |row, to| {
        arch.rms_norm(to, &low[row * n..][..n], &w.q_a_norm, eps);
    });
    on.linear(b.low_normed, m, &mut [Product::of(&w.q_b, b.q, m)]);
    if let Some(index) = &w.index {
        let products = &mut [Product::of(&index.q, b.index_q, m)];
        on.linear(b.low_normed, m, products);
        let products = &mut [Product::of(&index.proj, b.index_weights, m)];
        on.linear(x, m, products);
    }
}

/// Rotation of the last dimensions of heads.
struct Turn<'a> {
    rotation: Rotation<'a>,
    n_rot: usize,
}

/// Rotates heads of queries of `n` values, behind a norm without weights if there is an epsilon.
fn turn_queries(
    cx: &Context<'_, '_>,
    spec: &CompressedSpec,
    turn: &Turn<'_>,
    q: &mut [f32],
    n: usize,
    eps: Option<f32>,
) {
    let arch = cx.arch;
    let width = match eps {
        Some(_) => spec.n_head * n,
        None => spec
            .blocks
            .and_then(|blocks| blocks.index)
            .map_or(0, |index| index.n_head * n),
    };
    for slot in &*cx.slots {
        let (first, row, n_rows) = cx.rows.of(slot);
        let q = &mut q[row * width..(row + n_rows) * width];
        cx.threads.when(n_rows > 1).for_chunks(q, width, |j, q| {
            for q in q.chunks_exact_mut(n) {
                if let Some(eps) = eps {
                    let factor = crate::layers::norm::rms_factor(arch, q, eps);
                    q.iter_mut().for_each(|x| *x *= factor);
                }
                turn.rotation
                    .apply(slot.row + first + j, &mut q[n - turn.n_rot..]);
            }
        });
    }
}

/// Turns heads of outputs back by their own positions.
fn turn_back(cx: &Context<'_, '_>, spec: &CompressedSpec, n_rot: usize, out: &mut [f32]) {
    let (m_kv, width) = (Rows::All.n_of(&cx.slots), spec.n_head * spec.head_dim);
    let (cos, sin) = (&*cx.buffers.cos, &*cx.buffers.sin);
    let rotation = cx.slots[0]
        .rope
        .rotation(cx.arch, spec.rope, m_kv, cos, sin);
    for slot in &*cx.slots {
        let (first, row, n_rows) = cx.rows.of(slot);
        let out = &mut out[row * width..(row + n_rows) * width];
        cx.threads
            .when(n_rows > 1)
            .for_chunks(out, width, |j, out| {
                for out in out.chunks_exact_mut(spec.head_dim) {
                    rotation.undo(slot.row + first + j, &mut out[spec.head_dim - n_rot..]);
                }
            });
    }
}

/// Multiplies the output of all heads, group by group, and all groups together.
fn output(
    cx: &mut Context<'_, '_>,
    (spec, w): (&CompressedSpec, &Compressed),
    (out, grouped, of_group, mixed): (&[f32], &mut [f32], &mut [f32], &mut [f32]),
    s: &mut Residual<'_>,
    m: usize,
) {
    let (n_group, rank) = (spec.n_out_group, spec.out_rank);
    let width = spec.n_head * spec.head_dim / n_group;
    cx.tap(HookPoint::KqvOut, out);
    let branch = &mut s.branch[..m * w.out_b.w.n_out];
    let mut on = cx.of_rows();
    let workers = on.threads.when(m > 1);
    for group in 0..n_group {
        workers.for_chunks(grouped, width, |row, to| {
            to.copy_from_slice(&out[(row * n_group + group) * width..][..width]);
        });
        let a = w.out_a.rows(group * rank..(group + 1) * rank);
        on.linear(grouped, m, &mut [Product::of(&a, of_group, m)]);
        let of_group = &*of_group;
        workers.for_chunks(mixed, n_group * rank, |row, to| {
            to[group * rank..][..rank].copy_from_slice(&of_group[row * rank..][..rank]);
        });
    }
    on.linear(mixed, m, &mut [Product::of(&w.out_b, branch, m)]);
    cx.tap(HookPoint::AttnOut, branch);
}
