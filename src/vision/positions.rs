//! Learned positions of patches, and rotations by row and column.

use crate::arch::Arch;
use crate::vision::grid::Grid;
use crate::vision::resize::{Filter, weights};

/// How a table of positions becomes those of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableRule {
    /// A row for each patch, row by row.
    Rows,
    /// A square table, interpolated bilinearly with its corners on those of the grid (Qwen 3 VL).
    Corners,
    /// A square table, resampled bilinearly with antialiasing (SigLIP 2).
    Antialiased,
    /// A square table, interpolated bicubically with `a = -3/4`, clamped at the border (GLM-4V).
    Bicubic,
    /// A square table, in which a patch takes the entry of its share of the side (MiniCPM-V).
    Buckets,
    /// A table for columns, then one for rows, both added (Gemma 4).
    Axes,
}

/// Learned positions.
#[derive(Clone, Debug)]
pub(super) struct Positions {
    pub(super) rule: TableRule,
    pub(super) table: Vec<f32>,
    /// Rows of the table, or of one axis.
    pub(super) n: usize,
}

/// Entries of one axis with their weights, for each place of a grid's axis.
type AxisTaps = Vec<Vec<(usize, f32)>>;

impl Positions {
    fn taps(&self, n_out: usize) -> AxisTaps {
        let n_in = self.n.isqrt();
        match self.rule {
            TableRule::Rows | TableRule::Axes => (0..n_out).map(|i| vec![(i, 1.0)]).collect(),
            TableRule::Buckets => (0..n_out).map(|i| vec![(n_in * i / n_out, 1.0)]).collect(),
            TableRule::Corners => (0..n_out)
                .map(|i| {
                    let step = (n_in - 1) as f32 / (n_out.max(2) - 1) as f32;
                    let x = i as f32 * step;
                    let (low, part) = ((x as usize).min(n_in - 1), x.fract());
                    vec![(low, 1.0 - part), ((low + 1).min(n_in - 1), part)]
                })
                .collect(),
            TableRule::Antialiased => weights(Filter::Bilinear, n_in, n_out)
                .into_iter()
                .map(|(first, weights)| {
                    let taps = weights.into_iter().enumerate();
                    taps.map(|(i, w)| (first + i, w as f32)).collect()
                })
                .collect(),
            TableRule::Bicubic => (0..n_out)
                .map(|i| {
                    let x = (i as f32 + 0.5) * n_in as f32 / n_out as f32 - 0.5;
                    let low = x.floor();
                    let place = |j: i64| (low as i64 + j).clamp(0, n_in as i64 - 1) as usize;
                    (-1..=2)
                        .map(|j| (place(j), cubic(x - low - j as f32)))
                        .collect()
                })
                .collect(),
        }
    }

    /// Adds them to patches `x` of `width` values.
    pub(super) fn add(&self, arch: Arch, grid: &Grid, x: &mut [f32], width: usize) {
        let rows = self.taps(grid.rows);
        let columns = self.taps(grid.columns);
        let side = self.n.isqrt();
        let entry = |i: usize| &self.table[i * width..][..width];
        for (x, &(r, c)) in x.chunks_exact_mut(width).zip(&grid.order) {
            let (r, c) = (r as usize, c as usize);
            match self.rule {
                TableRule::Rows => arch.add(x, entry(r * grid.columns + c)),
                TableRule::Axes => {
                    arch.add(x, entry(c));
                    arch.add(x, entry(self.n + r));
                }
                _ => {
                    for &(i, w) in &rows[r] {
                        for &(j, v) in &columns[c] {
                            arch.add_scaled(x, entry(i * side + j), w * v);
                        }
                    }
                }
            }
        }
    }

    /// Whether a grid has its positions in the table.
    pub(super) fn has(&self, rows: usize, columns: usize) -> bool {
        match self.rule {
            TableRule::Rows => rows * columns == self.n,
            TableRule::Axes => rows.max(columns) <= self.n,
            _ => true,
        }
    }
}

/// Keys' cubic kernel with `a = -3/4`.
fn cubic(x: f32) -> f32 {
    const A: f32 = -0.75;
    let x = x.abs();
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

/// Rotation of queries and keys by row and column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RopeSpec {
    pub(super) pairs: Pairs,
    pub(super) theta: f32,
    /// Whether the first half of the pairs turns by the row.
    pub(super) row_first: bool,
    /// Whether both halves take turns in one sequence of frequencies; otherwise each has its own.
    pub(super) alternate: bool,
    /// Position of the first row and column.
    pub(super) first: u32,
}

/// Which dimensions of a head are pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairs {
    /// Neighbours.
    Neighbours,
    /// Halves of the head.
    Halves,
    /// Halves of each half.
    HalvesOfHalves,
}

impl RopeSpec {
    /// Frequencies of one half's `n` pairs.
    fn frequencies(&self, n: usize, second: bool) -> Vec<f32> {
        let exponent = |i: usize| {
            if self.alternate {
                (4 * i + if second { 2 } else { 0 }) as f32 / (4 * n) as f32
            } else {
                (2 * i) as f32 / (2 * n) as f32
            }
        };
        (0..n).map(|i| 1.0 / self.theta.powf(exponent(i))).collect()
    }

    /// Cosines and sines of each patch, `(patches, dim / 2)`.
    pub(super) fn angles(
        &self,
        arch: Arch,
        grid: &Grid,
        dim: usize,
        cos: &mut [f32],
        sin: &mut [f32],
    ) {
        let n = dim / 4;
        let [low, high] = [false, true].map(|second| self.frequencies(n, second));
        let rows = cos.chunks_exact_mut(2 * n).zip(sin.chunks_exact_mut(2 * n));
        for ((cos, sin), &(r, c)) in rows.zip(&grid.order) {
            let (a, b) = if self.row_first { (r, c) } else { (c, r) };
            let ((cos_a, cos_b), (sin_a, sin_b)) = (cos.split_at_mut(n), sin.split_at_mut(n));
            arch.rope_angles(cos_a, sin_a, &low, (a + self.first) as f32, 1.0);
            arch.rope_angles(cos_b, sin_b, &high, (b + self.first) as f32, 1.0);
        }
    }

    /// Turns a head.
    pub(super) fn apply(&self, arch: Arch, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        match self.pairs {
            Pairs::Neighbours => arch.rope_norm(head, cos, sin),
            Pairs::Halves => arch.rope_neox(head, cos, sin),
            Pairs::HalvesOfHalves => {
                let (half, n) = (head.len() / 2, cos.len() / 2);
                let (a, b) = head.split_at_mut(half);
                arch.rope_neox(a, &cos[..n], &sin[..n]);
                arch.rope_neox(b, &cos[n..], &sin[n..]);
            }
        }
    }
}
