//! What a backward pass begins with: losses of logits, and their gradients.

use crate::arch::Arch;
use crate::layers::hparams::LogitTransform;

/// Logits that are gone through at a time: with what belongs to them they stay in the first cache.
const TILE: usize = 2048;

/// The loss of a pass.
pub(crate) enum Objective<'a> {
    /// Replaces the logits of token `i` of text `t` by the gradient of the loss with respect to
    /// them, and returns the loss.
    Logits(&'a (dyn Fn(usize, usize, &mut [f32]) -> f64 + Sync + 'a)),
    /// `weight·KL(p ‖ q)` of each token of a single text, where `p` is what follows `reference`:
    /// rows before the last norm, `(m, n_embd)`, of a model without adapters.
    Divergence { reference: &'a [f32], weight: f32 },
}

/// The loss of logits, given the products that they are made of, which are replaced by the gradient
/// with respect to them.
pub(super) fn through_transform(
    transform: LogitTransform,
    products: &mut [f32],
    loss: impl FnOnce(&mut [f32]) -> f64,
) -> f64 {
    let LogitTransform { scale, cap } = transform;
    if scale != 1.0 {
        products.iter_mut().for_each(|x| *x *= scale);
    }
    let mut slopes = Vec::new();
    if cap > 0.0 {
        products
            .iter_mut()
            .for_each(|x| *x = cap * (*x / cap).tanh());
        slopes.extend(products.iter().map(|x| 1.0 - (x / cap) * (x / cap)));
    }
    let loss = loss(products);
    products
        .iter_mut()
        .zip(slopes)
        .for_each(|(dx, slope)| *dx *= slope);
    if scale != 1.0 {
        products.iter_mut().for_each(|dx| *dx *= scale);
    }
    loss
}

/// Divergence from a reference.
pub(super) struct Divergence {
    pub(super) transform: LogitTransform,
    pub(super) weight: f32,
    /// Whether its gradient is wanted.
    pub(super) has_gradient: bool,
}

impl Divergence {
    /// `weight·KL(p ‖ q)` in nats of the head's products for `q`, which are replaced by the gradient
    /// with respect to them, and for `p`.
    pub(super) fn of_rows(&self, arch: Arch, q: &mut [f32], p: &[f32]) -> f64 {
        through_transform(self.transform, q, |q| {
            f64::from(self.weight) * self.of_logits(arch, q, p)
        })
    }

    /// `KL(p ‖ q) = Σ p·(ln p − ln q)` in tiles: of each the logarithms of both sums, and the mean
    /// under `p` of how far the logits are apart.
    fn of_logits(&self, arch: Arch, q: &mut [f32], p: &[f32]) -> f64 {
        let (mut room, mut apart) = ([0.0; TILE], [0.0; TILE]);
        let mut parts = Vec::with_capacity(q.len().div_ceil(TILE));
        for (q, p) in q.chunks(TILE).zip(p.chunks(TILE)) {
            let (room, apart) = (&mut room[..q.len()], &mut apart[..q.len()]);
            room.copy_from_slice(p);
            self.transform.row(room);
            apart.copy_from_slice(room);
            arch.add_scaled(apart, q, -1.0);
            let of_p = softmax_of(arch, room);
            let mean = f64::from(arch.dot(room, apart));
            room.copy_from_slice(q);
            parts.push([of_p, softmax_of(arch, room), mean]);
        }
        let [of_p, of_q] = [0, 1].map(|i| log_sum(parts.iter().map(|part| part[i])));
        let means = parts.iter().map(|part| (part[0] - of_p).exp() * part[2]);
        let divergence = means.sum::<f64>() - of_p + of_q;
        if self.has_gradient {
            let weight = f64::from(self.weight);
            for ((q, p), part) in q.chunks_mut(TILE).zip(p.chunks(TILE)).zip(&parts) {
                let room = &mut room[..q.len()];
                room.copy_from_slice(p);
                self.transform.row(room);
                arch.softmax(room);
                arch.softmax(q);
                let [of_q, of_p] =
                    [part[1] - of_q, part[0] - of_p].map(|of| (weight * of.exp()) as f32);
                q.iter_mut().for_each(|q| *q *= of_q);
                arch.add_scaled(q, room, -of_p);
            }
        }
        divergence
    }
}

/// Softmax in place; returns `ln Σ exp` of what was there.
pub(crate) fn softmax_of(arch: Arch, logits: &mut [f32]) -> f64 {
    let max = largest(logits);
    arch.softmax(logits);
    // The largest probability is 1 over the sum of exponentials.
    f64::from(max) - f64::from(largest(logits)).ln()
}

/// The largest value, in lanes: a fold over the values would take them one after the other.
fn largest(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    let all = lanes.into_iter().chain(rest.iter().copied());
    all.fold(f32::NEG_INFINITY, larger)
}

/// `ln Σ exp`.
fn log_sum(terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = terms.clone().fold(f64::NEG_INFINITY, f64::max);
    max + terms.map(|x| (x - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::{Divergence, TILE};
    use crate::arch::Arch;
    use crate::layers::hparams::LogitTransform;

    /// The logarithms of the probabilities in 64 bits.
    fn logs(x: &[f64], LogitTransform { scale, cap }: LogitTransform) -> Vec<f64> {
        let (scale, cap) = (f64::from(scale), f64::from(cap));
        let logit = |x: f64| match scale * x {
            x if cap > 0.0 => cap * (x / cap).tanh(),
            x => x,
        };
        let x: Vec<f64> = x.iter().map(|&x| logit(x)).collect();
        let lse = x.iter().map(|x| x.exp()).sum::<f64>().ln();
        x.iter().map(|x| x - lse).collect()
    }

    #[test]
    fn divergence_in_tiles_is_that_of_its_formula() {
        let n = 2 * TILE + 37;
        let value = |i: usize, k: usize| ((i * k) % 97) as f32 / 24.0;
        let p: Vec<f32> = (0..n).map(|i| value(i, 31)).collect();
        let q: Vec<f32> = (0..n).map(|i| value(i, 31) + 0.2 * value(i, 17)).collect();
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
        for (scale, cap) in [(1.0, 0.0), (0.5, 0.0), (0.75, 3.0)] {
            let transform = LogitTransform { scale, cap };
            let log_p = logs(&wide(&p), transform);
            let divergence = |q: &[f64]| -> f64 {
                let terms = log_p.iter().zip(logs(q, transform));
                2.0 * terms.map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
            };
            let parts = Divergence {
                transform,
                weight: 2.0,
                has_gradient: true,
            };
            let mut gradient = q.clone();
            let found = parts.of_rows(Arch::scalar(), &mut gradient, &p);
            let expected = divergence(&wide(&q));
            // Sums of 2048 terms, one after the other, are rounded 2048 times by up to 6e-8: if by
            // chance, to 3e-6, of which there is room for three.
            assert!((found - expected).abs() < 2e-5, "{found} {expected}");
            let log_q = logs(&wide(&q), transform);
            for i in [0, 5, TILE - 1, TILE, n - 1] {
                let at = |by: f64| {
                    let mut q = wide(&q);
                    q[i] += by;
                    divergence(&q)
                };
                let slope = (at(1e-4) - at(-1e-4)) / 2e-4;
                let room = 2e-5 * (log_p[i].exp() + log_q[i].exp());
                let found = f64::from(gradient[i]);
                assert!((slope - found).abs() < room, "{i}: {slope} {found} {room}");
            }
            assert_eq!(parts.of_rows(Arch::scalar(), &mut p.clone(), &p), 0.0);
        }
    }
}
