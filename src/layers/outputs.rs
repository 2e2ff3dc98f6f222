//! Logits and hidden states of a batch.

use crate::compute::ComputeError;
use crate::compute::arena::reserve;
use crate::layers::rows::SlotRows;
use std::ops::Range;

/// Purposes of memory, for [`ComputeError::OutOfMemory`].
const LOGITS: &str = "logits";
const STATES: &str = "hidden states";

/// Outputs requested of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Logits.
    Logits,
    /// Logits, and the hidden states of all rows that the last layer computes.
    Both,
    /// The head's products instead of logits, and these hidden states.
    Raw,
    /// Only these hidden states.
    States,
}

/// Outputs of a pass, by slot; the memory is reused by the next pass.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// `(rows, n_vocab)`.
    pub(crate) logits: Vec<f32>,
    /// Inputs of the head, if they were requested, `(rows that the last layer computed, n_embd)`.
    pub(crate) states: Vec<f32>,
    n_vocab: usize,
    n_embd: usize,
    /// Each slot's rows with logits, and those that the last layer computed.
    rows: Vec<(Range<usize>, Range<usize>)>,
}

impl Outputs {
    /// Logits after the slot's tokens from its first output on, `(n, n_vocab)`.
    ///
    /// # Panics
    /// If the last pass had no such slot.
    pub fn logits(&self, slot: usize) -> &[f32] {
        &self.logits[self.of_logits(slot)]
    }

    /// Where the slot's logits are.
    pub(crate) fn of_logits(&self, slot: usize) -> Range<usize> {
        let rows = &self.rows[slot].0;
        rows.start * self.n_vocab..rows.end * self.n_vocab
    }

    /// Hidden states of the slot's rows that the last layer computed, `(n, n_embd)`; empty if
    /// nobody requested any.
    ///
    /// # Panics
    /// If the last pass had no such slot.
    pub fn states(&self, slot: usize) -> &[f32] {
        let rows = &self.rows[slot].1;
        self.states
            .get(rows.start * self.n_embd..rows.end * self.n_embd)
            .unwrap_or(&[])
    }

    /// The row before the last `n` of all; empty if there is none.
    pub(crate) fn before_last(&self, n: usize) -> &[f32] {
        let end = self.logits.len().saturating_sub(n * self.n_vocab);
        &self.logits[end.saturating_sub(self.n_vocab)..end]
    }

    /// Forgets the last `n` rows.
    pub(crate) fn drop_last(&mut self, n: usize) {
        self.logits
            .truncate(self.logits.len().saturating_sub(n * self.n_vocab));
    }

    /// Sets the contents to one row, or none, that was computed before. The memory must be
    /// [reserved](Outputs::reserve).
    pub(crate) fn set_last(&mut self, logits: &[f32], n_vocab: usize) {
        self.clear();
        self.n_vocab = n_vocab;
        self.logits.extend_from_slice(logits);
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> u64 {
        ((self.logits.capacity() + self.states.capacity()) * size_of::<f32>()) as u64
    }

    /// Drops the rows.
    pub(crate) fn clear(&mut self) {
        self.logits.clear();
        self.states.clear();
        self.rows.clear();
    }

    /// Reserves memory for so many logits and values of states.
    pub(crate) fn reserve(&mut self, n_logits: usize, n_states: usize) -> Result<(), ComputeError> {
        reserve(&mut self.logits, n_logits, LOGITS)?;
        reserve(&mut self.states, n_states, STATES)
    }

    /// Rows for the outputs of `slots`.
    pub(crate) fn prepare<'a>(
        &mut self,
        slots: impl Iterator<Item = &'a SlotRows<'a>> + Clone,
        (n_vocab, n_embd): (usize, usize),
        wanted: Wanted,
    ) -> Result<(), ComputeError> {
        let n_vocab = if wanted == Wanted::States { 0 } else { n_vocab };
        (self.n_vocab, self.n_embd) = (n_vocab, n_embd);
        self.rows.clear();
        self.rows.resize(slots.clone().count(), (0..0, 0..0));
        let mut n = 0;
        for slot in slots.clone() {
            self.rows[slot.index] = (n..n + slot.n_logits(), slot.outputs(slot.first_last()));
            n += slot.n_logits();
        }
        let n_states = if wanted == Wanted::Logits {
            0
        } else {
            slots.map(SlotRows::n_outputs).sum()
        };
        self.reserve(n.saturating_mul(n_vocab), n_states.saturating_mul(n_embd))?;
        self.logits.resize(n * n_vocab, 0.0);
        self.states.clear();
        Ok(())
    }
}
