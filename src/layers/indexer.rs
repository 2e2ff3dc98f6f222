//! Choice of the positions that attention sees, by an index beside keys and values.

pub(crate) mod selection;
pub(crate) mod spec;
pub(crate) mod weights;

mod choose;

pub(crate) use choose::choose;

use crate::arch::{Acts, Arch, ColumnsMut, KV_BLOCK};
use crate::compute::ComputeError;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowCtx};
use crate::layers::context::Context;
use crate::layers::indexer::selection::{ALL, Selection};
use crate::layers::indexer::spec::{IndexKind, IndexSpec, MAX_INDEX_DIM};
use crate::layers::indexer::weights::Indexer;
use crate::layers::rope::Rotation;
use crate::layers::rows::{Rows, SlotView};
use crate::quant::DType;
use crate::threads::PoolHandle;

/// Epsilon of the norm of keys.
const NORM_EPS: f32 = 1e-6;
/// Rows whose scores are computed together: keys are read once for all of them.
const SCORED_ROWS: usize = 16;
/// Heads whose products with a page's keys are computed together; bounds stack use.
const SCORED_HEADS: usize = 32;
/// Buffers of an index: `m_kv` rows for keys, `m` rows for the rest.
pub(crate) struct IndexBuffers<'a> {
    /// `(m_kv, head_dim)`; the scores within a group if there are some.
    k: &'a mut [f32],
    raw: &'a mut [f32],
    pool: &'a mut [f32],
    /// `(m, n_head·head_dim)` and `(m, n_head)`.
    q: &'a mut [f32],
    weights: &'a mut [f32],
    /// `(pages, SCORED_ROWS, n_choice, KV_BLOCK)`.
    scores: &'a mut [f32],
}

