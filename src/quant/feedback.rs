//! Feedback of errors: what earlier columns of a row err is made up for by later ones.
//!
//! The loss of a row `w` that becomes `q` is `eᵀHe`, `e = q − w`, with `H = Σ x·xᵀ` over the inputs
//! `x` of the product. With `H = U·D·Uᵀ`, `U` unit upper triangular, it is
//! `Σ Dⱼ·(eⱼ + Σ_{i<j} Uᵢⱼ·eᵢ)²`, which is least, column after column, if `qⱼ` is the stored value
//! nearest to `wⱼ − Σ_{i<j} Uᵢⱼ·eᵢ`. That is the rule of GPTQ (arXiv 2210.17323) in the form of QuIP
//! (2307.13304). Scales are chosen when their block is reached, with the errors of earlier blocks
//! made up for, and `Dⱼ` as weights: what later columns cannot make up for.

use super::block::{Pack, Recode, storable, weights};
use rayon::prelude::*;

/// Share of the moments of different columns that is not believed: a text shows how they move
/// together there, and others differ. Found by divergence on texts of the same kind and of another.
const SHRINKAGE: f32 = 0.25;

/// Share of the mean of the diagonal that is added to it, so that no direction is without any loss.
const DAMPING: f32 = 0.02;

/// Columns that are eliminated together.
const PANEL: usize = 32;

/// Columns of `Σ x·xᵀ` that stay in the cache while rows `x` are added.
const TILE: usize = 512;

/// Rows of `Σ x·xᵀ` that a thread adds to at a time.
const BAND: usize = 8;

/// Second moments: `Σ x·xᵀ` over the inputs `x` of a matrix.
#[derive(Clone)]
pub struct Moments {
    n: usize,
    /// `[n, n]`; what is below the diagonal means nothing.
    sums: Vec<f32>,
}

impl std::fmt::Debug for Moments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moments of {} columns", self.n)
    }
}

impl Moments {
    /// Sums over no inputs, for a matrix of `n` columns: `4·n²` bytes.
    pub fn new(n: usize) -> Moments {
        Moments {
            n,
            sums: vec![0.0; n * n],
        }
    }

    /// Columns of the matrix.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Adds inputs `x`, `[rows, n]`, on rayon's threads.
    ///
    /// # Panics
    /// If there are no whole rows.
    pub fn add(&mut self, x: &[f32]) {
        let n = self.n;
        assert!(x.len().is_multiple_of(n), "whole rows");
        let bands = self.sums.par_chunks_mut(BAND * n).enumerate();
        bands.for_each(|(band, sums)| {
            for tile in (band * BAND..n).step_by(TILE) {
                let tile = tile..n.min(tile + TILE);
                for x in x.chunks(4 * n) {
                    for (i, sums) in sums.chunks_exact_mut(n).enumerate() {
                        add_rows(&mut sums[tile.clone()], x, n, band * BAND + i, tile.start);
                    }
                }
            }
        });
    }
}

/// `sums + Σ x[i]·x[first..]` over up to four rows `x` of `n` values.
fn add_rows(sums: &mut [f32], x: &[f32], n: usize, i: usize, first: usize) {
    let row = |r: usize| (x[r * n + i], &x[r * n + first..][..sums.len()]);
    if x.len() == 4 * n {
        let ((f0, x0), (f1, x1), (f2, x2), (f3, x3)) = (row(0), row(1), row(2), row(3));
        for (k, sum) in sums.iter_mut().enumerate() {
            *sum += (f0 * x0[k] + f1 * x1[k]) + (f2 * x2[k] + f3 * x3[k]);
        }
    } else {
        for r in 0..x.len() / n {
            let factor = x[r * n + i];
            add_product(sums, factor, &x[r * n + first..][..sums.len()]);
        }
    }
}

/// The products `U` and `D` of `H`, see the module.
pub struct Feedback {
    n: usize,
    /// Row-major; what is below the diagonal means nothing.
    upper: Vec<f32>,
    /// `D`.
    variances: Vec<f32>,
}

impl std::fmt::Debug for Feedback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Feedback among {} columns", self.n)
    }
}

