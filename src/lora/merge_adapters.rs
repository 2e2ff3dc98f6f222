//! Merging adapters into one.
//!
//! Methods work on the changes `ΔW = s·B·A`, not on factors, since the mean of products is not the
//! product of means. The result of every method is a matrix; its truncated singular value
//! decomposition is the merged term.

use crate::lora::AdapterError;
use crate::lora::adapter::{Adapter, Term, uniform};
use crate::lora::site::TargetModule;
use crate::lora::svd::{Rows, truncate, truncate_dense};
use rayon::prelude::*;
use std::sync::Arc;

/// Method of [`merge_adapters`] for the changes `ΔW₁ … ΔWₙ` of a matrix, with weights `w₁ … wₙ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeMethod {
    /// The weighted mean, `Σ wᵢ·ΔWᵢ / Σ wᵢ`.
    Linear,
    /// The weighted sum, `Σ wᵢ·ΔWᵢ` (arXiv 2212.04089).
    TaskArithmetic,
    /// The weighted sum, of the largest rank of the adapters unless another is given.
    Svd,
    /// Spherical interpolation between two adapters, at `w₂ / (w₁ + w₂)` of the angle between their
    /// changes (Shoemake 1985); a straight line where they have no angle.
    Slerp,
    /// Values below the quantile [`MergeOptions::density`] of each change become zero; each value
    /// then has the sign that the sum of the changes has, and is the mean of `wᵢ·ΔWᵢ` over the
    /// adapters that have that sign (arXiv 2306.01708).
    Ties,
    /// The weighted sum of changes with values randomly set to zero, all but
    /// [`MergeOptions::density`] of them, and the rest divided by it (arXiv 2311.03099).
    Dare,
}

impl MergeMethod {
    /// All methods with their names.
    pub const ALL: [(&'static str, MergeMethod); 6] = [
        ("linear", MergeMethod::Linear),
        ("svd", MergeMethod::Svd),
        ("ties", MergeMethod::Ties),
        ("dare", MergeMethod::Dare),
        ("slerp", MergeMethod::Slerp),
        ("task-arithmetic", MergeMethod::TaskArithmetic),
    ];
}

/// Options of [`merge_adapters`]. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeOptions {
    /// Merge method. Default [`MergeMethod::TaskArithmetic`].
    pub method: MergeMethod,
    /// Rank of the result, where a matrix is large enough. Default: the sum of the adapters'
    /// ranks, so that nothing is lost by the methods that add changes up; their largest for
    /// [`MergeMethod::Svd`].
    pub rank: Option<usize>,
    /// Fraction of the values that [`MergeMethod::Ties`] and [`MergeMethod::Dare`] keep, above 0
    /// and at most 1. Default 0.5.
    pub density: f64,
    /// Seed of [`MergeMethod::Dare`]. Default 1.
    pub seed: u64,
}

impl Default for MergeOptions {
    fn default() -> Self {
        MergeOptions {
            method: MergeMethod::TaskArithmetic,
            rank: None,
            density: 0.5,
            seed: 1,
        }
    }
}

/// Merges adapters of one model, each with a weight, into one that changes every matrix that one of
/// them changes.
///
/// Sums are in `f64`. Methods that add changes up never expand them; [`MergeMethod::Ties`] and
/// [`MergeMethod::Dare`] need the memory of two dense `f32` matrices of the size of the largest one
/// that is changed. Results do not depend on the number of threads.
///
/// # Errors
/// If there is no adapter, they are for different models, an option or a weight is invalid, or the
/// merged values exceed `f32`.
pub fn merge_adapters(
    adapters: &[(&Adapter, f32)],
    options: &MergeOptions,
) -> Result<Adapter, AdapterError> {
    let first = check(adapters, options)?;
    let MergeOptions { method, rank, .. } = *options;
    let mut merged = first.without_terms();
    let sites = Arc::clone(first.sites());
    let mut begin = 0;
    for tensor in sites.chunk_by(|a, b| a.tensor == b.tensor) {
        let range = begin..begin + tensor.len();
        begin = range.end;
        // Terms of one tensor are stacked in files, so they have one rank.
        let ranks = adapters.iter().map(|(a, _)| {
            range
                .clone()
                .filter_map(|i| a.term(i))
                .map(Term::rank)
                .max()
        });
        let ranks = ranks.map(Option::unwrap_or_default);
        let most = if method == MergeMethod::Svd {
            ranks.max().unwrap_or(0)
        } else {
            ranks.sum()
        };
        if most == 0 {
            continue;
        }
        let site = &tensor[0];
        let rank = rank.unwrap_or(most).min(site.n_in.min(site.n_out));
        for i in range {
            let changes = Change::all(adapters, i);
            if changes.is_empty() {
                continue;
            }
            let term = merged_term(adapters, &changes, site, i, rank, options);
            let values = || term.a().iter().chain(term.b());
            if let Some(index) = values().position(|x| !x.is_finite()) {
                let value = values().nth(index).copied().unwrap_or(f32::NAN);
                return Err(AdapterError::NotFinite {
                    name: site.tensor.to_string(),
                    index,
                    value,
                });
            }
            merged.set_term(i, term);
        }
    }
    Ok(merged)
}

