//! The groups of positions with the largest scores.

use std::cmp::Ordering;

/// Writes the positions of the best `n_best` of `n_groups` groups, of `n_group` positions each, and
/// those behind the last group up to `end`, to `positions` in ascending order; returns their number.
/// Among equal scores earlier groups are better; NaN is less than any number.
pub(crate) fn choose(
    positions: &mut [u32],
    (n_groups, n_best, n_group, end): (usize, usize, usize, usize),
    score: impl Fn(u32) -> f32,
) -> usize {
    let score = |group: u32| {
        let score = score(group);
        if score.is_nan() {
            f32::NEG_INFINITY
        } else {
            score
        }
    };
    // Whether a group is worse than another.
    let is_worse = |a: u32, b: u32| match score(a).partial_cmp(&score(b)) {
        Some(Ordering::Less) => true,
        Some(Ordering::Greater) => false,
        _ => a > b,
    };
    // A heap of the best groups so far, the worst of them first.
    let heap = &mut positions[..n_best];
    heap.iter_mut().zip(0..).for_each(|(to, group)| *to = group);
    (0..n_best / 2).rev().for_each(|i| sift(heap, i, &is_worse));
    for group in n_best as u32..n_groups as u32 {
        if is_worse(heap[0], group) {
            heap[0] = group;
            sift(heap, 0, &is_worse);
        }
    }
    heap.sort_unstable();
    // Groups become positions, the last first: they need more room.
    for i in (0..n_best).rev() {
        let first = positions[i] * n_group as u32;
        for (to, position) in positions[i * n_group..][..n_group].iter_mut().zip(first..) {
            *to = position;
        }
    }
    let rest = (n_groups * n_group).min(end) as u32..end as u32;
    // The last group may go beyond the end.
    let n = positions[..n_best * n_group].partition_point(|&position| position < end as u32);
    positions[n..]
        .iter_mut()
        .zip(rest.clone())
        .for_each(|(to, position)| *to = position);
    n + rest.len()
}

/// Moves item `i` of a heap down to its place.
fn sift(heap: &mut [u32], mut i: usize, is_worse: &impl Fn(u32, u32) -> bool) {
    loop {
        let mut worst = i;
        for child in [2 * i + 1, 2 * i + 2] {
            if child < heap.len() && is_worse(heap[child], heap[worst]) {
                worst = child;
            }
        }
        if worst == i {
            return;
        }
        heap.swap(i, worst);
        i = worst;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_groups_in_their_order() {
        let scores = [0.5, 2.0, f32::NAN, 1.0, 2.0, -1.0, 1.0];
        let mut positions = [0; 16];
        let n = choose(&mut positions, (7, 3, 1, 7), |i| scores[i as usize]);
        assert_eq!(positions[..n], [1, 3, 4]);
        let n = choose(&mut positions, (7, 6, 1, 7), |i| scores[i as usize]);
        assert_eq!(positions[..n], [0, 1, 3, 4, 5, 6]);
    }

    #[test]
    fn groups_and_what_is_behind_the_last() {
        let scores = [0.5, 2.0, 1.0];
        let mut positions = [0; 16];
        let n = choose(&mut positions, (3, 2, 4, 14), |i| scores[i as usize]);
        assert_eq!(positions[..n], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
        let n = choose(&mut positions, (3, 2, 4, 10), |i| scores[i as usize]);
        assert_eq!(positions[..n], [4, 5, 6, 7, 8, 9]);
    }
}
