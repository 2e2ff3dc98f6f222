//! How the quantisers of formats with a grid choose its points: for the scale of a sub-block, the
//! nearest point for each group of values; for a super-block, the scale of scales with which the
//! sub-blocks err least.
//!
//! Points near a group are found by its values rounded to the levels of the grid, each alone: of
//! every such combination the nearest points are listed beforehand, as ggml does it. Of those the
//! weighted errors decide.

use super::block::{Recode, f16_value, to_f16};

/// Points that are compared for a group of values.
const NEAR: usize = 24;

/// How often the f16 scale of a super-block is fitted again.
const REFITS: usize = 2;

/// A codebook of groups of `D` values, which are integers.
pub(super) struct Grid<const D: usize> {
    points: &'static [[i8; D]],
    /// The values, ascending.
    levels: &'static [i8],
    /// Indices of the points nearest to each combination of levels; that of the first value counts
    /// least.
    near: Vec<[u16; NEAR]>,
}

impl<const D: usize> Grid<D> {
    pub(super) fn new(points: &'static [[i8; D]], levels: &'static [i8]) -> Grid<D> {
        let near = (0..levels.len().pow(D as u32))
            .map(|combination| {
                let mut rest = combination;
                let values: [i32; D] = std::array::from_fn(|_| {
                    let level = levels[rest % levels.len()];
                    rest /= levels.len();
                    i32::from(level)
                });
                let distance = |point: &[i8; D]| -> i32 {
                    let differences = point.iter().zip(values).map(|(&p, v)| i32::from(p) - v);
                    differences.map(|d| d * d).sum()
                };
                let mut by_distance: Vec<(i32, u16)> =
                    points.iter().map(distance).zip(0..).collect();
                by_distance.select_nth_unstable(NEAR - 1);
                std::array::from_fn(|i| by_distance[i].1)
            })
            .collect();
        Grid {
            points,
            levels,
            near,
        }
    }

    /// The point `p` with the least `Σ w·(p − x)²` among those near to `x`, and that sum.
    fn nearest(&self, x: &[f32; D], w: &[f32; D]) -> (u16, f32) {
        let mut combination = 0;
        for x in x.iter().rev() {
            // The level is the number of midpoints below.
            let above = |pair: &&[i8]| 2.0 * x > f32::from(i16::from(pair[0]) + i16::from(pair[1]));
            let level = self.levels.windows(2).filter(above).count();
            combination = combination * self.levels.len() + level;
        }
        let mut best = (0, f32::INFINITY);
        for &at in &self.near[combination] {
            let point = &self.points[usize::from(at)];
            let mut error = 0.0;
            for i in 0..D {
                let e = f32::from(point[i]) - x[i];
                error += w[i] * e * e;
            }
            if error < best.1 {
                best = (at, error);
            }
        }
        best
    }

    /// The points of values that share an offset, that of `offsets` with the least error, and the
    /// error, of values divided by `scale`.
    fn of_run(&self, x: &[f32], w: &[f32], scale: f32, offsets: &[f32]) -> ([u16; 8], f32, f32) {
        let mut best = ([0; 8], 0.0, f32::INFINITY);
        for &offset in offsets {
            let (mut points, mut error) = ([0; 8], 0.0);
            let groups = x.as_chunks::<D>().0.iter().zip(w.as_chunks::<D>().0);
            for ((x, w), point) in groups.zip(&mut points) {
                let (at, e) = self.nearest(&x.map(|x| x / scale - offset), w);
                *point = at;
                error += e;
            }
            if error < best.2 {
                best = (points, offset, error);
            }
        }
        best
    }
}

/// What is added to the integers of groups.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Offset {
    None,
    /// An eighth or its negative, chosen for each sub-block.
    OfSubBlock,
    /// The same, for each eight values.
    OfEight,
}

/// Signs of values, where points of the grid have none.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Signs {
    None,
    Free,
    /// Of each eight values an even number is negative.
    Even,
}

/// A format of 256 values `unit · d · (2n + 1) · (± point + offset)`, with `n` for each sub-block.
pub(super) struct GridFormat<const D: usize> {
    pub(super) grid: Grid<D>,
    pub(super) unit: f32,
    /// The largest `n`.
    pub(super) max_n: u8,
    /// Values of a sub-block.
    pub(super) sub_block: usize,
    pub(super) signs: Signs,
    pub(super) offset: Offset,
}

