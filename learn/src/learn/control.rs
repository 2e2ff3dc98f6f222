//! What must not be forgotten: moments of ordinary text, and the importance of each direction
//! there.

use crate::learn::moments::{Sample, computable};
use crate::learn::slices::Slices;
use ruvllm::arch::Arch;

/// Tokens that one update learns from.
pub(crate) const UPDATE_TOKENS: usize = 64;

/// Kronecker-diagonal Fisher information of a change of the hidden state: `F_ij ≈ γ_i·ξ_j`.
///
/// The penalty of `ΔW = B·A` is `½·tr[(BᵀΓB)(AΞAᵀ)]` (elastic weight consolidation in the space of
/// the product, arXiv 2602.17559), and only `rank²` numbers besides `γ` and `ξ` are needed for it.
#[derive(Clone, Debug)]
pub(crate) struct Fisher {
    /// `γ: (n_embd)`, mean squared gradient with respect to the hidden state.
    pub(crate) gamma: Vec<f32>,
    /// `ξ: (n_embd)`, mean squared hidden state.
    pub(crate) xi: Vec<f32>,
    /// Number of texts it was computed from.
    pub(crate) n_texts: u32,
}

impl Fisher {
    pub(crate) fn new(n_embd: usize) -> Fisher {
        Fisher {
            gamma: vec![1.0; n_embd],
            xi: vec![1.0; n_embd],
            n_texts: 0,
        }
    }

    /// `F ← decay·F + (1 − decay)·F_new`; the first text replaces the initial guess.
    pub(crate) fn merge(&mut self, gamma: &[f32], xi: &[f32], decay: f32) {
        let decay = if self.n_texts == 0 { 0.0 } else { decay };
        for (old, new) in self
            .gamma
            .iter_mut()
            .zip(gamma)
            .chain(self.xi.iter_mut().zip(xi))
        {
            let merged = decay * *old + (1.0 - decay) * new;
            if computable(&[merged]) {
                *old = merged;
            }
        }
        self.n_texts = self.n_texts.saturating_add(1);
    }

    /// `1/(γ + damping)`, positive and finite for any `γ`: the diagonal of the preconditioner.
    pub(crate) fn preconditioner(&self) -> Vec<f32> {
        let mean = self.gamma.iter().sum::<f32>() / self.gamma.len() as f32;
        self.gamma
            .iter()
            .map(|y| 1.0 / (y + DAMPING * mean).clamp(f32::MIN_POSITIVE, f32::MAX))
            .collect()
    }

    /// `∂/∂Bᵀ` of the penalty: `AΞAᵀ·Bᵀ·Γ`, with `A`, `Bᵀ` of `(rank, n_embd)`.
    pub(crate) fn penalty_gradient(&self, a: &[f32], b: &[f32]) -> Vec<f32> {
        let n = self.xi.len();
        let mut g = vec![0.0; b.len()];
        for (i, (a_i, g)) in a.chunks_exact(n).zip(g.chunks_exact_mut(n)).enumerate() {
            for (j, (a_j, b_j)) in a.chunks_exact(n).zip(b.chunks_exact(n)).enumerate() {
                let overlap: f32 = (0..n).map(|k| a_i[k] * self.xi[k] * a_j[k]).sum();
                debug_assert!(i != j || overlap >= 0.0);
                (0..n).for_each(|k| g[k] += overlap * b_j[k] * self.gamma[k]);
            }
        }
        g
    }
}

/// `Ξ = D + HᵀH/m` of the hidden states `H: (m, n)` of some moments, where `D` is a fraction of its
/// diagonal; solved by the Woodbury identity, so that no `n × n` matrix is ever built.
pub(crate) struct Whitening {
    n: usize,
    diagonal: Vec<f32>,
    h: Vec<f32>,
    /// Cholesky factor of `m·I + H·D⁻¹·Hᵀ`, lower, row by row.
    factor: Vec<f32>,
}

/// Fraction of the mean that is added to each number of a diagonal, to allow for states unlike
/// those of the moments.
const DAMPING: f32 = 0.1;

