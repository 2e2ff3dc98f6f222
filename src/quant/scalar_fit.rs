//! Blocks whose values have a code each, between the choice of their scales and their storage.

use super::block::Recode;

/// Nearest integer, ties to even. For `|x| < 2²²`, where adding `1.5·2²³` leaves no bits for the
/// fraction; unlike `round_ties_even` it is no library call on baseline x86-64.
#[inline]
pub(super) fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
}

/// Code of `x` on the grid `scale · q + min`, `q` in `lo..=hi`; `inverse` is `1/scale`, or 0.
#[inline]
pub(super) fn code(x: f32, inverse: f32, min: f32, lo: f32, hi: f32) -> f32 {
    let q = (x - min) * inverse;
    // Comparisons, unlike `f32::clamp`, are single instructions on vectors.
    let q = if q > lo { q } else { lo };
    round(if q < hi { q } else { hi })
}

/// `1/scale`, or 0 where that overflows: then every code is 0.
#[inline]
pub(super) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Codes `q` in `lo..=hi` that bring `scale · q + min` nearest to `x`.
pub(super) fn codes<const N: usize>(
    x: &[f32; N],
    scale: f32,
    min: f32,
    lo: f32,
    hi: f32,
) -> [f32; N] {
    let inverse = inverse(scale);
    std::array::from_fn(|i| code(x[i], inverse, min, lo, hi))
}

/// The index of the level of a table whose `scale · level + min` is nearest to `x`.
pub(super) fn nearest_level(table: &[i8], scale: f32, min: f32, x: f32) -> u8 {
    let error = |level: &i8| (scale * f32::from(*level) + min - x).abs();
    let levels = table.iter().zip(0..);
    let nearest = levels.min_by(|(a, _), (b, _)| error(a).total_cmp(&error(b)));
    nearest.map_or(0, |(_, q)| q)
}

/// What the codes of a block stand for, before scale and minimum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Levels {
    /// The integers from the first one on; the second one is the last.
    Integers(i8, i8),
    /// The values of a table.
    Table(&'static [i8]),
}

/// A block on the grids `scale · level(q) + min`.
pub(super) struct ScalarFit<const N: usize, F> {
    /// Scales as they are stored.
    pub(super) fields: F,
    /// The scale of each value.
    pub(super) scales: [f32; N],
    /// The minimum of each value.
    pub(super) mins: [f32; N],
    pub(super) levels: Levels,
    /// The index of each value's level.
    pub(super) q: [u8; N],
}

impl<const N: usize, F> ScalarFit<N, F> {
    /// A block whose scales are to be set.
    pub(super) fn unset(fields: F, levels: Levels) -> ScalarFit<N, F> {
        ScalarFit {
            fields,
            scales: [0.0; N],
            mins: [0.0; N],
            levels,
            q: [0; N],
        }
    }

    /// A block with one grid `scale · q + min`, `q` in `lo..=hi`, and codes nearest to `x`.
    pub(super) fn one_grid(
        fields: F,
        x: &[f32; N],
        (scale, min): (f32, f32),
        (lo, hi): (i8, i8),
    ) -> ScalarFit<N, F> {
        let codes = codes(x, scale, min, f32::from(lo), f32::from(hi));
        ScalarFit {
            fields,
            scales: [scale; N],
            mins: [min; N],
            levels: Levels::Integers(lo, hi),
            q: codes.map(|q| (q - f32::from(lo)) as u8),
        }
    }

    /// A block of values of a table, without minimum.
    pub(super) fn of_table(
        fields: F,
        scales: [f32; N],
        table: &'static [i8],
        q: [u8; N],
    ) -> ScalarFit<N, F> {
        ScalarFit {
            fields,
            scales,
            mins: [0.0; N],
            levels: Levels::Table(table),
            q,
        }
    }
}

impl<const N: usize, F> Recode for ScalarFit<N, F> {
    const RUN: usize = 1;

    fn recode(&mut self, at: usize, x: &mut [f32], _w: &[f32]) {
        let (scale, min) = (self.scales[at], self.mins[at]);
        let (q, level) = match self.levels {
            Levels::Integers(lo, hi) => {
                let [level] = codes(&[x[0]], scale, min, f32::from(lo), f32::from(hi));
                ((level - f32::from(lo)) as u8, level)
            }
            Levels::Table(table) => {
                let q = nearest_level(table, scale, min, x[0]);
                (q, f32::from(table[usize::from(q)]))
            }
        };
        self.q[at] = q;
        x[0] = scale * level + min;
    }
}
