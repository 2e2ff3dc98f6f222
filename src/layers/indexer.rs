//! Choice of the positions that attention sees, by an index beside keys and values.

pub(crate) mod spec;
pub(crate) mod weights;

mod choose;

use crate::arch::{Arch, KV_BLOCK};
use crate::compute::ComputeError;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowCtx};
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::indexer::choose::choose;
use crate::layers::indexer::spec::{IndexSpec, MAX_INDEX_DIM};
use crate::layers::indexer::weights::Indexer;
use crate::layers::rope::Rotation;
use crate::layers::rows::{Rows, SlotView};
use crate::threads::Crew;

/// Epsilon of the norm of keys.
const NORM_EPS: f32 = 1e-6;
/// Rows whose scores are computed together: keys are read once for all of them.
const SCORED_ROWS: usize = 16;
/// Number of chosen positions that stands for all up to the row's own.
pub(crate) const ALL: u32 = u32::MAX;

/// Positions that the rows of a pass see, of the last layer that chose some.
#[derive(Default)]
pub(crate) struct Selection<'a> {
    /// In ascending order, of each row up to `width` of them.
    positions: &'a mut [u32],
    /// How many; [`ALL`]: all up to its own.
    counts: &'a mut [u32],
    width: usize,
}

impl<'a> Selection<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> Selection<'a> {
        let widths = h.attention().filter_map(|attn| attn.index);
        let width = widths.map(|index| index.n_chosen()).max().unwrap_or(0);
        Selection {
            positions: frame.take(m * width),
            counts: frame.take(if width > 0 { m } else { 0 }),
            width,
        }
    }

    /// The positions that row `row` sees; `None`: all up to its own.
    pub(crate) fn of(&self, row: usize) -> Option<&[u32]> {
        let n = self.counts[row];
        (n != ALL).then(|| &self.positions[row * self.width..][..n as usize])
    }

    /// Keeps the rows that the last layer computes, where all rows were chosen for.
    pub(crate) fn gather(&mut self, slots: &[SlotView<'_>]) {
        for slot in slots {
            let (first, to, n) = Rows::Outputs.of(slot);
            let from = slot.row + first;
            let width = self.width;
            self.positions
                .copy_within(from * width..(from + n) * width, to * width);
            self.counts.copy_within(from..from + n, to);
        }
    }
}