/// Checks what is to be merged; returns the first adapter.
fn check<'a>(
    adapters: &[(&'a Adapter, f32)],
    options: &MergeOptions,
) -> Result<&'a Adapter, AdapterError> {
    let Some((first, _)) = adapters.first() else {
        return Err(AdapterError::Empty);
    };
    let invalid = |option, value, expected| AdapterError::Merge {
        option,
        value,
        expected,
    };
    for (adapter, weight) in adapters {
        first.check_same(adapter)?;
        if !weight.is_finite() {
            return Err(invalid("a weight", f64::from(*weight), "a finite number"));
        }
    }
    let MergeOptions {
        method,
        rank,
        density,
        ..
    } = *options;
    let total = total_weight(adapters);
    if matches!(method, MergeMethod::Linear | MergeMethod::Slerp) && total.abs() < 1e-6 {
        return Err(invalid(
            "the sum of the weights",
            total,
            "another number than 0, by which it is divided",
        ));
    }
    if method == MergeMethod::Slerp && adapters.len() != 2 {
        return Err(invalid(
            "the number of adapters",
            adapters.len() as f64,
            "2 for slerp",
        ));
    }
    if !(density > 0.0 && density <= 1.0) {
        return Err(invalid("the density", density, "above 0, at most 1"));
    }
    if rank == Some(0) {
        return Err(invalid("the rank", 0.0, "at least 1"));
    }
    Ok(first)
}

fn total_weight(adapters: &[(&Adapter, f32)]) -> f64 {
    adapters.iter().map(|(_, w)| f64::from(*w)).sum()
}

/// The term of rank `rank` for site `i`, where `changes` are those of some of the adapters.
fn merged_term(
    adapters: &[(&Adapter, f32)],
    changes: &[Change<'_>],
    site: &TargetModule,
    i: usize,
    rank: usize,
    options: &MergeOptions,
) -> Term {
    let total = total_weight(adapters);
    let MergeOptions { density, seed, .. } = *options;
    match options.method {
        MergeMethod::Ties => truncate_dense(&ties(changes, site, density), site.n_in, rank),
        MergeMethod::Dare => {
            truncate_dense(&dare(changes, site, density, seed, i), site.n_in, rank)
        }
        MergeMethod::Linear => sum(changes, site, rank, |c| c.weight / total),
        MergeMethod::TaskArithmetic | MergeMethod::Svd => sum(changes, site, rank, |c| c.weight),
        MergeMethod::Slerp => {
            let factors = slerp(changes, f64::from(adapters[1].1) / total);
            sum(changes, site, rank, |c| factors[c.adapter])
        }
    }
}

/// Change of one adapter at a target module (site).
struct Change<'t> {
    /// Index of the adapter.
    adapter: usize,
    weight: f64,
    /// Factor on `B·A`.
    scale: f64,
    term: &'t Term,
}

