//! Hidden states of the last tokens of a sequence, for drafters that read them.

use crate::compute::arena::reserve;
use crate::engine::SessionError;
use crate::kv::{KvPool, Lent};
use crate::layers::inputs::LayerInputs;
use std::ops::Range;

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
    /// Whether they stay when the generation ends that wanted them.
    pub(crate) is_pinned: bool,
    /// Of the pool's budget, for a drafter.
    lent: Option<Lent>,
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
            is_pinned: false,
            lent: None,
        })
    }

    /// Takes as much of the pool's budget, with what a pass of `n_batch` tokens leaves for it.
    pub(crate) fn lent(mut self, pool: &KvPool, n_ctx: usize) -> Result<KeptStates, SessionError> {
        self.lent = Some(pool.lend(kept_inputs_bytes(self.n_embd, n_ctx, KEPT_STATES))?);
        Ok(self)
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

/// What chosen layers read of the last tokens of a sequence, for each drafter that reads others.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptInputs {
    /// Of the pass under way.
    of_pass: Vec<LayerInputs>,
    /// Of tokens that were computed, for each of the former.
    kept: Vec<KeptStates>,
    /// Number of layers, which stands for what the last one leaves.
    n_layer: usize,
}

impl KeptInputs {
    /// Keeps those of `layers`, too, in a sequence of at most `n_ctx` tokens; of the budget of a pool
    /// that is limited it takes as much.
    pub(crate) fn add(
        &mut self,
        layers: &[usize],
        (n_layer, n_embd): (usize, usize),
        n_ctx: usize,
        limited: Option<&KvPool>,
    ) -> Result<(), SessionError> {
        if self.index(layers).is_none() {
            let of_pass = LayerInputs::new(layers.into(), n_embd);
            let kept = KeptStates::new(of_pass.width(), n_ctx)?;
            self.kept.push(match limited {
                Some(pool) => kept.lent(pool, n_ctx)?,
                None => kept,
            });
            self.of_pass.push(of_pass);
            self.n_layer = n_layer;
        }
        Ok(())
    }

    /// Lets them stay when the generation ends that wanted them.
    pub(crate) fn pin(&mut self) {
        self.kept.iter_mut().for_each(|kept| kept.is_pinned = true);
    }

    /// Forgets those that are not to stay.
    pub(crate) fn release(&mut self) {
        let mut is_pinned = self.kept.iter().map(|kept| kept.is_pinned);
        self.of_pass.retain(|_| is_pinned.next() == Some(true));
        self.kept.retain(|kept| kept.is_pinned);
    }

    fn index(&self, layers: &[usize]) -> Option<usize> {
        self.of_pass.iter().position(|of| **of.layers() == *layers)
    }

    /// Whether what the last layer leaves is among those of one drafter.
    fn has_last(&self, of: &LayerInputs) -> bool {
        of.layers().contains(&self.n_layer)
    }

    /// As [`KeptStates::expect`].
    pub(crate) fn expect(&mut self, end: usize) {
        self.kept.iter_mut().for_each(|kept| kept.expect(end));
    }

    /// What takes the rows of the pass that computes `n` tokens from `position` on.
    pub(crate) fn begin(&mut self, position: usize, n: usize) -> &mut [LayerInputs] {
        for (of_pass, kept) in self.of_pass.iter_mut().zip(&self.kept) {
            of_pass.begin(kept.first_of(position, n));
        }
        &mut self.of_pass
    }

    /// Of the next `n` tokens, from `position` on, the first of which a drafter reads what the last
    /// layer leaves.
    pub(crate) fn first_of(&self, position: usize, n: usize) -> usize {
        let all = self.of_pass.iter().zip(&self.kept);
        let of_last = all.filter(|(of_pass, _)| self.has_last(of_pass));
        let firsts = of_last.map(|(_, kept)| kept.first_of(position, n));
        firsts.min().unwrap_or(n)
    }

    /// The pass has computed `n` tokens from `position` on; the last layer those from `first` on.
    pub(crate) fn commit(&mut self, position: usize, first: usize, n: usize) {
        for i in 0..self.kept.len() {
            let of_pass = &self.of_pass[i];
            let of_last = if self.has_last(of_pass) { first } else { 0 };
            let first = of_last.max(self.kept[i].first_of(position, n));
            self.kept[i].append(position + first, of_pass.rows(first, n));
            self.of_pass[i].clear();
        }
    }

    /// Those of `layers`, of tokens up to the one before `position`, see [`KeptStates::before`].
    pub(crate) fn before(&self, layers: &[usize], position: usize) -> &[f32] {
        let index = self.index(layers);
        index.map_or(&[], |i| self.kept[i].before(position))
    }

    pub(crate) fn truncate(&mut self, position: usize) {
        self.kept
            .iter_mut()
            .for_each(|kept| kept.truncate(position));
    }

    pub(crate) fn shift(&mut self, gone: &Range<usize>) {
        self.kept
            .iter_mut()
            .for_each(|kept| kept.shift(gone.clone()));
    }

    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        let of_pass = self.of_pass.iter().map(LayerInputs::bytes);
        of_pass.chain(self.kept.iter().map(KeptStates::bytes)).sum()
    }
}

/// Bytes of what `width` values of each of the last tokens take in a sequence of at most `n_ctx`
/// tokens, and in a pass of `n_batch`.
pub(crate) fn kept_inputs_bytes(width: usize, n_ctx: usize, n_batch: usize) -> u64 {
    let n_rows = most_rows(n_ctx) + KEPT_STATES.min(n_batch);
    (n_rows * width * size_of::<f32>()) as u64
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
