//! Keys and values of a drafter's own layers, in `f32`.

use std::ops::Range;

/// Most positions that are kept: of longer texts the drafter sees the end, which changes how much it
/// guesses right, and no text.
const MOST: usize = 4608;
/// Part of them that goes at once, so that they seldom have to be moved.
const SLACK: usize = 9;

/// Most positions that are kept of a text whose context, with what is guessed behind it, has `n`.
pub(crate) fn most_positions(n: usize) -> usize {
    n.min(MOST)
}

/// Keys and values of one layer at adjacent positions.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftMemory {
    /// Position of the first.
    first: usize,
    n: usize,
    /// Most that are kept.
    most: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl DraftMemory {
    /// Keeps at most [`most_positions`] of `n`.
    pub(crate) fn set_most(&mut self, n: usize) {
        self.most = most_positions(n);
    }

    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        ((self.k.capacity() + self.v.capacity()) * size_of::<f32>()) as u64
    }

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

    /// Adds `n` positions, no more than are kept.
    pub(crate) fn append(&mut self, n: usize, k: &[f32], v: &[f32]) {
        if self.n + n > self.most {
            let kept = (self.most - self.most / SLACK).saturating_sub(n);
            self.forget_first(self.n.saturating_sub(kept));
        }
        self.n += n;
        let room = self.n.next_power_of_two().min(self.most.max(self.n));
        for (all, new) in [(&mut self.k, k), (&mut self.v, v)] {
            let n_values = room * (new.len() / n.max(1));
            all.reserve_exact(n_values.saturating_sub(all.len()));
            all.extend_from_slice(new);
        }
    }

    fn forget_first(&mut self, gone: usize) {
        for x in [&mut self.k, &mut self.v] {
            let width = x.len().checked_div(self.n).unwrap_or(0);
            x.drain(..gone * width);
        }
        (self.first, self.n) = (self.first + gone, self.n - gone);
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
        for n_ctx in [700, 2 * MOST] {
            let mut memory = DraftMemory::default();
            memory.set_most(n_ctx);
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
            let most = most_positions(n_ctx);
            for i in (13..13 + 2 * MOST).step_by(3) {
                let rows = [i, i + 1, i + 2].map(|i| i as f32);
                memory.append(3, &rows.map(|x| [x; 2]).concat(), &rows.map(|x| -x));
                let n = memory.rows(0..i + 3).1.len();
                assert!(n <= most && (n > most / 2 || i < most));
                assert!(memory.bytes() <= (most * 3 * size_of::<f32>()) as u64);
            }
            let end = 13 + 2 * MOST;
            assert_eq!(memory.end(), end);
            assert_eq!(memory.rows(end - 1..end).1, [-((end - 1) as f32)]);
            memory.truncate(0);
            assert!(memory.rows(0..end).0.is_empty());
        }
    }
}
