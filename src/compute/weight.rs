//! Matrices of a model, in place in its file.

use crate::gguf::Gguf;
use crate::quant::DType;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Matrix `W: (n_out, n_in)` of a file, stored row by row.
#[derive(Clone, Debug)]
pub(crate) struct Weight {
    pub(crate) dtype: DType,
    pub(crate) n_in: usize,
    pub(crate) n_out: usize,
    /// Its index in [`Model::sites`](crate::Model::sites).
    pub(crate) site: usize,
    /// Its first row among those of the site.
    pub(crate) first_row: usize,
    /// Factor on its products.
    pub(crate) scale: f32,
    /// That of each matrix of a stack.
    pub(crate) scales: Option<Arc<[f32]>>,
    /// The index of its tensor in the file.
    pub(crate) tensor: usize,
    pub(crate) bytes: Range<usize>,
}

impl Weight {
    /// Bytes of its rows, as stored in the file.
    pub(crate) fn data<'g>(&self, gguf: &'g Gguf) -> &'g [u8] {
        &gguf.data(&gguf.tensors()[self.tensor])[self.bytes.clone()]
    }

    /// Bytes of some rows: from a copy in huge pages as soon as that has these rows, while the rest
    /// of the tensor is still being copied.
    pub(crate) fn data_of_rows<'g>(&self, gguf: &'g Gguf, rows: Range<usize>) -> &'g [u8] {
        let at = |row: usize| self.bytes.start + row * self.row_bytes();
        gguf.data_part(&gguf.tensors()[self.tensor], at(rows.start)..at(rows.end))
    }

    /// The index of its tensor in the file, and its first byte there.
    #[cfg(any(feature = "metal", feature = "webgpu"))]
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.tensor, self.bytes.start)
    }

    /// The index of its tensor in the file, and of its matrix there.
    pub(crate) fn place_in_stack(&self, gguf: &Gguf) -> (usize, usize) {
        let n_rows = gguf.tensors()[self.tensor].dims.get(1).copied();
        let matrix_bytes = self.row_bytes() * n_rows.map_or(1, |n| n.max(1) as usize);
        (self.tensor, self.bytes.start / matrix_bytes)
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.bytes.len() / self.n_out
    }

    /// Some rows as a matrix of their own.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Weight {
        let row = self.row_bytes();
        let bytes = self.bytes.start + rows.start * row..self.bytes.start + rows.end * row;
        Weight {
            n_out: rows.len(),
            bytes,
            first_row: self.first_row + rows.start,
            ..self.clone()
        }
    }

    /// Matrix `e` of a stack of `n`, which is a site of its own.
    pub(crate) fn matrix(&self, e: usize, n: usize) -> Weight {
        let n_out = self.n_out / n;
        let scale = self.scales.as_ref().map_or(self.scale, |scales| scales[e]);
        Weight {
            site: self.site + e,
            first_row: 0,
            scale,
            scales: None,
            ..self.rows(e * n_out..(e + 1) * n_out)
        }
    }
}

/// Matrix with a bias: `W·x + b`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub(crate) w: Weight,
    pub(crate) b: Option<Bias>,
}

impl Linear {
    pub(crate) fn rows(&self, rows: Range<usize>) -> Linear {
        Linear {
            w: self.w.rows(rows.clone()),
            b: self.b.as_ref().map(|b| b.rows(rows)),
        }
    }

    /// Matrix `e` of a stack of `n`, with its bias.
    pub(crate) fn matrix(&self, e: usize, n: usize) -> Linear {
        let n_out = self.w.n_out / n;
        Linear {
            w: self.w.matrix(e, n),
            b: self.b.as_ref().map(|b| b.rows(e * n_out..(e + 1) * n_out)),
        }
    }
}

/// Bias of a product. Parts of a matrix share the values.
#[derive(Clone, Debug)]
pub(crate) struct Bias {
    values: Arc<[f32]>,
    rows: Range<usize>,
}

impl Bias {
    pub(crate) fn new(values: Vec<f32>) -> Bias {
        Bias {
            rows: 0..values.len(),
            values: values.into(),
        }
    }

    pub(crate) fn rows(&self, rows: Range<usize>) -> Bias {
        let rows = self.rows.start + rows.start..self.rows.start + rows.end;
        Bias {
            values: Arc::clone(&self.values),
            rows,
        }
    }
}

impl Deref for Bias {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.rows.clone()]
    }
}
