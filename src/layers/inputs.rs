//! What chosen layers of a pass read, for drafters that were trained on it.

use std::sync::Arc;

/// Rows of the residual stream before chosen layers, side by side, of the tokens that a pass
/// computes of one sequence: `(n, layers·n_embd)`.
#[derive(Clone, Debug)]
pub(crate) struct LayerInputs {
    /// The number of layers stands for what the last one leaves.
    layers: Arc<[usize]>,
    n_embd: usize,
    /// The pass's first row that is kept.
    first: usize,
    rows: Vec<f32>,
}

impl LayerInputs {
    pub(crate) fn new(layers: Arc<[usize]>, n_embd: usize) -> LayerInputs {
        LayerInputs {
            layers,
            n_embd,
            first: 0,
            rows: Vec::new(),
        }
    }

    /// Of the pass that is computed, the rows from `first` on are kept.
    pub(crate) fn begin(&mut self, first: usize) {
        self.first = first;
    }

    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.rows.capacity() * size_of::<f32>()) as u64
    }

    /// Values of a row.
    pub(crate) fn width(&self) -> usize {
        self.layers.len() * self.n_embd
    }

    pub(crate) fn layers(&self) -> &Arc<[usize]> {
        &self.layers
    }

    /// The rows of the last pass, from `first` on, of `n`; those that are kept.
    pub(crate) fn rows(&self, first: usize, n: usize) -> &[f32] {
        let gone = self.first.min(n);
        let [start, end] = [first.max(gone), n].map(|row| (row - gone) * self.width());
        self.rows.get(start..end).unwrap_or(&[])
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
    }

    /// Keeps the rows `x` that `layer` reads, of tokens from `first` on of `n`.
    pub(crate) fn keep(&mut self, layer: usize, (first, n): (usize, usize), x: &[f32]) {
        let (width, gone) = (self.width(), self.first.min(n));
        let skipped = gone.saturating_sub(first);
        for (part, _) in (0..).zip(&*self.layers).filter(|(_, of)| **of == layer) {
            let n_values = (n - gone) * width;
            self.rows
                .reserve_exact(n_values.saturating_sub(self.rows.len()));
            self.rows.resize(n_values, 0.0);
            let rows = self.rows[(first + skipped - gone) * width..].chunks_exact_mut(width);
            for (row, x) in rows.zip(x.chunks_exact(self.n_embd).skip(skipped)) {
                row[part * self.n_embd..][..self.n_embd].copy_from_slice(x);
            }
        }
    }
}
