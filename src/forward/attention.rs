//! Attention of a layer.

use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK, MAX_HEAD_DIM};
use crate::compute::ComputeError;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, linear};
use crate::compute::probe::{Probe, Tap};
use crate::forward::buffers::{AttnBuffers, AttnSizes, Buffers, attn_tiles};
use crate::forward::feed_forward::linear_at;
use crate::forward::{
    ATTEND, ATTENDED, FEW_PIECES, LEAST_TILES, LayerAt, MAX_GROUP, N_PIECES, Pause, gather,
    n_generated,
};
use crate::layers::norm::{head_norms, rms_factor};
use crate::layers::rows::{Adapters, Base, Rows, SlotView, row_adapters};
use crate::model::{Attn, AttnSpec, Hparams, QkNorm, Temperature};
use crate::threads::Crew;
use std::ops::Range;

/// Attention of a layer on `b.normed`; leaves its output for `rows` in `b.branch`. Of the other
/// rows it only puts keys and values into the cache. Returns whether it did not pause.
pub(super) fn attention(
    base: Base<'_>,
    h: &Hparams,
    (spec, w): (&AttnSpec, &Attn),
    rows: Rows,
    slots: &mut [SlotView<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, ComputeError> {
    let (Base { arch, crew, .. }, i) = (base, at.layer);
    let sizes = AttnSizes::of(spec, slots.iter().map(SlotView::size), rows);
    let AttnSizes { m_kv, m, .. } = sizes;
    let latent_spec = spec.latent.as_ref().zip(w.latent.as_deref());
    let n_generated = n_generated(i + 1 == h.n_layer, rows, slots);
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let AttnBuffers {
        q,
        k,
        v,
        q_by_head,
        out_by_head,
        attn,
        gate,
        q_gate,
        mut latent,
        partials,
    } = AttnBuffers::take(&mut Frame::of(b.inner), spec, sizes);
    let from_wq = if spec.gate_in_q {
        &mut *q_gate
    } else {
        &mut *q
    };
    if at.part < ATTEND {
        let (slots, n_generated_kv) = (Adapters(slots), Rows::All.n_generated(slots));
        let ctx = base.with(row_adapters(&slots, b.ends), n_generated_kv);
        let at_once =
            (m, n_generated) == (m_kv, n_generated_kv) && latent_spec.is_none() && !spec.shares_kv;
        if at_once {
            let products = &mut [
                Product::of(&w.wq, from_wq, m),
                Product::of(&w.wk, k, m),
                Product::of(&w.wv, v, m),
            ];
            if !linear_at(
                ctx,
                &mut b.scratch,
                b.normed,
                m,
                products,
                (&mut *at, pause),
            ) {
                return Ok(false);
            }
        } else {
            if let Some((of, weights)) = latent_spec {
                let (ctx, x) = ((ctx, &mut b.scratch), (&*b.normed, m_kv));
                latent.keys_values(ctx, (spec, of, w, weights), h.norm_eps, x, k, v);
            } else if !spec.shares_kv {
                let products = &mut [Product::of(&w.wk, k, m_kv), Product::of(&w.wv, v, m_kv)];
                linear(ctx, &mut b.scratch, b.normed, m_kv, products);
            }
            if rows == Rows::Outputs {
                gather(slots.0, b.normed, h.n_embd);
            }
            if m > 0 {
                let (ctx, x) = (
                    base.with(row_adapters(&slots, ends), n_generated),
                    &b.normed[..m * h.n_embd],
                );
                match latent_spec {
                    Some((of, weights)) => {
                        latent.queries(
                            (ctx, &mut b.scratch),
                            (spec, of, w, weights),
                            h.norm_eps,
                            (x, m),
                            from_wq,
                        );
                    }
                    None => linear(
                        ctx,
                        &mut b.scratch,
                        x,
                        m,
                        &mut [Product::of(&w.wq, from_wq, m)],
                    ),
                }
            }
        }
        if at.pauses_before(i, ATTEND, pause) {
            return Ok(false);
        }
    }
    // What follows changes queries, and the cache.
    let is_new = at.part == ATTEND && at.n_tiles == 0;
    if is_new {
        if spec.gate_in_q {
            let d = spec.head_dim;
            let to = q.chunks_exact_mut(d).zip(gate.chunks_exact_mut(d));
            for ((q, gate), from) in to.zip(q_gate.chunks_exact(2 * d)) {
                q.copy_from_slice(&from[..d]);
                gate.copy_from_slice(&from[d..]);
            }
        }
        probe.tensor(Tap::Qcur, i, q);
        if let Some(clip) = spec.clip {
            for x in [&mut *q, k, v] {
                x.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
        if spec.value_scale != 1.0 {
            v.iter_mut().for_each(|v| *v *= spec.value_scale);
        }
        if spec.qk_norm == Some(QkNorm::Full) {
            for (x, norm) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                let Some(norm) = norm else { continue };
                crew.when(x.len() > norm.len())
                    .for_chunks(x, norm.len(), |_, row| {
                        let factor = rms_factor(arch, row, h.norm_eps);
                        row.iter_mut()
                            .zip(norm)
                            .for_each(|(x, w)| *x = *x * factor * w);
                    });
            }
        }
        if spec.qk_norm == Some(QkNorm::LayerByHead) {
            for (x, norm) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                let Some(norm) = norm else { continue };
                crew.when(x.len() > norm.len())
                    .for_chunks(x, norm.len(), |_, row| {
                        for (x, w) in row
                            .chunks_exact_mut(spec.head_dim)
                            .zip(norm.chunks_exact(spec.head_dim))
                        {
                            let (from, no_bias) = (
                                &mut [0.0; MAX_HEAD_DIM][..x.len()],
                                &[0.0; MAX_HEAD_DIM][..x.len()],
                            );
                            from.copy_from_slice(x);
                            arch.layer_norm(x, from, w, no_bias, h.norm_eps);
                        }
                    });
            }
        }
    }
    let (q_norm, k_norm) = head_norms(spec, w);
    // The model decides which dimensions form pairs; a session's angles are already in `cos` and
    // `sin`.
    let rotation = spec
        .rope
        .map(|id| slots[0].rope.rotation(arch, id, m_kv, b.cos, b.sin));
    let first_rotated = spec.latent.map_or(0, |latent| spec.head_dim - latent.n_rot);
    let rotate = |row: usize, x: &mut [f32]| {
        rotation
            .iter()
            .for_each(|rotation| rotation.apply(row, &mut x[first_rotated..]))
    };
    let norm_last = matches!(
        spec.qk_norm,
        Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated)
    );
    let place = |row: usize, from: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]| match norm {
        Some(w) if norm_last => {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            let buffer = &mut buffer[..from.len()];
            buffer.copy_from_slice(from);
            rotate(row, buffer);
            arch.rms_norm(to, buffer, w, h.norm_eps);
        }
        Some(w) => {
            arch.rms_norm(to, from, w, h.norm_eps);
            rotate(row, to);
        }
        None => {
            to.copy_from_slice(from);
            rotate(row, to);
        }
    };
    let (d, kv_layer) = (spec.head_dim, h.kv_layers[i]);
    let workers = crew.when(m_kv > 1);
    if is_new && !spec.shares_kv {
        if spec.value_norm {
            workers.for_chunks(v, spec.head_dim_v, |_, v| {
                let factor = rms_factor(arch, v, h.norm_eps);
                v.iter_mut().for_each(|v| *v *= factor);
            });
        }
        workers.for_chunks(k, spec.n_k(), |row, k| {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            for k in k.chunks_exact_mut(d) {
                place(row, k, k_norm, &mut buffer[..d]);
                k.copy_from_slice(&buffer[..d]);
            }
        });
        probe.tensor(Tap::K, i, k);
        probe.tensor(Tap::V, i, v);
        for slot in &mut *slots {
            let (pos, range) = (slot.pos(), Rows::All.range(slot));
            let [k, v] = [(&*k, spec.n_k()), (&*v, spec.n_v())]
                .map(|(x, n)| &x[range.start * n..range.end * n]);
            slot.kv.append(&workers, arch, kv_layer, pos, k, v)?;
            slot.kv.convert(crew, arch, kv_layer);
        }
    }
    if m == 0 {
        return Ok(true);
    }

    // Slots with one row are processed together, each of the others alone.
    let (mut q_rest, mut out_rest, mut partials) = (&mut *q_by_head, &mut *out_by_head, partials);
    let q = Queries {
        values: q,
        norm: q_norm,
        place: &place,
        temperature: spec.temperature,
    };
    let layer = AttnLayer {
        arch,
        crew,
        spec,
        sinks: w.sinks.as_deref(),
        i: kv_layer,
        rows,
    };
    // Those of slots before, and those that were there.
    let (mut n_before, n_at_first) = (0, at.n_tiles);
    let mut rest = if at.part == ATTEND { &*slots } else { &[] };
    while let Some(first) = rest.first() {
        let n_rows = rows.of(first).2;
        let single = |slot: &SlotView<'_>| rows.of(slot).2 == 1;
        let n = if n_rows == 1 {
            rest.iter().take_while(|slot| single(slot)).count()
        } else {
            1
        };
        let (group, tail) = rest.split_at(n);
        rest = tail;
        if n_rows == 0 {
            continue;
        }
        let m_padded = if n_rows == 1 {
            n
        } else {
            attn_tiles(spec, n_rows).1
        };
        let (q_here, q_tail) = q_rest.split_at_mut(m_padded * spec.n_q());
        let (out, out_tail) = out_rest.split_at_mut(m_padded * spec.n_out());
        (q_rest, out_rest) = (q_tail, out_tail);
        let n_tiles = if n_rows == 1 {
            1
        } else {
            layer.n_tiles(n_rows)
        };
        if n_rows == 1 && at.n_tiles == n_before {
            partials = layer.single_rows(group, &q, q_here, out, partials);
            at.n_tiles += 1;
        }
        let mut queries = (at.n_tiles == n_before).then_some(&q);
        let least = crew.n_threads() * LEAST_TILES;
        let at_once = if pause.is_some() {
            n_tiles.div_ceil(N_PIECES).max(least)
        } else {
            n_tiles
        };
        while at.n_tiles < n_before + n_tiles {
            if at.n_tiles > n_at_first && pause.is_some_and(|pause| pause(*at)) {
                return Ok(false);
            }
            let start = at.n_tiles - n_before;
            let tiles = start..(start + at_once).min(n_tiles);
            at.n_tiles += tiles.len();
            layer.many_rows(first, queries.take(), q_here, out, tiles);
        }
        n_before += n_tiles;
    }
    if at.part == ATTEND && at.pauses_before(i, ATTENDED, pause) {
        return Ok(false);
    }
    probe.tensor(Tap::QByHead, i, q_by_head);

    // For slots with one row, the output by head is the output.
    let (attn, by_head) = (attn, &*out_by_head);
    let all_single = slots.iter().all(|slot| rows.of(slot).2 <= 1);
    let attn = if all_single {
        by_head
    } else {
        let mut by_head = by_head;
        for slot in &*slots {
            let (_, row, n) = rows.of(slot);
            if n > 0 {
                let here = &mut attn[row * spec.n_out()..][..n * spec.n_out()];
                let (from, tail) = by_head.split_at(attn_tiles(spec, n).1 * spec.n_out());
                layer.by_row(from, here);
                by_head = tail;
            }
        }
        &*attn
    };
    probe.tensor(Tap::KqvOut, i, attn);
    let branch = &mut b.branch[..m * h.n_embd];
    let slots = Adapters(slots);
    let ctx = base.with(row_adapters(&slots, ends), n_generated);
    if let Some(w) = &w.gate {
        linear(
            ctx,
            &mut b.scratch,
            &b.normed[..m * h.n_embd],
            m,
            &mut [Product::of(w, gate, m)],
        );
    }
    let attn = match spec.gated {
        true => {
            let n = spec.n_out();
            let workers = base.crew.when(m > 1);
            workers.for_chunks(gate, n, |row, gate| {
                base.arch.sigmoid_mul(gate, &attn[row * n..][..n])
            });
            &*gate
        }
        false => attn,
    };
    let attn = match &spec.latent {
        Some(of) if of.absorbed => latent.values((ctx, &mut b.scratch), (spec, of, w), m, attn),
        _ => attn,
    };
    linear(
        ctx,
        &mut b.scratch,
        attn,
        m,
        &mut [Product::of(&w.wo, branch, m)],
    );
    probe.tensor(Tap::AttnOut, i, branch);
    Ok(true)
}