/// The fields of a block as they are stored.
#[derive(Clone)]
pub(super) struct GridBlock {
    pub(super) d: [u8; 2],
    /// `n` of each sub-block.
    pub(super) n: [u8; 16],
    /// Grid index of each group.
    pub(super) points: [u16; 64],
    /// A bit for each of eight values, set where it is negative.
    pub(super) signs: [u8; 32],
    /// Whether the offset of each eight values is negative.
    pub(super) lowered: [bool; 32],
}

/// A block, and what its fields mean.
pub(super) struct GridFit<const D: usize> {
    format: &'static GridFormat<D>,
    pub(super) block: GridBlock,
}

impl<const D: usize> Recode for GridFit<D> {
    const RUN: usize = 8;

    fn recode(&mut self, at: usize, x: &mut [f32], w: &[f32]) {
        let (format, block, eight) = (self.format, &mut self.block, at / 8);
        let scale = format.unit * f16_value(block.d);
        let scale = scale * f32::from(2 * block.n[at / format.sub_block] + 1);
        if scale <= 0.0 {
            x.fill(0.0);
            return;
        }
        let signs = format.take_signs(x, w);
        // An offset that others share stays as it is.
        let offsets: &[f32] = match (format.offset, block.lowered[eight]) {
            (Offset::None, _) => &[0.0],
            (Offset::OfEight, _) => &[0.125, -0.125],
            (Offset::OfSubBlock, false) => &[0.125],
            (Offset::OfSubBlock, true) => &[-0.125],
        };
        let (points, offset, _) = format.grid.of_run(x, w, scale, offsets);
        block.points[at / D..][..8 / D].copy_from_slice(&points[..8 / D]);
        block.signs[eight] = signs;
        block.lowered[eight] = offset < 0.0;
        for (i, x) in x.iter_mut().enumerate() {
            let point = &format.grid.points[usize::from(points[i / D])];
            let value = scale * (f32::from(point[i % D]) + offset);
            *x = if signs >> i & 1 == 1 { -value } else { value };
        }
    }
}

/// Choices for a sub-block, and what they err.
#[derive(Clone, Copy)]
struct SubBlock {
    points: [u16; 8],
    lowered: [bool; 4],
    error: f32,
    /// `Σ w·x·q` and `Σ w·q²` of the integers `q`.
    xq: f32,
    qq: f32,
}

impl<const D: usize> GridFormat<D> {
    /// The block with a small `Σ w·error²`.
    pub(super) fn fit(&'static self, x: &[f32; 256], w: &[f32; 256]) -> GridFit<D> {
        let mut block = GridBlock {
            d: [0; 2],
            n: [0; 16],
            points: [0; 64],
            signs: [0; 32],
            lowered: [false; 32],
        };
        let mut magnitudes = *x;
        for (eight, signs) in block.signs.iter_mut().enumerate() {
            let at = 8 * eight..8 * eight + 8;
            *signs = self.take_signs(&mut magnitudes[at.clone()], &w[at]);
        }
        let n_sub = 256 / self.sub_block;
        let mut scales = [0.0; 16];
        for (s, scale) in scales[..n_sub].iter_mut().enumerate() {
            let at = s * self.sub_block..(s + 1) * self.sub_block;
            *scale = self.free_scale(&magnitudes[at.clone()], &w[at]);
        }
        let largest = scales.iter().fold(0.0, |m: f32, s| m.max(*s));
        let per_unit = self.unit * (2 * self.max_n + 1).max(1) as f32;
        let (mut best, mut best_error) = (block.clone(), f32::INFINITY);
        let mut refit = 0.0;
        for factor in [1.0, 0.94, 0.88, 1.06] {
            let d = to_f16(largest / per_unit * factor);
            let (fitted, error, least_squares) = self.settle(&block, d, &magnitudes, w, &scales);
            if error < best_error {
                (best, best_error, refit) = (fitted, error, least_squares);
            }
        }
        for _ in 0..REFITS {
            let (fitted, error, next) = self.settle(&block, to_f16(refit), &magnitudes, w, &scales);
            if error >= best_error || error.is_nan() {
                break;
            }
            (best, best_error, refit) = (fitted, error, next);
        }
        GridFit {
            format: self,
            block: best,
        }
    }

    /// The signs of eight values, which become magnitudes; one keeps its sign if their number has
    /// to be even, the one with which that does least harm.
    fn take_signs(&self, x: &mut [f32], w: &[f32]) -> u8 {
        if self.signs == Signs::None {
            return 0;
        }
        let mut signs = 0;
        for (i, x) in x.iter_mut().enumerate() {
            signs |= u8::from(*x < 0.0) << i;
            *x = x.abs();
        }
        if self.signs == Signs::Even && signs.count_ones() % 2 == 1 {
            let harm = |i: &usize| w[*i] * x[*i] * x[*i];
            let least = (0..8).min_by(|i, j| harm(i).total_cmp(&harm(j)));
            let least = least.unwrap_or(0);
            signs ^= 1 << least;
            x[least] = -x[least];
        }
        signs
    }

