//! A recurrence, and what takes sequences through it.

use crate::arch::Arch;
use crate::compute::linear::Product;
use crate::layers::context::Context;
use crate::layers::rows::Rows;

/// A recurrence of a layer.
pub(crate) trait Recurrence: Sync {
    /// Its parts, which do not depend on each other: the state and the values given out are cut
    /// into so many.
    fn n_parts(&self) -> usize;

    /// Values that a token gives out.
    fn n_out(&self) -> usize;

    /// Takes the state of a part through a token, of which it is given all values that feed it.
    fn step(&self, arch: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]);
}

/// A mixer's context in a pass.
pub(crate) struct Mixing<'m, 'a, 's> {
    pub(crate) cx: &'m mut Context<'a, 's>,
    /// Values of the first layer, `(m, n_embd)`, if others read them (RWKV 7).
    pub(crate) first_values: &'m mut [f32],
}

impl Mixing<'_, '_, '_> {
    /// Products of all rows of `x`.
    pub(crate) fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        self.cx.of_all().linear(x, m, products);
    }

    /// Takes each sequence through its rows of `feeds`, `(m, n_feed)`, and writes what they give
    /// out to `out`, `(m, n_out)`. `by_part` has as much room.
    pub(crate) fn recur(
        &mut self,
        recurrence: &dyn Recurrence,
        (feeds, n_feed): (&[f32], usize),
        by_part: &mut [f32],
        out: &mut [f32],
    ) {
        let &mut Context {
            arch,
            threads,
            cell,
            ..
        } = &mut *self.cx;
        let (n_parts, n_out) = (recurrence.n_parts(), recurrence.n_out());
        let width = n_out / n_parts;
        for slot in &mut *self.cx.slots {
            let rows = Rows::All.range(slot);
            let out = &mut out[rows.start * n_out..rows.end * n_out];
            let feeds = &feeds[rows.start * n_feed..rows.end * n_feed];
            slot.kv
                .recur(threads, cell, feeds, &mut |state, feeds, rows| {
                    let (n, n_state) = (feeds.len() / n_feed, state.len() / n_parts);
                    let by_part = &mut by_part[..n * n_out];
                    threads.for_chunk_pairs(
                        state,
                        n_state,
                        by_part,
                        n * width,
                        |part, state, out| {
                            for (feed, out) in
                                feeds.chunks_exact(n_feed).zip(out.chunks_exact_mut(width))
                            {
                                recurrence.step(arch, part, state, feed, out);
                            }
                        },
                    );
                    let Some(rows) = rows else { return };
                    let by_part = &*by_part;
                    let to = &mut out[rows.start * n_out..rows.end * n_out];
                    threads.when(n > 1).for_chunks(to, n_out, |row, to| {
                        for (part, to) in to.chunks_exact_mut(width).enumerate() {
                            to.copy_from_slice(&by_part[(part * n + row) * width..][..width]);
                        }
                    });
                });
        }
        self.cx.cell += 1;
    }
}
