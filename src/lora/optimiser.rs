//! Optimisers: they train adapters by gradients, with plain arithmetic on the terms.

use crate::lora::{Adapter, Gradients, Term};

/// Updates an adapter from gradients.
pub trait Optimiser {
    /// Takes one step against `gradients`, which must belong to `adapter`; terms without a gradient
    /// stay unchanged.
    fn step(&mut self, adapter: &mut Adapter, gradients: &Gradients);
}

/// Gradient descent for learning during use: preconditioned, clipped and decayed.
///
/// * Preconditioned: `dA` by `(BᵀB)⁻¹` and `dB` by `(AAᵀ)⁻¹`, each up to a damping, so that a step
///   does not depend on how `B·A` is split into its factors (arXiv 2402.02347); then divided by the
///   gradient's root mean square over the steps so far of the same matrix (Krause et al., arXiv
///   1904.08378), so that one rate serves all matrices and models.
/// * Clipped: no step moves a matrix by more than [`Sgd::clip`] of its norm.
/// * Decayed toward zero, which is the original model.
///
/// Steps that would make a value infinite or NaN leave their term as it is.
#[derive(Clone, Debug)]
pub struct Sgd {
    /// Length of a step of `ΔW`, relative to `‖W‖`, for a gradient as large as the previous ones.
    pub rate: f32,
    /// Longest step, relative to `‖W‖`.
    pub clip: f32,
    /// Fraction of the adapter that one step forgets.
    pub decay: f32,
    /// `‖W‖` of each site, or NaN.
    norms: Vec<f32>,
    /// Sum of squared lengths of the preconditioned gradients, and their number, by site.
    seen: Vec<(f64, u32)>,
}

/// Diagonal added to Gram matrices, relative to their mean diagonal, and its lower bound.
const DAMPING: (f64, f64) = (1e-2, 1e-8);

impl Sgd {
    /// Rate 0.01, steps of at most 0.05, no decay: on the shipped model, chunks of 128 tokens of
    /// other text are learnt about equally well at a third and at three times that rate.
    /// `norms` are the norms of the matrices, as estimated
    /// by [`Model::site_norms`](crate::Model::site_norms).
    pub fn new(norms: Vec<f32>) -> Sgd {
        let seen = vec![(0.0, 0); norms.len()];
        Sgd {
            rate: 0.01,
            clip: 0.05,
            decay: 0.0,
            norms,
            seen,
        }
    }
}

impl Optimiser for Sgd {
    fn step(&mut self, adapter: &mut Adapter, gradients: &Gradients) {
        gradients
            .terms()
            .for_each(|(site, _)| self.step_at(site, adapter, gradients));
    }
}

impl Sgd {
    /// The part of [`Optimiser::step`] that changes one term.
    pub fn step_at(&mut self, site: usize, adapter: &mut Adapter, gradients: &Gradients) {
        let Some(gradient) = gradients.term(site) else {
            return;
        };
        let (Some(&norm), Some(term)) = (self.norms.get(site), adapter.term(site)) else {
            return;
        };
        let s = f64::from(adapter.scale(term));
        let (mut a, mut b) = (gradient.a().to_vec(), gradient.b().to_vec());
        precondition(&mut a, term.b(), term.rank());
        precondition(&mut b, term.a(), term.rank());
        // First-order change of ΔW, the sum of both factors' parts.
        let length = s.abs()
            * (product_norm(&a, term.b(), term.rank()) + product_norm(term.a(), &b, term.rank()));
        if !(length.is_finite() && length > 0.0 && norm.is_finite()) {
            return;
        }
        let (squares, n) = &mut self.seen[site];
        (*squares, *n) = (*squares + length * length, *n + 1);
        let rms = (*squares / f64::from(*n)).sqrt();
        let step =
            (f64::from(self.rate) / rms).min(f64::from(self.clip) / length) * f64::from(norm);
        let Some(term) = adapter.term_mut(site) else {
            return;
        };
        let keep = 1.0 - self.decay;
        let (old_a, old_b) = term.parts_mut();
        for (old, new) in old_a.iter_mut().zip(&a).chain(old_b.iter_mut().zip(&b)) {
            let value = keep * *old - step as f32 * new;
            *old = if value.is_finite() { value } else { *old };
        }
    }
}

