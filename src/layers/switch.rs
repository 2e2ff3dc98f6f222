//! Adapters in the model's file, of which each token has one: the mean of the numbers of those that
//! tokens up to it chose, rounded (llama.cpp's `graniteswitch` computes it as attention with one
//! head, whose weights are equal to within 1e-13).

pub(crate) mod buffers;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::linear::{Product, RowAdapters};
use crate::kv::CellShape;
use crate::layers::context::{Context, Ends};
use crate::layers::recurrence::{Mixing, Recurrence};
use crate::layers::rows::Rows;
use crate::layers::switch::spec::SwitchSpec;
use crate::layers::switch::weights::SwitchTerm;

/// The choice: how many tokens chose, and the sum of the adapters' numbers.
pub(crate) const CELL: CellShape = CellShape {
    n_state: 2,
    n_feed: 1,
};

/// The mean of the numbers of the adapters that tokens chose.
struct Choice;

impl Recurrence for Choice {
    fn n_parts(&self) -> usize {
        1
    }

    fn n_out(&self) -> usize {
        1
    }

    fn step(&self, _: Arch, _: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        if feed[0] > 0.0 {
            state[0] += 1.0;
            state[1] += feed[0];
        }
        out[0] = (state[1] / state[0].max(1.0)).round();
    }
}

/// Chooses the adapters of all rows, before the first layer.
pub(crate) fn choose(cx: &mut Context<'_, '_>, spec: &SwitchSpec) {
    let mut b = std::mem::take(&mut cx.buffers.switch);
    for slot in &*cx.slots {
        let rows = Rows::All.range(slot);
        for (feed, &token) in b.feed[rows].iter_mut().zip(slot.tokens) {
            *feed = spec.chosen_by(token) as f32;
        }
    }
    let mut mixing = Mixing {
        cx: &mut *cx,
        first_values: &mut [],
    };
    mixing.recur(&Choice, (b.feed, 1), b.room, b.chosen);
    for slot in &*cx.slots {
        let last = &b.chosen[Rows::All.range(slot)][slot.first_last()..];
        b.chosen_last[Rows::Outputs.range(slot)].copy_from_slice(last);
    }
    std::mem::swap(&mut cx.buffers.switch, &mut b);
}

/// Adds the term of each row's adapter to its product: `y += B·A·x`, for the rows `rows`.
pub(crate) fn add(
    cx: &mut Context<'_, '_>,
    term: &SwitchTerm,
    rows: Rows,
    x: &[f32],
    y: &mut [f32],
) {
    let n_slot = cx.h.switch.as_ref().map_or(1, SwitchSpec::n_slot);
    let mut b = std::mem::take(&mut cx.buffers.switch);
    let m = rows.n_of(&cx.slots);
    let (n_in, n_out, rank) = (term.a.n_in, term.b.n_out / n_slot, term.b.n_in);
    let (chosen, ends, n_generated) = match rows {
        Rows::All => (&*b.chosen, Ends::All, Rows::All.n_generated(&cx.slots)),
        Rows::Outputs => (&*b.chosen_last, Ends::Outputs, cx.n_generated()),
    };
    let mut on = cx.of(ends, n_generated);
    (on.ctx.adapters, on.ctx.products) = (RowAdapters::All(&[]), None);
    let mut first = 0;
    for same in chosen[..m].chunk_by(|a, b| a == b) {
        let rows = first..first + same.len();
        first = rows.end;
        let slot = (same[0] as usize).min(n_slot - 1);
        if slot == 0 {
            continue;
        }
        let [a, of_b] = [&term.a, &term.b].map(|w| w.matrix(slot, n_slot));
        let (n, n_generated) = (
            rows.len(),
            n_generated.clamp(rows.start, rows.end) - rows.start,
        );
        let (low, term) = (&mut b.low[..n * rank], &mut b.term[..n * n_out]);
        let mut on = on.generated(n_generated);
        let x = &x[rows.start * n_in..rows.end * n_in];
        on.linear(x, n, &mut [Product::of_weight(&a, low, n)]);
        on.linear(low, n, &mut [Product::of_weight(&of_b, term, n)]);
        on.arch
            .add(&mut y[rows.start * n_out..rows.end * n_out], term);
    }
    std::mem::swap(&mut cx.buffers.switch, &mut b);
}
