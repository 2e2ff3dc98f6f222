//! The rows of a pass, by sequence, and its outputs.

use super::hook::TokenKind;
use super::linear::SlotAdapters;
use super::sequence::Sequence;
use crate::cache::KvLayout;
use crate::exec::SessionError;
use crate::lora::Attached;
use std::ops::Range;

/// Purposes of memory, for [`SessionError::OutOfMemory`].
const LOGITS: &str = "logits";
const STATES: &str = "hidden states";

/// Tokens that a pass appends to one sequence.
#[derive(Debug)]
pub struct Slot<'a> {
    pub(super) seq: &'a mut Sequence,
    pub(super) tokens: &'a [u32],
    pub(super) kind: TokenKind,
    /// First token whose logits are requested.
    pub(super) first_output: usize,
    /// First token whose hidden state is requested besides those.
    pub(super) first_state: usize,
    /// See [`Slot::keeping_kind`].
    pub(super) keeps_kind: bool,
    /// Hidden states that come with the tokens of a block for multi-token prediction, `(tokens,
    /// n_embd)`.
    pub(super) states: &'a [f32],
    /// Index among the caller's slots; a pass computes those of generated tokens first.
    pub(super) index: usize,
    /// First row in the pass, and first row among those that the last layer computes.
    pub(super) row: usize,
    pub(super) output: usize,
}

impl<'a> Slot<'a> {
    /// Appends `tokens` to `seq`; requests the logits after the last of them.
    pub fn new(seq: &'a mut Sequence, tokens: &'a [u32], kind: TokenKind) -> Slot<'a> {
        let (first_output, first_state) = (tokens.len().saturating_sub(1), tokens.len());
        let (keeps_kind, states) = (false, &[][..]);
        Slot {
            seq,
            tokens,
            kind,
            first_output,
            first_state,
            keeps_kind,
            states,
            index: 0,
            row: 0,
            output: 0,
        }
    }

    /// Requests the logits after each of `tokens[first..]`; none if there are fewer tokens.
    #[must_use]
    pub fn outputs_from(mut self, first: usize) -> Slot<'a> {
        self.first_output = first.min(self.tokens.len());
        self
    }

    /// Requests the hidden states of `tokens[first..]`, too.
    pub(super) fn states_from(mut self, first: usize) -> Slot<'a> {
        self.first_state = first.min(self.tokens.len());
        self
    }

    /// Lets the last layer compute all rows as what they are, prompt or generated. Logits are not
    /// wanted.
    pub(super) fn keeping_kind(mut self) -> Slot<'a> {
        self.keeps_kind = true;
        self
    }

    /// Sets the hidden states that come with the tokens.
    pub(super) fn with_states(mut self, states: &'a [f32]) -> Slot<'a> {
        self.states = states;
        self
    }

    /// First token that the last layer computes.
    pub(super) fn first_last(&self) -> usize {
        self.first_output.min(self.first_state)
    }

    /// Rows that the last layer computes.
    pub(super) fn n_outputs(&self) -> usize {
        self.tokens.len() - self.first_last()
    }

    /// Rows with logits.
    pub(super) fn n_logits(&self) -> usize {
        self.tokens.len() - self.first_output
    }

    /// Its rows from token `first` on, among those that the last layer computes.
    pub(super) fn outputs(&self, first: usize) -> Range<usize> {
        self.output + first - self.first_last()..self.output + self.n_outputs()
    }

    /// Whether its rows have the arithmetic of generated tokens.
    pub(super) fn is_generated(&self) -> bool {
        self.kind == TokenKind::Generated || self.seq.exact
    }

    /// Position of the first token.
    pub(super) fn pos(&self) -> usize {
        self.seq.kv.len()
    }

    pub(super) fn size(&self) -> SlotSize<'_> {
        SlotSize {
            layout: self.seq.kv.layout(),
            n_past: self.pos(),
            n_tokens: self.tokens.len(),
            n_outputs: self.n_outputs(),
            is_generated: self.is_generated(),
            rank: self.seq.adapters.attached.iter().map(|a| a.max_rank).sum(),
        }
    }
}

/// What the buffers of a pass depend on, of one slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotSize<'a> {
    pub(super) layout: &'a KvLayout,
    /// Tokens before it.
    pub(super) n_past: usize,
    pub(super) n_tokens: usize,
    /// Rows that the last layer computes.
    pub(super) n_outputs: usize,
    pub(super) is_generated: bool,
    /// Ranks of its adapters, summed.
    pub(super) rank: usize,
}

/// Set of rows of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// All rows.
    All,
    /// Rows that the last layer computes, for logits or hidden states, stored contiguously.
    Outputs,
}

