//! Memory that kernels are given: a tile of columns of a row-major matrix, so that threads can
//! write disjoint tiles of one output; a workspace, so that they need no large stack.

use bytemuck::{Pod, Zeroable};
use std::marker::PhantomData;

/// Unit of the workspaces of products: 64 bytes, aligned.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct CacheLine([u8; 64]);

#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
impl CacheLine {
    /// Cache lines that hold `n` 32-bit values.
    #[inline]
    pub(super) const fn holding(n: usize) -> usize {
        n.div_ceil(16)
    }
}

/// Exclusive view of some adjacent columns of every row of a row-major `f32` matrix.
#[derive(Debug)]
pub struct ColumnsMut<'a> {
    ptr: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    _matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a `&mut` to its columns, and `f32` is `Send`.
unsafe impl Send for ColumnsMut<'_> {}

// SAFETY: safe code can only read sizes through a shared reference.
unsafe impl Sync for ColumnsMut<'_> {}

impl<'a> ColumnsMut<'a> {
    /// View of all columns of `y` (`rows × cols`).
    ///
    /// # Panics
    /// If `y` has another length.
    pub fn new(y: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(
            Some(y.len()),
            rows.checked_mul(cols),
            "a {rows} × {cols} matrix"
        );
        ColumnsMut {
            ptr: y.as_mut_ptr(),
            rows,
            cols,
            stride: cols,
            _matrix: PhantomData,
        }
    }

    /// The columns `start..start + cols` as a view of their own, which lasts no longer than the
    /// borrow of this one:
    ///
    /// ```compile_fail,E0597
    /// # use ruvllm::arch::ColumnsMut;
    /// let mut y = [0.0; 8];
    /// let tile = {
    ///     let view = ColumnsMut::new(&mut y, 2, 4);
    ///     unsafe { view.tile(0, 2) } // `view` does not live long enough
    /// };
    /// assert_eq!(tile.cols(), 2);
    /// ```
    ///
    /// # Safety
    /// No two views that are alive at the same time may share a column.
    ///
    /// # Panics
    /// If the columns are not inside this view.
    pub unsafe fn tile(&self, start: usize, cols: usize) -> ColumnsMut<'_> {
        assert!(
            start <= self.cols && cols <= self.cols - start,
            "tile {start}+{cols} of {} columns",
            self.cols
        );
        // SAFETY: `start` is inside the row, so the pointer stays inside the matrix.
        let ptr = unsafe { self.ptr.add(start) };
        ColumnsMut {
            ptr,
            rows: self.rows,
            cols,
            stride: self.stride,
            _matrix: PhantomData,
        }
    }

    /// View of the rows `rows`.
    ///
    /// # Panics
    /// If they are not inside this view.
    pub fn rows_mut(&mut self, rows: std::ops::Range<usize>) -> ColumnsMut<'_> {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows,
            "rows {rows:?} of {}",
            self.rows
        );
        // An empty view may begin after the last row, where there is nothing to point at.
        let ptr = if rows.is_empty() {
            self.ptr
        } else {
            self.ptr.wrapping_add(rows.start * self.stride)
        };
        ColumnsMut {
            ptr,
            rows: rows.len(),
            cols: self.cols,
            stride: self.stride,
            _matrix: PhantomData,
        }
    }

    /// View of the columns `columns`.
    ///
    /// # Panics
    /// If they are not inside this view.
    #[inline]
    pub fn columns_mut(&mut self, columns: std::ops::Range<usize>) -> ColumnsMut<'_> {
        // SAFETY: this view is borrowed as long as the new one lives, so there is no other of its
        // columns.
        unsafe { self.tile(columns.start, columns.len()) }
    }

    /// Number of rows.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Distance between rows, in values.
    #[inline]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Pointer to the first value of the first row; row `i` begins `i·stride` later.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.ptr
    }

    /// Sets all values.
    pub fn fill(&mut self, value: f32) {
        for i in 0..self.rows {
            self.row(i).fill(value);
        }
    }

    /// The view's part of row `i`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` lies inside the matrix, and only this view may access these columns of
        // it.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.stride), self.cols) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads write tiles of one matrix; Miri watches what each touches.
    #[test]
    fn tiles_are_disjoint_and_rows_lie_inside() {
        let (rows, cols) = (3, 10);
        let mut y = vec![0.0; rows * cols];
        let view = ColumnsMut::new(&mut y, rows, cols);
        std::thread::scope(|scope| {
            for (start, n) in [(0, 4), (4, 1), (5, 0), (5, 5)] {
                // SAFETY: no two of these tiles share a column.
                let mut tile = unsafe { view.tile(start, n) };
                scope.spawn(move || {
                    tile.fill(start as f32);
                    let mut last = tile.rows_mut(2..3);
                    last.row(0).fill(1.0);
                    assert_eq!((tile.rows_mut(3..3).rows(), tile.stride()), (0, cols));
                });
            }
        });
        for (i, row) in y.chunks_exact(cols).enumerate() {
            let expected = if i == 2 {
                [1.0; 10]
            } else {
                [0.0, 0.0, 0.0, 0.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
            };
            assert_eq!(row, expected);
        }
    }

    #[test]
    fn views_outside_are_refused() {
        let outside = |tile: fn(&mut ColumnsMut<'_>)| {
            let mut y = [0.0; 6];
            let mut view = ColumnsMut::new(&mut y, 2, 3);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| tile(&mut view))).is_err()
        };
        fn tile_at(view: &ColumnsMut<'_>, start: usize) {
            // SAFETY: it is the only tile.
            let tile = unsafe { view.tile(start, 2) };
            assert_eq!(tile.cols(), 2);
        }
        assert!(outside(|view| tile_at(view, 2)));
        assert!(outside(|view| tile_at(view, usize::MAX)));
        assert!(outside(|view| view.row(2).fill(1.0)));
        assert!(outside(|view| assert_eq!(view.rows_mut(1..3).rows(), 2)));
        assert!(!outside(|view| view.row(1).fill(1.0)));
    }
}
