//! The patches of an image, in the order in which an encoder computes them.

use std::ops::Range;

/// Patches of an image: places in order of computation, and which of them see each other.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// `(row, column)` of each patch.
    pub(super) order: Vec<(u32, u32)>,
    /// Attention inside of these runs of patches, for layers with windows.
    pub(super) windows: Vec<Range<usize>>,
    /// For each result of a merged cell, its place row by row.
    pub(super) places: Option<Vec<usize>>,
}

impl Grid {
    /// Blocks of `k × k` patches row by row, and row by row in each. Sides are multiples of `k`.
    /// Every block is a window.
    pub(super) fn in_blocks(rows: usize, columns: usize, k: usize) -> Grid {
        Grid::in_windows(rows, columns, k, 1)
    }

    /// Windows of `side × side` blocks of `k × k` patches, cut at the borders, row by row; inside
    /// of them blocks row by row.
    pub(super) fn in_windows(rows: usize, columns: usize, k: usize, side: usize) -> Grid {
        let (block_rows, block_columns) = (rows / k, columns / k);
        let mut order = Vec::with_capacity(rows * columns);
        let (mut windows, mut places) = (Vec::new(), Vec::new());
        for top in (0..block_rows).step_by(side) {
            for left in (0..block_columns).step_by(side) {
                let start = order.len();
                for r in top..block_rows.min(top + side) {
                    for c in left..block_columns.min(left + side) {
                        places.push(r * block_columns + c);
                        let inner =
                            (0..k * k).map(|i| ((r * k + i / k) as u32, (c * k + i % k) as u32));
                        order.extend(inner);
                    }
                }
                windows.push(start..order.len());
            }
        }
        Grid {
            rows,
            columns,
            order,
            windows,
            places: (side > 1).then_some(places),
        }
    }

    /// Number of patches.
    pub(super) fn n(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders() {
        assert_eq!(
            Grid::in_blocks(2, 2, 1).order,
            [(0, 0), (0, 1), (1, 0), (1, 1)]
        );
        let blocks = Grid::in_blocks(2, 4, 2);
        let first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)];
        assert_eq!(blocks.order[..5], first);
        let windows = Grid::in_windows(4, 6, 2, 2);
        assert_eq!(windows.windows, [0..16, 16..24]);
        assert_eq!(windows.places, Some(vec![0, 1, 3, 4, 2, 5]));
    }
}