impl Whitening {
    /// `None` if `slices` gave up.
    pub(crate) fn new<'a>(
        arch: Arch,
        moments: impl Iterator<Item = Sample<'a>> + Clone,
        n: usize,
        slices: &mut Slices<'_>,
    ) -> Option<Whitening> {
        let m = moments.clone().count();
        let mut h = vec![0.0; m * n];
        moments
            .zip(h.chunks_exact_mut(n))
            .for_each(|(x, h)| arch.f16_to_f32(x.h, h));
        let mut diagonal = vec![0.0f32; n];
        h.chunks_exact(n)
            .for_each(|h| diagonal.iter_mut().zip(h).for_each(|(d, x)| *d += x * x));
        let mean = diagonal.iter().sum::<f32>() / (n * m.max(1)) as f32;
        diagonal
            .iter_mut()
            .for_each(|d| *d = DAMPING * (*d / m.max(1) as f32 + mean) + f32::MIN_POSITIVE);
        let mut factor = vec![0.0; m * m];
        let mut scaled = vec![0.0; n];
        for i in 0..m {
            scaled
                .iter_mut()
                .zip(&h[i * n..][..n])
                .zip(&diagonal)
                .for_each(|((s, x), d)| *s = x / d);
            for j in 0..=i {
                factor[i * m + j] =
                    arch.dot(&scaled, &h[j * n..][..n]) + if i == j { m as f32 } else { 0.0 };
            }
            slices.tick()?;
        }
        cholesky(arch, &mut factor, m, slices)?;
        Some(Whitening {
            n,
            diagonal,
            h,
            factor,
        })
    }

    /// `Ξ·x`.
    fn multiply(&self, arch: Arch, x: &[f32]) -> Vec<f32> {
        let m = (self.h.len() / self.n) as f32;
        let mut y: Vec<f32> = x.iter().zip(&self.diagonal).map(|(x, d)| x * d).collect();
        self.h
            .chunks_exact(self.n)
            .for_each(|h| arch.add_scaled(&mut y, h, arch.dot(h, x) / m));
        y
    }

    /// `Ξ⁻¹·x`.
    pub(crate) fn solve(&self, arch: Arch, x: &[f32]) -> Vec<f32> {
        let m = self.h.len() / self.n;
        let divided: Vec<f32> = x.iter().zip(&self.diagonal).map(|(x, d)| x / d).collect();
        let mut t: Vec<f32> = self
            .h
            .chunks_exact(self.n)
            .map(|h| arch.dot(h, &divided))
            .collect();
        for i in 0..m {
            let row = &self.factor[i * m..];
            t[i] = (t[i] - arch.dot(&row[..i], &t[..i])) / row[i];
        }
        for i in (0..m).rev() {
            t[i] /= self.factor[i * m + i];
            let (head, tail) = t.split_at_mut(i);
            arch.add_scaled(head, &self.factor[i * m..][..i], -tail[0]);
        }
        let mut back = vec![0.0; self.n];
        self.h
            .chunks_exact(self.n)
            .zip(&t)
            .for_each(|(h, &t)| arch.add_scaled(&mut back, h, t));
        divided
            .iter()
            .zip(&back)
            .zip(&self.diagonal)
            .map(|((x, b), d)| x - b / d)
            .collect()
    }
}

/// Replaces the lower half of a positive definite `K` by its Cholesky factor `L`, `L·Lᵀ = K`.
fn cholesky(arch: Arch, k: &mut [f32], m: usize, slices: &mut Slices<'_>) -> Option<()> {
    for i in 0..m {
        for j in 0..=i {
            let (before, row) = k.split_at_mut(i * m);
            let sum = if i == j {
                row[j] - arch.dot(&row[..j], &row[..j])
            } else {
                row[j] - arch.dot(&row[..j], &before[j * m..][..j])
            };
            row[j] = if i == j {
                sum.max(1e-12).sqrt()
            } else {
                sum / before[j * m + j]
            };
        }
        slices.tick()?;
    }
    Some(())
}

/// Squared length, relative to that of the original vector, that rounding may leave after
/// projections: some `n·2⁻⁴⁶`.
const ROUNDING: f32 = 1e-10;