/// Buffers of an index: `m_kv` rows for keys, `m` rows for the rest.
pub(crate) struct IndexBuffers<'a> {
    /// `(m_kv, head_dim)`; the scores within a group if there are some.
    k: &'a mut [f32],
    raw: &'a mut [f32],
    pool: &'a mut [f32],
    /// `(m, n_head·head_dim)` and `(m, n_head)`.
    q: &'a mut [f32],
    weights: &'a mut [f32],
    /// `(pages, SCORED_ROWS, KV_BLOCK)`.
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
                if spec.pool.is_some() {
                    m_kv * spec.head_dim
                } else {
                    0
                },
                m * spec.n_head * spec.head_dim,
                m * spec.n_head,
                n_pages * m.min(SCORED_ROWS) * KV_BLOCK,
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

    /// Products of `m` rows of the layer's input, and of the low-rank vectors of queries.
    pub(crate) fn queries(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        w: &Indexer,
        (x, low, m): (&[f32], &[f32], usize),
    ) {
        on.linear(low, m, &mut [Product::of(&w.q, self.q, m)]);
        on.linear(x, m, &mut [Product::of(&w.proj, self.weights, m)]);
    }

    /// Puts keys into the cache, as layer `kv_layer`, and chooses positions for all rows.
    pub(crate) fn place(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w): (&IndexSpec, &Indexer),
        kv_layer: usize,
    ) -> Result<(), ComputeError> {
        let (arch, crew) = (cx.arch, cx.crew);
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
        crew.when(m_kv > 1)
            .for_chunks(self.k, spec.head_dim, |row, k| {
                let raw = &raw[row * spec.head_dim..][..spec.head_dim];
                arch.layer_norm(k, raw, &w.k_norm, &w.k_norm_bias, NORM_EPS);
                turn.apply(row, k);
            });
        for slot in &*cx.slots {
            let (first, row, n) = cx.rows.of(slot);
            let width = spec.n_head * spec.head_dim;
            for (j, q) in self.q[row * width..(row + n) * width]
                .chunks_exact_mut(width)
                .enumerate()
            {
                q.chunks_exact_mut(spec.head_dim)
                    .for_each(|q| turn.apply(slot.row + first + j, q));
            }
        }
        for slot in &mut *cx.slots {
            let (pos, rows) = (slot.pos(), Rows::All.range(slot));
            let rows = rows.start * spec.head_dim..rows.end * spec.head_dim;
            let (k, pool) = (&self.k[rows.clone()], self.pool.get(rows).unwrap_or(&[]));
            slot.kv.append(crew, arch, kv_layer, pos, k, pool)?;
        }
        let mut selection = std::mem::take(&mut cx.buffers.selection);
        for slot in &*cx.slots {
            let index = Index {
                arch,
                crew,
                spec,
                pool: w.pool.as_ref().map(|(_, places)| places.as_slice()),
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
    crew: &'a Crew<'a>,
    spec: &'a IndexSpec,
    /// See [`Indexer::pool`].
    pool: Option<&'a [f32]>,
    kv_layer: usize,
    q: &'a [f32],
    weights: &'a [f32],
}

impl Index<'_> {
    /// Chooses positions for the rows `rows` of a slot.
    fn choose(&self, slot: &SlotView<'_>, rows: Rows, scores: &mut [f32], to: &mut Selection<'_>) {
        let (first, row, n) = rows.of(slot);
        let width = to.width;
        let all_width = self.spec.top_k / self.spec.n_group();
        for block in (0..n).step_by(SCORED_ROWS) {
            let n_rows = (n - block).min(SCORED_ROWS);
            let (row, pos) = (row + block, slot.pos() + first + block);
            // Complete groups up to the last row's own position.
            let n_groups = |pos: usize| (pos + 1) / self.spec.n_group();
            let n_pages = (n_groups(pos + n_rows - 1) * self.spec.n_group()).div_ceil(KV_BLOCK);
            let scores = &mut scores[..n_pages * n_rows * KV_BLOCK];
            if n_groups(pos + n_rows - 1) > all_width {
                self.crew
                    .for_chunks(scores, n_rows * KV_BLOCK, |page, scores| {
                        self.score(slot, page, row, scores);
                    });
            }
            let scores = &*scores;
            let counts = &mut to.counts[row..row + n_rows];
            let positions = &mut to.positions[row * width..(row + n_rows) * width];
            self.crew.when(n_rows > 1).for_chunk_pairs(
                counts,
                1,
                positions,
                width,
                |j, count, positions| {
                    let n_group = self.spec.n_group();
                    let n_groups = n_groups(pos + j);
                    if n_groups <= all_width {
                        count[0] = ALL;
                        return;
                    }
                    let score = |group: u32| {
                        let place = group as usize * n_group;
                        let (page, place) = (place / KV_BLOCK, place % KV_BLOCK / n_group);
                        scores[(page * n_rows + j) * KV_BLOCK + place]
                    };
                    let end = pos + j + 1;
                    count[0] = choose(positions, (n_groups, all_width, n_group, end), score) as u32;
                },
            );
        }
    }

    /// Scores of the keys of a page for the rows from `row` on: `(rows, KV_BLOCK)`.
    fn score(&self, slot: &SlotView<'_>, page: usize, row: usize, scores: &mut [f32]) {
        let &IndexSpec {
            n_head, head_dim, ..
        } = self.spec;
        let mut keys = [0.0; KV_BLOCK * MAX_INDEX_DIM];
        let keys = &mut keys[..KV_BLOCK * head_dim];
        slot.kv.index_part(self.arch, self.kv_layer, page, 0, keys);
        let mut n_keys = KV_BLOCK;
        if let Some(places) = self.pool {
            let mut weights = [0.0; KV_BLOCK * MAX_INDEX_DIM];
            let weights = &mut weights[..KV_BLOCK * head_dim];
            slot.kv
                .index_part(self.arch, self.kv_layer, page, 1, weights);
            pool(keys, weights, places, head_dim);
            n_keys = KV_BLOCK * head_dim / places.len();
        }
        for (j, scores) in scores.chunks_exact_mut(KV_BLOCK).enumerate() {
            let q = &self.q[(row + j) * n_head * head_dim..][..n_head * head_dim];
            let weights = &self.weights[(row + j) * n_head..][..n_head];
            let keys = keys.chunks_exact(head_dim).take(n_keys);
            for (score, k) in scores.iter_mut().zip(keys) {
                let heads = q.chunks_exact(head_dim).zip(weights);
                *score = heads
                    .map(|(q, w)| w * self.arch.dot(q, k).clamp(0.0, f32::INFINITY))
                    .sum();
            }
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
