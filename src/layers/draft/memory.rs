//! Keys and values of a drafter's own layers, in `f32`.

use std::ops::Range;

/// Most positions that are kept: of longer texts the drafter sees the end, which changes how much it
/// guesses right, and no text.
const KEPT: usize = 4096;
/// Positions beyond those after which the first ones go.
const SLACK: usize = 512;

/// Keys and values of one layer at adjacent positions.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftMemory {
    /// Position of the first.
    first: usize,
    n: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl DraftMemory {
    /// Position behind the last.
    pub(crate) fn end(&self) -> usize {
        self.first + self.n
    }

    /// Forgets everything; goes on at `position`.
    pub(crate) fn restart(&mut self, position: usize) {
        (self.first, self.n) = (position, 0);
        self.k.clear();
        self.v.clear();
    }

    /// Forgets positions from `position` on.
    pub(crate) fn truncate(&mut self, position: usize) {
        let n = position.saturating_sub(self.first).min(self.n);
        if let (Some(n_k), Some(n_v)) = (
            self.k.len().checked_div(self.n),
            self.v.len().checked_div(self.n),
        ) {
            self.k.truncate(n * n_k);
            self.v.truncate(n * n_v);
        }
        self.n = n;
    }

    /// Adds `n` positions.
    pub(crate) fn append(&mut self, n: usize, k: &[f32], v: &[f32]) {
        self.k.extend_from_slice(k);
        self.v.extend_from_slice(v);
        self.n += n;
        if self.n > KEPT + SLACK {
            let gone = self.n - KEPT;
            let [n_k, n_v] = [&self.k, &self.v].map(|x| x.len() / self.n);
            self.k.drain(..gone * n_k);
            self.v.drain(..gone * n_v);
            (self.first, self.n) = (self.first + gone, KEPT);
        }
    }

    /// Keys and values of those of `positions` that are there.
    pub(crate) fn rows(&self, positions: Range<usize>) -> (&[f32], &[f32]) {
        let [start, end] = [positions.start, positions.end]
            .map(|position| position.clamp(self.first, self.end()) - self.first);
        let rows = |x: &'_ [f32]| match x.len().checked_div(self.n) {
            Some(width) => start * width..end.max(start) * width,
            None => 0..0,
        };
        (&self.k[rows(&self.k)], &self.v[rows(&self.v)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_stay_where_they_are() {
        let mut memory = DraftMemory::default();
        memory.restart(10);
        for i in 10..20 {
            memory.append(1, &[i as f32; 2], &[-(i as f32)]);
        }
        assert_eq!(
            memory.rows(12..14),
            (&[12.0, 12.0, 13.0, 13.0][..], &[-12.0, -13.0][..])
        );
        memory.truncate(13);
        assert_eq!((memory.end(), memory.rows(12..20).1), (13, &[-12.0][..]));
        for i in 13..13 + 2 * KEPT {
            memory.append(1, &[i as f32; 2], &[-(i as f32)]);
        }
        let end = 13 + 2 * KEPT;
        assert_eq!(memory.end(), end);
        assert_eq!(memory.rows(end - 1..end).1, [-((end - 1) as f32)]);
        assert!(memory.rows(0..end).1.len() <= KEPT + SLACK);
        memory.truncate(0);
        assert!(memory.rows(0..end).0.is_empty());
    }
}
