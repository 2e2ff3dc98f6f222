//! Queries and keys of like size in each dimension, so that keys lose little in few bits.

use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::rope::spec::{Rope, RopeOrder};

/// Exponents of factors are `-LARGEST..=LARGEST`.
const LARGEST: f64 = 5.0;

/// Multiplies the weights of the norm of keys by factors, and divides those of queries by them.
///
/// Rounding a key `k` to few bits adds an error `e` that is spread over all dimensions alike, as
/// keys are stored transformed ([`Arch::hadamard`](crate::arch::Arch::hadamard)), and `|q·e|` grows
/// with `‖q‖·‖k‖`. That product is smallest where `q` and `k` are of like size in every dimension.
/// Trained norms are far from it: a key has few large dimensions, in which queries are small.
///
/// The factors are powers of two and those of a rotated pair are the same, so that `q·k` stays what
/// it is, bit by bit. `rope` rotates the heads.
pub(crate) fn balance(spec: &AttnSpec, rope: Option<&Rope>, attn: &mut Attn) {
    let is_by_head = matches!(spec.qk_norm, Some(QkNorm::PerHead | QkNorm::PerHeadRotated));
    let (true, Some(q), Some(k)) = (is_by_head, &mut attn.q_norm, &mut attn.k_norm) else {
        return;
    };
    if q.len() == k.len() && q.iter().chain(&*k).all(|w| w.is_finite()) {
        let factors = factors(q, k, rope);
        for ((q, k), factor) in q.iter_mut().zip(k).zip(&factors) {
            *q /= factor;
            *k *= factor;
        }
        attn.key_factors = Some(factors);
    }
}

/// A factor on each weight of the norm of keys.
fn factors(q: &[f32], k: &[f32], rope: Option<&Rope>) -> Vec<f32> {
    let size = |w: &[f32], i: usize| {
        let pair = [i, partner(rope, i)].map(|i| w.get(i).map_or(0.0, |&w| f64::from(w)));
        pair.iter().map(|w| w * w).sum::<f64>()
    };
    let factor = |i: usize| {
        let (q, k) = (size(q, i), size(k, i));
        if q > 0.0 && k > 0.0 {
            // The sizes are squares: the fourth root of their ratio makes them alike.
            let exponent = ((q / k).log2() / 4.0).round();
            exponent.clamp(-LARGEST, LARGEST).exp2() as f32
        } else {
            1.0
        }
    };
    (0..k.len()).map(factor).collect()
}

/// The dimension that is rotated with dimension `i`; `i` itself if none is.
fn partner(rope: Option<&Rope>, i: usize) -> usize {
    match rope {
        Some(rope) if i < rope.n_dims / 2 * 2 => match rope.order {
            RopeOrder::Norm => i ^ 1,
            RopeOrder::NeoX => (i + rope.n_dims / 2) % (rope.n_dims / 2 * 2),
        },
        _ => i,
    }
}

#[cfg(test)]
mod tests {
    use crate::layers::attention::balance::*;
    use crate::layers::rope::spec::RopeScaling;

    fn rope(order: RopeOrder, n_dims: usize) -> Rope {
        Rope {
            order,
            n_dims,
            theta: 10_000.0,
            scaling: RopeScaling::None,
            n_ctx_orig: 64,
            attn_factor: 1.0,
            factors: false,
            yarn_magnitude: false,
            sections: None,
        }
    }

    #[test]
    fn pairs_have_one_factor_and_come_to_like_sizes() {
        let q: [f32; 8] = [1.0, 0.5, 2.0, 1.0, 1.0, 0.5, 0.0, 1.0];
        let k: [f32; 8] = [16.0, 0.5, 2.0, 0.3, 16.0, 0.5, 9.0, 4.0];
        // Pairs (0, 2), (1, 3); (0, 1), (2, 3); the rest are alone.
        let half = rope(RopeOrder::NeoX, 4);
        assert_eq!(
            factors(&q, &k, Some(&half)),
            [0.5, 1.0, 0.5, 1.0, 0.25, 1.0, 1.0, 0.5]
        );
        let neighbours = rope(RopeOrder::Norm, 4);
        assert_eq!(
            factors(&q, &k, Some(&neighbours)),
            [0.25, 0.25, 1.0, 1.0, 0.25, 1.0, 1.0, 0.5]
        );
        assert_eq!(
            factors(&q, &k, None),
            [0.25, 1.0, 1.0, 2.0, 0.25, 1.0, 1.0, 0.5]
        );
    }

    #[test]
    fn factors_are_bounded_and_rotated_pairs_are_a_permutation() {
        assert_eq!(
            factors(&[1e-30, 1e30], &[1e30, 1e-30], None),
            [1.0 / 32.0, 32.0]
        );
        for order in [RopeOrder::Norm, RopeOrder::NeoX] {
            let rope = rope(order, 6);
            for i in 0..10 {
                let other = partner(Some(&rope), i);
                assert_eq!(partner(Some(&rope), other), i);
                assert_eq!(other == i, i >= 6);
            }
        }
    }
}
