//! Hidden states of the last tokens of a sequence, for drafters that read them.

use crate::compute::arena::reserve;
use crate::engine::SessionError;
use crate::layers::inputs::LayerInputs;
use std::ops::Range;
use std::sync::Arc;

/// Most tokens of which they are kept: of a longer prompt only the end. Each takes the last layer's
/// work.
pub(crate) const KEPT_STATES: usize = 512;
/// Rows beyond those after which the first ones go, so that they seldom have to be moved.
const SLACK: usize = 64;
/// Purpose of the memory, for [`SessionError::OutOfMemory`].
const STATES: &str = "hidden states";

/// What the head read for tokens at adjacent positions.
#[derive(Clone, Debug)]
pub(crate) struct KeptStates {
    n_embd: usize,
    /// Position of the first.
    first: usize,
    rows: Vec<f32>,
    /// Position of the first token whose state anybody will want.
    wanted: usize,
}

impl KeptStates {
    /// For a sequence of at most `n_ctx` tokens.
    pub(crate) fn new(n_embd: usize, n_ctx: usize) -> Result<KeptStates, SessionError> {
        let mut rows = Vec::new();
        reserve(&mut rows, most_rows(n_ctx) * n_embd, STATES)?;
        Ok(KeptStates {
            n_embd,
            first: 0,
            rows,
            wanted: 0,
        })
    }

    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.rows.capacity() * size_of::<f32>()) as u64
    }

    /// Tokens up to `end` will be computed, piece by piece.
    pub(crate) fn expect(&mut self, end: usize) {
        self.wanted = end.saturating_sub(KEPT_STATES);
    }

    /// Of the next `n` tokens, from `position` on, the first to keep.
    pub(crate) fn first_of(&self, position: usize, n: usize) -> usize {
        n.saturating_sub(KEPT_STATES)
            .max(self.wanted.saturating_sub(position))
            .min(n)
    }

    fn end(&self) -> usize {
        self.first + self.rows.len() / self.n_embd
    }

    /// Adds the states of tokens from `position` on, at most [`KEPT_STATES`]. Where they do not
    /// follow the others, those are forgotten.
    pub(crate) fn append(&mut self, position: usize, rows: &[f32]) {
        if rows.is_empty() {
            return;
        }
        if position != self.end() {
            self.rows.clear();
            self.first = position;
        }
        let n = (self.rows.len() + rows.len()) / self.n_embd;
        if n > KEPT_STATES + SLACK {
            let gone = n - KEPT_STATES;
            self.rows.drain(..gone * self.n_embd);
            self.first += gone;
        }
        self.rows.extend_from_slice(rows);
    }

    /// Tokens from `position` on are gone.
    pub(crate) fn truncate(&mut self, position: usize) {
        self.rows
            .truncate(position.saturating_sub(self.first) * self.n_embd);
        self.first = self.first.min(position);
    }

    /// The tokens `gone` are gone, and those behind them have moved to their place.
    pub(crate) fn shift(&mut self, gone: Range<usize>) {
        if self.first < gone.end {
            let n = (gone.end - self.first).min(self.rows.len() / self.n_embd);
            self.rows.drain(..n * self.n_embd);
            self.first += n;
        }
        self.first = self.first.saturating_sub(gone.len());
        self.wanted = self.wanted.saturating_sub(gone.len());
    }

    /// Those that end with the token before `position`; none where that one's is not there.
    pub(crate) fn before(&self, position: usize) -> &[f32] {
        match position.checked_sub(self.first) {
            Some(n) if position <= self.end() => &self.rows[..n * self.n_embd],
            _ => &[],
        }
    }
}

/// What chosen layers read of the last tokens of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct KeptInputs {
    /// Of the pass under way.
    pub(crate) of_pass: LayerInputs,
    kept: KeptStates,
    /// Whether what the last layer leaves is among them.
    has_last: bool,
}

impl KeptInputs {
    /// For a sequence of at most `n_ctx` tokens.
    pub(crate) fn new(
        layers: Arc<[usize]>,
        (n_layer, n_embd): (usize, usize),
        n_ctx: usize,
    ) -> Result<KeptInputs, SessionError> {
        let has_last = layers.contains(&n_layer);
        let of_pass = LayerInputs::new(layers, n_embd, KEPT_STATES);
        let kept = KeptStates::new(of_pass.width(), n_ctx)?;
        Ok(KeptInputs {
            of_pass,
            kept,
            has_last,
        })
    }