/// The strongest directions of `Σ_t g_t·h_tᵀ` in the metrics `Γ` and `Ξ`: `A`, whose rows have
/// length one in `Ξ`, and `Bᵀ = −Γ⁻¹·Σ g·(A·h)ᵀ`, as many steps of steepest descent along them as
/// there are updates in that many tokens. `inverse` is `Γ⁻¹`, damped; `g` and `h` are `(t, n)`. `A`
/// and `Bᵀ` of the result, and of `old`, from which it continues, are `(rank, n)`, zero where there
/// are fewer directions. Features of ordinary text are expensive in `Ξ`, so `A` picks what
/// distinguishes the new text. `None` if `slices` gave up.
pub(crate) fn directions(
    arch: Arch,
    whitening: &Whitening,
    inverse: &[f32],
    g: &[f32],
    h: &[f32],
    old: (&[f32], &[f32]),
    rank: usize,
    slices: &mut Slices<'_>,
) -> Option<(Vec<f32>, Vec<f32>)> {
    let n = inverse.len();
    // Earlier learning, as the gradients that would have produced it.
    let room = || Vec::with_capacity(g.len() + old.0.len());
    let (mut all_g, mut all_h) = (room(), room());
    all_g.extend_from_slice(g);
    all_h.extend_from_slice(h);
    for (a, b) in old.0.chunks_exact(n).zip(old.1.chunks_exact(n)) {
        all_g.extend(
            b.iter()
                .zip(inverse)
                .map(|(b, p)| -b / p * UPDATE_TOKENS as f32),
        );
        all_h.extend(whitening.multiply(arch, a));
    }
    let (g, h) = (&all_g[..], &all_h[..]);
    let times = |x: &[f32], v: &[f32], slices: &mut Slices<'_>| -> Option<Vec<f32>> {
        let rows = x.chunks_exact(n).enumerate();
        rows.map(|(i, x)| at_times(i, slices).map(|()| arch.dot(x, v)))
            .collect()
    };
    let transposed = |x: &[f32], v: &[f32], slices: &mut Slices<'_>| {
        let mut sum = vec![0.0; n];
        for (i, (x, &v)) in x.chunks_exact(n).zip(v).enumerate() {
            at_times(i, slices)?;
            arch.add_scaled(&mut sum, x, v);
        }
        Some(sum)
    };
    let mut all_a: Vec<Vec<f32>> = Vec::new();
    let mut duals: Vec<Vec<f32>> = Vec::new();
    let mut all_b = Vec::new();
    'directions: for _ in 0..rank {
        let mut v = vec![1.0; h.len() / n];
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..12 {
            // `dual = Ξ·a`, updated along with `a`, so that lengths in Ξ cost one product.
            let mut dual = transposed(h, &v, slices)?;
            a = whitening.solve(arch, &dual);
            let whole = arch.dot(&a, &dual);
            for (other, other_dual) in all_a.iter().zip(&duals) {
                let overlap = arch.dot(&a, other_dual);
                arch.add_scaled(&mut a, other, -overlap);
                arch.add_scaled(&mut dual, other_dual, -overlap);
            }
            let left = arch.dot(&a, &dual);
            // Only rounding is left: so few tokens have no further direction.
            if left.is_nan() || left <= ROUNDING * whole {
                break 'directions;
            }
            let length = left.max(f32::MIN_POSITIVE).sqrt();
            a.iter_mut().for_each(|x| *x /= length);
            dual.iter_mut().for_each(|x| *x /= length);
            b = transposed(g, &times(h, &a, slices)?, slices)?;
            b.iter_mut().zip(inverse).for_each(|(b, p)| *b *= p);
            v = times(g, &b, slices)?;
            let length = arch.dot(&v, &v).max(f32::MIN_POSITIVE).sqrt();
            v.iter_mut().for_each(|x| *x /= length);
            duals.truncate(all_a.len());
            duals.push(dual);
        }
        b.iter_mut().for_each(|b| *b /= -(UPDATE_TOKENS as f32));
        all_a.push(a);
        all_b.push(b);
    }
    all_a.resize(rank, vec![0.0; n]);
    all_b.resize(rank, vec![0.0; n]);
    Some((all_a.concat(), all_b.concat()))
}

