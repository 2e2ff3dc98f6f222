//! The rows of a pass, by sequence.

use crate::compute::hook::TokenKind;
use crate::engine::sequence::Sequence;
use crate::layers::rows::{SlotRows, SlotView};

/// Tokens that a pass appends to one sequence.
#[derive(Debug)]
pub struct Slot<'a> {
    pub(crate) seq: &'a mut Sequence,
    pub(crate) rows: SlotRows<'a>,
}

impl<'a> Slot<'a> {
    /// Appends `tokens` to `seq`; requests the logits after the last of them.
    pub fn new(seq: &'a mut Sequence, tokens: &'a [u32], kind: TokenKind) -> Slot<'a> {
        let rows = SlotRows {
            tokens,
            kind,
            exact: seq.exact,
            first_output: tokens.len().saturating_sub(1),
            first_state: tokens.len(),
            keeps_kind: false,
            states: &[],
            index: 0,
            row: 0,
            output: 0,
        };
        Slot { seq, rows }
    }

    /// What a forward pass sees of it.
    pub(crate) fn view(&mut self) -> SlotView<'_> {
        let position = self.pos();
        let Sequence {
            kv,
            rope,
            spans,
            memory,
            adapters,
            pooling,
            inputs,
            ..
        } = &mut *self.seq;
        SlotView {
            rows: self.rows,
            kv,
            rope,
            spans,
            memory: memory.as_deref(),
            adapters: &adapters.attached,
            pooling: pooling.as_mut(),
            inputs: inputs.begin(position, self.rows.tokens.len()),
        }
    }

    /// Requests the logits after each of `tokens[first..]`; none if there are fewer tokens.
    #[must_use]
    pub fn outputs_from(mut self, first: usize) -> Slot<'a> {
        self.rows.first_output = first.min(self.rows.tokens.len());
        self
    }

    /// Requests the hidden states of `tokens[first..]`, too.
    pub(crate) fn states_from(mut self, first: usize) -> Slot<'a> {
        self.rows.first_state = first.min(self.rows.tokens.len());
        self
    }

    /// Lets the last layer compute all rows as what they are, prompt or generated: whole texts, of
    /// which hidden states are wanted, or the logits of many rows.
    pub(crate) fn keeping_kind(mut self) -> Slot<'a> {
        self.rows.keeps_kind = true;
        self
    }

    /// Sets the hidden states that come with the tokens.
    pub(crate) fn with_states(mut self, states: &'a [f32]) -> Slot<'a> {
        self.rows.states = states;
        self
    }

    /// Position of the first token.
    pub(crate) fn pos(&self) -> usize {
        self.seq.kv.len()
    }
}