    /// The scale of a sub-block's integers with the least error, of any value.
    fn free_scale(&self, x: &[f32], w: &[f32]) -> f32 {
        let largest = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        if largest < 1e-15 {
            return 0.0;
        }
        let top = f32::from(self.grid.levels[self.grid.levels.len() - 1]);
        let (mut best, mut best_gain) = (largest / top, 0.0);
        for step in 0..16 {
            let scale = largest / (top * (0.55 + 0.05 * step as f32));
            let SubBlock { xq, qq, .. } = self.choose(x, w, scale);
            // With scale = xq/qq the error is Σ w·x² − xq²/qq.
            if xq > 0.0 && xq * xq > best_gain * qq {
                (best, best_gain) = (xq / qq, xq * xq / qq);
            }
        }
        best
    }

    /// The points of a sub-block whose integers are multiplied by `scale`.
    fn choose(&self, x: &[f32], w: &[f32], scale: f32) -> SubBlock {
        let mut chosen = SubBlock {
            points: [0; 8],
            lowered: [false; 4],
            error: 0.0,
            xq: 0.0,
            qq: 0.0,
        };
        let offsets: &[f32] = match self.offset {
            Offset::None => &[0.0],
            _ => &[0.125, -0.125],
        };
        // Values that share an offset.
        let run = match self.offset {
            Offset::OfSubBlock => x.len(),
            _ => 8,
        };
        for (r, (x, w)) in x.chunks_exact(run).zip(w.chunks_exact(run)).enumerate() {
            let (points, offset, error) = self.grid.of_run(x, w, scale, offsets);
            let first = r * run / D;
            chosen.points[first..][..run / D].copy_from_slice(&points[..run / D]);
            chosen.lowered[r * run / 8..][..run / 8].fill(offset < 0.0);
            chosen.error += error * scale * scale;
            for (i, (x, w)) in x.iter().zip(w).enumerate() {
                let point = &self.grid.points[usize::from(points[i / D])];
                let q = f32::from(point[i % D]) + offset;
                chosen.xq += w * x * q;
                chosen.qq += w * q * q;
            }
        }
        chosen
    }

    /// The block with the scale `d`, its error, and the scale that suits its points best.
    fn settle(
        &self,
        signed: &GridBlock,
        d: [u8; 2],
        x: &[f32; 256],
        w: &[f32; 256],
        scales: &[f32; 16],
    ) -> (GridBlock, f32, f32) {
        let mut block = GridBlock {
            d,
            ..signed.clone()
        };
        let unit = self.unit * f16_value(d);
        let (mut total, mut xa, mut aa) = (0.0, 0.0, 0.0);
        for s in 0..256 / self.sub_block {
            let at = s * self.sub_block..(s + 1) * self.sub_block;
            let (x, w) = (&x[at.clone()], &w[at.clone()]);
            if unit <= 0.0 || scales[s] <= 0.0 && self.offset == Offset::None {
                // All values are zero; the least scale keeps them small.
                total += x.iter().zip(w).map(|(x, w)| w * x * x).sum::<f32>();
                continue;
            }
            let near = (0.5 * (scales[s] / unit - 1.0)).round();
            let mut best: Option<(u8, SubBlock)> = None;
            for n in [near, near - 1.0, near + 1.0] {
                let n = n.clamp(0.0, f32::from(self.max_n)) as u8;
                let chosen = self.choose(x, w, unit * f32::from(2 * n + 1));
                if best.as_ref().is_none_or(|(_, b)| chosen.error < b.error) {
                    best = Some((n, chosen));
                }
            }
            let Some((n, chosen)) = best else { continue };
            block.n[s] = n;
            block.points[at.start / D..at.end / D]
                .copy_from_slice(&chosen.points[..self.sub_block / D]);
            block.lowered[at.start / 8..at.end / 8]
                .copy_from_slice(&chosen.lowered[..self.sub_block / 8]);
            let factor = self.unit * f32::from(2 * n + 1);
            total += chosen.error;
            xa += factor * chosen.xq;
            aa += factor * factor * chosen.qq;
        }
        (block, total, if aa > 0.0 { xa / aa } else { 0.0 })
    }
}
