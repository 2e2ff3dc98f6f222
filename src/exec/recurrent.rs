//! Recurrent mixers: what they share.
//!
//! A recurrence has a state that every token changes, fed by values of that token, and gives some
//! values out. A mixer is products with matrices, which take all tokens of a pass together, and
//! recurrences between them, which take one token after the other: so neither the sizes of passes
//! nor their other tokens change a bit. The state is the sequence's, see `cache/sequence/recurrent.
//! rs`.

use super::arena::{Frame, counted};
use super::batch::{Adapters, Rows, Slot};
use super::conv::CausalConv;
use super::forward::{Base, row_adapters};
use super::linear::{Product, Scratch, linear};
use super::{delta, mamba, mamba2, rwkv, short_conv};
use crate::arch::Arch;
use crate::cache::CellShape;
use crate::model::{Recurrent, RecurrentSpec};

/// A recurrence of a layer.
pub(super) trait Recurrence: Sync {
    /// Its parts, which do not depend on each other: the state and the values given out are cut
    /// into so many.
    fn n_parts(&self) -> usize;

    /// Values that a token gives out.
    fn n_out(&self) -> usize;

    /// Takes the state of a part through a token, of which it is given all values that feed it.
    fn step(&self, arch: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]);
}

/// What a mixer works with: a pass, and its place among the recurrences of a sequence.
pub(super) struct Mixing<'a, 's, 'f> {
    pub(super) base: Base<'a>,
    pub(super) slots: &'a mut [Slot<'s>],
    /// Where the rows of each slot end.
    pub(super) ends: &'a [u32],
    pub(super) scratch: &'a mut Scratch<'f>,
    /// Of norms.
    pub(super) eps: f32,
    /// The next recurrence.
    pub(super) cell: usize,
    /// Values of the first layer, `(m, n_embd)`, if others read them (RWKV 7).
    pub(super) first_values: &'a mut [f32],
}

impl Mixing<'_, '_, '_> {
    /// Products of all rows of `x`.
    pub(super) fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        let (slots, n_generated) = (Adapters(self.slots), Rows::All.n_generated(self.slots));
        let ctx = self.base.with(row_adapters(&slots, self.ends), n_generated);
        linear(ctx, self.scratch, x, m, products);
    }

    /// Takes each sequence through its rows of `feeds`, `(m, n_feed)`, and writes what they give
    /// out to `out`, `(m, n_out)`. `by_part` has as much room.
    pub(super) fn recur(
        &mut self,
        recurrence: &dyn Recurrence,
        (feeds, n_feed): (&[f32], usize),
        by_part: &mut [f32],
        out: &mut [f32],
    ) {
        let (Base { arch, crew, .. }, n_parts, n_out) =
            (self.base, recurrence.n_parts(), recurrence.n_out());
        let width = n_out / n_parts;
        for slot in &mut *self.slots {
            let rows = Rows::All.range(slot);
            let out = &mut out[rows.start * n_out..rows.end * n_out];
            let feeds = &feeds[rows.start * n_feed..rows.end * n_feed];
            slot.seq
                .kv
                .recur(crew, self.cell, feeds, &mut |state, feeds, rows| {
                    let (n, n_state) = (feeds.len() / n_feed, state.len() / n_parts);
                    let by_part = &mut by_part[..n * n_out];
                    crew.for_chunk_pairs(state, n_state, by_part, n * width, |part, state, out| {
                        for (feed, out) in
                            feeds.chunks_exact(n_feed).zip(out.chunks_exact_mut(width))
                        {
                            recurrence.step(arch, part, state, feed, out);
                        }
                    });
                    let Some(rows) = rows else { return };
                    let by_part = &*by_part;
                    let to = &mut out[rows.start * n_out..rows.end * n_out];
                    crew.when(n > 1).for_chunks(to, n_out, |row, to| {
                        for (part, to) in to.chunks_exact_mut(width).enumerate() {
                            to.copy_from_slice(&by_part[(part * n + row) * width..][..width]);
                        }
                    });
                });
        }
        self.cell += 1;
    }
}

/// The recurrences of a mixer.
pub(super) fn cells(spec: &RecurrentSpec) -> Vec<CellShape> {
    match spec {
        RecurrentSpec::ShortConv(spec) => vec![CausalConv::cell(*spec)],
        RecurrentSpec::Mamba(spec) => mamba::cells(spec).to_vec(),
        RecurrentSpec::Mamba2(spec) => mamba2::cells(spec).to_vec(),
        RecurrentSpec::Delta(spec) => delta::cells(spec).to_vec(),
        RecurrentSpec::TimeMix(spec) => rwkv::time_cells(spec).to_vec(),
        RecurrentSpec::ChannelMix(spec) => rwkv::channel_cells(spec).to_vec(),
    }
}

/// Bytes of its buffers for `m` rows.
pub(super) fn bytes(spec: &RecurrentSpec, m: usize) -> usize {
    match spec {
        RecurrentSpec::ShortConv(spec) => {
            counted(|frame| short_conv::Buffers::take(frame, *spec, m))
        }
        RecurrentSpec::Mamba(spec) => counted(|frame| mamba::Buffers::take(frame, spec, m)),
        RecurrentSpec::Mamba2(spec) => counted(|frame| mamba2::Buffers::take(frame, spec, m)),
        RecurrentSpec::Delta(spec) => counted(|frame| delta::Buffers::take(frame, spec, m)),
        RecurrentSpec::TimeMix(spec) => counted(|frame| rwkv::TimeBuffers::take(frame, spec, m)),
        RecurrentSpec::ChannelMix(spec) => {
            counted(|frame| rwkv::ChannelBuffers::take(frame, spec, m))
        }
    }
}

/// What the mixer makes of `m` rows of `x`, to be multiplied by its output matrix if it has one.
pub(super) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    (spec, w): (&RecurrentSpec, &Recurrent),
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    match (spec, w) {
        (RecurrentSpec::ShortConv(spec), Recurrent::ShortConv(w)) => {
            short_conv::mix(pass, *spec, w, (x, m), frame)
        }
        (RecurrentSpec::Mamba(spec), Recurrent::Mamba(w)) => {
            mamba::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::Mamba2(spec), Recurrent::Mamba2(w)) => {
            mamba2::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::Delta(spec), Recurrent::Delta(w)) => {
            delta::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::TimeMix(spec), Recurrent::TimeMix(w)) => {
            rwkv::time_mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::ChannelMix(spec), Recurrent::ChannelMix(w)) => {
            rwkv::channel_mix(pass, spec, w, (x, m), frame)
        }
        _ => unreachable!("weights are bound by specification"),
    }
}
