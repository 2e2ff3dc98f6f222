//! What queries see of a window and of entries.

use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK};
use crate::layers::compressed::spec::{BlockIndexSpec, BlocksSpec, CompressedSpec};
use crate::layers::indexer::spec::MAX_INDEX_DIM;
use crate::layers::indexer::{choose, scores_of_keys};
use crate::layers::rows::{Rows, SlotView};
use crate::threads::PoolHandle;

/// Most heads of a row that a task takes.
const HEADS: usize = 16;

/// Queries of a layer.
pub(super) struct Queries<'a> {
    pub(super) arch: Arch,
    pub(super) threads: &'a PoolHandle<'a>,
    pub(super) spec: &'a CompressedSpec,
    /// The layer's first one of the cache.
    pub(super) first: usize,
    pub(super) rows: Rows,
    pub(super) sinks: &'a [f32],
    pub(super) q: &'a [f32],
    pub(super) index_q: &'a [f32],
    pub(super) index_weights: &'a [f32],
}

/// The entries that a row sees.
enum Seen<'a> {
    /// The first ones.
    First(usize),
    Chosen(&'a [u32]),
}

impl Queries<'_> {
    /// Attention of a slot's rows, to `out`, `(m, n_head·head_dim)`.
    pub(super) fn slot(
        &self,
        slot: &SlotView<'_>,
        scores: &mut [f32],
        chosen: &mut [u32],
        out: &mut [f32],
    ) {
        let (spec, (first, row, n)) = (self.spec, self.rows.of(slot));
        let width = spec.n_head * spec.head_dim;
        let n_q = (1..=HEADS.min(spec.n_head))
            .rev()
            .find(|n| spec.n_head.is_multiple_of(*n))
            .unwrap_or(1);
        for j in 0..n {
            let pos = slot.pos() + first + j;
            let n_entries = spec.blocks.map_or(0, |blocks| (pos + 1) / blocks.ratio);
            let index = spec.blocks.and_then(|blocks| Some((blocks, blocks.index?)));
            let seen = match index.filter(|(_, index)| n_entries > index.top_k) {
                None => Seen::First(n_entries),
                Some((blocks, index)) => {
                    self.score(slot, (&blocks, &index), row + j, n_entries, scores);
                    let sizes = (n_entries, index.top_k, 1, n_entries);
                    let n = choose(chosen, sizes, |i| scores[i as usize]);
                    Seen::Chosen(&chosen[..n])
                }
            };
            let out = &mut out[(row + j) * width..][..width];
            self.threads
                .for_chunks(out, n_q * spec.head_dim, |part, out| {
                    self.heads(slot, pos, (row + j, part * n_q), &seen, out);
                });
        }
    }

    /// Scores of all complete entries for a row.
    fn score(
        &self,
        slot: &SlotView<'_>,
        (blocks, index): (&BlocksSpec, &BlockIndexSpec),
        row: usize,
        n_entries: usize,
        scores: &mut [f32],
    ) {
        let n = index.head_dim;
        let q = &self.index_q[row * index.n_head * n..][..index.n_head * n];
        let weights = &self.index_weights[row * index.n_head..][..index.n_head];
        let of_page = KV_BLOCK / blocks.ratio;
        let scores = &mut scores[..n_entries];
        self.threads.for_chunks(scores, of_page, |page, scores| {
            let mut keys = [0.0; KV_BLOCK * MAX_INDEX_DIM];
            let keys = &mut keys[..scores.len() * n];
            for (i, key) in keys.chunks_exact_mut(n).enumerate() {
                let position = (page * of_page + i + 1) * blocks.ratio - 1;
                let at = (self.first + 4, 0);
                slot.kv.index_row(self.arch, at, position, 0, key);
            }
            scores_of_keys(self.arch, (q, Some(weights)), keys, n, scores);
        });
    }

    /// Attention of some heads of a row from head `head` on.
    fn heads(
        &self,
        slot: &SlotView<'_>,
        pos: usize,
        (row, head): (usize, usize),
        seen: &Seen<'_>,
        out: &mut [f32],
    ) {
        let (spec, d) = (self.spec, self.spec.head_dim);
        let n_q = out.len() / d;
        let mut q = [0.0; HEADS * crate::arch::MAX_HEAD_DIM];
        let q = &mut q[..n_q * d];
        q.copy_from_slice(&self.q[(row * spec.n_head + head) * d..][..n_q * d]);
        q.chunks_exact_mut(d)
            .for_each(|q| slot.kv.transform_query(self.arch, self.first, q));
        let (mut max, mut sum) = ([0.0; HEADS], [1.0; HEADS]);
        max[..n_q].copy_from_slice(&self.sinks[head..][..n_q]);
        out.fill(0.0);
        let mut total = AttnPartial {
            out,
            max: &mut max[..n_q],
            sum: &mut sum[..n_q],
        };
        let params = AttnParams {
            head_dim: d,
            head_dim_v: d,
            scale: 1.0 / (d as f32).sqrt(),
            softcap: 0.0,
            slope: 0.0,
            exact: true,
        };
        let start = (pos + 1).saturating_sub(spec.window);
        let range = (start as u32, pos as u32 + 1);
        for piece in slot.kv.pieces(self.first, range) {
            let (at, ranges) = ((self.first, 0), &[range; HEADS][..n_q]);
            slot.kv
                .attention(self.arch, at, piece, &mut total, q, ranges, &params);
        }
        let ratio = spec.blocks.map_or(1, |blocks| blocks.ratio) as u32;
        let mut add = |entries: &mut dyn Iterator<Item = u32>| {
            let (at, positions) = ((self.first + 2, 0), entries.map(|i| (i + 1) * ratio - 1));
            slot.kv
                .attention_at(self.arch, at, positions, &mut total, q, &params);
        };
        match seen {
            Seen::First(n) => add(&mut (0..*n as u32)),
            Seen::Chosen(chosen) => add(&mut chosen.iter().copied()),
        }
        slot.kv
            .finish_attention(self.arch, self.first, &mut total, &params);
    }
}
