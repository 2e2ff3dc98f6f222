//! Truncated singular value decompositions of matrices `M: (n_out, n_in)`, in `f64`.

use crate::lora::adapter::{Term, uniform};
use rayon::prelude::*;

/// Dimensions beyond the rank in the search for the leading directions of a dense matrix (Halko et
/// al., arXiv 0909.4061, call it oversampling).
const OVERSAMPLING: usize = 8;
/// Number of subspace iterations over a dense matrix: with singular values that fall by a fifth
/// from one direction to the next, those after the oversampled ones are damped by `0.8^(8·(2·4 +
/// 1))`, 1e-7.
const ITERATIONS: usize = 4;
/// Shorter side of a dense matrix up to which all of its directions are computed, so that nothing
/// is approximate.
const EXACT: usize = 128;
/// Columns of a dense matrix that a thread sums together.
const COLUMNS: usize = 256;
/// Rotations of the Jacobi method end when columns are orthogonal to this many parts of their
/// lengths.
const ORTHOGONAL: f64 = 1e-15;
/// Maximum number of sweeps over all pairs of columns; some ten are usual.
const SWEEPS: usize = 60;

/// Rows of equal length, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) n: usize,
    pub(super) values: Vec<f64>,
}

impl Rows {
    pub(super) fn new(n: usize) -> Rows {
        Rows {
            n,
            values: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, row: impl Iterator<Item = f64>) {
        self.values.extend(row);
        debug_assert!(self.values.len().is_multiple_of(self.n));
    }

    fn len(&self) -> usize {
        self.values.len() / self.n
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.n..][..self.n]
    }