/// Adam (Kingma & Ba, arXiv 1412.6980) with decoupled weight decay (arXiv 1711.05101), for many
/// steps on the same text.
#[derive(Clone, Debug)]
pub struct Adam {
    /// Learning rate: the largest step of a value.
    pub rate: f32,
    /// Fraction of the mean gradient, and of its mean square, that each step keeps.
    pub betas: (f32, f32),
    /// Added to the root of the mean square.
    pub eps: f32,
    /// Weight decay of every value, as a fraction of the rate.
    pub decay: f32,
    steps: i32,
    /// Means of the gradient and of its square, by site.
    moments: Vec<Option<(Vec<f32>, Vec<f32>)>>,
}

impl Adam {
    /// Rate 0.003, betas 0.9 and 0.99, no decay.
    pub fn new() -> Adam {
        Adam {
            rate: 3e-3,
            betas: (0.9, 0.99),
            eps: 1e-8,
            decay: 0.0,
            steps: 0,
            moments: Vec::new(),
        }
    }

    /// The means of the gradient and of its square, site by site, `A` before `B`; empty before the
    /// first step.
    pub fn moments(&self) -> [Vec<f32>; 2] {
        let all = || self.moments.iter().flatten();
        [
            all().flat_map(|(mean, _)| mean).copied().collect(),
            all().flat_map(|(_, square)| square).copied().collect(),
        ]
    }

    /// Continues after `steps` steps from what [`Adam::moments`] returned, for gradients of the
    /// same terms.
    ///
    /// # Panics
    /// If they are of fewer values.
    pub fn restore(&mut self, gradients: &Gradients, steps: usize, moments: &[Vec<f32>; 2]) {
        self.steps = i32::try_from(steps).unwrap_or(i32::MAX);
        self.moments = vec![None; gradients.sites().len()];
        let mut start = 0;
        for (site, term) in gradients.terms().filter(|_| steps > 0) {
            let range = start..start + term.a().len() + term.b().len();
            start = range.end;
            self.moments[site] = Some((
                moments[0][range.clone()].to_vec(),
                moments[1][range].to_vec(),
            ));
        }
    }
}

impl Default for Adam {
    fn default() -> Adam {
        Adam::new()
    }
}

impl Optimiser for Adam {
    fn step(&mut self, adapter: &mut Adapter, gradients: &Gradients) {
        self.steps = self.steps.saturating_add(1);
        self.moments.resize(gradients.sites().len(), None);
        let (b1, b2) = self.betas;
        let bias = (1.0 - b1.powi(self.steps), 1.0 - b2.powi(self.steps));
        for (site, gradient) in gradients.terms() {
            let Some(term) = adapter.term_mut(site) else {
                continue;
            };
            let n = gradient.a().len() + gradient.b().len();
            let (mean, square) =
                self.moments[site].get_or_insert_with(|| (vec![0.0; n], vec![0.0; n]));
            let (a, b) = term.parts_mut();
            let values = a
                .iter_mut()
                .chain(b)
                .zip(gradient.a().iter().chain(gradient.b()));
            for ((value, &g), (m, v)) in values.zip(mean.iter_mut().zip(square)) {
                if !(g * g).is_finite() {
                    continue;
                }
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                let step = *m / bias.0 / ((*v / bias.1).sqrt() + self.eps);
                *value -= self.rate * (step + self.decay * *value);
            }
        }
    }
}