pub(super) type Place<'a> = dyn Fn(usize, &[f32], Option<&Vec<f32>>, &mut [f32]) + Sync + 'a;

/// Queries of a layer, and the application of their norm and rotation.
pub(super) struct Queries<'a> {
    /// `(m, n_head·head_dim)`.
    pub(super) values: &'a [f32],
    pub(super) norm: Option<&'a Vec<f32>>,
    /// Writes a head of a row among all rows of the pass, after norm and rotation.
    pub(super) place: &'a Place<'a>,
    pub(super) temperature: Option<Temperature>,
}

impl Queries<'_> {
    /// Writes head `head` of row `row` of the values; it is row `pass_row` of the pass and has
    /// position `position`.
    pub(super) fn write(
        &self,
        (row, pass_row, position): (usize, usize, usize),
        head: usize,
        spec: &AttnSpec,
        to: &mut [f32],
    ) {
        let from = &self.values[row * spec.n_q() + head * spec.head_dim..][..spec.head_dim];
        (self.place)(pass_row, from, self.norm, to);
        if let Some(temperature) = self.temperature {
            let factor = temperature.at(position);
            to.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Attention of one layer, slot by slot.
pub(super) struct AttnLayer<'a> {
    pub(super) arch: Arch,
    pub(super) crew: &'a Crew<'a>,
    pub(super) spec: &'a AttnSpec,
    /// Sinks of each query head.
    pub(super) sinks: Option<&'a [f32]>,
    /// Layer whose keys and values are read.
    pub(super) i: usize,
    pub(super) rows: Rows,
}

impl AttnLayer<'_> {
    /// Positions that the slot's row `j` of [`AttnLayer::rows`] sees.
    pub(super) fn range(&self, slot: &SlotView<'_>, j: usize) -> (u32, u32) {
        let end = slot.pos() + self.rows.of(slot).0 + j + 1;
        if !self.spec.causal {
            let (half, n) = (
                self.spec.window.map(|size| size / 2),
                slot.pos() + slot.tokens.len(),
            );
            let range = half.map_or((0, n), |half| {
                (
                    (end - 1).saturating_sub(half),
                    n.min(end.saturating_add(half)),
                )
            });
            return (range.0 as u32, range.1 as u32);
        }
        let start = match self.spec.window {
            Some(size) if self.spec.chunked => (end - 1) / size * size,
            Some(size) => end.saturating_sub(size),
            None => 0,
        };
        (start as u32, end as u32)
    }

    /// Clears rows of KV head `head`, whose query heads alternate, except for the sinks: these are
    /// keys before all others with values of 0.
    pub(super) fn begin(&self, partial: &mut AttnPartial<'_>, head: usize) {
        partial.clear();
        if let Some(sinks) = self.sinks {
            let n_group = self.spec.n_group();
            let sinks = sinks[head * n_group..][..n_group].iter().cycle();
            partial
                .max
                .iter_mut()
                .zip(sinks)
                .for_each(|(max, sink)| *max = *sink);
            partial.sum.fill(1.0);
        }
    }

    /// Attention of slots with one row each, stored one after the other. A task takes a head of one
    /// slot and a piece of its keys; the bits are those of a task that takes all pieces in
    /// turn, see `arch/attention.rs`.
    pub(super) fn single_rows<'p>(
        &self,
        slots: &[SlotView<'_>],
        q: &Queries<'_>,
        q_by_head: &mut [f32],
        out: &mut [f32],
        partials: &'p mut [f32],
    ) -> &'p mut [f32] {
        let AttnLayer {
            arch,
            crew,
            spec,
            i,
            rows,
            ..
        } = *self;
        let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let crew_of = crew.when(slots.len() > 1);
        crew_of.for_chunks(q_by_head, spec.n_q(), |s, to| {
            let (first, row, _) = rows.of(&slots[s]);
            for (j, to) in to.chunks_exact_mut(d).enumerate() {
                q.write(
                    (row, slots[s].row + first, slots[s].pos() + first),
                    j,
                    spec,
                    to,
                );
                slots[s].kv.transform_query(arch, i, to);
            }
        });
        let q_by_head = &*q_by_head;
        let pieces = |s: usize| slots[s].kv.pieces(i, self.range(&slots[s], 0));
        let n_pieces = (0..slots.len())
            .map(|s| pieces(s).count())
            .max()
            .unwrap_or(0);
        let len = AttnPartial::len(n_group, d_v);
        let (partials, rest) = partials.split_at_mut(slots.len() * spec.n_head_kv * n_pieces * len);
        crew.for_chunks(partials, len, |task, values| {
            let (row, piece) = (task / n_pieces, task % n_pieces);
            let (s, head) = (row / spec.n_head_kv, row % spec.n_head_kv);
            let mut partial = AttnPartial::of(values, n_group);
            if piece == 0 {
                self.begin(&mut partial, head);
            } else {
                partial.clear();
            }
            if let Some(piece) = pieces(s).nth(piece) {
                let range = self.range(&slots[s], 0);
                // Most groups are small, and filling the largest takes as long as reading some
                // keys.
                let (small, large);
                let ranges: &[_] = if n_group <= 16 {
                    small = [range; 16];
                    &small
                } else {
                    large = [range; MAX_GROUP];
                    &large
                };
                let q = &q_by_head[row * n_group * d..][..n_group * d];
                let kv = &*slots[s].kv;
                let params = attn_params(spec, head, slots[s].is_generated());
                kv.attention(
                    arch,
                    (i, head),
                    piece,
                    &mut partial,
                    q,
                    &ranges[..n_group],
                    &params,
                );
            }
        });
        let workers = crew.when(slots.len() * n_pieces > FEW_PIECES);
        workers.for_chunk_pairs(
            out,
            n_group * d_v,
            partials,
            n_pieces * len,
            |row, out, partials| {
                let (total, rest) = partials.split_at_mut(len);
                let mut total = AttnPartial::of(total, n_group);
                let params = attn_params(spec, 0, true);
                let n = pieces(row / spec.n_head_kv).count();
                for partial in rest.chunks_exact_mut(len).take(n - 1) {
                    arch.attention_merge(&mut total, &AttnPartial::of(partial, n_group), &params);
                }
                arch.attention_finish(&mut total, &params);
                out.copy_from_slice(total.out);
            },
        );
        rest
    }

    /// Number of tiles of a slot with `m` rows.
    pub(super) fn n_tiles(&self, m: usize) -> usize {
        let (tile, m_padded) = attn_tiles(self.spec, m);
        self.spec.n_head_kv * (m_padded / tile)
    }

    /// Attention of a slot with several rows. A task takes one of the tiles, a head and some rows,
    /// through all pieces of keys. Queries are written first if they are given.
    pub(super) fn many_rows(
        &self,
        slot: &SlotView<'_>,
        q: Option<&Queries<'_>>,
        q_by_head: &mut [f32],
        out: &mut [f32],
        tiles: Range<usize>,
    ) {
        let AttnLayer {
            arch,
            crew,
            spec,
            i,
            rows,
            ..
        } = *self;
        let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let (first, row, m) = rows.of(slot);
        let (tile, m_padded) = attn_tiles(spec, m);
        if let Some(q) = q {
            crew.for_chunks(q_by_head, m_padded * n_group * d, |head, to| {
                for (j, to) in to.chunks_exact_mut(d).take(m * n_group).enumerate() {
                    let (token, q_head) = (j / n_group, head * n_group + j % n_group);
                    let at = first + token;
                    q.write(
                        (row + token, slot.row + at, slot.pos() + at),
                        q_head,
                        spec,
                        to,
                    );
                    slot.kv.transform_query(arch, i, to);
                }
            });
        }
        let q_by_head = &*q_by_head;
        let (per_head, size) = (m_padded / tile, tile * n_group * d_v);
        crew.for_chunks(
            &mut out[tiles.start * size..tiles.end * size],
            size,
            |task, out| {
                let task = tiles.start + task;
                let (head, token) = (task / per_head, task % per_head * tile);
                let n_rows = tile.min(m - token) * n_group;
                let (mut ranges, mut max, mut sum) =
                    ([(0, 0); MAX_GROUP], [0.0; MAX_GROUP], [0.0; MAX_GROUP]);
                for (j, to) in ranges[..n_rows].iter_mut().enumerate() {
                    *to = self.range(slot, token + j / n_group);
                }
                let ranges = &ranges[..n_rows];
                let q = &q_by_head[(head * m_padded + token) * n_group * d..][..n_rows * d];
                let (kv, params) = (&slot.kv, attn_params(spec, head, slot.is_generated()));
                let mut next = 0;
                while next < n_rows {
                    // If precision depends on age, the rows of a page are processed together.
                    let page = |row: usize| (ranges[row].1 as usize - 1) / KV_BLOCK;
                    let same = (next..n_rows)
                        .take_while(|&row| !kv.is_tiered(i) || page(row) == page(next));
                    let rows = next..next + same.count();
                    next = rows.end;
                    let (q, ranges) = (&q[rows.start * d..rows.end * d], &ranges[rows.clone()]);
                    let out = &mut out[rows.start * d_v..rows.end * d_v];
                    let mut total = AttnPartial {
                        out,
                        max: &mut max[rows.clone()],
                        sum: &mut sum[rows],
                    };
                    self.begin(&mut total, head);
                    let add = |total: &mut AttnPartial<'_>,
                               ranges: &[(u32, u32)],
                               params: &AttnParams| {
                        for piece in kv.pieces(i, (ranges[0].0, ranges[ranges.len() - 1].1)) {
                            kv.attention(arch, (i, head), piece, total, q, ranges, params);
                        }
                    };
                    if spec.causal || params.slope == 0.0 {
                        add(&mut total, ranges, &params);
                    } else {
                        // ALiBi on both sides. Scores of later keys count positions from the end of
                        // the text; to compensate, scores of earlier keys
                        // are raised by the same excess.
                        let (n, own) = (ranges[0].1, (slot.pos() + first + token) as u32);
                        let mut split = [(0, 0); MAX_GROUP];
                        let split = &mut split[..ranges.len()];
                        split
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(range, own)| *range = (0, own + 1));
                        add(&mut total, split, &params);
                        let raise = |own: u32| params.slope * (n - 1 - own) as f32;
                        total
                            .max
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(max, own)| *max += raise(own));
                        split
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(range, own)| *range = (own + 1, n));
                        add(
                            &mut total,
                            split,
                            &AttnParams {
                                slope: -params.slope,
                                ..params
                            },
                        );
                    }
                    arch.attention_finish(&mut total, &params);
                }
            },
        );
    }

    /// Copies a slot's output by head, `(n_head_kv, m_padded, n_group, head_dim_v)`, to rows `(m,
    /// n_head·head_dim_v)`.
    pub(super) fn by_row(&self, by_head: &[f32], to: &mut [f32]) {
        let width = self.spec.n_group() * self.spec.head_dim_v;
        let m_padded = by_head.len() / self.spec.n_out();
        self.crew.for_chunks(to, self.spec.n_out(), |row, to| {
            for (head, to) in to.chunks_exact_mut(width).enumerate() {
                to.copy_from_slice(&by_head[(head * m_padded + row) * width..][..width]);
            }
        });
    }
}

/// Parameters of attention kernels for the query heads of KV head `head`.
pub(crate) fn attn_params(spec: &AttnSpec, head: usize, exact: bool) -> AttnParams {
    let &AttnSpec {
        head_dim,
        head_dim_v,
        scale,
        softcap,
        ..
    } = spec;
    // With a slope there is one query head, and everything is computed in `f32`.
    let slope = spec.slope(head);
    AttnParams {
        head_dim,
        head_dim_v,
        scale,
        softcap: softcap.unwrap_or(0.0),
        slope,
        exact: exact || slope != 0.0,
    }
}
