//! Tiles of work, some of which may be left for later.

use std::ops::Range;

/// Regions of tiles between which work may pause, at most.
const N_REGIONS: usize = 16;

/// Progress of work that is cut into tiles: what of it is done, and whether it is time to pause.
/// What takes tiles calls [`Tiles::each`] for each of its parts, in the same order every time.
pub(crate) struct Tiles<'a> {
    /// Tiles that are computed, of all parts.
    n_done: usize,
    /// Those that were computed before this call.
    n_at_first: usize,
    /// Those of parts that are complete.
    n_before: usize,
    /// Called between two regions; `true` pauses the work.
    pause: Option<&'a dyn Fn() -> bool>,
    is_paused: bool,
}

impl<'a> Tiles<'a> {
    /// Work that does not pause.
    pub(crate) fn at_once() -> Tiles<'static> {
        Tiles::after(0, None)
    }

    /// Work of which the first `n_done` tiles are computed. Whenever it is continued, at least one
    /// region is.
    pub(crate) fn after(n_done: usize, pause: Option<&'a dyn Fn() -> bool>) -> Tiles<'a> {
        Tiles {
            n_done,
            n_at_first: n_done,
            n_before: 0,
            pause,
            is_paused: false,
        }
    }

    /// Tiles that are computed.
    pub(crate) fn n_done(&self) -> usize {
        self.n_done
    }

    /// Whether the work paused: it goes on after [`Tiles::n_done`] tiles.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Whether no tile of the next part is computed.
    pub(crate) fn is_new(&self) -> bool {
        self.n_done == self.n_before
    }

    /// Takes what is left of a part of `n` tiles through `compute`, in regions of at least `least`
    /// tiles, until the work pauses.
    pub(crate) fn each(&mut self, n: usize, least: usize, mut compute: impl FnMut(Range<usize>)) {
        let at_once = match self.pause {
            Some(_) => n.div_ceil(N_REGIONS).max(least),
            None => n,
        };
        let end = self.n_before + n;
        while self.n_done < end {
            if self.n_done > self.n_at_first && self.pause.is_some_and(|pause| pause()) {
                self.is_paused = true;
                return;
            }
            let start = self.n_done - self.n_before;
            let tiles = start..(start + at_once).min(n);
            self.n_done += tiles.len();
            compute(tiles);
        }
        self.n_before = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The regions of two parts, of 40 and of 3 tiles.
    fn regions(tiles: &mut Tiles<'_>) -> Vec<(usize, Range<usize>)> {
        let mut regions = Vec::new();
        for (part, n) in [40, 3].into_iter().enumerate() {
            if !tiles.is_paused() {
                tiles.each(n, 2, |tiles| regions.push((part, tiles)));
            }
        }
        regions
    }

    #[test]
    fn every_tile_is_computed_once() {
        let all = [(0, 0..40), (1, 0..3)];
        assert_eq!(regions(&mut Tiles::at_once()), all);
        let (mut n_done, mut parts) = (0, Vec::new());
        loop {
            let mut tiles = Tiles::after(n_done, Some(&|| true));
            parts.extend(regions(&mut tiles));
            n_done = tiles.n_done();
            if !tiles.is_paused() {
                break;
            }
        }
        let tiles = |part: usize| parts.iter().filter(move |(of, _)| *of == part);
        let of_part = |part| tiles(part).flat_map(|(_, tiles)| tiles.clone());
        assert!(of_part(0).eq(0..40) && of_part(1).eq(0..3), "{parts:?}");
        assert_eq!((parts.len(), n_done), (14 + 2, 43));
    }

    #[test]
    fn a_part_that_was_begun_is_not_new() {
        let mut tiles = Tiles::after(3, Some(&|| true));
        assert!(!tiles.is_new());
        tiles.each(3, 1, |_| unreachable!("all of them are computed"));
        assert!(tiles.is_new() && !tiles.is_paused());
    }
}