    /// Replaces the rows `X` by orthonormal ones `Q`, and returns the square matrix `L`, row-major,
    /// with `X = L·Q` (Gram–Schmidt, twice, which is enough: Giraud et al. 2005). A row that
    /// depends on earlier ones becomes zero.
    fn orthonormalise(&mut self) -> Vec<f64> {
        let k = self.len();
        let mut l = vec![0.0; k * k];
        for i in 0..k {
            let (done, rest) = self.values.split_at_mut(i * self.n);
            let row = &mut rest[..self.n];
            let length = dot(row, row).sqrt();
            for _ in 0..2 {
                for (j, q) in done.chunks_exact(self.n).enumerate() {
                    let part = dot(row, q);
                    l[i * k + j] += part;
                    row.iter_mut().zip(q).for_each(|(x, q)| *x -= part * q);
                }
            }
            let left = dot(row, row).sqrt();
            if left > 1e-13 * length {
                l[i * k + i] = left;
                row.iter_mut().for_each(|x| *x /= left);
            } else {
                row.fill(0.0);
            }
        }
        l
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// The term of rank `rank` that is nearest to `M = Bᵀ·A` in the Frobenius norm (Eckart and Young
/// 1936), given the rows of `A: (k, n_in)` and `B: (k, n_out)`. Each singular value is shared
/// equally between the two factors; directions that `M` does not have are zero.
pub(super) fn truncate(mut b: Rows, mut a: Rows, rank: usize) -> Term {
    let k = a.len();
    let (lb, la) = (b.orthonormalise(), a.orthonormalise());
    // M = Qbᵀ·(Lbᵀ·La)·Qa: the small matrix in the middle has the singular values of M.
    let mut core = vec![0.0; k * k];
    for m in 0..k {
        for i in 0..k {
            for j in 0..k {
                core[i * k + j] += lb[m * k + i] * la[m * k + j];
            }
        }
    }
    let (columns, v) = jacobi(&core, k);
    let mut order: Vec<(f64, usize)> = (0..k)
        .map(|j| (dot(columns.row(j), columns.row(j)).sqrt(), j))
        .collect();
    order.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
    let (mut terms_a, mut terms_b) = (vec![0.0; rank * a.n], vec![0.0; rank * b.n]);
    let largest = order.first().map_or(0.0, |(s, _)| *s);
    for (&(s, j), (to_a, to_b)) in order.iter().zip(
        terms_a
            .chunks_exact_mut(a.n)
            .zip(terms_b.chunks_exact_mut(b.n)),
    ) {
        if s <= 1e-14 * largest {
            break;
        }
        // A column of `columns` is the left singular vector times the singular value.
        combine(to_a, &a, v.row(j), s.sqrt());
        combine(to_b, &b, columns.row(j), 1.0 / s.sqrt());
    }
    Term::new(rank, terms_a, terms_b)
}

/// `to = factor·Σ weights[i]·rows[i]`.
fn combine(to: &mut [f32], rows: &Rows, weights: &[f64], factor: f64) {
    let mut sum = vec![0.0; rows.n];
    for (row, w) in rows.values.chunks_exact(rows.n).zip(weights) {
        sum.iter_mut().zip(row).for_each(|(x, y)| *x += w * y);
    }
    to.iter_mut()
        .zip(sum)
        .for_each(|(to, x)| *to = (factor * x) as f32);
}

/// Rotates the columns of a square matrix `C`, row-major, until they are orthogonal (Hestenes
/// 1958): `C·V`, whose columns are left singular vectors times singular values, and `V`. Both are
/// returned with columns as rows.
fn jacobi(c: &[f64], k: usize) -> (Rows, Rows) {
    let (mut columns, mut v) = (Rows::new(k), Rows::new(k));
    for j in 0..k {
        columns.push((0..k).map(|i| c[i * k + j]));
        v.push((0..k).map(|i| f64::from(u8::from(i == j))));
    }
    for _ in 0..SWEEPS {
        let mut rotated = false;
        for p in 0..k {
            for q in p + 1..k {
                let (x, y) = (columns.row(p), columns.row(q));
                let (pp, qq, pq) = (dot(x, x), dot(y, y), dot(x, y));
                if pq.abs() <= ORTHOGONAL * (pp * qq).sqrt() || pq == 0.0 {
                    continue;
                }
                rotated = true;
                let zeta = (qq - pp) / (2.0 * pq);
                let t = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                let cos = 1.0 / t.hypot(1.0);
                for rows in [&mut columns, &mut v] {
                    let (head, tail) = rows.values.split_at_mut(q * k);
                    for (x, y) in head[p * k..][..k].iter_mut().zip(&mut tail[..k]) {
                        (*x, *y) = (cos * (*x - t * *y), cos * (*y + t * *x));
                    }
                }
            }
        }
        if !rotated {
            break;
        }
    }
    (columns, v)
}

/// The term of rank `rank` that is practically nearest to a dense matrix, row-major `(n_out,
/// n_in)`: its leading directions by subspace iteration from a random start (Halko et al., arXiv
/// 0909.4061, algorithm 4.4), or all of a small one. Results do not depend on the number of
/// threads.
pub(super) fn truncate_dense(m: &[f32], n_in: usize, rank: usize) -> Term {
    let n_out = m.len() / n_in;
    let side = n_in.min(n_out);
    let n_directions = if side <= EXACT {
        side
    } else {
        (rank + OVERSAMPLING).min(side)
    };
    let mut a = Rows::new(n_in);
    let mut rng = 1;
    for _ in 0..n_directions {
        a.push((0..n_in).map(|_| f64::from(uniform(&mut rng))));
    }
    a.orthonormalise();
    let mut b = times_transposed(&a, m);
    for _ in 0..ITERATIONS {
        b.orthonormalise();
        a = times(&b, m);
        a.orthonormalise();
        b = times_transposed(&a, m);
    }
    b.orthonormalise();
    let a = times(&b, m);
    truncate(b, a, rank)
}

/// `X·Mᵀ` for rows `X: (k, n_in)`.
fn times_transposed(x: &Rows, m: &[f32]) -> Rows {
    let k = x.len();
    let products = |row: &[f32]| -> Vec<f64> {
        let product = |x: &[f64]| row.iter().zip(x).map(|(m, x)| f64::from(*m) * x).sum();
        x.values.chunks_exact(x.n).map(product).collect()
    };
    let by_row: Vec<Vec<f64>> = m.par_chunks_exact(x.n).map(products).collect();
    let mut y = Rows::new(by_row.len());
    for i in 0..k {
        y.push(by_row.iter().map(|row| row[i]));
    }
    y
}

/// `Y·M` for rows `Y: (k, n_out)`.
fn times(y: &Rows, m: &[f32]) -> Rows {
    let (k, n_in) = (y.len(), m.len() / y.n);
    let starts: Vec<usize> = (0..n_in).step_by(COLUMNS).collect();
    let parts: Vec<Vec<f64>> = starts
        .par_iter()
        .map(|&start| {
            let n = COLUMNS.min(n_in - start);
            let mut sums = vec![0.0; k * n];
            for (r, row) in m.chunks_exact(n_in).enumerate() {
                for (sums, y) in sums.chunks_exact_mut(n).zip(y.values.chunks_exact(y.n)) {
                    sums.iter_mut()
                        .zip(&row[start..][..n])
                        .for_each(|(s, m)| *s += y[r] * f64::from(*m));
                }
            }
            sums
        })
        .collect();
    let mut x = Rows::new(n_in);
    for i in 0..k {
        let row = parts
            .iter()
            .flat_map(|part| part.chunks_exact(part.len() / k).nth(i).unwrap_or_default());
        x.push(row.copied());
    }
    x
}

#[cfg(test)]
mod tests {
    use crate::lora::svd::*;

    /// A matrix with known singular values, too large to be decomposed exactly.
    #[test]
    fn subspace_iteration_leaves_out_what_is_least() {
        let (n_out, n_in, rank, n) = (150, 170, 10, 60);
        let mut rng = 7;
        let [mut u, mut v] = [n_out, n_in].map(|width| {
            let mut rows = Rows::new(width);
            (0..n).for_each(|_| rows.push((0..width).map(|_| f64::from(uniform(&mut rng)))));
            rows
        });
        u.orthonormalise();
        v.orthonormalise();
        let value = |i: usize| 0.8f64.powi(i as i32);
        let mut m = vec![0.0f32; n_out * n_in];
        for (r, row) in m.chunks_exact_mut(n_in).enumerate() {
            for (c, x) in row.iter_mut().enumerate() {
                *x = (0..n)
                    .map(|i| value(i) * u.row(i)[r] * v.row(i)[c])
                    .sum::<f64>() as f32;
            }
        }
        let term = truncate_dense(&m, n_in, rank);
        let mut squares = 0.0;
        for r in 0..n_out {
            for c in 0..n_in {
                let found: f64 = (0..rank)
                    .map(|j| f64::from(term.b()[j * n_out + r] * term.a()[j * n_in + c]))
                    .sum();
                squares += (f64::from(m[r * n_in + c]) - found).powi(2);
            }
        }
        let least = (rank..n).map(|i| value(i).powi(2)).sum::<f64>().sqrt();
        assert!(
            (squares.sqrt() / least - 1.0).abs() < 1e-4,
            "{} {least}",
            squares.sqrt()
        );
    }
}
