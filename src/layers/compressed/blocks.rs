//! Entries of blocks: what tokens give to them, and what becomes of it when a block is complete.

use crate::arch::MAX_HEAD_DIM;
use crate::compute::ComputeError;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowCtx};
use crate::kv::SeqKv;
use crate::layers::compressed::spec::BlocksSpec;
use crate::layers::compressed::weights::Compressor;
use crate::layers::context::Context;
use crate::layers::rope::spec::RopeId;
use crate::layers::rows::Rows;

/// Buffers of entries of `n` values.
pub(super) struct Blocks<'a> {
    /// What tokens give, and how much it counts: `(m_kv, n_part·n)`.
    given: &'a mut [f32],
    weights: &'a mut [f32],
    /// Entries at the rows that complete a block, zeros at others: `(m_kv, n)`.
    entries: &'a mut [f32],
}

impl<'a> Blocks<'a> {
    pub(super) fn take(
        frame: &mut Frame<'a>,
        of: Option<(BlocksSpec, usize)>,
        m_kv: usize,
    ) -> Blocks<'a> {
        let (n_given, n) = of.map_or((0, 0), |(spec, n)| (spec.n_part() * n, n));
        Blocks {
            given: frame.take(m_kv * n_given),
            weights: frame.take(m_kv * n_given),
            entries: frame.take(m_kv * n),
        }
    }

    /// Products of `m` rows of the layer's input.
    pub(super) fn project(&mut self, on: &mut RowCtx<'_, '_>, w: &Compressor, x: &[f32], m: usize) {
        let products = &mut [
            Product::of(&w.kv, self.given, m),
            Product::of(&w.gate, self.weights, m),
        ];
        on.linear(x, m, products);
    }

    /// Puts what tokens give into the cache's layer `layer`, and entries, which are values, too, if
    /// `has_values`, into the one behind it.
    pub(super) fn place(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, rope, n, n_rot): (&BlocksSpec, RopeId, usize, usize),
        w: &Compressor,
        (layer, has_values): (usize, bool),
    ) -> Result<(), ComputeError> {
        let (arch, threads, eps) = (cx.arch, cx.threads, cx.h.norm_eps);
        let (ratio, width) = (spec.ratio, spec.n_part() * n);
        for slot in &mut *cx.slots {
            let (pos, rows) = (slot.pos(), Rows::All.range(slot));
            let given = rows.start * width..rows.end * width;
            let weights = &mut self.weights[given.clone()];
            for (j, weights) in weights.chunks_exact_mut(width).enumerate() {
                arch.add(weights, &w.places[(pos + j) % ratio * width..][..width]);
            }
            let given = &self.given[given];
            slot.kv.append(threads, arch, layer, pos, given, weights)?;
            let entries = &mut self.entries[rows.start * n..rows.end * n];
            let kv = &*slot.kv;
            threads
                .when(rows.len() > 1)
                .for_chunks(entries, n, |j, entry| {
                    let end = pos + j + 1;
                    if end % ratio != 0 {
                        return entry.fill(0.0);
                    }
                    let mut mean = [0.0; MAX_HEAD_DIM];
                    let mean = &mut mean[..n];
                    self::mean(kv, (arch, layer), spec, end - ratio, mean);
                    arch.rms_norm(entry, mean, &w.norm, eps);
                    slot.rope
                        .rotate_at(arch, rope, end - ratio, &mut entry[n - n_rot..]);
                });
            let values = if has_values { &*entries } else { &[] };
            slot.kv
                .append(threads, arch, layer + 1, pos, entries, values)?;
        }
        Ok(())
    }
}

/// The mean of what the tokens of the block from position `first` on give, and with overlaps those of
/// the block before, each channel weighed by a softmax.
fn mean(
    kv: &SeqKv,
    (arch, layer): (crate::arch::Arch, usize),
    spec: &BlocksSpec,
    first: usize,
    mean: &mut [f32],
) {
    let n = mean.len();
    // Channels of the block before come first.
    let own = (spec.n_part() - 1, first);
    let before = first.checked_sub(spec.ratio).filter(|_| spec.overlaps);
    let blocks = before.map(|first| (0, first)).into_iter().chain([own]);
    let positions = blocks.flat_map(|(part, first)| {
        (first..first + spec.ratio).map(move |position| (part, position))
    });
    let (mut max, mut sum) = ([f32::NEG_INFINITY; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
    let mut row = [0.0; MAX_HEAD_DIM];
    let row = &mut row[..n];
    for (part, position) in positions.clone() {
        kv.index_row(arch, (layer, part), position, 1, row);
        max.iter_mut()
            .zip(&*row)
            .for_each(|(max, x)| *max = max.max(*x));
    }
    let mut given = [0.0; MAX_HEAD_DIM];
    let given = &mut given[..n];
    mean.fill(0.0);
    for (part, position) in positions {
        kv.index_row(arch, (layer, part), position, 0, given);
        kv.index_row(arch, (layer, part), position, 1, row);
        for (d, mean) in mean.iter_mut().enumerate() {
            let weight = (row[d] - max[d]).exp();
            *mean += weight * given[d];
            sum[d] += weight;
        }
    }
    mean.iter_mut()
        .zip(sum)
        .for_each(|(mean, sum)| *mean /= sum);
}