impl<'a> IndexBuffers<'a> {
    /// For sequences of up to `longest` positions.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        spec: Option<&IndexSpec>,
        (m_kv, m): (usize, usize),
        longest: usize,
    ) -> IndexBuffers<'a> {
        let own = spec.filter(|spec| !spec.shared);
        let [k, pool, q, weights, scores] = own.map_or([0; 5], |spec| {
            // Rounded up, so that a sequence that grows seldom needs more room.
            let n_pages = longest.div_ceil(KV_BLOCK).next_power_of_two();
            [
                m_kv * spec.head_dim,
                if spec.kind == IndexKind::Pooled {
                    m_kv * spec.head_dim
                } else {
                    0
                },
                m * spec.n_head * spec.head_dim,
                m * spec.n_head,
                n_pages * m.min(SCORED_ROWS) * spec.n_choice() * KV_BLOCK,
            ]
        });
        IndexBuffers {
            k: frame.take(k),
            raw: frame.take(k),
            pool: frame.take(pool),
            q: frame.take(q),
            weights: frame.take(weights),
            scores: frame.take(scores),
        }
    }

    /// Products of all `m` rows of the layer's input.
    pub(crate) fn keys(&mut self, on: &mut RowCtx<'_, '_>, w: &Indexer, (x, m): (&[f32], usize)) {
        on.linear(x, m, &mut [Product::of(&w.k, self.raw, m)]);
        if let Some((pool, _)) = &w.pool {
            on.linear(x, m, &mut [Product::of(pool, self.pool, m)]);
        }
    }

    /// Products of `m` rows of the layer's input, and of what queries are computed from.
    pub(crate) fn queries(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        w: &Indexer,
        (x, low, m): (&[f32], &[f32], usize),
    ) {
        on.linear(low, m, &mut [Product::of(&w.q, self.q, m)]);
        if let Some(proj) = &w.proj {
            on.linear(x, m, &mut [Product::of(proj, self.weights, m)]);
        }
    }

    /// Puts keys into the cache, as layer `kv_layer`, and chooses positions for all rows.
    pub(crate) fn place(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w): (&IndexSpec, &Indexer),
        kv_layer: usize,
    ) -> Result<(), ComputeError> {
        let (arch, threads, eps) = (cx.arch, cx.threads, cx.h.norm_eps);
        let m_kv = Rows::All.n_of(&cx.slots);
        let (cos, sin) = (&*cx.buffers.cos, &*cx.buffers.sin);
        let turn = Turn {
            spec,
            rotation: spec
                .rope
                .map(|id| cx.slots[0].rope.rotation(arch, id, m_kv, cos, sin)),
            n_rot: spec.rope.map_or(0, |id| cx.h.rope(id).n_dims),
        };
        let raw = &*self.raw;
        threads
            .when(m_kv > 1)
            .for_chunks(self.k, spec.head_dim, |row, k| {
                let raw = &raw[row * spec.head_dim..][..spec.head_dim];
                if spec.kind == IndexKind::Mean {
                    return k.copy_from_slice(raw);
                }
                match &w.k_norm_bias {
                    Some(bias) => arch.layer_norm(k, raw, &w.k_norm, bias, NORM_EPS),
                    None => arch.rms_norm(k, raw, &w.k_norm, eps),
                }
                turn.apply(row, k);
            });
        for slot in &*cx.slots {
            let (first, row, n) = cx.rows.of(slot);
            let width = spec.n_head * spec.head_dim;
            for (j, q) in self.q[row * width..(row + n) * width]
                .chunks_exact_mut(width)
                .enumerate()
            {
                for q in q.chunks_exact_mut(spec.head_dim) {
                    if let Some(norm) = &w.q_norm {
                        let mut buffer = [0.0; MAX_INDEX_DIM];
                        let buffer = &mut buffer[..spec.head_dim];
                        buffer.copy_from_slice(q);
                        arch.rms_norm(q, buffer, norm, eps);
                    }
                    turn.apply(slot.row + first + j, q);
                }
            }
        }
        for slot in &mut *cx.slots {
            let (pos, rows) = (slot.pos(), Rows::All.range(slot));
            let rows = rows.start * spec.head_dim..rows.end * spec.head_dim;
            let (k, pool) = (&self.k[rows.clone()], self.pool.get(rows).unwrap_or(&[]));
            slot.kv.append(threads, arch, kv_layer, pos, k, pool)?;
        }
        let mut selection = std::mem::take(&mut cx.buffers.selection);
        for slot in &*cx.slots {
            let index = Index {
                arch,
                threads,
                spec,
                pool: w.pool.as_ref().map(|(_, places)| places.as_slice()),
                mean: (spec.kind == IndexKind::Mean).then_some((w.k_norm.as_slice(), eps)),
                kv_layer,
                q: self.q,
                weights: self.weights,
            };
            index.choose(slot, cx.rows, self.scores, &mut selection);
        }
        cx.buffers.selection = selection;
        Ok(())
    }
}

/// Rotation of heads of an index.
struct Turn<'a> {
    spec: &'a IndexSpec,
    rotation: Option<Rotation<'a>>,
    n_rot: usize,
}

impl Turn<'_> {
    fn apply(&self, row: usize, head: &mut [f32]) {
        if let Some(rotation) = &self.rotation {
            let first = match self.spec.rotates_last {
                true => head.len() - self.n_rot,
                false => 0,
            };
            rotation.apply(row, &mut head[first..]);
        }
    }
}

/// The index of a layer in a pass.
struct Index<'a> {
    arch: Arch,
    threads: &'a PoolHandle<'a>,
    spec: &'a IndexSpec,
    /// See [`Indexer::pool`].
    pool: Option<&'a [f32]>,
    /// Norm of the means of groups, and its epsilon.
    mean: Option<(&'a [f32], f32)>,
    kv_layer: usize,
    q: &'a [f32],
    weights: &'a [f32],
}

