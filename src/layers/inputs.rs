//! What chosen layers of a pass read, for drafters that were trained on it.

use std::sync::Arc;

/// Rows of the residual stream before chosen layers, side by side, of the tokens that a pass
/// computes of one sequence: `(n, layers·n_embd)`.
#[derive(Clone, Debug)]
pub(crate) struct LayerInputs {
    /// The number of layers stands for what the last one leaves.
    layers: Arc<[usize]>,
    n_embd: usize,
    /// Most rows that are kept, the pass's last.
    most: usize,
    rows: Vec<f32>,
}

impl LayerInputs {
    pub(crate) fn new(layers: Arc<[usize]>, n_embd: usize, most: usize) -> LayerInputs {
        LayerInputs {
            layers,
            n_embd,
            most,
            rows: Vec::new(),
        }
    }

    /// Values of a row.
    pub(crate) fn width(&self) -> usize {
        self.layers.len() * self.n_embd
    }

    pub(crate) fn layers(&self) -> &Arc<[usize]> {
        &self.layers
    }

    /// The rows of the last pass, from `first` on, of `n`; at most as many as are kept.
    pub(crate) fn rows(&self, first: usize, n: usize) -> &[f32] {
        let gone = n.saturating_sub(self.most);
        let [start, end] = [first.max(gone), n].map(|row| (row - gone) * self.width());
        self.rows.get(start..end).unwrap_or(&[])
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
    }

    /// Keeps the rows `x` that `layer` reads, of tokens from `first` on of `n`.
    pub(crate) fn keep(&mut self, layer: usize, (first, n): (usize, usize), x: &[f32]) {
        let (width, gone) = (self.width(), n.saturating_sub(self.most));
        let skipped = gone.saturating_sub(first);
        for (part, _) in (0..).zip(&*self.layers).filter(|(_, of)| **of == layer) {
            self.rows.resize((n - gone) * width, 0.0);
            let rows = self.rows[(first + skipped - gone) * width..].chunks_exact_mut(width);
            for (row, x) in rows.zip(x.chunks_exact(self.n_embd).skip(skipped)) {
                row[part * self.n_embd..][..self.n_embd].copy_from_slice(x);
            }
        }
    }
}
