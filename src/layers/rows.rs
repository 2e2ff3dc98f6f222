//! Rows of a batch, by sequence.

use crate::compute::hook::TokenKind;
use crate::compute::pooling::Pooling;
use crate::kv::{KvLayout, SeqKv};
use crate::layers::cross::memory::Memory;
use crate::layers::inputs::LayerInputs;
use crate::layers::rope::RopeTables;
use crate::layers::spans::Spans;
use crate::lora::Attached;
use std::ops::{Deref, Range};

/// Rows of a batch that one sequence appends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotRows<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) kind: TokenKind,
    /// Whether prompt rows have the arithmetic of generated ones.
    pub(crate) exact: bool,
    /// First token whose logits are requested.
    pub(crate) first_output: usize,
    /// First token whose hidden state is requested besides those.
    pub(crate) first_state: usize,
    /// Whether the last layer computes all rows as what they are, prompt or generated.
    pub(crate) keeps_kind: bool,
    /// Hidden states that come with the tokens of a block for multi-token prediction, `(tokens,
    /// n_embd)`.
    pub(crate) states: &'a [f32],
    /// Index among the caller's slots; a pass computes those of generated tokens first.
    pub(crate) index: usize,
    /// First row in the pass, and first row among those that the last layer computes.
    pub(crate) row: usize,
    pub(crate) output: usize,
}

impl SlotRows<'_> {
    /// First token that the last layer computes.
    pub(crate) fn first_last(&self) -> usize {
        self.first_output.min(self.first_state)
    }

    /// Rows that the last layer computes.
    pub(crate) fn n_outputs(&self) -> usize {
        self.tokens.len() - self.first_last()
    }

    /// Rows with logits.
    pub(crate) fn n_logits(&self) -> usize {
        self.tokens.len() - self.first_output
    }

    /// Its rows from token `first` on, among those that the last layer computes.
    pub(crate) fn outputs(&self, first: usize) -> Range<usize> {
        self.output + first - self.first_last()..self.output + self.n_outputs()
    }

    /// Whether its rows have the arithmetic of generated tokens.
    pub(crate) fn is_generated(&self) -> bool {
        self.kind == TokenKind::Generated || self.exact
    }
}

/// What a forward pass sees of a sequence: its new rows, and what they are computed with.
#[derive(Debug)]
pub(crate) struct SlotView<'a> {
    pub(crate) rows: SlotRows<'a>,
    pub(crate) kv: &'a mut SeqKv,
    pub(crate) rope: &'a RopeTables,
    /// Its positions that hold embeddings of images.
    pub(crate) spans: &'a Spans,
    /// What an encoder left of another text.
    pub(crate) memory: Option<&'a Memory>,
    pub(crate) adapters: &'a [Attached],
    /// Takes hidden states of the rows, if they are pooled.
    pub(crate) pooling: Option<&'a mut Pooling>,
    /// Take what layers read, one for each drafter that reads others.
    pub(crate) inputs: &'a mut [LayerInputs],
}

impl<'a> Deref for SlotView<'a> {
    type Target = SlotRows<'a>;

    fn deref(&self) -> &SlotRows<'a> {
        &self.rows
    }
}

impl SlotView<'_> {
    /// Position of the first token.
    pub(crate) fn pos(&self) -> usize {
        self.kv.len()
    }

    /// What buffers depend on.
    pub(crate) fn size(&self) -> SlotSize<'_> {
        SlotSize {
            layout: self.kv.layout(),
            n_past: self.pos(),
            n_tokens: self.tokens.len(),
            n_outputs: self.n_outputs(),
            is_generated: self.is_generated(),
            rank: self.adapters.iter().map(|a| a.max_rank).sum(),
        }
    }
}

/// What the buffers of a pass depend on, of one slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSize<'a> {
    pub(crate) layout: &'a KvLayout,
    /// Tokens before it.
    pub(crate) n_past: usize,
    pub(crate) n_tokens: usize,
    /// Rows that the last layer computes.
    pub(crate) n_outputs: usize,
    pub(crate) is_generated: bool,
    /// Ranks of its adapters, summed.
    pub(crate) rank: usize,
}

/// Set of rows of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All rows.
    All,
    /// Rows that the last layer computes, for logits or hidden states, stored contiguously.
    Outputs,
}

impl Rows {
    /// The slot's first token, its first row, and its number of rows.
    pub(crate) fn of(self, slot: &SlotRows<'_>) -> (usize, usize, usize) {
        match self {
            Rows::All => (0, slot.row, slot.tokens.len()),
            Rows::Outputs => (slot.first_last(), slot.output, slot.n_outputs()),
        }
    }

    /// Rows of a slot of this size.
    pub(crate) fn n(self, size: &SlotSize<'_>) -> usize {
        match self {
            Rows::All => size.n_tokens,
            Rows::Outputs => size.n_outputs,
        }
    }

    /// The slot's rows.
    pub(crate) fn range(self, slot: &SlotRows<'_>) -> Range<usize> {
        let (_, row, n) = self.of(slot);
        row..row + n
    }

    /// Number of rows of all slots.
    pub(crate) fn n_of(self, slots: &[SlotView<'_>]) -> usize {
        slots.iter().map(|slot| self.of(slot).2).sum()
    }

    /// Number of rows with the arithmetic of generated tokens, which come first.
    pub(crate) fn n_generated(self, slots: &[SlotView<'_>]) -> usize {
        slots
            .iter()
            .take_while(|slot| slot.is_generated())
            .map(|slot| self.of(slot).2)
            .sum()
    }
}