impl Index<'_> {
    /// Chooses positions for the rows `rows` of a slot.
    fn choose(&self, slot: &SlotView<'_>, rows: Rows, scores: &mut [f32], to: &mut Selection<'_>) {
        let (spec, width, n_choice) = (self.spec, to.width, to.n_choice);
        let (first, row, n) = rows.of(slot);
        if width == 0 {
            return to.counts[row * n_choice..(row + n) * n_choice].fill(ALL);
        }
        for block in (0..n).step_by(SCORED_ROWS) {
            let n_rows = (n - block).min(SCORED_ROWS);
            let (row, pos) = (row + block, slot.pos() + first + block);
            let last = pos + n_rows - 1;
            let n_pages = (last + 1).div_ceil(KV_BLOCK);
            let scores = &mut scores[..n_pages * n_rows * n_choice * KV_BLOCK];
            if !spec.sees_all(last) {
                let of_page = n_rows * n_choice * KV_BLOCK;
                self.threads.for_chunks(scores, of_page, |page, scores| {
                    self.score(slot, page, row, scores);
                });
            }
            let scores = &*scores;
            let choices = row * n_choice..(row + n_rows) * n_choice;
            let counts = &mut to.counts[choices.clone()];
            let positions = &mut to.positions[choices.start * width..choices.end * width];
            self.threads.when(n_rows > 1).for_chunk_pairs(
                counts,
                1,
                positions,
                width,
                |choice, count, positions| {
                    let pos = pos + choice / n_choice;
                    if spec.sees_all(pos) {
                        count[0] = ALL;
                        return;
                    }
                    let at = |position: usize| {
                        let (page, place) = (position / KV_BLOCK, position % KV_BLOCK);
                        scores[(page * n_rows * n_choice + choice) * KV_BLOCK + place]
                    };
                    let score = |group: u32| spec.group_score(group as usize, pos, &at);
                    let n_best = spec.top_k / spec.n_group;
                    let sizes = (spec.n_candidates(pos), n_best, spec.n_group, pos + 1);
                    count[0] = choose(positions, sizes, score) as u32;
                },
            );
        }
    }

    /// Scores of the keys of a page for the rows from `row` on: `(rows, n_choice, KV_BLOCK)`. Those
    /// of groups are at the place of their first position.
    fn score(&self, slot: &SlotView<'_>, page: usize, row: usize, scores: &mut [f32]) {
        let &IndexSpec {
            n_head,
            head_dim,
            n_group,
            kind,
            ..
        } = self.spec;
        let mut keys = [0.0; KV_BLOCK * MAX_INDEX_DIM];
        let keys = &mut keys[..KV_BLOCK * head_dim];
        slot.kv.index_part(self.arch, self.kv_layer, page, 0, keys);
        let mut step = 1;
        if let Some(places) = self.pool {
            let mut weights = [0.0; KV_BLOCK * MAX_INDEX_DIM];
            let weights = &mut weights[..KV_BLOCK * head_dim];
            slot.kv
                .index_part(self.arch, self.kv_layer, page, 1, weights);
            pool(keys, weights, places, head_dim);
            step = n_group;
        }
        if let Some((norm, eps)) = self.mean {
            for group in 0..KV_BLOCK / n_group {
                let mut key = [0.0; MAX_INDEX_DIM];
                let key = &mut key[..head_dim];
                let members = keys[group * n_group * head_dim..].chunks_exact(head_dim);
                for member in members.take(n_group) {
                    self.arch.add(key, member);
                }
                key.iter_mut().for_each(|x| *x /= n_group as f32);
                let to = &mut keys[group * head_dim..][..head_dim];
                self.arch.rms_norm(to, key, norm, eps);
                if let Some(id) = self.spec.rope {
                    let pos = page * KV_BLOCK + group * n_group;
                    slot.rope.rotate_at(self.arch, id, pos, to);
                }
            }
            step = n_group;
        }
        let n_choice = self.spec.n_choice();
        let n_keys = KV_BLOCK / step;
        let keys = &keys[..n_keys * head_dim];
        let mut of_keys = [0.0; KV_BLOCK];
        let of_keys = &mut of_keys[..n_keys];
        for (choice, scores) in scores.chunks_exact_mut(KV_BLOCK).enumerate() {
            let row = row + choice / n_choice;
            let q = &self.q[row * n_head * head_dim..][..n_head * head_dim];
            match kind {
                IndexKind::Weighed | IndexKind::Pooled => {
                    let weights = &self.weights[row * n_head..][..n_head];
                    scores_of_keys(self.arch, (q, Some(weights)), keys, head_dim, of_keys);
                }
                IndexKind::Mean => scores_of_keys(self.arch, (q, None), keys, head_dim, of_keys),
                IndexKind::Largest { .. } => {
                    let q = &q[choice % n_choice * head_dim..][..head_dim];
                    products(self.arch, q, keys, head_dim, of_keys);
                }
            }
            let places = scores.iter_mut().step_by(step);
            places
                .zip(of_keys.iter())
                .for_each(|(to, score)| *to = *score);
        }
    }
}

