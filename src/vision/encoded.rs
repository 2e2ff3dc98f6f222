//! Encoded images.

use crate::vision::layout::Parts;
use std::sync::Arc;

/// An encoded image.
#[derive(Debug)]
pub struct Encoded {
    /// `(n, width)`; see [`Encoded::width`].
    pub(super) rows: Arc<[f32]>,
    pub(super) width: usize,
    pub(super) n_deep: usize,
    pub(super) parts: Parts,
}

impl Encoded {
    /// Embeddings, row by row: with deepstack, those of its layers stand beside the main ones.
    pub fn embeddings(&self) -> &[f32] {
        &self.rows
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width * (1 + self.n_deep)
    }

    /// Number of embeddings.
    pub fn n(&self) -> usize {
        self.rows.len() / self.width()
    }

    /// Rows and columns of embeddings, of images that are one tile.
    pub fn cells(&self) -> (usize, usize) {
        self.parts.cells
    }

    pub(super) fn bytes(&self) -> u64 {
        size_of_val(&*self.rows) as u64
    }
}
