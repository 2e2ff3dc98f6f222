//! Centres of keys: what all keys of a layer have in common is not stored, where they are stored in
//! few bits.
//!
//! Keys of a head lie around a mean that is often longer than their distances from it, so that most
//! of few bits tell what is known. A position's key is stored without a vector `c` that the layer
//! and the span of positions ([`KV_SPAN`]) determine, and `q·k = q·(k − c) + q·c`: the scores of a
//! span are all raised by the same `q·c`, once per query. So `c` may be any vector, and what is
//! computed is attention over the keys; the nearer it is to them, the less they lose.

use crate::arch::{Arch, KV_SPAN};
use std::sync::OnceLock;

/// Spans that have centres: of a million positions.
const SPANS: usize = 1024;

/// Centres of all layers that store keys and values, in their order.
#[derive(Debug)]
pub(crate) struct KeyCentres {
    arch: Arch,
    layers: Vec<Option<LayerCentre>>,
}

/// The mean key of a layer, from which the centres of its spans follow.
#[derive(Debug)]
pub(crate) struct LayerCentre {
    head_dim: usize,
    /// Before its rotation, `(n_head_kv, head_dim)`.
    mean: Vec<f32>,
    /// Dimensions that are rotated together, and by how much from one position to the next.
    pairs: Vec<(usize, usize, f32)>,
    /// By span, [transformed](Arch::hadamard), as `mean`.
    spans: Vec<OnceLock<Box<[f32]>>>,
}

impl LayerCentre {
    /// From keys `(n, n_head_kv, head_dim)` of the positions `0..n` as they are stored.
    pub(crate) fn new(
        head_dim: usize,
        n_head_kv: usize,
        pairs: Vec<(usize, usize, f32)>,
        keys: &[f32],
    ) -> LayerCentre {
        let width = n_head_kv * head_dim;
        let mut sums = vec![0.0f64; width];
        for (pos, row) in keys.chunks_exact(width).enumerate() {
            let mut row: Vec<f64> = row.iter().map(|&k| f64::from(k)).collect();
            for head in row.chunks_exact_mut(head_dim) {
                for &(i, j, frequency) in &pairs {
                    let (sin, cos) = (pos as f64 * f64::from(frequency)).sin_cos();
                    (head[i], head[j]) =
                        (head[i] * cos + head[j] * sin, head[j] * cos - head[i] * sin);
                }
            }
            sums.iter_mut().zip(&row).for_each(|(sum, k)| *sum += k);
        }
        let n = (keys.len() / width).max(1) as f64;
        LayerCentre {
            head_dim,
            mean: sums.iter().map(|sum| (sum / n) as f32).collect(),
            pairs,
            spans: (0..SPANS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// The mean of the mean key rotated to each position of a span.
    fn of_span(&self, arch: Arch, span: usize) -> Box<[f32]> {
        let mut centre = self.mean.clone();
        for head in centre.chunks_exact_mut(self.head_dim) {
            for &(i, j, frequency) in &self.pairs {
                let (n, angle) = (KV_SPAN as f64, f64::from(frequency));
                // A geometric sum of rotations.
                let shrunk = match (angle / 2.0).sin() {
                    0.0 => 1.0,
                    half => (n * angle / 2.0).sin() / (n * half),
                };
                let middle = (span as f64 + 0.5) * n - 0.5;
                let (sin, cos) = (middle * angle).sin_cos();
                let (a, b) = (f64::from(head[i]), f64::from(head[j]));
                head[i] = (shrunk * (a * cos - b * sin)) as f32;
                head[j] = (shrunk * (a * sin + b * cos)) as f32;
            }
            arch.hadamard(head);
        }
        centre.into()
    }
}

impl KeyCentres {
    pub(crate) fn new(arch: Arch, layers: Vec<Option<LayerCentre>>) -> KeyCentres {
        KeyCentres { arch, layers }
    }

    /// The centre of a layer's head at a position, transformed; none if it has none.
    pub(super) fn at(&self, layer: usize, head: usize, pos: usize) -> Option<&[f32]> {
        let layer = self.layers.get(layer)?.as_ref()?;
        let span = pos / KV_SPAN;
        let centre = layer
            .spans
            .get(span)?
            .get_or_init(|| layer.of_span(self.arch, span));
        Some(&centre[head * layer.head_dim..][..layer.head_dim])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that are the same but for their rotation are all known.
    #[test]
    fn the_mean_follows_rotations() {
        let arch = Arch::scalar();
        let pairs = vec![(0, 2, 1.0), (1, 3, 1e-5)];
        let key = |pos: usize| {
            let turned = |frequency: f64| (pos as f64 * frequency).sin_cos();
            let ((s0, c0), (s1, c1)) = (turned(1.0), turned(1e-5));
            [3.0 * c0, 5.0 * c1, 3.0 * s0, 5.0 * s1, 7.0, 0.0, 0.0, 0.0].map(|x| x as f32)
        };
        let keys: Vec<f32> = (0..64).flat_map(key).collect();
        let centre = LayerCentre::new(8, 1, pairs, &keys);
        let close = |a: f32, b: f32| assert!((a - b).abs() < 0.06, "{a} {b}");
        centre
            .mean
            .iter()
            .zip([3.0, 5.0, 0.0, 0.0, 7.0])
            .for_each(|(a, b)| close(*a, b));
        let all = KeyCentres::new(arch, vec![None, Some(centre)]);
        assert!(all.at(0, 0, 5).is_none() && all.at(2, 0, 5).is_none());
        assert!(all.at(1, 0, usize::MAX).is_none());
        for pos in [0, 700, 200_000] {
            let mut found = all.at(1, 0, pos).unwrap_or_default().to_vec();
            arch.hadamard(&mut found);
            let key = key(pos / KV_SPAN * KV_SPAN + KV_SPAN / 2);
            // The fast pair has no mean.
            close(found[0], 0.0);
            close(found[2], 0.0);
            [1, 3, 4].into_iter().for_each(|i| close(found[i], key[i]));
        }
    }
}