impl Feedback {
    /// Of a matrix with such inputs; `None` if sums are not finite, or no input was other than 0.
    pub(super) fn new(moments: Moments) -> Option<Feedback> {
        let Moments { n, sums: moments } = moments;
        let trace: f64 = (0..n).map(|i| f64::from(moments[i * n + i])).sum();
        let mean = (trace / n as f64) as f32;
        let usable = mean > 0.0 && moments.iter().all(|m| m.is_finite());
        if !usable {
            return None;
        }
        let mut feedback = Feedback {
            n,
            upper: moments,
            variances: vec![0.0; n],
        };
        // Relative to the mean, so that no product overflows.
        for (i, row) in feedback.upper.chunks_exact_mut(n).enumerate() {
            let own = row[i] / mean;
            row.iter_mut().for_each(|m| *m *= (1.0 - SHRINKAGE) / mean);
            row[i] = own + DAMPING;
        }
        for last in (1..=n.div_ceil(PANEL)).rev() {
            feedback.eliminate((last - 1) * PANEL..n.min(last * PANEL));
        }
        Some(feedback)
    }

    /// Finishes these columns of `U` and `D`, those behind them being finished.
    fn eliminate(&mut self, panel: std::ops::Range<usize>) {
        let (n, variances) = (self.n, &mut self.variances);
        // Row `j` of it is `D·U[j]`, behind the panel.
        let behind: Vec<f32> = panel
            .clone()
            .flat_map(|j| (panel.end..n).map(move |k| (j, k)))
            .map(|(j, k)| variances[k] * self.upper[j * n + k])
            .collect();
        let subtract = |row: &mut [f32], from: usize| {
            let (before, rest) = row.split_at_mut(panel.end);
            for j in from..panel.end {
                let other = &behind[(j - panel.start) * rest.len()..][..rest.len()];
                before[j] -= dot(rest, other);
            }
        };
        let (above, own) = self.upper.split_at_mut(panel.start * n);
        let own = &mut own[..panel.len() * n];
        for (i, row) in own.chunks_exact_mut(n).enumerate() {
            subtract(row, panel.start + i);
        }
        for j in panel.clone().rev() {
            let at = |i: usize| (i - panel.start) * n + j;
            // No variance is below what was added to it, but for rounding.
            let d = own[at(j)].max(0.5 * DAMPING);
            variances[j] = d;
            for i in panel.start..j {
                let u = own[at(i)] / d;
                for k in i..j {
                    own[(i - panel.start) * n + k] -= u * own[at(k)];
                }
            }
            for i in panel.start..j {
                own[at(i)] /= d;
            }
        }
        let (own, variances) = (&*own, &*variances);
        above.par_chunks_exact_mut(n).for_each(|row| {
            subtract(row, panel.start);
            for j in panel.clone().rev() {
                let product = row[j];
                row[j] /= variances[j];
                for k in panel.start..j {
                    row[k] -= product * own[(k - panel.start) * n + j];
                }
            }
        });
    }
}

/// `Σ a·b`, in interleaved sums, which the compiler can keep in vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut sums = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// `x + factor·y`, in place.
fn add_product(x: &mut [f32], factor: f32, y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += factor * y;
    }
}

/// Packs rows of as many values as the feedback is among.
pub(super) fn quantize_blocks<B: Pack>(w: &[f32], feedback: &Feedback, bytes: &mut [u8]) {
    let n = feedback.n;
    let (n_rows, n_block) = (w.len() / n, size_of::<B::Values>() / size_of::<f32>());
    let blocks: &mut [B] = bytemuck::cast_slice_mut(bytes);
    assert_eq!(blocks.len() * n_block, w.len(), "blocks and values");
    let mut targets: Vec<f32> = w.iter().map(|&w| storable(w)).collect();
    // Of each row, `w − q` of the columns of a block.
    let mut errors = vec![0.0; n_rows * n_block];
    for (b, first) in (0..n).step_by(n_block).enumerate() {
        let columns = first..first + n_block;
        let importance: &B::Values =
            bytemuck::from_bytes(bytemuck::cast_slice(&feedback.variances[columns.clone()]));
        let rows = targets.chunks_exact_mut(n).zip(w.chunks_exact(n));
        for (r, ((targets, w), errors)) in rows.zip(errors.chunks_exact_mut(n_block)).enumerate() {
            let targets = &mut targets[columns.clone()];
            targets.iter_mut().for_each(|x| *x = storable(*x));
            let x: B::Values = bytemuck::pod_read_unaligned(bytemuck::cast_slice(targets));
            let weights = weights::<B>(&x, Some(importance));
            let mut fit = B::fit(&x, &weights);
            errors.copy_from_slice(&w[columns.clone()]);
            code(&mut fit, targets, weights.as_ref(), errors, first, feedback);
            blocks[r * (n / n_block) + b] = B::store(&fit);
        }
        // One row of `U` after the other, for all rows of the matrix.
        for i in columns.clone() {
            let later = &feedback.upper[i * n..][columns.end..n];
            for (targets, errors) in targets
                .chunks_exact_mut(n)
                .zip(errors.chunks_exact(n_block))
            {
                add_product(&mut targets[columns.end..], errors[i - first], later);
            }
        }
    }
}