/// [`Slices::tick`] at every 32nd row.
fn at_times(row: usize, slices: &mut Slices<'_>) -> Option<()> {
    if row.is_multiple_of(32) {
        slices.tick()
    } else {
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use crate::learn::control::*;
    use crate::learn::moments::Samples;
    use ruvllm::model::LogitTransform;

    #[test]
    fn whitening_solves() {
        let (arch, n, m) = (Arch::scalar(), 7, 20);
        let mut moments = Samples::new(n, m);
        let value = |i: usize, j: usize| ((i * 31 + j * 17) % 13) as f32 / 4.0 - 1.5;
        for i in 0..m {
            let h: Vec<f32> = (0..n).map(|j| value(i, j)).collect();
            moments.push(
                arch,
                LogitTransform {
                    scale: 1.0,
                    cap: 0.0,
                },
                &h,
                &[0.0, 1.0],
                &[0.3, 0.7],
                1.3,
                0,
            );
        }
        let w = Whitening::new(arch, moments.iter(), n, &mut Slices::whole()).unwrap();
        let x: Vec<f32> = (0..n).map(|j| j as f32 - 2.0).collect();
        let y = w.solve(arch, &x);
        for i in 0..n {
            // Row i of D + HᵀH/m, times the solution.
            let mut sum = f64::from(w.diagonal[i] * y[i]);
            for j in 0..n {
                let entry: f32 = (0..m).map(|t| value(t, i) * value(t, j)).sum::<f32>() / m as f32;
                sum += f64::from(entry * y[j]);
            }
            assert!((sum - f64::from(x[i])).abs() < 1e-3, "{i}: {sum} {}", x[i]);
        }
    }

    #[test]
    fn one_token_has_one_direction() {
        let n = 8;
        let mut moments = Samples::new(n, 4);
        let value = |i: usize, j: usize| ((i * 31 + j * 17) % 13) as f32 / 4.0 - 1.5;
        for i in 0..4 {
            let h: Vec<f32> = (0..n).map(|j| value(i, j)).collect();
            moments.push(
                Arch::scalar(),
                LogitTransform {
                    scale: 1.0,
                    cap: 0.0,
                },
                &h,
                &[0.0, 1.0],
                &[0.3, 0.7],
                1.3,
                0,
            );
        }
        let arch = Arch::scalar();
        let whitening = Whitening::new(arch, moments.iter(), n, &mut Slices::whole()).unwrap();
        let [g, h]: [Vec<f32>; 2] = [5, 9].map(|i| (0..n).map(|j| value(i, j)).collect());
        let found = directions(
            arch,
            &whitening,
            &vec![1.0; n],
            &g,
            &h,
            (&[], &[]),
            4,
            &mut Slices::whole(),
        );
        let (a, b) = found.unwrap();
        assert!(
            arch.dot(&a[..n], &a[..n]) > 1e-3 && arch.dot(&b[..n], &b[..n]) > 1e-6,
            "{a:?} {b:?}"
        );
        assert!(
            a[n..].iter().chain(&b[n..]).all(|&x| x == 0.0),
            "{a:?} {b:?}"
        );
    }

    #[test]
    fn preconditioners_are_finite() {
        for gamma in [0.0, 1e-45, 1.0, f32::MAX] {
            let fisher = Fisher {
                gamma: vec![gamma; 3],
                ..Fisher::new(3)
            };
            assert!(
                fisher
                    .preconditioner()
                    .iter()
                    .all(|p| *p > 0.0 && p.is_finite()),
                "{gamma}"
            );
        }
    }

    #[test]
    fn penalty_has_the_gradient_of_its_formula() {
        let n = 5;
        let fisher = Fisher {
            gamma: vec![1.0, 2.0, 0.5, 3.0, 1.5],
            xi: vec![0.2, 1.0, 2.0, 0.7, 0.1],
            n_texts: 1,
        };
        let a: Vec<f32> = (0..2 * n).map(|i| (i as f32 * 0.7).sin()).collect();
        let b: Vec<f32> = (0..2 * n).map(|i| (i as f32 * 1.3).cos()).collect();
        // ½·Σ_ij γ_i·ξ_j·(B·A)_ij².
        let penalty = |b: &[f32]| -> f64 {
            let mut sum = 0.0;
            for i in 0..n {
                for j in 0..n {
                    let w = f64::from(b[i]) * f64::from(a[j])
                        + f64::from(b[n + i]) * f64::from(a[n + j]);
                    sum += 0.5 * f64::from(fisher.gamma[i]) * f64::from(fisher.xi[j]) * w * w;
                }
            }
            sum
        };
        let g = fisher.penalty_gradient(&a, &b);
        for i in 0..2 * n {
            let mut moved = [b.clone(), b.clone()];
            moved[0][i] += 1e-2;
            moved[1][i] -= 1e-2;
            // For a quadratic, central differences have only rounding errors.
            let difference = (penalty(&moved[0]) - penalty(&moved[1])) / 2e-2;
            assert!(
                (difference - f64::from(g[i])).abs() < 1e-4 * (1.0 + difference.abs()),
                "{i}: {difference} {}",
                g[i]
            );
        }
    }
}