/// `G ← (F·Fᵀ + damping)⁻¹·G` for `G` and `F` with `rank` rows.
fn precondition(g: &mut [f32], f: &[f32], rank: usize) {
    let mut gram = gram(f, f, rank);
    let diagonal = (0..rank).map(|i| gram[i * rank + i]).sum::<f64>() / rank as f64;
    for i in 0..rank {
        gram[i * rank + i] += DAMPING.0 * diagonal + DAMPING.1;
    }
    let factor = cholesky(gram, rank);
    let n = g.len() / rank;
    let mut column = vec![0.0; rank];
    for c in 0..n {
        for (i, x) in column.iter_mut().enumerate() {
            *x = f64::from(g[i * n + c]);
        }
        for i in 0..rank {
            let done: f64 = (0..i).map(|j| factor[i * rank + j] * column[j]).sum();
            column[i] = (column[i] - done) / factor[i * rank + i];
        }
        for i in (0..rank).rev() {
            let done: f64 = (i + 1..rank)
                .map(|j| factor[j * rank + i] * column[j])
                .sum();
            column[i] = (column[i] - done) / factor[i * rank + i];
        }
        for (i, x) in column.iter().enumerate() {
            g[i * n + c] = *x as f32;
        }
    }
}

/// Gram matrix `X·Yᵀ` of matrices with `rank` rows.
fn gram(x: &[f32], y: &[f32], rank: usize) -> Vec<f64> {
    let dot = |x: &[f32], y: &[f32]| {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum()
    };
    let rows = |z: &[f32], i: usize| i * (z.len() / rank)..(i + 1) * (z.len() / rank);
    (0..rank * rank)
        .map(|ij| dot(&x[rows(x, ij / rank)], &y[rows(y, ij % rank)]))
        .collect()
}

/// Cholesky factor: the lower triangle `L` with `L·Lᵀ = M`, for a positive definite `M`.
fn cholesky(mut m: Vec<f64>, n: usize) -> Vec<f64> {
    for i in 0..n {
        for j in 0..=i {
            let done: f64 = (0..j).map(|k| m[i * n + k] * m[j * n + k]).sum();
            let rest = m[i * n + j] - done;
            m[i * n + j] = if i == j {
                rest.max(f64::MIN_POSITIVE).sqrt()
            } else {
                rest / m[j * n + j]
            };
        }
    }
    m
}

/// Frobenius norm `‖Bᵀ·A‖` of matrices with `rank` rows, from their Gram matrices:
/// `tr((A·Aᵀ)(B·Bᵀ))`.
fn product_norm(a: &[f32], b: &[f32], rank: usize) -> f64 {
    let (a, b) = (gram(a, a, rank), gram(b, b, rank));
    a.iter()
        .zip(&b)
        .map(|(a, b)| a * b)
        .sum::<f64>()
        .max(0.0)
        .sqrt()
}

/// Frobenius norm `‖ΔW‖` of a term, not yet scaled.
pub fn change_norm(term: &Term) -> f64 {
    product_norm(term.a(), term.b(), term.rank())
}

#[cfg(test)]
mod tests {
    use crate::lora::optimiser::*;

    fn noise(n: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn the_norm_of_a_product_is_that_of_its_matrix() {
        let (a, b, rank) = (noise(3 * 7, 1), noise(3 * 5, 2), 3);
        let mut squares = 0.0;
        for r in 0..5 {
            for c in 0..7 {
                let value: f64 = (0..rank)
                    .map(|j| f64::from(b[j * 5 + r]) * f64::from(a[j * 7 + c]))
                    .sum();
                squares += value * value;
            }
        }
        assert!((product_norm(&a, &b, rank) - squares.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn preconditioning_undoes_the_gram_matrix() {
        let (f, x, rank) = (noise(3 * 40, 3), noise(3 * 4, 4), 3);
        let mut m = gram(&f, &f, rank);
        let diagonal = (0..rank).map(|i| m[i * rank + i]).sum::<f64>() / rank as f64;
        (0..rank).for_each(|i| m[i * rank + i] += DAMPING.0 * diagonal + DAMPING.1);
        // g = M·x
        let mut g: Vec<f32> = (0..rank * 4)
            .map(|ic| {
                (0..rank)
                    .map(|j| m[ic / 4 * rank + j] * f64::from(x[j * 4 + ic % 4]))
                    .sum::<f64>() as f32
            })
            .collect();
        precondition(&mut g, &f, rank);
        // The Gram matrix of noise is well conditioned: rounding of `g` grows less than tenfold.
        assert!(g.iter().zip(&x).all(|(g, x)| (g - x).abs() < 1e-5));
    }
}