impl Rows {
    /// The slot's first token, its first row, and its number of rows.
    pub(super) fn of(self, slot: &Slot<'_>) -> (usize, usize, usize) {
        match self {
            Rows::All => (0, slot.row, slot.tokens.len()),
            Rows::Outputs => (slot.first_last(), slot.output, slot.n_outputs()),
        }
    }

    /// Rows of a slot of this size.
    pub(super) fn n(self, size: &SlotSize<'_>) -> usize {
        match self {
            Rows::All => size.n_tokens,
            Rows::Outputs => size.n_outputs,
        }
    }

    /// The slot's rows.
    pub(super) fn range(self, slot: &Slot<'_>) -> Range<usize> {
        let (_, row, n) = self.of(slot);
        row..row + n
    }

    /// Number of rows with the arithmetic of generated tokens, which come first.
    pub(super) fn n_generated(self, slots: &[Slot<'_>]) -> usize {
        slots
            .iter()
            .take_while(|slot| slot.is_generated())
            .map(|slot| self.of(slot).2)
            .sum()
    }
}

/// The adapters of slots.
pub(super) struct Adapters<'a, 's>(pub(super) &'a [Slot<'s>]);

impl SlotAdapters for Adapters<'_, '_> {
    fn of(&self, slot: usize) -> &[Attached] {
        &self.0[slot].seq.adapters.attached
    }
}

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
    pub(super) logits: Vec<f32>,
    /// Inputs of the head, if they were requested, `(rows that the last layer computed, n_embd)`.
    pub(super) states: Vec<f32>,
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
    pub(super) fn of_logits(&self, slot: usize) -> Range<usize> {
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
    pub(super) fn before_last(&self, n: usize) -> &[f32] {
        let end = self.logits.len().saturating_sub(n * self.n_vocab);
        &self.logits[end.saturating_sub(self.n_vocab)..end]
    }

    /// Forgets the last `n` rows.
    pub(super) fn drop_last(&mut self, n: usize) {
        self.logits
            .truncate(self.logits.len().saturating_sub(n * self.n_vocab));
    }

    /// Sets the contents to one row, or none, that was computed before. The memory must be
    /// [reserved](Outputs::reserve).
    pub(super) fn set_last(&mut self, logits: &[f32], n_vocab: usize) {
        self.clear();
        self.n_vocab = n_vocab;
        self.logits.extend_from_slice(logits);
    }

    /// Bytes of its memory.
    pub(super) fn bytes(&self) -> u64 {
        ((self.logits.capacity() + self.states.capacity()) * size_of::<f32>()) as u64
    }

    /// Drops the rows.
    pub(super) fn clear(&mut self) {
        self.logits.clear();
        self.states.clear();
        self.rows.clear();
    }

    /// Reserves memory for so many logits and values of states.
    pub(super) fn reserve(&mut self, n_logits: usize, n_states: usize) -> Result<(), SessionError> {
        reserve(&mut self.logits, n_logits, LOGITS)?;
        reserve(&mut self.states, n_states, STATES)
    }

    /// Rows for the outputs of `slots`.
    pub(super) fn prepare(
        &mut self,
        slots: &[Slot<'_>],
        (n_vocab, n_embd): (usize, usize),
        wanted: Wanted,
    ) -> Result<(), SessionError> {
        let n_vocab = if wanted == Wanted::States { 0 } else { n_vocab };
        (self.n_vocab, self.n_embd) = (n_vocab, n_embd);
        self.rows.clear();
        self.rows.resize(slots.len(), (0..0, 0..0));
        let mut n = 0;
        for slot in slots {
            self.rows[slot.index] = (n..n + slot.n_logits(), slot.outputs(slot.first_last()));
            n += slot.n_logits();
        }
        let n_states = if wanted == Wanted::Logits {
            0
        } else {
            slots.iter().map(Slot::n_outputs).sum()
        };
        self.reserve(n.saturating_mul(n_vocab), n_states.saturating_mul(n_embd))?;
        self.logits.resize(n * n_vocab, 0.0);
        self.states.clear();
        Ok(())
    }
}

/// Reserves memory for `n` values in total.
pub(super) fn reserve<T>(
    values: &mut Vec<T>,
    n: usize,
    what: &'static str,
) -> Result<(), SessionError> {
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    let more = n.saturating_sub(values.len());
    values
        .try_reserve_exact(more)
        .map_err(|_| SessionError::OutOfMemory { what, bytes })
}

/// Reuses the memory of a list for what lives shorter.
pub(super) fn reuse<T, U>(mut list: Vec<T>) -> Vec<U> {
    list.clear();
    list.into_iter()
        .map(|_| unreachable!("the list is empty"))
        .collect()
}