impl<'t> Change<'t> {
    fn all(adapters: &'t [(&Adapter, f32)], site: usize) -> Vec<Change<'t>> {
        let change = |(adapter, (a, weight)): (usize, &'t (&Adapter, f32))| {
            let term = a.term(site)?;
            Some(Change {
                adapter,
                weight: f64::from(*weight),
                scale: f64::from(a.scale(term)),
                term,
            })
        };
        adapters.iter().enumerate().filter_map(change).collect()
    }

    /// Row `r` of `s·B·A`, not weighted.
    fn row(&self, site: &TargetModule, r: usize) -> Vec<f64> {
        let mut row = vec![0.0; site.n_in];
        for (a, b) in self
            .term
            .a()
            .chunks_exact(site.n_in)
            .zip(self.term.b().chunks_exact(site.n_out))
        {
            let factor = self.scale * f64::from(b[r]);
            row.iter_mut()
                .zip(a)
                .for_each(|(x, a)| *x += factor * f64::from(*a));
        }
        row
    }
}

/// `Σ factor·ΔW` of rank `rank`.
fn sum(
    changes: &[Change<'_>],
    site: &TargetModule,
    rank: usize,
    factor: impl Fn(&Change<'_>) -> f64,
) -> Term {
    let (mut a, mut b) = (Rows::new(site.n_in), Rows::new(site.n_out));
    for change in changes {
        let factor = factor(change) * change.scale;
        for row in change.term.a().chunks_exact(site.n_in) {
            a.push(row.iter().map(|x| f64::from(*x)));
        }
        for row in change.term.b().chunks_exact(site.n_out) {
            b.push(row.iter().map(|x| factor * f64::from(*x)));
        }
    }
    truncate(b, a, rank)
}

/// Factors of two changes at the part `t` of the angle between them.
fn slerp(changes: &[Change<'_>], t: f64) -> [f64; 2] {
    let line = [1.0 - t, t];
    let [x, y] = changes else { return line };
    let (xx, yy, xy) = (inner(x, x), inner(y, y), inner(x, y));
    let angle = (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0).acos();
    // Opposite changes have no shortest arc, parallel ones none that differs from the line, zeros
    // no angle.
    let has_arc = angle.sin() > 1e-3;
    if has_arc {
        [(1.0 - t) * angle, t * angle].map(|part| part.sin() / angle.sin())
    } else {
        line
    }
}

/// Inner product of two changes as vectors: `tr(ΔW₁ᵀ·ΔW₂)`.
fn inner(x: &Change<'_>, y: &Change<'_>) -> f64 {
    let dots = |x: &[f32], y: &[f32], n: usize| -> Vec<f64> {
        let pairs = x
            .chunks_exact(n)
            .flat_map(|x| y.chunks_exact(n).map(move |y| (x, y)));
        pairs
            .map(|(x, y)| {
                x.iter()
                    .zip(y)
                    .map(|(x, y)| f64::from(*x) * f64::from(*y))
                    .sum()
            })
            .collect()
    };
    let (tx, ty) = (x.term, y.term);
    let a = dots(tx.a(), ty.a(), tx.a().len() / tx.rank());
    let b = dots(tx.b(), ty.b(), tx.b().len() / tx.rank());
    x.scale * y.scale * a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>()
}

fn ties(changes: &[Change<'_>], site: &TargetModule, density: f64) -> Vec<f32> {
    let n = site.n_in * site.n_out;
    let n_kept = ((density * n as f64) as usize).clamp(1, n);
    // The magnitude below which values of a change are trimmed.
    let least: Vec<f64> = changes
        .iter()
        .map(|change| {
            let mut all: Vec<f32> = vec![0.0; n];
            all.par_chunks_exact_mut(site.n_in)
                .enumerate()
                .for_each(|(r, to)| {
                    to.iter_mut()
                        .zip(change.row(site, r))
                        .for_each(|(to, x)| *to = x.abs() as f32);
                });
            f64::from(*all.select_nth_unstable_by(n - n_kept, f32::total_cmp).1)
        })
        .collect();
    let mut merged = vec![0.0; n];
    merged
        .par_chunks_exact_mut(site.n_in)
        .enumerate()
        .for_each(|(r, to)| {
            let mut rows: Vec<Vec<f64>> =
                changes.iter().map(|change| change.row(site, r)).collect();
            for (row, &least) in rows.iter_mut().zip(&least) {
                row.iter_mut()
                    .filter(|x| f64::from(x.abs() as f32) < least)
                    .for_each(|x| *x = 0.0);
            }
            for (c, to) in to.iter_mut().enumerate() {
                let elected: f64 = rows.iter().map(|row| row[c]).sum();
                let agree = changes
                    .iter()
                    .zip(&rows)
                    .map(|(change, row)| (change.weight, row[c]));
                let agree = agree.filter(|(_, x)| *x != 0.0 && (*x > 0.0) == (elected >= 0.0));
                let (sum, n) = agree.fold((0.0, 0), |(sum, n), (w, x)| (sum + w * x, n + 1));
                *to = if n == 0 {
                    0.0
                } else {
                    (sum / f64::from(n)) as f32
                };
            }
        });
    merged
}

fn dare(
    changes: &[Change<'_>],
    site: &TargetModule,
    density: f64,
    seed: u64,
    index: usize,
) -> Vec<f32> {
    let mut merged = vec![0.0; site.n_in * site.n_out];
    merged
        .par_chunks_exact_mut(site.n_in)
        .enumerate()
        .for_each(|(r, to)| {
            let mut sum = vec![0.0; site.n_in];
            for change in changes {
                // Every row of every change has random numbers of its own.
                let mut rng = seed;
                for part in [change.adapter, index, r] {
                    rng = (rng ^ part as u64)
                        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                        .rotate_left(31);
                }
                let factor = change.weight / density;
                for (sum, x) in sum.iter_mut().zip(change.row(site, r)) {
                    let is_kept = f64::from(uniform(&mut rng) + 1.0) < 2.0 * density;
                    *sum += if is_kept { factor * x } else { 0.0 };
                }
            }
            to.iter_mut().zip(sum).for_each(|(to, x)| *to = x as f32);
        });
    merged
}
