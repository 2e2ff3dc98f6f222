//! A tile of columns of a row-major matrix, so that threads can write disjoint tiles of one output.

use std::marker::PhantomData;

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

// SAFETY: through a shared reference safe code sees nothing but sizes.
unsafe impl Sync for ColumnsMut<'_> {}

impl<'a> ColumnsMut<'a> {
    /// All columns of `y` (`rows × cols`).
    ///
    /// # Panics
    /// If `y` has another length.
    pub fn new(y: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(Some(y.len()), rows.checked_mul(cols), "a {rows} × {cols} matrix");
        ColumnsMut { ptr: y.as_mut_ptr(), rows, cols, stride: cols, _matrix: PhantomData }
    }

    /// The columns `start..start + cols` as a view of their own.
    ///
    /// # Safety
    /// No two views that are alive at the same time may share a column.
    ///
    /// # Panics
    /// If the columns are not inside this view.
    pub unsafe fn tile(&self, start: usize, cols: usize) -> ColumnsMut<'a> {
        assert!(start <= self.cols && cols <= self.cols - start, "tile {start}+{cols} of {} columns", self.cols);
        // SAFETY: `start` is inside the row, so the pointer stays inside the matrix.
        let ptr = unsafe { self.ptr.add(start) };
        ColumnsMut { ptr, rows: self.rows, cols, stride: self.stride, _matrix: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Distance between rows, in values.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// First value of the first row; row `i` begins `i·stride` later.
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.ptr
    }

    /// The view's part of row `i`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` lies inside the matrix, and this view alone may touch its columns of it.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.stride), self.cols) }
    }
}