/// Products of heads and keys of `n` values: `(heads, keys)`.
fn products(arch: Arch, heads: &[f32], keys: &[f32], n: usize, to: &mut [f32]) {
    let sizes = (heads.len() / n, keys.len() / n);
    let mut to = ColumnsMut::new(to, sizes.0, sizes.1);
    let heads = Acts::F32 { x: heads, n };
    arch.matvec(DType::F32, &mut to, bytemuck::cast_slice(keys), &heads);
}

/// Scores of at most [`KV_BLOCK`] keys of `n` values: `Σ w_i·max(q_i·k, 0)` over the heads `i`, whose
/// weights are 1 if there are none.
pub(crate) fn scores_of_keys(
    arch: Arch,
    (q, weights): (&[f32], Option<&[f32]>),
    keys: &[f32],
    n: usize,
    scores: &mut [f32],
) {
    let mut room = [0.0; SCORED_HEADS * KV_BLOCK];
    scores.fill(0.0);
    for (i, heads) in q.chunks(SCORED_HEADS * n).enumerate() {
        let room = &mut room[..heads.len() / n * scores.len()];
        products(arch, heads, keys, n, room);
        for (head, products) in room.chunks_exact(scores.len()).enumerate() {
            let weight = weights.map_or(1.0, |weights| weights[i * SCORED_HEADS + head]);
            let scores = scores.iter_mut().zip(products);
            scores.for_each(|(score, x)| *score += weight * x.clamp(0.0, f32::INFINITY));
        }
    }
}

impl IndexSpec {
    /// Groups among which a query at `pos` chooses.
    fn n_candidates(&self, pos: usize) -> usize {
        match self.kind {
            IndexKind::Weighed | IndexKind::Pooled | IndexKind::Mean => (pos + 1) / self.n_group,
            IndexKind::Largest { .. } => pos / self.n_group + 1,
        }
    }

    /// Whether it sees all of them.
    fn sees_all(&self, pos: usize) -> bool {
        self.n_candidates(pos) <= self.top_k / self.n_group
    }

    /// The score of a group for a query at `pos`, of those of positions.
    fn group_score(&self, group: usize, pos: usize, at: &dyn Fn(usize) -> f32) -> f32 {
        let first = group * self.n_group;
        match self.kind {
            IndexKind::Weighed | IndexKind::Pooled | IndexKind::Mean => at(first),
            IndexKind::Largest { n_local } if group + n_local > pos / self.n_group => f32::INFINITY,
            IndexKind::Largest { .. } => (first..(first + self.n_group).min(pos + 1))
                .map(at)
                .fold(f32::NEG_INFINITY, f32::max),
        }
    }
}

/// Replaces the first keys by those of groups: the mean of each dimension, weighed by the softmax of
/// `weights` and what `places` adds to them, `(n_group, head_dim)`.
fn pool(keys: &mut [f32], weights: &[f32], places: &[f32], head_dim: usize) {
    let n_group = places.len() / head_dim;
    for group in 0..KV_BLOCK / n_group {
        for d in 0..head_dim {
            let at = |i: usize| (group * n_group + i) * head_dim + d;
            let weight = |i: usize| weights[at(i)] + places[i * head_dim + d];
            let max = (0..n_group).map(weight).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut total) = (0.0, 0.0);
            for i in 0..n_group {
                let weight = (weight(i) - max).exp();
                sum += weight * keys[at(i)];
                total += weight;
            }
            // Behind what was read: a group's key has a smaller index than its members.
            keys[group * head_dim + d] = sum / total;
        }
    }
}