/// Chooses the codes of a block, each for what earlier ones err; `targets` are its values, of the
/// columns from `first` on, and `errors`, their weights, become `w − q`.
fn code<F: Recode>(
    fit: &mut F,
    targets: &mut [f32],
    weights: &[f32],
    errors: &mut [f32],
    first: usize,
    feedback: &Feedback,
) {
    let n = targets.len();
    for at in (0..n).step_by(F::RUN) {
        let run = at..at + F::RUN;
        fit.recode(at, &mut targets[run.clone()], &weights[run.clone()]);
        for i in run.clone() {
            errors[i] -= targets[i];
            let later = &feedback.upper[(first + i) * feedback.n..][first + run.end..first + n];
            add_product(&mut targets[run.end..], errors[i], later);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Numbers in −1..1 that look random.
    pub(in crate::quant) fn noise(n: usize, mut state: u64) -> Vec<f32> {
        let mut next = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    /// Inputs whose columns move together, `[rows, n]`.
    pub(in crate::quant) fn inputs(rows: usize, n: usize) -> Vec<f32> {
        let (common, own) = (noise(rows * 16, 1), noise(rows * n, 2));
        let mixing = noise(16 * n, 3);
        let value = |r: usize, k: usize| {
            let shared: f32 = (0..16)
                .map(|c| common[r * 16 + c] * mixing[c * n + k])
                .sum();
            shared + 0.3 * own[r * n + k]
        };
        (0..rows)
            .flat_map(|r| (0..n).map(move |k| (r, k)))
            .map(|(r, k)| value(r, k))
            .collect()
    }

    pub(in crate::quant) fn moments(x: &[f32], n: usize) -> Moments {
        let mut moments = Moments::new(n);
        for x in x.chunks(7 * n) {
            moments.add(x);
        }
        moments
    }

    #[test]
    fn moments_are_sums_of_products() {
        let (n, rows) = (531, 23);
        let x = inputs(rows, n);
        let moments = moments(&x, n);
        for (i, k) in [(0, 0), (0, 530), (8, 519), (17, 17), (300, 512), (530, 530)] {
            let exact: f64 = (0..rows)
                .map(|r| f64::from(x[r * n + i]) * f64::from(x[r * n + k]))
                .sum();
            let sum = f64::from(moments.sums[i * n + k]);
            assert!((sum - exact).abs() < 1e-4, "{i}, {k}: {sum}, {exact}");
        }
    }

    #[test]
    fn factors_make_the_moments() {
        let n = 77;
        let moments = moments(&inputs(200, n), n);
        let feedback = Feedback::new(moments.clone()).unwrap();
        let mean = (0..n).map(|i| moments.sums[i * n + i]).sum::<f32>() / n as f32;
        let factor = |i: usize, k: usize| {
            if i == k {
                1.0
            } else {
                f64::from(feedback.upper[i * n + k])
            }
        };
        for i in 0..n {
            for j in i..n {
                let product: f64 = (j..n)
                    .map(|k| factor(i, k) * f64::from(feedback.variances[k]) * factor(j, k))
                    .sum();
                let moment = f64::from(moments.sums[i * n + j] / mean);
                let expected = match i == j {
                    true => moment + f64::from(DAMPING),
                    false => moment * f64::from(1.0 - SHRINKAGE),
                };
                assert!(
                    (product - expected).abs() < 1e-4,
                    "{i}, {j}: {product}, {expected}"
                );
            }
        }
    }

    #[test]
    fn what_cannot_be_used() {
        assert!(Feedback::new(Moments::new(4)).is_none());
        for bad in [f32::NAN, f32::INFINITY] {
            let mut moments = Moments::new(4);
            moments.add(&[1.0, 2.0, bad, 0.0]);
            assert!(Feedback::new(moments).is_none());
        }
    }
}
