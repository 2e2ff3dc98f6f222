//! Positions that the rows of a pass see.

use crate::compute::arena::Frame;
use crate::layers::hparams::Hparams;
use crate::layers::indexer::spec::IndexSpec;
use crate::layers::rows::{Rows, SlotView};

/// Number of chosen positions that stands for all up to the row's own.
pub(super) const ALL: u32 = u32::MAX;

/// Positions that the rows of a pass see, of the last layer that chose some.
#[derive(Default)]
pub(crate) struct Selection<'a> {
    /// In ascending order, `(m, n_choice)` times up to `width` of them.
    pub(super) positions: &'a mut [u32],
    /// How many; [`ALL`]: all up to its own.
    pub(super) counts: &'a mut [u32],
    pub(super) width: usize,
    pub(super) n_choice: usize,
}

impl<'a> Selection<'a> {
    /// For `m` rows of sequences of up to `longest` positions.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        h: &Hparams,
        m: usize,
        longest: usize,
    ) -> Selection<'a> {
        let most = |size: fn(&IndexSpec) -> usize| {
            let indexes = h.attention().filter_map(|attn| attn.index.as_ref());
            indexes.map(size).max().unwrap_or(0)
        };
        let n_choice = most(IndexSpec::n_choice);
        // Where all positions are seen, none are written.
        let width = match longest > most(|index| index.top_k) {
            true => most(IndexSpec::n_chosen),
            false => 0,
        };
        Selection {
            positions: frame.take(m * n_choice * width),
            counts: frame.take(m * n_choice),
            width,
            n_choice,
        }
    }

    /// The positions that KV head `head` sees in row `row`; `None`: all up to its own.
    pub(crate) fn of(&self, row: usize, head: usize) -> Option<&[u32]> {
        let choice = row * self.n_choice + if self.n_choice > 1 { head } else { 0 };
        let n = self.counts[choice];
        (n != ALL).then(|| &self.positions[choice * self.width..][..n as usize])
    }

    /// Keeps the rows that the last layer computes, where all rows were chosen for.
    pub(crate) fn gather(&mut self, slots: &[SlotView<'_>]) {
        for slot in slots {
            let (first, to, n) = Rows::Outputs.of(slot);
            let from = slot.row + first;
            let (n_choice, width) = (self.n_choice, self.n_choice * self.width);
            self.positions
                .copy_within(from * width..(from + n) * width, to * width);
            self.counts
                .copy_within(from * n_choice..(from + n) * n_choice, to * n_choice);
        }
    }
}