    pub(crate) fn has_last(&self) -> bool {
        self.has_last
    }

    /// The layers; the number of layers stands for what the last one leaves.
    pub(crate) fn layers(&self) -> &Arc<[usize]> {
        self.of_pass.layers()
    }

    /// As [`KeptStates::first_of`].
    pub(crate) fn first_of(&self, position: usize, n: usize) -> usize {
        self.kept.first_of(position, n)
    }

    /// The pass has computed `n` tokens from `position` on; the last layer those from `first` on.
    pub(crate) fn commit(&mut self, position: usize, first: usize, n: usize) {
        let first = first.max(self.first_of(position, n));
        self.kept
            .append(position + first, self.of_pass.rows(first, n));
        self.of_pass.clear();
    }

    /// Those of tokens up to the one before `position`, see [`KeptStates::before`].
    pub(crate) fn before(&self, position: usize) -> &[f32] {
        self.kept.before(position)
    }

    pub(crate) fn truncate(&mut self, position: usize) {
        self.kept.truncate(position);
    }

    pub(crate) fn shift(&mut self, gone: Range<usize>) {
        self.kept.shift(gone);
    }

    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.kept.bytes()
    }
}

/// Most rows that a sequence of at most `n_ctx` tokens keeps.
pub(crate) fn most_rows(n_ctx: usize) -> usize {
    (KEPT_STATES + SLACK).min(n_ctx)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &[f32] = &[];

    /// Rows of two values that tell their tokens.
    fn rows(tokens: Range<usize>) -> Vec<f32> {
        tokens
            .flat_map(|token| [token as f32, -(token as f32)])
            .collect()
    }

    #[test]
    fn the_last_ones_are_kept_without_a_gap() {
        let mut states = KeptStates::new(2, 4096).unwrap();
        let bytes = states.bytes();
        assert_eq!(states.before(0), NONE);
        states.append(0, &rows(0..3));
        states.append(3, &rows(3..5));
        assert_eq!(states.before(5), rows(0..5));
        assert_eq!(states.before(4), rows(0..4));
        assert_eq!(states.before(6), NONE);
        states.truncate(2);
        states.append(2, &rows(2..4));
        assert_eq!(states.before(4), rows(0..4));
        // Tokens of which nothing is known lie between.
        states.append(9, &rows(9..10));
        assert_eq!(
            (states.before(10), states.before(9), states.before(4)),
            (&rows(9..10)[..], NONE, NONE)
        );
        states.truncate(3);
        states.append(3, &rows(3..7));
        assert_eq!(states.before(7), rows(3..7));
        for i in 7..3000 {
            states.append(i, &rows(i..i + 1));
            let n = states.before(i + 1).len() / 2;
            assert_eq!(states.before(i + 1), rows(i + 1 - n..i + 1));
            assert!(n >= KEPT_STATES.min(i - 2) && n <= KEPT_STATES + SLACK);
        }
        assert_eq!(states.bytes(), bytes);
    }

    #[test]
    fn of_a_prompt_in_pieces_the_end_is_kept() {
        let mut states = KeptStates::new(2, 4096).unwrap();
        assert_eq!(
            (states.first_of(0, 100), states.first_of(0, 2000)),
            (0, 2000 - KEPT_STATES)
        );
        states.expect(1000);
        let first = 1000 - KEPT_STATES;
        assert_eq!(
            [
                states.first_of(0, 300),
                states.first_of(300, 300),
                states.first_of(600, 400)
            ],
            [300, first - 300, 0]
        );
        assert_eq!(states.first_of(1000, 1), 0);
        states.append(0, &[]);
        states.append(first, &rows(first..600));
        states.append(600, &rows(600..1000));
        assert_eq!(states.before(1000), rows(first..1000));
    }

    #[test]
    fn shifts_move_what_is_left() {
        let mut states = KeptStates::new(2, 4096).unwrap();
        states.append(0, &rows(0..10));
        states.shift(2..5);
        assert_eq!(states.before(7), rows(5..10));
        assert_eq!(states.before(2), NONE);
        // All of them lie behind.
        states.shift(0..2);
        assert_eq!(states.before(5), rows(5..10));
        states.shift(0..9);
        assert_eq!(states.before(0), NONE);
    }
}
